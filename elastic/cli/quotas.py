"""`elastic projects` and `elastic providers`: what projects may have and spend, and what they share."""

import math
from pathlib import Path
from typing import Annotated, Any

import typer

from elastic.cli import deferred
from elastic.cli.hosted import AsJson, projects
from elastic.cli.whole_help import WholeHelp
from elastic.config import ConfigError

NONE = "none"
"""Lifts a limit."""

_PROVIDERS_HELP = """List the kinds of providers on the server, and what its runs have of each.

Example: elastic providers
"""

providers = typer.Typer(cls=WholeHelp, name="providers", rich_markup_mode=None)
DaysOption = Annotated[str | None, typer.Option(metavar="DAYS", help="Days, or `none`.")]
ProjectName = Annotated[str, typer.Argument(metavar="PROJECT", help="A project's name or id.")]


@projects.command()
def quota(
    project: ProjectName = "default",
    gpus: Annotated[
        list[str] | None,
        typer.Option(metavar="KIND=GPUS", help="GPUs at once of a kind of provider, or of `trainer`; `none` lifts it."),
    ] = None,
    runs: Annotated[str | None, typer.Option(metavar="RUNS", help="Runs at once, or `none`.")] = None,
    usd_per_day: Annotated[str | None, typer.Option(metavar="USD", help="Dollars a day (UTC), or `none`.")] = None,
    budget_usd: Annotated[str | None, typer.Option(metavar="USD", help="Dollars in all, or `none`.")] = None,
    weight: Annotated[
        float | None, typer.Option(min=0.001, max=1000, help="Its part of what projects share, beside their weights.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show what a project may have at once and spend, and what it uses of that; with options, set it.

    Example: elastic projects quota agents --gpus spot-replay=8 --runs 4 --usd-per-day 100
    """
    changes: dict[str, Any] = {}
    if runs is not None:
        changes["runs"] = _whole("--runs", runs)
    if usd_per_day is not None:
        changes["usd_per_day"] = _dollars("--usd-per-day", usd_per_day)
    if budget_usd is not None:
        changes["budget_usd"] = _dollars("--budget-usd", budget_usd)
    if weight is not None:
        changes["weight"] = weight
    deferred.remote_quotas.quota_command(
        project, changes, dict(_pair("--gpus", one) for one in gpus or ()), as_json=as_json
    )


@projects.command()
def retention(
    project: ProjectName = "default",
    server: Annotated[bool, typer.Option("--server", help="The server's, where projects say nothing else.")] = False,
    runs_days: DaysOption = None,
    trajectories_days: DaysOption = None,
    checkpoints_days: DaysOption = None,
    logs_days: DaysOption = None,
    uploads_days: DaysOption = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would go now; nothing is removed.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show for how many days after its end what a run leaves is kept; with options, set it.

    Example: elastic projects retention agents --checkpoints-days 30 --logs-days 14
    """
    said = {
        "runs_days": runs_days,
        "trajectories_days": trajectories_days,
        "checkpoints_days": checkpoints_days,
        "logs_days": logs_days,
        "uploads_days": uploads_days,
    }
    changes = {name: _whole(f"--{name.replace('_', '-')}", days) for name, days in said.items() if days is not None}
    deferred.remote_quotas.retention_command(None if server else project, changes, dry_run=dry_run, as_json=as_json)


@providers.callback(invoke_without_command=True, help=_PROVIDERS_HELP)
def list_providers(context: typer.Context, as_json: AsJson = False) -> None:
    if context.invoked_subcommand is None:
        deferred.remote_quotas.providers_command(as_json=as_json)


ConfigFile = Annotated[Path, typer.Argument(metavar="CONFIG", help="A run's TOML file.")]
Names = Annotated[
    str, typer.Option("--providers", metavar="NAMES", help="Comma-separated; without any, all that have a section.")
]


def _plan(config: Path, names: str) -> Any:
    from elastic.config import load_config

    wanted = [name.strip() for name in names.split(",") if name.strip()]
    return deferred.capacity.plan_of(load_config(config), wanted, str(config))


@providers.command("list")
def list_sections(config: ConfigFile, names: Names = "", as_json: AsJson = False) -> None:
    """List a configuration's providers: their kinds, and what they may hold at once.

    Example: elastic providers list examples/frozenlake.toml
    """
    deferred.capacity.list_command(_plan(config, names), as_json=as_json)


@providers.command()
def offers(config: ConfigFile, names: Names = "", as_json: AsJson = False) -> None:
    """Ask the clouds of a configuration what could be had now, the best first. Nothing is ordered.

    Example: elastic providers offers clouds.toml --providers ec2
    """
    raise typer.Exit(deferred.capacity.offers_command(_plan(config, names), prices=False, as_json=as_json))


@providers.command()
def prices(config: ConfigFile, names: Names = "", as_json: AsJson = False) -> None:
    """Ask the clouds of a configuration for their prices now, those above its limits too.

    Example: elastic providers prices clouds.toml --providers ec2
    """
    raise typer.Exit(deferred.capacity.offers_command(_plan(config, names), prices=True, as_json=as_json))


@providers.command()
def capacity(
    kind: Annotated[
        str, typer.Argument(metavar="KIND=GPUS", help="Such as spot-replay=16, or spot-replay=none: nobody need share.")
    ],
    as_json: AsJson = False,
) -> None:
    """Say how many GPUs of a kind there are for all runs of the server: they share them by their projects' weights.

    Example: elastic providers capacity spot-replay=16
    """
    deferred.remote_quotas.capacity_command(*_pair("elastic providers capacity", kind), as_json=as_json)


def _pair(what: str, said: str) -> tuple[str, int | None]:
    kind, equals, gpus = said.partition("=")
    if not kind or not equals:
        raise ConfigError(f"{what}: found {said!r}; allowed: KIND=GPUS with a whole number or {NONE}: spot-replay=8")
    return kind, _whole(what, gpus)


def _whole(what: str, said: str) -> int | None:
    if said == NONE:
        return None
    if not (said.isdecimal() and said.isascii()):
        raise ConfigError(f"{what}: found {said!r}; allowed: a whole number, or {NONE}")
    return int(said)


def _dollars(what: str, said: str) -> float | None:
    if said == NONE:
        return None
    try:
        usd = float(said.removeprefix("$"))
    except ValueError:
        usd = math.nan
    if not 0 <= usd <= 1e9:
        raise ConfigError(f"{what}: found {said!r}; allowed: dollars such as 12.50, or {NONE}")
    return usd
