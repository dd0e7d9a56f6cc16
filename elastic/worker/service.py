"""A worker at work: it obeys the orchestrator's orders, and reports what its engine does.

Turns go directly to the engine. Work that takes the whole device (sleep, wake, applying weights, training) runs on one
thread in order of arrival, so that no two such pieces of work overlap.
"""

import asyncio
import contextlib
import functools
import itertools
import zlib
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import structlog

from elastic.core.run_state import TRAINER_PATIENCE
from elastic.core.types import NS_PER_S, Account, FinishReason, LoadPhase
from elastic.engine.base import DeviceShare, EngineStatistics, Provable, RolloutEngine
from elastic.protocol import wire
from elastic.protocol.connection import ConnectionLost, SessionRefused
from elastic.system.host import here
from elastic.weights.errors import VersionSuperseded, WeightsError, WeightsRefusal
from elastic.weights.source import PullReport, RelaySource
from elastic.worker.accounts import DeviceAccounts
from elastic.worker.connection import OrchestratorLink, Ticket, dial
from elastic.worker.device_permit import DevicePermit
from elastic.worker.notices import watch_instance
from elastic.worker.threads import DaemonThread, run_in_thread
from elastic.worker.token_stream import TokenStream
from elastic.worker.training import TrainerOrder, Training
from elastic.worker.weights import source_of

if TYPE_CHECKING:
    from elastic.worker.trainer_host import TrainerHost

log = structlog.get_logger(__name__)

SLEEP_TIMEOUT_S = 30.0
"""Limit for the engine to fall asleep or to wake."""

ABORT_TIMEOUT_S = 1.0
"""Limit for aborted turns to hand over their tokens before a drained worker leaves."""

CLOSE_TIMEOUT_S = 5.0

AUDIT_TIMEOUT_S = 3600.0
"""Limit of one audit of the weights."""


@dataclass(frozen=True, kw_only=True)
class Intervals:
    """Pauses of a worker between two looks, in seconds."""

    audit_s: float = 60.0
    """Between two audits of the weights."""
    share_s: float = 0.01
    """The time until a co-serving worker asks again whether it must hold back: well within one decode iteration."""


USUAL = Intervals()


class AgentExit(msgspec.Struct, frozen=True):
    """How a worker ended: its process's exit code, and the reason."""

    code: int
    reason: str


