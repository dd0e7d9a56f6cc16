"""What a token costs on the way from workers to accepted, journaled tokens, against relaying server-sent events.

Ours is the orchestrator's own process, live and whole (`_streaming.py`): gateway, decoding, the core's acceptance, the
journal and the environments' loops. Stand-ins in processes of their own stream to it over loopback as workers' agents
do (`_stand_ins.py`): sixteen streams a worker, 50 tokens/s each, turns of log-normal length that end and begin, one end
in four a tool call. The other side relays one server-sent event a token from a streaming upstream to a client, with
Starlette, uvicorn and aiohttp (uvloop, httptools), and does nothing else with it; it is at its best with 64 streams,
and `ratio` is over that at every size. What counts is the CPU time of the process in the middle.

By number of streams:

- frame_us_per_token, ratio: CPU time of the orchestrator a token, and how many times as much the relay takes;
- tokens_per_s, core_share, generator_core_share: what was accepted, the orchestrator's share of a core, and that of the
  busiest process of stand-ins: near 1, a machine cannot feed as many streams, or cannot carry them;
- delay_ms_p50, _p99, first_token_ms_p99, turn_end_ms_p99: from a token's production to its acceptance; of first tokens
  of turns, and of last ones;
- flush_interval_ms: how often the workers were told to send at the end;
- drained: whether all that was produced was accepted in the end. A connection that broke would be why not;
- carried: whether all streams got in, what they produced was accepted as fast, all of it in the end, and the stand-ins
  had room on their cores. If not, `bound` says what was full: the orchestrator's core, that of the stand-ins
  (`generator`), or all cores of the machine; the other figures are those of what got in. Such a size is not measured
  again, and larger ones are not tried;
- streams_in, accepted_share, machine_share: streams that got in; what was accepted of what was produced meanwhile; the
  use of all cores of the machine, by whomever;
- tls_…: over TLS, as beyond loopback, `tls_ratio` what that costs over plain text; one_connection_…: with all streams
  on one worker. Both of 64 and 1,000 streams only.

`streams_carried` is the largest number of streams that was carried. `--streams 64,1000` measures these alone; all of
them, three times, take more than ten minutes.
"""

import asyncio
import socket
import time
from collections.abc import AsyncIterator
from multiprocessing.connection import Connection as Pipe
from statistics import median
from typing import Any, NamedTuple

import aiohttp
import psutil
import uvicorn
import uvloop
from starlette.applications import Starlette
from starlette.responses import StreamingResponse
from starlette.routing import Route

from benchmarks._common import Arguments, Figures, benchmark, multiple_of, option
from benchmarks._processes import Child
from benchmarks._stand_ins import TOKENS_PER_S, Look, Rest, Tell
from benchmarks._streaming import (
    STREAMS_PER_WORKER,
    Acceptances,
    StandInFleet,
    comes_to,
    percentile_ms,
    streamed_run,
    streaming_config,
    used,
)
from elastic.compose.processes import run_loop

SIZES_QUICK, SIZES = (64, 1_000), (64, 1_000, 4_000, 16_384)
COMPARED = 64
"""The number of streams at which the relay is at its best."""
TWICE = (64, 1_000)
"""Sizes that are measured over TLS and with one connection, too."""
PROCESS_STREAMS = 8_192
"""Streams that one process of stand-ins feeds."""
SAMPLED_FRAMES_PER_S = 500.0
WARM_UP_S = 1.5
SETTLE_S = 3.0
"""Until the flush interval suits the load."""
STARTED_SHARE = 0.97
"""Of the streams. Some are at a tool at any moment."""
START_S, DRAIN_S, END_S = 150.0, 60.0, 30.0
"""Longest times, for machines that are busy with other things."""
ORCHESTRATED_S = 2 * (START_S + DRAIN_S)
KEPT_UP_SHARE = 0.97
"""Of what is produced in a time so much is accepted in it, or a backlog grows."""
FULL_SHARE, GENERATOR_SHARE_MAX = 0.95, 0.9
"""Of a core: beyond the first it is full; beyond the second stand-ins may be late by themselves."""
EVENT = (
    b'data: {"id":"cmpl-1","object":"text_completion",'
    b'"choices":[{"index":0,"text":"x","token_ids":[17],"logprob":-0.51}]}\n\n'
)
"""One token as OpenAI-compatible servers send it, with its id and log-probability."""


