"""The trainer's checkpoint: one safetensors file, its counters and a digest of everything as JSON in the header.

What is read is what was written, bit for bit, or it is refused by name.
"""

import hashlib
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from elastic.engine.model.stored import CheckpointError, check_shapes
from elastic.system.cores import cores
from elastic.system.files import replace_durably, sync

SCHEMA_VERSION = 2

MASTER = "master."
"""Before the names of the weights that are trained."""
KINDS = (MASTER, "exp_avg.", "exp_avg_sq.")
"""Before the names of all that is kept of them."""

_HEADER_KEY = "elastic_trainer"
_DIGESTS_KEY = "digests"
_UNFINISHED_PREFIX = ".checkpoint-"


class Counters(msgspec.Struct, frozen=True, kw_only=True):
    """Where the training stands: the weights version, the optimiser updates made so far, and what the last step was."""

    version: int
    updates: int
    metrics: dict[str, float] = {}
    schema_version: int = SCHEMA_VERSION


def write(path: Path, tensors: Mapping[str, Tensor], counters: Counters) -> None:
    """Replace `path` in one move, durably: a crash leaves the old file or the new one. Raises `CheckpointError`."""
    contiguous = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
    encoded = msgspec.json.encode(counters)
    digests = _digests(contiguous) | {_HEADER_KEY: _digest(encoded)}
    header = {_HEADER_KEY: encoded.decode(), _DIGESTS_KEY: msgspec.json.encode(digests).decode()}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=_UNFINISHED_PREFIX) as directory:
            unfinished = Path(directory, path.name)
            save_file(contiguous, unfinished, metadata=header)
            sync(unfinished)
            replace_durably(unfinished, path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path}: cannot be written ({error})") from error


def sweep(directory: Path) -> None:
    """Remove what a process left that was killed while it wrote; nobody may be writing now."""
    for left_over in directory.glob(f"{_UNFINISHED_PREFIX}*"):
        shutil.rmtree(left_over, ignore_errors=True)


def masters(path: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield a checkpoint's weights by name, as they were written. Raises `CheckpointError`."""
    tensors, _ = _read(path)
    for name, tensor in tensors.items():
        if name.startswith(MASTER):
            yield name.removeprefix(MASTER), tensor


def check_header(path: Path, weights: Mapping[str, tuple[int, ...]]) -> None:
    """A checkpoint's counters can be read, and its tensors are masters and moments of these weights.

    Reads no tensor. Raises `CheckpointError`.
    """
    try:
        with safe_open(path, framework="pt") as file:
            _counters(path, file.metadata() or {})
            found = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path}: cannot be read ({error})") from error
    check_shapes(path, found, {f"{kind}{name}": shape for kind in KINDS for name, shape in weights.items()})


def read(path: Path, expected: Mapping[str, tuple[int, ...]]) -> tuple[dict[str, Tensor], Counters]:
    """CPU tensors, exactly those of `expected` by name and shape, and the counters, all as they were written.

    Raises `CheckpointError`.
    """
    return _read(path, expected)


def _read(path: Path, expected: Mapping[str, tuple[int, ...]] | None = None) -> tuple[dict[str, Tensor], Counters]:
    try:
        with safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path}: cannot be read ({error})") from error
    counters = _counters(path, header)
    if expected is not None:
        check_shapes(path, {name: tuple(tensor.shape) for name, tensor in tensors.items()}, expected)
    _check_digests(path, header, tensors)
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


def _check_digests(path: Path, header: Mapping[str, str], tensors: Mapping[str, Tensor]) -> None:
    try:
        written = msgspec.json.decode(header[_DIGESTS_KEY], type=dict[str, str])
    except (KeyError, msgspec.DecodeError) as error:
        raise CheckpointError(f"{path}: damaged: it has no digests ({error})") from error
    found = _digests(tensors) | {_HEADER_KEY: _digest(header[_HEADER_KEY].encode())}
    if damaged := sorted(name for name in found.keys() | written.keys() if found.get(name) != written.get(name)):
        raise CheckpointError(f"{path}: damaged: {damaged[0]} is not as it was written")


def _digests(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """By name, of the CPU tensors' bytes; on all cores, since hashing releases the interpreter."""
    with ThreadPoolExecutor(cores()) as executor:
        views = (tensor.reshape(-1).view(torch.uint8).numpy().data for tensor in tensors.values())
        return dict(zip(tensors, executor.map(_digest, views), strict=True))


def _digest(data: bytes | memoryview) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()
