"""Options and arguments that several commands take, and what is made of them."""

import math
from pathlib import Path
from typing import Annotated

import typer

from elastic.cli.whole_help import WholeHelp
from elastic.config import ConfigError
from elastic.protocol.run_control import GPUS_MAX, USD_MAX

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output.")]
RunFile = Annotated[Path | None, typer.Argument(metavar="CONFIG", help="The run's TOML file.", show_default=False)]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a key, such as run.steps=10.")
]
BudgetOption = Annotated[
    float | None,
    typer.Option(
        "--budget-usd",
        metavar="USD",
        help="What the run may cost in all, its trainer and functions included: it stops in time (run.budget_usd).",
    ),
]

Remote = Annotated[bool, typer.Option("--remote", help="On the server of `elastic api login`.")]
RunsDirectory = Annotated[Path, typer.Option("--directory", help="Where runs are kept.")]
RunName = Annotated[str, typer.Argument(metavar="RUN", help="A run's name or path, or `latest`.")]
AnyRunName = Annotated[str, typer.Argument(metavar="RUN", help="A run's name or path, its id, or `latest`.")]
CommandIdOption = Annotated[
    str,
    typer.Option(
        "--id", metavar="ID", help="For a run on disk: the command's id; a repetition under it has no effect."
    ),
]
JobCommandIdOption = Annotated[
    str, typer.Option("--id", metavar="ID", help="The command's id, under which it is done once.")
]
PoolsDirectory = Annotated[Path, typer.Option("--directory", help="Where pools are kept.")]
Follow = Annotated[bool, typer.Option("--follow", "-f", help="Wait for more until the run ends; Ctrl-C detaches.")]
Tail = Annotated[int | None, typer.Option("--tail", "-n", min=0, help="Only the last lines.")]
ProjectOption = Annotated[
    str, typer.Option("--project", metavar="NAME", help="A project's name or id; by default the key's project.")
]
RoleOption = Annotated[str, typer.Option(help="viewer, runner or admin.")]

NONE = "none"
"""The word that lifts a limit."""
GIVEN = ("COMMANDLINE", "ENVIRONMENT")
"""The sources of an option's value that mean that the user gave it."""


def group(name: str, words: str) -> typer.Typer:
    """Commands below one name, which says this of itself, also where it is given none of them."""
    return typer.Typer(cls=WholeHelp, name=name, help=words, no_args_is_help=True, rich_markup_mode=None)


def given_name(context: typer.Context, parameter: typer.CallbackParam, name: str) -> str:
    """Return the name of a job or pool as it was given, or empty where none was: then the only one there is is meant.
    Raises `ConfigError` for a name without text, as of a shell's variable that is not set."""
    source = context.get_parameter_source(parameter.name or "")
    if source is not None and source.name in GIVEN and not name.strip():
        raise ConfigError(f"{parameter.metavar}: found {name!r}; allowed: a name")
    return name


def names_in(text: str | None) -> list[str]:
    """The names in a list with commas."""
    return [name.strip() for name in (text or "").split(",") if name.strip()]


def with_seed(overrides: list[str], seed: int | None) -> list[str]:
    """The settings with those of --seed."""
    return overrides if seed is None else [*overrides, f"run.seed={seed}"]


def with_budget(overrides: list[str], usd: float | None) -> list[str]:
    """The settings with those of --budget-usd."""
    return overrides if usd is None else [*overrides, f"run.budget_usd={usd}"]


def gpus_of(what: str, said: str, form: str = "KIND=GPUS", example: str = "spot-replay=8") -> tuple[str, int | None]:
    """A name and its number of GPUs, or None for no limit. Raises `ConfigError`, which names `what` was given it."""
    name, equals, gpus = said.partition("=")
    known = gpus == NONE or (gpus.isdecimal() and gpus.isascii() and int(gpus) <= GPUS_MAX)
    if not (name and equals and known):
        raise ConfigError(f"{what}: found {said!r}; allowed: {form} with a whole number or {NONE}: {example}")
    return name, None if gpus == NONE else int(gpus)


def dollars_of(what: str, said: str) -> float | None:
    """An amount in USD, or None for no limit. Raises `ConfigError`, which names `what` was given it."""
    if said == NONE:
        return None
    try:
        usd = float(said.removeprefix("$"))
    except ValueError:
        usd = math.nan
    if not 0 <= usd <= USD_MAX:
        raise ConfigError(f"{what}: found {said!r}; allowed: dollars such as 12.50, or {NONE}")
    return usd


def refuse_all_but(context: typer.Context, mode: str, *allowed: str) -> None:
    """Refuse options that have no meaning with the option `mode`, so that none is ignored."""
    refused: list[str] = []
    for parameter in context.command.params:
        source = context.get_parameter_source(parameter.name or "")
        is_option = parameter.param_type_name == "option"
        name = parameter.opts[0] if is_option else (parameter.name or "").upper()
        if source is not None and source.name in GIVEN and name not in (mode, *allowed):
            refused.append(name)
    if refused:
        named, do = ", ".join(refused), "does" if len(refused) == 1 else "do"
        raise ConfigError(f"elastic {context.info_name} {mode}: {named} {do} not apply; allowed: {', '.join(allowed)}")
