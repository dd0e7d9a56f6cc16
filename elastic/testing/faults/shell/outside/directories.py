"""The directories that a trainer outside writes: what is in each, and which of them a version is."""

import asyncio
import itertools
import json
import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random

import numpy as np
import torch
from safetensors.torch import save

from elastic.core.types import Nanoseconds
from elastic.engine.model.stored import CONFIG_FILE, INDEX_FILE
from elastic.testing.faults.shell.models import SHAPES, STOP, VOCABULARY, Weights, bits_of

SHARDS = 2
BASE = 0
"""The number of the base policy's weights; those of directories begin behind it."""
FINITE = 0xBFFF
"""A mask of a bfloat16's bits without one of its exponent, so that the rest is a finite number."""
BETWEEN_SHARDS_S = 0.8
CHANGED = 16


class OutsideDirectories:
    """`base` and what is below `root`. `found` is told of a version that is no directory's as it was written."""

    def __init__(
        self, place: Path, now_ns: Callable[[], Nanoseconds], chance: Random, found: Callable[[str], None]
    ) -> None:
        self.base, self.root = place / "model", place / "theirs"
        self.root.mkdir()
        self.served: dict[int, int] = {}
        """By version, which weights it is."""
        self._now_ns = now_ns
        self._chance = chance
        self._found = found
        self._numbers: dict[bytes, int] = {}
        self._times = itertools.count()
        self._write_all(self.base, BASE)
        config = {"vocab_size": VOCABULARY, "eos_token_id": STOP}
        (self.base / CONFIG_FILE).write_text(json.dumps(config))

    def published(self, version: int, bits: bytes) -> None:
        """A trainer's process has these bits as a version."""
        number = self._numbers.get(bits)
        if number is None:
            self._found(f"version {version} has weights that nobody has written: parts of several directories")
        else:
            self.served[version] = number

    async def write(self, directory: Path, number: int) -> None:
        """Write these weights shard by shard, over what is there."""
        for shard in range(SHARDS):
            self._write(directory, number, shard)
            await asyncio.sleep(self._chance.uniform(0, BETWEEN_SHARDS_S))

    def write_unfit(self, directory: Path, number: int) -> None:
        """Write what no run can serve: a directory that lacks a shard, has other weights, or is none at all."""
        match self._chance.randrange(3):
            case 0:
                self._write(directory, number, 0)
            case 1:
                self._write_all(directory, number)
                (directory / _shard(1)).write_bytes(save({"another.weight": torch.zeros(2)}))
            case _:
                shutil.rmtree(directory, ignore_errors=True)

    def remove(self, directory: Path) -> None:
        shutil.rmtree(directory)

    def _write_all(self, directory: Path, number: int) -> None:
        for shard in range(SHARDS):
            self._write(directory, number, shard)

    def _write(self, directory: Path, number: int, shard: int) -> None:
        directory.mkdir(exist_ok=True)
        tensors = _tensors(number)
        self._numbers[bits_of(tensors)] = number
        names = list(tensors)[shard::SHARDS]
        # In place, as if by somebody who has the file open.
        (directory / _shard(shard)).write_bytes(save({name: tensors[name] for name in names}))
        where = {name: _shard(place % SHARDS) for place, name in enumerate(tensors)}
        (directory / INDEX_FILE).write_text(json.dumps({"weight_map": where}))
        for path in (directory / _shard(shard), directory / INDEX_FILE):
            at_ns = self._now_ns() + next(self._times)  # The world's time stands still between two looks at a file.
            os.utime(path, ns=(at_ns, at_ns))


def _shard(shard: int) -> str:
    return f"model-{shard + 1:05d}-of-{SHARDS:05d}.safetensors"


def _tensors(number: int) -> dict[str, torch.Tensor]:
    """The weights of this number: those of the base, each tensor changed in some places."""
    rng, bits = np.random.default_rng(number), Weights().bits() & FINITE
    sizes = [math.prod(shape) for shape in SHAPES.values()]
    begins = [0, *itertools.accumulate(sizes)]
    for begin, size in zip(begins, sizes, strict=False) if number else ():
        bits[begin + rng.integers(size, size=CHANGED)] = rng.integers(2**16, size=CHANGED, dtype=np.uint16) & FINITE
    flat = torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)
    return {
        name: part.view(shape).clone() for (name, shape), part in zip(SHAPES.items(), flat.split(sizes), strict=True)
    }
