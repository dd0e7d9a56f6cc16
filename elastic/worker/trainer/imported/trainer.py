"""The importer: a trainer that computes nothing. Its steps are directories which others have written."""

import errno
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from elastic.core.types import LogprobCheck
from elastic.engine.model.stored import CheckpointError
from elastic.protocol import wire
from elastic.protocol.offers import OfferedWeights, look_of, read_source
from elastic.system.files import sync
from elastic.system.host import here
from elastic.system.parking import Switch
from elastic.weights.errors import WeightsError
from elastic.worker.trainer import checkpoint
from elastic.worker.trainer.base import OfferRefused
from elastic.worker.trainer.imported.forms import OfferedForm
from elastic.worker.trainer.imported.offered import OfferedFiles
from elastic.worker.trainer.ranks import ALONE

PIECE = 1 << 16
"""Numbers that are looked at together."""
NO_LINK = (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP)
"""Where a file cannot have another name: it is copied then."""


class _ReadVersion(NamedTuple):
    """A directory that was read, as an offer named it. `files` is None of the base policy, which needs no keeping."""

    tensors: dict[str, Tensor]
    files: OfferedFiles | None = None
    lasting: bool = True
    read_s: float = 0.0
    source: str = ""


class ImportedTrainer:
    """`elastic.worker.trainer.base.PolicyTrainer`, which `TakesOffers` below its roots.

    It has one copy of the weights; the publisher keeps the one before. A checkpoint is a directory of what was offered:
    its files by links where they are never written again, else by copies, with a digest of each.
    """

    def __init__(self, form: OfferedForm, roots: Sequence[Path]) -> None:
        """Raises `CheckpointError`."""
        self.version = 0
        self.metrics: dict[str, float] = {}
        self.unusable: Mapping[str, str] = {}
        self._roots = roots
        self._form = form
        self._served = _ReadVersion(form.first())
        self._taken: _ReadVersion | None = None
        """What the next update steps to."""

    @property
    def source(self) -> str:
        return self._served.source

    def take(self, source: str) -> None:
        began_s = here().monotonic()
        self._taken = None
        try:
            offered = read_source(source)
        except ValueError as error:
            raise OfferRefused(f"found no offer of weights, but {source[:200]!r}: {error}") from error
        files = self._form.look_at(Path(offered.directory), self._roots, self._served.tensors)
        try:
            tensors = self._form.read(files)
        except CheckpointError as error:
            raise OfferRefused(str(error), again=True) from error
        if odd := next((name for name, tensor in tensors.items() if not is_finite(tensor)), ""):
            raise OfferRefused(f"{offered.directory}: {odd}: found numbers that are not finite; allowed: none")
        files.check()
        _check_look(offered)
        self._taken = _ReadVersion(tensors, files, offered.lasting, here().monotonic() - began_s, source)

    def update(self) -> dict[str, float]:
        if self._taken is None:
            raise ValueError("no weights were offered for this step")
        self._served, self._taken = self._taken, None
        self.version += 1
        size_bytes = sum(tensor.nbytes for tensor in self._served.tensors.values())
        self.metrics = {"import_s": self._served.read_s, "import_bytes": float(size_bytes)}
        return dict(self.metrics)

    def tensors(self) -> dict[str, Tensor]:
        """They are never written to: each version has its own."""
        return dict(self._served.tensors)

    def train_group(self, group: wire.TrainGroupFrame) -> None:
        raise ValueError(f"group {group.group}: weights are imported here, and nothing is trained on")

    def skip_group(self, index: int, tokens: int, trajectories: Sequence[wire.TrajectoryData]) -> None:
        raise ValueError(f"group {index}: weights are imported here, and a step has no groups")

    def take_checks(self) -> list[LogprobCheck]:
        return []

    def proof(self) -> list[float]:
        """None: there is no model here that could compute it."""
        return []

    def save(self, path: Path) -> None:
        files = self._served.files
        if self._taken is not None or files is None:
            raise ValueError("a step is under way" if files else "the base policy is kept where it is")
        counters = checkpoint.Counters(
            version=self.version, updates=self.version, metrics=wire.finite(self.metrics), source=self.source
        )

        def keep(unfinished: Path) -> None:
            for file in files.files:
                _keep(file, unfinished / file.name, by_link=self._served.lasting)
            if files.index_file is not None:
                _keep(files.index_file, unfinished / files.index_file.name, by_link=False)
            try:
                files.check()
            except OfferRefused as error:
                raise CheckpointError(str(error)) from error

        checkpoint.write_directory(path, counters, ALONE, keep)

    def load(self, path: Path) -> None:
        counters = checkpoint.read_directory(path)
        try:
            kept = self._form.kept(path)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read ({error})") from error
        self._served, self._taken = _ReadVersion(self._form.read(kept), kept, source=counters.source), None
        self.version, self.metrics = counters.version, counters.metrics

    def mend(self, path: Path, pull: Callable[[int], dict[str, Tensor]]) -> None:
        counters = checkpoint.counters_of(path)
        try:
            tensors = pull(counters.version)
        except WeightsError as error:
            found = read_source(counters.source).directory
            said = f"{found}: was written over after its update was answered, and what was published of it is gone"
            raise CheckpointError(f"{said} ({error})") from error
        checkpoint.write_directory(path, counters, ALONE, lambda unfinished: self._form.write(unfinished, tensors))

    def park(self) -> Switch:
        """It has nothing on a device."""
        return Switch(0.0, 0)

    def resume(self) -> Switch:
        return Switch(0.0, 0)


def is_finite(tensor: Tensor) -> bool:
    """Whether all numbers of a bfloat16 or float32 tensor are finite: none has every bit of its exponent. Goes through
    them piece by piece, in the cache."""
    patterns = tensor.reshape(-1).view(torch.int16 if tensor.dtype == torch.bfloat16 else torch.int32).numpy()
    every = patterns.dtype.type(0x7F80 if tensor.dtype == torch.bfloat16 else 0x7F800000)
    return all((patterns[begin : begin + PIECE] & every).max() < every for begin in range(0, len(patterns), PIECE))


def _check_look(offered: OfferedWeights) -> None:
    """Raises `OfferRefused` for a directory that was written again since it was offered."""
    try:
        same = offered.look in ("", look_of(Path(offered.directory)))
    except OSError:
        same = False
    if not same:
        raise OfferRefused(f"{offered.directory}: was written again since it was offered", again=True)


def _keep(file: Path, at: Path, *, by_link: bool) -> None:
    """Have the file at another place, too. Raises `OSError`."""
    if by_link:
        try:
            os.link(file.resolve(), at)
        except OSError as error:
            if error.errno not in NO_LINK:
                raise
        else:
            return
    shutil.copyfile(file, at)
    sync(at)
