"""Watches what the core is told and what it orders, and compares both with the truth of the world.

- The core's invariants hold.
- A pull uses the relay that the worker was told of. A failed load is reported on the connection on which it was
  ordered.
- A lease ends when it expires, and counts all of its time, whatever the machine did meanwhile.
- No act is needless: a healthy worker is not fenced, does not leave, need not dial again, and gets the weights that it
  is told to load; its turns are neither moved nor sent again; and a failed peer is left alone for a while before a
  retry.
"""

import contextlib
import re
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from random import Random
from typing import NamedTuple

from elastic.core import commands as c
from elastic.core import events as e
from elastic.core.ids import parse_lease
from elastic.core.invariants import check
from elastic.core.scheduler import Scheduler
from elastic.core.turns import Turn
from elastic.core.types import NS_PER_S, EndCause, LeaseId, Nanoseconds, TurnId, TurnState, WorkerId, WorkerState
from elastic.worker.service import AgentExit

CHECKED = 1 / 24
"""Share of events after which the whole state is checked."""
NEVER_NS: Nanoseconds = 2**62
ALL, CONNECTIONS, WEIGHTS, CLOCKS = "all workers", "connections", "weights", "clocks"
"""What may ail besides single workers. Peers may give up connections then, which is no reason to give up a worker;
loads that workers are told to make may be late or fail; the core's time may be behind."""
CANNOT_START = "the trainer's device cannot start: "
"""How the reason of a run begins whose trainer could not start twice in a row."""
STARTS_MAX = 2
AFTERMATH_S = 8.0
"""How long after a fault its victim's acts may still be due to it."""
LOAD_S = 12.0
"""How long a load that began during a fault may take to fail."""
LATE_LOAD = re.compile(r"not pulled within ([\d.]+) s")
LOADS_MAX = 8
"""Failed loads that are remembered for a worker, since its reports may arrive twice."""
DRIFT_MAX = 1e-3
"""Most by which any worker's clock drifts."""
DIALS_MAX, DIALS_WITHIN_S = 60, 5.0
"""More attempts to connect within this time show a peer without a back-off."""
LATE_S = 3.0
"""How much later than it expires a lease may end, and how far its time may be from the world's."""
OF_NO_CONCERN = ("its lease ended", "it has no live lease", "expired", "lost", "released")
"""Reasons for a fence that do not blame the worker: its lease is over, or it has left."""
AT_WORK = (WorkerState.LOADING, WorkerState.READY, WorkerState.ASLEEP)
LOSSES = ("connection lost", "session moved")
BLAMES = (*LOSSES, "no token in time", "not done in time", "hand-over took too long", "expected from")
"""Reasons for moving a turn that blame its worker."""


class Act(StrEnum):
    """Acts that may be needless."""

    FENCE = "fence"
    MOVE = "move"
    RESEND = "resend"
    RETRY = "retry"


class Needless(AssertionError):
    """An act was needless."""

    def __init__(self, act: Act, found: str) -> None:
        self.act = act
        super().__init__(f"needless {act}: {found}")


@dataclass
class _Pull:
    """`asked`: the relays that the process has used since. `alone`: the pull shares them with no other pull."""

    alone: bool
    asked: set[str] = field(default_factory=set[str])


@dataclass
class Lasting:
    """What has come of a worker since it began to lie on and on: its events, the turns that it was given, and how many
    others have finished since it got the first of these, at `given_ns`. It was last heard at `heard_ns`."""

    since_ns: Nanoseconds
    events: int = 0
    turns: int = 0
    given_ns: Nanoseconds = NEVER_NS
    heard_ns: Nanoseconds = 0
    others_finished: int = 0


class Held(NamedTuple):
    """A lease since it was granted, by the world's time and by the core's; or since the core's time is right again."""

    since_ns: Nanoseconds
    core_ns: Nanoseconds
    expires_at_ns: Nanoseconds | None


