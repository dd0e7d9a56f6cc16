"""The permit to compute on the trainer's device, where other jobs share that.

Asked for, granted until a time, recalled before that, yielded. Permits are numbered upwards by the pool that gives
them, so that what is said of an older one counts no more. Where nothing is shared there is no permit, and none is
needed. Source: Weave §4.3, §5.1; docs/jobs.md.
"""

from enum import StrEnum

from elastic.core import commands as c
from elastic.core import events as e
from elastic.core.run_state import Deadlines, Handlers, RunState


class PermitState(StrEnum):
    """RECALLED: what is under way may end until the permit is over, and nothing new begins."""

    NONE = "none"
    ASKED = "asked"
    HELD = "held"
    RECALLED = "recalled"


HAD = (PermitState.HELD, PermitState.RECALLED)


class TrainerPermit:
    def __init__(self, run: RunState) -> None:
        self._run = run
        self.state = PermitState.NONE
        self.number = 0
        """The number of the last permit that was granted."""
        self.handlers: Handlers = {
            e.PermitGranted: self._on_granted,
            e.PermitRecalled: self._on_recalled,
            e.PermitEnded: self._on_ended,
        }
        self.due: Deadlines = {
            "permit": lambda _: run.fail("the trainer was not permitted to compute on its device in time"),
            "permit over": lambda _: self._lose(),
        }

    @property
    def needed(self) -> bool:
        """Whether the trainer's device is had by permit."""
        return self._run.permit_ns > 0

    @property
    def allows(self) -> bool:
        """Whether something may begin on the device."""
        return self.state is PermitState.HELD or not self.needed

    def ask(self) -> None:
        if self.state is not PermitState.NONE:
            return
        self.state = PermitState.ASKED
        self._run.wait("permit", "trainer", self._run.permit_ns)
        self._run.out.append(c.AskPermit())

    def give_up(self, *, finished: bool) -> None:
        """Yield what is had, or withdraw what is asked for. `finished`: the step needs no further one."""
        if self.state is PermitState.NONE:
            return
        permit = self.number if self.state in HAD else None
        self._lose()
        self._run.out.append(c.YieldPermit(permit=permit, finished=finished))

    def _lose(self) -> None:
        self.state = PermitState.NONE
        for what in ("permit", "permit over"):
            self._run.timers.clear(what, "trainer")

    def _on_granted(self, event: e.PermitGranted) -> None:
        run = self._run
        if event.permit <= self.number:
            return
        self.number = event.permit
        if self.state is not PermitState.ASKED or not run.active:
            run.out.append(c.YieldPermit(permit=event.permit, finished=True))
            return
        self.state = PermitState.HELD
        run.timers.clear("permit", "trainer")
        self._end_at(event.deadline_ns)

    def _on_recalled(self, event: e.PermitRecalled) -> None:
        if self.state is PermitState.HELD and event.permit == self.number:
            self.state = PermitState.RECALLED
            self._end_at(event.until_ns)

    def _on_ended(self, event: e.PermitEnded) -> None:
        if self.state in HAD and event.permit == self.number:
            self._lose()

    def _end_at(self, at_ns: int) -> None:
        self._run.wait("permit over", "trainer", max(0, at_ns - self._run.now_ns))
