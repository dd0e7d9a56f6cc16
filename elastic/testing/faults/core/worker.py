"""A simulated worker: an engine with a simple token rate, a heart, a process that may die and a clock of accounts."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from elastic.core import commands as c
from elastic.core import events as e
from elastic.core.types import (
    Account,
    Capabilities,
    Chunk,
    Chunks,
    FinishReason,
    LeaseId,
    LoadPhase,
    Nanoseconds,
    TurnId,
    WeightMode,
    WorkerId,
    WorkerRole,
)
from elastic.testing.faults.core.lies import false_events
from elastic.testing.faults.core.link import SimulatedLink
from elastic.testing.faults.core.settings import MS

if TYPE_CHECKING:
    from elastic.testing.faults.core.incarnation import Incarnation
    from elastic.testing.faults.core.world import SimulatedWorld

CAPABILITIES = Capabilities(engine="simulated", replayable_sampling=True, max_context_tokens=4096, device="none")
KINDS = ((148.0, 4000.0), (990.0, 3350.0))
"""TFLOPS and GB/s of an H20 and an H800."""
SLOWNESS = 8
"""How many times as long an iteration takes a worker that is slow."""
RECONNECT_NS = (50 * MS, 3000 * MS)
PULLED_AGAIN = 1 / 2
DETECTION_NS = (1 * MS, 1000 * MS)
"""How soon the orchestrator's end sees that a connection is broken."""


@dataclass(slots=True)
class Attempt:
    """A turn as its worker has it: under which attempt, and how far it is."""

    attempt: int
    slot: int
    position: int


