"""Rewards on functions: retried with back-off by the core, fenced by attempt, never a score when there is none."""

from collections.abc import Callable

import pytest

from elastic.core import commands as c
from elastic.core import events as e
from elastic.core.types import NS_PER_S, GroupState
from elastic.testing.faults.core.settings import SMALL_LIMITS
from tests.core.conftest import CoreHarness

ONE, TWO = "0/0/0", "0/0/1"
BACK_OFF_S = SMALL_LIMITS.score_retry_ns / NS_PER_S
TIMEOUT_S = SMALL_LIMITS.score_timeout_ns / NS_PER_S


@pytest.fixture
def core(make_core: Callable[..., CoreHarness]) -> CoreHarness:
    core = make_core(group_size=3)
    core.trainer()
    return core


def ask(core: CoreHarness, trajectory: str = ONE) -> list[c.Command]:
    return core.tell(e.RewardRequested(trajectory=trajectory, tokens=5))


def score(core: CoreHarness, trajectory: str = ONE, attempt: int = 1, reward: float = 1.0) -> list[c.Command]:
    return core.tell(e.RewardScored(trajectory=trajectory, attempt=attempt, reward=reward))


def fail(core: CoreHarness, trajectory: str = ONE, attempt: int = 1, *, retry_helps: bool = True) -> list[c.Command]:
    return core.tell(
        e.RewardFailed(trajectory=trajectory, attempt=attempt, cause="its process died", retry_helps=retry_helps)
    )


def outcome(core: CoreHarness, trajectory: str = ONE) -> float | str | None:
    assert core.scheduler.step is not None
    return core.scheduler.step.groups["0/0"].members[trajectory]


def test_a_score_is_the_trajectorys_reward(core: CoreHarness) -> None:
    ask(core)
    assert core.one(c.ScoreTrajectory) == c.ScoreTrajectory(trajectory=ONE, attempt=1)
    assert outcome(core) is None
    score(core, reward=0.5)
    assert core.one(c.RecordReward) == c.RecordReward(trajectory=ONE, reward=0.5)
    assert outcome(core) == 0.5


def test_asking_twice_is_asking_once(core: CoreHarness) -> None:
    ask(core)
    assert ask(core) == []
    score(core)
    assert ask(core) == []


def test_a_failure_is_tried_again_after_a_back_off_that_doubles(core: CoreHarness) -> None:
    ask(core)
    for attempt, delay_s in ((1, BACK_OFF_S), (2, 2 * BACK_OFF_S)):
        assert not fail(core, attempt=attempt)
        assert not [k for k in core.wait(delay_s * 0.9, ("trainer",)) if isinstance(k, c.ScoreTrajectory)]
        again = [k for k in core.wait(delay_s * 0.2, ("trainer",)) if isinstance(k, c.ScoreTrajectory)]
        assert [k.attempt for k in again] == [attempt + 1]
    score(core, attempt=3)
    assert outcome(core) == 1.0


def test_after_the_last_attempt_it_is_unavailable_with_its_cause(core: CoreHarness) -> None:
    ask(core)
    for attempt in range(1, SMALL_LIMITS.score_attempts_max + 1):
        fail(core, attempt=attempt)
        if attempt < SMALL_LIMITS.score_attempts_max:
            core.wait(4 * BACK_OFF_S, ("trainer",))
    recorded = core.one(c.RecordReward)
    assert recorded.reward is None
    assert recorded.cause == "reward unavailable after 3 attempts: its process died" == outcome(core)


def test_where_a_retry_cannot_help_there_is_none(core: CoreHarness) -> None:
    ask(core)
    fail(core, retry_helps=False)
    assert outcome(core) == "reward unavailable after 1 attempt: its process died"


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_is_never_a_score(core: CoreHarness, reward: float) -> None:
    ask(core)
    score(core, reward=reward)
    assert outcome(core) == f"reward unavailable after 1 attempt: the reward was {reward}"
    assert core.one(c.RecordReward).reward is None


def test_no_answer_is_a_failure_and_what_comes_late_is_fenced(core: CoreHarness) -> None:
    ask(core)
    again = core.wait(TIMEOUT_S + 1.1 * BACK_OFF_S, ("trainer",))
    assert [k.attempt for k in again if isinstance(k, c.ScoreTrajectory)] == [2]
    score(core, attempt=1, reward=0.0)
    assert outcome(core) is None
    score(core, attempt=2)
    score(core, attempt=2, reward=0.0)
    assert outcome(core) == 1.0


def test_as_many_at_once_as_the_pool_can_take(core: CoreHarness) -> None:
    for trajectory in (ONE, TWO):
        assert [k.trajectory for k in ask(core, trajectory) if isinstance(k, c.ScoreTrajectory)] == [trajectory]
    assert not ask(core, "0/0/2")
    fail(core, TWO)
    assert core.one(c.ScoreTrajectory).trajectory == "0/0/2"
    assert not [k for k in core.wait(1.1 * BACK_OFF_S, ("trainer",)) if isinstance(k, c.ScoreTrajectory)]
    score(core, ONE)
    assert core.one(c.ScoreTrajectory) == c.ScoreTrajectory(trajectory=TWO, attempt=2)


def test_a_group_with_too_few_rewards_is_dropped_for_their_cause(core: CoreHarness) -> None:
    for trajectory in (ONE, TWO, "0/0/2"):
        ask(core, trajectory)
        if trajectory == ONE:
            score(core, ONE)
        else:
            fail(core, trajectory, retry_helps=False)
    dropped = core.one(c.DropGroup)
    assert dropped.reason == "infrastructure: reward unavailable after 1 attempt: its process died"


def test_a_group_is_ready_when_its_last_reward_is_there(core: CoreHarness) -> None:
    for trajectory in (ONE, TWO):
        ask(core, trajectory)
    score(core, ONE, reward=1.0)
    score(core, TWO, reward=0.0)
    step = core.scheduler.step
    assert step is not None
    assert step.groups["0/0"].state is GroupState.RUNNING
    ask(core, "0/0/2")
    score(core, "0/0/2")
    assert step.groups["0/0"].state is GroupState.READY


def test_a_trajectory_that_fails_meanwhile_is_scored_no_more(core: CoreHarness) -> None:
    ask(core)
    core.tell(e.TrajectoryFailed(trajectory=ONE, cause="its environment broke"))
    assert not score(core)
    assert outcome(core) == "its environment broke"


def test_a_trajectory_that_is_being_scored_has_no_more_turns(core: CoreHarness) -> None:
    core.request(ONE)
    ask(core)
    assert not core.scheduler.turns.live
    assert not core.request(ONE)
    assert not core.scheduler.turns.live


def test_of_a_dropped_group_nothing_is_scored_any_more(core: CoreHarness) -> None:
    for trajectory in (ONE, TWO, "0/0/2"):
        ask(core, trajectory)
    ended = core.tell(e.StopRequested(reason="enough"))
    assert [type(k) for k in ended if isinstance(k, c.DropGroup | c.ScoreTrajectory)] == [c.DropGroup]


def test_the_end_of_the_run_ends_scoring(core: CoreHarness) -> None:
    ask(core)
    core.tell(e.StopRequested(reason="enough"))
    assert not core.scheduler.scorings
    assert not [k for k in score(core) if isinstance(k, c.RecordReward)]
