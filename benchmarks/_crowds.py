"""Crowds from one address at doors that speak HTTP, while others ask from elsewhere ten times a second.

`others_answered` is the share of the others that were answered, `others_p99_s` how long that took, `log_mb` what the
processes behind the doors have logged meanwhile.
"""

import asyncio
import contextlib
import itertools
import os
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks._common import Figures
from benchmarks._hosted import CONFIG, HostedSite, forks
from benchmarks._http_load import request
from benchmarks._processes import Child, uninterrupted
from elastic.compose.relay import weights_relay
from elastic.config import Config, validate
from elastic.protocol.api import AccessRole, NewKey
from elastic.protocol.api_client import Client
from elastic.protocol.endpoint import Address
from elastic.system.machine import raise_descriptor_limit
from elastic.weights.rights import RelayRights

HERE, ELSEWHERE, CROWD = "127.0.0.1", "127.0.0.2", "127.0.0.3"
EVERY_S, PATIENCE_S = 0.1, 5.0
GATHERS_S = 1.0
DRIP_S = 1.0
JOB_S, EVENT_EVERY_S = 600.0, 0.5
MB = 1 << 20


class OpenPort(NamedTuple):
    """Where unauthenticated peers come, what others ask there, and the log of the process behind it."""

    port: int
    asked: bytes
    log: Path


class Crowd(NamedTuple):
    """So many connections: each says its opening, then a drip a second, and comes again after a while."""

    size: int
    opening: bytes = b""
    drip: bytes = b""
    pause_s: float = 0.0


@dataclass(frozen=True)
class CrowdArm:
    """A crowd, and the doors that it comes to."""

    crowd: Crowd
    doors: Sequence[OpenPort]

    def measured(self, duration_s: float, more_doors: Sequence[OpenPort] = ()) -> Figures:
        """Return the figures of others who ask at these doors while the crowd is there."""
        doors = [*self.doors, *more_doors]
        logs = {door.log for door in doors}
        logged = sum(log.stat().st_size for log in logs)
        with attackers(_come, {(self.crowd, door.port) for door in doors}):
            time.sleep(GATHERS_S)
            took_s = asyncio.run(asked_for([lambda door=door: _ask(door) for door in doors], duration_s))
        return figures(took_s, sum(log.stat().st_size for log in logs) - logged)


@contextlib.contextmanager
def crowds() -> Iterator[dict[str, CrowdArm]]:
    """An API and a relay of their own, and crowds at these."""
    with HostedSite.up(JOB_S, JOB_S, EVENT_EVERY_S) as site, _relay() as (relay, worker_token):
        with Client(site.url, site.secret) as client:
            project = client.create_project("crowd").id
            run = client.submit(CONFIG, ["spot"], project=project).id
            viewer = client.create_key(NewKey(name="viewer", role=AccessRole.VIEWER, project=project)).secret or ""
        host = f"{HERE}:{site.port}"
        api = [
            OpenPort(site.port, request(path, host, site.secret), site.log("api")) for path in ("/healthz", "/v1/me")
        ]
        post = _slow(f"POST /v1/runs HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json", 9999)
        at = f"host: {HERE}:{relay.port}\r\nauthorization: Bearer {worker_token}"
        put = _slow(f"PUT /blobs/requests/crowd HTTP/1.1\r\n{at}", 200)
        stream = request(f"/v1/runs/{run}/events", host, viewer)
        yield {
            "slow_posts_300": CrowdArm(Crowd(300, post, b" ", EVERY_S), api),
            "streams_300": CrowdArm(Crowd(300, stream, pause_s=EVERY_S), api),
            "relay_puts_300": CrowdArm(Crowd(300, put, b"xx", EVERY_S), [relay]),
            "redial_1500": CrowdArm(Crowd(1500), api),
        }


def _slow(head: str, body_bytes: int) -> bytes:
    """The head of a request whose body is still to come."""
    return f"{head}\r\ncontent-length: {body_bytes}\r\n\r\n".encode()


