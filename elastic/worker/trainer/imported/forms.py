"""In which form the versions of somebody else's trainer come: as whole models, or as adapters to the base."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import torch
from safetensors.torch import save_file
from torch import Tensor

from elastic.engine.model.stored import WEIGHTS_FILE, CheckpointError, StoredTensor, read_object, stored_tensors
from elastic.system.files import sync
from elastic.weights.sharding import Shape
from elastic.worker.trainer.imported.adapters import (
    CONFIG_FILE,
    PREFIX,
    adapter_files,
    look_at_adapter,
    of_no_effect,
    scale_of,
    unfit_adapter,
)
from elastic.worker.trainer.imported.offered import OfferedFiles, look_at, unfit

TORCH_TYPES = {"BF16": torch.bfloat16, "F32": torch.float32}


class OfferedForm(Protocol):
    """`tensors` are those of the version before; none of them is written to."""

    def first(self) -> dict[str, Tensor]:
        """What is served before anything is offered. Raises `CheckpointError`."""
        ...

    def look_at(self, directory: Path, roots: Sequence[Path], tensors: Mapping[str, Tensor]) -> OfferedFiles:
        """Look at what was offered. Raises `OfferRefused`."""
        ...

    def kept(self, directory: Path) -> OfferedFiles:
        """Look at what was kept of an offer. Raises `CheckpointError`, and `OSError`."""
        ...

    def read(self, files: OfferedFiles) -> dict[str, Tensor]:
        """Raises `CheckpointError`."""
        ...

    def write(self, directory: Path, tensors: Mapping[str, Tensor]) -> None:
        """Write what `kept` finds there, and `read` reads, durably. Raises `CheckpointError`, and `OSError`."""
        ...


class WholeModels:
    """Directories of the base policy's names, shapes and types."""

    def __init__(self, base: Path) -> None:
        """Raises `CheckpointError`."""
        self._expected = stored_tensors(base)

    def first(self) -> dict[str, Tensor]:
        return read_tensors(self._expected)

    def look_at(self, directory: Path, roots: Sequence[Path], tensors: Mapping[str, Tensor]) -> OfferedFiles:
        return look_at(directory, roots, self._expected)

    def kept(self, directory: Path) -> OfferedFiles:
        files = OfferedFiles.of(directory)
        if (why := unfit(files.tensors, self._expected)) is not None:
            raise CheckpointError(f"{directory}: is not of the base policy: {why}")
        return files

    def read(self, files: OfferedFiles) -> dict[str, Tensor]:
        return read_tensors(files.tensors)

    def write(self, directory: Path, tensors: Mapping[str, Tensor]) -> None:
        save_file({**tensors}, directory / WEIGHTS_FILE)
        sync(directory / WEIGHTS_FILE)


class Adapters:
    """Directories of peft's, of one rank up to `rank_max`. They travel in bfloat16, with their scale in B."""

    def __init__(self, base: Path, rank_max: int) -> None:
        """Raises `CheckpointError`."""
        self._base = stored_tensors(base)
        self._rank_max = rank_max
        self._nothing = of_no_effect(self._base)

    def first(self) -> dict[str, Tensor]:
        """An adapter that changes nothing: engines serve no version without one."""
        return {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in self._nothing.items()}

    def look_at(self, directory: Path, roots: Sequence[Path], tensors: Mapping[str, Tensor]) -> OfferedFiles:
        before: dict[str, Shape] = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        known = {} if before == self._nothing else before
        return look_at_adapter(directory, roots, self._base, self._rank_max, known)

    def kept(self, directory: Path) -> OfferedFiles:
        files = adapter_files(directory)
        if (why := unfit_adapter(directory, files.tensors, self._base, self._rank_max, {})) is not None:
            raise CheckpointError(f"{directory}: {why}")
        return files

    def read(self, files: OfferedFiles) -> dict[str, Tensor]:
        config = next(path for path in files.files if path.name == CONFIG_FILE)
        if (scale := scale_of(read_object(config))) is None:
            raise CheckpointError(f"{config}: was written again while it was read")
        found = read_tensors(files.tensors)
        return {
            name: (tensor.bfloat16() * scale if name.endswith(".lora_B.weight") else tensor.bfloat16())
            for name, tensor in found.items()
        }

    def write(self, directory: Path, tensors: Mapping[str, Tensor]) -> None:
        """An adapter is never kept by links, and what was published of it is not its files."""
        raise CheckpointError(f"{directory}: an adapter is kept as it was offered, or not at all")

    def merged(self, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yield the base with an adapter added to it. Raises `CheckpointError`."""
        for name, tensor in read_tensors(self._base).items():
            at = f"{PREFIX}{name.removesuffix('.weight')}"
            a, b = (tensors.get(f"{at}.lora_{part}.weight") for part in "AB")
            yield name, tensor if a is None or b is None else (tensor.float() + b.float() @ a.float()).to(tensor.dtype)


def read_tensors(stored: Mapping[str, StoredTensor]) -> dict[str, Tensor]:
    """The tensors, in memory of their own: files may be written again. Raises `CheckpointError`."""
    tensors: dict[str, Tensor] = {}
    by_file: dict[Path, list[str]] = {}
    for name, one in stored.items():
        by_file.setdefault(one.path, []).append(name)
    for path, names in by_file.items():
        try:
            with path.open("rb", buffering=0) as file:
                for name in sorted(names, key=lambda name: stored[name].begin):
                    one = stored[name]
                    tensor = tensors[name] = torch.empty(one.shape, dtype=TORCH_TYPES[one.type])
                    content = tensor.reshape(-1).view(torch.uint8).numpy().data
                    file.seek(one.begin)
                    while content and (count := file.readinto(content)):
                        content = content[count:]
                    if content:
                        raise CheckpointError(f"{path}: ends before {name} does")
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read ({error.strerror or error})") from error
    return {name: tensors[name] for name in stored}
