"""The gateway over real sockets: who is let in, what surfaces, and what a peer may cost."""

import asyncio
import contextlib
import dataclasses
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable

import msgspec
import pytest
import structlog
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic.core.types import Capabilities, Chunk, SamplingParameters, WeightMode
from elastic.protocol import wire
from elastic.protocol.admission import UnauthenticatedLimits
from elastic.runtime.allowances import FAR_BEYOND, OPENINGS_BURST
from elastic.runtime.gateway import CODEC, Gateway, GatewayError
from elastic.runtime.refusals import RefusalCount
from tests.seeds import examples

PATIENCE_S = 10.0
READY = wire.Ready(Capabilities(engine="test", replayable_sampling=True, max_context_tokens=8, device="cpu"), None)
WELCOME = wire.Welcome(
    session_key="",
    epoch=0,
    heartbeat_interval_s=0.05,
    flush_interval_s=0.03,
    silence_timeout_s=1.0,
    engine={"kind": "torch"},
    model={},
    relay="file:///nowhere",
)


class Ear:
    """A listener that writes down what it hears."""

    def __init__(self) -> None:
        self.heard: list[tuple[object, ...]] = []
        self.news = asyncio.Event()
        self.react: Callable[[tuple[object, ...]], None] = lambda _: None

    def on_ready(self, worker: str, epoch: int, ready: wire.Ready) -> None:
        self._note("ready", worker, epoch)

    def on_message(self, worker: str, epoch: int, message: wire.FromWorker) -> None:
        self._note("message", worker, epoch, message)

    def on_disconnected(self, worker: str, epoch: int, goodbye: bool) -> None:
        self._note("disconnected", worker, epoch, goodbye)

    def on_barred(self, worker: str, epoch: int, cause: str) -> None:
        self._note("barred", worker, epoch, cause)

    def _note(self, *what: object) -> None:
        self.heard.append(what)
        self.news.set()
        self.react(what)

    async def until(self, *what: object) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while what not in self.heard:
                self.news.clear()
                await self.news.wait()


class Peer:
    """The bare other end of a connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self._frames = wire.FrameBuffer()
        self._arrived: list[wire.FromOrchestrator] = []

    def say(self, *messages: wire.FromWorker) -> None:
        self.writer.write(b"".join(map(wire.encode, messages)))

    async def hear(self) -> wire.FromOrchestrator | None:
        """The next message that is not a ping; None at the end of the connection."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                while self._arrived:
                    message = self._arrived.pop(0)
                    if not isinstance(message, wire.Ping):
                        return message
                with contextlib.suppress(ConnectionError):
                    if data := await self.reader.read(1 << 16):
                        self._arrived = [wire.decode_from_orchestrator(body) for body in self._frames.feed(data)]
                        continue
                return None

    async def aclose(self) -> None:
        self.writer.close()
        with contextlib.suppress(OSError):
            await self.writer.wait_closed()


class House:
    """A gateway, its listener and a way to dial it."""

    def __init__(self, limits: UnauthenticatedLimits | None = None, **costs: float) -> None:
        self.ear = Ear()
        self.gateway = Gateway(limits, dataclasses.replace(CODEC, **costs))
        self.door = self.gateway.open("run", self.ear, WELCOME)
        self._peers: list[Peer] = []

    async def __aenter__(self) -> "House":
        self.address = await self.gateway.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        for peer in self._peers:
            await peer.aclose()
        await self.gateway.aclose()

    def expect(self, worker: str = "w", token: str = "token", epoch: int = 0) -> None:
        self.door.expect(worker, token, key_of(worker), epoch=epoch)

    async def dial(self) -> Peer:
        host, port = self.address.split(":")
        peer = Peer(*await asyncio.open_connection(host, int(port)))
        self._peers.append(peer)
        return peer

    async def join(self, worker: str = "w", token: str = "token") -> tuple[Peer, wire.Welcome]:
        peer = await self.dial()
        peer.say(hello(worker, token))
        welcome = await peer.hear()
        assert isinstance(welcome, wire.Welcome)
        return peer, welcome

    async def ready(self, worker: str = "w", token: str = "token") -> tuple[Peer, wire.Welcome]:
        self.expect(worker, token)
        peer, welcome = await self.join(worker, token)
        peer.say(READY)
        await self.ear.until("ready", worker, welcome.epoch)
        return peer, welcome


