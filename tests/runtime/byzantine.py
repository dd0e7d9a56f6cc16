"""A live orchestrator, honest workers (production agents around model engines), and Byzantine workers that hold valid
sessions."""

import asyncio
import contextlib
import itertools
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import msgspec

from benchmarks import ROOT
from benchmarks._configurations import configuration
from benchmarks._live import replay
from benchmarks._orchestrated import RUN, OwnWorkers, orchestrated
from elastic.compose.plan import TRAINER_PROVIDER
from elastic.config import Config
from elastic.core import commands as c
from elastic.core import events as e
from elastic.core.scheduler import Scheduler
from elastic.core.types import Account, Capabilities
from elastic.environments.base import StepResult
from elastic.protocol import wire
from elastic.protocol.connection import ConnectionLost
from elastic.report.history import history_of
from elastic.report.refusals import refused_of
from elastic.runtime.journal import GroupRow, JournalRecord, PullRow, RunDirectory, StepRow, TrajectoryRow, TurnRow
from elastic.system.host import HOST, Host
from elastic.system.thread_lane import Lane
from elastic.testing.faults.core.lies import KINDS, ByzantineWorker
from elastic.testing.faults.shell.models import (
    LoadWatch,
    ModelDevice,
    ModelEngine,
    ModelEnvironment,
    ModelTrainer,
    NoSettings,
    Weights,
)
from elastic.worker.accounts import DeviceAccounts
from elastic.worker.agent import run_agent
from elastic.worker.connection import OrchestratorLink, Ticket, dial
from elastic.worker.trainer_host import TrainerHost

HONEST = 2
HONEST_CREDIT, BYZANTINE_CREDIT = 1, 6
"""Turns that each takes at a time: few for the honest, so that Byzantine workers are given some, too."""
SESSIONS = 16
"""Sessions of Byzantine workers at a time."""
BYZANTINE = "byzantine"
TOKEN_S = 0.002
"""Of the honest: nothing but the Byzantine workers is to hold a run up."""
WAIT_FOR_TURN_S = 0.02
"""A Byzantine worker that wants a turn of its own first lies without one if none comes."""
PATIENCE_S = 120.0
CAPABILITIES = Capabilities(
    engine="model", replayable_sampling=True, max_context_tokens=512, device="none", tflops=100.0, max_batch=4
)
CONFIG = configuration("all-capacity", "lied-to", policy=".")
ROLLOUT, STEPS = CONFIG.rollout, CONFIG.run.steps


class ToldLies:
    """How far the Byzantine workers are: a run goes on as they do, so that they lie from its beginning to its end."""

    def __init__(self, frames: int) -> None:
        self.frames = frames
        self.of_kind: Counter[str] = Counter()
        self._news = asyncio.Event()

    def tell(self, kind: str) -> None:
        self.of_kind[kind] += 1
        self._news.set()

    async def until(self, share: float) -> None:
        while self.of_kind.total() < share * self.frames:
            self._news.clear()
            await self._news.wait()


class PacedEnvironment(ModelEnvironment):
    """Of as many turns each, none of which ends before the Byzantine workers are as far."""

    def __init__(self, told: ToldLies, numbers: "itertools.count[int]") -> None:
        super().__init__(NoSettings())
        self._told_lies, self._numbers = told, numbers

    async def reset(self, seed: int) -> list[int]:
        self._step = next(self._numbers) // (ROLLOUT.groups * ROLLOUT.group_size)
        context = self.begin(seed)
        self._turns = ROLLOUT.max_turns
        return context

    async def step(self, token_ids: list[int]) -> StepResult:
        result = self.answer(token_ids)
        await self._told_lies.until((self._step + 1 - self._turns / ROLLOUT.max_turns) / STEPS)
        return result


class CallingLane(Lane):
    """Makes calls on the event loop, where models live."""

    def submit(self, call: Callable[[], None]) -> None:
        asyncio.get_running_loop().call_soon(call)

    def stop(self) -> None:
        pass


class Honest:
    """Workers that do what they are told, and what their trainer has learnt."""

    def __init__(self, config: Config, run_dir: Path, credit: int = HONEST_CREDIT, token_s: float = TOKEN_S) -> None:
        self.weights = Weights()
        self._credit, self._token_s = credit, token_s
        self._config = config
        self._run_dir = run_dir

    async def work(self, ticket: Ticket, *, trains: bool = False) -> None:
        HOST.set(Host(lane=lambda _: CallingLane()))
        build_engine, trainer = self._build_engine, None
        if trains:
            trainer = TrainerHost(self._config, self._run_dir, False, self._make_trainer, self._build_engine)
            build_engine = trainer.build_engine
        await run_agent(ticket, build_engine, trainer=trainer, accounts=DeviceAccounts(time.monotonic_ns()))

    def _build_engine(self, _: wire.Welcome) -> ModelEngine:
        now_ns = time.monotonic_ns
        return ModelEngine(now_ns, ModelDevice(now_ns), self._credit, 0, self._token_s, LoadWatch())

    def _make_trainer(self, config: Config) -> ModelTrainer:
        return ModelTrainer(self._stepped, lambda version, bits: None)

    def _stepped(self, weights: Weights) -> None:
        self.weights = weights


