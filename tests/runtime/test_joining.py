"""Machines that join a run by tickets: gateway, pending workers and provider, over TLS."""

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from elastic.core.events import LeaseEnded, LeaseGranted, LeaseRefused, OfferChanged
from elastic.protocol import tls, wire
from elastic.protocol.connection import SessionRefused
from elastic.protocol.endpoint import Endpoint
from elastic.protocol.ticket_store import TicketBook
from elastic.runtime.gateway import Gateway
from elastic.testing.providers import ProviderRecorder
from elastic.worker.connection import OrchestratorLink, Ticket, dial
from providers.base import LeaseRequest, ProviderContext, ProviderUnavailable, WorkerTicket
from providers.joined import JoinedProvider
from providers.markets import JoinedSettings
from providers.pending_workers import PendingWorkers
from tests.runtime.test_gateway import READY, WELCOME, Ear

PATIENCE_S = 10.0
Joining = asyncio.Task[tuple[OrchestratorLink, wire.Welcome]]


class House:
    """A run that lets machines join: its gateway, its tickets and its provider `joined`."""

    def __init__(self, run_dir: Path) -> None:
        self.book = TicketBook(run_dir)
        self.room = PendingWorkers(self.book)
        self.certificate = tls.run_certificate(run_dir, ["localhost"])
        self.ear, self.recorder, self.gateway = Ear(), ProviderRecorder(), Gateway()
        self.door = self.gateway.open("run", self.ear, WELCOME, cuts_silent=True)
        self.door.pending_workers = self.room
        self.notes: dict[str, str] = {}
        self._run_dir = run_dir
        self._tasks: list[Joining] = []

    async def start(self, opens: bool = True) -> None:
        address = await self.gateway.start(certificate=self.certificate)
        self.endpoint = Endpoint(address, fingerprint=self.certificate.fingerprint)
        context = ProviderContext(
            run="run",
            run_dir=self._run_dir,
            endpoint=self.endpoint,
            worker_command=(),
            now_ns=lambda: 0,
            note=self.notes.__setitem__,
            acquire_timeout_s=PATIENCE_S,
            release_timeout_s=PATIENCE_S,
            pending_workers=self.room,
        )
        settings = JoinedSettings.model_validate({"usd_per_gpu_hour": 2.0})
        self.provider = JoinedProvider("joined", settings, context)
        if opens:
            await self.provider.start(self.recorder.emit)

    async def aclose(self) -> None:
        for task in self._tasks:
            if task.done() and not task.cancelled() and task.exception() is None:
                task.result()[0].abort()
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.provider.aclose()
        await self.gateway.aclose()

    def ticket(self, usd: float | None = None, label: str = "") -> Ticket:
        terms, token = self.book.mint(label, usd)
        return Ticket(endpoint=self.endpoint, run="run", worker="", token=token, ticket=terms.ticket)

    def join(self, ticket: Ticket) -> Joining:
        task = asyncio.create_task(dial(ticket, "", PATIENCE_S))
        self._tasks.append(task)
        return task

    async def offered(self, available: int, usd: float) -> None:
        def now(recorder: ProviderRecorder) -> bool:
            offers = recorder.of(OfferChanged)
            return bool(offers) and (offers[-1].offer.available, offers[-1].offer.usd_per_gpu_hour) == (available, usd)

        await self.recorder.until(now)

    async def acquire(self, number: int) -> str:
        worker = f"joined-{number}/w"
        self.door.expect(worker, f"token {number}", f"key {number}")
        await self.provider.acquire(LeaseRequest(lease=f"joined-{number}", tickets=(WorkerTicket(worker, "token"),)))
        return worker


@pytest.fixture
async def house(tmp_path: Path) -> AsyncIterator[House]:
    house = House(tmp_path)
    await house.start()
    yield house
    await house.aclose()


async def done(joining: Joining) -> tuple[OrchestratorLink, wire.Welcome]:
    async with asyncio.timeout(PATIENCE_S):
        return await joining


async def refused(joining: Joining) -> str:
    with pytest.raises(SessionRefused) as caught:
        await done(joining)
    assert not caught.value.retry
    return str(caught.value)


