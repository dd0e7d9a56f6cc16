"""Which files of a job nodes on other machines are sent, and where a process there finds them.

What a key of the configuration names belongs in a directory of that key's name.
"""

import functools
import itertools
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import structlog

from elastic.config import Config, ConfigError
from elastic.core.cluster.types import PhaseKind
from elastic.engine.base import RolloutEngine
from elastic.pool.file_exchange import PART
from elastic.pool.job_files import (
    SCRIPT_LOG,
    SubmittedFile,
    check_path,
    files_below,
    named_files,
    submitted_file,
    unchanged,
)
from elastic.pool.messages import FILES_VARIABLE, JobFile
from elastic.pool.pool_files import FREE_BYTES_MIN
from elastic.pool.ports import JobEntry
from elastic.protocol.best_checkpoint import best_kept
from elastic.protocol.wire import Welcome
from elastic.runtime.journal import CONFIG
from elastic.runtime.states import CHECKPOINTS, KEEP
from elastic.system.named_code import in_file
from elastic.worker.agent import build_engine
from elastic.worker.trainer.base import UNFINISHED_PREFIX, remove_saved, saved
from elastic.worker.trainer.soundness import damage

log = structlog.get_logger(__name__)

GB = 1_000_000_000
POLICY_BYTES_MAX, SCRIPT_BYTES_MAX = 4_000 * GB, GB
POLICY, REFERENCE, LOSS, BASE = "model.checkpoint", "trainer.reference", "trainer.loss", "engine.vllm.base"
PHASES_FILE = "elastic-phases.toml"
OUTPUTS = "outputs"
"""The directory of a pool with what its scripts have put out on other machines: by job and placement."""
INCOMING = f"{UNFINISHED_PREFIX}incoming"
_RETURNED = re.compile(
    rf"{CHECKPOINTS}/[0-9]{{8}}\.(safetensors|shards/(\.metadata|[A-Za-z0-9_][A-Za-z0-9._-]{{0,199}}))"
)


def run_files(config: Config) -> tuple[SubmittedFile, ...]:
    """Read the files that a run's configuration names and its residents need. Blocks. Raises `ConfigError`."""
    named: dict[str, Path | None] = {POLICY: config.model.checkpoint, REFERENCE: config.trainer.reference, BASE: None}
    if base := config.engine.sections.get("vllm", {}).get("base"):
        named[BASE] = Path(base)
    found: list[SubmittedFile] = []
    if (code := in_file(config.trainer.loss)) is not None:
        named[LOSS] = Path(code.place)
    for key, place in named.items():
        if place is not None:
            path = key if key != LOSS else f"{key}/{place.name}"
            try:
                found += files_below(place.resolve(), path, POLICY_BYTES_MAX, follow=True)
            except ValueError as error:
                raise ConfigError(f"{key}: {error}") from error
    return tuple(found)


def script_files(root: Path, names: Sequence[str], phases: Path | None) -> tuple[SubmittedFile, ...]:
    """Read what is named of a script's directory, else all of it, and its phases file. Blocks. Raises `ConfigError`."""
    try:
        found = named_files(root, names, SCRIPT_BYTES_MAX)
    except ValueError as error:
        raise ConfigError(f"job.files: {error}; the pool's nodes on other machines are sent what is named") from error
    return tuple(found) if phases is None else (*found, submitted_file(phases.resolve(), PHASES_FILE))


def files_of(entry: JobEntry, phase: PhaseKind) -> Sequence[SubmittedFile]:
    """Return what a resident of a job needs for a phase: a trainer also its run's configuration and last checkpoint, as
    they are now. Blocks. Raises `ValueError` for what is not as submitted."""
    if entry.script:
        needed = [*entry.files]
    else:
        needed = [one for one in entry.files if (one.file.path.split("/")[0] == BASE) is (phase is PhaseKind.ROLLOUT)]
    needed = unchanged(needed)
    if phase is PhaseKind.TRAIN and not entry.script:
        run_dir = Path(entry.directory)
        needed.append(submitted_file(run_dir / CONFIG, CONFIG))
        needed += _last_checkpoint(run_dir)
    return needed