@pytest.fixture
async def house() -> AsyncIterator[House]:
    async with House() as house:
        yield house


def hello(
    worker: str, secret: str, resume: bool = False, version: int = wire.PROTOCOL_VERSION, run: str = "run"
) -> wire.Hello:
    return wire.Hello(version, worker, secret, resume, pid=1, host="here", run=run)


def key_of(worker: str) -> str:
    return f"session key of {worker}"


def slept() -> wire.FromWorker:
    return wire.Slept()


def report(version: int) -> wire.WeightsReport:
    return wire.WeightsReport(version, "", 0, 0.0, 0.0)


async def test_a_worker_with_its_ticket_gets_a_session_and_is_heard(house: House) -> None:
    peer, welcome = await house.ready()
    assert welcome.epoch == 1
    assert welcome.session_key == key_of("w")
    assert msgspec.structs.replace(welcome, session_key="", epoch=0) == WELCOME
    peer.say(report(1), report(2))
    await house.ear.until("message", "w", 1, report(2))
    house.door.send("w", 1, wire.Sleep())
    assert await peer.hear() == wire.Sleep()
    await peer.aclose()
    await house.ear.until("disconnected", "w", 1, False)
    assert [what[0] for what in house.ear.heard] == ["ready", "message", "message", "disconnected"]


@pytest.mark.parametrize(("worker", "token"), [("w", "wrong"), ("unknown", "token"), ("w", "")])
async def test_a_wrong_ticket_is_refused_without_telling_which_part_is_wrong(
    house: House, worker: str, token: str
) -> None:
    house.expect()
    peer = await house.dial()
    peer.say(hello(worker, token))
    assert await peer.hear() == wire.RefusedFrame("unknown worker or wrong token", retry=False)
    assert await peer.hear() is None


async def test_workers_are_told_how_often_to_flush_whenever_they_come(house: House) -> None:
    peer, welcome = await house.ready()
    assert welcome.flush_interval_s == WELCOME.flush_interval_s
    house.door.flush_every(0.2)
    assert await peer.hear() == wire.FlushEvery(0.2)
    _, later = await house.ready("later", "another token")
    assert later.flush_interval_s == 0.2


async def test_tokens_of_anothers_turn_bar_their_sender_and_nobody_else(house: House) -> None:
    honest, _ = await house.ready("honest", "a token")
    byzantine, _ = await house.ready("byzantine", "another token")
    sampling = SamplingParameters(max_new_tokens=8, noise_seed=0)
    for slot, worker in enumerate(("honest", "byzantine")):
        house.door.send(worker, 1, wire.Generate(f"t{slot}", 1, slot, 0, bytearray(), sampling))
    tokens = wire.Tokens.of([(Chunk(0, 0, 1, 0), [1], [-0.5])])
    byzantine.say(tokens)
    await house.ear.until("barred", "byzantine", 1, "tokens of a turn that it was not sent, or that it has ended")
    honest.say(tokens)
    await house.ear.until("message", "honest", 1, tokens)


async def test_a_ticket_is_spent_by_its_first_use(house: House) -> None:
    first, _ = await house.ready()
    thief = await house.dial()
    thief.say(hello("w", "token"))
    assert await thief.hear() == wire.RefusedFrame("this token has been used", retry=False)
    first.say(slept())
    await house.ear.until("message", "w", 1, slept())


