"""With redundancy more members begin than are wanted: the first are taken, and what still runs is cut off."""

from collections.abc import Callable

import pytest

from elastic.core import commands as c
from elastic.core import events as e
from elastic.core.types import GroupState, PlannedEnvironment
from tests.core.conftest import CoreHarness

MakeCore = Callable[..., CoreHarness]
ENVIRONMENTS = (PlannedEnvironment(name="lake", members=4),)


def started(make_core: MakeCore) -> CoreHarness:
    core = make_core(groups=1, group_size=2, environments=ENVIRONMENTS)
    core.trainer(capacity=8)
    return core


def ended(core: CoreHarness, member: int, reward: float | None = 1.0) -> list[c.Command]:
    name = f"0/0/{member}"
    if reward is None:
        return core.tell(e.TrajectoryFailed(trajectory=name, cause="it hung"))
    return core.tell(e.TrajectoryFinished(trajectory=name, reward=reward, tokens=0))


def test_the_first_members_are_taken_and_the_others_cut_off(make_core: MakeCore) -> None:
    core = started(make_core)
    (start,) = [command for command in core.out if isinstance(command, c.StartGroup)] or [None]
    group = core.scheduler.step.groups["0/0"]  # type: ignore[union-attr]
    assert len(group.members) == 4
    assert start is None or len(start.trajectories) == 4
    core.request("0/0/3")
    ended(core, 2, 1.0)
    ended(core, 0, None)
    assert group.state is GroupState.RUNNING
    ended(core, 1, 0.0)
    assert {one.trajectory for one in core.sent(c.CancelTrajectory)} == {"0/0/3"}
    assert list(group.finished) == ["0/0/1", "0/0/2"]
    assert group.failures == ["it hung"], "what is cut off has not failed"
    assert group.state in (GroupState.READY, GroupState.TRAINING)
    run = core.scheduler.pieces[0]
    assert run.outcomes.cut_off == {"lake": 1}
    assert not run.turns.live, "nothing is generated for what was cut off"
    assert ended(core, 3, 1.0) == [], "what comes too late counts for nothing"
    assert list(group.finished) == ["0/0/1", "0/0/2"]


def test_a_group_too_few_of_whose_members_come_to_a_reward_has_failed_all_the_same(make_core: MakeCore) -> None:
    core = started(make_core)
    for member in range(3):
        ended(core, member, None)
    ended(core, 3, 1.0)
    group = core.scheduler.step.groups["0/0"]  # type: ignore[union-attr]
    assert group.state is GroupState.DROPPED
    assert core.scheduler.pieces[0].outcomes.cut_off == {}


@pytest.mark.parametrize("members", [0, 2])
def test_without_redundancy_nothing_is_cut_off(make_core: MakeCore, members: int) -> None:
    core = make_core(groups=1, group_size=2, environments=(PlannedEnvironment(name="lake", members=members),))
    core.trainer(capacity=8)
    assert len(core.scheduler.step.groups["0/0"].members) == 2  # type: ignore[union-attr]
    ended(core, 0)
    ended(core, 1, 0.0)
    assert core.sent(c.CancelTrajectory) == []
