"""A job's resident on a rollout node: one warm process that works for the job's run slice by slice.

The resident keeps its engine. While parked, the engine has its weights in host memory as they came from the relay, and
follows the job's versions there, so that the weights are ready when the next slice begins. Source: Weave §5.1.
"""

import asyncio
import socket
import threading
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import structlog

from elastic.core.types import Account, Capabilities, WeightMode, WorkerId
from elastic.engine.base import NO_VERSION, ChunkSink, EngineStatistics, GenerateRequest, RolloutEngine, TokenChunk
from elastic.pool.connection import TO_RESIDENT, PoolLink, show_life
from elastic.pool.messages import (
    DeviceResumed,
    Leave,
    Left,
    Park,
    Parked,
    Resume,
    ToResident,
    Warm,
    WorkAs,
    WorkerTicketFrame,
)
from elastic.protocol import wire
from elastic.protocol.connection import ConnectionLost, over_socket
from elastic.protocol.endpoint import Endpoint
from elastic.system.host import here
from elastic.system.parking import Parkable, Switch
from elastic.weights.errors import RelayError, VersionSuperseded
from elastic.weights.records import open_update
from elastic.weights.relay import open_relay
from elastic.weights.signing import Trust
from elastic.weights.source import PullReport, RelaySource, WeightsSource
from elastic.weights.versions import published_updates
from elastic.worker.accounts import DeviceAccounts
from elastic.worker.agent import AgentExit, BuildEngine, Ticket, build_engine, run_agent
from elastic.worker.service import USUAL, Intervals
from elastic.worker.threads import run_in_thread

log = structlog.get_logger(__name__)

FOLLOW_S = 0.5
"""How often a parked resident looks for newer versions."""
PULL_TIMEOUT_S = 120.0
SWITCH_TIMEOUT_S = 600.0
"""The node agent's own limits are shorter."""


class SliceEngine:
    """A resident's engine as one worker sees it: as an engine of its own.

    Its counters begin at zero. It has no weights before the first `load_version`, which says whose weights they must
    be. Closing it ends the worker's requests; the resident keeps the engine.
    """

    def __init__(self, engine: RolloutEngine, ordered: Callable[[RelaySource], None]) -> None:
        self._engine = engine
        self._ordered = ordered
        self._before = engine.statistics()
        self._sink: ChunkSink | None = None
        self._alive: set[str] = set()
        self._has_weights = False

    @property
    def capabilities(self) -> Capabilities:
        return self._engine.capabilities

    def start(self, sink: ChunkSink) -> None:
        self._sink = sink

    def hear(self, chunks: Sequence[TokenChunk]) -> None:
        sink = self._sink
        if sink is not None:
            self._alive.difference_update(chunk.request_id for chunk in chunks if chunk.finish is not None)
            sink(chunks)

    def submit(self, requests: Sequence[GenerateRequest]) -> None:
        self._alive.update(request.request_id for request in requests)
        self._engine.submit(requests)

    def abort(self, request_ids: Sequence[str]) -> None:
        self._engine.abort(request_ids)

    def prefetch(self, source: RelaySource, timeout_s: float) -> PullReport:
        self._ordered(source)
        return self._engine.prefetch(source, timeout_s)

    def load_version(self, source: WeightsSource, mode: WeightMode) -> float:
        written_s = self._engine.load_version(source, mode)
        self._has_weights = True
        return written_s

    def audit(self) -> bool:
        return self._engine.audit()

    def sleep(self) -> None:
        self._engine.sleep()

    def wake(self) -> None:
        self._engine.wake()

    def set_idle_account(self, account: Account) -> None:
        self._engine.set_idle_account(account)

    def statistics(self) -> EngineStatistics:
        now, before = self._engine.statistics(), self._before
        return msgspec.structs.replace(
            now,
            weights_version=now.weights_version if self._has_weights else None,
            decoded_tokens=now.decoded_tokens - before.decoded_tokens,
            prompt_tokens=now.prompt_tokens - before.prompt_tokens,
            prefix_hit_tokens=now.prefix_hit_tokens - before.prefix_hit_tokens,
            paced_iterations=now.paced_iterations - before.paced_iterations,
            late_iterations=now.late_iterations - before.late_iterations,
        )

    def close(self) -> None:
        self._sink = None
        self._engine.abort(list(self._alive))
        self._engine.wake()
        self._engine.set_idle_account(Account.LOADING)