async def test_a_ticket_lets_in_once_more_while_its_welcome_may_have_been_lost(house: House) -> None:
    house.expect()
    lost = await house.dial()
    lost.say(hello("w", "token"))
    assert isinstance(await lost.hear(), wire.Welcome)
    again = await house.dial()
    again.say(hello("w", "token"))
    welcome = await again.hear()
    assert isinstance(welcome, wire.Welcome)
    assert (welcome.epoch, welcome.session_key) == (2, key_of("w"))
    again.say(READY)
    await house.ear.until("ready", "w", 2)
    lost.say(READY)
    thief = await house.dial()
    thief.say(hello("w", "token"))
    assert await thief.hear() == wire.RefusedFrame("this token has been used", retry=False)
    assert ("ready", "w", 1) not in [what[:3] for what in house.ear.heard]


async def test_an_empty_key_resumes_nothing(house: House) -> None:
    house.expect()
    for secret in ("", "token"):
        peer = await house.dial()
        peer.say(hello("w", secret, resume=True))
        assert await peer.hear() == wire.RefusedFrame("unknown worker or wrong token", retry=False)


async def test_another_protocol_version_is_refused_by_name(house: House) -> None:
    house.expect()
    peer = await house.dial()
    peer.say(hello("w", "token", version=99))
    refused = await peer.hear()
    assert isinstance(refused, wire.RefusedFrame)
    assert "version 99" in refused.reason
    assert f"orchestrator {wire.PROTOCOL_VERSION}" in refused.reason
    assert not refused.retry
    await house.join()  # the ticket is not spent


async def test_a_resumed_session_begins_the_next_epoch_and_ends_the_old(house: House) -> None:
    old, welcome = await house.ready()
    for epoch in (2, 3):
        peer = await house.dial()
        peer.say(hello("w", welcome.session_key, resume=True))
        again = await peer.hear()
        assert isinstance(again, wire.Welcome)
        assert (again.epoch, again.session_key) == (epoch, welcome.session_key)
        assert await old.hear() is None
        assert house.ear.heard[-1] == ("disconnected", "w", epoch - 1, False)
        house.door.send("w", epoch - 1, wire.Drain("for the old epoch"))
        peer.say(READY)
        await house.ear.until("ready", "w", epoch)
        house.door.send("w", epoch, wire.Wake())
        assert await peer.hear() == wire.Wake()
        old = peer


@settings(max_examples=examples(10, 25), deadline=None)
@given(st.lists(st.sampled_from(["resume", "speak", "speak as old", "vanish"]), max_size=12))
def test_frames_of_an_old_epoch_never_surface(script: list[str]) -> None:
    asyncio.run(_old_epochs_are_mute(script))


async def _old_epochs_are_mute(script: list[str]) -> None:
    async with House() as house:
        peer, welcome = await house.ready()
        epoch, old, alive, said = 1, [], True, 0
        for act in script:
            if act == "resume":
                old.append(peer)
                peer = await house.dial()
                peer.say(hello("w", welcome.session_key, resume=True), READY)
                epoch, alive = epoch + 1, True
                await house.ear.until("ready", "w", epoch)
            elif act == "speak" and alive:
                said += 1
                peer.say(report(said))
                await house.ear.until("message", "w", epoch, report(said))
            elif act == "speak as old":
                for ghost in old:
                    ghost.say(wire.Goodbye("ghost", {}, 0))
            elif act == "vanish" and alive:
                alive = False
                await peer.aclose()
                await house.ear.until("disconnected", "w", epoch, False)
    now = 0
    for kind, _, of_epoch, *_ in house.ear.heard:
        now = of_epoch if kind == "ready" else now
        assert of_epoch == now
    assert [what[3] for what in house.ear.heard if what[0] == "message"] == list(map(report, range(1, said + 1)))