class ByzantineWorkers:
    """Workers that join as others do, may take a turn or two, and tell one lie; each of the next kind."""

    def __init__(self, told: ToldLies, rng: Random, names: Callable[[], Sequence[str]]) -> None:
        self._told, self._rng = told, rng
        self._kinds = itertools.cycle(KINDS)
        self._names = names

    async def work(self, ticket: Ticket) -> None:
        kind, rng, lie = next(self._kinds), self._rng, ByzantineWorker(self._rng, self._names)
        ready_first = kind is not wire.Ready and rng.random() < 0.9
        waits_s = rng.choice((0.0, 0.0, WAIT_FOR_TURN_S))
        own: set[int] = set()
        silent = True
        connection, _ = await dial(ticket, "", PATIENCE_S)

        def tell() -> None:
            nonlocal silent
            if silent and not connection.transport.is_closing():
                silent = False
                body = _harmless(lie.frame(kind), own)
                connection.transport.write(len(body).to_bytes(4) + body)
                with contextlib.suppress(OSError, RuntimeError):
                    connection.transport.write_eof()  # the listener has read everything once it hangs up, too
                self._told.tell(wire.kind_of(kind))

        def hear(orders: list[wire.FromOrchestrator]) -> None:
            if slots := {order.slot for order in orders if isinstance(order, wire.Generate)}:
                own.update(slots)
                tell()

        if ready_first:
            connection.send(wire.Ready(CAPABILITIES, rng.choice((0, 1, None))))
            connection.send(wire.Heartbeat(BYZANTINE_CREDIT, 0, 0, 1, {Account.DECODE: 1}, 0, 0.0, 0, 0))
        asyncio.get_running_loop().call_later(waits_s, tell)
        await _listen(connection, hear)


async def _listen(connection: OrchestratorLink, hear: Callable[[list[wire.FromOrchestrator]], None]) -> None:
    try:
        with contextlib.suppress(ConnectionLost):
            connection.watch(PATIENCE_S)
            await connection.listen(hear)
    finally:
        await connection.aclose()


def _harmless(body: bytes, own: set[int]) -> bytes:
    """A fitting answer to its own turn is no lie that anybody could know, so it is not given."""
    with contextlib.suppress(wire.WireError):
        message = wire.decode_from_worker(body)
        if isinstance(message, wire.Tokens) and own.intersection(message.chunks.slots):
            return wire.encode(wire.Tokens.of([]))[4:]
    return body


@dataclass
class PlayedRun:
    """A run that is over, and what its journal has: rows by table and key, without times and without who did what."""

    failed: str
    told: Counter[str]
    refused: int
    turns_of_liars: int = 0
    fenced: set[str] = field(default_factory=set[str])
    rows: dict[tuple[str, Any], Any] = field(default_factory=dict[tuple[str, Any], Any])
    faults: list[str] = field(default_factory=list[str])


async def play(frames: int, seed: int) -> PlayedRun:
    """One run; with `frames` lies, each over a session of its own, or with none."""
    told, numbers = ToldLies(frames), itertools.count()

    def names() -> list[str]:
        """Turns and workers that there are: those of others."""
        live, fleet = list(run.scheduler.turns.live), list(run.scheduler.fleet.workers)
        return [*live[:4], *fleet[:2], "trainer-1", "0/0"]

    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        honest = Honest(CONFIG, directory / RUN)
        providers = [
            OwnWorkers(TRAINER_PROVIDER, 1, partial(honest.work, trains=True)),
            OwnWorkers("spot", HONEST, honest.work),
            *([OwnWorkers(BYZANTINE, SESSIONS, ByzantineWorkers(told, Random(seed), names).work)] if frames else []),
        ]
        environment, relay = partial(PacedEnvironment, told, numbers), str(directory / "relay")
        with orchestrated(CONFIG, directory / RUN, providers, environment, relay=relay) as (run, kept, _):
            failed = await run.run()
        played = PlayedRun(
            failed, told.of_kind, sum(refused.count for refused in run._door.refusals() if refused.worker)
        )
        _read(played, kept, CONFIG, run.scheduler)
    played.rows |= {("learnt", group): (step, what) for step, group, what in honest.weights.learnt}
    return played


