import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
import torch
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from elastic.weights.directory import DirectoryRelay
from elastic.weights.errors import BlobNotFound, RelayError, RelayUnavailable
from elastic.weights.http import HttpRelay
from elastic.weights.publisher import publish_keyframe
from elastic.weights.records import keyframe_key
from elastic.weights.rights import RelayRights
from elastic.weights.server import relay_app
from tests.small_files import small_files
from tests.weights.signed import KEY, TRUST, pull


@pytest.mark.parametrize("offered", [None, "wrong", "Ä"])
def test_without_the_token_nothing_is_served(relay_url: str, token: str, offered: str | None):
    insider = HttpRelay(relay_url, token)
    insider.put("secret", b"weights")
    headers = {} if offered is None else {b"authorization": f"Bearer {offered}".encode()}
    for method, path in [("GET", "secret"), ("PUT", "new"), ("DELETE", "secret"), ("GET", "")]:
        answer = httpx.request(method, f"{relay_url}/blobs/{path}".rstrip("/"), headers=headers)  # type: ignore[arg-type]
        assert answer.status_code == 401
        assert b"weights" not in answer.content
    assert insider.list_keys() == ["secret"]
    assert insider.get("secret") == b"weights"
    insider.close()


def test_a_wrong_token_is_an_error_that_does_not_show_it(relay_url: str):
    relay = HttpRelay(relay_url, "hunter2")
    with pytest.raises(RelayError, match="401") as caught:
        relay.get("k")
    assert not isinstance(caught.value, RelayUnavailable)
    assert "hunter2" not in str(caught.value)
    relay.close()


def test_a_server_without_a_token_is_refused(tmp_path):
    with pytest.raises(ValueError, match="token"):
        relay_app(DirectoryRelay(tmp_path), RelayRights(""))


@pytest.mark.parametrize("key", ["..%2f..%2fetc", ".incoming/x", "a%00b"])
def test_the_server_checks_keys_itself(relay_url: str, token: str, key: str):
    headers = {"authorization": f"Bearer {token}"}
    for method in ("GET", "PUT", "DELETE"):
        assert httpx.request(method, f"{relay_url}/blobs/{key}", headers=headers).status_code == 400


@pytest.mark.parametrize("wanted", ["99999999999999999999-", "9" * 99 + "-" + "9" * 99, f"{2**63}-", f"{2**62 + 1}-5"])
def test_a_range_that_lies_behind_everything_is_none(relay_url: str, token: str, wanted: str):
    relay = HttpRelay(relay_url, token)
    relay.put("k", b"content")
    headers = {"authorization": f"Bearer {token}", "range": f"bytes={wanted}"}
    assert httpx.get(f"{relay_url}/blobs/k", headers=headers).status_code == 416
    assert relay.get("k") == b"content"
    relay.close()


def test_a_blob_beyond_the_limit_is_refused(tmp_path, server: Callable, token: str):
    with server(relay_app(DirectoryRelay(tmp_path), RelayRights(token), blob_bytes_max=10)) as url:
        relay = HttpRelay(url, token)
        with pytest.raises(RelayError, match="413"):
            relay.put("k", bytes(11))
        relay.put("k", bytes(10))
        assert relay.list_keys() == ["k"]
        relay.close()


