"""The trainer's checkpoint: its tensors, its counters, and a digest of everything.

That of one rank is a safetensors file, with counters and digests as JSON in its header; that of several ranks a
directory (`checkpoint_shards`). Either is there complete or not at all, and any number of ranks reads either.
What is read is what was written, bit for bit, or it is refused by name.
"""

import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol, TypeVar

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from elastic.engine.model.stored import CheckpointError, check_shapes
from elastic.system.cores import cores
from elastic.system.files import replace_durably, sync
from elastic.worker.trainer import soundness
from elastic.worker.trainer.base import UNFINISHED_PREFIX, remove_saved
from elastic.worker.trainer.ranks import ALONE, Ranks
from elastic.worker.trainer.soundness import (
    DIGESTS_KEY,
    HEADER_FILE,
    HEADER_KEY,
    StoredFile,
    StoredFiles,
    StoredParts,
    check_digests,
)

T = TypeVar("T")

SCHEMA_VERSION = 2

MASTER = "master."
"""Before the names of the weights that are trained."""
KINDS = (MASTER, "exp_avg.", "exp_avg_sq.")
"""Before the names of all that is kept of them."""


class Counters(msgspec.Struct, frozen=True, kw_only=True):
    """Where the training stands: the weights version, the optimiser updates made so far, and what the last step was.

    `source` is the offer that the version is of, where others train.
    """

    version: int
    updates: int
    metrics: dict[str, float] = {}
    source: str = ""
    schema_version: int = SCHEMA_VERSION


class StoredState(StoredParts, Protocol):
    """What lies at a checkpoint's path, with its tensors."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Return the shapes of its whole tensors."""
        ...

    def load(self, names: Sequence[str], ranks: Ranks) -> dict[str, Tensor]:
        """Each rank's rows of these tensors, on the CPU; all ranks call this."""
        ...


class _StoredFile(StoredFile):
    def load(self, names: Sequence[str], ranks: Ranks) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        with safe_open(self._path, framework="pt") as file:
            for name in names:
                if ranks.size == 1 or not self.shapes[name]:
                    found[name] = file.get_tensor(name)
                else:
                    share = ranks.shares(self.shapes[name][0])[ranks.rank]
                    found[name] = file.get_slice(name)[share.start : share.stop]
        return found


def write(
    path: Path,
    tensors: Mapping[str, Tensor],
    counters: Counters,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
    ranks: Ranks = ALONE,
) -> None:
    """Replace `path`, durably: a crash leaves no half of it. Raises `CheckpointError`.

    Several ranks call this together, each with its own rows of tensors of these `shapes`. Of those that are apart the
    first one writes everything.
    """
    if ranks.size == 1:
        _write_file(path, tensors, counters)
        return
    from elastic.worker.trainer.checkpoint_shards import collected, save_shards, save_whole

    if not ranks.apart:
        write_directory(path, counters, ranks, lambda unfinished: save_shards(unfinished, tensors, shapes or {}, ranks))
        return
    whole = collected(tensors, shapes or {}, ranks)

    def write_whole() -> None:
        if ranks.rank == 0:
            write_directory(path, counters, ALONE, lambda unfinished: save_whole(unfinished, whole))

    _on_all(path, "written", ranks, write_whole)


def write_directory(path: Path, counters: Counters, ranks: Ranks, save: Callable[[Path], None]) -> None:
    """Replace `path` by a directory to which each rank `save`s its part, durably: a crash leaves no half of it.

    All ranks call this together. Raises `CheckpointError`.
    """
    unfinished = path.with_name(f"{UNFINISHED_PREFIX}{path.name}")

    def begin() -> None:
        if ranks.rank == 0:
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir(parents=True)

    def own_digests() -> str:
        files = sorted(unfinished.iterdir())
        return msgspec.json.encode({file.name: digest_of(file) for file in files[ranks.rank :: ranks.size]}).decode()

    def end() -> None:
        if ranks.rank == 0:
            header = unfinished / HEADER_FILE
            header.write_bytes(msgspec.json.encode(_header(counters, digests)))
            sync(header)
            sync(unfinished)
            remove_saved(path)
            replace_durably(unfinished, path)

    try:
        _on_all(path, "written", ranks, begin)
        _on_all(path, "written", ranks, lambda: save(unfinished))
        said = ranks.texts(_on_all(path, "written", ranks, own_digests))
        digests = {name: one for each in said for name, one in msgspec.json.decode(each, type=dict[str, str]).items()}
        _on_all(path, "written", ranks, end)
    except CheckpointError:
        if ranks.rank == 0:
            shutil.rmtree(unfinished, ignore_errors=True)
        raise


def _write_file(path: Path, tensors: Mapping[str, Tensor], counters: Counters) -> None:
    contiguous = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
    with ThreadPoolExecutor(cores()) as executor:
        digests = dict(zip(contiguous, executor.map(digest_of, contiguous.values()), strict=True))

    def replace() -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=UNFINISHED_PREFIX) as directory:
            unfinished = Path(directory, path.name)
            save_file(contiguous, unfinished, metadata=_header(counters, digests))
            sync(unfinished)
            replace_durably(unfinished, path)

    _on_all(path, "written", ALONE, replace)


