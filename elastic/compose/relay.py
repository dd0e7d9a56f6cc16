"""Where a run's workers pull their weights from."""

import asyncio
import contextlib
import secrets
import socket
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import uvicorn

from elastic.config import Config
from elastic.runtime.gateway import GatewayError
from elastic.weights.relay import open_relay
from elastic.weights.server import relay_app
from elastic.weights.shared_memory import in_memory


@contextlib.asynccontextmanager
async def weights_relay(config: Config, run_dir: Path) -> AsyncIterator[tuple[str, str]]:
    """Where workers pull weights from: the run's directory, or that directory over HTTP.

    While the run lasts its blobs are in shared memory: workers join over loopback, so they are on this machine.
    """
    directory = (run_dir / "weights").resolve()
    directory.mkdir(exist_ok=True)
    with in_memory(directory):
        if config.weights.relay == "directory":
            yield str(directory), ""
        else:
            async with _served(config, directory) as served:
                yield served


@contextlib.asynccontextmanager
async def _served(config: Config, directory: Path) -> AsyncIterator[tuple[str, str]]:
    """The directory over HTTP: its URL and the token that it asks for."""
    try:
        listener = socket.create_server((config.run.host, 0))
    except OSError as error:
        raise GatewayError(
            f"cannot serve weights on {config.run.host}: {error.strerror or error}; name another run.host"
        ) from error
    token, timeout_s = secrets.token_urlsafe(32), config.scheduler.release_timeout_s
    app = relay_app(open_relay(str(directory)), token)
    server = _Server(uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=1))
    serving = asyncio.create_task(server.serve(sockets=[listener]), name="weights relay")
    try:
        yield "http://{}:{}".format(*listener.getsockname()[:2]), token
    finally:
        server.should_exit = True
        await asyncio.wait({serving}, timeout=timeout_s)
        serving.cancel()
        await asyncio.wait({serving}, timeout=timeout_s)


class _Server(uvicorn.Server):
    """Leaves signals to the run, which ends with it anyway."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
