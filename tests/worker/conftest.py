"""What the agent's tests need around it: a real gateway, a scripted engine, and a path that can go dead."""

import asyncio
import random
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Self, TypeVar

import msgspec
import pytest
import torch
import uvloop

from elastic.core.types import Account, Capabilities, FinishReason, SamplingParameters, WeightMode
from elastic.engine.base import (
    ChunkSink,
    EngineStatistics,
    GenerateRequest,
    TokenChunk,
)
from elastic.engine.meter import AccountMeter
from elastic.engine.model.checkpoint import model_tensors, write_checkpoint
from elastic.engine.model.config import Qwen3Config
from elastic.engine.model.qwen3 import Qwen3
from elastic.protocol import wire
from elastic.protocol.endpoint import Endpoint
from elastic.protocol.sampled import pack_ids
from elastic.runtime.gateway import Gateway
from elastic.weights.signing import SigningKey
from elastic.weights.source import PullReport, RelaySource, WeightsSource
from elastic.worker.agent import AgentExit, Ticket, run_agent

MessageT = TypeVar("MessageT")

PATIENCE_S = 60.0
MODEL = Qwen3Config(num_hidden_layers=1, hidden_size=32, intermediate_size=48, initializer_range=0.2)
"""A tiny policy."""
RUN = "run"


def token_at(noise_seed: int, position: int) -> int:
    """What the scripted engine generates: any gap, repetition or mix-up of turns shows."""
    return (noise_seed * 1_000_003 + position * 7) % 50_000


KEY = SigningKey()
"""Of a trainer that is only told of."""


def ordered(version: int, key: SigningKey = KEY) -> wire.PullWeights:
    return wire.PullWeights(version, WeightMode.FINISH, key.public)


def welcome_to(relay: str, relay_token: str = "", run: str = "run") -> wire.Welcome:
    """For whoever only pulls weights."""
    return wire.Welcome(
        session_key="",
        epoch=1,
        heartbeat_interval_s=1.0,
        flush_interval_s=1.0,
        silence_timeout_s=1.0,
        engine={},
        model={},
        relay=relay,
        relay_token=relay_token,
        run=run,
    )


FETCHED = PullReport(size_bytes=12, full_bytes=0)