async def test_frames_already_read_from_an_old_epoch_are_not_heard_once_it_is_fenced(house: House) -> None:
    peer, _ = await house.ready()
    house.ear.react = lambda what: house.door.fence("w", "hung") if what[0] == "message" else None
    peer.say(report(1), report(2), report(3))
    assert await peer.hear() == wire.RefusedFrame("hung", retry=False)
    assert await peer.hear() is None
    assert [what[0] for what in house.ear.heard] == ["ready", "message"]


async def test_a_fenced_worker_is_refused_for_ever(house: House) -> None:
    peer, welcome = await house.ready()
    house.door.fence("w", "no heartbeat for 3 s")
    house.door.send("w", 1, wire.Wake())
    assert await peer.hear() == wire.RefusedFrame("no heartbeat for 3 s", retry=False)
    for secret, resume in ((welcome.session_key, True), ("token", False)):
        again = await house.dial()
        again.say(hello("w", secret, resume))
        assert await again.hear() == wire.RefusedFrame("no heartbeat for 3 s", retry=False)
    assert [what[0] for what in house.ear.heard] == ["ready"]


async def test_a_worker_fenced_for_disconnecting_does_not_resume(house: House) -> None:
    _, welcome = await house.ready()
    house.ear.react = lambda what: house.door.fence("w", "gone") if what[0] == "disconnected" else None
    peer = await house.dial()
    peer.say(hello("w", welcome.session_key, resume=True))
    assert await peer.hear() == wire.RefusedFrame("gone", retry=False)


async def test_a_goodbye_is_told_from_a_loss(house: House) -> None:
    peer, _ = await house.ready()
    peer.say(wire.Goodbye("drained", {}, 0))
    await peer.aclose()
    await house.ear.until("disconnected", "w", 1, True)


async def test_a_connection_lost_before_ready_was_never_announced(house: House) -> None:
    house.expect()
    peer, welcome = await house.join()
    await peer.aclose()
    peer = await house.dial()
    peer.say(hello("w", welcome.session_key, resume=True), READY)
    await house.ear.until("ready", "w", 2)
    assert len(house.ear.heard) == 1


@pytest.mark.parametrize("early", [slept(), hello("w", "token")], ids=["message", "second hello"])
async def test_nothing_but_ready_follows_hello(house: House, early: wire.FromWorker) -> None:
    house.expect()
    peer, _ = await house.join()
    peer.say(early)
    refused = await peer.hear()
    assert isinstance(refused, wire.RefusedFrame)
    assert "before Ready" in refused.reason
    assert [what[:3] for what in house.ear.heard] == [("barred", "w", 1)]


HARM: dict[str, Callable[["House", Peer], None]] = {
    "speak": lambda house, peer: peer.say(report(7)),
    "garbage": lambda house, peer: _garbage(peer),
    "vanish": lambda house, peer: peer.writer.close(),
    "hold": lambda house, peer: house.door.hold(True),
    "fence": lambda house, peer: house.door.fence("w", "hung"),
    "close": lambda house, peer: house.door.close(),
}


def _garbage(peer: Peer) -> None:
    if not peer.writer.is_closing():
        peer.writer.write(b"\x00\x00\x00\x01\xc1")


@settings(max_examples=examples(12, 30), deadline=None)
@given(st.lists(st.sampled_from(sorted(HARM)), max_size=6))
def test_runs_cannot_hear_or_harm_each_other(script: list[str]) -> None:
    """Two runs at one gateway, each with a worker of the same name: whatever becomes of one, the other is as alone."""
    asyncio.run(_two_runs(script))


