"""CPU per token on the way from workers to accepted, journaled tokens, against relaying server-sent events.

Ours is the orchestrator's own process: gateway, decoding, the scheduler's acceptance and the journal, fed over
loopback by a process that streams as workers' agents do: sixteen streams a worker, a frame each flush, which comes as
often as it does by default. `one_connection_…`: the same with all streams on one worker; `tls_…`: over TLS, as beyond
loopback, `tls_ratio` what that costs over plain text. The other side relays one
server-sent event a token from a streaming upstream to a client, with Starlette, uvicorn and aiohttp (uvloop,
httptools), and does nothing else with it. Both carry the same streams at the same rate in one run; what counts is
the CPU time of the process in the middle.
"""

import asyncio
import multiprocessing
import multiprocessing.connection
import os
import socket
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import aiohttp
import uvicorn
import uvloop
from _common import Arguments, emit, parse_arguments
from pydantic import BaseModel
from starlette.applications import Starlette
from starlette.responses import StreamingResponse
from starlette.routing import Route

from elastic import compose, wire
from elastic.config import Config, SchedulerConfig
from elastic.core.events import LeaseEnded, LeaseGranted, OfferChanged
from elastic.core.scheduler import Scheduler
from elastic.core.types import Account, Capabilities, EndCause, LeaseId, Offer, Plan, WorkerRole
from elastic.endpoint import Endpoint, host_and_port
from elastic.envs.base import StepResult
from elastic.run_secrets import RunSecrets
from elastic.runtime.journal import RunDirectory
from elastic.runtime.orchestrator import Orchestrator, Wiring
from elastic.tls import pinning_context, run_certificate
from providers.base import Emit, KnownLease, LeaseRequest, Provider, ProviderContext, ProviderSettings

RUN = "bench"
TOKENS_PER_S = 50
FLUSH_S = SchedulerConfig.model_validate({}).flush_interval_s
STREAMS_PER_WORKER = 16
GROUP_SIZE = 8
WARM_UP_S = 1.5
EVENT = (
    b'data: {"id":"cmpl-1","object":"text_completion",'
    b'"choices":[{"index":0,"text":"x","token_ids":[17],"logprob":-0.51}]}\n\n'
)
"""One token as OpenAI-compatible servers send it, with its id and log-probability."""


class NoSettings(BaseModel):
    pass


class EndlessEnvironment:
    """Asks for one turn that never ends within the benchmark."""

    Settings: ClassVar[type[BaseModel]] = NoSettings
    vocabulary: ClassVar[tuple[str, ...]] = ()
    stop_token_ids: ClassVar[tuple[int, ...]] = ()

    def __init__(self, settings: BaseModel) -> None:
        pass

    async def reset(self, seed: int) -> list[int]:
        return [1] * 24

    async def step(self, token_ids: list[int]) -> StepResult:
        return StepResult([], True, 0.0)

    async def truncate(self) -> float:
        return 0.0

    async def aclose(self) -> None:
        pass


class StreamingWorkers:
    """A provider whose workers are connections of the process at the other end of a pipe."""

    Settings: ClassVar[type[ProviderSettings]] = ProviderSettings
    on_this_machine: ClassVar[bool] = False

    def __init__(self, name: str, settings: ProviderSettings, context: ProviderContext) -> None:
        self.name = name
        self.endpoint = context.endpoint
        self._emit: Emit | None = None
        self.pipe: multiprocessing.connection.Connection | None = None
        self.workers = 1

    async def start(self, emit: Emit) -> None:
        self._emit = emit
        role = WorkerRole.TRAINER if self.name == "trainer" else WorkerRole.ELASTIC
        offer = Offer(provider=self.name, role=role, available=self.workers, usd_per_gpu_hour=1.0)
        emit(OfferChanged(offer=offer))

    async def acquire(self, request: LeaseRequest) -> None:
        assert self._emit is not None
        assert self.pipe is not None
        (ticket,) = request.tickets
        self.pipe.send((self.endpoint, ticket.worker, ticket.token))
        self._emit(LeaseGranted(lease=request.lease, workers=(ticket.worker,)))

    async def release(self, lease: LeaseId) -> None:
        assert self._emit is not None
        self._emit(LeaseEnded(lease=lease, cause=EndCause.RELEASED))

    def bar(self, lease: LeaseId) -> None:
        pass

    async def adopt(self, known: Sequence[KnownLease], emit: Emit) -> list[LeaseId]:
        return [lease.request.lease for lease in known if not lease.granted]

    async def aclose(self) -> None:
        pass