def _last_checkpoint(run_dir: Path) -> Sequence[SubmittedFile]:
    """Return the files of the newest checkpoint that is as it was written and may be sent; of all that a trainer keeps
    if none is, so that it says what is wrong with each. Blocks. Raises `ValueError` where one of these cannot be read.
    """
    found: list[SubmittedFile] = []
    wrong, all_read = list[str](), True
    for path in reversed(saved(run_dir / CHECKPOINTS)[-KEEP:]):
        try:
            its = files_below(path, f"{CHECKPOINTS}/{path.name}", POLICY_BYTES_MAX, follow=False, hidden=True)
            if not (why := damage(path)):
                return its
            found += its
        except ValueError as error:
            why, all_read = str(error), False
        log.warning("a checkpoint of a job is damaged", damage=why)
        wrong.append(why)
    if not all_read:
        raise ValueError("; ".join(wrong))
    return found


def local_places(variables: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the values here of configuration's keys that name files of a job which were sent to this machine."""
    root = variables.get(FILES_VARIABLE, "")
    if not root:
        return {}
    return {key: str(Path(root) / key) for key in (POLICY, REFERENCE, LOSS, BASE) if (Path(root) / key).is_dir()}


def engine_here(welcome: Welcome) -> RolloutEngine:
    """Build the engine that the orchestrator asks for, with the base of adapters that was sent to this machine, if any.
    Blocks."""
    if (base := local_places().get(BASE)) is not None:
        own = {**welcome.engine.get("vllm", {}), "base": base}
        welcome = msgspec.structs.replace(welcome, engine={**welcome.engine, "vllm": own})
    return build_engine(welcome)


def trainer_overrides(config: Config, places: Mapping[str, str]) -> list[str]:
    """Return the changes by which a trainer finds what was sent to its machine."""
    changes = {key: places[key] for key in (POLICY, REFERENCE) if key in places}
    if LOSS in places and (code := in_file(config.trainer.loss)) is not None:
        changes[LOSS] = str(code._replace(place=str(Path(places[LOSS]) / Path(code.place).name)))
    return [f"{key}={value}" for key, value in changes.items()]


def lacking(entry: JobEntry, files: Sequence[JobFile]) -> Sequence[tuple[JobFile, Path]]:
    """Return which files of a trainer's checkpoints are not here, each with where to put what is fetched of it. Blocks.
    Raises `ValueError` for what is in no checkpoint, and for more than the disk has room for."""
    incoming = Path(entry.directory) / CHECKPOINTS / INCOMING
    if len({file.path for file in files}) != len(files):
        raise ValueError("a trainer keeps one file of a path; found several")
    found: list[tuple[JobFile, Path]] = []
    for file in files:
        if entry.script or not _RETURNED.fullmatch(file.path):
            raise ValueError(f"a trainer keeps checkpoints, and no {file.path!r}")
        if _digest_at(Path(entry.directory) / file.path) != file.digest and not (incoming / file.digest).is_file():
            found.append((file, incoming / file.digest))
    needed, room = sum(file.size_bytes for file, _ in found), _room(incoming, found)
    if needed > room:
        raise ValueError(
            f"a trainer's checkpoints take {needed} bytes, and the disk of {incoming.parent} has room for {room}; "
            f"{FREE_BYTES_MIN} stay free"
        )
    return found


def _room(incoming: Path, lacking: Sequence[tuple[JobFile, Path]]) -> int:
    """Return for how many bytes of lacking files the directory to which they are fetched has room, with what came of
    them in part. It is made if there are any; parts of other files go."""
    if not lacking:
        return 0
    incoming.mkdir(mode=0o700, parents=True, exist_ok=True)
    came, wanted = 0, {f"{file.digest}{PART}" for file, _ in lacking}
    for part in incoming.glob(f"*{PART}"):
        if part.name in wanted:
            came += part.stat().st_size
        else:
            part.unlink()
    return max(0, shutil.disk_usage(incoming).free + came - FREE_BYTES_MIN)


def keep(entry: JobEntry, files: Sequence[JobFile]) -> Sequence[str]:
    """Give fetched checkpoints their names, and remove older ones that their trainer does not keep any more, but the
    best. Returns the digests of all. Blocks. Raises `OSError`."""
    directory = Path(entry.directory) / CHECKPOINTS
    of_checkpoint: dict[Path, list[JobFile]] = {}
    for file in files:
        of_checkpoint.setdefault(directory / file.path.split("/")[1], []).append(file)
    for path, its in of_checkpoint.items():
        if all(_digest_at(Path(entry.directory) / file.path) == file.digest for file in its):
            continue
        draft = directory / f"{UNFINISHED_PREFIX}{path.name}"
        remove_saved(draft)
        for file in its:
            target = draft / Path(file.path).name if path.suffix == ".shards" else draft
            target.parent.mkdir(mode=0o700, exist_ok=True)
            known = Path(entry.directory) / file.path
            os.link(known if _digest_at(known) == file.digest else directory / INCOMING / file.digest, target)
        remove_saved(path)
        draft.replace(path)
    best = best_kept(directory)
    for path in saved(directory)[:-KEEP]:
        if path not in of_checkpoint and int(path.stem) != best:
            remove_saved(path)
    shutil.rmtree(directory / INCOMING, ignore_errors=True)
    return [file.digest for file in files]


class ScriptOutputs(NamedTuple):
    """What comes back of a start of a script: files below its declared outputs, to `place`, and the end of its log."""

    place: Path
    log: Path
    outputs: Sequence[str]

    def lacking(self, files: Sequence[JobFile]) -> Sequence[tuple[JobFile, Path]]:
        """Return which files are not here, each with where to put what is fetched of it, the smallest first, and only
        as many as the disk has room for. Blocks. Raises `ValueError` for what is in no output."""
        incoming, found = self.place / INCOMING, list[tuple[JobFile, Path]]()
        for file in files:
            if file.path != SCRIPT_LOG and check_path(file.path).split("/")[0] not in self.outputs:
                raise ValueError(f"a script's node gives back its outputs, and no {file.path!r}")
            if _digest_at(self._target(file)) != file.digest and not (incoming / file.digest).is_file():
                found.append((file, incoming / file.digest))
        found.sort(key=lambda one: one[0].size_bytes)
        room = _room(incoming, found)
        there = itertools.accumulate(file.size_bytes for file, _ in found)
        return found[: sum(size_bytes <= room for size_bytes in there)]

    def keep(self, files: Sequence[JobFile]) -> Sequence[str]:
        """Give fetched files their names, and remove what the node has not any more. Returns the digests of those that
        are here. Blocks. Raises `OSError`."""
        incoming, lacking = self.place / INCOMING, set[str]()
        for file in files:
            target = self._target(file)
            if _digest_at(target) == file.digest:
                continue
            if not (incoming / file.digest).is_file():
                lacking.add(file.digest)
                continue
            for parent in [*target.relative_to(self.place).parents][-2::-1] if target != self.log else ():
                if (self.place / parent).is_file():
                    (self.place / parent).unlink()
            target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            if target.is_dir():
                shutil.rmtree(target)
            draft = target.with_name(f"{UNFINISHED_PREFIX}{file.digest}")
            draft.unlink(missing_ok=True)
            os.link(incoming / file.digest, draft)
            draft.replace(target)
        shutil.rmtree(incoming, ignore_errors=True)
        wanted = {self._target(file) for file in files}
        for path in [path for path in self.place.rglob("*") if path.is_file() and path not in wanted]:
            path.unlink()
        return [file.digest for file in files if file.digest not in lacking]

    def _target(self, file: JobFile) -> Path:
        return self.log if file.path == SCRIPT_LOG else self.place / file.path


def _digest_at(path: Path) -> str:
    """Return the digest of a file; empty where there is none. Blocks."""
    try:
        found = path.lstat()
        return _digest(path, found.st_size, found.st_mtime_ns)
    except (OSError, ValueError):
        return ""


@functools.lru_cache(maxsize=4096)
def _digest(path: Path, size_bytes: int, mtime_ns: int) -> str:
    return submitted_file(path, path.name).file.digest