async def _two_runs(script: list[str]) -> None:
    async with House() as house:
        ear = Ear()
        door = house.gateway.open("other", ear, WELCOME)
        door.expect("w", "the other's token", "the other's key")
        harmed, _ = await house.ready()
        thief = await house.dial()
        thief.say(hello("w", "token", run="other"))
        assert await thief.hear() == wire.RefusedFrame("unknown worker or wrong token", retry=False)
        other = await house.dial()
        other.say(hello("w", "the other's token", run="other"), READY)
        assert isinstance(await other.hear(), wire.Welcome)
        for number, harm in enumerate(script):
            HARM[harm](house, harmed)
            other.say(report(number))
            await ear.until("message", "w", 1, report(number))
            door.send("w", 1, wire.PullWeights(number, WeightMode.FINISH))
            assert await other.hear() == wire.PullWeights(number, WeightMode.FINISH)
        thief = await house.dial()
        thief.say(hello("w", key_of("w"), resume=True, run="other"))
        assert await thief.hear() == wire.RefusedFrame("unknown worker or wrong token", retry=False)
        said = [("message", "w", 1, report(number)) for number in range(len(script))]
        assert ear.heard == [("ready", "w", 1), *said]
        assert all(refused.worker == "" for refused in door.refusals())


async def test_a_run_has_one_door_and_may_have_another_once_it_is_closed(house: House) -> None:
    with pytest.raises(ValueError, match="run 'run' has a door already"):
        house.gateway.open("run", house.ear, WELCOME)
    house.door.close()
    house.door.close()
    house.door = house.gateway.open("run", house.ear, WELCOME)
    await house.ready()


async def test_a_held_run_is_not_read_from_until_it_is_let_go(house: House) -> None:
    peer, _ = await house.ready()
    house.door.hold(True)
    peer.say(report(1))
    house.expect("late")
    late, _ = await house.join("late")
    late.say(READY)
    for _ in range(3):  # a whole round trip of pings each, in which anything read would have been heard
        assert b"Ping" in await peer.reader.read(1 << 16)
    assert [what[0] for what in house.ear.heard] == ["ready"]
    house.door.hold(False)
    await house.ear.until("message", "w", 1, report(1))
    await house.ear.until("ready", "late", 1)


@settings(max_examples=examples(10, 25), deadline=None)
@given(
    st.lists(st.lists(st.floats(0, 1, exclude_max=True), max_size=6), min_size=1, max_size=3),
    st.lists(st.booleans(), max_size=8),
    st.floats(0, 1, exclude_max=True),
)
def test_frames_in_pieces_are_whole_frames_and_half_a_frame_is_none(
    cuts: list[list[float]], holds: list[bool], last: float
) -> None:
    """Each epoch's bytes, Hello and all, come in pieces, while the run is held now and then, and end within a frame."""
    asyncio.run(_pieces(cuts, holds, last))


async def _pieces(cuts: list[list[float]], holds: list[bool], last: float) -> None:
    async with House() as house:
        house.expect()
        said = 0
        for epoch, places in enumerate(cuts, 1):
            first = hello("w", key_of("w") if epoch > 1 else "token", resume=epoch > 1)
            words = [report(said := said + 1) for _ in range(3)]
            whole, half = b"".join(map(wire.encode, (first, READY, *words))), wire.encode(report(0))
            stream = whole + half[: int(last * len(half))]
            peer = await house.dial()
            at = 0
            for end in (*sorted(int(place * len(stream)) for place in places), len(stream)):
                peer.writer.write(stream[at:end])
                await peer.writer.drain()
                await asyncio.sleep(0)
                if holds:
                    house.door.hold(holds.pop())
                at = end
            house.door.hold(False)
            await house.ear.until("message", "w", epoch, words[-1])
            await peer.aclose()
            await house.ear.until("disconnected", "w", epoch, False)
        messages = [what[3] for what in house.ear.heard if what[0] == "message"]
        assert messages == [report(number) for number in range(1, said + 1)]
        assert len(house.ear.heard) == said + 2 * len(cuts)


