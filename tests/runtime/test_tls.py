"""TLS between a run and its peers: whom one believes, what unauthenticated peers cost, and relays over HTTPS."""

import asyncio
import contextlib
import socket
import ssl
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from elastic.compose.relay import weights_relay
from elastic.config import Config
from elastic.protocol import tls, wire
from elastic.protocol.connection import ConnectionLost, SessionRefused
from elastic.protocol.endpoint import Address, Endpoint
from elastic.protocol.sockets import listening_socket
from elastic.protocol.tls import Certificate, TlsError, TlsServer
from elastic.runtime.gateway import Gateway
from elastic.weights.errors import RelayUnavailable
from elastic.weights.http import HttpRelay
from elastic.weights.rights import RelayRights
from elastic.worker.connection import Ticket, dial
from tests.runtime.test_gateway import READY, WELCOME, Ear

PATIENCE_S = 10.0


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    return tls.run_certificate(tmp_path_factory.mktemp("run"), ["trainer.example", "10.0.0.5"])


@pytest.fixture(scope="session")
def another(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    return tls.run_certificate(tmp_path_factory.mktemp("another"), ["trainer.example"])


class Echo(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.transport.write(data)  # type: ignore[attr-defined]


@contextlib.asynccontextmanager
async def serving(
    certificate: Certificate,
    protocol: type[asyncio.Protocol] = Echo,
    most: int = 8,
    timeout_s: float = PATIENCE_S,
    refuse: tls.Refuse = lambda address, reason: None,
    expected: int = 0,
) -> AsyncIterator[int]:
    listener = listening_socket("127.0.0.1", 0)
    server = TlsServer(listener, certificate, protocol, most, timeout_s, refuse, expected=lambda: expected)
    try:
        yield listener.getsockname()[1]
    finally:
        server.close()


def test_a_runs_certificate_is_made_once_and_dated_back(tmp_path: Path) -> None:
    made = tls.run_certificate(tmp_path, ["trainer.example", "10.0.0.5", "10.0.0.5"])
    assert tls.run_certificate(tmp_path, ["elsewhere"]) == made
    text = ssl._ssl._test_decode_cert(str(made.chain))  # type: ignore[attr-defined]
    assert set(text["subjectAltName"]) == {("DNS", "trainer.example"), ("IP Address", "10.0.0.5")}
    hours = (time.time() - ssl.cert_time_to_seconds(text["notBefore"])) / 3600
    assert hours > 23, "an hour's difference between two clocks must not matter"
    assert all(path.stat().st_mode & 0o077 == 0 for path in (tmp_path / "tls").iterdir())


def test_a_certificate_that_is_given_must_be_one(
    tmp_path: Path, certificate: Certificate, another: Certificate
) -> None:
    given = tls.given_certificate(certificate.chain, certificate.key)
    assert given.fingerprint == certificate.fingerprint
    nonsense = tmp_path / "cert.pem"
    nonsense.write_text("nonsense")
    for chain, key, words in (
        (tmp_path / "nosuch.pem", certificate.key, "nosuch.pem .*No such file"),
        (nonsense, certificate.key, "not a certificate in PEM"),
        (certificate.chain, another.key, "[Kk][Ee][Yy].*[Mm][Ii][Ss][Mm][Aa][Tt][Cc][Hh]"),
    ):
        with pytest.raises(TlsError, match=words):
            tls.given_certificate(chain, key)


async def test_what_a_peer_says_with_the_end_of_its_handshake_is_heard(certificate: Certificate) -> None:
    """In one segment, where nobody has yet asked for it."""
    async with serving(certificate) as port:
        for _ in range(20):
            reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=tls.pinning_context())
            writer.write(b"early")
            async with asyncio.timeout(PATIENCE_S):
                assert await reader.readexactly(5) == b"early"
            tls.check_pin(writer.transport, certificate.fingerprint)
            with pytest.raises(TlsError, match="another certificate"):
                tls.check_pin(writer.transport, "0" * 64)
            writer.close()


async def test_unauthenticated_peers_that_do_not_shake_hands_are_few_and_gone(certificate: Certificate) -> None:
    refused: asyncio.Queue[str] = asyncio.Queue()
    async with serving(certificate, most=4, timeout_s=0.3, refuse=lambda _, why: refused.put_nowait(why)) as port:
        silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(7)]
        _, plain = await asyncio.open_connection("127.0.0.1", port)
        plain.write(b"GET / HTTP/1.1\r\n\r\n")
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=tls.pinning_context())
        writer.write(b"let in")
        async with asyncio.timeout(PATIENCE_S):
            assert await reader.readexactly(6) == b"let in"
            for quiet, _ in silent:
                with contextlib.suppress(ConnectionError):
                    await quiet.read()
            reasons = [await refused.get() for _ in range(8)]
        for _, unauthenticated in [*silent, (reader, plain), (reader, writer)]:
            unauthenticated.close()
    assert reasons.count("too many TLS handshakes are under way") >= 4
    assert "no TLS handshake: the peer spoke plain text" in reasons


