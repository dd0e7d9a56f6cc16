"""A socket in a directory at which a process answers its user: one request and one answer a connection, each a line."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import structlog

from elastic.protocol.run_control import REQUEST_BYTES_MAX, SOCKET, private_socket

log = structlog.get_logger(__name__)

CONNECTIONS_MAX = 16
REQUEST_TIMEOUT_S = 5.0
"""For a request's line to come, and for its answer to be read."""


class LineSocket:
    """Serves while it is open. What a peer may hold is bounded: one line, few seconds, few connections.

    `answer` gets a line; `invalid` makes the answer to what is no request.
    """

    def __init__(
        self,
        directory: Path,
        answer: Callable[[bytes], Awaitable[msgspec.Struct]],
        invalid: Callable[[str], msgspec.Struct],
        request_bytes_max: int = REQUEST_BYTES_MAX,
        request_timeout_s: float = REQUEST_TIMEOUT_S,
    ) -> None:
        self._directory = directory
        self._answer_line = answer
        self._invalid = invalid
        self._bytes_max = request_bytes_max
        self._timeout_s = request_timeout_s
        self._server: asyncio.Server | None = None
        self.connections: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Raises `OSError`. A socket that a former process has left is replaced: the directory is claimed by this
        one."""
        listener = private_socket(self._directory)
        try:
            self._server = await asyncio.start_unix_server(self._accept, sock=listener, limit=self._bytes_max)
        except BaseException:
            listener.close()
            raise

    async def aclose(self) -> None:
        if self._server is None:
            return
        (self._directory / SOCKET).unlink(missing_ok=True)
        self._server.close()
        for task in list(self.connections):
            task.cancel()
        await asyncio.gather(*self.connections, return_exceptions=True)
        self._server = None

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self.connections) >= CONNECTIONS_MAX:
            writer.transport.abort()
            return
        task = asyncio.create_task(self._serve(reader, writer), name="control")
        self.connections.add(task)
        task.add_done_callback(self.connections.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            answer = await self._answer(reader)
            writer.write(msgspec.json.encode(answer) + b"\n")
            async with asyncio.timeout(self._timeout_s):
                await writer.drain()
        except OSError:
            pass
        except Exception:
            log.exception("control request not answered")
        finally:
            # A client that does not read its answer is cut off.
            with contextlib.suppress(OSError):
                writer.close()

    async def _answer(self, reader: asyncio.StreamReader) -> msgspec.Struct:
        try:
            async with asyncio.timeout(self._timeout_s):
                line = await reader.readline()
        except TimeoutError:
            return self._invalid(f"no line came within {self._timeout_s:g} s")
        except ValueError:
            return self._invalid(f"a request has at most {self._bytes_max} bytes")
        try:
            return await self._answer_line(line)
        except msgspec.DecodeError as error:
            return self._invalid(str(error))