async def test_who_dials_in_is_offered_and_leased_at_its_tickets_price(house: House) -> None:
    ticket = house.ticket(0.4, "the lab")
    joining = house.join(ticket)
    await house.offered(1, 0.4)
    worker = await house.acquire(1)
    assert isinstance(await house.recorder.answered("joined-1"), LeaseGranted)
    connection, welcome = await done(joining)
    assert (welcome.worker, welcome.session_key) == (worker, "key 1")
    assert house.notes == {"joined:joined-1": "the lab"}
    connection.send(READY)
    await house.ear.until("ready", worker, 1)
    connection.abort()
    connection, _ = await dial(
        Ticket(endpoint=house.endpoint, run="run", worker=worker, token=""), welcome.session_key, PATIENCE_S
    )
    connection.send(READY)
    await house.ear.until("ready", worker, 2)
    connection.abort()
    assert f"spent on worker {worker}" in await refused(house.join(ticket))
    await house.provider.release("joined-1")
    await house.recorder.ended("joined-1")


async def test_the_cheapest_go_first_and_who_leaves_is_not_offered(house: House) -> None:
    dear, cheap, standard = (house.ticket(usd) for usd in (9.0, 0.5, None))
    waiting = [house.join(ticket) for ticket in (dear, cheap, standard)]
    await house.offered(1, 0.5)
    await house.acquire(1)
    assert (await done(waiting[1]))[1].worker == "joined-1/w"
    await house.offered(1, 2.0)
    waiting[2].cancel()
    await house.offered(1, 9.0)
    await house.acquire(2)
    assert (await done(waiting[0]))[1].worker == "joined-2/w"
    await house.offered(0, 2.0)
    await house.acquire(3)
    assert isinstance(await house.recorder.answered("joined-3"), LeaseRefused)


async def test_who_waits_longer_than_a_silence_may_last_is_heard_all_the_time(house: House) -> None:
    joining = house.join(house.ticket())
    await house.offered(1, 2.0)
    async with asyncio.timeout(PATIENCE_S):
        await asyncio.wait([joining], timeout=2 * WELCOME.silence_timeout_s)
    assert not joining.done()
    offers = house.recorder.of(OfferChanged)
    assert [event.offer.available for event in offers] == [0, 1]


async def test_one_ticket_is_one_worker_even_if_two_bear_it(house: House) -> None:
    ticket = house.ticket()
    first = house.join(ticket)
    await house.offered(1, 2.0)
    second = house.join(ticket)
    assert "came again with the same ticket" in await refused(first)
    await house.acquire(1)
    assert (await done(second))[1].worker == "joined-1/w"


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda house, ticket: house.book.revoke(ticket.ticket), "is revoked"),
        (lambda house, ticket: (house.book._directory / f"{ticket.ticket}.json").unlink(), "unknown ticket"),
    ],
)
async def test_who_may_not_come_is_told_why(house: House, spoil: Callable[[House, Ticket], object], why: str) -> None:
    ticket = house.ticket()
    spoil(house, ticket)
    assert why in await refused(house.join(ticket))
    assert house.recorder.available == 0


async def test_a_run_that_takes_nobody_says_so(tmp_path: Path) -> None:
    house = House(tmp_path)
    await house.start(opens=False)
    assert "--providers joined" in await refused(house.join(house.ticket()))
    await house.provider.start(house.recorder.emit)
    with pytest.raises(ProviderUnavailable, match="one is already"):
        await house.provider.start(house.recorder.emit)
    joining = house.join(house.ticket())
    await house.offered(1, 2.0)
    await house.provider.aclose()
    assert "takes nobody any more" in await refused(joining)
    assert house.recorder.of(LeaseEnded) == []
    await house.aclose()


async def test_a_ticket_that_is_revoked_while_its_holder_waits_buys_no_lease(house: House) -> None:
    ticket = house.ticket(0.4)
    joining = house.join(ticket)
    await house.offered(1, 0.4)
    house.book.revoke(ticket.ticket)
    await house.acquire(1)
    assert "revoked" in await refused(joining)
    assert not isinstance(await house.recorder.answered("joined-1"), LeaseGranted)
    await house.offered(0, 2.0)