def stream_frames(pipe: multiprocessing.connection.Connection, workers: int, streams: int) -> None:
    """The workers' side: of each a frame each flush, with what every running turn produced since the last."""
    uvloop.run(_stream_frames(pipe, workers, streams))


async def _stream_frames(pipe: multiprocessing.connection.Connection, workers: int, streams: int) -> None:
    async with asyncio.TaskGroup() as tasks:
        for _ in range(workers):
            tasks.create_task(_be_worker(await asyncio.to_thread(pipe.recv), streams))


async def _be_worker(ticket: tuple[Endpoint, str, str], streams: int) -> None:
    """One worker, which has room for so many streams."""
    endpoint, worker, token = ticket
    tls = pinning_context() if endpoint.fingerprint else None
    reader, writer = await asyncio.open_connection(*host_and_port(endpoint.address), ssl=tls)

    async def receive(frames: wire.FrameBuffer) -> list[wire.FromOrchestrator]:
        return [wire.decode_from_orchestrator(body) for body in frames.feed(await reader.read(1 << 20))]

    def send(message: wire.FromWorker) -> None:
        writer.write(wire.encode(message))

    send(wire.Hello(wire.PROTOCOL_VERSION, worker, token, False, os.getpid(), socket.gethostname(), RUN))
    frames = wire.FrameBuffer()
    while not any(isinstance(message, wire.Welcome) for message in await receive(frames)):
        pass
    capabilities = Capabilities(engine="stream", replayable_sampling=True, max_context_tokens=1 << 20, device="cpu")
    send(wire.Ready(capabilities, 0))
    produced: dict[str, tuple[int, int]] = {}
    born_ns = time.monotonic_ns()

    def beat() -> None:
        age_ns = time.monotonic_ns() - born_ns
        send(wire.Heartbeat(streams, 0, len(produced), age_ns, {Account.DECODE: age_ns}, 0, 0.0, 0, 0))

    async def listen() -> None:
        while not reader.at_eof():
            for message in await receive(frames):
                if isinstance(message, wire.Generate):
                    produced[message.turn] = (message.attempt, 0)

    async def speak() -> None:
        due_s = asyncio.get_running_loop().time()
        per_flush = TOKENS_PER_S * FLUSH_S
        for beat_number in range(1 << 30):
            if beat_number % 10 == 0:
                beat()
            chunks: list[wire.Chunk] = []
            for turn, (attempt, start) in produced.items():
                count = int((beat_number + 1) * per_flush) - int(beat_number * per_flush)
                chunks.append(wire.Chunk(turn, attempt, start, [17] * count, [-0.51] * count, 0))
                produced[turn] = (attempt, start + count)
            if chunks:
                send(wire.Tokens(chunks))
            await writer.drain()
            due_s += FLUSH_S
            await asyncio.sleep(due_s - asyncio.get_running_loop().time())

    try:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(listen())
            tasks.create_task(speak())
    except* (ConnectionError, OSError):
        pass


def orchestrate(
    pipe: multiprocessing.connection.Connection,
    results: multiprocessing.connection.Connection,
    workers: int,
    streams: int,
    seconds: float,
    encrypted: bool,
) -> None:
    """The middle: a real orchestrator, whose CPU time is measured."""
    results.send(uvloop.run(_orchestrate(pipe, workers, streams, seconds, encrypted)))