@pytest.mark.parametrize("epoch", [0, 3], ids=["not journaled", "journaled"])
async def test_a_session_of_an_earlier_process_is_resumed_under_its_next_epoch(house: House, epoch: int) -> None:
    house.expect(epoch=epoch)
    if epoch:
        peer = await house.dial()
        peer.say(hello("w", "token"))
        assert await peer.hear() == wire.RefusedFrame("this token has been used", retry=False)
    peer = await house.dial()
    peer.say(hello("w", key_of("w"), resume=True), READY)
    welcome = await peer.hear()
    assert isinstance(welcome, wire.Welcome)
    assert (welcome.epoch, welcome.session_key) == (epoch + 1, key_of("w"))
    await house.ear.until("ready", "w", epoch + 1)
    thief = await house.dial()
    thief.say(hello("w", "token"))
    assert await thief.hear() == wire.RefusedFrame("this token has been used", retry=False)


@pytest.mark.parametrize("garbage", [b"GET / HTTP/1.1\r\n\r\n", b"\x00\x00\x00\x02\xc1\xc1", b"\x00\x01\x00\x00"])
async def test_garbage_from_an_unauthenticated_peer_ends_only_its_connection(house: House, garbage: bytes) -> None:
    worker, _ = await house.ready()
    unauthenticated = await house.dial()
    unauthenticated.writer.write(garbage)
    assert isinstance(await unauthenticated.hear(), wire.RefusedFrame)
    assert await unauthenticated.hear() is None
    worker.say(slept())
    await house.ear.until("message", "w", 1, slept())


async def test_a_worker_that_sends_garbage_is_barred_for_good(house: House) -> None:
    peer, welcome = await house.ready()
    peer.writer.write(b"\x00\x00\x00\x01\xc1")
    refused = await peer.hear()
    assert isinstance(refused, wire.RefusedFrame)
    assert not refused.retry
    assert await peer.hear() is None
    again = await house.dial()
    again.say(hello("w", welcome.session_key, resume=True))
    assert await again.hear() == refused
    assert [what[0] for what in house.ear.heard] == ["ready", "barred"]


async def test_a_silent_unauthenticated_peer_is_sent_away_in_time() -> None:
    async with House(UnauthenticatedLimits(hello_timeout_s=0.05)) as house:
        peer = await house.dial()
        assert await peer.hear() == wire.RefusedFrame("no Hello within 0.05 s", retry=True)
        assert await peer.hear() is None


async def test_the_oldest_unauthenticated_peer_goes_where_there_are_too_many() -> None:
    async with House(UnauthenticatedLimits(most=2)) as house:
        house.expect()
        oldest, *_ = [await house.dial() for _ in range(3)]
        refused = await oldest.hear()
        assert isinstance(refused, wire.RefusedFrame)
        assert refused.retry
        assert await oldest.hear() is None
        await house.join()


async def test_a_fleet_may_come_all_at_once() -> None:
    async with House(UnauthenticatedLimits(most=2)) as house:
        workers = [f"w{n}" for n in range(8)]
        for worker in workers:
            house.expect(worker)
        peers = [await house.dial() for _ in workers]
        for worker, peer in zip(workers, peers, strict=True):
            peer.say(hello(worker, "token"))
        for peer in peers:
            assert isinstance(await peer.hear(), wire.Welcome)


async def test_silent_unauthenticated_peers_lock_no_worker_out() -> None:
    async with House() as house:
        crowd = [await house.dial() for _ in range(320)]
        for n in range(8):
            house.expect(f"w{n}")
        peers = [await house.dial() for _ in range(8)]
        for n, peer in enumerate(peers):
            peer.say(hello(f"w{n}", "token"))
        for peer in peers:
            assert isinstance(await peer.hear(), wire.Welcome)
        assert len(crowd) == 320


async def test_refused_hellos_are_counted_and_logged_at_a_bounded_rate(house: House) -> None:
    with structlog.testing.capture_logs() as lines:
        for _ in range(60):
            peer = await house.dial()
            peer.say(hello("nobody", "nothing"))
            assert isinstance(await peer.hear(), wire.RefusedFrame)
    assert house.door.refusals() == [RefusalCount(worker="", reason="unknown worker or wrong token", count=60)]
    assert 0 < len([line for line in lines if line["event"] == "refused"]) < 40