async def test_a_worker_shows_nothing_to_whom_it_does_not_believe(
    certificate: Certificate, another: Certificate
) -> None:
    heard = bytearray()

    class Ear(asyncio.Protocol):
        def data_received(self, data: bytes) -> None:
            heard.extend(data)

    async with serving(another, Ear) as port:
        endpoint = Endpoint(f"127.0.0.1:{port}", "", certificate.fingerprint)
        with pytest.raises(
            SessionRefused, match=r"another certificate .* nothing was sent .* take a ticket of the run"
        ):
            await dial(Ticket(endpoint=endpoint, run="r", worker="w", token="t"), "", PATIENCE_S)
    assert not heard


async def test_a_dial_that_fails_says_what_was_tried_and_what_would_mend_it(certificate: Certificate) -> None:
    async def failure(address: str, fingerprint: str) -> str:
        ticket = Ticket(endpoint=Endpoint(address, "", fingerprint), run="r", worker="w", token="t")
        with pytest.raises(ConnectionLost) as caught:
            await dial(ticket, "", 0.4)
        return str(caught.value)

    assert "does not resolve" in (said := await failure("nosuch.invalid:7433", certificate.fingerprint))
    assert "--join HOST:PORT" in said
    plain = await asyncio.get_running_loop().create_server(Echo, "127.0.0.1")
    port = plain.sockets[0].getsockname()[1]
    assert "does not speak TLS 1.3" in await failure(f"127.0.0.1:{port}", certificate.fingerprint)
    plain.close()
    async with serving(certificate) as port:
        said = await failure(f"127.0.0.1:{port}", "")
    assert "plain text" in said
    assert "fingerprint" in said


async def test_relays_over_https_are_believed_by_the_same_trust(
    tmp_path: Path, certificate: Certificate, another: Certificate
) -> None:
    config = Config.model_validate({"model": {"checkpoint": "."}, "run": {"host": "0.0.0.0", "advertise": "127.0.0.1"}})
    async with weights_relay(config, tmp_path, "", RelayRights("owner"), certificate) as relay:
        assert relay.local == str(tmp_path / "weights"), "workers of this machine have the directory itself"
        assert relay.far.startswith("https://127.0.0.1:")

        def use() -> bytes:
            with contextlib.closing(HttpRelay(relay.far, "owner", certificate.anchor)) as trusted:
                trusted.put("k", b"content")
                return trusted.get("k", 2, 3)

        assert await asyncio.to_thread(use) == b"nte"
        for anchor in (another.anchor, ""):
            deceived = HttpRelay(relay.far, "owner", anchor)
            with contextlib.closing(deceived), pytest.raises(RelayUnavailable, match="certificate verify failed"):
                await asyncio.to_thread(deceived.get, "k")


