"""`elastic providers list`, `offers` and `prices`: what a configuration's providers are, and what could be had now."""

from collections.abc import Collection, Iterator

import msgspec
from rich.table import Table

from elastic.cli.output import EXIT_FAILED, console, emit
from elastic.compose.plan import RunPlan, asks_a_vendor, resolve
from elastic.config import Config
from providers.base import CapacityNow, Examination


class Section(msgspec.Struct, frozen=True, kw_only=True):
    """A section of the configuration."""

    provider: str
    kind: str
    max_workers: int
    gpus_per_worker: int
    usd_per_gpu_hour: float
    asks_a_vendor: bool


def plan_of(config: Config, names: list[str], where: str) -> RunPlan:
    """Return the plan of these providers, or of all that have a section. Raises `ConfigError`."""
    return resolve(config, names or list(config.providers), where)


def examined(plan: RunPlan, names: Collection[str] | None = None) -> Iterator[tuple[str, Examination]]:
    """Ask each vendor of these providers. Blocks for some seconds each."""
    for name, settings in plan.providers.items():
        if names is not None and name not in names:
            continue
        examine = getattr(plan.provider_types[name], "examine", None)
        if examine is not None:
            yield name, examine(name, settings)


def vendor_prices(plan: RunPlan) -> tuple[dict[str, float], list[str]]:
    """Of a GPU for an hour now, by each vendor whose price the settings do not say; and why some is not known.

    Blocks for some seconds each.
    """
    prices: dict[str, float] = {}
    warnings: list[str] = []
    silent = [name for name, settings in plan.providers.items() if not settings.usd_per_gpu_hour]
    for name, examination in examined(plan, silent):
        best = next((one for one in examination.capacity if one.usable), None)
        if best is not None:
            prices[name] = best.usd_per_gpu_hour
            continue
        found = next((f"{one.found}; {one.mend}" for one in examination.findings if not one.ok), "nothing is to be had")
        most = plan.providers[name].usd_per_gpu_hour_most
        instead = "" if most is None else f"; shown is usd_per_gpu_hour_max = ${most:g}"
        warnings.append(f"the price of {name} is not known: {found}{instead}")
    return prices, warnings


def list_command(plan: RunPlan, *, as_json: bool) -> None:
    sections = [
        Section(
            provider=name,
            kind=s.kind,
            max_workers=s.max_workers,
            gpus_per_worker=s.gpus_per_worker,
            usd_per_gpu_hour=s.usd_per_gpu_hour,
            asks_a_vendor=asks_a_vendor(plan, name),
        )
        for name, s in plan.providers.items()
    ]
    if as_json:
        emit({"providers": sections})
        return
    table = Table("provider", "kind", "workers", "GPUs each", "$ per GPU and hour", box=None)
    for one in sections:
        usd = "asked: elastic providers prices" if one.asks_a_vendor else f"{one.usd_per_gpu_hour:g}"
        table.add_row(one.provider, one.kind, str(one.max_workers), str(one.gpus_per_worker), usd)
    console().print(table)


def offers_command(plan: RunPlan, *, prices: bool, as_json: bool) -> int:
    """Print present offers, the best first, or with `prices` all places and prices. Returns the exit code."""
    found = dict(examined(plan))
    if as_json:
        emit({name: {"capacity": _shown(e, prices), "findings": e.findings} for name, e in found.items()})
    else:
        head = ("provider", "place", "$ per GPU and hour", "score", "since (UTC)", "")
        table = Table(*head, box=None)
        for name, examination in found.items():
            for one in _shown(examination, prices):
                score = "" if one.score is None else str(one.score)
                table.add_row(name, one.place, f"{one.usd_per_gpu_hour:.3f}", score, one.since, one.why)
            for finding in examination.findings:
                if not finding.ok:
                    table.add_row(name, f"{finding.what}: {finding.found}", "", "", "", f"hint: {finding.mend}")
        console().print(table)
    return EXIT_FAILED if any(not f.ok for e in found.values() for f in e.findings) else 0


def _shown(examination: Examination, prices: bool) -> list[CapacityNow]:
    return [one for one in examination.capacity if prices or one.usable]
