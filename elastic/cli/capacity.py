"""What a configuration's providers say of what could be had now."""

from collections.abc import Collection, Iterator

from elastic.compose.plan import RunPlan, resolve
from elastic.config import Config
from providers.base import Examination


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
    """Return the price of a GPU-hour now at each vendor whose price the settings do not say, and why a price is not
    known.

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
