"""Tokens that the trainer has left behind are as if the policy had not sampled them; their members' rewards count."""

from pathlib import Path
from random import Random

import msgspec
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from elastic.protocol.wire import TrainGroupFrame, TrajectoryData
from elastic.testing.trajectories import PlainTrajectory
from elastic.worker.trainer.batches import without_overtaken
from tests.trainer.test_trainer import equal, groups_of, state_of

OLDEST = 3

tokens = st.tuples(st.booleans(), st.integers(0, 5))
"""Whether the policy has sampled it, and of which version it is."""


def trajectory(drawn: list[tuple[bool, int]]) -> PlainTrajectory:
    marks, versions = [int(mark) for mark, _ in drawn], [version for _, version in drawn]
    ids, logprobs = list(range(len(drawn))), [-float(place) for place in range(len(drawn))]
    return PlainTrajectory("0/0/0", ids, marks, logprobs, versions, origins=origins_of(drawn))


def origins_of(drawn: list[tuple[bool, int]]) -> list[tuple[str, int]]:
    """Who sampled what: of each version another worker."""
    found: list[tuple[str, int]] = []
    for worker in (str(version) for mark, version in drawn if mark):
        count = found.pop()[1] + 1 if found and found[-1][0] == worker else 1
        found.append((worker, count))
    return found


def masked(drawn: list[tuple[bool, int]]) -> list[tuple[bool, int]]:
    return [(mark and version >= OLDEST, version) for mark, version in drawn]


@given(st.lists(tokens, min_size=1, max_size=20))
def test_what_is_overtaken_is_no_longer_the_policys(drawn: list[tuple[bool, int]]) -> None:
    packed, expected = trajectory(drawn).packed(), trajectory(masked(drawn)).packed()
    assert packed.sampled.since(OLDEST) == expected.sampled


@given(st.lists(st.lists(tokens, min_size=1, max_size=6), min_size=1, max_size=4))
def test_rows_without_a_token_are_left_out_and_the_others_keep_their_advantages(
    rows: list[list[tuple[bool, int]]],
) -> None:
    group = TrainGroupFrame(5, "5/0", 0, [trajectory(row).packed() for row in rows], oldest_version=OLDEST)
    kept, advantages = without_overtaken(group, [float(place) for place in range(len(rows))])
    left = [place for place, row in enumerate(rows) if any(mark for mark, _ in masked(row))]
    assert advantages == [float(place) for place in left]
    assert kept.trajectories == [trajectory(masked(rows[place])).packed() for place in left]


@settings(max_examples=5, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 2**31))
def test_a_step_without_overtaken_tokens_is_that_of_a_group_that_never_had_them(
    trainer, group, tmp_path_factory, seed: int
) -> None:
    rng, directory = Random(seed), tmp_path_factory.mktemp("overtaken")

    def aged(data: TrajectoryData) -> tuple[PlainTrajectory, PlainTrajectory]:
        plain = PlainTrajectory.of(data)
        plain.versions = [rng.choice((0, 1)) for _ in plain.versions]
        plain.versions[-1] = 1  # Of each member something is left, and it counts as a sequence.
        without = PlainTrajectory.of(plain.packed())
        without.trained = [mark and version for mark, version in zip(plain.trained, plain.versions, strict=True)]
        return plain, without

    def trained(groups: list[TrainGroupFrame]) -> tuple[dict, dict[str, float]]:
        made = trainer(len(groups))
        made.version = 1
        for one in groups:
            made.train_group(one)
        metrics = made.update()
        return state_of(made, Path(directory) / "state"), metrics

    whole, without = list[TrainGroupFrame](), list[TrainGroupFrame]()
    for one in groups_of(group, seed, 2):
        pairs = [aged(data) for data in one.trajectories]
        frame = msgspec.structs.replace(one, trajectories=[plain.packed() for plain, _ in pairs], oldest_version=1)
        whole.append(frame)
        without.append(msgspec.structs.replace(one, trajectories=[plain.packed() for _, plain in pairs]))
    (state, metrics), (expected, expected_metrics) = trained(whole), trained(without)
    assert metrics == expected_metrics
    assert equal(state, expected)
