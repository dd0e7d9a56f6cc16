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
import contextlib
import multiprocessing
import socket
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp
import uvicorn
import uvloop
from _common import Arguments, emit, parse_arguments
from _orchestrated import OwnWorkers, orchestrator
from starlette.applications import Starlette
from starlette.responses import StreamingResponse
from starlette.routing import Route

from elastic.compose.plan import TRAINER_PROVIDER
from elastic.config import Config
from elastic.core.types import Account, Capabilities, Chunk, Chunks
from elastic.protocol import wire
from elastic.protocol.connection import ConnectionLost
from elastic.protocol.sampled import pack_ids, pack_logprobs
from elastic.protocol.tls import run_certificate
from elastic.runtime.journal import RunDirectory
from elastic.runtime.orchestrator import Orchestrator
from elastic.testing.faults.shell.models import ModelEnvironment, NoSettings
from elastic.worker.connection import Ticket, dial

TOKENS_PER_S = 50
STREAMS_PER_WORKER = 16
GROUP_SIZE = 8
WARM_UP_S = 1.5
PATIENCE_S = 120.0
BEAT_EVERY = 10
"""Flushes."""
CAPABILITIES = Capabilities(engine="stream", replayable_sampling=True, max_context_tokens=1 << 20, device="cpu")
EVENT = (
    b'data: {"id":"cmpl-1","object":"text_completion",'
    b'"choices":[{"index":0,"text":"x","token_ids":[17],"logprob":-0.51}]}\n\n'
)
"""One token as OpenAI-compatible servers send it, with its id and log-probability."""


def stream_frames(pipe: Pipe, workers: int, streams: int) -> None:
    """The workers' side: of each a frame each flush, with what every running turn produced since the last."""
    uvloop.run(_stream_frames(pipe, workers, streams))


async def _stream_frames(pipe: Pipe, workers: int, streams: int) -> None:
    async with asyncio.TaskGroup() as tasks:
        for _ in range(workers):
            tasks.create_task(_be_worker(await asyncio.to_thread(pipe.recv), streams))


async def _be_worker(ticket: Ticket, streams: int) -> None:
    """One worker, which has room for so many streams."""
    connection, welcome = await dial(ticket, "", PATIENCE_S)
    connection.send(wire.Ready(CAPABILITIES, 0))
    produced: dict[int, int] = {}
    born_ns = time.monotonic_ns()

    def hear(orders: list[wire.FromOrchestrator]) -> None:
        produced.update({order.slot: 0 for order in orders if isinstance(order, wire.Generate)})

    async def speak() -> None:
        due_s = asyncio.get_running_loop().time()
        per_flush = TOKENS_PER_S * welcome.flush_interval_s
        for number in range(1 << 30):
            if number % BEAT_EVERY == 0:
                age_ns = time.monotonic_ns() - born_ns
                accounts_ns = {Account.DECODE: age_ns}
                connection.send(wire.Heartbeat(streams, 0, len(produced), age_ns, accounts_ns, 0, 0.0, 0, 0))
            count = int((number + 1) * per_flush) - int(number * per_flush)
            if produced:
                tokens = count * len(produced)
                chunks = Chunks.of(Chunk(slot, start, count, 0) for slot, start in produced.items())
                connection.send(wire.Tokens(chunks, pack_ids([17] * tokens), pack_logprobs([-0.51] * tokens)))
            for slot in produced:
                produced[slot] += count
            due_s += welcome.flush_interval_s
            await asyncio.sleep(due_s - asyncio.get_running_loop().time())

    speaking = asyncio.create_task(speak())
    try:
        connection.watch(PATIENCE_S)
        await connection.listen(hear)
    except ConnectionLost:
        speaking.cancel()


def orchestrate(pipe: Pipe, results: Pipe, workers: int, streams: int, seconds: float, encrypted: bool) -> None:
    """The middle: a real orchestrator, whose CPU time is measured."""
    results.send(uvloop.run(_orchestrate(pipe, workers, streams, seconds, encrypted)))