class ScriptedEngine:
    """An engine whose iterations come at random, and whose tokens are `token_at`. Only for the agent's own tests."""

    capabilities = Capabilities(engine="scripted", replayable_sampling=True, max_context_tokens=999, device="none")

    def __init__(self, seed: int = 0, iteration_s: float = 0.001, version: int | None = None) -> None:
        self._random = random.Random(seed)
        self._iteration_s = iteration_s
        self._changed = threading.Condition()
        self._live: dict[str, tuple[GenerateRequest, int]] = {}
        self._aborting: set[str] = set()
        self._meter = AccountMeter(time.monotonic_ns(), Account.IDLE)
        self._idle = Account.IDLE
        self._version = version
        self._asleep = False
        self.closed = False
        self._iterations = 0
        self._decoded = 0
        self.loads: list[tuple[int, WeightMode]] = []
        self.fetch: Callable[[RelaySource], object] = lambda source: None
        """What takes the time of a `prefetch`, or raises; a report that it returns is the engine's."""
        self.sound: Callable[[], bool] = lambda: True
        self.before_load: Callable[[int], None] = lambda version: None
        self.finishes_first = False
        """Whether running turns end before new weights are applied."""
        self._waits_to_apply = False

    def start(self, sink: ChunkSink) -> None:
        self._sink = sink
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def submit(self, requests: Sequence[GenerateRequest]) -> None:
        with self._changed:
            self._live.update({r.request_id: (r, r.start) for r in requests})
            self._changed.notify_all()

    def abort(self, request_ids: Sequence[str]) -> None:
        with self._changed:
            self._aborting.update(self._live.keys() & set(request_ids))
            self._changed.notify_all()

    def prefetch(self, source: RelaySource, timeout_s: float) -> PullReport:
        found = self.fetch(source)
        return found if isinstance(found, PullReport) else FETCHED

    def audit(self) -> bool:
        return self.sound()

    def load_version(self, source: WeightsSource, mode: WeightMode) -> float:
        version = source.version
        self.before_load(version)
        with self._changed:
            self._waits_to_apply = self.finishes_first
            self._changed.wait_for(lambda: self.closed or not (self.finishes_first and self._live))
            self._waits_to_apply = False
            self._version = version
            self.loads.append((version, mode))
            self._changed.notify_all()
        return 0.0

    def sleep(self) -> None:
        with self._changed:
            self._asleep = True
            self._aborting.update(self._live)
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._live)

    def wake(self) -> None:
        with self._changed:
            self._asleep = False
            self._changed.notify_all()

    def set_idle_account(self, account: Account) -> None:
        with self._changed:
            self._idle = account
            self._charge()

    def statistics(self) -> EngineStatistics:
        with self._changed:
            self._charge()
            return EngineStatistics(
                pending=0,
                executing=len(self._live),
                capacity_turns=0 if self._asleep else 8,
                kv_blocks_used=1,
                kv_blocks_total=4,
                prefix_hit_tokens=0,
                prompt_tokens=0,
                decoded_tokens=self._decoded,
                progress=self._iterations,
                accounts_ns=self._meter.read(time.monotonic_ns()),
                weights_version=self._version,
                asleep=self._asleep,
                waits_to_apply=self._waits_to_apply,
            )

    def close(self) -> None:
        with self._changed:
            self.closed = True
            self._changed.notify_all()
        self._thread.join(5.0)

    def _charge(self) -> None:
        busy = Account.ASLEEP if self._asleep else Account.DECODE if self._live else self._idle
        self._meter.switch(time.monotonic_ns(), {busy: 1.0})

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self.closed or self._aborting or (self._live and not self._asleep))
                if self.closed:
                    return
                chunks = list(self._iteration())
                self._iterations += 1
                self._charge()
                self._changed.notify_all()
            self._sink(chunks)
            time.sleep(self._random.expovariate(1 / self._iteration_s))

    def _iteration(self) -> Iterator[TokenChunk]:
        for request_id, (request, at) in list(self._live.items()):
            aborted = request_id in self._aborting
            if not aborted and (self._asleep or self._random.random() < 0.3):
                continue
            count = 0 if aborted else min(self._random.randint(1, 3), request.sampling.max_new_tokens - at)
            finish = FinishReason.ABORTED if aborted else None
            if at + count == request.sampling.max_new_tokens:
                finish = FinishReason.LENGTH
            tokens = [token_at(request.sampling.noise_seed, at + i) for i in range(count)]
            self._decoded += count
            self._live[request_id] = (request, at + count)
            if finish:
                del self._live[request_id]
            yield TokenChunk(request_id, at, tokens, [-0.5] * count, self._version or 0, finish)
        self._aborting.clear()