class Frames(NamedTuple):
    """What the orchestrator did under so many streams."""

    cpu_s: float
    wall_s: float
    tokens: int
    produced: int
    streams_in: int
    started: bool
    """Whether all streams got in."""
    generator_core_share: float
    machine_share: float
    delay_ms_p50: float | None
    delay_ms_p99: float | None
    first_token_ms_p99: float | None
    turn_end_ms_p99: float | None
    flush_interval_ms: float
    drained: bool

    @property
    def us_per_token(self) -> float:
        return self.cpu_s / max(1, self.tokens) * 1e6

    @property
    def core_share(self) -> float:
        return self.cpu_s / self.wall_s

    @property
    def accepted_share(self) -> float:
        return self.tokens / max(1, self.produced)

    @property
    def carried(self) -> bool:
        kept_up = self.started and self.drained and self.accepted_share >= KEPT_UP_SHARE
        return kept_up and self.generator_core_share <= GENERATOR_SHARE_MAX

    @property
    def bound(self) -> str | None:
        """What kept it from carrying the streams; None where it carried them."""
        if self.carried:
            return None
        if self.core_share > FULL_SHARE:
            return "orchestrator"
        if self.generator_core_share > GENERATOR_SHARE_MAX:
            return "generator"
        return "machine" if self.machine_share > FULL_SHARE else "unknown"


def orchestrate(results: Pipe, workers: int, streams: int, seconds: float, encrypted: bool) -> None:
    """The middle: a real orchestrator, whose CPU time is measured."""
    run_loop(_orchestrate(results, workers, streams, seconds, encrypted))


