"""Rewards on functions: retried with back-off by the core, fenced by attempt, never a score when there is none."""

from collections.abc import Callable

import pytest

from elastic.core import commands as c
from elastic.core import events as e
from elastic.core.types import NS_PER_S, GroupState
from elastic.sim.settings import SMALL_LIMITS
from tests.core.conftest import Desk

ONE, TWO = "0/0/0", "0/0/1"
BACK_OFF_S = SMALL_LIMITS.score_retry_ns / NS_PER_S
TIMEOUT_S = SMALL_LIMITS.score_timeout_ns / NS_PER_S


@pytest.fixture
def desk(make_desk: Callable[..., Desk]) -> Desk:
    desk = make_desk(group_size=3)
    desk.trainer()
    return desk


def ask(desk: Desk, trajectory: str = ONE) -> list[c.Command]:
    return desk.tell(e.RewardRequested(trajectory=trajectory, tokens=5))


def score(desk: Desk, trajectory: str = ONE, attempt: int = 1, reward: float = 1.0) -> list[c.Command]:
    return desk.tell(e.RewardScored(trajectory=trajectory, attempt=attempt, reward=reward))


def fail(desk: Desk, trajectory: str = ONE, attempt: int = 1, *, retry_helps: bool = True) -> list[c.Command]:
    return desk.tell(
        e.RewardFailed(trajectory=trajectory, attempt=attempt, cause="its process died", retry_helps=retry_helps)
    )


def outcome(desk: Desk, trajectory: str = ONE) -> float | str | None:
    assert desk.scheduler.step is not None
    return desk.scheduler.step.groups["0/0"].members[trajectory]


def test_a_score_is_the_trajectorys_reward(desk: Desk) -> None:
    ask(desk)
    assert desk.one(c.ScoreTrajectory) == c.ScoreTrajectory(trajectory=ONE, attempt=1)
    assert outcome(desk) is None
    score(desk, reward=0.5)
    assert desk.one(c.RecordReward) == c.RecordReward(trajectory=ONE, reward=0.5)
    assert outcome(desk) == 0.5


def test_asking_twice_is_asking_once(desk: Desk) -> None:
    ask(desk)
    assert ask(desk) == []
    score(desk)
    assert ask(desk) == []


def test_a_failure_is_tried_again_after_a_back_off_that_doubles(desk: Desk) -> None:
    ask(desk)
    for attempt, delay_s in ((1, BACK_OFF_S), (2, 2 * BACK_OFF_S)):
        assert not fail(desk, attempt=attempt)
        assert not [k for k in desk.wait(delay_s * 0.9, ("trainer",)) if isinstance(k, c.ScoreTrajectory)]
        again = [k for k in desk.wait(delay_s * 0.2, ("trainer",)) if isinstance(k, c.ScoreTrajectory)]
        assert [k.attempt for k in again] == [attempt + 1]
    score(desk, attempt=3)
    assert outcome(desk) == 1.0


def test_after_the_last_attempt_it_is_unavailable_with_its_cause(desk: Desk) -> None:
    ask(desk)
    for attempt in range(1, SMALL_LIMITS.score_attempts_max + 1):
        fail(desk, attempt=attempt)
        if attempt < SMALL_LIMITS.score_attempts_max:
            desk.wait(4 * BACK_OFF_S, ("trainer",))
    recorded = desk.one(c.RecordReward)
    assert recorded.reward is None
    assert recorded.cause == "reward unavailable after 3 attempts: its process died" == outcome(desk)


def test_where_a_retry_cannot_help_there_is_none(desk: Desk) -> None:
    ask(desk)
    fail(desk, retry_helps=False)
    assert outcome(desk) == "reward unavailable after 1 attempt: its process died"


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_is_never_a_score(desk: Desk, reward: float) -> None:
    ask(desk)
    score(desk, reward=reward)
    assert outcome(desk) == f"reward unavailable after 1 attempt: the reward was {reward}"
    assert desk.one(c.RecordReward).reward is None


def test_no_answer_is_a_failure_and_what_comes_late_is_fenced(desk: Desk) -> None:
    ask(desk)
    again = desk.wait(TIMEOUT_S + 1.1 * BACK_OFF_S, ("trainer",))
    assert [k.attempt for k in again if isinstance(k, c.ScoreTrajectory)] == [2]
    score(desk, attempt=1, reward=0.0)
    assert outcome(desk) is None
    score(desk, attempt=2)
    score(desk, attempt=2, reward=0.0)
    assert outcome(desk) == 1.0


def test_as_many_at_once_as_the_pool_can_take(desk: Desk) -> None:
    for trajectory in (ONE, TWO):
        assert [k.trajectory for k in ask(desk, trajectory) if isinstance(k, c.ScoreTrajectory)] == [trajectory]
    assert not ask(desk, "0/0/2")
    fail(desk, TWO)
    assert desk.one(c.ScoreTrajectory).trajectory == "0/0/2"
    assert not [k for k in desk.wait(1.1 * BACK_OFF_S, ("trainer",)) if isinstance(k, c.ScoreTrajectory)]
    score(desk, ONE)
    assert desk.one(c.ScoreTrajectory) == c.ScoreTrajectory(trajectory=TWO, attempt=2)


def test_a_group_with_too_few_rewards_is_dropped_for_their_cause(desk: Desk) -> None:
    for trajectory in (ONE, TWO, "0/0/2"):
        ask(desk, trajectory)
        if trajectory == ONE:
            score(desk, ONE)
        else:
            fail(desk, trajectory, retry_helps=False)
    dropped = desk.one(c.DropGroup)
    assert dropped.reason == "infrastructure: reward unavailable after 1 attempt: its process died"


def test_a_group_is_ready_when_its_last_reward_is_there(desk: Desk) -> None:
    for trajectory in (ONE, TWO):
        ask(desk, trajectory)
    score(desk, ONE, reward=1.0)
    score(desk, TWO, reward=0.0)
    step = desk.scheduler.step
    assert step is not None
    assert step.groups["0/0"].state is GroupState.RUNNING
    ask(desk, "0/0/2")
    score(desk, "0/0/2")
    assert step.groups["0/0"].state is GroupState.READY


def test_a_trajectory_that_fails_meanwhile_is_scored_no_more(desk: Desk) -> None:
    ask(desk)
    desk.tell(e.TrajectoryFailed(trajectory=ONE, cause="its environment broke"))
    assert not score(desk)
    assert outcome(desk) == "its environment broke"


def test_a_trajectory_that_is_being_scored_has_no_more_turns(desk: Desk) -> None:
    desk.request(ONE)
    ask(desk)
    assert not desk.scheduler.turns.live
    assert not desk.request(ONE)
    assert not desk.scheduler.turns.live


def test_of_a_dropped_group_nothing_is_scored_any_more(desk: Desk) -> None:
    for trajectory in (ONE, TWO, "0/0/2"):
        ask(desk, trajectory)
    ended = desk.tell(e.StopRequested(reason="enough"))
    assert [type(k) for k in ended if isinstance(k, c.DropGroup | c.ScoreTrajectory)] == [c.DropGroup]


def test_the_end_of_the_run_ends_scoring(desk: Desk) -> None:
    ask(desk)
    desk.tell(e.StopRequested(reason="enough"))
    assert not desk.scheduler.scorings
    assert not [k for k in score(desk) if isinstance(k, c.RecordReward)]