async def _orchestrate(
    pipe: multiprocessing.connection.Connection, workers: int, streams: int, seconds: float, encrypted: bool
) -> tuple[float, int]:
    groups = streams // GROUP_SIZE
    config = Config.model_validate(
        {
            "model": {"checkpoint": "."},
            "rollout": {"groups": groups, "group_size": GROUP_SIZE, "max_tokens_per_turn": 1 << 20},
            "engine": {"max_pending": streams, "max_context_tokens": 1 << 21, "kv_blocks": 1 << 17},
            "seeding": {"window_s": 3600, "reserved_engines": max(1, workers - 1)},
        }
    )

    def make_providers(endpoint: Endpoint, now_ns: Callable[[], int]) -> Mapping[str, Provider]:
        context = ProviderContext(
            run=RUN,
            run_dir=Path("."),
            endpoint=endpoint,
            worker_command=(),
            host_command=(),
            now_ns=now_ns,
            acquire_timeout_s=5,
            release_timeout_s=5,
        )
        providers = {
            name: StreamingWorkers(name, ProviderSettings.model_validate({}), context) for name in ("trainer", "spot")
        }
        for provider in providers.values():
            provider.pipe = pipe
        providers["spot"].workers = workers - 1
        return providers

    welcome = wire.Welcome("", 0, 0.5, FLUSH_S, 10.0, {}, {}, "", run=RUN)
    plan = Plan(steps=1, groups=groups, group_size=GROUP_SIZE)
    with tempfile.TemporaryDirectory() as directory:
        kept = RunDirectory(Path(directory))
        journal = kept.begin_journal(config.journal)
        orchestrator = Orchestrator(
            config,
            Scheduler(plan, compose.limits(config), compose.policies(config), 0),
            journal,
            Wiring(
                make_providers=make_providers,
                make_environment=lambda: EndlessEnvironment(NoSettings()),
                stop_token_ids=(),
                welcome=welcome,
                secrets=RunSecrets.of(kept.path),
                kept=kept,
                certificate=run_certificate(kept.path, ["localhost"]) if encrypted else None,
            ),
        )
        run = asyncio.create_task(orchestrator.run())
        await asyncio.sleep(WARM_UP_S)
        cpu_s, tokens = time.process_time(), accepted(orchestrator)
        await asyncio.sleep(seconds)
        cpu_s, tokens = time.process_time() - cpu_s, accepted(orchestrator) - tokens
        orchestrator.stop("measured")
        await run
        journal.close()
    return cpu_s, tokens


def accepted(orchestrator: Orchestrator) -> int:
    return sum(turn.accepted for turn in orchestrator.scheduler.turns.live.values())


def upstream(ports: multiprocessing.connection.Connection) -> None:
    """A streaming completion server: one event a token."""

    async def complete(request: Any) -> StreamingResponse:
        async def events() -> AsyncIterator[bytes]:
            due_s = asyncio.get_running_loop().time()
            while True:
                yield EVENT
                due_s += 1 / TOKENS_PER_S
                await asyncio.sleep(due_s - asyncio.get_running_loop().time())

        return StreamingResponse(events(), media_type="text/event-stream")

    _serve(Starlette(routes=[Route("/", complete)]), ports)


def relay(
    ports: multiprocessing.connection.Connection,
    results: multiprocessing.connection.Connection,
    port: int,
    seconds: float,
) -> None:
    """The middle: relays each event as it comes, and measures its own CPU time."""
    relayed = [0]
    session: list[aiohttp.ClientSession] = []

    async def complete(request: Any) -> StreamingResponse:
        if not session:
            connector = aiohttp.TCPConnector(limit=0)
            session.append(aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None)))

        async def events() -> AsyncIterator[bytes]:
            async with session[0].get(f"http://127.0.0.1:{port}/") as answer:
                async for chunk in answer.content.iter_any():
                    relayed[0] += chunk.count(b"data: ")
                    yield chunk

        return StreamingResponse(events(), media_type="text/event-stream")

    async def measure(request: Any) -> StreamingResponse:
        cpu_s, tokens = time.process_time(), relayed[0]
        await asyncio.sleep(seconds)
        results.send((time.process_time() - cpu_s, relayed[0] - tokens))
        return StreamingResponse(iter([b"done"]))

    _serve(Starlette(routes=[Route("/", complete), Route("/measure", measure)]), ports)


def _serve(app: Starlette, ports: multiprocessing.connection.Connection) -> None:
    listener = socket.create_server(("127.0.0.1", 0), backlog=2048)
    ports.send(listener.getsockname()[1])
    config = uvicorn.Config(app, loop="uvloop", http="httptools", log_level="critical", access_log=False)
    uvicorn.Server(config).run(sockets=[listener])


