"""Scenarios of asynchrony and dynamic sampling: what is launched, in which order it is trained on, what is dropped."""

import pytest

from elastic.core import commands as c
from elastic.core import events as e
from elastic.core.scheduler import Phase, TrainerMode
from elastic.core.types import FinishReason, GroupState, StalenessDrop


def finish(core, group: str, *rewards: float) -> list[c.Command]:
    """A group's members end, by default with different rewards."""
    out: list[c.Command] = []
    for member, reward in enumerate(rewards or (0.0, 1.0)):
        out += core.tell(e.TrajectoryFinished(trajectory=f"{group}/{member}", reward=reward, tokens=1))
    core.out = out
    return out


def launched(commands: list[c.Command]) -> list[str]:
    return [command.group for command in commands if isinstance(command, c.StartGroup)]


def dropped(commands: list[c.Command]) -> dict[str, str]:
    return {k.group: k.reason.partition(":")[0] for k in commands if isinstance(k, c.DropGroup)}


def rest(core) -> None:
    """The trainer's device has gone to sleep, as it was told."""
    core.tell(e.WorkerSlept(worker="trainer", epoch=1))


def train(core) -> list[str]:
    """The trainer does what it is asked until it has nothing more to train; the groups, in its order."""
    order: list[str] = []
    if core.scheduler.trainer_mode is TrainerMode.RESTING:
        rest(core)
    while core.scheduler.training is not None:
        order.append(core.scheduler.training)
        core.tell(e.GroupTrained(worker="trainer", epoch=1, group=core.scheduler.training))
    return order


def publish(core) -> list[c.Command]:
    return core.tell(e.WeightsPublished(worker="trainer", epoch=1, version=core.scheduler.version + 1))


class TestLaunching:
    @pytest.mark.parametrize(("bound", "groups"), [(0, 2), (1, 4), (2, 6), (9, 8)])
    def test_a_step_runs_ahead_as_far_as_the_bound_and_the_plan_allow(self, make_core, bound, groups) -> None:
        core = make_core(steps=4, groups=2, staleness_bound=bound)
        assert len(launched(core.trainer())) == groups

    def test_groups_are_numbered_over_the_whole_run(self, make_core) -> None:
        core = make_core(steps=4, groups=2, staleness_bound=1)
        numbers = [command.number for command in core.trainer() if isinstance(command, c.StartGroup)]
        for group in ("0/2", "0/0"):
            finish(core, group)
        train(core)
        numbers += [command.number for command in publish(core) if isinstance(command, c.StartGroup)]
        assert numbers == [0, 1, 2, 3, 4, 5]
        at_checkpoint = make_core(steps=7, groups=2).trainer(version=5)
        assert [k.number for k in at_checkpoint if isinstance(k, c.StartGroup)] == [10, 11]

    def test_each_step_launches_what_the_one_before_has_taken(self, make_core) -> None:
        core = make_core(steps=4, groups=2, staleness_bound=1)
        core.trainer()
        for group in ("0/2", "0/0"):
            finish(core, group)
        assert train(core) == ["0/0", "0/2"]
        assert launched(publish(core)) == ["1/0", "1/1"]
        assert set(core.scheduler.step.groups) == {"0/1", "0/3", "1/0", "1/1"}

    def test_the_last_step_ends_the_run_whatever_still_runs(self, make_core) -> None:
        core = make_core(steps=2, groups=1, staleness_bound=1)
        core.trainer()
        finish(core, "0/1")
        train(core)
        publish(core)
        assert core.scheduler.step.number == 1
        finish(core, "0/0")
        train(core)
        publish(core)
        assert core.scheduler.phase is Phase.STOPPING
        assert core.scheduler.failed == ""


