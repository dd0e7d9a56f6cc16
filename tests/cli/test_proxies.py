"""Ways to servers: none through a proxy to this machine, and a proxy that is in the way is named."""

import asyncio
import re
import socket
import ssl
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.protocol.api_client import Client, ServerUnreachable
from elastic.protocol.http_clients import PublicTrust, async_client, sync_client
from elastic.protocol.proxies import HttpSettingsError, proxies_of_boto, proxy_for
from elastic.protocol.tls import run_certificate
from elastic.server.settings import ServerSettings
from elastic.server.support.bundle import _health

ROOT = Path(__file__).parents[2]
VARIABLES = [f"{name}_proxy" for name in ("http", "https", "all", "no")]
PROXY = "http://user:hidden@proxy.example:3128"
LOOPBACK = [
    "http://127.0.0.1:7430",
    "http://localhost",
    "https://[::1]:7430",
    "http://127.8.8.8",
    "http://[::ffff:127.0.0.1]",
]


class WatchedProxy(NamedTuple):
    """A proxy that says no, and what it was asked."""

    url: str
    asked: list[str]


@pytest.fixture
def proxy(monkeypatch: pytest.MonkeyPatch) -> Iterator[WatchedProxy]:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        asked: list[str] = []

        def answer() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                with connection:
                    asked.append(connection.recv(4096).decode())
                    connection.sendall(b"HTTP/1.1 403 Forbidden\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        yield WatchedProxy(f"http://user:hidden@127.0.0.1:{listener.getsockname()[1]}", asked)
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(5)


@pytest.mark.parametrize(
    ("url", "environment", "variable"),
    [
        *((url, {"http_proxy": PROXY, "https_proxy": PROXY, "all_proxy": PROXY}, "") for url in LOOPBACK),
        ("http://far.example", {"http_proxy": PROXY}, "http_proxy"),
        ("http://far.example", {"HTTP_PROXY": PROXY}, "HTTP_PROXY"),
        ("http://far.example", {"HTTP_PROXY": PROXY, "REQUEST_METHOD": "GET"}, ""),
        ("https://far.example", {"http_proxy": PROXY}, ""),
        ("https://far.example", {"http_proxy": PROXY, "all_proxy": "proxy:3128"}, "all_proxy"),
        ("http://far.example", {"all_proxy": PROXY, "no_proxy": "*"}, ""),
        ("http://far.example", {"all_proxy": PROXY, "NO_PROXY": "near.example, .example"}, ""),
        ("http://far.example:80", {"all_proxy": PROXY, "no_proxy": "far.example:80"}, ""),
        ("http://afar.example", {"all_proxy": PROXY, "no_proxy": "far.example"}, "all_proxy"),
        ("http://[fd00::2]:1", {"all_proxy": PROXY, "no_proxy": "[::1],[fd00::2]"}, ""),
        ("http://[fd00::2]:1", {"all_proxy": PROXY, "no_proxy": "localhost,::1,fd00::/8"}, ""),
        ("http://10.1.2.3", {"all_proxy": PROXY, "no_proxy": "10.0.0.0/8"}, ""),
        ("http://11.1.2.3", {"all_proxy": PROXY, "no_proxy": "10.0.0.0/8,[::1]"}, "all_proxy"),
    ],
)
def test_which_proxy(url: str, environment: Mapping[str, str], variable: str) -> None:
    found = proxy_for(url, environment)
    assert (found.variable if found else "") == variable


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("socks5://user:hidden@proxy:1080", "all_proxy: socks5://proxy:1080 needs the package socksio"),
        ("http://user:hidden@[::1", "all_proxy: found 'http://[::1'"),
        ("http://proxy:hidden:8", "all_proxy: found"),
        ("ftp://proxy", "allowed: http://, https://, socks5://, socks5h://"),
        ("http://", "allowed"),
        ("a proxy", "allowed"),
    ],
)
def test_bad_settings_are_one_message(value: str, words: str) -> None:
    with pytest.raises(HttpSettingsError, match=re.escape(words)) as found:
        proxy_for("http://far.example", {"all_proxy": value})
    assert "user" not in str(found.value)


TEXT = st.text("htps:/[]@%.,*0123456789abf-_ #?\t\\é", max_size=20)


@given(url=st.sampled_from(["", "http://", "https://"]), rest=TEXT, proxy=TEXT, bypassed=TEXT)
def test_whatever_stands_there_a_client_is_made_or_refused_in_words(
    url: str, rest: str, proxy: str, bypassed: str
) -> None:
    try:
        found = proxy_for(url + rest, {"all_proxy": proxy, "no_proxy": bypassed})
    except HttpSettingsError:
        return
    assert found is None or found.url


