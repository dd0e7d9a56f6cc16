"""Directories of weights as others write them: looked at before anything of them is believed. Nothing of torch."""

from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from elastic.engine.model.stored import (
    CONFIG_FILE,
    INDEX_FILE,
    WEIGHTS_FILE,
    CheckpointError,
    StoredTensor,
    check_not_quantised,
    count_float32,
    misfit,
    read_object,
    stored_tensors,
    weight_files,
)
from elastic.worker.trainer.base import OfferRefused, StoredPolicy

TYPES = ("BF16", "F32")
"""The types of weights that travel as they are."""
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
"""How the files of weights end that no importer reads."""


class FileState(NamedTuple):
    """What shows that a file was written again."""

    inode: int
    size_bytes: int
    modified_ns: int

    @classmethod
    def of(cls, path: Path) -> "FileState":
        """Raises `OSError`."""
        found = path.stat()
        return cls(found.st_ino, found.st_size, found.st_mtime_ns)


class OfferedFiles(NamedTuple):
    """What the headers of a directory's files say, and how each file was found; the index of several says which has
    what."""

    tensors: Mapping[str, StoredTensor]
    files: Mapping[Path, FileState]
    index_file: Path | None = None

    @classmethod
    def of(cls, directory: Path) -> "OfferedFiles":
        """Raises `CheckpointError`, and `OSError`."""
        files = {path: FileState.of(path) for path in weight_files(directory)}
        index = None if directory / WEIGHTS_FILE in files else directory / INDEX_FILE
        return cls(stored_tensors(directory), files, index)

    def check(self) -> None:
        """Raises `OfferRefused` if a file was written again since."""
        for path, state in self.files.items():
            try:
                same = FileState.of(path) == state
            except OSError:
                same = False
            if not same:
                raise OfferRefused(f"{path}: was written again, or removed, while it was read", again=True)


def examined(directory: Path) -> StoredPolicy:
    """How a base policy is stored, whose versions are to be imported. Raises `CheckpointError`."""
    raw = read_object(directory / CONFIG_FILE)
    check_not_quantised(directory / CONFIG_FILE, raw)
    stored = stored_tensors(directory)
    for name, tensor in stored.items():
        if tensor.type not in TYPES:
            raise CheckpointError(f"{directory}: {name}: found {tensor.type}; allowed: {', '.join(TYPES)}")
    vocab_size = _vocabulary(raw)
    if vocab_size is None:
        raise CheckpointError(f"{directory / CONFIG_FILE}: vocab_size: missing; allowed: a number")
    parameters = sum(prod(tensor.shape) for tensor in stored.values())
    return StoredPolicy(vocab_size, parameters, count_float32(stored))


def _vocabulary(raw: Mapping[str, Any]) -> int | None:
    nested = raw.get("text_config")
    found = raw.get("vocab_size", nested.get("vocab_size") if isinstance(nested, dict) else None)
    return found if isinstance(found, int) else None


def look_at(directory: Path, roots: Sequence[Path], expected: Mapping[str, StoredTensor]) -> OfferedFiles:
    """What is in an offered directory, which has the base policy's names, shapes and types. Raises `OfferRefused`."""
    place = below(directory, roots)
    if not place.is_dir():
        raise OfferRefused(f"{directory}: found no directory there; allowed: one with weights")
    try:
        for path in weight_files(place):
            below(path, roots)
        offered = OfferedFiles.of(place)
    except CheckpointError as error:
        raise OfferRefused(f"{error}{pickles_in(place)}") from error
    except OSError as error:
        raise OfferRefused(f"{directory}: cannot be read ({error.strerror or error})", again=True) from error
    if (why := unfit(offered.tensors, expected)) is not None:
        raise OfferRefused(f"{directory}: is not of the model that is served: {why}")
    return offered


def below(path: Path, roots: Sequence[Path]) -> Path:
    """Where the path leads, which is below one of the roots. Raises `OfferRefused`."""
    try:
        place = path.resolve(strict=True)
    except (OSError, RuntimeError) as error:
        said = getattr(error, "strerror", None) or error
        raise OfferRefused(f"{path}: is not there ({said})") from error
    if not any(place.is_relative_to(root.resolve()) for root in roots):
        allowed = ", ".join(map(str, roots)) or "nothing: the run has no --weights-root"
        raise OfferRefused(f"{path}: leads to {place}, which is below no root of weights; allowed: below {allowed}")
    return place


def pickles_in(directory: Path) -> str:
    found = sorted(path.name for path in directory.iterdir() if path.suffix in PICKLES)
    return f"; found {found[0]}, and pickles are never read: write safetensors" if found else ""


def unfit(found: Mapping[str, StoredTensor], expected: Mapping[str, StoredTensor]) -> str | None:
    """The first tensor that differs in name, shape or type; None where all are the same."""
    shapes, wanted = ({name: tensor.shape for name, tensor in of.items()} for of in (found, expected))
    if (why := misfit(shapes, wanted)) is not None:
        return why
    odd = next((name for name, tensor in found.items() if tensor.type != expected[name].type), None)
    return odd and f"{odd}: expected {expected[odd].type}, found {found[odd].type}"
