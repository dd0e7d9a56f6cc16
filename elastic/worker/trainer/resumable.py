"""How kinds of trainers keep their state: float32 masters and both moments of AdamW, with counters."""

from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from elastic.protocol.wire import finite
from elastic.system.parking import Switch
from elastic.system.parking.tensors import ParkedTensors
from elastic.worker.trainer import checkpoint
from elastic.worker.trainer.adamw import AdamW
from elastic.worker.trainer.groups import GroupTrainer
from elastic.worker.trainer.ranks import ALONE, Ranks


class ResumableTrainer(GroupTrainer):
    """A kind sets these before its first order."""

    _names: Sequence[str]
    """The names of the trained tensors."""
    _masters: Sequence[Tensor]
    """In the order of the names, on this rank."""
    optimizer: AdamW
    _parked: ParkedTensors
    _ranks: Ranks = ALONE

    def save(self, path: Path) -> None:
        """Write masters, moments and counters to `path`, all or nothing; between steps only."""
        self._check_between_steps("save")
        counters = checkpoint.Counters(version=self.version, updates=self.updates, metrics=finite(self.metrics))
        checkpoint.write(path, self._state(), counters, self._whole_shapes(), self._ranks)

    def load(self, path: Path) -> None:
        """Go on from a checkpoint. Raises `CheckpointError`, and changes nothing, if it does not fit the model."""
        self._check_between_steps("load")
        self.resume()
        state = self._state()
        tensors, counters = checkpoint.read(path, self._whole_shapes(), self._ranks)
        for name, tensor in state.items():
            tensor.copy_(tensors[name])
        self._take_masters()
        self.optimizer.begin_at(counters.updates)
        self.version, self.updates, self.metrics = counters.version, counters.updates, counters.metrics
        self._begin_step()

    @abstractmethod
    def resume(self) -> Switch:
        """Bring back what was parked."""

    @abstractmethod
    def _take_masters(self) -> None:
        """Compute with the masters as they are now."""

    def _shape(self, place: int) -> tuple[int, ...]:
        """Return the shape of the whole tensor at this place of the names."""
        return tuple(self._masters[place].shape)

    def _whole_shapes(self) -> dict[str, tuple[int, ...]]:
        return {
            f"{kind}{name}": self._shape(place) for kind in checkpoint.KINDS for place, name in enumerate(self._names)
        }

    def _state(self) -> dict[str, Tensor]:
        """All that learning goes on from, as it stands in the checkpoint."""
        kept = zip(checkpoint.KINDS, (self._masters, self.optimizer.exp_avg, self.optimizer.exp_avg_sq), strict=True)
        return {
            f"{kind}{name}": self._parked.content(tensor.detach())
            for kind, tensors in kept
            for name, tensor in zip(self._names, tensors, strict=True)
        }
