"""Where a run's workers pull their weights from."""

import contextlib
import socket
from collections.abc import AsyncIterator
from pathlib import Path

from elastic.config import Config
from elastic.http_server import BodyLimits, serving
from elastic.runtime.gateway import GatewayError
from elastic.weights.relay import open_relay
from elastic.weights.rights import RelayRights
from elastic.weights.server import BLOB_BYTES_MAX, relay_app
from elastic.weights.shared_memory import in_memory


@contextlib.asynccontextmanager
async def weights_relay(
    config: Config, run_dir: Path, address: str = "", rights: RelayRights | None = None
) -> AsyncIterator[tuple[str, RelayRights | None]]:
    """Where workers pull weights from: the run's directory, or that directory over HTTP, and who may do what there.

    An earlier process of the run may have served them at an `address` (host:port), where they are still looked for, and
    given `rights`. While the run lasts its blobs are in shared memory: workers join over loopback, so they are on this
    machine.
    """
    directory = (run_dir / "weights").resolve()
    directory.mkdir(exist_ok=True)
    with in_memory(directory):
        if config.weights.relay == "directory":
            yield str(directory), None
        else:
            rights = rights or RelayRights()
            async with _served(config, directory, address or f"{config.run.host}:0", rights) as url:
                yield url, rights


@contextlib.asynccontextmanager
async def _served(config: Config, directory: Path, address: str, rights: RelayRights) -> AsyncIterator[str]:
    """The directory over HTTP: its URL."""
    host, _, port = address.rpartition(":")
    try:
        listener = socket.create_server((host, int(port)))
    except OSError as error:
        raise GatewayError(
            f"cannot serve weights on {address.removesuffix(':0')}: {error.strerror or error}; name another run.host"
        ) from error
    app = BodyLimits(relay_app(open_relay(str(directory)), rights), BLOB_BYTES_MAX)
    async with serving(app, listener, close_timeout_s=config.scheduler.release_timeout_s) as url:
        yield url
