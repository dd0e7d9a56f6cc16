import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import uvicorn
from starlette.types import ASGIApp

from elastic.weights.directory import DirectoryRelay
from elastic.weights.http import HttpRelay
from elastic.weights.relay import Relay
from elastic.weights.rights import RelayRights
from elastic.weights.server import relay_app
from elastic.weights.shared_memory import SHARED_MEMORY, in_memory

TOKEN = "a token of this test"


@contextmanager
def serve(app: ASGIApp, port: int = 0) -> Iterator[str]:
    """A real server on loopback for a while; yields its URL."""
    config = uvicorn.Config(app, log_level="critical", lifespan="off", ws="none")
    server = uvicorn.Server(config)
    with socket.create_server(("127.0.0.1", port)) as listener:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            # The socket listens already: what connects early waits in its backlog.
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(timeout=10)
            assert not thread.is_alive()


@pytest.fixture
def server() -> Callable:
    return serve


@pytest.fixture
def relay_url(tmp_path: Path) -> Iterator[str]:
    with serve(relay_app(DirectoryRelay(tmp_path / "served"), RelayRights(TOKEN))) as url:
        yield url


@pytest.fixture
def token() -> str:
    return TOKEN


@pytest.fixture(params=["directory", "memory", "http"])
def relay(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Relay]:
    """Every kind of relay, each empty."""
    if request.param == "http":
        relay: Relay = HttpRelay(request.getfixturevalue("relay_url"), TOKEN)
    else:
        relay = DirectoryRelay(tmp_path / "relay")
    with ExitStack() as stack:
        if request.param == "memory":
            (tmp_path / "relay").mkdir()
            stack.enter_context(in_memory(tmp_path / "relay", request.getfixturevalue("memory")))
        yield relay
        relay.close()
        relay.close()


@pytest.fixture
def memory() -> Iterator[Path]:
    """A place of this test's own in shared memory, most of which has to be free."""
    with TemporaryDirectory(dir=SHARED_MEMORY) as place:
        yield Path(place)
