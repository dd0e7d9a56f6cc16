"""A run: the one place where the core's commands become effects.

Event → core → commands → calls of ports, one event at a time, without waiting for anything. What runs beside it,
such as threads and sockets, lies behind the ports; so the same `Run` lives in every world.

Guarantees:
- An event is journaled before anything comes of it. What cannot be taken back (a lease's release, an order to the
  trainer, what leaves for a function) is done once that is durable.
- A run that is told what the journal has (`recall`) is where it was; `resume` takes up from there.
- No deadline passes for the process's own lateness: see `Alarm`.
"""

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from msgspec import UNSET, UnsetType

from elastic.core import commands as c
from elastic.core import events as e
from elastic.core import saved_state
from elastic.core.scheduler import Phase, Scheduler
from elastic.core.trainer_permit import HAD, PermitState
from elastic.core.types import LeaseId, LeaseState, Nanoseconds, PolicyFault, ScoringState, TurnId
from elastic.runtime.journal import why_unreadable
from elastic.runtime.ports import Clock, Ports

LATE_WAKEUP_NS = 50_000_000
"""A timer this late means that the process was held up: what lies in its sockets is older than the deadline, so it is
read first. Otherwise a busy orchestrator would fence workers for its own silence."""
HELD_UP_NS = 1_000_000_000
"""A timer this late means that deadlines would pass that what was read has put off too little: see `Alarm`."""
LATE_WAKEUPS_MAX = 8
"""A process that stays late this often in a row is not held up but overloaded: deadlines pass then all the same."""


