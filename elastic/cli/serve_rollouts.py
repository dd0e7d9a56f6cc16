"""`elastic serve-rollouts`: trainers of other people have their rollouts here, and offer weights by directories."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from elastic.cli.options import AsJson, BudgetOption, Overrides, names_in, with_budget
from elastic.cli.output import say
from elastic.cli.run import carry_out, check_run, conclude, show_dry_run
from elastic.compose.plan import resolve
from elastic.compose.runs import new_run_dir, private
from elastic.config import (
    DOORS,
    IMPORTED,
    OUTSIDE,
    Config,
    ConfigError,
    apply_override,
    read_sections,
    validate,
)
from elastic.front.doors.access import read_network
from elastic.front.doors.doors import NEED_PLAIN
from elastic.front.doors.roots import read_root
from elastic.protocol.endpoint import Address
from elastic.system.named_code import placed

STEPS = 10**9
"""A step is a version: as good as any number of them."""
OF_TRAINING = ("environment", "environments", "rewards", "evaluation", "seeding")
"""Sections that such a run does not have."""
OPTION_OF = {"names": "--doors", "roots": "--weights-root", "plain": "--plain"}
"""Keys of the section `doors` that options say."""


@private()
def serve_rollouts(
    config: Annotated[
        Path,
        typer.Argument(metavar="CONFIG", help="TOML: model, engine and providers.", show_default=False),
    ],
    providers: Annotated[str, typer.Option(metavar="NAMES", help="Comma-separated: serving,spot.")] = "",
    listen: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Where trainers send requests; beyond loopback by TLS.")
    ] = "127.0.0.1:0",
    weights_root: Annotated[
        list[str] | None,
        typer.Option(
            metavar="DIR",
            help="Folder of the offered weights; THEIRS=OURS where trainers name it otherwise. May be repeated.",
        ),
    ] = None,
    doors: Annotated[str, typer.Option(metavar="NAMES", help=f"Comma-separated, of {', '.join(DOORS)}.")] = "",
    model_name: Annotated[
        str, typer.Option(metavar="NAME", help="What trainers call the model; else its directory's name.")
    ] = "",
    plain: Annotated[
        list[str] | None,
        typer.Option(metavar="CIDR", help="Peers from there need neither TLS nor a key. May be repeated."),
    ] = None,
    overrides: Overrides = None,
    budget_usd: BudgetOption = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be served and acquired.")] = False,
    as_json: AsJson = False,
) -> int:
    """Generate rollouts for other people's trainers, whose weights come as directories.

    Example: elastic serve-rollouts examples/rollouts.toml --providers spot --weights-root /shared/weights
    """
    wanted = {
        "names": names_in(doors) or list(DOORS),
        "roots": weights_root or [],
        "plain": plain or [],
    }
    settings = _served(config, with_budget(overrides or [], budget_usd), listen, model_name, wanted)
    names = names_in(providers)
    for words in _access(settings):
        say(words)
    if dry_run:
        show_dry_run(settings, names, str(config), as_json=as_json)
        return 0
    plan = resolve(settings, names, str(config))
    check_run(plan, str(config))
    run_dir = new_run_dir(settings)
    return carry_out(plan, run_dir, resume=False, then=lambda: conclude(run_dir, as_json=as_json))


def _served(path: Path, overrides: list[str], listen: str, model_name: str, doors: Mapping[str, Any]) -> Config:
    """The configuration of a run that others train. Raises `ConfigError`."""
    _check_doors(doors)
    raw = read_sections(path)
    for override in overrides:
        apply_override(raw, override)
    if said := next((section for section in OF_TRAINING if section in raw), ""):
        raise ConfigError(f"{path}: {said}: found a section of a run that trains; allowed: none, since others train")
    if isinstance(own := raw.get("doors"), Mapping) and (said := next((key for key in own if key in OPTION_OF), "")):
        raise ConfigError(
            f"{path}: doors.{said}: found {own[said]!r}; allowed: nothing, since {OPTION_OF[said]} says it"
        )
    for section, key, allowed in (("rollout", "groups", 0), ("trainer", "kind", IMPORTED)):
        own = raw.get(section, {})
        if isinstance(own, Mapping) and own.get(key, allowed) != allowed:
            raise ConfigError(
                f"{path}: {section}.{key}: found {own[key]!r}; allowed: {allowed!r} or nothing, since others train"
            )
    try:
        host, port = Address.parse(listen)
    except ValueError as error:
        raise ConfigError(f"--listen: {error}, such as 0.0.0.0:8000 or [::]:8000") from None
    roots = [str(read_root(root).ours) for root in doors["roots"]]
    adapts = _adapts(raw)
    front = {"host": host, "port": port, "chats_max": 0} | ({"model_name": model_name} if model_name else {})
    given: dict[str, dict[str, Any]] = {
        "environment": {"kind": OUTSIDE, "name": OUTSIDE},
        "seeding": {"policy": "none"},
        "doors": {**doors, "adapts": adapts},
        "rollout": {"groups": 0},
        "trainer": {
            "kind": IMPORTED,
            IMPORTED: {"roots": roots, "adapters": adapts},
            "checkpoint_every_steps": 1,
        },
        "front": front,
    }
    unless_said: dict[str, dict[str, Any]] = {
        "run": {"steps": STEPS},
        "weights": {"mode": "keep"},
        "trainer": {"usd_per_gpu_hour": 0.0},
    }
    for section in {*given, *unless_said}:
        own = raw.get(section, {})
        if not isinstance(own, Mapping):
            raise ConfigError(f"{path}: {section}: must be a section of keys (found {own!r})")
        raw[section] = {**unless_said.get(section, {}), **own, **given.get(section, {})}
    try:
        raw = placed(raw, path.parent)
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from error
    return validate(Config, raw, str(path))


def _adapts(raw: Mapping[str, Any]) -> bool:
    """Whether adapters are offered, since vLLM has a base."""
    engine = raw.get("engine", {})
    own = engine.get("vllm", {}) if isinstance(engine, Mapping) else {}
    return isinstance(own, Mapping) and own.get("base") is not None


def _check_doors(doors: Mapping[str, Any]) -> None:
    """Raises `ConfigError` for what is no door, no root and no network."""
    if unknown := [name for name in doors["names"] if name not in DOORS]:
        raise ConfigError(f"--doors: found {unknown[0]!r}; allowed: {', '.join(DOORS)}")
    for option, read in (("roots", read_root), ("plain", read_network)):
        for said in doors[option]:
            try:
                read(said)
            except ValueError as error:
                raise ConfigError(f"--{'weights-root' if option == 'roots' else option}: {error}") from None
    for root in doors["roots"]:
        if not (ours := read_root(root).ours).is_dir():
            raise ConfigError(f"--weights-root: found {str(ours)!r}; allowed: a directory that is there")
    if not doors["roots"]:
        raise ConfigError("--weights-root: missing; allowed: the directory below which trainers write their weights")


def _access(settings: Config) -> list[str]:
    """Say which peers may ask without a key, and which cannot ask at all."""
    doors, front = settings.doors, settings.front
    assert doors is not None
    assert front is not None
    said: list[str] = []
    if doors.plain:
        networks = ", ".join(doors.plain)
        said.append(f"peers from {networks} need neither TLS nor a key, and may change the weights that are served")
    if not doors.plain and (shut := [name for name in doors.names if name in NEED_PLAIN]):
        said.append(
            f"{' and '.join(shut)} send no key: name their network by --plain CIDR, or leave them out of --doors"
        )
    return said
