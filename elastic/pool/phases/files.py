"""A phases file: says which functions of a program are which phases, without a change to the program.

    [phases]
    "grpo:rollout" = "rollout"
    "grpo:Trainer.update" = { phase = "train", state = ["self.model", "self.optimizer"] }
    "lib.loop:forward" = { phase = "train", until = "lib.loop:after_step", state = ["grpo:model"] }
    "lib.loop:backward" = { phase = "train", until = "next" }

Keys are `module:function` or `module:Class.method`; the program's own file is `__main__`. A phase lasts as long as its
function. With `until` it lasts until the named function has returned, or until the `next` phase begins. States are
attributes of the function's parameters (`self.model`) or of modules (`module:name`).
"""

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from elastic.pool.phases import PHASES, PhaseError
from elastic.system.given import read_text

MAIN = "__main__"
KEYS = ("phase", "until", "state", "both")
NEXT = ("", "next")
"""Stands in the place of a function: the phase lasts until the next phase begins."""
WITH_VALUE = frozenset("WX")
"""Options of Python that take a value. The value may be the next argument."""


class PhasesFileError(PhaseError):
    """A phases file cannot be read, or names something that does not exist. The message says which."""


class PhaseTarget(msgspec.Struct, frozen=True):
    """A function (`module`, and `path` within the module) and the phase that it is."""

    module: str
    path: str
    phase: str
    until: tuple[str, str] | None = None
    state: tuple[str, ...] = ()
    both: bool = False

    @property
    def name(self) -> str:
        return f"{self.module}:{self.path}"


class PhasesFile(msgspec.Struct, frozen=True):
    path: Path
    targets: tuple[PhaseTarget, ...]

    def modules(self) -> set[str]:
        """The modules in which a function is wrapped."""
        return {module for module, _ in self.functions()}

    def functions(self) -> set[tuple[str, str]]:
        """All functions that the file names, by module and path."""
        ends = {target.until for target in self.targets if target.until not in (None, NEXT)}
        return {(target.module, target.path) for target in self.targets} | {end for end in ends if end is not None}


def load_phases(path: Path) -> PhasesFile:
    """Read a phases file. Raises `PhasesFileError` if the file is missing or invalid."""
    try:
        raw = tomllib.loads(read_text(path))
    except OSError as error:
        raise PhasesFileError(f"phases file {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise PhasesFileError(f"phases file {path}: no TOML: {error}") from error
    if set(raw) != {"phases"} or not isinstance(raw["phases"], dict) or not raw["phases"]:
        found = ", ".join(raw) or "nothing"
        raise PhasesFileError(
            f"phases file {path}: found {found}; allowed: a table [phases] with at least one function"
        )
    targets = tuple(_target(path, name, value) for name, value in raw["phases"].items())
    if not any(target.phase == "rollout" or target.both for target in targets):
        raise PhasesFileError(f"phases file {path}: no function is the phase 'rollout', with which every step begins")
    return PhasesFile(path, targets)


def wrapped(script: Sequence[str], phases: Path) -> tuple[str, ...]:
    """Return the command line that runs `script` with the file's phases. Raises `PhasesFileError` if `script` is not
    run by Python."""
    at = program_at(script)
    return (*script[:at], "-m", "elastic.pool.phases.run", str(phases), *script[at:])


def program_at(script: Sequence[str]) -> int:
    """Return the index of the program's file, or of `-m`. Raises `PhasesFileError` if Python does not run it."""
    at = 1
    if not script or not Path(script[0]).name.startswith("python"):
        raise _not_python(script)
    while at < len(script) and script[at].startswith("-") and script[at] not in ("-m", "-c", "-"):
        at += 2 if script[at][1:] in WITH_VALUE else 1
    if at >= len(script) or script[at] in ("-c", "-"):
        raise _not_python(script)
    return at


def split(name: str, what: str) -> tuple[str, str]:
    """Split `module:path`. Raises `PhasesFileError`."""
    module, colon, path = name.partition(":")
    if not (colon and all(part.isidentifier() for part in (*module.split("."), *path.split(".")))):
        raise PhasesFileError(f"{what}: found {name!r}; allowed: module:function or module:Class.method")
    return module, path


def _target(file: Path, name: str, value: Any) -> PhaseTarget:
    where = f"phases file {file}: {name!r}"
    module, path = split(name, f"phases file {file}")
    said: Mapping[str, Any] = {"phase": value} if isinstance(value, str) else value
    if not isinstance(said, dict) or "phase" not in said or set(said) - set(KEYS):
        raise PhasesFileError(f"{where}: found {value!r}; allowed: a phase, or a table of {', '.join(KEYS)}")
    if said["phase"] not in PHASES:
        raise PhasesFileError(f"{where}: phase: found {said['phase']!r}; allowed: {', '.join(PHASES)}")
    state, until, both = said.get("state", []), said.get("until"), said.get("both", False)
    if not isinstance(state, list) or not all(isinstance(one, str) and one for one in state):
        raise PhasesFileError(f"{where}: state: found {state!r}; allowed: a list of self.attribute or module:name")
    for one in state:
        if ":" in one:
            split(one, f"{where}: state")
        elif not all(part.isidentifier() for part in one.split(".")):
            raise PhasesFileError(f"{where}: state: found {one!r}; allowed: self.attribute or module:name")
    if not isinstance(both, bool):
        raise PhasesFileError(f"{where}: both: found {both!r}; allowed: true or false")
    if said["phase"] == "sync" and state and not both:
        raise PhasesFileError(f"{where}: a sync phase holds no device: found a state; allowed: none, or both = true")
    if until is not None and not isinstance(until, str):
        raise PhasesFileError(f'{where}: until: found {until!r}; allowed: module:function, or "next"')
    ends = None if until is None else NEXT if until == NEXT[1] else split(until, f"{where}: until")
    return PhaseTarget(module, path, said["phase"], ends, tuple(state), both)


def _not_python(script: Sequence[str]) -> PhasesFileError:
    found = " ".join(script) or "nothing"
    return PhasesFileError(
        f"a phases file goes with a Python program: found {found!r}; allowed: python [options] FILE or -m MODULE, with "
        "its arguments"
    )
