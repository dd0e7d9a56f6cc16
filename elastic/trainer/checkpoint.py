"""The trainer's checkpoint: one safetensors file, its counters as JSON in the header."""

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

import msgspec
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from elastic.model.checkpoint import CheckpointError

SCHEMA_VERSION = 1

_HEADER_KEY = "elastic_trainer"


class Counters(msgspec.Struct, frozen=True, kw_only=True):
    """Where the training stands: the weights version, and the optimiser updates made so far."""

    version: int
    updates: int
    schema_version: int = SCHEMA_VERSION


def saved(directory: Path) -> list[Path]:
    """The checkpoints in a directory, oldest first."""
    return sorted(directory.glob("*.safetensors"))


def write(path: Path, tensors: Mapping[str, Tensor], counters: Counters) -> None:
    """Replace `path` in one move, durably: a crash leaves the old file or the new one. Raises `CheckpointError`."""
    header = {_HEADER_KEY: msgspec.json.encode(counters).decode()}
    contiguous = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=".checkpoint-") as directory:
            unfinished = Path(directory, path.name)
            save_file(contiguous, unfinished, metadata=header)
            _sync(unfinished)
            unfinished.replace(path)
        _sync(path.parent)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path}: cannot be written ({error})") from error


def read(path: Path, expected: Mapping[str, tuple[int, ...]]) -> tuple[dict[str, Tensor], Counters]:
    """CPU tensors, exactly those of `expected` by name and shape, and the counters. Raises `CheckpointError`."""
    try:
        with safe_open(path, framework="pt") as file:
            counters = _counters(path, file.metadata() or {})
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path}: cannot be read ({error})") from error
    _check_shapes(path, tensors, expected)
    return tensors, counters


def _counters(path: Path, header: Mapping[str, str]) -> Counters:
    try:
        counters = msgspec.json.decode(header[_HEADER_KEY], type=Counters)
    except (KeyError, msgspec.DecodeError) as error:
        raise CheckpointError(f"{path}: not a trainer's checkpoint ({error})") from error
    if counters.schema_version != SCHEMA_VERSION:
        found = counters.schema_version
        raise CheckpointError(f"{path}: schema version {found}; this program reads {SCHEMA_VERSION}")
    return counters


def _check_shapes(path: Path, tensors: Mapping[str, Tensor], expected: Mapping[str, tuple[int, ...]]) -> None:
    odd = sorted(tensors.keys() ^ expected.keys())
    if odd:
        where = "the model" if odd[0] in tensors else "the checkpoint"
        raise CheckpointError(f"{path}: does not fit the model: {odd[0]} is not in {where}")
    for name, shape in expected.items():
        if tensors[name].shape != shape:
            found = tuple(tensors[name].shape)
            raise CheckpointError(f"{path}: does not fit the model: {name} has shape {found}, not {tuple(shape)}")


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
