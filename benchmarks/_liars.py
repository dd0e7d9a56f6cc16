"""A live orchestrator behind real sockets, with honest workers that are models, and liars that hold valid sessions."""

import asyncio
import contextlib
import hashlib
import itertools
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, ClassVar, cast

from pydantic import BaseModel

from elastic import compose, wire
from elastic.config import Config
from elastic.core import commands as c
from elastic.core.digest import digest
from elastic.core.events import LeaseEnded, LeaseGranted, OfferChanged
from elastic.core.scheduler import Phase, Scheduler
from elastic.core.types import Account, Capabilities, EndCause, FinishReason, LeaseId, Offer, Plan, WorkerRole
from elastic.endpoint import Endpoint
from elastic.envs.base import Environment, StepResult
from elastic.run_secrets import RunSecrets
from elastic.runtime.journal import GroupRow, JournalRecord, PullRow, RunDirectory, StepRow, TrajectoryRow, TurnRow
from elastic.runtime.orchestrator import Orchestrator, Wiring
from elastic.sim.lies import KINDS, Liar
from providers.base import Emit, KnownLease, LeaseRequest, Provider, ProviderSettings, WorkerTicket

VOCABULARY = 64
STEPS, GROUPS, GROUP_SIZE, TURNS, TOKENS_PER_TURN = 8, 3, 4, 3, 6
HONEST = 2
HONEST_CREDIT, LIARS_CREDIT = 1, 6
"""Turns that each takes at a time: few for the honest, so that liars are given some, too."""
LIARS = 16
"""Sessions of liars at a time."""
RUN = "lied-to"
LIAR = "liar"
WAIT_FOR_TURN_S = 0.02
"""A liar that wants a turn of its own first lies without one if none comes."""
PULLED_BYTES = 1234
ENGINE = {"kind": "torch", "max_batch": 4, "max_pending": 2, "max_context_tokens": 512}
PATIENCE_S = 120.0
CAPABILITIES = Capabilities(
    engine="model", replayable_sampling=True, max_context_tokens=512, device="none", tflops=100.0, max_batch=4
)


class NoSettings(BaseModel):
    pass


def token_at(seed: int, position: int) -> int:
    return 1 + int.from_bytes(hashlib.blake2b(f"{seed},{position}".encode(), digest_size=4).digest()) % (VOCABULARY - 1)


class Told:
    """How far the liars are: a run goes on as they do, so that they lie from its beginning to its end."""

    def __init__(self, frames: int) -> None:
        self.frames = frames
        self.of_kind: Counter[str] = Counter()
        self._news = asyncio.Event()

    @property
    def told(self) -> int:
        return sum(self.of_kind.values())

    def tell(self, kind: str) -> None:
        self.of_kind[kind] += 1
        self._news.set()

    async def until(self, share: float) -> None:
        while self.told < share * self.frames:
            self._news.clear()
            await self._news.wait()


class PacedEnvironment:
    """Some turns; rewarded when the policy's tokens add up to an even number."""

    Settings: ClassVar[type[BaseModel]] = NoSettings
    vocabulary: ClassVar[tuple[str, ...]] = ()
    stop_token_ids: ClassVar[tuple[int, ...]] = ()

    def __init__(self, told: Told, begun: Counter[str]) -> None:
        self._told, self._begun = told, begun
        self._turns = self._total = 0

    async def reset(self, seed: int) -> list[int]:
        self._step = self._begun["episodes"] // (GROUPS * GROUP_SIZE)
        self._begun["episodes"] += 1
        return [1 + seed % 7, 1 + seed % 5, 2]

    async def step(self, token_ids: list[int]) -> StepResult:
        self._turns += 1
        self._total += sum(token_ids)
        await self._told.until((self._step + self._turns / TURNS) / STEPS)
        done = self._turns == TURNS
        return StepResult([3, 4], done, float(done and self._total % 2 == 0))

    async def truncate(self) -> float:
        return 0.0

    async def aclose(self) -> None:
        pass


