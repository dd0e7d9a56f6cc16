"""A step's batch: which groups it takes, in which places, and when nothing more can come."""

import pytest

from elastic.core.steps import BatchRule, Group, Step
from elastic.core.types import GroupState


def step_of(taking: BatchRule, size: int = 3, minibatches: int = 1, launched: int = 3) -> tuple[Step, list[Group]]:
    step = Step(0, 0, size, taking, minibatches, 0, [])
    return step, [step.launch(2, 0) for _ in range(launched)]


def ready(step: Step, *groups: Group) -> None:
    for group in groups:
        step.move(group, GroupState.READY, 0, "finished")


def chosen(step: Step) -> tuple[str, int] | None:
    found = step.next_group()
    return None if found is None else (found[0].id, found[1])


@pytest.mark.parametrize(
    ("taking", "free"), [(BatchRule.ALL, (0, 2)), (BatchRule.AS_READY, (1, 2)), (BatchRule.FIRST_OF_USE, (0, 1, 2))]
)
def test_rejected_group_leaves_a_place_empty_unless_others_make_up_for_it(taking: BatchRule, free: tuple) -> None:
    step, groups = step_of(taking)
    step.reject(groups[1], 0, "of no use")
    assert (step.free_slots, step.rejected, groups[1].drop_reason) == (free, 1, "of no use")
    assert (step.filled, step.count(GroupState.DROPPED)) == (3 - len(free), 1)


def test_dropped_group_leaves_its_place_to_others() -> None:
    step, groups = step_of(BatchRule.AS_READY)
    step.drop(groups[0], 0, "stale")
    assert (step.free_slots, step.rejected) == ((0, 1, 2), 0)


def test_synchronous_groups_have_their_own_places() -> None:
    step, groups = step_of(BatchRule.ALL)
    assert chosen(step) is None
    ready(step, groups[2], groups[0])
    assert chosen(step) == ("0/2", 2)
    step.take(groups[2], 2, 0)
    assert chosen(step) == ("0/0", 0)
    assert step.free_slots == (0, 1)


def test_asynchronous_groups_take_the_first_free_place_oldest_first() -> None:
    step, groups = step_of(BatchRule.AS_READY)
    ready(step, groups[2], groups[0])
    assert chosen(step) == ("0/0", 0)
    step.take(groups[0], 0, 0)
    assert chosen(step) == ("0/2", 1)


def test_first_of_use_waits_for_what_was_launched_before_unless_it_does_not_matter() -> None:
    step, groups = step_of(BatchRule.FIRST_OF_USE, size=2, minibatches=2, launched=3)
    ready(step, groups[1])
    assert chosen(step) is None
    step.reject(groups[0], 0, "of no use")
    assert chosen(step) == ("0/1", 0)
    alike, groups = step_of(BatchRule.FIRST_OF_USE, size=2, minibatches=1, launched=3)
    ready(alike, groups[1])
    assert chosen(alike) == ("0/1", 0)
    alike.take(groups[1], 0, 0)
    ready(alike, groups[2])
    assert chosen(alike) is None


def test_full_batch_takes_nothing_more() -> None:
    for taking in (BatchRule.AS_READY, BatchRule.FIRST_OF_USE):
        step, groups = step_of(taking, size=1)
        ready(step, *groups)
        step.take(groups[0], 0, 0)
        assert chosen(step) is None
        assert [group.id for group in step.surplus()] == ["0/1", "0/2"]


@pytest.mark.parametrize(
    ("taking", "done"), [(BatchRule.ALL, False), (BatchRule.AS_READY, True), (BatchRule.FIRST_OF_USE, False)]
)
def test_rollouts_are_done_when_the_batch_is_certain(taking: BatchRule, done: bool) -> None:
    step, groups = step_of(taking, size=2, launched=3)
    assert not step.rollouts_done
    ready(step, groups[1])
    assert not step.rollouts_done
    ready(step, groups[2])
    assert step.rollouts_done is done
    ready(step, groups[0])
    assert step.rollouts_done


def test_batch_of_the_first_is_certain_once_these_have_finished() -> None:
    step, groups = step_of(BatchRule.FIRST_OF_USE, size=2, launched=3)
    ready(step, groups[0], groups[1])
    assert step.rollouts_done
    assert [group.id for group in step.surplus()] == ["0/2"]


def test_step_is_settled_when_nothing_is_left_to_train() -> None:
    step, groups = step_of(BatchRule.AS_READY, size=2, launched=2)
    assert not step.settled
    ready(step, *groups)
    for slot, group in enumerate(groups):
        assert not step.settled
        step.take(group, slot, 0)
        assert not step.settled
        step.move(group, GroupState.TRAINED, 0, "trained")
    assert step.settled
    assert (step.finished, step.filled, step.in_play()) == (2, 2, [])


def test_groups_left_by_the_last_step_are_in_play_in_the_next() -> None:
    step, groups = step_of(BatchRule.AS_READY, size=1, launched=3)
    ready(step, groups[0])
    step.take(groups[0], 0, 0)
    step.drop(groups[1], 0, "stale")
    following = Step(1, 1, 1, BatchRule.AS_READY, 1, 0, step.in_play())
    assert list(following.groups) == ["0/2"]
    assert following.group_of("0/2/1") is groups[2]
    assert following.group_of("0/0/0") is None
    assert following.launch(2, 0).id == "1/0"


def test_finished_and_failed_members() -> None:
    group = Group("0/0", 0, 0, {"a": 1.0, "b": None, "c": "it broke", "d": "it broke"})
    assert (group.unfinished, group.finished, group.failures) == (["b"], {"a": 1.0}, ["it broke"])
    for version in (None, 5, 3, 4, None):
        group.note_tokens("0/0/0", version, version)
    assert group.oldest_token == 3