@pytest.mark.parametrize("size", [0, 1, 63, 64, 65, 128, 1000])
def test_a_blob_passes_in_pieces(tmp_path, server: Callable, token: str, size: int):
    asked: list[int | None] = []

    class Asked(DirectoryRelay):
        def get(self, key: str, start: int = 0, length: int | None = None) -> bytes:
            asked.append(length)
            return super().get(key, start, length)

    content = bytes(range(256)) * 4
    with server(relay_app(Asked(tmp_path), RelayRights(token), piece_bytes=64)) as url:
        relay = HttpRelay(url, token, chunk_bytes=100)
        relay.put("k", content[: size // 2], memoryview(content)[size // 2 : size])
        assert DirectoryRelay(tmp_path).get("k") == relay.get("k") == content[:size]
        assert relay.get("k", 10) == content[10:size]
        for length in (0, 1, 63, 64, 65, 200, 2000):
            assert relay.get("k", 3, length) == content[3:size][:length]
        plain = httpx.get(f"{url}/blobs/k", headers={"authorization": f"Bearer {token}"})
        assert (plain.status_code, plain.content) == (200, content[:size])
        relay.close()
    assert all(length is not None and length <= 64 for length in asked)


def test_a_get_may_wait_for_a_blob_that_is_not_there_yet(tmp_path, server: Callable, token: str):
    looked = threading.Event()

    class Looked(DirectoryRelay):
        def get(self, key: str, start: int = 0, length: int | None = None) -> bytes:
            try:
                return super().get(key, start, length)
            finally:
                looked.set()

    directory = Looked(tmp_path)
    with server(relay_app(directory, RelayRights(token))) as url, ThreadPoolExecutor(1) as executor:
        relay = HttpRelay(url, token)
        with pytest.raises(BlobNotFound):
            relay.get_within("k", 0.0)
        looked.clear()
        asked = executor.submit(relay.get_within, "k", 5.0)
        assert looked.wait(30)
        directory.put("k", b"content")
        assert asked.result(30) == b"content"
        headers = {"authorization": f"Bearer {token}"}
        for wait in ("-1", "10", "nan", "1e9"):
            assert httpx.get(f"{url}/blobs/none?wait_s={wait}", headers=headers).status_code == 404
        relay.close()


def test_a_full_disk_under_the_server_is_not_asked_again(tmp_path, server: Callable, token: str):
    with server(relay_app(DirectoryRelay(tmp_path), RelayRights(token), piece_bytes=64)) as url:
        relay = HttpRelay(url, token)
        with small_files(1 << 20), pytest.raises(RelayError, match=r"507 .*File too large") as caught:
            relay.put("k", bytes(2 << 20))
        assert not isinstance(caught.value, RelayUnavailable)
        relay.close()


def test_nobody_listening_is_unavailable():
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    relay = HttpRelay(f"http://127.0.0.1:{port}")
    with pytest.raises(RelayUnavailable, match=str(port)):
        relay.get("k")
    relay.close()


@pytest.mark.parametrize("url", ["http://127.0.0.1:99999", "http://"])
def test_an_impossible_address_is_an_error(url: str):
    relay = HttpRelay(url)
    with pytest.raises(RelayError):
        relay.get("k")
    relay.close()


@pytest.mark.parametrize(("status", "again"), [(503, True), (500, True), (429, True), (403, False), (507, False)])
def test_a_status_says_whether_asking_again_may_help(server: Callable, status: int, again: bool):
    async def answer(request: Request) -> Response:
        return PlainTextResponse("the cause", status)

    with server(Starlette(routes=[Route("/{path:path}", answer)])) as url:
        relay = HttpRelay(url)
        with pytest.raises(RelayError, match="the cause") as caught:
            relay.get("k")
        assert isinstance(caught.value, RelayUnavailable) == again
        with pytest.raises(RelayError):
            relay.list_keys()
        relay.close()


def test_something_else_at_the_address_is_not_taken_for_a_relay(server: Callable):
    async def answer(request: Request) -> Response:
        return PlainTextResponse("<html>welcome</html>")

    with server(Starlette(routes=[Route("/{path:path}", answer)])) as url:
        relay = HttpRelay(url)
        with pytest.raises(RelayError, match="not a relay"):
            relay.list_keys()
        relay.close()


class BreaksTransfers:
    """Serves `app`, but of the first answers for `key` only half arrives before the connection is gone."""

    def __init__(self, app: ASGIApp, key: str, times: int) -> None:
        self._app = app
        self._key = key
        self.left = times

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def cut(message: Message) -> None:
            if message["type"] == "http.response.body" and message["body"]:
                self.left -= 1
                await send({**message, "body": message["body"][: len(message["body"]) // 2], "more_body": True})
                raise ConnectionResetError
            await send(message)

        breaks = self.left > 0 and scope["path"].endswith(self._key)
        await self._app(scope, receive, cut if breaks else send)


def test_a_connection_lost_in_the_middle_is_unavailable_and_the_pull_goes_on(tmp_path, server: Callable, token: str):
    source = DirectoryRelay(tmp_path)
    weights = {"w": torch.randn(64, 64).to(torch.bfloat16)}
    publish_keyframe(source, "run", 1, weights, {}, KEY)
    app = BreaksTransfers(relay_app(source, RelayRights(token)), keyframe_key(1), times=3)
    with server(app) as url:
        relay = HttpRelay(url, token)
        with pytest.raises(RelayUnavailable):
            relay.get(keyframe_key(1))
        pulled = pull(relay, TRUST, 1, chunk_bytes=1000)
        assert app.left <= 0
        assert torch.equal(pulled["w"].view(torch.int16), weights["w"].view(torch.int16))
        relay.close()


def test_an_answer_that_only_trickles_is_given_up(server: Callable):
    async def trickle() -> AsyncIterator[bytes]:
        while True:
            yield b"."
            await asyncio.sleep(0.01)

    async def answer(request: Request) -> Response:
        return StreamingResponse(trickle(), 206)

    with server(Starlette(routes=[Route("/{path:path}", answer)])) as url:
        relay = HttpRelay(url, answer_timeout_s=0.2)
        with pytest.raises(RelayUnavailable, match="no complete answer"):
            relay.get("k")
        relay.close()
