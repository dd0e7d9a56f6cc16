"""The reserved trainer as a library: groups in, weights out, the same whatever the order of arrival.

A group's gradient is computed when it arrives, from its own trajectories alone, and summed exactly. Steps, mini-batches
and what is left out of them: `elastic.worker.trainer.groups`.
"""

import time
from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from elastic.config import TrainerConfig
from elastic.core.ids import provider_of
from elastic.engine.model.qwen3 import Qwen3
from elastic.protocol.wire import TrainGroupFrame, TrajectoryData
from elastic.system.parking import Switch
from elastic.system.parking.tensors import ParkedTensors, held_bytes
from elastic.worker.trainer.adamw import AdamW
from elastic.worker.trainer.batches import Batch, UnusableGroup, check_trajectories, micro_batches, workers_of
from elastic.worker.trainer.distribution import Head, TokenDistribution, token_distribution
from elastic.worker.trainer.embedded.accumulator import GradientAccumulator, GradientOverflow
from elastic.worker.trainer.groups import GroupFigures
from elastic.worker.trainer.objective import OtherLogprobs
from elastic.worker.trainer.resumable import ResumableTrainer
from elastic.worker.trainer.sources import SourceOf


class GRPOTrainer(ResumableTrainer):
    """Trains `model` in place; its float32 parameters are the masters. See `ResumableTrainer`."""

    def __init__(
        self,
        settings: TrainerConfig,
        model: Qwen3,
        groups: int,
        temperature: float,
        steps: int | None = None,
        float32: Collection[str] = (),
        reference: Qwen3 | None = None,
        source_of: SourceOf = provider_of,
    ) -> None:
        super().__init__(settings, model.config.vocab_size, groups, temperature, steps, source_of=source_of)
        self.model = model.float().train()
        self.reference = None if reference is None else reference.float().requires_grad_(False)
        self._types = {
            name: torch.float32 if name in float32 else torch.bfloat16 for name, _ in model.named_parameters()
        }
        self._names = list(self._types)
        self._parameters = self._masters = list(model.parameters())
        self._device = self._parameters[0].device
        self.accumulator = GradientAccumulator(self._parameters)
        """Sums up the gradients of the minibatch that is under way."""
        self.optimizer = AdamW(self._parameters, settings.betas, settings.adam_epsilon, settings.weight_decay)
        self._minibatch_has_gradient = False
        self._parked = ParkedTensors()

    def tensors(self) -> dict[str, Tensor]:
        """What rollouts use: a copy of each parameter, where that is, under its Hugging Face name, rounded unless it is
        one that travels in `float32`."""
        return {
            name: parameter.detach().to(dtype, copy=True).contiguous()
            for (name, dtype), parameter in zip(self._types.items(), self._parameters, strict=True)
        }

    def park(self) -> Switch:
        """Take masters, moments and the gradients of the step under way off the device; `save` may still be called."""
        begun_s = time.monotonic()
        moments = (*self.optimizer.exp_avg, *self.optimizer.exp_avg_sq)
        frozen = () if self.reference is None else self.reference.parameters()
        state = (*self._parameters, *moments, *self._first_weights.copies, *frozen)
        sums = self.accumulator.sums
        if self.accumulator.is_zero:
            size_bytes = self._parked.park(state, zeros=sums)
        else:
            size_bytes = self._parked.park((*state, *sums))
        return Switch(time.monotonic() - begun_s, size_bytes, held_bytes(self._device))

    def resume(self) -> Switch:
        """Bring them back, bit for bit."""
        begun_s = time.monotonic()
        size_bytes = self._parked.resume()
        return Switch(time.monotonic() - begun_s, size_bytes)

    def _learn(self, group: TrainGroupFrame, advantages: Sequence[float], figures: GroupFigures) -> None:
        gradient = self._gradient(group, advantages, figures)
        if not gradient:
            return
        try:
            self.accumulator.add(gradient)
        except GradientOverflow as error:
            raise UnusableGroup(str(error)) from error
        self._minibatch_has_gradient = True

    def _gradient(self, group: TrainGroupFrame, advantages: Sequence[float], figures: GroupFigures) -> Sequence[Tensor]:
        """The gradient of the group's loss, a sum over its tokens; empty where none of them may be trained on."""
        total: Sequence[Tensor] = ()
        workers = workers_of(group.trajectories)
        for batch in micro_batches(group.trajectories, advantages, self._settings.micro_batch_tokens):
            part = self._batch_gradient(batch.to(self._device), workers, group.bounds, figures)
            if total and part:
                total = [have.add_(more) for have, more in zip(total, part, strict=True)]
            else:
                total = total or part
        return total

    def _batch_gradient(
        self, batch: Batch, workers: Sequence[str], bounds: Mapping[str, float | None], figures: GroupFigures
    ) -> Sequence[Tensor]:
        beside = self._beside(batch)
        now = self._distribution(batch)
        keep = self._agreement.compare(batch, now.logprobs, workers, bounds)
        loss = self._loss(batch, now, beside, keep, figures, workers)
        return () if loss is None else torch.autograd.grad(loss, self._parameters)

    @torch.no_grad()
    def _beside(self, batch: Batch) -> OtherLogprobs:
        first = None
        if self._asks_first_weights:
            with self._first_weights.there(self._parameters):
                first = self._distribution(batch).logprobs
        reference = None if self.reference is None else self._distribution(batch, self.reference).logprobs
        return OtherLogprobs(first, reference)

    def _keep_first_weights(self) -> None:
        self._first_weights.keep(self._parameters)

    def _distribution(self, batch: Batch, by: Qwen3 | None = None) -> TokenDistribution:
        """What the batch's tokens were sampled from, as the model has it now, or another one."""
        model = by or self.model
        states = model.states(batch.token_ids, batch.lengths)[batch.predicting()]
        head = Head(model.lm_head.weight)
        return token_distribution(states, head, batch.token_ids[batch.trained], batch.heat(self._temperature))

    @torch.no_grad()
    def _compare(self, trajectories: Sequence[TrajectoryData]) -> None:
        wanting = self._agreement.wanting(trajectories)
        try:
            check_trajectories(wanting, self._vocabulary)
        except UnusableGroup:
            return
        workers = workers_of(wanting)
        for batch in micro_batches(wanting, [0.0] * len(wanting), self._settings.micro_batch_tokens):
            there = batch.to(self._device)
            self._agreement.compare(there, self._distribution(there).logprobs, workers, {})

    def _settle(self) -> None:
        """Nothing was put off."""

    def _has_gradient(self) -> bool:
        return self._minibatch_has_gradient

    def _make_update(self, share: float) -> float:
        self._minibatch_has_gradient = False
        gradients = self.accumulator.take(share)
        norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(gradient) for gradient in gradients]))
        scale = min(1.0, self._settings.gradient_clip / max(norm.item(), 1e-12))
        self.optimizer.step([gradient * scale for gradient in gradients], self._rate)
        return norm.item()

    def _take_masters(self) -> None:
        """They are what is computed with."""
