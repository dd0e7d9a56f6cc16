"""What the runner does next: whatever is wanted and whatever was seen, no process is begun beside another."""

from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from elastic.protocol.api import ENDED, Condition, RunFigures, RunPhase
from elastic.server.runner import conditions, decisions
from elastic.server.runner.decisions import Decision, Ending, NextStep, ProcessSeen, decide
from elastic.server.store import runs
from elastic.server.store.runs import HostedRunRow

BUDGET = {"budget_usd": 2.0, "committed_usd": 1.8, "used_share": 0.9, "warned": True, "ends_in_s": None}
NOW_US, BASE_S, MAX_S = 10**15, 1.0, 30.0


def record(**fields: Any) -> HostedRunRow:
    plain: dict[str, Any] = dict.fromkeys(HostedRunRow.__dataclass_fields__)
    given = {
        "id": "run_1",
        "wanted": runs.RUN,
        "force": False,
        "phase": RunPhase.PENDING,
        "cause": "",
        "restarts": 0,
        "furthest_step": 0,
        "max_restarts": 3,
        "not_before_us": 0,
        "generation": 1,
        "providers": ["spot"],
        "conditions": [],
        "figures": RunFigures(),
    }
    return HostedRunRow(**plain | given | fields)


records = st.builds(
    record,
    wanted=st.sampled_from([runs.RUN, runs.STOP, runs.DELETE]),
    force=st.booleans(),
    phase=st.sampled_from(RunPhase),
    restarts=st.integers(0, 5),
    max_restarts=st.integers(0, 5),
    not_before_us=st.sampled_from([0, NOW_US - 1, NOW_US + 1]),
    waits=st.none() | st.just(runs.QuotaWait("RunsAtOnce", "the project may have 1 runs at once by now")),
)
hows = [
    decisions.FINISHED,
    decisions.FAILED,
    decisions.STOPPED,
    decisions.INTERRUPTED,
    decisions.BAD_INPUT,
    decisions.DIED,
    decisions.OUTAGE,
]
causes = st.sampled_from(["why", f"{decisions.QUOTA_LOWERED}: why"])
endings = st.none() | st.builds(Ending, how=st.sampled_from(hows), cause=causes, with_world=st.booleans())
sights = st.builds(
    ProcessSeen,
    alive=st.booleans(),
    signalled=st.booleans(),
    ending=endings,
    leaves=st.booleans(),
)


def next_step(run: HostedRunRow, seen: ProcessSeen) -> Decision:
    return decide(run, seen, NOW_US, BASE_S, MAX_S)


@given(run=records, seen=sights)
def test_whatever_happens(run: HostedRunRow, seen: ProcessSeen) -> None:
    made = next_step(run, seen)
    if seen.alive:
        assert made.step in (NextStep.NOTHING, NextStep.STOP, NextStep.KILL)
        assert made.step is NextStep.NOTHING or run.wanted != runs.RUN or run.waits is not None
        assert made.step is not NextStep.KILL or run.wanted != runs.RUN
    if made.step is NextStep.START:
        assert run.phase in (RunPhase.PENDING, RunPhase.RESTARTING)
        assert run.not_before_us <= NOW_US
        if run.wanted != runs.RUN:  # It is taken up to give back what it holds.
            assert (run.wanted, run.phase, run.force, seen.leaves) == (runs.STOP, RunPhase.RESTARTING, False, True)
    if made.step is NextStep.REMOVE:
        assert run.wanted == runs.DELETE
    if made.step is NextStep.BECOME:
        goes_on = run.wanted == runs.RUN or (run.wanted == runs.STOP and not run.force and seen.leaves)
        makes_room = run.wanted == runs.RUN and seen.ending is not None and made.phase is RunPhase.PENDING
        assert made.phase in ENDED or (made.phase is RunPhase.RESTARTING and goes_on) or makes_room
        assert not (made.phase is RunPhase.RESTARTING and made.counts and run.restarts >= run.max_restarts)
        assert made.not_before_us <= NOW_US + MAX_S * 1e6