class Orchestra:
    """A real gateway whose listener keeps everything it hears, and the agents that dial it."""

    def __init__(self, **terms: float) -> None:
        welcome = wire.Welcome(
            **{  # type: ignore[arg-type]
                "session_key": "",
                "epoch": 0,
                "heartbeat_interval_s": 0.05,
                "flush_interval_s": 0.02,
                "silence_timeout_s": 1.0,
                "engine": {},
                "model": {},
                "relay": "",
                "resume_timeout_s": 2.0,
                "orchestrator_timeout_s": 2.0,
                "drain_timeout_s": 2.0,
            }
            | terms
        )
        self.gateway = Gateway()
        self.door = self.gateway.open(RUN, self, welcome)
        self.heard: list[tuple[str, int, object]] = []
        """(worker, epoch, message), where Ready stands for the epoch's beginning."""
        self.gone: list[tuple[str, int, bool]] = []
        self.sent: list[wire.Generate] = []
        """By slot."""
        self.agents: list[asyncio.Task[AgentExit]] = []
        self._news = asyncio.Event()

    def on_ready(self, worker: str, epoch: int, ready: wire.Ready) -> None:
        self.on_message(worker, epoch, ready)  # type: ignore[arg-type]

    def on_message(self, worker: str, epoch: int, message: wire.FromWorker) -> None:
        self.heard.append((worker, epoch, message))
        self._news.set()

    def on_disconnected(self, worker: str, epoch: int, goodbye: bool) -> None:
        self.gone.append((worker, epoch, goodbye))
        self._news.set()

    def on_barred(self, worker: str, epoch: int, cause: str) -> None:
        raise AssertionError(f"{worker} was barred: {cause}")

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not condition():
                self._news.clear()
                await self._news.wait()

    async def first(self, kind: type[MessageT], epoch: int | None = None, after: int = 0) -> MessageT:
        """The first message of a kind (and an epoch) since `heard` was `after` long, once it has come."""

        def found() -> list[MessageT]:
            return [m for _, e, m in self.heard[after:] if isinstance(m, kind) and epoch in (None, e)]

        await self.until(found)
        return found()[0]

    async def next(self, kind: type[MessageT]) -> MessageT:
        """The first of a kind that comes from now on."""
        return await self.first(kind, after=len(self.heard))

    def of(self, kind: type[MessageT]) -> list[MessageT]:
        return [message for _, _, message in self.heard if isinstance(message, kind)]

    def chunks(self, turn: str, attempt: int = 1) -> list[TokenChunk]:
        return [
            TokenChunk(turn, c.start, ids, logprobs, c.version, c.finish, c.cached, c.prefilled, c.detail)
            for _, _, m in self.heard
            if isinstance(m, wire.Tokens)
            for c, ids, logprobs in m.said()
            if (self.sent[c.slot].turn, self.sent[c.slot].attempt) == (turn, attempt)
        ]

    async def finished(self, turn: str, attempt: int = 1) -> TokenChunk:
        """The turn's last chunk, once it has come."""
        await self.until(lambda: any(c.finish for c in self.chunks(turn, attempt)))
        return self.chunks(turn, attempt)[-1]

    def send(self, *messages: wire.FromOrchestrator, epoch: int = 1, worker: str = "w") -> None:
        for message in messages:
            if isinstance(message, wire.Generate):
                msgspec.structs.force_setattr(message, "slot", len(self.sent))
                self.sent.append(message)
            self.door.send(worker, epoch, message)

    def expect(self, worker: str, trains: bool = False, epoch: int = 0) -> None:
        self.door.expect(worker, f"token of {worker}", f"key of {worker}", trains=trains, epoch=epoch)

    def ticket(self, worker: str, join: str = "") -> Ticket:
        return Ticket(endpoint=Endpoint(join or self.address), run=RUN, worker=worker, token=f"token of {worker}")

    def employ(self, engine: object, worker: str = "w", join: str = "", **options: object) -> asyncio.Task[AgentExit]:
        """Start an agent with this engine."""
        self.expect(worker, trains="trainer" in options)
        work = run_agent(self.ticket(worker, join), lambda _: engine, **options)  # type: ignore[arg-type]
        self.agents.append(asyncio.create_task(work))
        return self.agents[-1]

    async def at_work(self, engine: object, **options: object) -> asyncio.Task[AgentExit]:
        """As `employ`, and wait until the agent is ready."""
        agent = self.employ(engine, **options)  # type: ignore[arg-type]
        await self.first(wire.Ready)
        return agent

    async def report_of(self, version: int, mode: WeightMode = WeightMode.FINISH) -> wire.WeightsReport:
        """Order the first weights, and return what is reported of them."""
        self.send(wire.PullWeights(version, mode))
        return await self.first(wire.WeightsReport)

    async def running(self, turn: str = "t") -> None:
        """Order a turn that does not end by itself, and wait for its first tokens."""
        self.send(generate(turn, most=1_000_000))
        await self.until(lambda: self.chunks(turn))

    def cut(self) -> None:
        """Every connection, without a word."""
        for connection in tuple(self.gateway.connections):
            connection.transport.abort()

    async def __aenter__(self) -> Self:
        self.address = await self.gateway.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        for agent in self.agents:
            agent.cancel()
        await asyncio.gather(*self.agents, return_exceptions=True)
        await self.gateway.aclose()


def generate(turn: str, seed: int = 1, attempt: int = 1, start: int = 0, most: int = 40) -> wire.Generate:
    """Its slot is given to it as it is sent."""
    prompt = bytearray(pack_ids([1, 2, 3, *(token_at(seed, i) for i in range(start))]))
    return wire.Generate(turn, attempt, -1, start, prompt, SamplingParameters(max_new_tokens=most, noise_seed=seed))


@pytest.hookimpl
def pytest_asyncio_loop_factories(item: pytest.Item) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """The agent is tested on both event loops: their transports differ where it matters to it."""
    asyncio_alone: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {"asyncio": asyncio.new_event_loop}
    return asyncio_alone | {"uvloop": uvloop.new_event_loop} if item.path.name == "test_agent.py" else asyncio_alone


def policy(seed: int = 0) -> dict[str, torch.Tensor]:
    """Weights of `MODEL`."""
    torch.manual_seed(seed)
    return model_tensors(Qwen3(MODEL))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of the policy."""
    directory = tmp_path_factory.mktemp("base") / "policy"
    write_checkpoint(directory, MODEL, policy())
    return directory


@pytest.fixture
async def orchestra() -> AsyncIterator[Orchestra]:
    async with Orchestra() as orchestra:
        yield orchestra