async def test_pings_come_every_heartbeat_interval(house: House) -> None:
    house.expect()
    peer, _ = await house.join()
    pings = 0
    async with asyncio.timeout(PATIENCE_S):
        while pings < 3:
            pings += (await peer.reader.read(1 << 16)).count(b"Ping")


class CountingTransport:
    """A transport that remembers the sizes of its writes."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self.write_sizes: list[int] = []

    def write(self, data: bytes) -> None:
        self.write_sizes.append(len(data))
        self._transport.write(data)

    def __getattr__(self, name: str) -> object:
        return getattr(self._transport, name)


async def test_sends_of_one_iteration_are_one_write(house: House) -> None:
    peer, _ = await house.ready()
    (connection,) = house.gateway.connections
    transport = CountingTransport(connection.transport)
    connection.transport = transport  # type: ignore[assignment]
    for version in range(100):
        house.door.send("w", 1, wire.PullWeights(version, WeightMode.FINISH))
    assert [await peer.hear() for _ in range(100)]
    assert len([size for size in transport.write_sizes if size > 100]) == 1


async def test_a_peer_that_does_not_read_is_dropped_at_a_bound() -> None:
    async with House(unread_bytes=1 << 20) as house:
        await house.ready()
        (connection,) = house.gateway.connections
        order = wire.Drain("x" * 65_536)
        held = 0
        async with asyncio.timeout(PATIENCE_S):
            while house.ear.heard[-1][0] != "disconnected":
                house.door.send("w", 1, order)
                await asyncio.sleep(0)
                held = max(held, connection.transport.get_write_buffer_size())
        assert held <= 1 << 20
        assert house.ear.heard[-1] == ("disconnected", "w", 1, False)


async def test_a_peer_that_reads_nothing_for_too_long_is_dropped() -> None:
    async with House(unread_timeout_s=0.2) as house:
        await house.ready()
        for _ in range(200):
            house.door.send("w", 1, wire.Drain("x" * 65_536))
        await house.ear.until("disconnected", "w", 1, False)


async def test_a_port_in_use_is_named(house: House) -> None:
    host, port = house.address.split(":")
    with pytest.raises(GatewayError, match=f"{host}:{port}: .*in use"):
        await Gateway().start(host, int(port))


async def test_a_worker_is_expected_once(house: House) -> None:
    house.expect()
    with pytest.raises(ValueError, match="w is already expected"):
        house.expect("w", "another")


async def test_closing_ends_every_connection_and_is_quiet(house: House) -> None:
    peer, _ = await house.ready()
    await house.gateway.aclose()
    await house.gateway.aclose()
    assert await peer.hear() is None
    assert [what[0] for what in house.ear.heard] == ["ready"]


_VICTIM = """
import os, socket, sys, time
from elastic.protocol import wire
from elastic.protocol.admission import UnauthenticatedLimits
from elastic.core.types import Capabilities, WeightMode
host, port = sys.argv[1].split(":")
s = socket.create_connection((host, int(port)))
ready = wire.Ready(Capabilities(engine="t", replayable_sampling=True, max_context_tokens=8, device="cpu"), None)
s.sendall(wire.encode(wire.Hello(wire.PROTOCOL_VERSION, "w", os.environ["TOKEN"], False, os.getpid(), "", "run")))
s.sendall(wire.encode(ready))
while True:
    s.sendall(wire.encode(wire.Slept()))
    time.sleep(0.001)