class Service:
    """The worker from its engine's start to its exit, over any number of connections."""

    def __init__(
        self,
        ticket: Ticket,
        welcome: wire.Welcome,
        connection: OrchestratorLink,
        engine: RolloutEngine,
        device: DaemonThread,
        share: DeviceShare | None,
        trainer: "TrainerHost | None",
        permit: DevicePermit,
        intervals: Intervals,
    ) -> None:
        self._ticket = ticket
        self._welcome = welcome
        self._connection = connection
        self._engine = engine
        self._device = device
        self._share = share
        self._trainer = trainer
        self._permit = permit
        self._intervals = intervals
        self._stream = TokenStream(
            welcome.flush_interval_s,
            self._send,
            whole_turns=welcome.whole_turns,
            phase=zlib.crc32(ticket.worker.encode()) / 2**32,
        )
        self._operations: asyncio.Queue[Callable[[], Awaitable[None]]] = asyncio.Queue()
        self._wanted: wire.PullWeights | None = None
        self._signed_by = ""
        """The key of the trainer whose weights were loaded last."""
        self._loading: asyncio.Task[None] | None = None
        self._load_phase = LoadPhase.NONE
        self._training: Training | None = None
        self._parts: list[wire.TrajectoriesFrame] = []
        """The trajectories of the trainer's next order."""
        self._asleep = False
        self._drain_reason = ""
        self._announced_turns = 0
        self._tasks = asyncio.TaskGroup()
        self._exit: asyncio.Future[AgentExit] = asyncio.get_running_loop().create_future()
        self._handlers: dict[type[Any], Callable[[list[Any]], None]] = {
            wire.Generate: self._generate,
            wire.FlushEvery: lambda orders: self._stream.flush_every(orders[-1].interval_s),
            wire.Abort: lambda orders: self._engine.abort(self._stream.running(orders)),
            wire.PullWeights: lambda orders: self._order_weights(orders[-1]),
            wire.Sleep: lambda _: self._order_sleep(),
            wire.Wake: lambda _: self._order_wake(),
            wire.Drain: lambda orders: self._order_drain(orders[0].reason),
            wire.RefusedFrame: lambda orders: self._end(1, f"the orchestrator ended the session: {orders[0].reason}"),
            wire.TrajectoriesFrame: self._parts.extend,
            wire.TrainGroupFrame: self._order_training,
            wire.SkipGroup: self._order_training,
            wire.UpdateFrame: self._order_training,
            wire.Ping: lambda _: None,
        }

    async def run(self, accounts: DeviceAccounts, leave: asyncio.Event) -> AgentExit:
        """Work until drained, told to `leave`, refused, cut off for good, or failed."""
        self._accounts = accounts
        if self._trainer is not None:
            work = self._engine, self._device, self._permit, accounts
            self._training = Training(self._trainer, *work, self._send, self._tasks.create_task)
        end = AgentExit(1, "cut short")
        try:
            async with self._tasks:
                await self._start()
                for work in self._duties(leave):
                    self._tasks.create_task(work)
                raise _Ended(await self._exit)  # which ends the group's other tasks
        except* _Ended:
            end = self._exit.result()
        except* Exception as errors:
            log.exception("worker failed", worker=self._ticket.worker)
            end = AgentExit(1, f"{type(errors.exceptions[0]).__name__}: {errors.exceptions[0]}")
        finally:
            self._connection.abort()
            with contextlib.suppress(TimeoutError):
                await run_in_thread(CLOSE_TIMEOUT_S, self._engine.close)
        return end

    async def _start(self) -> None:
        self._engine.start(self._stream.sink)
        self._name_idle_time()
        self._accounts.engine_started(lambda: self._engine.statistics().accounts_ns, here().monotonic_ns())
        if self._training is not None:
            await self._training.begin()
            self._name_idle_time()
        self._announce()

    def _duties(self, leave: asyncio.Event) -> Iterator[Coroutine[Any, Any, None]]:
        yield self._leave_when(leave)
        yield self._converse()
        yield self._operate()
        yield self._beat()
        if self._share is not None:
            yield self._watch(self._share)
        yield self._audit()
        yield watch_instance(lambda left_s, reason: self._send(wire.Notice(left_s, wire.clipped(reason))))

    # The connection

    def _announce(self) -> None:
        if self._training is not None:
            self._send(self._training.ready())
        else:
            self._send(wire.Ready(self._engine.capabilities, self._engine.statistics().weights_version))
        self._heartbeat()

    def _send(self, message: wire.FromWorker) -> None:
        self._connection.send(message)

    async def _converse(self) -> None:
        while not self._exit.done():
            try:
                self._connection.watch(self._silence_timeout_s)
                await self._connection.listen(self._obey)
            except ConnectionLost as loss:
                await self._reconnect(loss)

    def _obey(self, orders: list[wire.FromOrchestrator]) -> None:
        for kind, batch in itertools.groupby(orders, key=type):
            self._handlers[kind](list(batch))

    @property
    def _silence_timeout_s(self) -> float:
        """Return the limit of the orchestrator's silence. A trainer waits longer than other workers."""
        return self._welcome.silence_timeout_s * (1 if self._training is None else TRAINER_PATIENCE)

    async def _reconnect(self, loss: ConnectionLost) -> None:
        """Resume the session on a new connection. The orchestrator has rerouted the turns, so they end here."""
        self._connection.abort()
        self._parts.clear()
        self._engine.abort(self._stream.abandon())
        if self._drain_reason:
            self._end(0, self._drain_reason)
            return
        log.warning("connection lost", worker=self._ticket.worker, cause=str(loss))
        welcome = self._welcome
        within_s = max(welcome.resume_timeout_s, welcome.orchestrator_timeout_s)
        try:
            self._connection, self._welcome = await dial(self._ticket, welcome.session_key, within_s)
        except (ConnectionLost, SessionRefused) as error:
            self._end(1, f"{loss}, and the session could not be resumed within {within_s} s: {error}")
            return
        self._stream.flush_every(self._welcome.flush_interval_s)
        log.info("connection resumed", worker=self._ticket.worker, epoch=self._welcome.epoch)
        self._announce()
        if self._training is not None:
            self._training.resumed(self._welcome)

    async def _leave_when(self, leave: asyncio.Event) -> None:
        """Leave as soon as `leave` is set, without waiting for turns."""
        await leave.wait()
        self._order_drain("terminated")
        self._engine.abort(self._stream.all_running())

    def _order_drain(self, reason: str) -> None:
        if not self._drain_reason:
            self._drain_reason = reason or "drained"
            self._name_idle_time()
            self._tasks.create_task(self._drain())

    async def _drain(self) -> None:
        """Wait for turns and for work on the device, flush, say goodbye and leave."""
        await self._permit.give_up()
        if not await self._finished_within(self._welcome.drain_timeout_s):
            self._engine.abort(self._stream.all_running())
            await self._finished_within(ABORT_TIMEOUT_S)
        self._stream.flush()
        now = self._engine.statistics()
        self._send(
            wire.Goodbye(wire.clipped(self._drain_reason), self._accounts.total(now.accounts_ns), now.decoded_tokens)
        )
        await self._connection.aclose()
        self._end(0, self._drain_reason)

    async def _finished_within(self, timeout_s: float) -> bool:
        try:
            async with asyncio.timeout(timeout_s):
                await self._stream.idle()
                await self._operations.join()
                if self._training is not None:
                    await self._training.published()
                    await self._training.checkpointed()
        except TimeoutError:
            return False
        return True

    # Turns and credit

    def _generate(self, orders: list[wire.Generate]) -> None:
        orders = [order for order in orders if self._stream.is_new(order)]
        if self._drain_reason or self._asleep:
            self._stream.decline(orders, FinishReason.ABORTED, "draining" if self._drain_reason else "asleep")
        elif self._share is not None and self._share.hold_back():
            self._stream.decline(orders, FinishReason.STALLED, HELD_BACK)
        else:
            self._engine.submit([self._stream.open(order) for order in orders])

    async def _watch(self, share: DeviceShare) -> None:
        """Give running turns back as soon as the device's owner needs it, and announce every change of credit."""
        while True:
            if share.hold_back():
                self._engine.abort(self._stream.stall(HELD_BACK))
            if self._credit(self._engine.statistics()) != self._announced_turns:
                self._heartbeat()
            await asyncio.sleep(self._intervals.share_s)

    def _credit(self, now: EngineStatistics) -> int:
        if self._drain_reason:
            return 0
        return self._share.capacity_turns(now.capacity_turns) if self._share is not None else now.capacity_turns

    async def _beat(self) -> None:
        loop = asyncio.get_running_loop()
        due_s = loop.time()
        while True:
            due_s = max(due_s + self._welcome.heartbeat_interval_s, loop.time())
            await asyncio.sleep(due_s - loop.time())
            self._heartbeat()

    def _heartbeat(self) -> None:
        now = self._engine.statistics()
        self._announced_turns = self._credit(now)
        self._send(
            wire.Heartbeat(
                capacity_turns=self._announced_turns,
                pending=now.pending,
                executing=now.executing,
                progress=now.progress,
                accounts_ns=self._accounts.total(now.accounts_ns),
                decoded_tokens=now.decoded_tokens,
                kv_used_share=min(1.0, now.kv_blocks_used / max(1, now.kv_blocks_total)),
                prefix_hit_tokens=now.prefix_hit_tokens,
                prompt_tokens=now.prompt_tokens,
                loading=self._loading_at(now),
                load_progress=now.received_bytes + now.load_progress,
                paced_iterations=now.paced_iterations,
                late_iterations=now.late_iterations,
            )
        )

    def _loading_at(self, now: EngineStatistics) -> LoadPhase:
        waits = self._load_phase is LoadPhase.APPLYING and now.waits_to_apply
        return LoadPhase.WAITING if waits else self._load_phase

    def _name_idle_time(self) -> None:
        if self._drain_reason:
            account = Account.DRAINING
        else:
            account = Account.LOADING if self._engine.statistics().weights_version is None else Account.IDLE
        self._engine.set_idle_account(account)

    # The device as a whole

    async def _operate(self) -> None:
        while True:
            operation = await self._operations.get()
            await operation()
            self._operations.task_done()

    def _order_sleep(self) -> None:
        self._asleep = True
        # At once, since weights that wait for running turns may stand before the sleep.
        self._engine.abort(self._stream.all_running())
        self._operations.put_nowait(self._sleep)

    def _order_wake(self) -> None:
        self._asleep = False
        self._operations.put_nowait(self._wake)

    async def _sleep(self) -> None:
        await self._device.run(SLEEP_TIMEOUT_S, self._engine.sleep)
        self._stream.flush()
        self._send(wire.Slept())

    async def _wake(self) -> None:
        if self._trainer is None:
            await self._device.run(SLEEP_TIMEOUT_S, self._engine.wake)
        else:
            await self._device.run(self._trainer.timeout_s, self._trainer.wake)
        self._heartbeat()
        self._send(wire.Awoke())

    def _order_training(self, orders: Sequence[TrainerOrder]) -> None:
        if self._training is None:
            self._send(wire.TrainerFailedFrame("this worker has no trainer"))
            return
        for order in orders:
            if self._parts and not isinstance(order, wire.UpdateFrame):
                whole = {data.trajectory: data for part in (*self._parts, order) for data in part.trajectories}
                order = msgspec.structs.replace(order, trajectories=[*whole.values()])
                self._parts.clear()
            self._operations.put_nowait(functools.partial(self._training.obey, order, self._connection))

    # Weights

    def _order_weights(self, order: wire.PullWeights, again: bool = False) -> None:
        """Order a load of weights. `again`: also if the engine serves them already."""
        self._wanted = order
        if self._loading is not None:
            self._loading.cancel()
        self._loading = self._tasks.create_task(self._load(order, self._connection, again))

    async def _audit(self) -> None:
        """Audit the held weights from time to time, and replace wrong ones at once."""
        while True:
            await asyncio.sleep(self._intervals.audit_s)
            try:
                sound = await run_in_thread(AUDIT_TIMEOUT_S, self._engine.audit)
            except TimeoutError:
                log.warning("weights not audited", within_s=AUDIT_TIMEOUT_S)
            else:
                if not sound and self._wanted is not None and (self._loading is None or self._loading.done()):
                    self._order_weights(self._wanted, again=True)

    async def _load(self, order: wire.PullWeights, asked: OrchestratorLink, again: bool) -> None:
        served = self._engine.statistics().weights_version, self._signed_by
        if not again and served == (order.version, order.publisher):
            self._send(wire.WeightsReport(order.version, "", 0, 0.0, 0.0, proof=self._proof()))
            return
        timeout_s, begun_s = self._welcome.pull_timeout_s, here().monotonic()
        source = source_of(self._welcome, order)
        self._load_phase = LoadPhase.PULLING
        try:
            pulled = await run_in_thread(timeout_s, self._engine.prefetch, source, timeout_s)
        except TimeoutError:
            self._report_failure(order, asked, f"not pulled within {timeout_s} s")
        except Exception as error:
            refused = error.refused if isinstance(error, WeightsError) else ()
            self._report_failure(order, asked, _cause("weights not pulled", order.version, error), refused)
        else:
            times_s = begun_s, here().monotonic()
            self._load_phase = LoadPhase.APPLYING
            self._operations.put_nowait(functools.partial(self._apply, order, asked, source, pulled, times_s))

    async def _apply(
        self,
        order: wire.PullWeights,
        asked: OrchestratorLink,
        source: RelaySource,
        pulled: PullReport,
        times_s: tuple[float, float],
    ) -> None:
        """`times_s`: when it was ordered and when it was pulled."""
        if order is not self._wanted:
            return
        ordered_s, pulled_s = times_s
        begun_s, paused_ns = here().monotonic(), self._paused_ns()
        try:
            written_s = await self._device.run_while(
                self._applying, self._welcome.load_timeout_s, self._engine.load_version, source, order.mode
            )
        except TimeoutError:
            raise  # the engine hangs, and the worker with it
        except VersionSuperseded:
            return
        except Exception as error:
            self._report_failure(order, asked, _cause("weights not applied", order.version, error), pulled.refused)
            self._name_idle_time()
        else:
            self._load_phase, self._signed_by = LoadPhase.NONE, order.publisher
            self._name_idle_time()
            applied_s = here().monotonic()
            split_s: dict[wire.PullPart, float] = {
                "encode": pulled.encode_s,
                "wire": pulled.wire_s,
                "decode": pulled.decode_s,
                "apply": written_s,
                "pause": (self._paused_ns() - paused_ns) / NS_PER_S,
            }
            split_s["queue"] = max(0.0, applied_s - ordered_s - sum(split_s.values()))
            pull_s, apply_s = pulled_s - ordered_s, applied_s - begun_s
            self._send(
                wire.WeightsReport(
                    order.version,
                    "",
                    pulled.size_bytes,
                    pull_s,
                    apply_s,
                    pulled.full_bytes,
                    split_s,
                    _told(pulled.refused),
                    self._proof(),
                )
            )

    def _proof(self) -> list[float]:
        """By which the engine's version is known, where it shows that."""
        return wire.sound_proof(self._engine.proof) if isinstance(self._engine, Provable) else []

    def _applying(self) -> tuple[int, int | None]:
        """Return a value that changes while weights come closer to being in force: pieces pulled, or turns that go
        first."""
        now = self._engine.statistics()
        return now.load_progress, now.progress if now.waits_to_apply else None

    def _paused_ns(self) -> int:
        return self._engine.statistics().accounts_ns.get(Account.APPLYING, 0)

    def _report_failure(
        self, order: wire.PullWeights, asked: OrchestratorLink, error: str, refused: Iterable[WeightsRefusal] = ()
    ) -> None:
        """Report a failed load on the connection where it was `asked`. On a new connection the weights are ordered
        again."""
        self._load_phase = LoadPhase.NONE
        asked.send(wire.WeightsReport(order.version, wire.clipped(error), 0, 0.0, 0.0, refused=_told(refused)))

    def _end(self, code: int, reason: str) -> None:
        if not self._exit.done():
            self._exit.set_result(AgentExit(code, reason))


HELD_BACK = "the device's owner needs it"


def _told(refused: Iterable[WeightsRefusal]) -> list[wire.UnverifiedWeights]:
    told = itertools.islice(refused, wire.REFUSALS_MAX)
    return [wire.UnverifiedWeights(wire.clipped(what), wire.clipped(reason)) for what, reason in told]


class _Ended(Exception):
    pass


def _cause(what: str, version: int, error: Exception) -> str:
    """Log why a version is not here, with where it has failed if nobody has foreseen that; returns the cause."""
    cause = f"{type(error).__name__}: {error}"
    log.warning(what, version=version, reason=cause, exc_info=not isinstance(error, WeightsError))
    return cause
