"""Decides the next step for a run: a pure function of the request and of what was seen of the run.

- A process is started only if no process of the run lives.
- A process that dies without recording the run's end is replaced up to `max_restarts` times since the run last did a
  step. A death of the whole machine or container does not count, and neither does an outage of what a run begins with.
- A run that is to stop while its process is down is started once more, after its back-off, to give back its resources.
- A run that stopped for lack of a slice of its project's budget waits for the next slice. A run that made room because
  its project's quota was lowered waits until there is room again.
"""

from dataclasses import dataclass, replace
from enum import StrEnum

from elastic.compose.run_endings import BAD_INPUT, DIED, FAILED, FINISHED, INTERRUPTED, OUTAGE, STOPPED, Ending
from elastic.core.controls import BUDGET_EXHAUSTED
from elastic.core.ledger import NANO_USD_PER_USD
from elastic.protocol.api import ALIVE, RunFigures, RunPhase
from elastic.server.store import runs
from elastic.server.store.runs import HostedRunRow
from elastic.system.outages import backoff

QUOTA_LOWERED = "QuotaLowered"
"""Prefix of the reason of runs that are stopped to make room."""


class NextStep(StrEnum):
    """What the runner does about a run."""

    NOTHING = "nothing"
    START = "start"
    STOP = "stop"
    KILL = "kill"
    BECOME = "become"
    SETTLE = "settle"
    REMOVE = "remove"


@dataclass(frozen=True, kw_only=True)
class ProcessSeen:
    """A run's process at this moment. `ending` is set if a process was started and is gone."""

    alive: bool
    signalled: bool = False
    leaves: bool = False
    """Whether its journal may list resources that were not given back."""
    ending: Ending | None = None


@dataclass(frozen=True, kw_only=True)
class Decision:
    """A step. For BECOME also the new phase of the run."""

    step: NextStep
    phase: RunPhase = RunPhase.PENDING
    cause: str = ""
    counts: bool = False
    """Whether the next process counts towards `max_restarts`."""
    not_before_us: int = 0


NOTHING = Decision(step=NextStep.NOTHING)


def decide(run: HostedRunRow, seen: ProcessSeen, now_us: int, base_s: float, max_s: float) -> Decision:
    """Return the next step. `base_s` is the first back-off after a death; it doubles each time up to `max_s`."""
    if seen.alive:
        return _living(run, seen)
    if run.wanted == runs.DELETE:
        return Decision(step=NextStep.REMOVE)
    if run.phase in ALIVE:
        return _gone(run, seen, now_us, base_s, max_s)
    if run.ended:
        return Decision(step=NextStep.SETTLE)
    if run.wanted == runs.STOP:
        if run.phase is RunPhase.RESTARTING and seen.leaves and not run.force:
            return Decision(step=NextStep.START) if now_us >= run.not_before_us else NOTHING
        return Decision(step=NextStep.BECOME, phase=RunPhase.STOPPED, cause=run.cause)
    return Decision(step=NextStep.START) if now_us >= run.not_before_us else NOTHING


def since_progress(run: HostedRunRow, figures: RunFigures | None) -> HostedRunRow:
    """Return the run with its restarts since its last progress: none, where the newest `figures` are of a step that it
    had not come to before."""
    if figures is None or figures.step <= run.furthest_step:
        return run
    return replace(run, furthest_step=figures.step, restarts=0)


def short_of_slice(run: HostedRunRow) -> bool:
    """Return whether the run stopped for its project's budget instead of its own."""
    if run.allotted_nano_usd is None:
        return False
    return run.budget_usd is None or run.allotted_nano_usd < int(run.budget_usd * NANO_USD_PER_USD)


def _living(run: HostedRunRow, seen: ProcessSeen) -> Decision:
    if run.wanted == runs.RUN:
        makes_room = run.waits is not None and not seen.signalled
        return Decision(step=NextStep.STOP) if makes_room else NOTHING
    if run.force or run.wanted == runs.DELETE:
        return Decision(step=NextStep.KILL)
    return NOTHING if seen.signalled else Decision(step=NextStep.STOP)


def _gone(run: HostedRunRow, seen: ProcessSeen, now_us: int, base_s: float, max_s: float) -> Decision:
    ending = seen.ending or Ending(how=DIED)
    cause = ending.cause
    if ending.how == FINISHED:
        return Decision(step=NextStep.BECOME, phase=RunPhase.FINISHED)
    if ending.how in (FAILED, BAD_INPUT):
        return Decision(step=NextStep.BECOME, phase=RunPhase.FAILED, cause=cause)
    if run.wanted == runs.STOP and (run.force or ending.how not in (DIED, OUTAGE) or not seen.leaves):
        return Decision(step=NextStep.BECOME, phase=RunPhase.STOPPED)
    if ending.how == STOPPED and cause.startswith(BUDGET_EXHAUSTED) and short_of_slice(run):
        return Decision(step=NextStep.BECOME, phase=RunPhase.PENDING)
    if (ending.how == STOPPED and cause.startswith(QUOTA_LOWERED)) or (ending.how == INTERRUPTED and seen.signalled):
        return Decision(step=NextStep.BECOME, phase=RunPhase.PENDING)
    if ending.how == STOPPED:
        return Decision(step=NextStep.BECOME, phase=RunPhase.STOPPED, cause=cause)
    if ending.how == INTERRUPTED:
        return Decision(
            step=NextStep.BECOME, phase=RunPhase.STOPPED, cause=cause or "interrupted from outside the server"
        )
    if ending.how == OUTAGE:
        later_us = now_us + round(max_s * 1e6)
        return Decision(step=NextStep.BECOME, phase=RunPhase.RESTARTING, cause=cause, not_before_us=later_us)
    if ending.with_world:
        return Decision(step=NextStep.BECOME, phase=RunPhase.RESTARTING, cause=cause)
    if run.restarts >= run.max_restarts and run.wanted == runs.STOP:
        left = f"{cause}; it could not give back what it had"
        return Decision(step=NextStep.BECOME, phase=RunPhase.STOPPED, cause=left)
    if run.restarts >= run.max_restarts:
        given_up = f"{cause}; it has been started again {run.restarts} times, and is not any more"
        return Decision(step=NextStep.BECOME, phase=RunPhase.FAILED, cause=given_up)
    delay_s = backoff(run.restarts, base_s, max_s)
    return Decision(
        step=NextStep.BECOME,
        phase=RunPhase.RESTARTING,
        cause=cause,
        counts=True,
        not_before_us=now_us + round(delay_s * 1e6),
    )