class Alarm:
    """Wakes the core when the core has asked for it. Call `arm` after every event.

    - The alarm is set again only for an earlier time. Most deadlines move with every token, so they have usually moved
      on when the alarm rings.
    - After a hold-up of the process, events that waited in sockets count as if they had come before the first deadline.
      The core's time goes on from there, twice as fast until it has caught up, so that living peers are heard first.
    - Only time in which the machine was awake counts. After a suspension the core first learns how long it lasted
      (`slept_ns`), and the present time.
    """

    def __init__(self, clock: Clock, next_ns: Callable[[], Nanoseconds | None], wake: Callable[[], None]) -> None:
        self._clock = clock
        self._slept_ns: Nanoseconds = 0
        """The suspended time that the core knows of. Its time is later than the times below by as much."""
        self._next_ns = next_ns
        self._wake = wake
        self._due_ns: Nanoseconds | None = None
        self._set_to_ns: Nanoseconds | None = None
        self._late = 0
        self._behind_ns: Nanoseconds = 0
        self._behind_at_ns: Nanoseconds = 0
        """How far the core's time was behind the clock, and when."""
        self.held = False
        """No messages are read for now, so no deadline passes."""

    def event_ns(self) -> Nanoseconds:
        """When an event of now counts as having happened: before any deadline that has passed without a wake-up."""
        now_ns, due_ns = self._core_ns(), self._due_ns
        return self._slept_ns + (now_ns if due_ns is None or now_ns <= due_ns else due_ns - 1)

    def slept_ns(self) -> Nanoseconds:
        """Return for how long the machine was suspended since this was last asked."""
        before_ns, self._slept_ns = self._slept_ns, self._clock.slept_ns()
        return self._slept_ns - before_ns

    def arm(self) -> None:
        next_ns = self._next_ns()
        due_ns = self._due_ns = None if next_ns is None else next_ns - self._slept_ns
        if due_ns is not None and (self._set_to_ns is None or due_ns < self._set_to_ns):
            self._set_to_ns = due_ns
            self._ring_at(self._clock_ns(due_ns), due_ns)

    def stop(self) -> None:
        self._due_ns = self._set_to_ns = None

    def _now_ns(self) -> Nanoseconds:
        return self._clock.now_ns() - self._clock.slept_ns()

    def _core_ns(self) -> Nanoseconds:
        now_ns = self._now_ns()
        if not self._behind_ns:
            return now_ns
        return now_ns - max(0, self._behind_ns - (now_ns - self._behind_at_ns))

    def _clock_ns(self, core_ns: Nanoseconds) -> Nanoseconds:
        """When it is this late for the core."""
        catching_up_ns = (core_ns + self._behind_ns + self._behind_at_ns) // 2
        return max(core_ns, catching_up_ns) if self._core_ns() < self._now_ns() else core_ns

    def _ring_at(self, when_ns: Nanoseconds, set_to_ns: Nanoseconds) -> None:
        expected_ns = max(when_ns, self._now_ns())
        self._set_clock(when_ns, set_to_ns, expected_ns)

    def _set_clock(self, when_ns: Nanoseconds, set_to_ns: Nanoseconds, expected_ns: Nanoseconds) -> None:
        self._clock.at(when_ns + self._clock.slept_ns(), partial(self._ring, set_to_ns, expected_ns))

    def _ring(self, set_to_ns: Nanoseconds, expected_ns: Nanoseconds) -> None:
        if self._set_to_ns != set_to_ns:
            return
        now_ns = self._now_ns()
        if self.held:
            self._set_clock(now_ns + LATE_WAKEUP_NS // 2, set_to_ns, expected_ns)
            return
        if now_ns - expected_ns > LATE_WAKEUP_NS and self._late < LATE_WAKEUPS_MAX:
            self._late += 1
            if now_ns - expected_ns > HELD_UP_NS:
                self._behind_ns, self._behind_at_ns = now_ns - set_to_ns, now_ns
            self._ring_at(now_ns + LATE_WAKEUP_NS // 2, set_to_ns)
            return
        self._late, self._set_to_ns = 0, None
        if self._due_ns is not None and self._due_ns <= set_to_ns:
            self._due_ns = None
            self._wake()
        else:
            self.arm()


Decided = Callable[[e.Event, Sequence[c.Command]], None]


class Run:
    """`connect` makes the ports of the run it is given; they may feed it from then on. `failed` is why the run has
    failed, empty while it has not. `decided` is told what the core makes of each event, before that has an effect."""

    def __init__(
        self, scheduler: Scheduler, connect: "Callable[[Run], Ports]", decided: Decided = lambda event, commands: None
    ) -> None:
        self.scheduler = scheduler
        self._decided = decided
        self.failed = ""
        self.closed = False
        self._inbox: deque[tuple[e.Event, Any]] = deque()
        self._handling = False
        self._unprompted: dict[TurnId, c.StartTurn] = {}
        """Turns that were to start before their environments had come to them."""
        self._ports = ports = connect(self)
        self._alarm = Alarm(ports.clock, scheduler.next_wakeup_ns, lambda: self.feed(e.Tick()))
        self._record = ports.journal.record
        workers, trajectories = ports.workers, ports.trajectories
        self._execute: dict[type[c.Command], Callable[[Any], None]] = {
            c.AcquireLease: self._acquire_lease,
            c.ReleaseLease: lambda k: self._once_durable(ports.leases.release, k.lease, k.provider, k.reason),
            c.StartTurn: self._start_turn,
            c.AbortTurn: workers.order,
            c.FinishTurn: lambda k: trajectories.finish_turn(k.turn),
            c.FailTurn: lambda k: trajectories.fail_turn(k.turn, k.cause),
            c.LoadWeights: workers.order,
            c.SleepWorker: workers.order,
            c.WakeWorker: workers.order,
            c.DrainWorker: workers.order,
            c.FenceWorker: lambda k: workers.fence(k.worker, k.reason),
            c.BlameWorker: lambda k: workers.blame(k.worker, k.reason),
            c.BarLease: lambda k: ports.leases.bar(k.lease, k.provider),
            c.StartGroup: trajectories.start,
            c.RefillMember: trajectories.refill,
            c.CancelTrajectory: lambda k: trajectories.cancel(k.trajectory),
            c.ScoreTrajectory: self._score,
            c.RecordReward: lambda k: trajectories.record_reward(k.trajectory, k.reward, k.cause),
            c.TrainGroup: self._train_group,
            c.DropGroup: self._drop_group,
            c.EndEvaluation: self._end_evaluation,
            c.UpdateWeights: self._update_weights,
            c.AnswerOffer: lambda k: self._once_durable(ports.offers.answered, k),
            c.AskPermit: lambda _: self._once_durable(ports.pool.ask_permit),
            c.YieldPermit: lambda k: self._once_durable(
                partial(ports.pool.yield_permit, k.permit, finished=k.finished)
            ),
            c.TellProgress: lambda k: ports.pool.report_progress(k.step, k.done, k.of),
            c.ExhaustBudget: lambda k: self.feed(e.BudgetExhausted(cause=k.cause)),
            c.EndRun: self._end_run,
        }

    # Events in

    def feed(self, event: e.Event, payload: Any = None) -> None:
        """Give one event to the core and carry out its commands. An event that is fed meanwhile is handled
        afterwards."""
        if self._handling:
            self._inbox.append((event, payload))
            return
        self._handling = True
        try:
            self._handle(event, payload)
            while self._inbox:
                event, payload = self._inbox.popleft()
                self._handle(event, payload)
            if not self.closed:
                self._alarm.arm()
        except Exception as error:
            # The event's sender cannot help; a core that broke off halfway must not go on.
            self._inbox.clear()
            self._break(event, error)
        finally:
            self._handling = False

    def stop(self, reason: str) -> None:
        """Give everything back and end; the run then counts as failed for this reason."""
        self.feed(e.StopRequested(reason=reason))

    def kill(self, reason: str) -> None:
        """End at once, without giving anything back."""
        self.failed = self.failed or self.scheduler.failed or reason
        self.close()
        self._ports.owner.ended()

    def hold(self, held: bool) -> None:
        """While `held`, workers are not read from, and no deadline passes."""
        self._alarm.held = held

    def close(self) -> None:
        """Carry out no more commands. Events that are fed are still journaled and given to the core, such as ends of
        leases."""
        self.closed = True
        self._alarm.stop()

    def prompted(self, turn: TurnId) -> None:
        """Send a turn to its worker now that its environment has come to it, if the order still stands."""
        order, live = self._unprompted.pop(turn, None), self.scheduler.turns.live.get(turn)
        if order is not None and live is not None and (live.attempt, live.worker) == (order.attempt, order.worker):
            self._start_turn(order)

    def _handle(self, event: e.Event, payload: Any) -> None:
        if slept_ns := self._alarm.slept_ns():
            self._take(e.Suspended(for_ns=slept_ns), None)
        self._take(event, payload)

    def _take(self, event: e.Event, payload: Any) -> None:
        now_ns = self._alarm.event_ns()
        commands: Sequence[c.Command] = ()
        try:
            commands = self.scheduler.handle(event, now_ns)
            self._decided(event, commands)
        finally:
            self._record(now_ns, event, payload, commands)
        for command in commands:
            if self.closed:
                return
            if type(command) is c.AcceptTokens:
                assert isinstance(event, e.TokensReceived)
                self._ports.trajectories.accept(event, command, payload)
            else:
                self._execute[type(command)](command)

    def _break(self, cause: e.Event | None, error: Exception) -> None:
        if unreadable := why_unreadable(error):
            self.kill(unreadable)
            return
        self._ports.owner.broken(cause, error)
        if isinstance(error, PolicyFault):
            self.kill(str(error))
            return
        self.kill(f"internal error: {type(error).__name__}: {error}")

    # From one incarnation to the next

    def recall(self, now_ns: Nanoseconds, event: e.Event, payload: Any = None) -> None:
        """Replay an event of a former incarnation. Nothing is carried out; the ports remember what it led to."""
        ports, commands = self._ports, self.scheduler.handle(event, now_ns)
        ports.journal.recalled(now_ns, event, commands)
        ports.trajectories.recalled(event, None)
        for command in commands:
            match command:
                case c.AcceptTokens():
                    assert isinstance(event, e.TokensReceived)
                    ports.trajectories.accept(event, command, payload)
                    continue
                case c.TrainGroup() | c.UpdateWeights():
                    ports.trainer.remember(command)
                case c.DropGroup() if command.slot is not None:
                    ports.trainer.remember(command)
                case _:
                    pass
            ports.trajectories.recalled(event, command)

    def saved(self) -> bytes:
        """The state of the core, and what the ports remember besides."""
        ports = self._ports
        others = (ports.journal.saved(), ports.trajectories.saved(), ports.trainer.saved())
        return saved_state.save(self.scheduler, *others)

    def restore(self, saved: bytes) -> None:
        """Take over a saved state; for a fresh run only. Raises `StateError`."""
        ports, others = self._ports, saved_state.restore(self.scheduler, saved)
        for port, its_own in zip((ports.journal, ports.trajectories, ports.trainer), others, strict=True):
            port.restore(its_own)

    def resume(self, budget_usd: float | UnsetType | None = UNSET) -> None:
        """Go on from the replayed state: all workers count as disconnected, and work under way is taken up or ordered
        again. A budget that is given replaces the one that the run had.

        A run that had ended stays ended.
        """
        if self.scheduler.phase is Phase.ENDED:
            self._end_run(c.EndRun(failed=self.scheduler.failed))
            return
        self.feed(e.Resumed(budget_usd=budget_usd))
        for worker in list(self.scheduler.fleet.workers.values()):
            if worker.connected:
                self.feed(e.WorkerDisconnected(worker=worker.id, epoch=worker.epoch))
        for lease in list(self.scheduler.leases.leases.values()):
            if lease.state is LeaseState.RELEASING:
                self._once_durable(self._ports.leases.release, lease.id, lease.provider, lease.release_reason)
        permit = self.scheduler.permit
        had = permit.number if permit.state in HAD else None
        self._ports.pool.take_up(had, asked=permit.state is PermitState.ASKED, last=permit.number)
        self._ports.trajectories.resume()
        for scoring in list(self.scheduler.scorings.values()):
            if scoring.state is ScoringState.RUNNING:
                self._score(c.ScoreTrajectory(trajectory=scoring.trajectory, attempt=scoring.attempt))

    def ask_again(self, lease: LeaseId) -> None:
        """The provider has never heard of the request: it has not arrived, or the answer has not."""
        asked = self.scheduler.leases.leases.get(lease)
        if asked is None:
            return
        if asked.release_reason:
            self.feed(e.LeaseRefused(lease=lease, reason="it was withdrawn"))
        else:
            self._acquire_lease(c.AcquireLease(lease=lease, provider=asked.provider))

    # Commands out

    def _once_durable(self, action: Callable[..., None], *arguments: Any) -> None:
        def act() -> None:
            if self.closed:
                return
            try:
                action(*arguments)
            except Exception as error:
                self._break(None, error)

        self._ports.journal.durable(act)

    def _acquire_lease(self, command: c.AcquireLease) -> None:
        offer = self.scheduler.leases.offers[command.provider]
        # The next process has to know of all that was ever asked for, and what it may cost.
        self._once_durable(self._ports.leases.acquire, command.lease, command.provider, offer.workers_per_lease)

    def _start_turn(self, command: c.StartTurn) -> None:
        prompt = self._ports.trajectories.prompt(command.turn)
        if prompt is not None:
            self._ports.workers.start_turn(command, prompt)
        else:
            self._unprompted[command.turn] = command

    def _score(self, command: c.ScoreTrajectory) -> None:
        self._once_durable(self._ports.rewards.score, command, self._ports.trajectories.finished(command.trajectory))

    def _train_group(self, command: c.TrainGroup) -> None:
        """Order the training of a group. Its trajectories may have to be read from the journal once it has them."""
        ports = self._ports
        ports.trainer.remember(command)
        self._once_durable(lambda: ports.trainer.train(command, ports.trajectories.take(command.trajectories)))

    def _update_weights(self, command: c.UpdateWeights) -> None:
        self._ports.trainer.remember(command)
        self._once_durable(self._ports.trainer.update, command)

    def _drop_group(self, command: c.DropGroup) -> None:
        dropped = self._ports.trajectories.drop(command.trajectories)
        if command.slot is not None:
            self._ports.trainer.remember(command)
            self._once_durable(self._ports.trainer.skip, command, dropped)

    def _end_evaluation(self, command: c.EndEvaluation) -> None:
        if command.best:
            self._once_durable(self._ports.owner.keep, command.record.version)

    def _end_run(self, command: c.EndRun) -> None:
        self.failed = command.failed
        self._ports.owner.ended()
