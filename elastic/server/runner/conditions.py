"""Conditions of a run, each with a reason for programs and a message for people. Pure."""

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from elastic.core.allowance import WARNED_SHARE
from elastic.core.controls import BUDGET_EXHAUSTED
from elastic.protocol.api import ENDED, Condition, RunFigures, RunPhase
from elastic.server.clock import rfc3339
from elastic.server.store.runs import HostedRunRow

Truth = Literal["True", "False", "Unknown"]


class ConditionFinding(NamedTuple):
    """The present content of a condition."""

    type: str
    status: Truth
    reason: str
    message: str


ATTENDED = "Attended"
SUBMITTED = ConditionFinding("Accepted", "True", "Submitted", "the server has the run, and will start it")
_PROCESS: Mapping[RunPhase, tuple[Truth, str, str]] = {
    RunPhase.PENDING: ("False", "NotStarted", "its process has not begun yet"),
    RunPhase.STARTING: ("True", "Starting", "its process has begun; the trainer is not ready yet"),
    RunPhase.RUNNING: ("True", "Running", "its process lives"),
    RunPhase.RESTARTING: ("False", "Restarting", "its process died; another one goes on from the journal"),
    RunPhase.STOPPING: ("True", "Stopping", "its process has been told to stop"),
}
_ENDINGS: Mapping[RunPhase, tuple[str, str]] = {
    RunPhase.FINISHED: ("Finished", "all steps are done"),
    RunPhase.STOPPED: ("Stopped", "stopped; it can be resumed"),
    RunPhase.FAILED: ("Failed", "failed"),
}


def findings(run: HostedRunRow, phase: RunPhase, cause: str, figures: RunFigures) -> list[ConditionFinding]:
    """Return the conditions of a run in this phase, with these figures."""
    found = [SUBMITTED, _process(phase, cause, run)]
    if phase not in ENDED and run.waits is not None:
        found.append(ConditionFinding("QuotaAvailable", "False", run.waits.reason, run.waits.message))
    if phase is RunPhase.RUNNING:
        found.append(_capacity(run, figures))
    if run.budget_usd is not None:
        found.append(_budget(run.budget_usd, cause, figures))
    found.append(_ended(phase, cause))
    return found


def with_fault(former: Sequence[Condition], fault: str, now_us: int, generation: int) -> list[Condition]:
    """Return the conditions with what keeps the runner from looking at the run, or without it if `fault` is empty."""
    others = [one for one in former if one.type != ATTENDED]
    if not fault:
        return others
    words = f"the runner cannot look at it now, and tries again: {fault}"
    told = ConditionFinding(ATTENDED, "False", "Unexpected", words)
    return others + updated(former, [told], now_us, generation)


def updated(
    former: Sequence[Condition], found: Sequence[ConditionFinding], now_us: int, generation: int
) -> list[Condition]:
    """The conditions as they are now: a transition is when a status changes, not when its words do."""
    since = {one.type: (one.status, one.lastTransitionTime) for one in former}
    now = rfc3339(now_us) or ""
    made: list[Condition] = []
    for one in found:
        status, at = since.get(one.type, ("", now))
        made.append(
            Condition(
                **one._asdict(),
                lastTransitionTime=at if status == one.status else now,
                observedGeneration=generation,
            )
        )
    return made


def _process(phase: RunPhase, cause: str, run: HostedRunRow) -> ConditionFinding:
    if phase in ENDED:
        return ConditionFinding("ProcessAlive", "False", "Ended", "its process has ended")
    status, reason, message = _PROCESS[phase]
    if phase is RunPhase.PENDING and run.started_us is not None:
        reason, message = "Waiting", "its process has stopped in time; another one goes on once it may"
    if phase is RunPhase.RESTARTING:
        message = f"{cause or 'its process died'}; restart {run.restarts} of at most {run.max_restarts}"
    return ConditionFinding("ProcessAlive", status, reason, message)


def _capacity(run: HostedRunRow, figures: RunFigures) -> ConditionFinding:
    elastic = {name: figures.providers[name] for name in run.providers if name in figures.providers}
    ready, booting = (sum(getattr(one, key) for one in elastic.values()) for key in ("ready", "booting"))
    if not run.providers:
        return ConditionFinding("CapacityAvailable", "True", "TrainerOnly", "the trainer's own device does all")
    if ready:
        return ConditionFinding("CapacityAvailable", "True", "WorkersReady", "workers of its providers are ready")
    none_now = [name for name, share in (run.shares or {}).items() if not share.gpus]
    if none_now and not booting:
        words = f"of {', '.join(none_now)} other runs have all that there is now; its turn comes"
        return ConditionFinding("CapacityAvailable", "False", "FairShare", words)
    if booting:
        return ConditionFinding("CapacityAvailable", "False", "Booting", "workers are on their way")
    if sum(one.preemptions for one in elastic.values()):
        return ConditionFinding(
            "CapacityAvailable", "False", "Preempted", "its workers were taken away; the trainer goes on alone"
        )
    return ConditionFinding(
        "CapacityAvailable", "False", "NoCapacity", "its providers have nothing; the trainer goes on alone"
    )


def _budget(budget_usd: float, cause: str, figures: RunFigures) -> ConditionFinding:
    words = f"${figures.usd:.2f} of ${budget_usd:.2f}"
    if cause.startswith(BUDGET_EXHAUSTED):
        return ConditionFinding("WithinBudget", "False", BUDGET_EXHAUSTED, f"{words}; it can be resumed with more")
    if budget_nearly_used(budget_usd, figures):
        return ConditionFinding("WithinBudget", "True", "BudgetWarning", f"{words}: it is nearly used")
    return ConditionFinding("WithinBudget", "True", "BudgetLeft", f"the budget is ${budget_usd:.2f}")


def budget_nearly_used(budget_usd: float | None, figures: RunFigures) -> bool:
    """Whether most of a run's own budget is spent or committed; its core may have been given less of it so far."""
    stands = figures.budget
    return budget_usd is not None and stands is not None and stands.committed_usd >= WARNED_SHARE * budget_usd


def _ended(phase: RunPhase, cause: str) -> ConditionFinding:
    if phase not in ENDED:
        return ConditionFinding("Ended", "False", "GoingOn", "it has not ended")
    reason, message = _ENDINGS[phase]
    if cause.startswith(BUDGET_EXHAUSTED):
        reason = BUDGET_EXHAUSTED
    return ConditionFinding("Ended", "True", reason, cause or message)
