"""What processes log: enough to find a fault, and no secrets."""

import contextlib
import os
import signal
import socket
import time

import httpx
import msgspec
import pytest

from providers.serving_messages import HOST_VARIABLE, HostSettings, LendOrder, LoadReport

START_TIMEOUT_S = 60


@pytest.mark.nightly
@pytest.mark.slow
def test_a_worker_that_fails_leaves_a_traceback_without_tokens(start, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real serving host and its worker: their logs are what is looked at."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    settings = HostSettings.model_validate({"token": "the-hosts-token", "port": port})
    monkeypatch.setenv(HOST_VARIABLE, settings.to_json())
    process = start("serving-host")
    headers = {"Authorization": "Bearer the-hosts-token"}
    client = httpx.Client(base_url=f"http://127.0.0.1:{port}", headers=headers)
    order = LendOrder(run="run", join="nowhere", worker="w-1", token="the-workers-token")

    def ask(method: str, path: str, body: bytes | None = None) -> LoadReport:
        answer = client.request(method, path, content=body)
        return msgspec.json.decode(answer.content, type=LoadReport)

    deadline_s = time.monotonic() + START_TIMEOUT_S
    ended = ""
    while not ended and time.monotonic() < deadline_s:
        assert process.poll() is None
        time.sleep(0.1)
        with contextlib.suppress(httpx.TransportError):
            ended = ask("POST", "/lend", msgspec.json.encode(order)).ended_error or ask("GET", "/load").ended_error
    assert "nowhere" in ended
    client.close()
    os.kill(process.pid, signal.SIGTERM)
    _, err = process.communicate(timeout=START_TIMEOUT_S)
    assert "worker failed" in err
    assert "Traceback" in err
    assert "the-workers-token" not in err
    assert "the-hosts-token" not in err
