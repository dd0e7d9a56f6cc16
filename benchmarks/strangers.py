"""What unauthenticated peers can do to a live run: floods against its orchestrator, its relay and a serving host, all
at once.

The run is `elastic run` as a user starts it, with a real serving model on a host, weights over HTTP, and 1,024 file
descriptors. While unauthenticated peers attack, a worker is killed: its successor must get in. Attackers run in
processes of their own at a lower priority, since unauthenticated peers would not share these processors. By attack
(with `--quick` three come at once, and have one set of figures):

- rss_growth_mb: how far the memory of any of the run's processes under attack grew;
- loop_stall_s_max: the longest wait of a polite client for an answer, from any of the three;
- workers_locked_out: killed workers whose successors did not load weights while the attack went on;
- run_ended: whether the run did.

Then crowds from one address, while others ask from elsewhere (`_crowds.py`): slow bodies and streams at the API,
slow bodies at a relay, and 1,500 idle connections that dial again at once, at the API, the run's relay and its host.
Under `tls_evictions` a gateway alone, and 1,600 half TLS handshakes a second (`_tls_evictions.py`).

    python benchmarks/strangers.py [--quick] [--json]
"""

import asyncio
import contextlib
import json
import os
import resource
import secrets
import signal
import subprocess
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks._common import Arguments, Figures, benchmark
from benchmarks._crowds import OpenPort, attackers, crowds
from benchmarks._runs import CommandRun, RunFailed, sets
from benchmarks._shapes import write_policy
from benchmarks._tls_evictions import tls_evictions
from elastic.core import events as e
from elastic.protocol import wire
from elastic.runtime.journal import RunDirectory
from elastic.system.machine import raise_descriptor_limit

DESCRIPTORS = 1024
START_TIMEOUT_S, END_TIMEOUT_S = 90.0, 30.0
JOIN_TIMEOUT_S = 30.0
"""Boots and all, while unauthenticated peers take their share of two cores."""
PROBE_INTERVAL_S, PROBE_TIMEOUT_S = 0.05, 10.0
MB = 1 << 20
QUICK_S = 2.0
"""Of each crowd."""
APART = ("slow_posts_300", "relay_puts_300")
"""Crowds at different servers, the API's and a relay."""
ASKED = b"GET /load HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
SETTINGS = (
    "run.steps=100000",
    "weights.relay=http",
    "engine.pacing.decode_step_s={1=0.06}",
    "seeding.reserved_engines=2",
    "providers.reserved.max_workers=1",
    "providers.serving.hosts=1",
    "providers.serving.max_workers=1",
    "providers.serving.executor={kv_pages=128}",
    "providers.serving.load.share=0.02",
)


@dataclass(frozen=True)
class Target:
    """One listening socket of the run, and the process behind it."""

    name: str
    port: int
    process: psutil.Process


class AttackedRun(CommandRun):
    def __init__(self, directory: Path) -> None:
        settings = sets([*SETTINGS, f"model.checkpoint={write_policy(directory / 'policy')}"])
        example = ("examples/frozenlake.toml", "--providers", "reserved,serving")
        super().__init__(directory / "runs", [*example, *settings], _few_descriptors)

    async def targets(self) -> list[Target]:
        """Once workers of both providers serve: what listens."""
        self.until("workers of both providers", lambda: len(self._loaded()) >= 2, START_TIMEOUT_S)
        orchestrator = psutil.Process(self.process.pid)
        targets = [Target(await _kind(port), port, orchestrator) for port in _listening(orchestrator)]
        for child in orchestrator.children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                targets += [Target("serving_host", port, child) for port in _listening(child)]
        if (found := sorted(target.name for target in targets)) != ["orchestrator", "relay", "serving_host"]:
            raise RuntimeError(f"the run listens as {found}")
        return targets

    def kill_worker(self) -> Callable[[], bool]:
        """Kill the reserved worker; whether its successor has loaded weights.

        One that had done less would count as a failure of its provider, which is left alone for longer each time.
        """
        loaded = len(self._loaded())
        leases = sorted(self.run_dir.glob("leases/reserved-*.json"), key=lambda path: path.stat().st_mtime)
        (process,) = json.loads(leases[-1].read_text())["processes"].values()
        os.kill(process["pid"], signal.SIGKILL)
        return lambda: len(self._loaded()) > loaded

    def discard(self) -> None:
        self.process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(END_TIMEOUT_S)
        super().discard()

    def _loaded(self) -> set[str]:
        """The workers that have ever put weights from the relay in force."""
        run = RunDirectory(self.run_dir)
        if not run.journal_paths():
            return set()
        with run.newest_journal() as journal:
            applied = [event for _, event in journal.events_of("WeightsApplied")]
        return {event.worker for event in applied if isinstance(event, e.WeightsApplied)}


