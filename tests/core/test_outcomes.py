"""A run whose trajectories fail says so at once, and is no success in the end (invariant 11)."""

import pytest

from elastic.core import events as e
from elastic.core.agreement import OUTCOME_STEPS
from elastic.core.scheduler import Phase
from tests.core.conftest import CoreHarness

BROKEN = "the environment raised Broken: no lake today"


def step(core: CoreHarness, number: int, *outcomes: float | str, unusable: int = 0) -> None:
    """A step of one group, whose members come to these rewards, or fail for these causes."""
    if number:
        core.tell(e.WorkerAwoke(worker="trainer", epoch=1))
    for member, outcome in enumerate(outcomes):
        trajectory = f"{number}/0/{member}"
        if isinstance(outcome, str):
            core.tell(e.TrajectoryFailed(trajectory=trajectory, cause=outcome))
        else:
            core.tell(e.TrajectoryFinished(trajectory=trajectory, reward=outcome, tokens=1))
    core.tell(e.WorkerSlept(worker="trainer", epoch=1))
    if (group := core.scheduler.training) is not None:
        core.tell(e.GroupTrained(worker="trainer", epoch=1, group=group))
    core.tell(
        e.WeightsPublished(
            worker="trainer", epoch=1, version=number + 1, unusable=unusable, reason="odd" * bool(unusable)
        )
    )


def warned(core: CoreHarness) -> list[str]:
    return [warning.message for warning in core.scheduler.warnings(0)]


def failing(make_core, steps: int, *outcomes: float | str, most: float = 0.5, done: int = 0) -> CoreHarness:
    core = make_core(steps=steps, group_size=len(outcomes), max_failed_share=most)
    core.trainer()
    for number in range(done or steps):
        step(core, number, *outcomes)
    return core


def test_a_run_all_of_whose_trajectories_failed_is_not_finished(make_core) -> None:
    core = failing(make_core, 2, BROKEN, BROKEN)
    assert core.scheduler.failed == (
        "4 of 4 trajectories of the last 2 steps have failed, more than rollout.max_failed_share = 0.5 allows; "
        f"{BROKEN} (4 times)"
    )
    assert warned(core)[0] == f"step 0 had nothing to train on: 2 of 2 trajectories failed: {BROKEN} (2 times)"


def test_a_run_is_judged_as_soon_as_there_are_enough_steps(make_core) -> None:
    core = failing(make_core, 100, BROKEN, BROKEN, done=OUTCOME_STEPS - 1)
    assert core.scheduler.phase is Phase.RUNNING
    step(core, OUTCOME_STEPS - 1, BROKEN, BROKEN)
    assert f"20 of 20 trajectories of the last {OUTCOME_STEPS} steps have failed" in core.scheduler.failed
    assert core.scheduler.outcomes.failing(0.5) == core.scheduler.failed


def test_failures_of_long_ago_are_forgiven(make_core) -> None:
    core = failing(make_core, 100, BROKEN, BROKEN, done=5)
    for number in range(5, 5 + OUTCOME_STEPS):
        step(core, number, 0.0, 1.0)
    assert core.scheduler.phase is Phase.RUNNING


@pytest.mark.parametrize(
    ("outcomes", "most", "fails"),
    [
        ((BROKEN, 1.0, 0.0, 0.5), 0.5, False),
        ((BROKEN, BROKEN, 0.0, 0.5), 0.5, False),
        ((BROKEN, BROKEN, BROKEN, 0.5), 0.5, True),
        ((BROKEN, 1.0, 0.0, 0.5), 0.2, True),
        ((BROKEN, BROKEN), 1.0, False),
        ((BROKEN, 1.0), 0.0, True),
    ],
)
def test_a_larger_share_than_is_allowed_ends_a_run(make_core, outcomes, most: float, fails: bool) -> None:
    core = failing(make_core, 2, *outcomes, most=most)
    assert bool(core.scheduler.failed) == fails


def test_groups_of_equal_rewards_are_no_failures(make_core) -> None:
    core = failing(make_core, 2, 1.0, 1.0)
    assert core.scheduler.failed == ""
    assert warned(core) == [
        f"step {number} had nothing to train on: groups were dropped: zero_variance" for number in range(2)
    ]


def test_a_step_with_something_to_train_on_warns_of_nothing(make_core) -> None:
    core = failing(make_core, 2, BROKEN, 1.0, 0.0)
    assert warned(core) == []


def test_a_step_whose_groups_all_gave_no_gradient_has_nothing_to_train_on(make_core) -> None:
    core = make_core(steps=3, group_size=2)
    core.trainer()
    step(core, 0, 1.0, 0.0, unusable=1)
    assert warned(core) == ["step 0 had nothing to train on: no gradient came of 1 groups: odd"]


def test_a_cause_of_many_words_is_told_in_few(make_core) -> None:
    core = make_core(steps=3, group_size=2)
    core.trainer()
    step(core, 0, "x" * 2000, "x" * 2000)
    (words,) = warned(core)
    assert words.startswith("step 0 had nothing to train on: 2 of 2 trajectories failed: xxx")
    assert "x" * 200 + "… (2 times)" in words
    assert "x" * 201 not in words