def sweep(directory: Path) -> None:
    """Remove what a process left that was killed while it wrote; nobody may be writing now."""
    for left_over in directory.glob(f"{UNFINISHED_PREFIX}*"):
        shutil.rmtree(left_over, ignore_errors=True)


def masters(path: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield a checkpoint's weights by name, as they were written. Raises `CheckpointError`."""

    def found() -> dict[str, Tensor]:
        state = _opened(path)
        check_digests(path, state, state.parts())
        return state.load([name for name in state.shapes if name.startswith(MASTER)], ALONE)

    for name, tensor in _on_all(path, "read", ALONE, found).items():
        yield name.removeprefix(MASTER), tensor


def check_header(path: Path, weights: Mapping[str, tuple[int, ...]]) -> None:
    """A checkpoint's counters can be read, and its tensors are masters and moments of these weights.

    Reads no tensor. Raises `CheckpointError`.
    """
    expected = {f"{kind}{name}": shape for kind in KINDS for name, shape in weights.items()}
    _on_all(path, "read", ALONE, lambda: _fitting(path, expected))


def read(
    path: Path, expected: Mapping[str, tuple[int, ...]], ranks: Ranks = ALONE
) -> tuple[dict[str, Tensor], Counters]:
    """CPU tensors, exactly those of `expected` by name and shape, and the counters, all as they were written.

    Several ranks call this together, and each has its own rows. Raises `CheckpointError`, then on all of them.
    """

    def verified() -> tuple[StoredState, Counters]:
        state, counters = _fitting(path, expected)
        check_digests(path, state, state.parts()[ranks.rank :: ranks.size])
        return state, counters

    state, counters = _on_all(path, "read", ranks, verified)
    return _on_all(path, "read", ranks, lambda: state.load(list(expected), ranks)), counters


def read_all(path: Path) -> tuple[dict[str, Tensor], Counters]:
    """All tensors of a checkpoint and its counters, as they were written. Raises `CheckpointError`."""

    def found() -> tuple[dict[str, Tensor], Counters]:
        state = _opened(path)
        check_digests(path, state, state.parts())
        return state.load(list(state.shapes), ALONE), _counters(path, state.header)

    return _on_all(path, "read", ALONE, found)


def read_directory(path: Path, ranks: Ranks = ALONE) -> Counters:
    """The counters of a directory whose files are all as they were written. Raises `CheckpointError`.

    Several ranks call this together, and each looks at some of the files.
    """

    def verified() -> Counters:
        state = StoredFiles(path)
        check_digests(path, state, state.parts()[ranks.rank :: ranks.size])
        return _counters(path, state.header)

    return _on_all(path, "read", ranks, verified)


def counters_of(path: Path) -> Counters:
    """The counters of a directory, whatever its files are like by now. Raises `CheckpointError`."""
    return _on_all(path, "read", ALONE, lambda: _counters(path, StoredFiles(path).header))


def _on_all(path: Path, what: str, ranks: Ranks, work: Callable[[], T]) -> T:
    """Do this on each rank. Where it fails on one, it raises `CheckpointError` on all of them."""
    found: list[T] = []
    why = ""
    try:
        found.append(work())
    except CheckpointError as error:
        why = str(error)
    except (OSError, SafetensorError, msgspec.DecodeError, UnicodeDecodeError) as error:
        why = f"{path}: cannot be {what} ({error})"
    if why := next((one for one in ranks.texts(why) if one), ""):
        raise CheckpointError(why)
    return found[0]


def _fitting(path: Path, expected: Mapping[str, tuple[int, ...]]) -> tuple[StoredState, Counters]:
    state = _opened(path)
    counters = _counters(path, state.header)
    check_shapes(path, state.shapes, expected)
    return state, counters


def _opened(path: Path) -> StoredState:
    if path.is_dir():
        from elastic.worker.trainer.checkpoint_shards import StoredDirectory

        return StoredDirectory(path)
    return _StoredFile(path)


def _header(counters: Counters, digests: Mapping[str, str]) -> dict[str, str]:
    encoded = msgspec.json.encode(counters)
    every = {**digests, HEADER_KEY: digest_of(encoded)}
    return {HEADER_KEY: encoded.decode(), DIGESTS_KEY: msgspec.json.encode(every).decode()}


def _counters(path: Path, header: Mapping[str, str]) -> Counters:
    try:
        counters = msgspec.json.decode(header[HEADER_KEY], type=Counters)
    except (KeyError, msgspec.DecodeError) as error:
        raise CheckpointError(f"{path}: not a trainer's checkpoint ({error})") from error
    if counters.schema_version != SCHEMA_VERSION:
        found = counters.schema_version
        raise CheckpointError(f"{path}: schema version {found}; this program reads {SCHEMA_VERSION}")
    return counters


def digest_of(data: bytes | Tensor | Path) -> str:
    """The digest of bytes, of a CPU tensor's, or of a file's."""
    if isinstance(data, Tensor):
        return soundness.digest_of(data.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return soundness.digest_of(data)
