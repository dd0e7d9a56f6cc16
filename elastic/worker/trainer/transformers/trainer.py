"""Trains a causal language model of transformers on rows that groups share.

Rows are packed across groups, in the order in which these were launched; what does not fill one is held until more
comes or the mini-batch ends. So the same groups come to the same weights, bit for bit where kernels are deterministic,
whatever their order of arrival; with `order = "arrival"`, which holds no group back, the same orders in the same order
do. A row whose gradient is not finite is taken apart by groups, and
the odd group is left out whole.
"""

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from elastic.config import TrainerConfig
from elastic.core.ids import provider_of
from elastic.protocol.wire import TrainGroupFrame, TrajectoryData
from elastic.system.parking import Switch
from elastic.system.parking.tensors import ParkedTensors, held_bytes
from elastic.worker.trainer.adamw import AdamW
from elastic.worker.trainer.batches import Batch, UnusableGroup, check_trajectories
from elastic.worker.trainer.distribution import TokenDistribution
from elastic.worker.trainer.groups import GroupFigures
from elastic.worker.trainer.objective import OtherLogprobs
from elastic.worker.trainer.packing import GroupPart, PackedTrajectory, Packer, row_of
from elastic.worker.trainer.ranks import ALONE, Ranks
from elastic.worker.trainer.resumable import ResumableTrainer
from elastic.worker.trainer.sources import SourceOf
from elastic.worker.trainer.transformers.model import CausalModel, Reference
from elastic.worker.trainer.transformers.published import PublishedShards
from elastic.worker.trainer.transformers.settings import TransformersSettings


class _Taken(NamedTuple):
    """A group of the mini-batch that is under way."""

    group: TrainGroupFrame
    figures: GroupFigures


class _Trained(NamedTuple):
    """A part whose gradient is in the sum, and which of its tokens gave it (None: all)."""

    part: GroupPart[_Taken]
    keep: Tensor | None