class KeptEngine:
    """A resident's engine over all of its slices, and the worker that borrows it. Any thread may call."""

    def __init__(self, make: BuildEngine) -> None:
        self._make = make
        self._changing = here().lock()
        """Held while the engine is built, parked or resumed."""
        self.engine: RolloutEngine | None = None
        self._asked: tuple[Any, ...] = ()
        self._sliced: SliceEngine | None = None
        self.source: RelaySource | None = None
        """The version that was ordered last, and whose signature counted."""
        self.cold_s = 0.0
        """How long an engine was being built since this was last set to zero."""

    def engine_for(self, welcome: wire.Welcome) -> RolloutEngine:
        """Return the engine that the orchestrator asks for: the kept one if it fits, else a new one. Blocks."""
        with self._changing:
            asked = welcome.model, welcome.engine
            if self.engine is None or asked != self._asked:
                self._close()
                begun_s = here().monotonic()
                engine = self._make(welcome)
                engine.start(self._hear)
                self.engine, self._asked = engine, asked
                self.cold_s += here().monotonic() - begun_s
            self._sliced = SliceEngine(self.engine, self._order)
            return self._sliced

    def park(self) -> Switch:
        """Park the engine. An engine that cannot park is closed; the next slice begins with a new one."""
        with self._changing:
            self._sliced = None
            if self.engine is None:
                return Switch(0.0, 0)
            if isinstance(self.engine, Parkable):
                return self.engine.park()
            begun_s = here().monotonic()
            self._close()
            return Switch(here().monotonic() - begun_s, 0)

    def resume(self) -> Switch:
        with self._changing:
            if isinstance(self.engine, Parkable):
                return self.engine.resume()
            return Switch(0.0, 0)

    def follow(self, version: int, timeout_s: float, stopped: threading.Event) -> None:
        """Bring a version into force in host memory, unless `stopped` is set once it is fetched. Blocks.

        Raises what `prefetch` and `load_version` raise.
        """
        engine, source = self.engine, self.source
        if engine is None or source is None:
            return
        source = msgspec.structs.replace(source, version=version)
        engine.prefetch(source, timeout_s)
        if not stopped.is_set():
            engine.load_version(source, WeightMode.FINISH)

    @property
    def version(self) -> int:
        """The version of the weights in force, or `NO_VERSION`."""
        version = None if self.engine is None else self.engine.statistics().weights_version
        return NO_VERSION if version is None else version

    def close(self) -> None:
        with self._changing:
            self._close()

    def _close(self) -> None:
        engine, self.engine = self.engine, None
        if engine is not None:
            engine.close()

    def _order(self, source: RelaySource) -> None:
        self.source = source

    def _hear(self, chunks: Sequence[TokenChunk]) -> None:
        sliced = self._sliced
        if sliced is not None:
            sliced.hear(chunks)


class _ResidentSlice:
    """The worker that the resident is during a slice."""

    def __init__(self, worker: str) -> None:
        self.worker = worker
        self.leave = asyncio.Event()
        self.task: asyncio.Task[None]