class Peer:
    """A worker's end of a connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._frames = wire.FrameBuffer()

    def say(self, message: wire.FromWorker) -> None:
        self._writer.write(wire.encode(message))

    def say_body(self, body: bytes) -> None:
        self._writer.write(len(body).to_bytes(4) + body)

    def finish(self) -> None:
        """Nothing more is said: whoever listens has heard everything once it ends the connection too."""
        with contextlib.suppress(OSError, RuntimeError):
            self._writer.write_eof()

    async def hear(self) -> AsyncIterator[wire.FromOrchestrator]:
        with contextlib.suppress(OSError):
            while data := await self._reader.read(1 << 16):
                for body in self._frames.feed(data):
                    yield wire.decode_from_orchestrator(body)

    @property
    def closed(self) -> bool:
        return self._writer.is_closing()

    async def aclose(self) -> None:
        self._writer.close()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()


async def dial(join: str, ticket: WorkerTicket) -> Peer:
    host, _, port = join.rpartition(":")
    peer = Peer(*await asyncio.open_connection(host, int(port)))
    peer.say(wire.Hello(wire.PROTOCOL_VERSION, ticket.worker, ticket.token, False, 1, "here", RUN))
    return peer


def beat(born_s: float, capacity: int, turns: int = 0, decoded: int = 0) -> wire.Heartbeat:
    age_ns = max(1, round((asyncio.get_running_loop().time() - born_s) * 1e9))
    return wire.Heartbeat(capacity, 0, turns, age_ns, {Account.DECODE: age_ns}, decoded, 0.0, 0, 0)


class HonestWorker:
    """Does what it is told: its tokens follow from a turn's noise seed alone."""

    def __init__(self, trains: bool) -> None:
        self._trains = trains
        self._turns: dict[str, wire.Generate] = {}
        self._position: dict[str, int] = {}
        self._decoded = 0
        self._trained = 0.0

    async def work(self, join: str, ticket: WorkerTicket) -> None:
        peer = await dial(join, ticket)
        born_s = asyncio.get_running_loop().time()
        try:
            async with asyncio.TaskGroup() as tasks:
                iterating = tasks.create_task(self._iterate(peer, born_s))
                async for order in peer.hear():
                    if isinstance(order, wire.Welcome):
                        peer.say(wire.Ready(CAPABILITIES, 0 if self._trains else None))
                        peer.say(beat(born_s, HONEST_CREDIT))
                    elif isinstance(order, wire.Drain):
                        peer.say(wire.Goodbye(order.reason, beat(born_s, 0).accounts_ns, self._decoded))
                        peer.finish()
                    else:
                        self._obey(peer, order)
                iterating.cancel()
        finally:
            await peer.aclose()

    async def _iterate(self, peer: Peer, born_s: float) -> None:
        for number in range(1 << 40):
            chunks = [self._chunk(turn, 2) for turn in list(self._turns)]
            if chunks:
                peer.say(wire.Tokens(chunks))
            if number % 50 == 0 and number:
                peer.say(beat(born_s, HONEST_CREDIT, len(self._turns), self._decoded))
            await asyncio.sleep(0.004)

    def _chunk(self, turn: str, most: int, finish: FinishReason | None = None) -> wire.Chunk:
        order, start = self._turns[turn], self._position[turn]
        end = min(start + most, order.sampling.max_new_tokens)
        ids = [token_at(order.sampling.noise_seed, position) for position in range(start, end)]
        self._position[turn] = end
        self._decoded += len(ids)
        finish = FinishReason.LENGTH if end == order.sampling.max_new_tokens else finish
        if finish is not None:
            del self._turns[turn]
        return wire.Chunk(turn, order.attempt, start, ids, [-0.5] * len(ids), self._version, finish)

    _version = 0

    def _obey(self, peer: Peer, order: wire.FromOrchestrator) -> None:
        match order:
            case wire.Generate():
                self._turns[order.turn], self._position[order.turn] = order, order.start
            case wire.Abort(turn=turn, attempt=attempt):
                if turn in self._turns and self._turns[turn].attempt == attempt:
                    peer.say(wire.Tokens([self._chunk(turn, 0, FinishReason.ABORTED)]))
            case wire.PullWeights(version=version):
                self._version = version
                peer.say(wire.WeightsReport(version, "", PULLED_BYTES, 0.0, 0.0))
            case wire.Sleep():
                if chunks := [self._chunk(turn, 0, FinishReason.ABORTED) for turn in list(self._turns)]:
                    peer.say(wire.Tokens(chunks))
                peer.say(wire.Slept())
            case wire.Wake():
                peer.say(wire.Awoke())
            case wire.TrainGroupFrame(group=group, trajectories=trajectories):
                self._trained += sum(sum(t.token_ids) + 100 * t.reward for t in trajectories)
                peer.say(wire.Trained(group, 0.0))
            case wire.UpdateFrame(version=version):
                self._version = version
                peer.say(wire.Stepped(version, {"trained": self._trained}))
                peer.say(wire.PublishedFrame(version, {"bytes": 1.0}, {"layer": 0.5}))
            case _:
                pass


