"""Workers' log-probabilities beside the trainer's own: whose tokens of a step are not of the weights that they name.

Log-probabilities are compared where both sides have the same weights: the tokens are of the trainer's version, and the
step has not updated it yet. What disagrees there is left out before it is trained on. The decision is made for all
tokens that a worker has in a micro-batch, which is the same whatever comes first; for tokens that cannot be compared it
follows what the worker's others in this step have come to, once the first mini-batch is complete.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from elastic.core.agreement import LAST_TOKENS
from elastic.core.types import LogprobCheck
from elastic.protocol.wire import TrajectoryData
from elastic.worker.trainer.batches import Batch
from elastic.worker.trainer.losses import LOG_RATIO_MAX


@dataclass(slots=True)
class _Sum:
    bound: float
    tokens: int = 0
    log_ratio: float = 0.0


class StepAgreement:
    """Compares what workers sampled in one step, of weights version `version`, with the trainer's log-probabilities.

    `bound` is the run's `trainer.mismatch_max`, for workers that declare no noise of their own.
    """

    def __init__(self, version: int, bound: float) -> None:
        self._version = version
        self._bound = bound
        self._sums: dict[str, _Sum] = {}
        self._untold: dict[str, _Sum] = {}
        self._disagree: frozenset[str] | None = None
        """The workers that disagree over the whole first mini-batch, once that is complete."""

    def updates(self) -> None:
        """Note that the trainer is about to change its weights: nothing in this step can be compared any more."""
        if self._disagree is None:
            self._disagree = frozenset(w for w, of in self._sums.items() if of.log_ratio > of.bound * of.tokens)

    def wanting(self, trajectories: Iterable[TrajectoryData]) -> list[TrajectoryData]:
        """Return the trajectories that are worth computing for a comparison alone: each has tokens of a worker of which
        fewer than `LAST_TOKENS` were compared in this step."""
        if self._disagree is not None:
            return []
        return [
            trajectory
            for trajectory in trajectories
            if any(version == self._version for version, _ in trajectory.sampled.versions)
            and any(w not in self._sums or self._sums[w].tokens < LAST_TOKENS for w, _ in trajectory.sampled.origins)
        ]

    def compare(
        self, batch: Batch, logprobs: Tensor, workers: Sequence[str], bounds: Mapping[str, float | None]
    ) -> Tensor | None:
        """Compare what `workers` sampled with the trainer's `logprobs`; returns which tokens may be trained on, [N],
        or None where all may.

        `bounds` are as in `elastic.protocol.wire.TrainGroupFrame`.
        """
        keep: Tensor | None = None
        log_ratio = (logprobs.detach() - batch.logprobs).nan_to_num(nan=LOG_RATIO_MAX).abs().clamp(max=LOG_RATIO_MAX)
        same = batch.versions == self._version
        for place, worker in enumerate(workers):
            own = batch.origins == place
            if own.any() and self._disagrees(worker, log_ratio[own & same], bounds.get(worker, self._bound)):
                keep = ~own if keep is None else keep & ~own
        return keep

    def _disagrees(self, worker: str, log_ratio: Tensor, bound: float | None) -> bool:
        if bound is None:
            return True
        if self._disagree is not None:
            return worker in self._disagree
        if not len(log_ratio):
            return False
        total = log_ratio.sum(dtype=torch.float64).item()
        for sums in (self._sums, self._untold):
            of = sums.setdefault(worker, _Sum(bound))
            of.tokens += len(log_ratio)
            of.log_ratio += total
        return total > bound * len(log_ratio)

    def take(self) -> list[LogprobCheck]:
        """What was compared since the last call."""
        untold, self._untold = self._untold, {}
        return [LogprobCheck(w, self._version, of.tokens, of.log_ratio) for w, of in sorted(untold.items())]

    @property
    def mean(self) -> float:
        """Over all that was compared."""
        tokens = sum(of.tokens for of in self._sums.values())
        return sum(of.log_ratio for of in self._sums.values()) / max(1, tokens)
