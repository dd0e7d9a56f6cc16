"""A checkpoint of several ranks: a directory as `torch.distributed.checkpoint` writes it.

Each rank's rows are in a file of its own; beside them lie the counters and digests (`checkpoint`).
"""

import pickle
import shutil
import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path, PosixPath
from typing import Any

import msgspec
import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, StorageMeta
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.serialization import _get_layout

from elastic.engine.model.stored import CheckpointError
from elastic.worker.trainer.ranks import Ranks
from elastic.worker.trainer.soundness import DIGESTS_KEY, StoredFiles, digest_of

METADATA_FILE = ".metadata"
_BESIDE = (torch.Size, PosixPath, _StorageInfo, _get_layout)
"""What torch's metadata name besides their own types and those of elements."""


class _Unpickler(pickle.Unpickler):
    """Knows what torch's metadata are made of, and no other code: a checkpoint may come from another machine."""

    def find_class(self, module: str, name: str) -> Any:
        found = getattr(sys.modules.get(module), name, None)
        # What is of bytes torch would unpickle, with all code that there is.
        of_metadata = isinstance(found, type) and found.__module__ == Metadata.__module__
        if (
            (of_metadata and found is not BytesStorageMetadata)
            or isinstance(found, torch.dtype)
            or any(found is one for one in _BESIDE)
        ):
            return found
        raise pickle.UnpicklingError(f"it names {module}.{name}")


class _Reader(FileSystemReader):
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with (Path(self.path) / METADATA_FILE).open("rb") as file:
            metadata = _Unpickler(file).load()
        metadata.storage_meta = StorageMeta(load_id=self.load_id)
        return metadata


class StoredDirectory(StoredFiles):
    """`elastic.worker.trainer.checkpoint.StoredState`."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        # Before it is unpickled, which may raise anything where it is damaged.
        digests = msgspec.json.decode(self.header.get(DIGESTS_KEY, "{}"), type=dict[str, str])
        if digests.get(METADATA_FILE) != digest_of(path / METADATA_FILE):
            raise CheckpointError(f"{path}: damaged: {METADATA_FILE} is not as it was written")
        try:
            metadata: Any = _Reader(path).read_metadata()
            stored = metadata.state_dict_metadata
            self.shapes: Mapping[str, tuple[int, ...]] = {name: tuple(one.size) for name, one in stored.items()}
            places = [(path / one.relative_path, one.offset + one.length) for one in metadata.storage_data.values()]
        except (pickle.UnpicklingError, AttributeError, EOFError, IndexError, KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"{path}: damaged: {METADATA_FILE} cannot be read ({error})") from error
        for file, end in places:
            if file.parent != path or not file.is_file() or file.stat().st_size < end:
                raise CheckpointError(f"{path}: damaged: {file.name} is not as it was written")

    def load(self, names: Sequence[str], ranks: Ranks) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for name in names:
            shape = self.shapes[name]
            rows = len(ranks.shares(shape[0])[ranks.rank]) if shape else 1
            found[name] = torch.empty((rows, *shape[1:]) if shape else ())
        state: dict[str, Any] = dict(found) if ranks.size == 1 else _placed(found, self.shapes, ranks)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # It wonders that one rank reads without the others.
                load(state, storage_reader=_Reader(self._path), no_dist=ranks.size == 1)
        except CheckpointException as error:
            raise CheckpointError(f"{self._path}: cannot be read ({_cause(error)})") from error
        return found


def save_shards(
    directory: Path, shards: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]], ranks: Ranks
) -> None:
    """Write this rank's rows into the `directory`, durably, while all others write theirs. Raises `CheckpointError`."""
    mine = {name: shard.cpu().contiguous() for name, shard in shards.items()}
    _save(directory, _placed(mine, shapes, ranks), alone=False)


def save_whole(directory: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write whole tensors into the `directory`, durably. Raises `CheckpointError`."""
    _save(directory, tensors, alone=True)


def collected(
    shards: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]], ranks: Ranks
) -> Mapping[str, Tensor]:
    """Return the whole tensors of which each rank has its rows, in the first one's host memory; nothing on others."""
    found: dict[str, Tensor] = {}
    for name, shard in shards.items():
        rows = [len(share) for share in ranks.shares(shapes[name][0])]
        if (whole := ranks.collect(shard.cpu(), rows, 0)) is not None:
            found[name] = whole
    return found


def _save(directory: Path, state: Mapping[str, Any], *, alone: bool) -> None:
    try:
        save(dict(state), storage_writer=FileSystemWriter(directory), no_dist=alone)
    except CheckpointException as error:
        free_mb = shutil.disk_usage(directory).free / 1e6
        raise CheckpointError(
            f"{directory}: cannot be written, with {free_mb:,.1f} MB free there ({_cause(error)})"
        ) from error


def _placed(shards: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]], ranks: Ranks) -> dict[str, Any]:
    """The same tensors as rows of whole ones."""
    mesh = init_device_mesh("cpu", (ranks.size,))
    return {
        name: DTensor.from_local(
            shard,
            mesh,
            [Shard(0)],
            run_check=False,
            shape=torch.Size(shapes[name]),
            stride=torch.empty(shapes[name], device="meta").stride(),
        )
        for name, shard in shards.items()
    }


def _cause(error: CheckpointException) -> str:
    rank, (cause, _) = next(iter(error.failures.items()))
    return f"rank {rank}: {cause}"