class LyingWorker:
    """Joins as workers do, may take a turn or two, and tells one lie of this kind."""

    def __init__(self, kind: type, rng: Random, told: Told, names: Callable[[], Sequence[str]]) -> None:
        self._kind, self._rng, self._told, self._names = kind, rng, told, names

    async def work(self, join: str, ticket: WorkerTicket) -> None:
        peer = await dial(join, ticket)
        lie = Liar(self._rng, self._names)
        born_s = asyncio.get_running_loop().time()
        own: set[str] = set()
        ready_first = self._kind is not wire.Ready and self._rng.random() < 0.9
        waits_s = self._rng.choice((0.0, 0.0, WAIT_FOR_TURN_S))
        silent = True

        def tell() -> None:
            nonlocal silent
            if silent and not peer.closed:
                silent = False
                peer.say_body(self._harmless(lie.frame(self._kind), own))
                peer.finish()
                self._told.tell(wire.kind_of(self._kind))

        try:
            async with asyncio.timeout(PATIENCE_S):
                async for order in peer.hear():
                    if isinstance(order, wire.Welcome):
                        if ready_first:
                            peer.say(wire.Ready(CAPABILITIES, self._rng.choice((0, 1, None))))
                            peer.say(beat(born_s, LIARS_CREDIT))
                        asyncio.get_running_loop().call_later(waits_s, tell)
                    elif isinstance(order, wire.Generate):
                        own.add(order.turn)
                        tell()
        finally:
            await peer.aclose()

    def _harmless(self, body: bytes, own: set[str]) -> bytes:
        """A fitting answer to its own turn is no lie that anybody could know, so it is not given."""
        with contextlib.suppress(wire.WireError):
            message = wire.decode_from_worker(body)
            if isinstance(message, wire.Tokens) and any(chunk.turn in own for chunk in message.chunks):
                return wire.encode(wire.Tokens([]))[4:]
        return body


class Troupe:
    """A provider whose workers are coroutines of this process; at most `size` at a time."""

    Settings: ClassVar[type[ProviderSettings]] = ProviderSettings

    def __init__(
        self, name: str, role: WorkerRole, size: int, make_worker: Callable[[], HonestWorker | LyingWorker], join: str
    ) -> None:
        self.name = name
        self.barred = 0
        self.closing = False
        self._role, self._size, self._make_worker, self._join = role, size, make_worker, join
        self._emit: Emit | None = None
        self._workers: dict[LeaseId, asyncio.Task[None]] = {}

    async def start(self, emit: Emit) -> None:
        self._emit = emit
        self._offer()

    def _offer(self) -> None:
        assert self._emit is not None
        available = 0 if self.closing else self._size - len(self._workers)
        offer = Offer(provider=self.name, role=self._role, available=available, usd_per_gpu_hour=1.0)
        self._emit(OfferChanged(offer=offer))

    async def acquire(self, request: LeaseRequest) -> None:
        assert self._emit is not None
        (ticket,) = request.tickets
        self._emit(LeaseGranted(lease=request.lease, workers=(ticket.worker,)))
        task = asyncio.create_task(self._make_worker().work(self._join, ticket))
        self._workers[request.lease] = task
        task.add_done_callback(lambda _: self._ended(request.lease))

    def _ended(self, lease: LeaseId) -> None:
        assert self._emit is not None
        if self._workers.pop(lease, None) is not None:
            self._emit(LeaseEnded(lease=lease, cause=EndCause.LOST))
            self._offer()

    async def release(self, lease: LeaseId) -> None:
        if (task := self._workers.get(lease)) is not None:
            task.cancel()

    def bar(self, lease: LeaseId) -> None:
        self.barred += 1

    async def adopt(self, known: Sequence[KnownLease], emit: Emit) -> list[LeaseId]:
        return [lease.request.lease for lease in known if not lease.granted]

    async def aclose(self) -> None:
        self.closing = True
        for task in list(self._workers.values()):
            task.cancel()
        await asyncio.gather(*self._workers.values(), return_exceptions=True)


@dataclass
class Ended:
    """A run that is over, and what its journal has: rows by table and key, without times and without who did what."""

    failed: str
    told: Counter[str]
    barred: int
    refused: int
    turns_of_liars: int = 0
    fenced: set[str] = field(default_factory=set[str])
    rows: dict[tuple[str, Any], Any] = field(default_factory=dict[tuple[str, Any], Any])
    faults: list[str] = field(default_factory=list[str])


def _configuration() -> Config:
    return Config.model_validate(
        {
            "model": {"checkpoint": "."},
            "run": {"seed": 7, "steps": STEPS},
            "rollout": {
                "groups": GROUPS,
                "group_size": GROUP_SIZE,
                "max_turns": TURNS,
                "max_tokens_per_turn": TOKENS_PER_TURN,
            },
            "environment": {"step_timeout_s": 2 * PATIENCE_S},
            "engine": ENGINE,
            "seeding": {"window_s": 0.0},
            "provisioning": {"policy": "take_all"},
            "scheduler": {
                "heartbeat_timeout_s": PATIENCE_S,
                "stall_timeout_s": PATIENCE_S,
                "turn_stall_timeout_s": PATIENCE_S,
                "boot_timeout_s": PATIENCE_S,
                "load_timeout_s": PATIENCE_S,
                "queue_timeout_s": PATIENCE_S,
                "retry_base_s": 0.001,
                "retry_max_s": 0.001,
                "resume_timeout_s": 0.001,
            },
        }
    )