@pytest.mark.parametrize(
    ("advertised", "listening", "seen"),
    [
        ("", "0.0.0.0:7433", "127.0.0.1:7433"),
        ("", "10.0.0.5:7433", "10.0.0.5:7433"),
        ("gpu.example", "0.0.0.0:7433", "gpu.example:7433"),
        ("gpu.example:443", "0.0.0.0:7433", "gpu.example:443"),
        ("[fd00::1]", "[::]:7433", "[fd00::1]:7433"),
        ("[fd00::1]:443", "[::]:7433", "[fd00::1]:443"),
    ],
)
def test_where_a_listener_is_seen(advertised: str, listening: str, seen: str) -> None:
    assert str(Address.parse(listening).seen_as(advertised)) == seen


async def test_a_worker_comes_and_comes_back_over_tls_and_a_silent_one_is_cut(certificate: Certificate) -> None:
    """The link may be cut without a word, so that what is heard no more has to be taken for cut."""
    ear, gateway = Ear(), Gateway()
    door = gateway.open("run", ear, WELCOME, cuts_silent=True)
    endpoint = Endpoint(await gateway.start(certificate=certificate), fingerprint=certificate.fingerprint)
    door.expect("w", "token", "key")
    ticket = Ticket(endpoint=endpoint, run="run", worker="w", token="token")
    connection, welcome = await dial(ticket, "", PATIENCE_S)
    connection.send(READY)
    await ear.until("ready", "w", 1)
    silent_since_s = asyncio.get_running_loop().time()
    await ear.until("disconnected", "w", 1, False)
    assert asyncio.get_running_loop().time() - silent_since_s >= WELCOME.silence_timeout_s * 0.9
    connection, _ = await dial(ticket, welcome.session_key, PATIENCE_S)
    connection.send(READY)
    await ear.until("ready", "w", 2)
    connection.send(wire.Slept())
    await ear.until("message", "w", 2, wire.Slept())
    door.send("w", 2, wire.Sleep())
    slept: asyncio.Future[object] = asyncio.get_running_loop().create_future()

    def hear(messages: list[wire.FromOrchestrator]) -> None:
        if wire.Sleep() in messages:
            slept.set_result(None)

    listening = asyncio.create_task(connection.listen(hear))
    async with asyncio.timeout(PATIENCE_S):
        await slept
    listening.cancel()
    connection.abort()
    await gateway.aclose()


async def test_as_many_as_are_expected_shake_hands_at_once(certificate: Certificate) -> None:
    refused: list[tuple[str, str]] = []
    async with serving(certificate, most=1, refuse=lambda *who_why: refused.append(who_why), expected=24) as port:
        async with asyncio.timeout(PATIENCE_S):
            dialled = [asyncio.open_connection("127.0.0.1", port, ssl=tls.pinning_context()) for _ in range(24)]
            for _, writer in await asyncio.gather(*dialled):
                writer.close()
    assert refused == []


async def test_of_too_many_handshakes_the_crowded_address_loses_its_own(certificate: Certificate) -> None:
    """Somebody far away gets in, who needs longer than others take to come a hundred times; no error is logged."""
    troubles: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: troubles.append(context))
    refused: asyncio.Queue[tuple[str, str]] = asyncio.Queue()
    async with serving(certificate, most=8, refuse=lambda *who_why: refused.put_nowait(who_why)) as port:
        distant = socket.create_connection(("127.0.0.1", port), source_address=("127.0.0.2", 0))
        crowd: list[asyncio.StreamWriter] = []
        for _ in range(100):
            _, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=("127.0.0.3", 0))
            crowd.append(writer)
            await asyncio.sleep(0)
        distant.setblocking(False)
        async with asyncio.timeout(PATIENCE_S):
            told = {await refused.get() for _ in range(90)}
            reader, writer = await asyncio.open_connection(
                sock=distant, ssl=tls.pinning_context(), server_hostname="trainer.example"
            )
            writer.write(b"let in")
            assert await reader.readexactly(6) == b"let in"
        for unauthenticated in [*crowd, writer]:
            unauthenticated.close()
        await asyncio.sleep(0.05)
    reasons = ("too many TLS handshakes are under way", "it dials too often")
    assert told == {("127.0.0.3", reason) for reason in reasons}
    assert not troubles