"""


async def test_a_killed_worker_is_known_to_be_gone_at_once(house: House) -> None:
    house.expect()
    victim = await asyncio.create_subprocess_exec(
        sys.executable, "-c", _VICTIM, house.address, env=os.environ | {"TOKEN": "token"}
    )
    try:
        await house.ear.until("message", "w", 1, slept())
        victim.send_signal(signal.SIGKILL)
        loop = asyncio.get_running_loop()
        killed_at_s = loop.time()
        await house.ear.until("disconnected", "w", 1, False)
        assert loop.time() - killed_at_s < 1.0
    finally:
        with contextlib.suppress(ProcessLookupError):
            victim.kill()
        await victim.wait()


def beat(progress: int) -> wire.Heartbeat:
    return wire.Heartbeat(1, 0, 0, progress, {}, 0, 0.0, 0, 0)


async def test_a_flood_of_valid_frames_is_read_no_faster_than_it_is_needed(house: House) -> None:
    """Others are heard meanwhile, and the report names who floods."""
    byzantine, _ = await house.ready("byzantine")
    honest, _ = await house.ready("honest", "another token")
    byzantine.say(*(slept() for _ in range(280)))
    honest.say(report(1))
    await house.ear.until("message", "honest", 1, report(1))
    byzantine.say(report(7))
    await house.ear.until("message", "byzantine", 1, report(7))
    (told,) = [told for told in house.door.refusals() if told.worker == "byzantine"]
    assert "read no faster" in told.reason


async def test_who_says_more_than_could_be_read_in_time_is_barred(house: House) -> None:
    """Held for so long, it would be taken for dead, and its place would be leased again."""
    byzantine, _ = await house.ready("byzantine")
    byzantine.say(*(slept() for _ in range(2_000)))
    await house.ear.until("barred", "byzantine", 1, "far more than its time and its orders can need")


async def test_of_heartbeats_that_come_too_soon_the_last_one_counts(house: House) -> None:
    peer, _ = await house.ready()
    for progress in range(200):
        peer.say(beat(progress))
    await house.ear.until("message", "w", 1, beat(199))
    assert sum(what[0] == "message" for what in house.ear.heard) < 60
    peer.say(slept())
    await house.ear.until("message", "w", 1, slept())
    assert not [told for told in house.door.refusals() if told.worker]


@pytest.mark.alone
async def test_ten_times_as_much_as_is_needed_bars_a_worker(house: House) -> None:
    byzantine, _ = await house.ready()
    with contextlib.suppress(ConnectionError):
        byzantine.writer.write(wire.encode(slept()) * 40_000)
        await byzantine.writer.drain()
    await house.ear.until("barred", "w", 1, "far more than its time and its orders can need")
    assert len(house.ear.heard) < 4_000


async def test_a_worker_that_begins_anew_too_often_is_let_in_no_faster(house: House) -> None:
    _, welcome = await house.ready()
    answers: list[object] = []
    for _ in range(OPENINGS_BURST + 4):
        peer = await house.dial()
        peer.say(hello("w", welcome.session_key, resume=True))
        answers.append(await peer.hear())
    assert wire.RefusedFrame("begins anew too often", retry=True) in answers
    assert sum(isinstance(answer, wire.Welcome) for answer in answers) <= OPENINGS_BURST + 2
    for _ in range((FAR_BEYOND + 3) * OPENINGS_BURST):
        peer = await house.dial()
        peer.say(hello("w", welcome.session_key, resume=True))
        answers.append(await peer.hear())
        await peer.aclose()
    assert any(what[0] == "barred" for what in house.ear.heard)


async def test_a_report_on_weights_that_cannot_be_is_heard_without_its_figures(house: House) -> None:
    peer, _ = await house.ready()
    peer.say(wire.WeightsReport(1, "", 2**53 - 1, 86_400.0, 86_400.0, 5))
    await house.ear.until("message", "w", 1, report(1))
    believed = wire.WeightsReport(2, "", 1_000, 0.0, 0.0, 5)
    peer.say(believed)
    await house.ear.until("message", "w", 1, believed)
    peer.say(*(report(version) for version in range(100)))
    peer.say(slept())
    await house.ear.until("message", "w", 1, slept())
    assert len(house.ear.heard) < 24
    told = {told.reason: told.count for told in house.door.refusals()}
    assert told["loaded weights for more time than has passed"] == 1
    assert told["about weights that it was not told to load"] > 80