async def play(frames: int, seed: int) -> Ended:
    """One run; with `frames` lies, each over a session of its own, or with none."""
    config, told, rng = _configuration(), Told(frames), Random(seed)
    begun: Counter[str] = Counter()
    troupes: dict[str, Troupe] = {}

    def names() -> list[str]:
        """Turns and workers that there are: those of others."""
        live, fleet = list(orchestrator.scheduler.turns.live), list(orchestrator.scheduler.fleet.workers)
        return [*live[:4], *fleet[:2], "trainer-1", "0/0"]

    def make_providers(endpoint: Endpoint, now_ns: Callable[[], int]) -> Mapping[str, Provider]:
        troupes["trainer"] = Troupe("trainer", WorkerRole.TRAINER, 1, lambda: HonestWorker(True), endpoint.address)
        troupes["spot"] = Troupe("spot", WorkerRole.ELASTIC, HONEST, lambda: HonestWorker(False), endpoint.address)
        if frames:
            kinds = itertools.cycle(KINDS)
            troupes[LIAR] = Troupe(
                LIAR, WorkerRole.ELASTIC, LIARS, lambda: LyingWorker(next(kinds), rng, told, names), endpoint.address
            )
        return cast("Mapping[str, Provider]", troupes)

    welcome = wire.Welcome("", 0, 5.0, 0.03, PATIENCE_S, ENGINE, {"vocab_size": VOCABULARY}, "", run=RUN)
    plan = Plan(steps=STEPS, groups=GROUPS, group_size=GROUP_SIZE)
    scheduler = Scheduler(plan, compose.limits(config), compose.policies(config), 0)
    with tempfile.TemporaryDirectory() as directory:
        stored = RunDirectory(Path(directory))
        journal = stored.begin_journal(config.journal)
        orchestrator = Orchestrator(
            config,
            scheduler,
            journal,
            Wiring(
                make_providers=make_providers,
                make_environment=lambda: cast(Environment, PacedEnvironment(told, begun)),
                stop_token_ids=(),
                welcome=welcome,
                secrets=RunSecrets.of(stored.path),
                kept=stored,
            ),
        )
        failed = await orchestrator.run()
        journal.close()
        barred = troupes[LIAR].barred if frames else 0
        refused = sum(refused.count for refused in orchestrator._door.refusals() if refused.worker)
        ended = Ended(failed, told.of_kind, barred, refused)
        _read(ended, stored, config, scheduler)
    return ended


def _read(ended: Ended, run: RunDirectory, config: Config, live: Scheduler) -> None:
    fresh = Scheduler(live.plan, compose.limits(config), compose.policies(config), 0)
    with run.newest_journal() as journal:
        for t_ns, event in journal.events():
            running = fresh.phase is Phase.RUNNING
            for command in fresh.handle(event, t_ns):
                if running and isinstance(command, c.FenceWorker) and not command.worker.startswith(LIAR):
                    ended.fenced.add(command.worker)
                elif isinstance(command, c.StartTurn):
                    ended.turns_of_liars += command.worker.startswith(LIAR)
        rows: dict[type[JournalRecord], tuple[str, ...]] = {
            TrajectoryRow: ("trajectory", "step", "group", "reward", "cause", "turns", "policy_tokens", "token_ids"),
            GroupRow: ("group", "step", "version", "dropped", "lengths", "tokens_by_age"),
            TurnRow: ("turn", "trajectory", "prompt_tokens", "tokens"),
        }
        for kind, columns in rows.items():
            for row in journal.rows(kind):
                key, *values = (getattr(row, column) for column in columns)
                ended.rows[kind.TABLE, key] = dict(zip(columns[1:], values, strict=True))
        for step in journal.rows(StepRow):
            ended.rows[StepRow.TABLE, step.step] = {
                "success_rate": step.success_rate,
                "trainer": step.trainer,
                "groups_trained": step.record.groups_trained,
                "groups_dropped": step.record.groups_dropped,
                "weights": step.weights,
            }
        for pull in journal.rows(PullRow):
            if not pull.worker.startswith(LIAR) and (pull.bytes, pull.error) != (PULLED_BYTES, ""):
                ended.faults.append(f"pull {pull}")
    if digest(fresh) != digest(live):
        ended.faults.append("the journal replays to another state")
    if live.ledger.imbalance_ns():
        ended.faults.append("the ledger is out of balance")


def wrong_rows(quiet: Ended, lied: Ended) -> list[Any]:
    """Journal rows of the run with liars that are not as in the run without."""
    keys = quiet.rows.keys() | lied.rows.keys()
    return [key for key in keys if quiet.rows.get(key) != lied.rows.get(key)] + lied.faults