def consume(port: int, streams: int) -> None:
    """The clients: open every stream, then ask for the measurement."""

    async def read(session: aiohttp.ClientSession) -> None:
        async with session.get(f"http://127.0.0.1:{port}/") as answer:
            async for _ in answer.content.iter_any():
                pass

    async def everything() -> None:
        connector = aiohttp.TCPConnector(limit=0)
        timeout = aiohttp.ClientTimeout(total=None)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
            readers = [asyncio.create_task(read(session)) for _ in range(streams)]
            await asyncio.sleep(WARM_UP_S)
            async with session.get(f"http://127.0.0.1:{port}/measure") as answer:
                await answer.read()
            for reader in readers:
                reader.cancel()

    uvloop.run(everything())


def measure_frames(workers: int, streams: int, seconds: float, *, encrypted: bool = False) -> tuple[float, int]:
    """(CPU seconds, tokens) of the orchestrator, with the streams spread over so many workers."""
    near, far = multiprocessing.Pipe()
    results, answer = multiprocessing.Pipe()
    return _with_processes(
        results,
        [
            multiprocessing.Process(target=stream_frames, args=(far, workers, -(-streams // workers))),
            multiprocessing.Process(target=orchestrate, args=(near, answer, workers, streams, seconds, encrypted)),
        ],
    )


def measure_sse(streams: int, seconds: float) -> tuple[float, int]:
    """(CPU seconds, tokens) of the relay."""
    results, answer = multiprocessing.Pipe()
    ports, tell = multiprocessing.Pipe()
    source = multiprocessing.Process(target=upstream, args=(tell,))
    source.start()
    middle = multiprocessing.Process(target=relay, args=(tell, answer, ports.recv(), seconds))
    middle.start()
    clients = multiprocessing.Process(target=consume, args=(ports.recv(), streams))
    return _with_processes(results, [clients], running=[source, middle])


def _with_processes(
    results: multiprocessing.connection.Connection,
    processes: list[multiprocessing.Process],
    running: list[multiprocessing.Process] | None = None,
) -> tuple[float, int]:
    for process in processes:
        process.start()
    try:
        if not results.poll(120):
            raise TimeoutError("no measurement within 120 s")
        return results.recv()
    finally:
        for process in [*processes, *(running or [])]:
            process.kill()
            process.join()


def compare(streams: int, seconds: float, rounds: int) -> dict[str, Any]:
    """Medians over `rounds`, each with everything in turn."""
    workers = -(-streams // STREAMS_PER_WORKER)
    rows: list[dict[str, float]] = []
    for _ in range(rounds):
        frames_s, frames = measure_frames(workers, streams, seconds)
        tls_s, over_tls = measure_frames(workers, streams, seconds, encrypted=True)
        one_s, one = measure_frames(1, streams, seconds)
        events_s, events = measure_sse(streams, seconds)
        rows.append(
            {
                "frame_us_per_token": frames_s / frames * 1e6,
                "frame_tokens_per_s": frames / seconds,
                "sse_us_per_token": events_s / events * 1e6,
                "sse_tokens_per_s": events / seconds,
                "ratio": (events_s / events) / (frames_s / frames),
                "tls_us_per_token": tls_s / over_tls * 1e6,
                "tls_ratio": (tls_s / over_tls) / (frames_s / frames),
                "one_connection_us_per_token": one_s / one * 1e6,
                "one_connection_ratio": (events_s / events) / (one_s / one),
            }
        )
    return {"workers": workers, **{key: sorted(row[key] for row in rows)[len(rows) // 2] for key in rows[0]}}


def main(arguments: Arguments) -> dict[str, Any]:
    seconds, rounds = (2.0, 1) if arguments.quick else (10.0, 3)
    by_streams = {str(n): compare(n, seconds, rounds) for n in (64, 1000)}
    return {**by_streams["64"], "streams": by_streams}


if __name__ == "__main__":
    multiprocessing.set_start_method("spawn")
    emit(main(args := parse_arguments(__doc__)), args)