BESIDE_CREDIT = 3
"""Turns that the honest worker takes at a time: fewer than there are."""


@dataclass
class RunBeside:
    """A run of one honest worker, with a Byzantine worker beside it or alone."""

    steps_per_s: float
    """From the end of the first step on: how long the trainer takes to begin is none of the Byzantine worker's
    doing."""
    journal_bytes: int
    turns_of_liar: int
    named: list[str]
    """What the report says of the Byzantine worker."""
    honest_fenced: int
    failed: str


async def play_beside(arm: str, steps: int, token_s: float) -> RunBeside:
    """One run with a Byzantine worker of this arm, or without any if it is empty."""
    config = configuration("all-capacity", "lied-to", "lied-to-by-one", policy=".", run={"steps": steps})
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        honest = Honest(config, directory / RUN, BESIDE_CREDIT, token_s)
        providers = [
            OwnWorkers(TRAINER_PROVIDER, 1, partial(honest.work, trains=True)),
            OwnWorkers("spot", 1, honest.work),
            *([OwnWorkers(BYZANTINE, 1, partial(_lone_byzantine, arm), loses_barred=True)] if arm else []),
        ]
        environment, relay = partial(ModelEnvironment, NoSettings()), str(directory / "relay")
        with orchestrated(config, directory / RUN, providers, environment, relay=relay) as (run, kept, _):
            failed = await run.run()
        turns, fenced = 0, set[str]()
        for _, _, commands in replay(config, kept.path, run.scheduler):
            for command in commands:
                if isinstance(command, c.StartTurn):
                    turns += command.worker.startswith(BYZANTINE)
                elif isinstance(command, c.FenceWorker) and command.worker.startswith("spot"):
                    fenced.add(command.reason)
        with history_of(kept) as history:
            ends_ns = [row.t_ns for row in history.rows(StepRow)]
            named = [str(refused) for refused in refused_of(history) if refused.worker.startswith(BYZANTINE)]
        size_bytes = sum(path.stat().st_size for path in kept.path.glob("journal*.sqlite*"))
    steps_per_s = (len(ends_ns) - 1) / (ends_ns[-1] - ends_ns[0]) * 1e9 if len(ends_ns) > 1 else 0.0
    blamed = {reason for reason in fenced if not reason.startswith(("its lease", "released"))}
    return RunBeside(steps_per_s, size_bytes, turns, named, len(blamed), failed)


async def _lone_byzantine(arm: str, ticket: Ticket) -> None:
    command = (sys.executable, "-m", "tests.runtime.lone_byzantine", arm, msgspec.json.encode(ticket).decode())
    process = await asyncio.create_subprocess_exec(*command, cwd=ROOT)
    try:
        await process.wait()
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


COMPARED: dict[type[JournalRecord], tuple[str, ...]] = {
    TrajectoryRow: ("trajectory", "step", "group", "reward", "cause", "turns", "policy_tokens", "token_ids"),
    GroupRow: ("group", "step", "version", "dropped", "lengths", "tokens_by_age"),
    TurnRow: ("turn", "trajectory", "prompt_tokens", "tokens"),
    StepRow: ("step", "success_rate"),
}
"""Of each table, its key and the columns in which nobody's lies may be seen. Groups are trained in the order in which
they end, so bits of a version may differ."""


def _read(played: PlayedRun, kept: RunDirectory, config: Config, live: Scheduler) -> None:
    running = True
    for _, event, commands in replay(config, kept.path, live):
        for command in commands:
            if running and isinstance(command, c.FenceWorker) and not command.worker.startswith(BYZANTINE):
                played.fenced.add(command.worker)
            elif isinstance(command, c.StartTurn):
                played.turns_of_liars += command.worker.startswith(BYZANTINE)
        running &= not (isinstance(event, e.WeightsPublished) and event.version == STEPS)
    with kept.newest_journal() as journal:
        for kind, columns in COMPARED.items():
            for row in journal.rows(kind):
                key, *values = (getattr(row, column) for column in columns)
                played.rows[kind.TABLE, key] = values
        for step in journal.rows(StepRow):
            played.rows["groups", step.step] = step.record.groups_trained, step.record.groups_dropped
        pulls = [pull for pull in journal.rows(PullRow) if not pull.worker.startswith(BYZANTINE)]
        played.faults += [f"pull {pull}" for pull in pulls if pull.error]
    if live.ledger.imbalance_ns():
        played.faults.append("the ledger is out of balance")


def wrong_rows(quiet: PlayedRun, lied: PlayedRun) -> list[Any]:
    """Journal rows of the run with Byzantine workers that are not as in the run without."""
    keys = quiet.rows.keys() | lied.rows.keys()
    return [key for key in keys if quiet.rows.get(key) != lied.rows.get(key)] + lied.faults