def _few_descriptors() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (DESCRIPTORS, DESCRIPTORS))


def _listening(process: psutil.Process) -> list[int]:
    return [c.laddr.port for c in process.net_connections("tcp") if c.status == psutil.CONN_LISTEN]


async def _kind(port: int) -> str:
    return "relay" if (await _http(port)).startswith(b"HTTP/1.1 401") else "orchestrator"


async def _exchange(port: int, sending: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(sending)
        return await reader.read(4096)
    finally:
        writer.close()


async def _http(port: int) -> bytes:
    with contextlib.suppress(ConnectionError):
        return await _exchange(port, b"GET /blobs HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
    return b""


def _hello() -> bytes:
    return wire.encode(wire.Hello(wire.PROTOCOL_VERSION, "unknown", secrets.token_urlsafe(16), False, 0, "", "a-run"))


async def _probe(target: Target, stalls: list[float]) -> None:
    """Ask again and again, and note how long each answer took; one that never came took `PROBE_TIMEOUT_S`."""
    sending = _hello() if target.name == "orchestrator" else ASKED
    while True:
        started_s = time.monotonic()
        answered = b""
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                answered = await _exchange(target.port, sending)
        stalls.append(time.monotonic() - started_s if answered else PROBE_TIMEOUT_S)
        await asyncio.sleep(PROBE_INTERVAL_S)


# Unauthenticated peers. Each goes on until it is told to stop, or has done what it came for.


async def _flood(port: int, opening: bytes, piece: bytes, total_bytes: int, pause_s: float = 0.0) -> None:
    """Send `total_bytes` in all, over as many connections as it takes."""
    sent = 0
    while sent < total_bytes:
        with contextlib.suppress(OSError):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            try:
                writer.write(opening)
                while sent < total_bytes:
                    writer.write(piece)
                    sent += len(piece)
                    await writer.drain()
                    await asyncio.sleep(pause_s)
            finally:
                writer.transport.abort()
        sent += 1
        await asyncio.sleep(0.001)


async def _crowd(port: int, size: int) -> None:
    """Keep so many connections open and say nothing."""

    async def stay() -> None:
        while True:
            with contextlib.suppress(OSError):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                await reader.read()
                writer.close()
            await asyncio.sleep(0.5)

    async with asyncio.TaskGroup() as tasks:
        for _ in range(size):
            tasks.create_task(stay())


async def _guess(port: int, count: int) -> None:
    for number in range(count):
        with contextlib.suppress(OSError):
            if number % 2:
                await _exchange(port, _hello())
            else:
                bearer = secrets.token_urlsafe(32).encode()
                await _exchange(port, b"GET /load HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer " + bearer + b"\r\n\r\n")


LINE = b"X-Filler: " + b"x" * 1012 + b"\r\n"
ATTACKS: dict[str, Callable[[int], Coroutine[Any, Any, None]]] = {
    "headers_1gib": lambda port: _flood(port, HEAD, LINE * 64, 1 << 30),
    "endless_header": lambda port: _flood(port, HEAD + b"X-Endless: ", b"x", 1 << 20, pause_s=0.001),
    "idle_1200": lambda port: _crowd(port, 1200),
    "silent_320": lambda port: _crowd(port, 320),
    "body_256mib": lambda port: _flood(
        port, HEAD + b"Content-Length: %d\r\n\r\n" % (256 * MB), bytes(64 * 1024), 256 * MB
    ),
    "wrong_tokens": lambda port: _guess(port, 5_000),
}


def _attacker(attack: str, port: int) -> None:
    os.nice(10)
    raise_descriptor_limit()
    asyncio.run(ATTACKS[attack](port))


async def _peak_mb(target: Target, peaks: dict[str, float]) -> None:
    while True:
        with contextlib.suppress(psutil.NoSuchProcess):
            peaks[target.name] = max(peaks.get(target.name, 0.0), target.process.memory_info().rss / MB)
        await asyncio.sleep(PROBE_INTERVAL_S)


async def _measure(run: AttackedRun, attacks: Sequence[str], targets: Sequence[Target], least_s: float) -> Figures:
    stalls: list[float] = []
    peaks: dict[str, float] = {}
    before = {target.name: target.process.memory_info().rss / MB for target in targets}
    locked_out = 0
    watching = [asyncio.create_task(work) for t in targets for work in (_probe(t, stalls), _peak_mb(t, peaks))]
    orders = [(attack, target.port) for attack in attacks for target in targets]
    with attackers(_attacker, orders), contextlib.suppress(RunFailed):
        ends_s = time.monotonic() + least_s
        try:
            await asyncio.to_thread(run.until, "a successor", run.kill_worker(), JOIN_TIMEOUT_S)
            await asyncio.sleep(max(0.0, ends_s - time.monotonic()))
        except TimeoutError:
            locked_out = 1
    for task in watching:
        task.cancel()
    await asyncio.gather(*watching, return_exceptions=True)
    return {
        "rss_growth_mb": round(max(peaks[name] - before[name] for name in peaks), 1),
        "loop_stall_s_max": round(max(stalls), 3),
        "workers_locked_out": locked_out,
        "run_ended": run.process.poll() is not None,
    }


async def measure(quick: bool, directory: Path) -> Figures:
    figures: Figures = {}
    at_once, least_s, crowds_s = (3, 1.0, QUICK_S) if quick else (1, 10.0, 10.0)
    with AttackedRun(directory) as run, crowds() as arms:
        targets = await run.targets()
        for begin in range(0, len(ATTACKS), at_once):
            attacks = list(ATTACKS)[begin : begin + at_once]
            rounds = [targets] if quick else [[target] for target in targets]
            found = [await _measure(run, attacks, group, least_s) for group in rounds]
            worst = {key: max(one[key] for one in found) for key in found[0]}
            figures |= dict.fromkeys(attacks, worst)
        doors = [OpenPort(one.port, ASKED, run.log) for one in targets if one.name != "orchestrator"]
        for together in crowd_rounds(arms, quick):
            measured = [
                asyncio.to_thread(arms[name].measured, crowds_s, doors if name == "redial_1500" else [])
                for name in together
            ]
            figures |= dict(zip(together, await asyncio.gather(*measured), strict=True))
    return figures


def crowd_rounds(names: Iterable[str], quick: bool) -> list[list[str]]:
    """Which crowds come together: each alone, but that with `quick` those at servers of their own share a round."""
    if not quick:
        return [[name] for name in names]
    return [list(APART), *([name] for name in names if name not in APART)]


def main(arguments: Arguments) -> Figures:
    raise_descriptor_limit()
    figures = asyncio.run(measure(arguments.quick, arguments.scratch))
    return figures | {"tls_evictions": tls_evictions(QUICK_S if arguments.quick else 10.0)}


if __name__ == "__main__":
    benchmark(__doc__, main)