def test_no_key_goes_to_a_proxy_on_the_way_to_this_machine(
    proxy: WatchedProxy, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in VARIABLES[:3]:
        monkeypatch.setenv(name, proxy.url)
    monkeypatch.setenv("no_proxy", "[::1]")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        nobody = f"http://127.0.0.1:{taken.getsockname()[1] - 1}"
    with Client(nobody, "key", patience_s=0) as client, pytest.raises(ServerUnreachable) as found:
        client.info()
    assert "through" not in str(found.value)
    assert "status" not in _health(ServerSettings(home=tmp_path), None, nobody)["healthz"]
    assert proxies_of_boto(nobody) == {}
    assert proxies_of_boto("https://s3.far.example") is proxies_of_boto(None) is None
    assert not proxy.asked


def test_a_proxy_in_the_way_is_named(proxy: WatchedProxy, monkeypatch: pytest.MonkeyPatch, elastic) -> None:
    monkeypatch.setenv("http_proxy", proxy.url)
    monkeypatch.setenv("ELASTIC_API_URL", "http://server.example:7430")
    monkeypatch.setenv("ELASTIC_API_KEY", "key")
    monkeypatch.setenv("ELASTIC_API_PATIENCE_S", "0")
    ended = elastic("api", "info")
    assert ended.code == 1
    said = proxy.url.replace("user:hidden@", "")
    assert f"403 Forbidden (through the proxy {said} of http_proxy)" in ended.err
    assert "hidden" not in ended.err
    assert len(proxy.asked) == 1
    monkeypatch.setenv("http_proxy", "socks5://proxy:1080")
    ended = elastic("api", "info")
    assert (ended.code, ended.out, ended.err.count("\n")) == (2, "", 1)
    assert ended.err.startswith("error: http_proxy: socks5://proxy:1080 needs")
    monkeypatch.setenv("ELASTIC_API_URL", "http://[::1")
    ended = elastic("api", "info")
    assert (ended.code, ended.out, ended.err.count("\n")) == (2, "", 1)


def test_certificates_that_cannot_be_read_are_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", "/nowhere/ca.pem")
    with pytest.raises(HttpSettingsError, match=r"SSL_CERT_FILE: '/nowhere/ca\.pem' has no certificates"):
        sync_client("https://far.example", by_proxy=True)


def test_public_certificates_are_read_when_a_server_speaks_tls() -> None:
    trust = PublicTrust(ssl.PROTOCOL_TLS_CLIENT)
    assert trust.cert_store_stats()["x509_ca"] == 0
    trust.wrap_bio(ssl.MemoryBIO(), ssl.MemoryBIO(), server_hostname="far.example")
    assert trust.cert_store_stats()["x509_ca"] > 100


async def test_a_server_that_nobody_vouches_for_is_refused(tmp_path: Path) -> None:
    certificate = run_certificate(tmp_path, ["127.0.0.1"])
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate.chain, certificate.key)
    listening = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0, ssl=context)
    url = f"https://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    async with listening, async_client() as client:
        with pytest.raises(httpx.ConnectError, match="certificate verify failed"):
            await client.get(url)
        with (
            sync_client(url, by_proxy=False) as client,
            pytest.raises(httpx.ConnectError, match="certificate verify failed"),
        ):
            await asyncio.to_thread(client.get, url)


def test_clients_are_made_in_one_place() -> None:
    makes = re.compile(
        r"httpx\.(Client|AsyncClient)\((?!transport)|httpx\.(get|post|put|delete|request|stream)\(|urllib\.request|"
        r"http\.client|^import requests|aiohttp\.ClientSession\(",
        re.MULTILINE,
    )
    found = {
        str(path.relative_to(ROOT))
        for room in ("elastic", "functions", "providers", "policies", "traces", "benchmarks", "infra")
        for path in (ROOT / room).rglob("*.py")
        if makes.search(path.read_text(encoding="utf-8"))
    }
    # What Elastic is compared with has a client of its own, and so have other people's programs: agents and trainers.
    theirs = {"benchmarks/_harness.py", "benchmarks/_clients/_told.py", "benchmarks/_peers.py"}
    theirs.add("elastic/integrations/trl.py")  # In a trainer's process, without the rest of Elastic.
    assert found == {"elastic/protocol/http_clients.py", "benchmarks/token_plane.py", *theirs}


@pytest.mark.parametrize("key", ["ключ", "a\nb", "a\udcff"], ids=ascii)
def test_a_key_that_no_header_can_hold_is_one_message(key: str) -> None:
    with pytest.raises(HttpSettingsError, match="API key: found characters that no key has") as found:
        Client("http://127.0.0.1:9", key)
    assert key not in str(found.value)
