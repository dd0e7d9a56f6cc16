"""What disagrees with the trainer's own log-probabilities is left out, in whatever order groups come."""

import itertools
from collections.abc import Callable
from dataclasses import replace

import msgspec
import pytest
import torch

from elastic.core.agreement import LAST_TOKENS
from elastic.protocol.wire import TrainGroupFrame, TrajectoryData
from elastic.testing.trajectories import PlainTrajectory
from elastic.worker.trainer.batches import micro_batches
from elastic.worker.trainer.distribution import Head, token_distribution
from elastic.worker.trainer.embedded.trainer import GRPOTrainer
from tests.trainer.test_trainer import GROUPS, equal, groups_of

HONEST, BYZANTINE = "reserved-1/w", "spot-1/w"


def truthful(made: GRPOTrainer, group: TrainGroupFrame) -> TrainGroupFrame:
    """The group with the log-probabilities that the trainer's weights give its tokens."""
    trajectories: list[TrajectoryData] = []
    for data in group.trajectories:
        (batch,) = micro_batches([data], [0.0], 10**6)
        with torch.no_grad():
            states = made.model.states(batch.token_ids)[batch.predicting()]
            head = Head(made.model.lm_head.weight)
            found = iter(token_distribution(states, head, batch.token_ids[batch.trained], 1.0).logprobs.tolist())
        plain = PlainTrajectory.of(data)
        plain.logprobs = [next(found) if sampled else 0.0 for sampled in plain.trained]
        plain.versions = [made.version] * len(plain.trained)
        plain.origins = [(HONEST, sum(plain.trained))]
        trajectories.append(plain.packed())
    return msgspec.structs.replace(group, trajectories=trajectories)


def lying(data: TrajectoryData, by: float = 2.0, version: int = 0) -> TrajectoryData:
    """The same tokens, as a worker has them that generates with other weights."""
    plain = PlainTrajectory.of(data)
    plain.logprobs = [logprob - by for logprob in plain.logprobs]
    plain.versions = [version] * len(plain.versions)
    plain.origins = [(BYZANTINE, sum(plain.trained))]
    return plain.packed()


def changed(data: TrajectoryData, **fields: object) -> TrajectoryData:
    return replace(PlainTrajectory.of(data), **fields).packed()


def without_a_member(group: TrainGroupFrame, member: int, **changes: object) -> TrainGroupFrame:
    trajectories = list(group.trajectories)
    trajectories[member] = lying(trajectories[member], **changes)  # type: ignore[arg-type]
    return msgspec.structs.replace(group, trajectories=trajectories)


@pytest.fixture
def even(trainer: Callable[..., GRPOTrainer], group) -> list[TrainGroupFrame]:
    return [truthful(trainer(), one) for one in groups_of(group, 5)]


def step(made: GRPOTrainer, groups: list[TrainGroupFrame]) -> dict[str, torch.Tensor]:
    for one in groups:
        made.train_group(one)
    made.update()
    return {name: tensor.clone() for name, tensor in made.tensors().items()}


@pytest.mark.parametrize("updates", [1, 2])
def test_tokens_of_other_weights_teach_nothing_in_whatever_order_they_come(trainer, even, updates: int) -> None:
    groups = [without_a_member(one, 1) for one in even]
    learnt: list[dict[str, torch.Tensor]] = []
    for by in (2.0, 5.0):
        for order in itertools.islice(itertools.permutations(groups), 0, 24, 11):
            made = trainer(updates_per_step=updates)
            sent = [without_a_member(even[one.index], 1, by=by) for one in order]
            learnt.append(step(made, sent))
            assert made.metrics["tokens_left_out"] == sum(one.trajectories[1].sampled.tokens for one in groups)
            assert made.metrics["ratio_max"] < 1.1 or updates > 1
    assert all(equal(learnt[0], other) for other in learnt[1:])
    assert not equal(learnt[0], step(trainer(updates_per_step=updates), even))


def test_nothing_changes_where_nobody_lies_whoever_has_generated_it(trainer, even) -> None:
    plain = [
        msgspec.structs.replace(one, trajectories=[changed(d, origins=[]) for d in one.trajectories]) for one in even
    ]
    split = [
        msgspec.structs.replace(
            one,
            trajectories=[
                changed(d, origins=[("a", 1), ("b", d.sampled.tokens - 1)][: 1 + (d.sampled.tokens > 1)])
                for d in one.trajectories
            ],
        )
        for one in even
    ]
    learnt = [step(trainer(), groups) for groups in (plain, even, split)]
    assert equal(learnt[0], learnt[1])
    assert equal(learnt[0], learnt[2])


def test_stale_tokens_are_not_compared_and_go_with_their_worker(trainer, even) -> None:
    made = trainer()
    made.version = 1
    made._begin_step()
    for one in even:
        fresh = [changed(data, versions=[1] * len(data.token_ids)) for data in one.trajectories]
        made.train_group(without_a_member(msgspec.structs.replace(one, trajectories=fresh), 1, version=0))
    made.update()
    assert made.metrics["tokens_left_out"] == 0
    assert {check.worker for check in made.take_checks()} == {HONEST}


def test_none_of_a_workers_tokens_count_that_was_found_wrong(trainer, even) -> None:
    made = trainer()
    for one in even:
        wrong = without_a_member(one, 1, by=0.0)
        made.train_group(msgspec.structs.replace(wrong, bounds={BYZANTINE: None}))
    made.update()
    assert made.metrics["tokens_left_out"] == sum(one.trajectories[1].sampled.tokens for one in even)
    assert {check.worker for check in made.take_checks()} == {HONEST}


def test_an_engines_declared_noise_is_allowed(trainer, even) -> None:
    made = trainer()
    for one in even:
        noisy = without_a_member(one, 1, by=0.3)
        made.train_group(msgspec.structs.replace(noisy, bounds={BYZANTINE: 0.4}))
    made.update()
    assert made.metrics["tokens_left_out"] == 0
    checks = {check.worker: check for check in made.take_checks()}
    assert checks[BYZANTINE].mean == pytest.approx(0.3, abs=1e-4)
    assert checks[HONEST].mean < 1e-5


def test_groups_that_are_skipped_are_compared_too_as_far_as_that_tells_something_new(trainer, even) -> None:
    """Garbage earns no rewards that differ."""
    made = trainer()
    for one in even:
        made.skip_group(one.index, 0, [lying(data) for data in one.trajectories])
    made.update()
    (check,) = made.take_checks()
    assert (check.worker, check.version) == (BYZANTINE, 0)
    assert check.mean == pytest.approx(2.0, abs=1e-3)
    assert made.take_checks() == []
    many = [lying(data, version=1) for data in even[0].trajectories * 200]
    made.skip_group(0, 0, many[: len(many) // 2])
    made.skip_group(1, 0, many[len(many) // 2 :])
    for index in range(2, GROUPS):
        made.skip_group(index)
    made.update()
    (check,) = made.take_checks()
    assert LAST_TOKENS <= check.tokens <= sum(data.sampled.tokens for data in many) // 2