async def _orchestrate(pipe: Pipe, workers: int, streams: int, seconds: float, encrypted: bool) -> tuple[float, int]:
    config = Config.model_validate(
        {
            "model": {"checkpoint": "."},
            "run": {"steps": 1},
            "rollout": {"groups": streams // GROUP_SIZE, "group_size": GROUP_SIZE, "max_tokens_per_turn": 1 << 20},
            "trainer": {"updates_per_step": 1},
            "engine": {"max_pending": streams, "max_context_tokens": 1 << 21, "kv_blocks": 1 << 17},
            "seeding": {"window_s": 3600, "reserved_engines": max(1, workers - 1)},
        }
    )

    async def elsewhere(ticket: Ticket) -> None:
        pipe.send(ticket)
        await asyncio.Event().wait()

    providers = [OwnWorkers(TRAINER_PROVIDER, 1, elsewhere), OwnWorkers("spot", workers - 1, elsewhere)]
    with tempfile.TemporaryDirectory() as directory:
        kept = RunDirectory(Path(directory))
        journal = kept.begin_journal(config.journal)
        certificate = run_certificate(kept.path, ["localhost"]) if encrypted else None
        ours = orchestrator(config, kept, journal, providers, partial(ModelEnvironment, NoSettings()), certificate)
        run = asyncio.create_task(ours.run())
        await asyncio.sleep(WARM_UP_S)
        cpu_s, tokens = time.process_time(), accepted(ours)
        await asyncio.sleep(seconds)
        cpu_s, tokens = time.process_time() - cpu_s, accepted(ours) - tokens
        ours.stop("measured")
        await run
        journal.close()
    return cpu_s, tokens


def accepted(orchestrator: Orchestrator) -> int:
    return sum(turn.accepted for turn in orchestrator.scheduler.turns.live.values())


def upstream(ports: Pipe) -> None:
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


def relay(ports: Pipe, results: Pipe, port: int, streams: int, seconds: float) -> None:
    """The middle: relays each event as it comes, and measures its own CPU time once all streams are open."""
    relayed = opened = 0
    measuring: asyncio.Task[None] | None = None
    session: aiohttp.ClientSession | None = None

    async def complete(request: Any) -> StreamingResponse:
        nonlocal session
        upstream = session = session or _session()

        async def events() -> AsyncIterator[bytes]:
            nonlocal relayed, opened, measuring
            async with upstream.get(f"http://127.0.0.1:{port}/") as answer:
                opened += 1
                if opened == streams:
                    measuring = asyncio.create_task(measure())
                async for chunk in answer.content.iter_any():
                    relayed += chunk.count(b"data: ")
                    yield chunk

        return StreamingResponse(events(), media_type="text/event-stream")

    async def measure() -> None:
        await asyncio.sleep(WARM_UP_S)
        cpu_s, tokens = time.process_time(), relayed
        await asyncio.sleep(seconds)
        results.send((time.process_time() - cpu_s, relayed - tokens))

    _serve(Starlette(routes=[Route("/", complete)]), ports)


def _session() -> aiohttp.ClientSession:
    timeout = aiohttp.ClientTimeout(total=None)
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout)


def _serve(app: Starlette, ports: Pipe) -> None:
    listener = socket.create_server(("127.0.0.1", 0), backlog=2048)
    ports.send(listener.getsockname()[1])
    config = uvicorn.Config(app, loop="uvloop", http="httptools", log_level="critical", access_log=False)
    uvicorn.Server(config).run(sockets=[listener])


def consume(port: int, streams: int) -> None:
    """The clients, which read on for ever."""

    async def read(session: aiohttp.ClientSession) -> None:
        async with session.get(f"http://127.0.0.1:{port}/") as answer:
            async for _ in answer.content.iter_any():
                pass

    async def everything() -> None:
        async with _session() as session, asyncio.TaskGroup() as readers:
            for _ in range(streams):
                readers.create_task(read(session))

    uvloop.run(everything())


def measure_frames(workers: int, streams: int, seconds: float, *, encrypted: bool = False) -> tuple[float, int]:
    """(CPU seconds, tokens) of the orchestrator, with the streams spread over so many workers."""
    near, far = multiprocessing.Pipe()
    results, answer = multiprocessing.Pipe()
    speaking = _running(stream_frames, far, workers, -(-streams // workers))
    with speaking, _running(orchestrate, near, answer, workers, streams, seconds, encrypted):
        return _heard(results)


def measure_sse(streams: int, seconds: float) -> tuple[float, int]:
    """(CPU seconds, tokens) of the relay."""
    results, answer = multiprocessing.Pipe()
    ports, tell = multiprocessing.Pipe()
    with contextlib.ExitStack() as processes:
        processes.enter_context(_running(upstream, tell))
        processes.enter_context(_running(relay, tell, answer, _heard(ports), streams, seconds))
        processes.enter_context(_running(consume, _heard(ports), streams))
        return _heard(results)


@contextlib.contextmanager
def _running(work: Callable[..., None], *arguments: object) -> Iterator[None]:
    """In a process of its own."""
    process = multiprocessing.Process(target=work, args=arguments)
    process.start()
    try:
        yield
    finally:
        process.kill()
        process.join()


def _heard(pipe: Pipe) -> Any:
    if not pipe.poll(PATIENCE_S):
        raise TimeoutError(f"a process said nothing for {PATIENCE_S:g} s")
    return pipe.recv()


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
    return {"workers": workers, **{key: median(row[key] for row in rows) for key in rows[0]}}


def main(arguments: Arguments) -> dict[str, Any]:
    seconds, rounds = (2.0, 1) if arguments.quick else (10.0, 3)
    by_streams = {str(n): compare(n, seconds, rounds) for n in (64, 1000)}
    return {**by_streams["64"], "streams": by_streams}


if __name__ == "__main__":
    multiprocessing.set_start_method("spawn")
    emit(main(args := parse_arguments(__doc__)), args)