class TestStaleness:
    def test_a_slow_group_is_overtaken_and_dropped_once_it_is_too_old(self, make_core) -> None:
        core = make_core(steps=5, groups=1, staleness_bound=1)
        core.trainer()
        core.request("0/0/0")
        start = core.one(c.StartTurn)
        core.tokens(start, 3)
        finish(core, "0/1")
        train(core)
        assert dropped(publish(core)) == {}
        finish(core, "1/0")
        train(core)
        out = publish(core)
        assert dropped(out) == {"0/0": "stale"}
        assert {k.trajectory for k in out if isinstance(k, c.CancelTrajectory)} == {"0/0/0", "0/0/1"}
        assert launched(out) == ["2/0", "2/1"]

    def test_by_token_a_group_is_kept_and_trained_without_its_overtaken_tokens(self, make_core) -> None:
        core = make_core(steps=5, groups=1, staleness_bound=1, staleness_drop=StalenessDrop.TOKEN)
        core.trainer()
        core.request("0/0/0")
        core.tokens(core.one(c.StartTurn), 3)
        for group in ("0/1", "1/0"):
            finish(core, group)
            train(core)
            assert dropped(publish(core)) == {}
        worker = core.worker()
        core.tell(e.WeightsApplied(worker=worker, epoch=1, version=2))
        core.tokens(core.one(c.StartTurn), 2, version=2, finish=FinishReason.STOP)
        out = finish(core, "0/0")
        rest(core)
        order = next(k for k in [*out, *core.out] if isinstance(k, c.TrainGroup))
        assert (order.group, order.oldest_version) == ("0/0", 1)

    @pytest.mark.parametrize("ended", [False, True], ids=["as it is scored", "as it ends"])
    def test_by_token_a_group_is_dropped_once_no_token_is_left(self, make_core, ended) -> None:
        core = make_core(steps=5, groups=1, staleness_bound=1, staleness_drop=StalenessDrop.TOKEN)
        core.trainer()
        core.request("0/0/0")
        core.tokens(core.one(c.StartTurn), 3, finish=FinishReason.STOP)
        if not ended:
            core.tell(e.RewardRequested(trajectory="0/0/0", tokens=3))
        out: list[c.Command] = []
        for group in ("0/1", "1/0"):
            finish(core, group)
            train(core)
            out += publish(core)
        assert dropped(out) == {}
        if not ended:
            core.tell(e.RewardScored(trajectory="0/0/0", attempt=1, reward=0.0))
            assert dropped(core.tell(e.TrajectoryFinished(trajectory="0/0/1", reward=1.0, tokens=1))) == {
                "0/0": "stale"
            }
        else:
            assert dropped(finish(core, "0/0")) == {"0/0": "stale"}

    def test_a_group_without_tokens_is_never_too_old(self, make_core) -> None:
        core = make_core(steps=5, groups=1, staleness_bound=1)
        core.trainer()
        for group in ("0/1", "1/0", "2/0"):
            finish(core, group)
            train(core)
            assert dropped(publish(core)) == {}
        assert "0/0" in core.scheduler.step.groups

    def test_groups_may_be_as_old_as_their_place_in_the_order_says(self, make_core) -> None:
        core = make_core(steps=9, groups=2, staleness_bound=2)
        core.trainer(version=5)
        floors = [group.version_floor for group in core.scheduler.step.groups.values()]
        assert floors == [3, 3, 4, 4, 5, 5]

    def test_what_is_due_sooner_may_come_from_older_weights(self, make_core) -> None:
        core = make_core(steps=5, groups=1, staleness_bound=1)
        core.trainer()
        finish(core, "0/0")
        train(core)
        publish(core)
        floors = {name: group.version_floor for name, group in core.scheduler.step.groups.items()}
        assert floors == {"0/1": 0, "1/0": 1}

    def test_a_turn_that_must_wait_for_weights_holds_up_no_other(self, make_core) -> None:
        core = make_core(steps=5, groups=1, staleness_bound=1)
        core.trainer()
        worker = core.worker()
        finish(core, "0/0")
        train(core)
        publish(core)
        core.request("1/0/0")
        assert not core.sent(c.StartTurn)
        core.request("0/1/0")
        assert core.one(c.StartTurn).worker == worker
        assert [turn.trajectory for turn in core.scheduler.turns.heads()] == ["1/0/0"]
        core.tell(e.WeightsApplied(worker=worker, epoch=1, version=1))
        assert core.one(c.StartTurn).turn == "1/0/0#0"

    def test_a_turn_may_span_versions_and_its_oldest_token_counts(self, make_core) -> None:
        core = make_core(steps=5, groups=1, staleness_bound=1)
        core.trainer()
        worker = core.worker()
        finish(core, "0/0")
        rest(core)
        core.request("0/1/0")
        start = core.one(c.StartTurn)
        core.tokens(start, 2)
        train(core)
        publish(core)
        core.tell(e.WeightsApplied(worker=worker, epoch=1, version=1))
        core.tokens(start, 2, start=2, version=1, finish=FinishReason.STOP)
        finish(core, "0/1")
        assert core.scheduler.step.groups["0/1"].oldest_token == 0


