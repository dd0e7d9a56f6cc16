"""`elastic providers`: what runs on a server have of them, what a configuration's are, and what could be had now."""

from pathlib import Path
from typing import Annotated

import msgspec
import typer

from elastic.cli.capacity import examined, plan_of
from elastic.cli.options import AsJson, gpus_of, names_in
from elastic.cli.output import EXIT_FAILED, console, emit
from elastic.cli.remote import server
from elastic.cli.tables import show_listing
from elastic.cli.whole_help import WholeHelp
from elastic.compose.plan import RunPlan, asks_a_vendor
from elastic.config import load_config
from elastic.protocol.api import ProviderChange
from providers.base import CapacityNow, Examination

providers = typer.Typer(cls=WholeHelp, name="providers", rich_markup_mode=None)
ConfigFile = Annotated[Path, typer.Argument(metavar="CONFIG", help="A run's TOML file.")]
Names = Annotated[
    str, typer.Option("--providers", metavar="NAMES", help="Comma-separated; without any, all that have a section.")
]


class Section(msgspec.Struct, frozen=True, kw_only=True):
    """A section of the configuration."""

    provider: str
    kind: str
    max_workers: int
    gpus_per_worker: int
    usd_per_gpu_hour: float
    asks_a_vendor: bool


def _plan(config: Path, names: str) -> RunPlan:
    return plan_of(load_config(config), names_in(names), str(config))


@providers.callback(invoke_without_command=True)
def list_providers(context: typer.Context, as_json: AsJson = False) -> None:
    """List the kinds of providers on the server, and what its runs have of each.

    Example: elastic providers
    """
    if context.invoked_subcommand is not None:
        return
    with server() as client:
        found = client.providers()
    if as_json:
        emit({"data": [one.model_dump(mode="json", exclude={"settings"}) for one in found]})
        return
    rows = [
        (
            one.id,
            "" if one.gpus is None else str(one.gpus),
            str(one.runs),
            str(one.ready),
            str(one.booting),
            f"{one.usd_per_hour:.2f}",
        )
        for one in found
    ]
    show_listing(("kind", "GPUs to share", "runs", "ready", "booting", "$/h"), rows)


@providers.command("list")
def list_sections(config: ConfigFile, names: Names = "", as_json: AsJson = False) -> None:
    """List a configuration's providers: their kinds, and what they may hold at once.

    Example: elastic providers list examples/frozenlake.toml
    """
    plan = _plan(config, names)
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
    rows = [
        (
            one.provider,
            one.kind,
            str(one.max_workers),
            str(one.gpus_per_worker),
            "asked: elastic providers prices" if one.asks_a_vendor else f"{one.usd_per_gpu_hour:g}",
        )
        for one in sections
    ]
    show_listing(("provider", "kind", "workers", "GPUs each", "$ per GPU and hour"), rows)


@providers.command()
def offers(config: ConfigFile, names: Names = "", as_json: AsJson = False) -> int:
    """Ask the clouds of a configuration what could be had now, the best first. Nothing is ordered.

    Example: elastic providers offers clouds.toml --providers ec2
    """
    return _print_offers(_plan(config, names), prices=False, as_json=as_json)


@providers.command()
def prices(config: ConfigFile, names: Names = "", as_json: AsJson = False) -> int:
    """Ask the clouds of a configuration for their prices now, those above its limits too.

    Example: elastic providers prices clouds.toml --providers ec2
    """
    return _print_offers(_plan(config, names), prices=True, as_json=as_json)


@providers.command()
def capacity(
    wanted: Annotated[
        str, typer.Argument(metavar="KIND=GPUS", help="Such as spot-replay=16, or spot-replay=none for no limit.")
    ],
    as_json: AsJson = False,
) -> None:
    """Say how many GPUs of a kind there are for all runs of the server: they share them by their projects' weights.

    Example: elastic providers capacity spot-replay=16
    """
    kind, gpus = gpus_of("elastic providers capacity", wanted)
    with server() as client:
        provider = client.change_provider(kind, ProviderChange(gpus=gpus))
    if as_json:
        emit(provider.model_dump(mode="json", exclude={"settings"}))
    else:
        words = "as many GPUs as there are" if gpus is None else f"{gpus} GPUs"
        console().print(f"all runs together hold {words} of {kind}", highlight=False)


def _print_offers(plan: RunPlan, *, prices: bool, as_json: bool) -> int:
    """Print present offers, the best first, or with `prices` all places and prices. Returns the exit code."""
    found = dict(examined(plan))
    if as_json:
        emit({name: {"capacity": _shown(e, prices), "findings": e.findings} for name, e in found.items()})
    else:
        rows: list[tuple[str, ...]] = []
        for name, examination in found.items():
            for one in _shown(examination, prices):
                score = "" if one.score is None else str(one.score)
                rows.append((name, one.place, f"{one.usd_per_gpu_hour:.3f}", score, one.since, one.why))
            rows += [
                (name, f"{finding.what}: {finding.found}", "", "", "", f"hint: {finding.mend}")
                for finding in examination.findings
                if not finding.ok
            ]
        show_listing(("provider", "place", "$ per GPU and hour", "score", "since (UTC)", ""), rows)
    return EXIT_FAILED if any(not f.ok for e in found.values() for f in e.findings) else 0


def _shown(examination: Examination, prices: bool) -> list[CapacityNow]:
    return [one for one in examination.capacity if prices or one.usable]