class TransformersTrainer(ResumableTrainer):
    """See `ResumableTrainer`. Masters and moments are float32, whatever is computed in."""

    def __init__(
        self,
        settings: TrainerConfig,
        own: TransformersSettings,
        model: CausalModel,
        groups: int,
        temperature: float,
        steps: int | None = None,
        ranks: Ranks = ALONE,
        reference: Reference | None = None,
        source_of: SourceOf = provider_of,
    ) -> None:
        in_order = own.order == "launch"
        super().__init__(
            settings, model.vocab_size, groups, temperature, steps, in_order_of_launch=in_order, source_of=source_of
        )
        self.model = model
        self.reference = reference
        named = model.named_parameters()
        self._names, self._parameters, self._shapes = list(named), list(named.values()), model.shapes()
        self._ranks = ranks
        self.published = PublishedShards(model, ranks)
        dtype = computed_in(own, model.device)
        keeps_masters = own.offload != "none" or (dtype != torch.float32 and not model.sharded)
        self._offload = own.offload
        home = torch.device("cpu") if own.offload != "none" else model.device
        self._masters = [
            parameter.detach().to(home, torch.float32, copy=True) if keeps_masters else parameter
            for parameter in self._parameters
        ]
        if not model.sharded:
            model.compute_in(dtype)
        self.optimizer = AdamW(self._masters, settings.betas, settings.adam_epsilon, settings.weight_decay)
        self._sums = [torch.zeros_like(one, dtype=torch.float32, requires_grad=False) for one in self._parameters]
        self._row_tokens = settings.micro_batch_tokens if model.packs else 1
        self._packer = Packer[_Taken](self._row_tokens)
        self._rows: list[Sequence[GroupPart[_Taken]]] = []
        """Full ones, until there is one for each rank."""
        self._trained: list[_Trained] = []
        self._sums_are_zero = True
        self._parked = ParkedTensors()
        self._proof = model.proof()

    def tensors(self) -> dict[str, Tensor]:
        """As the contract says; of several ranks this one's part of that, as `published` says."""
        masters = zip(self._names, self._masters, strict=True)
        return self.published.own({name: self._parked.content(master.detach()) for name, master in masters})

    def proof(self) -> list[float]:
        return self._proof

    def load(self, path: Path) -> None:
        super().load(path)
        self._proof = self.model.proof()

    def park(self) -> Switch:
        """Take all weights, the reference's, too, masters, moments and sums off the device; `save` and `tensors` may
        still be called."""
        begun_s = time.monotonic()
        frozen = () if self.reference is None else self.reference.named_parameters().values()
        moments = (*self.optimizer.exp_avg, *self.optimizer.exp_avg_sq)
        state = (*self._parameters, *self._masters, *moments, *self._first_weights.copies, *frozen)
        there = [tensor for tensor in state if tensor.device == self.model.device]
        if self._sums_are_zero:
            size_bytes = self._parked.park(there, zeros=self._sums)
        else:
            size_bytes = self._parked.park((*there, *self._sums))
        return Switch(time.monotonic() - begun_s, size_bytes, held_bytes(self.model.device))

    def resume(self) -> Switch:
        begun_s = time.monotonic()
        return Switch(time.monotonic() - begun_s, self._parked.resume())

    def update(self) -> dict[str, float]:
        metrics = super().update()
        self._proof = self.model.proof()
        if self._offload == "all":
            self.park()  # Whatever generates next has the device; the next group takes it back.
        return metrics

    def _advance(self) -> None:
        if self._offload == "all":
            self.resume()
        super()._advance()

    def _learn(self, group: TrainGroupFrame, advantages: Sequence[float], figures: GroupFigures) -> None:
        taken = _Taken(group, figures)
        pieces = [PackedTrajectory(taken, *one) for one in zip(group.trajectories, advantages, strict=True)]
        for parts in self._packer.take(pieces):
            self._hold(parts)

    def _settle(self) -> None:
        for parts in self._packer.rest():
            self._hold(parts)
        self._train_rows()
        if not self._trained:
            self._forget_sums()

    def _hold(self, parts: Sequence[GroupPart[_Taken]]) -> None:
        self._rows.append(parts)
        if len(self._rows) == self._ranks.size:
            self._train_rows()

    def _train_rows(self) -> None:
        """Add the gradients of the rows that are held, one a rank, of groups that have not turned out to be of no
        use."""
        held, self._rows = self._rows, []
        rows = [[part for part in parts if part.of.group.group not in self._unusable] for parts in held]
        rows = [parts for parts in rows if parts]
        if not rows:
            return
        kept: list[_Trained] = []
        losses: list[Tensor] = []
        batches = [[part.batch for part in parts] for parts in rows]
        beside = self._beside(batches)
        found = self._distributions(batches)
        for place, (parts, row) in enumerate(zip(rows, found, strict=True)):
            for part, now, others in zip(parts, _split(row, batches[place]), beside[place], strict=True):
                keep = self._agreement.compare(part.batch, now.logprobs.cpu(), part.workers, part.of.group.bounds)
                loss = self._part_loss(_Trained(part, keep), now, others, part.of.figures)
                if loss is not None:
                    kept.append(_Trained(part, keep))
                    if place == self._ranks.rank:
                        losses.append(loss)
        if not kept:
            return
        if self._add(torch.stack(losses).sum() if losses else _nothing(found[self._place(rows)])):
            self._trained += kept
            return
        for trained in kept:
            self._train_alone(trained)

    def _train_alone(self, trained: _Trained) -> None:
        """Add the gradient of one part of a row, or leave its group out whole."""
        group = trained.part.of.group
        if group.group in self._unusable:
            return
        if self._add(self._loss_again(trained)):
            self._trained.append(trained)
            return
        self._leave_out(group, "its gradient is not finite")
        before = [one for one in self._trained if one.part.of.group is group]
        self._trained = [one for one in self._trained if one.part.of.group is not group]
        for one in before:
            self._add(-self._loss_again(one))

    def _loss_again(self, trained: _Trained) -> Tensor:
        """Every rank computes it, and it counts on the first."""
        ((beside,),) = self._beside([[trained.part.batch]])
        now = self._row_distribution([trained.part.batch])
        loss = self._part_loss(trained, now, beside, GroupFigures([]))
        assert loss is not None, "some of its tokens were kept"
        return loss if self._ranks.rank == 0 else loss * 0.0

    def _part_loss(
        self, trained: _Trained, now: TokenDistribution, beside: OtherLogprobs, figures: GroupFigures
    ) -> Tensor | None:
        batch, keep = trained.part.batch.to(self.model.device), trained.keep
        there = None if keep is None else keep.to(self.model.device)
        return self._loss(batch, now, beside, there, figures, trained.part.workers)

    def _add(self, loss: Tensor) -> bool:
        """Add the gradient of all ranks' losses to the sums, if it is finite; returns whether it was."""
        gradients = self.model.gradients(loss)
        there = [gradient for gradient in gradients if gradient is not None]
        sizes = torch.stack([torch.linalg.vector_norm(gradient, dtype=torch.float32) for gradient in there])
        if not self._ranks.all_of(bool(sizes.isfinite().all())):
            return False
        self._sums_are_zero = False
        for total, gradient in zip(self._sums, gradients, strict=True):
            if gradient is not None:
                total += gradient
        return True

    def _forget_sums(self) -> None:
        for total in self._sums:
            total.zero_()
        self._sums_are_zero = True

    @torch.no_grad()
    def _beside(self, rows: Sequence[Sequence[Batch]]) -> list[list[OtherLogprobs]]:
        """Log-probabilities by other weights of the tokens of each batch of each row, of at most one row a rank."""
        first: list[Tensor | None] = [None] * len(rows)
        reference = first
        if self._asks_first_weights:
            with self._first_weights.there(self._parameters):
                first = [row.logprobs for row in self._distributions(rows)]
        if self.reference is not None:
            reference = [row.logprobs for row in self._distributions(rows, self.reference)]
        each = zip(first, reference, rows, strict=True)
        return [_split_beside(OtherLogprobs(own, other), row) for own, other, row in each]

    def _keep_first_weights(self) -> None:
        self._first_weights.keep(self._parameters, torch.device("cpu") if self._offload != "none" else None)

    def _place(self, rows: Sequence[object]) -> int:
        """The row that this rank computes; without one of its own, the last once more."""
        return min(self._ranks.rank, len(rows) - 1)

    def _distributions(self, rows: Sequence[Sequence[Batch]], by: Reference | None = None) -> list[TokenDistribution]:
        """What the tokens of each row were sampled from, of at most one row a rank, as the model has it now, or another
        one; a gradient comes from the own."""
        place = self._place(rows)
        own = self._row_distribution(rows[place], by)
        counts = [sum(len(batch.logprobs) for batch in row) for row in rows]
        mine = torch.stack((own.logprobs, own.entropy), 1).detach()
        given = self._ranks.gather(mine, [counts[min(rank, len(rows) - 1)] for rank in range(self._ranks.size)])
        found = [TokenDistribution(*columns.unbind(1)) for columns in given[: len(rows)]]
        found[place] = own
        return found

    def _row_distribution(self, batches: Sequence[Batch], by: Reference | None = None) -> TokenDistribution:
        """What the tokens of a row were sampled from, which these batches share."""
        counts, temperature = [len(batch.logprobs) for batch in batches], self._temperature
        heats = [batch.heat(temperature) for batch in batches]
        heat: float | Tensor = temperature
        if any(isinstance(one, Tensor) for one in heats):
            each = zip(heats, counts, strict=True)
            columns = [one if isinstance(one, Tensor) else torch.full((count, 1), one) for one, count in each]
            heat = torch.cat(columns).to(self.model.device)
        return (by or self.model).distribution(row_of(batches), heat)

    @torch.no_grad()
    def _compare(self, trajectories: Sequence[TrajectoryData]) -> None:
        wanting = self._agreement.wanting(trajectories)
        try:
            check_trajectories(wanting, self._vocabulary)
        except UnusableGroup:
            return
        packer = Packer[None](self._row_tokens)
        pieces = [PackedTrajectory(None, trajectory, 0.0) for trajectory in wanting]
        parts = [part for (part,) in (*packer.take(pieces), *packer.rest())]
        for begin in range(0, len(parts), self._ranks.size):
            together = parts[begin : begin + self._ranks.size]
            for part, now in zip(together, self._distributions([[part.batch] for part in together]), strict=True):
                self._agreement.compare(part.batch, now.logprobs.cpu(), part.workers, {})

    def _has_gradient(self) -> bool:
        return bool(self._trained)

    def _make_update(self, share: float) -> float:
        self._trained.clear()
        norms = torch.stack([torch.linalg.vector_norm(total) for total in self._sums])
        all_norms = torch.cat(self._ranks.gather(norms, [len(norms)] * self._ranks.size))
        norm = torch.linalg.vector_norm(all_norms).item() / share
        scale = min(1.0, self._settings.gradient_clip / max(norm, 1e-12)) / share
        home = self._masters[0].device
        self.optimizer.step([total.mul_(scale).to(home) for total in self._sums], self._rate)
        self._forget_sums()
        self._take_masters()
        return norm

    @torch.no_grad()
    def _take_masters(self) -> None:
        for parameter, master in zip(self._parameters, self._masters, strict=True):
            if parameter is not master:
                parameter.copy_(master)

    def _shape(self, place: int) -> tuple[int, ...]:
        return self._shapes[self._names[place]]


def computed_in(own: TransformersSettings, device: torch.device) -> torch.dtype:
    """The type in which rows are computed."""
    if own.dtype == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    return torch.bfloat16 if own.dtype == "bfloat16" else torch.float32


def _split(row: TokenDistribution, batches: Sequence[Batch]) -> Iterator[TokenDistribution]:
    """Yield each batch's own of a row's."""
    counts = [len(batch.logprobs) for batch in batches]
    for logprobs, entropy in zip(row.logprobs.split(counts), row.entropy.split(counts), strict=True):
        yield TokenDistribution(logprobs, entropy)


def _split_beside(row: OtherLogprobs, batches: Sequence[Batch]) -> list[OtherLogprobs]:
    """Each batch's own of a row's."""
    counts = [len(batch.logprobs) for batch in batches]
    columns = [[None] * len(counts) if column is None else column.split(counts) for column in row]
    return [OtherLogprobs(*each) for each in zip(*columns, strict=True)]


def _nothing(row: TokenDistribution) -> Tensor:
    """A loss whose gradient is zero: of a rank that has no row of its own, or nothing to train in it."""
    return row.logprobs.sum() * 0.0