class TestTrainersDevice:
    def test_it_generates_only_while_the_trainer_would_wait(self, make_core) -> None:
        core = make_core(steps=5, groups=2, staleness_bound=1)
        core.trainer()
        worker = core.worker(capacity=1)
        assert core.scheduler.trainer_mode is TrainerMode.AWAKE
        finish(core, "0/3")
        assert core.scheduler.trainer_mode is TrainerMode.RESTING
        assert train(core) == ["0/3"]
        core.request("0/0/0")
        core.request("0/0/1")
        core.wait(0.3, beating=("trainer", worker))
        assert core.scheduler.trainer_mode is TrainerMode.WAKING
        core.tell(e.WorkerAwoke(worker="trainer", epoch=1))
        assert core.scheduler.trainer_mode is TrainerMode.AWAKE
        finish(core, "0/1")
        assert train(core) == ["0/1"]

    def test_it_goes_on_generating_while_nobody_else_can(self, make_core) -> None:
        core = make_core(steps=5, groups=2, staleness_bound=1)
        core.trainer()
        finish(core, "0/3")
        assert core.scheduler.trainer_mode is TrainerMode.AWAKE
        finish(core, "0/1")
        assert train(core) == ["0/1", "0/3"]


class TestDynamicSampling:
    def test_groups_that_teach_nothing_are_made_up_for(self, make_core) -> None:
        core = make_core(dynamic_most=3.0, steps=2, groups=2)
        core.trainer()
        assert launched(finish(core, "0/0", 1.0, 1.0)) == ["0/2"]
        assert launched(finish(core, "0/2", 0.0, 0.0)) == ["0/3"]

    def test_no_more_are_launched_than_the_bound_and_the_step_goes_on_with_fewer(self, make_core) -> None:
        core = make_core(dynamic_most=2.0, steps=2, groups=2)
        core.trainer()
        finish(core, "0/0")
        for group in ("0/1", "0/2"):
            assert launched(finish(core, group, 1.0, 1.0))
        assert not launched(finish(core, "0/3", 1.0, 1.0))
        rest(core)
        core.tell(e.GroupTrained(worker="trainer", epoch=1, group="0/0"))
        assert core.one(c.UpdateWeights).empty_slots == (1,)

    def test_as_many_run_at_once_as_the_last_step_says_are_needed(self, make_core) -> None:
        core = make_core(dynamic_most=6.0, steps=2, groups=2)
        core.trainer()
        for group in ("0/0", "0/2"):
            finish(core, group, 1.0, 1.0)
        for group in ("0/1", "0/3"):
            finish(core, group)
        train(core)
        assert len(launched(publish(core))) == 4

    def test_short_groups_are_not_preferred(self, make_core) -> None:
        core = make_core(dynamic_most=6.0, steps=2, groups=2)
        core.trainer()
        for group in ("0/0", "0/2"):
            finish(core, group, 1.0, 1.0)
        for group in ("0/1", "0/3"):
            finish(core, group)
        train(core)
        publish(core)
        core.tell(e.WorkerAwoke(worker="trainer", epoch=1))
        finish(core, "1/3")
        finish(core, "1/2")
        assert core.scheduler.step.next_group() is None
        finish(core, "1/0")
        assert core.scheduler.step.next_group()[0].id == "1/0"
        out = finish(core, "1/1")
        assert dropped(out) == {"1/2": "surplus", "1/3": "surplus"}
        assert train(core) == ["1/0", "1/1"]

    def test_slots_keep_to_their_mini_batch_whatever_finishes_first(self, make_core) -> None:
        core = make_core(dynamic_most=2.0, steps=1, groups=4, minibatches=2)
        core.trainer()
        step = core.scheduler.step
        finish(core, "0/3")
        assert step.next_group() is None or step.next_group()[1] in (2, 3)
        finish(core, "0/1")
        group, slot = step.next_group()
        assert (group.id, slot in (0, 1)) == ("0/1", True)

    def test_surplus_groups_that_run_are_cancelled(self, make_core) -> None:
        core = make_core(dynamic_most=6.0, steps=2, groups=1)
        core.trainer()
        finish(core, "0/0", 1.0, 1.0)
        finish(core, "0/1")
        train(core)
        assert len(launched(publish(core))) == 2
        core.tell(e.WorkerAwoke(worker="trainer", epoch=1))
        out = finish(core, "1/0")
        assert dropped(out) == {"1/1": "surplus"}
        assert {k.trajectory for k in out if isinstance(k, c.CancelTrajectory)} == {"1/1/0", "1/1/1"}
        assert core.scheduler.step.groups["1/1"].state is GroupState.DROPPED

    def test_surplus_groups_are_the_next_steps_where_that_may_have_them(self, make_core) -> None:
        core = make_core(dynamic_most=6.0, steps=3, groups=1, staleness_bound=1)
        core.trainer()
        finish(core, "0/0", 1.0, 1.0)
        finish(core, "0/1")
        train(core)
        assert "1/1" in launched(publish(core))
        assert not dropped(finish(core, "1/0"))
        assert core.scheduler.step.groups["1/1"].state is GroupState.RUNNING
