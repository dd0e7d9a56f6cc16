"""What an instance says of its own end reaches whoever is to know, once each, whatever the service's bad moments."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta

import pytest

from elastic.worker.notices import watch_instance
from providers.ec2_metadata import ENDPOINT_VARIABLE, InstanceMetadata, MetadataError
from providers.ec2_user_data import NOTICES_VARIABLE

POLL_S = 0.01


class Service:
    """The metadata service of one instance, version 2: what it says by path, and the one token that it takes."""

    def __init__(self) -> None:
        self.says: dict[str, str] = {}
        self.token = "first"
        self.silent = False
        self.tokens_given = 0
        self.endpoint = ""
        self.answering: set[asyncio.Task[None]] = set()

    def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._answer(reader, writer))
        self.answering.add(task)
        task.add_done_callback(self.answering.discard)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer), contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            await self._answered(reader, writer)

    async def _answered(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        status, body = self._said(head.split(" ")[0], head.split(" ")[1], head.lower())
        writer.write(f"HTTP/1.1 {status} x\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n{body}".encode())
        await writer.drain()

    def _said(self, method: str, path: str, head: str) -> tuple[int, str]:
        if self.silent:
            return 500, ""
        if (method, path) == ("PUT", "/latest/api/token"):
            self.tokens_given += "x-aws-ec2-metadata-token-ttl-seconds" in head
            return 200, self.token
        if f"x-aws-ec2-metadata-token: {self.token}\r\n" not in head:
            return 401, ""
        return (200, self.says[path]) if path in self.says else (404, "")

    def interrupt(self, left_s: float) -> None:
        at = (datetime.now(UTC) + timedelta(seconds=left_s)).strftime("%Y-%m-%dT%H:%M:%SZ")
        self.says["/latest/meta-data/spot/instance-action"] = f'{{"action": "terminate", "time": "{at}"}}'

    def advise(self) -> None:
        self.says["/latest/meta-data/events/recommendations/rebalance"] = '{"noticeTime": "2026-11-23T05:00:00Z"}'


@contextlib.asynccontextmanager
async def metadata(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Service]:
    """The service of this machine, as if it were an instance."""
    made = Service()
    server = await asyncio.start_server(made.accept, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    made.endpoint = f"http://{host}:{port}"
    monkeypatch.setenv(ENDPOINT_VARIABLE, made.endpoint)
    monkeypatch.setenv(NOTICES_VARIABLE, "ec2")
    yield made
    server.close()
    await server.wait_closed()
    await asyncio.gather(*made.answering)
    await asyncio.sleep(0)  # Transports that were closed end in the loop's next turn.


@pytest.fixture
async def service(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Service]:
    async with metadata(monkeypatch) as made:
        yield made


async def test_each_notice_is_told_once_and_a_silent_service_is_asked_again(service: Service) -> None:
    told: list[tuple[float | None, str]] = []
    heard = asyncio.Event()

    def tell(left_s: float | None, reason: str) -> None:
        told.append((left_s, reason))
        heard.set()

    async def next_one() -> tuple[float | None, str]:
        async with asyncio.timeout(20):
            await heard.wait()
        heard.clear()
        return told[-1]

    service.silent = True
    watching = asyncio.create_task(watch_instance(tell, POLL_S))
    await asyncio.sleep(5 * POLL_S)
    service.silent = False
    service.advise()
    left_s, reason = await next_one()
    assert left_s is None
    assert "rebalance" in reason
    service.token = "second"
    service.interrupt(100.0)
    left_s, reason = await next_one()
    assert left_s is not None
    assert 90 < left_s <= 100
    assert "terminate" in reason
    await asyncio.sleep(10 * POLL_S)
    watching.cancel()
    await asyncio.wait([watching])
    assert len(told) == 2
    assert service.tokens_given == 2


async def test_elsewhere_nobody_is_asked(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(NOTICES_VARIABLE)
    await watch_instance(lambda *_: pytest.fail("nobody gives notice here"), POLL_S)
    assert service.tokens_given == 0


@pytest.mark.parametrize("said", ["", "[]", "{}", '{"action": "terminate", "time": "soon"}'])
async def test_what_is_no_notice_is_named(service: Service, said: str) -> None:
    service.says["/latest/meta-data/spot/instance-action"] = said
    async with InstanceMetadata(service.endpoint) as metadata:
        with pytest.raises(MetadataError, match=service.endpoint if said in ("", "[]") else "time"):
            await metadata.notices()


async def test_a_clock_that_is_off_makes_no_longer_notice_than_there_is(service: Service) -> None:
    service.interrupt(4000.0)
    async with InstanceMetadata(service.endpoint) as metadata:
        (notice,) = await metadata.notices()
    assert notice.left_s == 120.0
