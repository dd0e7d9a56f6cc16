"""An evaluation is of one version, has an end, and leaves training as it would have been."""

from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.core import commands as c
from elastic.core import events as e
from elastic.core.evaluation import best_version, is_due, why_stop
from elastic.core.ids import agent_id, drawn_from, is_evaluated, parse_agent_id, parse_trajectory, trajectory_id
from elastic.core.run_state import Phase
from elastic.core.trainer_device import TrainerMode
from elastic.core.types import NS_PER_S, EvaluationSet, FinishReason, Plan, PlannedEvaluation, StopRule
from elastic.testing.faults.core.faults import NO_FAULTS, draw_faults
from elastic.testing.faults.core.incarnation import fresh_core
from elastic.testing.faults.core.settings import (
    SimulatedProviderSettings,
    WorldSettings,
    draw_evaluation,
    draw_groups,
    draw_settings,
    draw_sharing,
)
from elastic.testing.faults.core.world import SimulatedOutcome, simulate
from tests.core.conftest import CoreHarness

MakeCore = Callable[..., CoreHarness]
SETS = (EvaluationSet(environment="lake", tasks=1), EvaluationSet(environment="sums", tasks=1))
GROUP_SIZE = 4
"""Of the one group of a step: so many episodes of an evaluation are under way where no worker has places for more."""
EVALUATION = PlannedEvaluation(sets=SETS, samples=2, timeout_ns=60 * NS_PER_S, every=1, passes=(1, 2))


def evaluated(make_core: MakeCore, plan: Any = EVALUATION, capacity: int = 8, **others: Any) -> CoreHarness:
    core = make_core(steps=others.pop("steps", 2), groups=1, group_size=GROUP_SIZE, evaluation=plan, **others)
    core.out = core.trainer(capacity)
    return core


def end(core: CoreHarness, trajectory: str, reward: float | None = 1.0) -> list[c.Command]:
    if reward is None:
        return core.tell(e.TrajectoryFailed(trajectory=trajectory, cause="it hung"))
    return core.tell(e.TrajectoryFinished(trajectory=trajectory, reward=reward, tokens=0))


