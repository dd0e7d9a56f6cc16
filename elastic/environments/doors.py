"""Ways between a container without network and its run: bytes, passed on connection by connection.

Outside are Unix sockets in a folder, the only one of the run's that the container sees: one leads to the run, one to
its fronts. Inside is a port on loopback that leads to the second. So who is in there reaches the model, and no more.
"""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import TypeAlias

from elastic.protocol.front_messages import SOCKET
from elastic.protocol.run_control import private_socket, socket_address

CALLS = "calls.sock"
"""The socket that leads to the fronts, beside `SOCKET`, which leads to the run."""
PIECE_BYTES = 64 * 1024
WAITING_MAX = 4096
"""Connections that wait to be taken: an environment may have that many episodes."""

Streams: TypeAlias = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Dial: TypeAlias = Callable[[], Awaitable[Streams]]


@contextlib.asynccontextmanager
async def doors(folder: Path, to_run: Dial, to_fronts: Dial) -> AsyncIterator[None]:
    """Have both sockets in the folder while the context lasts. Raises `OSError`."""
    async with contextlib.AsyncExitStack() as open_doors:
        for name, dial in ((SOCKET, to_run), (CALLS, to_fronts)):
            bound = private_socket(folder, name)
            server = await asyncio.start_unix_server(_passing(dial), sock=bound, backlog=WAITING_MAX)
            open_doors.callback(server.close)  # From Python 3.12 on its own context waits for every connection's end.
        yield


@contextlib.asynccontextmanager
async def loopback(folder: Path) -> AsyncIterator[int]:
    """The port of this machine, or container, that leads to the fronts while the context lasts."""
    server = await asyncio.start_server(
        _passing(lambda: dial_socket(folder, CALLS)), "127.0.0.1", 0, backlog=WAITING_MAX
    )
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()  # As in `doors`.


async def dial_socket(folder: Path, name: str) -> Streams:
    """Connect to the socket of this name. Raises `OSError`."""
    end = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        with socket_address(folder, name) as address:
            end.connect(address)
        return await asyncio.open_unix_connection(sock=end)
    except BaseException:
        end.close()
        raise


def _passing(dial: Dial) -> Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]:
    """What takes a connection: it is passed on, in both directions, until both are over or one breaks."""

    async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.ExitStack() as ended:
            ended.callback(writer.close)
            with contextlib.suppress(OSError):
                far_reader, far_writer = await dial()
                ended.callback(far_writer.close)
                with contextlib.suppress(ExceptionGroup):
                    async with asyncio.TaskGroup() as both:
                        both.create_task(_copy(reader, far_writer))
                        both.create_task(_copy(far_reader, writer))

    return take


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while piece := await reader.read(PIECE_BYTES):
        writer.write(piece)
        await writer.drain()
    with contextlib.suppress(OSError, RuntimeError):
        writer.write_eof()