class SimulatedWorker:
    """A worker's model. Commands come in through `hear`; its messages go through its link to the core."""

    def __init__(
        self, world: "SimulatedWorld", worker: WorkerId, lease: LeaseId, role: WorkerRole, version: int | None
    ) -> None:
        self.id = worker
        self.lease = lease
        self.role = role
        self.version = version
        self.alive = True
        self.asleep = False
        self.link = SimulatedLink(world, reliable=role is WorkerRole.TRAINER)
        self._world = world
        self._session: Incarnation | None = None
        self.epoch = 0
        self._connected = False
        self._draining = False
        self._frozen_until_ns: Nanoseconds = 0
        self._hung_until_ns: Nanoseconds = 0
        self._pressed_until_ns: Nanoseconds = 0
        self._credit_told = True
        """Whether it says that it has no credit while it is pressed."""
        self._wanted_back = False
        self.iterations = 0
        self._slowness = 1
        self._turns: dict[TurnId, Attempt] = {}
        self._held: dict[TurnId, Attempt] = {}
        """Turns that begin under the weights that wait for the running ones to finish."""
        self._applying: c.LoadWeights | None = None
        self._genuine = True
        """Whether the weights to be applied match their manifest. Serving does not look at this."""
        self._loading: int | None = None
        self._newest_order = -1
        self._seen: dict[TurnId, int] = {}
        """The latest attempt at each turn: what comes again, or too late, is not begun."""
        self._progress = 0
        self._decoded = 0
        self._accounts_ns: dict[Account, int] = {}
        self._accounted_ns = world.loop.now_ns
        self._execute: dict[type[c.Command], Callable[..., None]] = {
            c.StartTurn: self._start_turn,
            c.AbortTurn: self._abort_turn,
            c.LoadWeights: self._load_weights,
            c.SleepWorker: self._sleep,
            c.WakeWorker: self._wake,
            c.DrainWorker: self._drain,
        }

    # Faults that strike it

    def boot(self) -> None:
        """The process starts: it dials, beats and iterates from now on."""
        self._accounted_ns = self._world.loop.now_ns
        self._dial()
        self._beat()
        self._iterate()

    def die(self, *, noticed: bool) -> None:
        """The process is gone. `noticed` when its connection is reset and the orchestrator sees it."""
        self.alive = False
        if noticed:
            self._report_broken()

    def freeze(self, duration_ns: Nanoseconds) -> None:
        self._frozen_until_ns = self._world.loop.now_ns + duration_ns

    def hang(self, duration_ns: Nanoseconds) -> None:
        self._hung_until_ns = self._world.loop.now_ns + duration_ns

    def slow_down(self, factor: int, duration_ns: Nanoseconds) -> None:
        self._slowness = factor
        self._world.loop.after(duration_ns, lambda: setattr(self, "_slowness", 1))

    def press(self, duration_ns: Nanoseconds, *, told: bool = True) -> None:
        """The host takes its device back for a while: running turns are given up after the iteration, and new ones are
        declined.

        Unless the worker is `told`, it goes on announcing credit.
        """
        self._credit_told = told
        self._pressed_until_ns = max(self._pressed_until_ns, self._world.loop.now_ns + duration_ns)
        self._wanted_back = True
        self._act(self._report)

    def lie(self) -> bool:
        """Sends lies until the gateway refuses the worker."""
        if not self._connected or not self.alive or self.frozen:
            return False
        plan = self._world.settings.plan
        trajectories = [f"{step}/{group}/0" for step in range(plan.steps) for group in range(plan.groups)]
        for event in false_events(self._world.rng, self.id, self.epoch, trajectories):
            self._say(event)
        self._say(e.WorkerBarred(worker=self.id, epoch=self.epoch, cause="a lie"))
        self.die(noticed=False)
        return True

    def disconnect(self) -> bool:
        if not self._connected or not self.alive:
            return False
        self._connected = False
        self._report_broken()
        self._dial_later()
        return True

    def hear(self, command: c.Command) -> None:
        """A command from the core sets out on the link."""
        self.link.down(lambda: self._act(lambda: self._obey(command)))

    # What it does

    @property
    def holds_turns(self) -> bool:
        return bool(self._turns or self._held)

    @property
    def frozen(self) -> bool:
        return self._world.loop.now_ns < self._frozen_until_ns

    @property
    def pressed(self) -> bool:
        return self._world.loop.now_ns < self._pressed_until_ns

    def _act(self, action: Callable[[], None]) -> None:
        """Do it now, after the thaw, or, being dead, never."""
        if not self.alive:
            return
        if self.frozen:
            self._world.loop.at(self._frozen_until_ns, lambda: self._act(action))
        else:
            action()

    def _obey(self, command: c.Command) -> None:
        if getattr(command, "epoch", None) == self.epoch and self._connected:
            self._execute[type(command)](command)

    def _say(self, event: e.Event) -> None:
        session = self._session
        if self._connected and session is not None:
            self.link.up(lambda: session.feed(event))

    def _report_broken(self) -> None:
        session = self._session
        if session is not None:
            broken = e.WorkerDisconnected(worker=self.id, epoch=self.epoch)
            self._world.loop.after(self._world.rng.randint(*DETECTION_NS), lambda: session.feed(broken))

    def _dial_later(self) -> None:
        self._world.loop.after(self._world.rng.randint(*RECONNECT_NS), lambda: self._act(self._dial))

    def _dial(self) -> None:
        if self._connected:
            return
        session = self._world.answering()
        if session is None:
            self._dial_later()
            return
        epoch = session.next_epoch(self.id)
        if epoch is None:
            self.alive = False
            return
        if session is not self._session:
            self._forget_orders()
        self._session, self.epoch, self._connected, self._newest_order = session, epoch, True, -1
        self._join()

    def _join(self) -> None:
        capabilities, version = self._capabilities(), self.version
        self._say(e.WorkerJoined(worker=self.id, epoch=self.epoch, capabilities=capabilities, weights_version=version))
        self._report()

    def _forget_orders(self) -> None:
        """Forget the orders of an orchestrator's process that is gone."""
        self._account()
        for orders in (self._turns, self._held, self._seen):
            orders.clear()
        self._draining = False

    def _capabilities(self) -> Capabilities:
        settings = self._world.settings
        tflops, memory_gb_per_s = KINDS[len(self.id) % 2] if settings.hardware else (None, None)
        return msgspec.structs.replace(
            CAPABILITIES, max_batch=settings.max_batch, tflops=tflops, memory_gb_per_s=memory_gb_per_s
        )

    def _beat(self) -> None:
        if self.alive:
            self._report()
            self._world.loop.after(self._world.settings.heartbeat_ns, lambda: self._act(self._beat))

    def _report(self) -> None:
        self._account()
        executing = min(len(self._turns), self._world.settings.max_batch)
        self._say(
            e.WorkerReported(
                worker=self.id,
                epoch=self.epoch,
                capacity_turns=self._capacity(),
                pending=len(self._turns) - executing + len(self._held),
                executing=executing,
                progress=self._progress,
                accounts_ns=dict(self._accounts_ns),
                decoded_tokens=self._decoded,
                loading=self._load_phase(),
            )
        )

    def _load_phase(self) -> LoadPhase:
        if self._loading is not None:
            return LoadPhase.PULLING
        if self._applying is None:
            return LoadPhase.NONE
        return LoadPhase.WAITING if self._turns else LoadPhase.APPLYING

    def _capacity(self) -> int:
        pressed = self.pressed and self._credit_told
        return 0 if pressed or self._draining else self._world.settings.capacity_turns

    def _account(self) -> None:
        """Charges the time since the last call to the device's present activity."""
        now_ns, account = self._world.loop.now_ns, self._spent_on()
        self._accounts_ns[account] = self._accounts_ns.get(account, 0) + now_ns - self._accounted_ns
        self._accounted_ns = now_ns

    def _spent_on(self) -> Account:
        if self.asleep:
            return Account.ASLEEP
        if self._turns:
            return Account.DECODE
        return Account.IDLE if self._loading is None else Account.LOADING

    # The engine

    def _iterate(self) -> None:
        if not self.alive:
            return
        settings = self._world.settings
        self._account()
        self.iterations += 1
        if self._wanted_back:
            self._yield()
        if not self.asleep and self._turns and self._world.loop.now_ns >= self._hung_until_ns:
            self._progress += 1
            self._flush(settings.tokens_per_iteration, most=settings.max_batch)
        if self._applying is not None and not self._turns:
            self._apply(self._applying)
        if self._draining and not self._turns:
            self._say_goodbye()
        self._world.loop.after(settings.iteration_ns * self._slowness, lambda: self._act(self._iterate))

    def _flush(
        self,
        tokens: int,
        ending: FinishReason | None = None,
        only: TurnId | None = None,
        most: int | None = None,
    ) -> None:
        """Up to `tokens` more of the (`most` first) turns, in one frame; with `ending` that is all that comes."""
        if ending is not None and only is None:
            self._begin_held()
        chunks = {
            turn: self._chunk(turn, attempt, tokens, ending)
            for turn, attempt in list(self._turns.items())[:most]
            if only is None or turn == only
        }
        for turn, chunk in chunks.items():
            if chunk.finish is not None:
                del self._turns[turn]
        if chunks:
            self._say(e.TokensReceived(worker=self.id, epoch=self.epoch, chunks=Chunks.of(chunks.values())))

    def _chunk(self, turn: TurnId, attempt: Attempt, tokens: int, ending: FinishReason | None) -> Chunk:
        length = self._world.turn_length(turn)
        start, count = attempt.position, min(tokens, length - attempt.position)
        attempt.position += count
        self._decoded += count
        if attempt.position >= length:
            whole = length == self._world.settings.max_new_tokens
            ending = FinishReason.LENGTH if whole else FinishReason.STOP
        assert self.version is not None
        assert self._session is not None
        self._session.note_generated(self.id, turn, attempt.attempt, start, count)
        return Chunk(attempt.slot, start, count, self.version, ending)

    def _begin_held(self) -> None:
        self._turns |= self._held
        self._held.clear()

    def _give_all_up(self) -> None:
        self._account()
        self._flush(0, FinishReason.STALLED)

    def _yield(self) -> None:
        self._wanted_back = False
        self._give_all_up()

    def _start_turn(self, command: c.StartTurn) -> None:
        if command.attempt <= self._seen.get(command.turn, 0):
            return
        self._seen[command.turn] = command.attempt
        self._account()
        held = self._held if self._applying is not None and not self.pressed else self._turns
        held[command.turn] = Attempt(command.attempt, command.slot, command.start)
        if self.pressed:
            self._flush(0, FinishReason.STALLED, only=command.turn)

    def _abort_turn(self, command: c.AbortTurn) -> None:
        self._account()
        begun = command.turn in self._turns
        attempt = self._turns.get(command.turn) or self._held.get(command.turn)
        if attempt is not None and attempt.attempt == command.attempt:
            self._turns[command.turn] = attempt
            self._held.pop(command.turn, None)
            self._flush(self._world.rng.randint(0, 2) if begun else 0, FinishReason.ABORTED, only=command.turn)

    def _load_weights(self, command: c.LoadWeights) -> None:
        applying = self._applying.version if self._applying is not None else None
        known = command.version in (self.version, self._loading, applying)
        if known or command.version < self._newest_order:
            return
        self._account()
        self._newest_order = self._loading = command.version
        self._pull(command)

    def _pull(self, command: c.LoadWeights) -> None:
        self._world.loop.after(self._world.settings.load_ns, lambda: self._act(lambda: self._loaded(command)))

    def _loaded(self, command: c.LoadWeights) -> None:
        """Checks pulled weights against the manifest. A mismatch is pulled once more, then given up."""
        if self._loading != command.version:
            return
        genuine = not self._world.injector.injects(self._world.rng, self._world.fault_rates.load_corrupted)
        matches = self._matches_manifest(genuine)
        if not matches and self._world.rng.random() < PULLED_AGAIN:
            self._pull(command)
            return
        self._account()
        self._loading = None
        if not matches:
            self._load_failed(command, "does not match the manifest")
        elif self._world.injector.injects(self._world.rng, self._world.fault_rates.load_failed):
            self._load_failed(command, "simulated")
        else:
            self._applying, self._genuine = command, genuine
            if self._world.settings.weight_mode is not WeightMode.FINISH or not self._turns:
                self._apply(command)

    def _matches_manifest(self, genuine: bool) -> bool:
        return genuine

    def _load_failed(self, command: c.LoadWeights, reason: str) -> None:
        self._say(e.WeightsFailed(worker=self.id, epoch=self.epoch, version=command.version, reason=reason))

    def _apply(self, command: c.LoadWeights) -> None:
        """Running turns go on, under the new version from here on."""
        self._applying = None
        self.version = command.version
        self._world.note_weights(self.id, command.version, genuine=self._genuine)
        self._begin_held()
        self._say(e.WeightsApplied(worker=self.id, epoch=self.epoch, version=command.version))

    def _sleep(self, _: c.SleepWorker) -> None:
        self._account()
        self._flush(1, FinishReason.ABORTED)
        self.asleep = True
        self._say(e.WorkerSlept(worker=self.id, epoch=self.epoch))

    def _wake(self, _: c.WakeWorker) -> None:
        self._account()
        self.asleep = False
        self._say(e.WorkerAwoke(worker=self.id, epoch=self.epoch))

    def _drain(self, _: c.DrainWorker) -> None:
        self._draining = True

    def _say_goodbye(self) -> None:
        self._report()
        self._say(e.WorkerDisconnected(worker=self.id, epoch=self.epoch, goodbye=True))
        self.alive = self._connected = False