def end_all(core: CoreHarness, version: int, rewards: Sequence[float | None] = (1.0, 0.0, 1.0, 1.0)) -> list[c.Command]:
    """Each of the two tasks' two episodes."""
    out: list[c.Command] = []
    for number, reward in enumerate(rewards):
        out = end(core, trajectory_id(version, number // 2, number % 2, evaluation=True), reward)
    return out


def end_group(core: CoreHarness, step: int) -> None:
    for member in range(GROUP_SIZE):
        end(core, f"{step}/0/{member}", float(not member))


def train(core: CoreHarness, step: int) -> list[c.Command]:
    """A step from its rollouts to its weights."""
    if core.scheduler.trainer_mode is TrainerMode.WAKING:
        core.tell(e.WorkerAwoke(worker="trainer", epoch=1))
    end_group(core, step)
    if core.sent(c.SleepWorker):
        core.tell(e.WorkerSlept(worker="trainer", epoch=1))
    core.tell(e.GroupTrained(worker="trainer", epoch=1, group=f"{step}/0"))
    return core.tell(e.WeightsPublished(worker="trainer", epoch=1, version=step + 1))


class TestBetweenSteps:
    def test_the_step_begins_once_every_episode_is_over(self, make_core: MakeCore) -> None:
        core = evaluated(make_core)
        started = [one for one in core.out if isinstance(one, c.StartGroup)]
        assert [one.group for one in started] == ["e0/0", "e0/1"]
        assert [(one.environment, one.place, one.row) for one in started] == [("lake", 0, 0), ("sums", 0, 0)]
        for number in range(3):
            assert not [one for one in end(core, f"e0/{number // 2}/{number % 2}") if isinstance(one, c.StartGroup)]
        end(core, "e0/1/1", None)
        record = core.one(c.EndEvaluation).record
        assert [one.group for one in core.sent(c.StartGroup)] == ["0/0"]
        assert [one.group for one in core.sent(c.DropGroup)] == ["e0/0", "e0/1"]
        assert (record.version, record.timed_out) == (0, False)
        assert (record.sets["sums"].finished, record.sets["sums"].failed) == (1, 1)
        assert record.sets["sums"].rewards == [[1.0, None]]
        assert record.metrics["avg@2"].mean == 1.0
        assert record.metrics["pass@2"].tasks == 1, "of one task an episode has failed, and is left out"

    def test_its_turns_are_of_the_version_alone(self, make_core: MakeCore) -> None:
        core = evaluated(make_core, staleness_bound=1)
        end_all(core, 0)
        train(core, 0)
        core.request("e1/0/0")
        turn = core.scheduler.turns.live["e1/0/0#0"]
        assert turn.oldest_version == 1, "although training would take tokens of version 0"

    def test_no_version_follows_before_it_is_over_and_then_the_last_one_is_evaluated_too(
        self, make_core: MakeCore
    ) -> None:
        core = evaluated(make_core)
        end_all(core, 0)
        for step in range(2):
            assert [one.step for one in train(core, step) if isinstance(one, c.StartGroup)] == [step + 1] * 2
            assert core.scheduler.phase is Phase.RUNNING
            end_all(core, step + 1)
        assert core.scheduler.phase is Phase.STOPPING
        assert not core.scheduler.failed
        assert core.scheduler.pieces[0].outcomes.steps[0].finished == GROUP_SIZE, "what is evaluated does not count"

    def test_out_of_time_it_ends_with_what_it_has(self, make_core: MakeCore) -> None:
        core = evaluated(make_core)
        end(core, "e0/0/0")
        core.request("e0/1/0")
        out = core.wait(61.0, beating=("trainer",))
        (over,) = [one for one in out if isinstance(one, c.EndEvaluation)]
        assert over.record.timed_out
        assert over.record.sets["lake"].cut_off == 1
        assert over.record.metrics["avg@2"].tasks == 1
        assert over.record.value("avg@2") is None, "it decides nothing: what had ended by then are the short episodes"
        cancelled = {one.trajectory for one in out if isinstance(one, c.CancelTrajectory)}
        assert cancelled == {"e0/0/1", "e0/1/0", "e0/1/1"}
        assert not core.scheduler.turns.live
        assert end(core, "e0/0/1") == [], "what comes too late counts for nothing"
        assert [one for one in core.request("e0/0/1", "e0/0/1/9") if isinstance(one, c.CancelTrajectory)]

    def test_scores_of_functions_count_and_of_what_is_unavailable_none(self, make_core: MakeCore) -> None:
        core = evaluated(make_core, msgspec.structs.replace(EVALUATION, sets=SETS[:1]))
        for sample in range(2):
            core.tell(e.RewardRequested(trajectory=f"e0/0/{sample}", tokens=1))
        core.tell(e.RewardScored(trajectory="e0/0/0", attempt=1, reward=0.5))
        core.tell(e.RewardFailed(trajectory="e0/0/1", attempt=1, cause="raised", retry_helps=False))
        record = core.one(c.EndEvaluation).record
        assert record.sets["lake"].rewards == [[0.5, None]]
        assert not core.scheduler.scorings


class TestManyTasks:
    SETS = (EvaluationSet(environment="lake", tasks=9), EvaluationSet(environment="sums", tasks=9))
    PLAN = msgspec.structs.replace(EVALUATION, sets=SETS)

    def test_as_many_begin_as_have_room_and_the_others_in_their_order_as_those_end(self, make_core: MakeCore) -> None:
        core = evaluated(make_core, self.PLAN, capacity=2)
        begun = [one for one in core.out if isinstance(one, c.StartGroup)]
        assert [one.group for one in begun] == ["e0/0", "e0/1"], "four episodes, of two that are executed at once"
        for number in range(18):
            assert end(core, f"e0/{number + 2}/0") == [], "it has not begun"
            begun += [one for one in end(core, f"e0/{number}/0") if isinstance(one, c.StartGroup)]
            begun += [one for one in end(core, f"e0/{number}/1", 0.5) if isinstance(one, c.StartGroup)]
            assert len(begun) == min(number + 3, 18) + (number == 17)
        assert [one.group for one in begun] == [*(f"e0/{number}" for number in range(18)), "0/0"]
        assert [(one.environment, one.place) for one in begun[8:11]] == [("lake", 8), ("sums", 0), ("sums", 1)]
        assert core.one(c.EndEvaluation).record.sets["sums"].rewards == [[1.0, 0.5]] * 9

    def test_a_fleet_that_grows_plays_more_of_them(self, make_core: MakeCore) -> None:
        core = evaluated(make_core, self.PLAN, capacity=2)
        core.worker(capacity=5)
        assert [one.group for one in core.sent(c.StartGroup)] == [f"e0/{number}" for number in range(2, 7)]

    def test_out_of_time_what_has_not_begun_is_cut_off(self, make_core: MakeCore) -> None:
        core = evaluated(make_core, self.PLAN, capacity=4)
        end(core, "e0/0/0")
        out = core.wait(61.0, beating=("trainer",))
        (over,) = [one for one in out if isinstance(one, c.EndEvaluation)]
        assert {name: one.cut_off for name, one in over.record.sets.items()} == {"lake": 17, "sums": 18}
        assert over.record.sets["sums"].rewards == [[None, None]] * 9
        assert len([one for one in out if isinstance(one, c.CancelTrajectory)]) == 9
        assert [one.group for one in out if isinstance(one, c.DropGroup)] == [f"e0/{number}" for number in range(5)]
        assert [one for one in core.request("e0/9/0", "e0/9/0/0") if isinstance(one, c.CancelTrajectory)]


class TestBesideAStep:
    PLAN = msgspec.structs.replace(EVALUATION, overlap=True, at_start=False)

    def test_the_weights_wait_for_it_and_nothing_else_does(self, make_core: MakeCore) -> None:
        core = evaluated(make_core, self.PLAN)
        train(core, 0)
        assert {one.group for one in core.sent(c.StartGroup)} == {"1/0", "e1/0", "e1/1"}
        core.tell(e.WorkerAwoke(worker="trainer", epoch=1))
        end_group(core, 1)
        core.wait(1.5, beating=("trainer",))
        assert not core.scheduler.trainer_order
        end_all(core, 1)
        core.tell(e.WorkerSlept(worker="trainer", epoch=1))
        assert core.one(c.TrainGroup).group == "1/0"
        core.tell(e.GroupTrained(worker="trainer", epoch=1, group="1/0"))
        assert core.one(c.UpdateWeights).version == 2

    def test_the_last_version_has_no_step_beside_it(self, make_core: MakeCore) -> None:
        core = evaluated(make_core, self.PLAN, steps=1)
        train(core, 0)
        assert core.scheduler.phase is Phase.RUNNING
        end_all(core, 1)
        assert core.scheduler.phase is Phase.STOPPING


class TestTheBestStep:
    def test_its_version_is_said_and_the_run_ends_where_it_was_told_to(self, make_core: MakeCore) -> None:
        stop = StopRule(metric="avg@2", no_better_for=2)
        plan = msgspec.structs.replace(EVALUATION, keep_best="lake/avg@2", stop=stop)
        core = evaluated(make_core, plan, steps=9)
        best = list[bool]()
        for version, rewards in enumerate([(0.0, 0.5, 0, 0), (1.0, 1.0, 0, 1), (1, 1, 0, 1), (0, 0, 0, 0)]):
            end_all(core, version, rewards)
            best += [one.best for one in core.sent(c.EndEvaluation)]
            if version < 3:
                train(core, version)
        assert best == [True, True, False, False]
        assert core.scheduler.phase is Phase.STOPPING
        why = "avg@2 has not been above that of version 1 in 2 evaluations"
        assert (core.scheduler.ended_early, core.one(c.EndEvaluation).ends) == (why, why)
        assert not core.scheduler.failed
        assert not core.scheduler.stopped, "that is the run's end, and no interruption"

    def test_what_former_incarnations_came_to_still_counts(self, make_core: MakeCore) -> None:
        plan = msgspec.structs.replace(EVALUATION, keep_best="avg@2", stop=StopRule(metric="avg@2", no_better_for=2))
        core = make_core(steps=9, groups=1, group_size=GROUP_SIZE, evaluation=plan)
        core.tell(e.EvaluationsCarried(values={4: {"avg@2": 0.9}, 5: {"avg@2": 0.5}}))
        assert core.scheduler.best_version == 4
        core.trainer(capacity=8, version=6)
        end_all(core, 6, (0.5, 0.5, 0.5, 0.5))
        over = core.one(c.EndEvaluation)
        assert (over.best, over.ends) == (False, "avg@2 has not been above that of version 4 in 2 evaluations")

    @given(st.lists(st.one_of(st.none(), st.floats(-1, 1)), max_size=12), st.integers(1, 4), st.floats(-1, 1))
    def test_a_rule_holds_at_the_first_evaluation_where_it_does(
        self, values: list[float | None], patience: int, wanted: float
    ) -> None:
        known = [value for value in values if value is not None]
        by_version = dict(enumerate(values))
        best = best_version(by_version)
        assert (best is None) is not known
        assert best is None or by_version[best] == max(known)
        assert best is None or values.index(max(known)) == best, "of equals the first"
        high = bool(values) and values[-1] is not None and values[-1] >= wanted
        assert bool(why_stop(StopRule(metric="m", at_least=wanted), by_version)) is high
        late = best is not None and len(values) - 1 - best >= patience
        assert bool(why_stop(StopRule(metric="m", no_better_for=patience), by_version)) is late


@given(st.integers(0, 40), st.integers(0, 40), st.integers(0, 8), st.booleans(), st.booleans())
def test_versions_are_due_at_the_start_the_end_and_their_multiples(
    version: int, steps: int, every: int, at_start: bool, at_end: bool
) -> None:
    plan = msgspec.structs.replace(EVALUATION, every=every, at_start=at_start, at_end=at_end)
    due = is_due(plan, version, steps)
    if 0 < version < steps:
        assert due is (every > 0 and version % every == 0)
    elif steps:
        assert due is (at_end if version >= steps else at_start)


def test_names_lead_back_and_draw_the_same_for_every_version() -> None:
    name = trajectory_id(12, 3, 1, evaluation=True)
    assert (name, parse_trajectory(name), is_evaluated(name)) == ("e12/3/1", (12, 3, 1), True)
    assert parse_agent_id(agent_id(name)) == name
    assert drawn_from(name) == drawn_from("e700/3/1") == (-1, 3, 1)
    assert drawn_from("12/3/1") == (12, 3, 1)


def settings_of(seed: int) -> WorldSettings:
    drawn = draw_groups(Random(f"{seed}/groups"), draw_sharing(Random(f"{seed}/sharing"), draw_settings(Random(seed))))
    return draw_evaluation(Random(f"{seed}/evaluation"), drawn)


def records(outcome: SimulatedOutcome) -> dict[int, c.EndEvaluation]:
    return outcome.record.evaluated


@pytest.mark.parametrize("seed", [3, 8, 17])
def test_whatever_goes_wrong_it_ends_and_nothing_of_it_is_trained(seed: int) -> None:
    """The world's record judges that: see `RunRecord`."""
    settings = settings_of(seed)
    simulate(seed, settings, draw_faults(Random(seed), settings.fault_span_ns), digests=seed == 3)


@pytest.mark.nightly
@pytest.mark.parametrize("first", range(0, 400, 50))
def test_more_seeds_do_too(first: int) -> None:
    for seed in range(first, first + 50):
        settings = settings_of(seed)
        simulate(seed, settings, draw_faults(Random(seed), settings.fault_span_ns))


FLEET = SimulatedProviderSettings(name="spot", leases=2)
WORLD = WorldSettings(plan=Plan(steps=3, groups=2, group_size=3), providers=(FLEET,), rewards_on_functions=False)


@pytest.mark.parametrize("overlap", [False, True])
def test_what_is_trained_is_what_would_have_been(overlap: bool) -> None:
    plan = msgspec.structs.replace(EVALUATION, overlap=overlap)
    with_it = msgspec.structs.replace(WORLD, plan=msgspec.structs.replace(WORLD.plan, evaluation=plan))
    one, other = simulate(5, WORLD, NO_FAULTS), simulate(5, with_it, NO_FAULTS)
    assert list(records(other)) == [0, 1, 2, 3]
    assert other.record.trained == one.record.trained
    lengths = [
        {turn: count for turn, count in outcome.record.accepted.items() if not is_evaluated(turn)}
        for outcome in (one, other)
    ]
    assert lengths[0] == lengths[1]
    rewards = [{t: r for t, r in o.record.rewards.items() if not is_evaluated(t)} for o in (one, other)]
    assert rewards[0] == rewards[1]


def test_a_run_without_one_is_as_before() -> None:
    """Neither its plan nor its state has anything of evaluations in it."""
    core = fresh_core(WORLD)
    assert b"evaluation" not in msgspec.msgpack.encode(core.plan)


def test_a_turn_that_has_tokens_goes_on_elsewhere_as_any_other(make_core: MakeCore) -> None:
    core = evaluated(make_core)
    core.request("e0/0/0")
    core.tokens(core.one(c.StartTurn), 2, finish=FinishReason.STOP)
    assert core.one(c.FinishTurn).turn == "e0/0/0#0"
