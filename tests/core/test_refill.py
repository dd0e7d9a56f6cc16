"""Members of a group that infrastructure has failed are replaced within the step, and nothing else is."""

from collections.abc import Callable

import pytest

from elastic.core import commands as c
from elastic.core import events as e
from elastic.core.types import NS_PER_S, FinishReason, GroupState, InfrastructureCause
from elastic.testing.faults.core.settings import SMALL_LIMITS
from tests.core.conftest import CoreHarness

ONE, TWO, THREE = "0/0/0", "0/0/1", "0/0/2"
MakeCore = Callable[..., CoreHarness]


def started(make_core: MakeCore, **plan: int) -> CoreHarness:
    core = make_core(**({"groups": 2, "refill_most": 2} | plan))
    core.trainer(capacity=8)
    return core


def unscored(core: CoreHarness, trajectory: str, *, retry_helps: bool = True) -> list[c.Command]:
    """The trajectory ends, and no function can score it."""
    core.tell(e.RewardRequested(trajectory=trajectory, tokens=5))
    for attempt in range(1, SMALL_LIMITS.score_attempts_max + 1):
        failed = e.RewardFailed(trajectory=trajectory, attempt=attempt, cause="it died", retry_helps=retry_helps)
        core.tell(failed)
        if not retry_helps:
            break
        if attempt < SMALL_LIMITS.score_attempts_max:
            core.wait(4 * SMALL_LIMITS.score_retry_ns / NS_PER_S, ("trainer",))
    return core.out


def sent_to(core: CoreHarness) -> c.StartTurn:
    """The order of the turn that was asked for, once a worker may have it."""
    if not core.sent(c.StartTurn):
        core.wait(5.0, ("trainer",))
    return core.sent(c.StartTurn)[-1]


def give_up(core: CoreHarness, trajectory: str, turn: str = "") -> str:
    """Engines fail with the trajectory's turn so often that it is given up; returns the cause."""
    core.request(trajectory, turn)
    for _ in range(SMALL_LIMITS.max_engine_errors):
        core.tokens(sent_to(core), 0, finish=FinishReason.ERROR)
    return core.one(c.FailTurn).cause


def engines_fail(core: CoreHarness, trajectory: str) -> list[c.Command]:
    """The environment hears that its turn was given up, and ends."""
    return core.tell(e.TrajectoryFailed(trajectory=trajectory, cause=give_up(core, trajectory)))


def refilled(commands: list[c.Command]) -> list[str]:
    """In whose place another one comes."""
    return [command.replaces for command in commands if isinstance(command, c.RefillMember)]


def members(core: CoreHarness, group: str = "0/0") -> dict[str, float | str | None]:
    assert core.scheduler.step is not None
    return core.scheduler.step.groups[group].members


def finish(core: CoreHarness, trajectory: str, reward: float) -> list[c.Command]:
    return core.tell(e.TrajectoryFinished(trajectory=trajectory, reward=reward, tokens=1))


@pytest.mark.parametrize(
    ("fail", "cause"), [(unscored, InfrastructureCause.REWARD), (engines_fail, InfrastructureCause.ENGINE)]
)
def test_a_member_that_infrastructure_has_failed_is_replaced(
    make_core: MakeCore, fail: Callable[..., list[c.Command]], cause: InfrastructureCause
) -> None:
    core = started(make_core)
    fail(core, ONE)
    assert core.one(c.RefillMember) == c.RefillMember(trajectory=THREE, replaces=ONE, cause=cause)
    assert members(core)[THREE] is None
    assert core.scheduler.pieces[0].outcomes.refilled == {cause: 1}


@pytest.mark.parametrize("cause", ["the environment raised RuntimeError", "no room", "engine error: mine"])
def test_what_is_an_episodes_own_is_not_replaced_whatever_it_says(make_core: MakeCore, cause: str) -> None:
    core = started(make_core)
    assert not refilled(core.tell(e.TrajectoryFailed(trajectory=ONE, cause=cause)))
    assert not refilled(unscored(core, TWO, retry_helps=False))
    assert len(members(core)) == 2


def test_an_episode_that_has_gone_on_after_a_turn_was_given_up_fails_for_its_own_cause(make_core: MakeCore) -> None:
    core = started(make_core)
    give_up(core, ONE)
    core.request(ONE, turn=f"{ONE}#1")
    core.tokens(sent_to(core), 3, finish=FinishReason.STOP)
    assert not refilled(core.tell(e.TrajectoryFailed(trajectory=ONE, cause="it broke")))


def test_a_place_is_refilled_so_often_and_no_more(make_core: MakeCore) -> None:
    core = started(make_core)
    for number, trajectory in enumerate((ONE, THREE, "0/0/3")):
        assert refilled(unscored(core, trajectory)) == ([trajectory] if number < 2 else [])
    assert [m for m, outcome in members(core).items() if outcome is None] == [TWO]


def test_none_is_replaced_without_refills(make_core: MakeCore) -> None:
    core = started(make_core, refill_most=0)
    assert not refilled(unscored(core, ONE))


def test_the_last_trajectory_of_a_step_is_not_replaced(make_core: MakeCore) -> None:
    """Nothing else would be waited for."""
    core = started(make_core, groups=1)
    finish(core, TWO, 1.0)
    assert not refilled(unscored(core, ONE))
    assert core.one(c.DropGroup).reason.startswith("infrastructure")


def test_a_group_is_trained_on_with_whom_it_has_got_in_the_place_of_others(make_core: MakeCore) -> None:
    core = started(make_core)
    unscored(core, ONE)
    finish(core, TWO, 1.0)
    assert core.scheduler.step is not None
    assert core.scheduler.step.groups["0/0"].state is GroupState.RUNNING
    finish(core, THREE, 0.0)
    finish(core, "0/1/0", 0.0)
    finish(core, "0/1/1", 1.0)
    core.tell(e.WorkerSlept(worker="trainer", epoch=1))
    assert core.one(c.TrainGroup).trajectories == (TWO, THREE)


def test_what_has_failed_does_not_age_its_group(make_core: MakeCore) -> None:
    """Its tokens are not trained on."""
    core = started(make_core)
    core.request(ONE)
    core.tokens(core.one(c.StartTurn), 3, finish=FinishReason.STOP)
    give_up(core, ONE, f"{ONE}#1")
    core.tell(e.TrajectoryFailed(trajectory=ONE, cause="engine error"))
    assert core.one(c.RefillMember).replaces == ONE
    assert core.scheduler.step is not None
    assert core.scheduler.step.groups["0/0"].oldest_token is None