async def _orchestrate(results: Pipe, workers: int, streams: int, seconds: float, encrypted: bool) -> None:
    """Sends its figures before it ends, for an orchestrator under too much may take long to."""
    config = streaming_config(workers, streams)
    fleet = StandInFleet(-(-streams // PROCESS_STREAMS), -(-streams // workers))
    frames_per_s = workers / config.scheduler.flush_interval_s
    acceptances = Acceptances(stride=max(1, round(frames_per_s / SAMPLED_FRAMES_PER_S)))
    async with streamed_run(config, workers, fleet, encrypted=encrypted, decided=acceptances.note) as run:
        started = await comes_to(run.streaming, STARTED_SHARE * streams, START_S)
        await asyncio.sleep(SETTLE_S)
        before = await fleet.ask(Look())
        acceptances.noting = True
        psutil.cpu_percent()
        began_s, cpu_s, tokens = time.monotonic(), time.process_time(), run.accepted
        await asyncio.sleep(seconds)
        wall_s, cpu_s, tokens = time.monotonic() - began_s, time.process_time() - cpu_s, run.accepted - tokens
        machine_share = psutil.cpu_percent() / 100
        acceptances.noting = False
        streams_in = run.streaming()
        use = used(before, await fleet.ask(Look()))
        rested = await fleet.ask(Rest())
        produced, lost = sum(one.produced for one in rested), sum(one.lost for one in rested)
        drained = await comes_to(lambda: run.accepted, produced, DRAIN_S)
        schedules = [schedule for told in await fleet.ask(Tell()) for schedule in told]
        delays = acceptances.delays(schedules)
        frames = Frames(
            cpu_s,
            wall_s,
            tokens,
            use.produced,
            streams_in,
            started,
            use.core_share,
            machine_share,
            percentile_ms(delays.tokens_s, 50),
            percentile_ms(delays.tokens_s, 99),
            percentile_ms(delays.firsts_s, 99),
            percentile_ms(delays.lasts_s, 99),
            max(one.flush_interval_s for one in rested) * 1e3,
            drained,
        )
        if run.accepted > produced or (frames.accepted_share >= KEPT_UP_SHARE and not (drained or lost)):
            raise AssertionError(f"{run.accepted} tokens were accepted of {produced} that were produced")
        results.send(frames)


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


def relay(told: Pipe, port: int, streams: int, seconds: float) -> None:
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
        told.send((time.process_time() - cpu_s, relayed - tokens))

    _serve(Starlette(routes=[Route("/", complete)]), told)


def _session() -> aiohttp.ClientSession:
    timeout = aiohttp.ClientTimeout(total=None)
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout)


def _serve(app: Starlette, ports: Pipe) -> None:
    listener = socket.create_server(("127.0.0.1", 0), backlog=2048)
    ports.send(listener.getsockname()[1])
    config = uvicorn.Config(app, loop="uvloop", http="httptools", log_level="critical", access_log=False)
    uvicorn.Server(config).run(sockets=[listener])


def consume(_: Pipe, port: int, streams: int) -> None:
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


def measure_frames(workers: int, streams: int, seconds: float, *, encrypted: bool = False) -> Frames:
    """The orchestrator's figures, with the streams spread over so many workers."""
    given = workers, streams, seconds, encrypted
    with Child(orchestrate, *given, daemon=False, ends_within_s=END_S) as run:
        return run.hear(ORCHESTRATED_S)


def measure_sse(streams: int, seconds: float) -> tuple[float, int]:
    """(CPU seconds, tokens) of the relay."""
    with (
        Child(upstream) as source,
        Child(relay, source.hear(), streams, seconds) as middle,
        Child(consume, middle.hear(), streams),
    ):
        return middle.hear()


def compare(streams: int, seconds: float, sse_us_per_token: float, *, encrypted: bool, alone: bool) -> Figures:
    """One round's figures of so many streams: over TLS, and with a worker `alone`, if so said."""
    workers = -(-streams // STREAMS_PER_WORKER)
    frames = measure_frames(workers, streams, seconds)
    figures: Figures = {
        "frame_us_per_token": frames.us_per_token,
        "ratio": sse_us_per_token / frames.us_per_token,
        "tokens_per_s": frames.tokens / frames.wall_s,
        "core_share": frames.core_share,
        "generator_core_share": frames.generator_core_share,
        "machine_share": frames.machine_share,
        "delay_ms_p50": frames.delay_ms_p50,
        "delay_ms_p99": frames.delay_ms_p99,
        "first_token_ms_p99": frames.first_token_ms_p99,
        "turn_end_ms_p99": frames.turn_end_ms_p99,
        "flush_interval_ms": frames.flush_interval_ms,
        "streams_in": frames.streams_in,
        "accepted_share": frames.accepted_share,
        "drained": frames.drained,
        "carried": frames.carried,
        "bound": frames.bound,
    }
    tls = one = None
    if encrypted and frames.carried:
        tls = measure_frames(workers, streams, seconds, encrypted=True).us_per_token
    if alone and frames.carried:
        one = measure_frames(1, streams, seconds).us_per_token
    return figures | {
        "tls_us_per_token": tls,
        "tls_ratio": tls and tls / frames.us_per_token,
        "one_connection_us_per_token": one,
        "one_connection_ratio": one and sse_us_per_token / one,
    }


def middle(rounds: list[Figures]) -> Figures:
    """Medians; what one round lacks, or a truth that one round does not have, holds for all."""
    figures: Figures = {}
    for key in rounds[0]:
        values = [one[key] for one in rounds]
        if any(isinstance(value, str) for value in values):
            figures[key] = next(value for value in reversed(values) if value is not None)
            continue
        told = None not in values and not isinstance(values[0], bool)
        figures[key] = median(values) if told else min(values, key=bool)
    return figures


def main(arguments: Arguments) -> Figures:
    seconds, rounds, sizes = (2.0, 1, SIZES_QUICK) if arguments.quick else (10.0, 3, SIZES)
    events: list[dict[str, float]] = []
    by_size: dict[int, list[Figures]] = {size: [] for size in sorted(arguments.streams or sizes)}
    too_many = max(by_size) + 1
    for _ in range(rounds):
        events_s, relayed = measure_sse(COMPARED, seconds)
        events.append({"sse_us_per_token": events_s / relayed * 1e6, "sse_tokens_per_s": relayed / seconds})
        for size in [size for size in by_size if size < too_many]:
            alone = size == COMPARED if arguments.quick else size in TWICE
            figures = compare(size, seconds, events[-1]["sse_us_per_token"], encrypted=size in TWICE, alone=alone)
            by_size[size].append(figures)
            if not figures["carried"]:
                too_many = size
                break
    streams = {str(size): middle(figures) if figures else None for size, figures in by_size.items()}
    best = streams.get(str(COMPARED)) or {}
    return {
        "workers": -(-COMPARED // STREAMS_PER_WORKER),
        **best,
        "frame_tokens_per_s": best.get("tokens_per_s"),
        **middle(events),
        "streams_carried": max((size for size, figures in by_size.items() if figures and size < too_many), default=0),
        "streams": streams,
    }


if __name__ == "__main__":
    benchmark(
        __doc__,
        main,
        option(
            "--streams",
            type=lambda text: [multiple_of(1)(size) for size in text.split(",")],
            metavar="N,N,…",
            help=f"these numbers of streams alone; without it {', '.join(map(str, SIZES))}",
        ),
    )
