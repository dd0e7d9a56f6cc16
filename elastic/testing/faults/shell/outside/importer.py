"""The importer of a world: the production code, which takes a while for each part that it reads and writes."""

import random
from collections.abc import Callable
from pathlib import Path

from torch import Tensor

from elastic.system.host import here
from elastic.testing.faults.shell.models import bits_of
from elastic.worker.trainer.imported.forms import WholeModels
from elastic.worker.trainer.imported.offered import OfferedFiles
from elastic.worker.trainer.imported.trainer import ImportedTrainer

PART_S = 0.1
"""Longest that it takes for a tensor, or until a file is on the disk: in between it can be killed, and files change."""


def synced(_: int) -> None:
    """`elastic.system.host.Host.fsync` of an importer's process."""
    here().sleep(random.uniform(0, PART_S))


class _ReadInParts(WholeModels):
    def read(self, files: OfferedFiles) -> dict[str, Tensor]:
        tensors: dict[str, Tensor] = {}
        for name, one in files.tensors.items():
            here().sleep(random.uniform(0, PART_S))
            tensors |= super().read(files._replace(tensors={name: one}))
        return tensors


class WorldImporter(ImportedTrainer):
    """`has` is told the bits of each version that is published."""

    def __init__(self, base: Path, root: Path, has: Callable[[int, bytes], None]) -> None:
        super().__init__(_ReadInParts(base), [root])
        self._has = has

    def tensors(self) -> dict[str, Tensor]:
        tensors = super().tensors()
        self._has(self.version, bits_of(tensors))
        return tensors
