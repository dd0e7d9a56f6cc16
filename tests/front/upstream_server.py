"""An upstream of a test's: a server of HTTP that answers as it is told, and remembers what it was asked."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias


@dataclass
class Exchange:
    """A request, and the way back to who made it."""

    line: str
    headers: dict[str, str]
    body: bytes
    writer: asyncio.StreamWriter

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def answer(self, status: int, body: bytes, **headers: str) -> None:
        named = {"content-type": "application/json", "content-length": str(len(body)), **headers}
        lines = [f"{name.replace('_', '-')}: {value}" for name, value in named.items()]
        await self.send("\r\n".join([f"HTTP/1.1 {status} said", *lines, "", ""]).encode() + body)

    async def begin_stream(self) -> None:
        await self.send(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")

    async def chunk(self, data: bytes) -> None:
        """An empty one ends the stream."""
        await self.send(b"%x\r\n%b\r\n" % (len(data), data))

    def cut(self) -> None:
        self.writer.transport.abort()


Answers: TypeAlias = Callable[[Exchange], Awaitable[None]]


@dataclass
class UpstreamServer:
    answers: Answers
    url: str = ""
    asked: list[Exchange] = field(default_factory=list)
    gone: int = 0
    """Connections that have ended."""
    stirred: asyncio.Event = field(default_factory=asyncio.Event)

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(20):
            while not condition():
                self.stirred.clear()
                await self.stirred.wait()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
                named = (line.split(": ", 1) for line in head[1:] if line)
                headers = {name.lower(): value for name, value in named}
                body = await reader.readexactly(int(headers.get("content-length", "0")))
                self.asked.append(Exchange(head[0], headers, body, writer))
                self.stirred.set()
                answering = asyncio.ensure_future(self.answers(self.asked[-1]))
                leaving = asyncio.ensure_future(reader.read(1))
                await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
                if not answering.done():
                    answering.cancel()
                    return
                leaving.cancel()
                await asyncio.wait({leaving})
                answering.result()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self.gone += 1
            self.stirred.set()
            writer.close()


@contextlib.asynccontextmanager
async def upstream_server(answers: Answers) -> AsyncIterator[UpstreamServer]:
    server = UpstreamServer(answers)
    listening = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    server.url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    try:
        yield server
    finally:
        listening.close()
        for exchange in server.asked:
            exchange.cut()


def says_json(status: int = 200, answer: Any = None, **headers: str) -> Answers:
    async def answers(exchange: Exchange) -> None:
        await exchange.answer(status, json.dumps(answer).encode(), **headers)

    return answers
