"""A joined node's part in its site: the relay that its machine has for the others, and the one that its workers use."""

import asyncio
import contextlib
import os
import shutil
import sys
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import msgspec
import structlog

from elastic.compose.processes import run_loop
from elastic.compose.runs import private
from elastic.core.types import NS_PER_S
from elastic.pool.messages import SITE_FILE_VARIABLE, ServeSite, SiteRelay, SiteServed
from elastic.pool.node_agent import RESIDENTS
from elastic.protocol.sockets import listening_socket
from elastic.protocol.tls import run_certificate
from elastic.system.files import write_whole
from elastic.system.host import here
from elastic.system.processes import inherited
from elastic.system.supervision import RecordedProcesses
from elastic.weights.errors import RelayError
from elastic.weights.relay import Relay, open_relay
from elastic.weights.shared_memory import in_memory

log = structlog.get_logger(__name__)

START_TIMEOUT_S, END_TIMEOUT_S = 60.0, 5.0
"""For a relay to be there, and to be gone once its standard input ends."""
KEPT_S, SWEEP_S = 900.0, 30.0
"""After which the relay forgets a copy, since its run may be over, and how often it looks."""
_PROBE = "site/probe"


class SiteMembership:
    """`NodeSite` of a node whose files are in `directory`. Its relay's process has a record in `records`, under the
    owner of the node's residents, and ends with this process at the latest."""

    def __init__(self, directory: Path, records: Path, pool: str, node: str) -> None:
        self._directory, self._file = directory, directory / "relay.json"
        self._recorded = RecordedProcesses(records, pool, f"{RESIDENTS} {node}", f"{node}-site")
        self._process: asyncio.subprocess.Process | None = None
        self._served: SiteServed | None = None
        self._at_work = asyncio.Lock()
        """Orders are followed one by one."""
        self._file.unlink(missing_ok=True)

    @property
    def variables(self) -> Mapping[str, str]:
        return {SITE_FILE_VARIABLE: str(self._file)}

    async def serve(self, order: ServeSite, host: str) -> SiteServed:
        async with self._at_work:
            its = self._served
            running = self._process is not None and self._process.returncode is None
            if not running or its is None or (order.beyond and its.far is None):
                await self._end()
                self._served = await self._start(host if order.beyond else "")
            return self._served or SiteServed()

    async def use(self, relay: SiteRelay | None) -> None:
        async with self._at_work:
            if relay is not None and (cause := await asyncio.to_thread(_unreachable, relay)):
                log.warning("the relay of the site is not used", relay=relay.place, cause=cause)
                relay = None
            if relay is None:
                self._file.unlink(missing_ok=True)
                return
            self._directory.mkdir(mode=0o700, exist_ok=True)
            write_whole(self._file, msgspec.json.encode(relay), durable=False)
            if self._served is not None and relay not in (self._served.near, self._served.far):
                await self._end()

    async def aclose(self) -> None:
        async with self._at_work:
            self._file.unlink(missing_ok=True)
            await self._end()

    async def _start(self, host: str) -> SiteServed:
        command = [sys.executable, "-P", "-m", "elastic.cli", "pool-site", str(self._directory), "--host", host]
        try:
            self._directory.mkdir(mode=0o700, exist_ok=True)
            self._recorded.write()
            with (self._directory / "relay.log").open("ab") as output:
                self._process = process = await asyncio.create_subprocess_exec(
                    *command,
                    env=inherited() | self._recorded.marks,
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=output,
                    start_new_session=True,
                )
            self._recorded.add("relay", process.pid)
            assert process.stdout is not None
            async with asyncio.timeout(START_TIMEOUT_S):
                line = await process.stdout.readline()
            served = msgspec.json.decode(line, type=SiteServed)
        except (OSError, TimeoutError, msgspec.DecodeError) as error:
            await self._end()
            return SiteServed(cause=f"its relay could not be started: {error}; see {self._directory / 'relay.log'}")
        log.info("has a relay for its site", relay=(served.far or served.near or SiteRelay("")).place)
        return served

    async def _end(self) -> None:
        self._served, process, self._process = None, self._process, None
        if process is None:
            return
        assert process.stdin is not None
        process.stdin.close()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), END_TIMEOUT_S)
        await self._recorded.end()


def _unreachable(relay: SiteRelay) -> str:
    """Return why a relay cannot be used, or an empty string. Blocks."""
    if "://" not in relay.place and not Path(relay.place).is_dir():
        return "there is no such directory"
    try:
        with contextlib.closing(open_relay(relay.place, relay.token or None, relay.anchor)) as its:
            its.list_keys(_PROBE)
    except RelayError as error:
        return str(error)
    return ""


def run_site_relay(directory: Path, host: str) -> int:
    """Be a relay in this machine's memory until standard input ends, for machines that reach `host` too, if it is
    given. Says on standard output where it is, as a `SiteServed`. Raises `OSError` for a host that is not here."""
    with private():
        return run_loop(_serve(directory, host))


async def _serve(directory: Path, host: str) -> int:
    blobs = directory / "blobs"
    shutil.rmtree(blobs, ignore_errors=True)
    blobs.mkdir(mode=0o700, parents=True)
    over = asyncio.Event()
    asyncio.get_running_loop().add_reader(sys.stdin.fileno(), over.set)
    with in_memory(blobs):
        relay, near = open_relay(str(blobs)), SiteRelay(str(blobs.resolve()))
        try:
            async with contextlib.AsyncExitStack() as stack:
                far = await stack.enter_async_context(_served(directory, relay, host)) if host else None
                os.write(sys.stdout.fileno(), msgspec.json.encode(SiteServed(near, far)) + b"\n")
                while not over.is_set():
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(over.wait(), SWEEP_S)
                    await asyncio.to_thread(_sweep, relay, blobs, here().unix_ns() / NS_PER_S - KEPT_S)
        finally:
            shutil.rmtree(blobs, ignore_errors=True)
    return 0


@contextlib.asynccontextmanager
async def _served(directory: Path, relay: Relay, host: str) -> AsyncIterator[SiteRelay]:
    from elastic.protocol.http_server import BodyLimits, CallerLimits, serving, too_many
    from elastic.weights.rights import RelayRights
    from elastic.weights.server import BLOB_BYTES_MAX, relay_app

    rights, certificate = RelayRights(), run_certificate(directory, [host])
    app = CallerLimits(BodyLimits(relay_app(relay, rights), BLOB_BYTES_MAX), too_many)
    async with serving(app, listening_socket(host, 0), certificate=certificate) as url:
        yield SiteRelay(url, rights.owner, certificate.anchor)


def _sweep(relay: Relay, blobs: Path, before_s: float) -> None:
    """Delete copies that have been there since before that Unix time."""
    for key in relay.list_keys():
        with contextlib.suppress(OSError, RelayError):
            if (blobs / key).lstat().st_mtime < before_s:
                relay.delete(key)