class RolloutResident:
    """Obeys its node agent: resumes, works, and parks, one after the other. `works_as` is told the worker of each
    slice."""

    def __init__(
        self,
        make_engine: BuildEngine = build_engine,
        follow_s: float = FOLLOW_S,
        intervals: Intervals = USUAL,
        works_as: Callable[[WorkerId], object] = lambda worker: None,
    ) -> None:
        self.kept = KeptEngine(make_engine)
        self._follow_s = follow_s
        self._intervals = intervals
        self._works_as = works_as
        self._link: PoolLink[ToResident]
        self._accounts: DeviceAccounts | None = None
        """The accounts of the slice's first worker, which began with the slice."""
        self._slice: _ResidentSlice | None = None
        self._following: asyncio.Task[None] | None = None
        self._tasks = asyncio.TaskGroup()

    async def run(self, node_agent: socket.socket, leave: asyncio.Event | None = None) -> AgentExit:
        """Obey until the node agent is gone, which ends the worker at once, or until `leave`, which drains it."""
        self._link = await over_socket(node_agent, TO_RESIDENT, "the node agent")
        show_life(self._link)
        end = AgentExit(1, "cut short")
        try:
            async with self._tasks:
                if leave is not None:
                    self._tasks.create_task(self._leave(leave))
                self._link.send(Warm())
                while True:
                    await self._obey(await self._link.receive())
        except* ConnectionLost as lost:
            end = AgentExit(1, str(lost.exceptions[0]))
        except* _Left:
            end = AgentExit(0, "terminated")
        except* Exception as errors:
            log.exception("the resident failed")
            end = AgentExit(1, f"{type(errors.exceptions[0]).__name__}: {errors.exceptions[0]}")
        finally:
            self._link.abort()
        return end

    async def _leave(self, leave: asyncio.Event) -> None:
        await leave.wait()
        await self._end_slice()
        raise _Left

    async def _obey(self, message: ToResident) -> None:
        match message:
            case Resume(permit=permit):
                switch = await self._resume()
                self._link.send(DeviceResumed(permit, switch.seconds, switch.state_bytes))
            case Park(permit=permit):
                await self._end_slice()
                switch = await run_in_thread(SWITCH_TIMEOUT_S, self.kept.park)
                cold_s, self.kept.cold_s = self.kept.cold_s, 0.0
                self._link.send(Parked(permit, switch.seconds, switch.state_bytes, switch.rest_bytes, cold_s))
                self._follow()
            case WorkAs(ticket=ticket):
                await self._end_slice()
                work = self._slice = _ResidentSlice(ticket.worker)
                work.task = self._tasks.create_task(self._work(ticket, work), name=f"worker {ticket.worker}")
            case Leave(worker=worker):
                if self._slice is not None and self._slice.worker == worker:
                    self._slice.leave.set()

    async def _resume(self) -> Switch:
        accounts = DeviceAccounts(here().monotonic_ns())
        accounts.devote(Account.SWITCHING)
        if self._following is not None:
            self._following.cancel()
            self._following = None
        switch = await run_in_thread(SWITCH_TIMEOUT_S, self.kept.resume)
        accounts.leave_to_engine()
        self._accounts = accounts
        return switch

    async def _work(self, frame: WorkerTicketFrame, work: _ResidentSlice) -> None:
        self._works_as(frame.worker)
        accounts, self._accounts = self._accounts or DeviceAccounts(here().monotonic_ns()), None
        ticket = Ticket(
            endpoint=Endpoint(frame.join, fingerprint=frame.fingerprint),
            run=frame.run,
            worker=frame.worker,
            token=frame.token,
            wait_s=frame.orchestrator_timeout_s,
        )
        try:
            end = await run_agent(
                ticket, self.kept.engine_for, accounts=accounts, leave=work.leave, intervals=self._intervals
            )
        except ValueError as error:
            end = AgentExit(1, str(error))
        self._slice = None
        self._link.send(Left(frame.worker, wire.clipped(end.reason) if end.code else ""))

    async def _end_slice(self) -> None:
        """Drain the worker at once, if there is one, and wait for its end."""
        work = self._slice
        if work is not None:
            work.leave.set()
            await asyncio.wait({work.task})

    def _follow(self) -> None:
        source = self.kept.source
        if self._following is None and source is not None:
            self._following = self._tasks.create_task(self._follow_versions(source), name="following")

    async def _follow_versions(self, source: RelaySource) -> None:
        """Follow versions until cancelled, or until the relay's content is not the trainer's: a new key comes with
        the next order."""
        stopped = threading.Event()
        try:
            while True:
                try:
                    newest = await run_in_thread(PULL_TIMEOUT_S, _newer_version, source, self.kept.version)
                    if newest is not None:
                        await run_in_thread(SWITCH_TIMEOUT_S, self.kept.follow, newest, PULL_TIMEOUT_S, stopped)
                except (RelayError, TimeoutError, VersionSuperseded) as error:
                    log.info("the job's versions cannot be followed at the moment", reason=str(error))
                except Exception as error:
                    log.warning("the job's versions are no longer followed", reason=repr(error))
                    return
                await asyncio.sleep(self._follow_s)
        finally:
            stopped.set()


def _newer_version(source: RelaySource, held: int) -> int | None:
    """Return the newest version on the relay if it is newer than `held`. Blocks.

    Raises `RelayError`, and `WeightsCorrupted` if the run's trainer has not published it. A pull would only notice that
    at its time limit.
    """
    relay = open_relay(source.relay, source.relay_token or None, source.relay_anchor)
    try:
        updates = published_updates(relay)
        if not updates or updates[-1].version <= held:
            return None
        version, base = updates[-1]
        open_update(relay.get, version, base, Trust(source.run, source.publisher))
        return version
    finally:
        relay.close()


class _Left(Exception):
    pass