@given(run=records, leaves=st.booleans())
def test_an_outage_is_waited_for_and_does_not_count(run: HostedRunRow, leaves: bool) -> None:
    """Whatever was done before: a run that is wanted is begun again, and one that is to stop gives back what it has."""
    begun = replace(run, phase=RunPhase.STARTING)
    made = next_step(begun, ProcessSeen(alive=False, leaves=leaves, ending=Ending(how=decisions.OUTAGE, cause="EC2")))
    assert not made.counts
    goes_on = run.wanted == runs.RUN or (run.wanted == runs.STOP and leaves and not run.force)
    assert (made.phase is RunPhase.RESTARTING) == goes_on
    if goes_on:
        assert made.cause == "EC2"
        assert NOW_US < made.not_before_us <= NOW_US + MAX_S * 1e6


@given(with_world=st.lists(st.booleans(), max_size=12), max_restarts=st.integers(0, 4))
def test_deaths_are_survived_as_often_as_was_said(with_world: list[bool], max_restarts: int) -> None:
    """Those with the whole machine do not count."""
    run, deaths = record(max_restarts=max_restarts), 0
    for down in with_world:
        assert next_step(run, ProcessSeen(alive=False)).step is NextStep.START
        died = ProcessSeen(alive=False, ending=Ending(how=decisions.DIED, cause="killed", with_world=down))
        made = next_step(record(max_restarts=max_restarts, restarts=run.restarts, phase=RunPhase.RUNNING), died)
        deaths += not down
        if deaths > max_restarts:
            assert made.phase is RunPhase.FAILED
            assert "killed" in made.cause
            return
        assert made.phase is RunPhase.RESTARTING
        run = record(max_restarts=max_restarts, restarts=run.restarts + made.counts, phase=made.phase)
    assert run.restarts == deaths


@given(steps=st.lists(st.integers(0, 6), max_size=30), max_restarts=st.integers(0, 3))
def test_deaths_count_since_the_furthest_step(steps: list[int], max_restarts: int) -> None:
    """A run that dies at these steps goes on until too many deaths in a row came at steps that it knew."""
    run, in_vain = record(max_restarts=max_restarts), 0
    for step in steps:
        in_vain = 0 if step > run.furthest_step else in_vain
        run = decisions.since_progress(run, RunFigures(step=step))
        died = ProcessSeen(alive=False, ending=Ending(how=decisions.DIED, cause="killed"))
        made = next_step(replace(run, phase=RunPhase.RUNNING), died)
        in_vain += 1
        assert (made.phase is RunPhase.FAILED) == (in_vain > max_restarts)
        if made.phase is RunPhase.FAILED:
            return
        run = replace(run, restarts=run.restarts + made.counts)


@given(phases=st.lists(st.sampled_from(RunPhase), min_size=1, max_size=6), ready=st.integers(0, 2))
def test_conditions_change_their_time_with_their_status_only(phases: list[RunPhase], ready: int) -> None:
    run, former = record(budget_usd=2.0), list[Condition]()
    providers = {"spot": {"ready": ready, "preemptions": 1}}
    figures = RunFigures.model_validate({"usd": 1.7, "budget": BUDGET, "providers": providers})
    for number, phase in enumerate(phases):
        found = conditions.findings(run, phase, "", figures)
        now = conditions.updated(former, found, number * 10**6, 1)
        assert len({one.type for one in now}) == len(now)
        before = {one.type: one for one in former}
        for one in now:
            then = before.get(one.type)
            assert then is None or then.status != one.status or then.lastTransitionTime == one.lastTransitionTime
        reasons = {one.type: one.reason for one in now}
        assert reasons["WithinBudget"] == "BudgetWarning"
        assert (reasons["Ended"] == "GoingOn") == (phase not in ENDED)
        former = now


def test_no_capacity_is_said_with_its_reason() -> None:
    def reason(share: int | None = None, **figures: int) -> str:
        shares = None if share is None else {"spot": runs.RunShare(share, 0)}
        seen = RunFigures.model_validate({"providers": {"spot": figures}})
        found = conditions.findings(record(shares=shares), RunPhase.RUNNING, "", seen)
        (one,) = (one for one in found if one.type == "CapacityAvailable")
        assert (one.status == "True") == bool(figures.get("ready"))
        return one.reason

    assert reason() == "NoCapacity"
    assert reason(preemptions=2) == "Preempted"
    assert reason(share=0, preemptions=2) == "FairShare"
    assert reason(share=0, booting=1) == reason(booting=1) == "Booting"
    assert reason(ready=1, preemptions=2) == "WorkersReady"