class Oracle:
    """Watches one `core` at a time. Violations are collected in `found`, even if the process that caused them dies."""

    def __init__(self, now_ns: Callable[[], Nanoseconds], chance: Random, found: list[AssertionError]) -> None:
        self.core: Scheduler | None = None
        self.events = 0
        self.found = found
        self.at_steps: list[Callable[[], object]] = []
        """Called, and forgotten, when a core next has its trainer take a step."""
        self._now_ns = now_ns
        self._chance = chance
        self._ailing_ns: defaultdict[str, Nanoseconds] = defaultdict(int)
        """Until when something may be the cause of what befalls a worker, or of what else ails."""
        self.held: dict[LeaseId, Held] = {}
        self._granted_late: set[LeaseId] = set()
        """Those of these leases that were granted while the core's time was behind: it has caught up since."""
        self._byzantine: dict[WorkerId, None] = {}
        self.lasting: dict[WorkerId, Lasting] = {}
        """Those that lie for as long as they live."""
        self.impostors: dict[WorkerId, None] = {}
        self._refused_ns: dict[str, Nanoseconds] = {}
        self._failed_loads: dict[tuple[WorkerId, int, int], Nanoseconds] = {}
        """By worker, epoch and version. Of a report that arrives twice the first time counts. Who comes back is ordered
        at once what it lacks."""
        self._unstarted: dict[str, int] = {}
        """By provider, starts in a row that have failed for the one cause that worlds have."""
        self._asked_since: dict[str, set[LeaseId]] = {}
        """Leases that were asked for since the last start failed."""
        self._sent: dict[TurnId, WorkerId] = {}
        self._lost_ns: dict[WorkerId, Nanoseconds] = {}
        """When the core last heard that a worker's connection is gone."""
        self._loads_failed: dict[WorkerId, deque[Nanoseconds]] = {}
        """When the last loads began that have failed in a worker."""
        self._pulls: dict[object, list[_Pull]] = {}
        self._dials: dict[object, deque[Nanoseconds]] = {}

    def cannot_start(self, provider: str) -> bool:
        """Return whether the last two starts of a provider, one asked for after the other, have failed alike."""
        return self._unstarted.get(provider, 0) >= STARTS_MAX

    def follow(self, core: Scheduler) -> None:
        """Watch the core of another incarnation, which need not know the last events of the one before."""
        self.core = core
        for known in (self._refused_ns, self._failed_loads, self._sent, self._unstarted, self._asked_since):
            known.clear()

    # What is true

    def ails(self, what: str, for_s: float = 0.0) -> None:
        """Note a fault of a worker, or of `ALL`, `CONNECTIONS`, `WEIGHTS` or `CLOCKS`, that lasts `for_s`."""
        lasts_s = for_s + AFTERMATH_S + (LOAD_S if what == WEIGHTS else 0.0)
        self._ailing_ns[what] = max(self._ailing_ns[what], self._now_ns() + round(lasts_s * NS_PER_S))

    def doomed(self, worker: WorkerId) -> None:
        """Note that this worker is dead, or dials an address that never answers. Every later act on it is needed."""
        self._ailing_ns[worker] = NEVER_NS

    def lies(self, worker: WorkerId) -> None:
        self._byzantine[worker] = None

    def lies_on(self, worker: WorkerId) -> None:
        """Note that from now on the worker lies, and does not stop."""
        self.lies(worker)
        self.lasting.setdefault(worker, Lasting(self._now_ns()))

    def impostor(self, worker: WorkerId) -> None:
        """Note that from now on the worker's tokens are not of the weights that it names."""
        self.impostors[worker] = None

    def has_lied(self, worker: WorkerId) -> bool:
        return worker in self._byzantine

    def _well(self, worker: WorkerId, for_s: float = 0.0) -> bool:
        """Return whether the worker has had no fault for `for_s`."""
        until_ns = max(self._ailing_ns[ALL], self._ailing_ns[worker]) + round(for_s * NS_PER_S)
        return worker not in self._byzantine and self._now_ns() > until_ns

    # What is done

    def dialled(self, who: object) -> None:
        dials = self._dials.setdefault(who, deque())
        dials.append(self._now_ns())
        while dials[0] < dials[-1] - DIALS_WITHIN_S * NS_PER_S:
            dials.popleft()
        if len(dials) > DIALS_MAX:
            self.found.append(Needless(Act.RETRY, f"{len(dials)} attempts to connect in {DIALS_WITHIN_S} s"))

    @contextlib.contextmanager
    def pulls(self, who: object, relay: str) -> Iterator[None]:
        """A context: while it lasts, a process pulls weights, as it was told, from a relay."""
        others = self._pulls.setdefault(who, [])
        pull = _Pull(alone=not others)
        for other in others:
            other.alone = False
        others.append(pull)
        try:
            yield
        finally:
            others.remove(pull)
            if pull.alone and pull.asked and relay not in pull.asked:
                self.found.append(AssertionError(f"told to pull from {relay}, it asked {sorted(pull.asked)}"))

    def asks(self, who: object, relay: str) -> None:
        for pull in self._pulls.get(who, ()):
            pull.asked.add(relay)

    def load_failed(self, worker: WorkerId, began_ns: Nanoseconds) -> None:
        """Note a load that has failed in the worker. The worker may or may not report it."""
        self._loads_failed.setdefault(worker, deque(maxlen=LOADS_MAX)).append(began_ns)

    def left(self, worker: WorkerId, end: AgentExit) -> None:
        """Note that a worker's process has ended by itself. It may blame a fault only if something is wrong with it."""
        known = self.core and self.core.fleet.workers.get(worker)
        if end.code and known and known.state in AT_WORK and self._well(worker):
            self.found.append(Needless(Act.FENCE, f"{worker} has left: {end.reason}"))

    def left_behind(self, worker: WorkerId, what: str) -> None:
        """Note something that a healthy worker left behind when it left in good order."""
        if self._well(worker, LOAD_S):
            self.found.append(AssertionError(f"{worker} has left with {what}"))

    def hear(self, core: Scheduler, event: e.Event, commands: Sequence[c.Command]) -> None:
        """Check what a core makes of an event, if it is the one that is watched."""
        if core is self.core:
            try:
                self._check_event(core, event, commands)
            except AssertionError as error:
                self.found.append(error)

    def _check_event(self, core: Scheduler, event: e.Event, commands: Sequence[c.Command]) -> None:
        self.events += 1
        if self.lasting:
            self._follow_lasting(event, commands)
        if self._granted_late and self._now_ns() > self._ailing_ns[CLOCKS]:
            self._count_anew(core)
        match event:
            case e.LeaseRefused():
                if (lease := core.leases.leases.get(event.lease)) is not None:
                    self._refused_ns[lease.provider] = core.now_ns
            case e.WeightsFailed():
                self._failed_loads.setdefault((event.worker, event.epoch, event.version), core.now_ns)
                self._load_told(event)
                well = self._well(event.worker, LOAD_S) and self._now_ns() > self._ailing_ns[WEIGHTS]
                _require(not well, Act.RETRY, f"{event.worker}: {event.reason}")
            case e.WorkerDisconnected():
                self._disconnected(core, event)
            case e.LeaseGranted():
                self.held.setdefault(event.lease, Held(self._now_ns(), core.now_ns, event.expires_at_ns))
                if self._now_ns() <= self._ailing_ns[CLOCKS]:
                    self._granted_late.add(event.lease)
            case e.LeaseEnded():
                self._in_time(core, event.lease)
                self._lease_ended(core, event)
            case e.WorkerJoined():
                if (worker := core.fleet.workers.get(event.worker)) is not None:
                    self._unstarted.pop(worker.provider, None)
            case e.CapSet():
                self._unstarted.pop(event.provider, None)
            case e.Resumed():
                self._unstarted.clear()
            case _:
                pass
        for command in commands:
            match command:
                case c.FenceWorker():
                    self._fenced(core, command)
                case c.StartTurn():
                    self._started(core, command)
                case c.LoadWeights():
                    self._loads(core, command)
                case c.AcquireLease():
                    self._acquires(core, command)
                case c.UpdateWeights():
                    while self.at_steps:
                        self.at_steps.pop()()
                case _:
                    pass
        if self._chance.random() < CHECKED:
            check(core)

    def _follow_lasting(self, event: e.Event, commands: Sequence[c.Command]) -> None:
        byzantine = self.lasting.get(getattr(event, "worker", ""))
        if byzantine is not None:
            byzantine.events += 1
            byzantine.heard_ns = self._now_ns()
        for command in commands:
            match command:
                case c.StartTurn() if command.worker in self.lasting:
                    byzantine = self.lasting[command.worker]
                    byzantine.turns += 1
                    byzantine.given_ns = min(byzantine.given_ns, self._now_ns())
                case c.FinishTurn():
                    for other in self.lasting.values():
                        other.others_finished += other.turns > 0
                case _:
                    pass

    def _load_told(self, event: e.WeightsFailed) -> None:
        """Check a report of a failed load. An epoch's connection is closed before the next one begins, so a load
        that began before the connection was not ordered on it."""
        if event.worker in self._byzantine:
            return
        since_ns, failed = self._lost_ns.get(event.worker, 0), self._loads_failed.get(event.worker, deque())
        if late := LATE_LOAD.match(event.reason):
            told_rightly = self._now_ns() - since_ns >= float(late[1]) * (1 - DRIFT_MAX) * NS_PER_S
        else:
            told_rightly = any(began_ns >= since_ns for began_ns in failed)
        if not told_rightly:
            why = f"{event.worker} under epoch {event.epoch}: {event.reason}"
            raise AssertionError(f"a load is told on another connection than it was ordered on: {why}")

    def _disconnected(self, core: Scheduler, event: e.WorkerDisconnected) -> None:
        """Check that a connection had a cause to end. A run that was stopped ends them all."""
        self._lost_ns[event.worker] = self._now_ns()
        ails = not self._well(event.worker) or self._now_ns() <= self._ailing_ns[CONNECTIONS]
        needed = event.goodbye or bool(core.stopped) or ails
        _require(needed, Act.RETRY, f"{event.worker} has to dial again")

    def _fenced(self, core: Scheduler, command: c.FenceWorker) -> None:
        if command.reason == EndCause.BARRED:
            needed = self.has_lied(command.worker)
        elif command.reason == EndCause.MISMATCHED:
            # What a Byzantine worker calls its log-probabilities need not be those of any weights.
            needed = command.worker in self.impostors or self.has_lied(command.worker)
        else:
            needed = command.reason.startswith(OF_NO_CONCERN) or not self._well(command.worker)
        _require(needed, Act.FENCE, f"{command.worker}: {command.reason}")

    def _started(self, core: Scheduler, command: c.StartTurn) -> None:
        before, self._sent[command.turn] = self._sent.get(command.turn), command.worker
        if before is None:
            return
        turn = core.turns.live.get(command.turn)
        taken_ns, cause = (core.now_ns, "") if turn is None else _taken_off(turn)
        waited_ns = core.now_ns - taken_ns
        excused = any(loss in cause for loss in LOSSES) and self._now_ns() <= self._ailing_ns[CONNECTIONS] + waited_ns
        needed = excused or not any(blame in cause for blame in BLAMES) or not self._well(before, waited_ns / NS_PER_S)
        act = Act.RESEND if before == command.worker else Act.MOVE
        _require(needed, act, f"{command.turn} from {before} to {command.worker}: {cause}")

    def _loads(self, core: Scheduler, command: c.LoadWeights) -> None:
        failed_ns = self._failed_loads.pop((command.worker, command.epoch, command.version), None)
        late_enough = failed_ns is None or core.now_ns - failed_ns >= core.limits.retry_base_ns
        _require(late_enough, Act.RETRY, f"{command.worker} loads {command.version} again without a back-off")

    def _count_anew(self, core: Scheduler) -> None:
        """Check by their time from now on the leases that were granted while the core's time was behind."""
        for lease in self._granted_late & self.held.keys():
            self.held[lease] = self.held[lease]._replace(since_ns=self._now_ns(), core_ns=core.now_ns)
        self._granted_late.clear()

    def _in_time(self, core: Scheduler, lease: LeaseId) -> None:
        held = self.held.pop(lease, None)
        if held is None or self._now_ns() <= max(self._ailing_ns[what] for what in (ALL, CONNECTIONS, CLOCKS)):
            return
        lived_ns, counted_ns = self._now_ns() - held.since_ns, core.now_ns - held.core_ns
        off_s = abs(lived_ns - counted_ns) / NS_PER_S
        if off_s > LATE_S:
            raise AssertionError(f"{lease} counts {counted_ns / NS_PER_S:.1f} s instead of {lived_ns / NS_PER_S:.1f} s")
        if held.expires_at_ns is not None:
            late_s = (lived_ns + held.core_ns - held.expires_at_ns) / NS_PER_S
            if late_s > LATE_S:
                raise AssertionError(f"{lease} ends {late_s:.1f} s after it has expired")

    def _lease_ended(self, core: Scheduler, event: e.LeaseEnded) -> None:
        """Check that a provider is given up for starts that have failed alike, and for nothing else."""
        if not event.fault:
            return
        provider = parse_lease(event.lease)[0]
        times, asked = self._unstarted.get(provider, 0), self._asked_since.get(provider, set())
        if not times or event.lease in asked:
            self._unstarted[provider] = times + 1
            self._asked_since[provider] = set()
        given_up = provider in core.leases.stopped
        _require(self.cannot_start(provider) or not given_up, Act.FENCE, f"{provider} is given up: {event.fault}")

    def _acquires(self, core: Scheduler, command: c.AcquireLease) -> None:
        self._asked_since.setdefault(command.provider, set()).add(command.lease)
        again = f"{command.provider} is asked again, whose workers cannot start"
        _require(not self.cannot_start(command.provider), Act.RETRY, again)
        refused_ns = self._refused_ns.pop(command.provider, None)
        late_enough = refused_ns is None or core.now_ns - refused_ns >= core.limits.retry_base_ns
        _require(late_enough, Act.RETRY, f"{command.provider} is asked again without a back-off")


def _require(needed: bool, act: Act, found: str) -> None:
    if not needed:
        raise Needless(act, found)


def _taken_off(turn: Turn) -> tuple[Nanoseconds, str]:
    """Return when and why the turn was taken off its last worker."""
    queued = (
        (at_ns, cause) for at_ns, _, finish, cause, _ in reversed(turn.story.chapters) if finish is TurnState.QUEUED
    )
    return next(queued, (0, ""))