async def asked_for(asks: Sequence[Callable[[], Awaitable[float]]], duration_s: float) -> list[float]:
    """Ask again and again, in turns; return how long each waited, infinite where there was no answer."""
    asked: list[asyncio.Future[float]] = []
    for ask in itertools.islice(itertools.cycle(asks), int(duration_s / EVERY_S)):
        asked.append(asyncio.ensure_future(ask()))
        await asyncio.sleep(EVERY_S)
    return sorted(await asyncio.gather(*asked))


def figures(took_s: Sequence[float], logged_bytes: int) -> Figures:
    answered = [taken_s for taken_s in took_s if taken_s < PATIENCE_S]
    return {
        "others_answered": round(len(answered) / len(took_s), 4),
        "others_p99_s": round(answered[int(0.99 * (len(answered) - 1))], 3) if answered else None,
        "log_mb": round(logged_bytes / MB, 3),
    }


async def _ask(door: OpenPort) -> float:
    began_s, answer = time.monotonic(), b""
    with contextlib.suppress(OSError, TimeoutError):
        async with asyncio.timeout(PATIENCE_S):
            reader, writer = await asyncio.open_connection(HERE, door.port, local_addr=(ELSEWHERE, 0))
            try:
                writer.write(door.asked)
                answer = await reader.read(16)
            finally:
                writer.transport.abort()
    # Who asks a run's doors has no token, and not all of them know the path: that it is told so is the answer.
    return time.monotonic() - began_s if answer[9:12] in (b"200", b"401", b"404") else float("inf")


@contextlib.contextmanager
def attackers(attack: Callable[..., None], orders: Iterable[tuple[Any, ...]]) -> Iterator[None]:
    """A process for each order, killed at the context's end."""
    processes = [forks().Process(target=attack, args=order, daemon=True) for order in orders]
    with uninterrupted():
        for process in processes:
            process.start()
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.join()


def _come(crowd: Crowd, port: int) -> None:
    os.nice(10)
    raise_descriptor_limit()

    async def come_again() -> None:
        while True:
            with contextlib.suppress(OSError):
                await _stay(crowd, port)
            await asyncio.sleep(crowd.pause_s)

    async def come() -> None:
        async with asyncio.TaskGroup() as tasks:
            for _ in range(crowd.size):
                tasks.create_task(come_again())

    asyncio.run(come())


async def _stay(crowd: Crowd, port: int) -> None:
    reader, writer = await asyncio.open_connection(HERE, port, local_addr=(CROWD, 0))
    try:
        writer.write(crowd.opening)
        while True:
            try:
                async with asyncio.timeout(DRIP_S):
                    if not await reader.read(1 << 16):
                        return
            except TimeoutError:
                writer.write(crowd.drip)
    finally:
        writer.transport.abort()


@contextlib.contextmanager
def _relay() -> Iterator[tuple[OpenPort, str]]:
    """A run's relay in a process of its own, and a worker's token."""
    with (
        tempfile.TemporaryDirectory() as directory,
        Child(_serve_relay, directory, RelayRights().owner, context=forks()) as process,
    ):
        url, crowds_token, others_token = process.hear()
        port = Address.parse(url.partition("://")[2]).port
        asked = request("/blobs", f"{HERE}:{port}", others_token)
        yield OpenPort(port, asked, Path(directory, "log")), crowds_token


def _serve_relay(told: Connection, directory: str, owner: str) -> None:
    log_here(directory)

    async def serve() -> None:
        rights = RelayRights(owner)
        config = validate(Config, {"model": {"checkpoint": "policy"}, "weights": {"relay": "http"}}, "a run")
        async with weights_relay(config, Path(directory), rights=rights) as relay:
            told.send((relay.local, rights.issue("crowd"), rights.issue("other")))
            await asyncio.Event().wait()

    asyncio.run(serve())


def log_here(directory: str) -> None:
    """Have what this process says in a file `log` of the directory."""
    log = os.open(f"{directory}/log", os.O_WRONLY | os.O_CREAT, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
