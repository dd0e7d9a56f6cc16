"""Where a run's workers pull their weights from."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import NamedTuple

import structlog

from elastic.config import Config
from elastic.protocol.endpoint import Address
from elastic.protocol.run_secrets import RunSecrets
from elastic.protocol.sockets import address_of, listening_socket
from elastic.protocol.tls import Certificate
from elastic.runtime.gateway import GatewayError, GatewayOutage, cannot_listen
from elastic.weights.errors import RelayError, RelayUnavailable
from elastic.weights.relay import below, open_relay
from elastic.weights.rights import RelayRights
from elastic.weights.shared_memory import in_memory

log = structlog.get_logger(__name__)


class RunRelay(NamedTuple):
    """The relay from which workers pull weights: `local` for workers on this machine, `far` for all others. `rights`
    are the rights of each token over HTTP."""

    local: str
    far: str
    rights: RelayRights | None


@contextlib.asynccontextmanager
async def weights_relay(
    config: Config,
    run_dir: Path,
    address: str = "",
    rights: RelayRights | None = None,
    certificate: Certificate | None = None,
) -> AsyncIterator[RunRelay]:
    """Serves the run's weights: as its directory to this machine, and over HTTPS to others, if there is a certificate.

    An earlier process of the run may have served them at an `address` (host:port), where they are still looked for, and
    given `rights`. While the run lasts its blobs are in shared memory. A relay elsewhere has them below the run's tag.
    """
    if "://" in config.weights.relay:
        async with _elsewhere(below(config.weights.relay, RunSecrets.of(run_dir).tag(run_dir.name))) as url:
            yield RunRelay(url, url, None)
        return
    directory = (run_dir / "weights").resolve()
    directory.mkdir(exist_ok=True)
    with in_memory(directory):
        if config.weights.relay == "directory" and certificate is None:
            yield RunRelay(str(directory), str(directory), None)
            return
        rights = rights or RelayRights()
        port = Address.parse(address).port if address else _port(config)
        async with _served(config, directory, port, rights, certificate) as listening:
            scheme = "http" if certificate is None else "https"
            here = listening.here()
            local = f"{scheme}://{here}"
            far = f"{scheme}://{here._replace(host=config.run.advertised_host or here.host)}"
            yield RunRelay(str(directory) if config.weights.relay == "directory" else local, far, rights)


def _port(config: Config) -> int:
    return config.weights.port or (config.run.port + 1 if config.run.port else 0)


@contextlib.asynccontextmanager
async def _elsewhere(url: str) -> AsyncIterator[str]:
    """A relay that does not end with the run: of the run nothing stays there. Raises `GatewayError`."""
    try:
        relay = open_relay(url)
        # What is there may be of a trainer that has outlived an earlier process of the run.
        await asyncio.to_thread(relay.list_keys)
    except RelayError as error:
        kind = GatewayOutage if isinstance(error, RelayUnavailable) else GatewayError
        raise kind(f"weights.relay: {error}") from error

    def clear() -> None:
        with contextlib.closing(relay):
            for key in relay.list_keys():
                relay.delete(key)

    try:
        yield url
    finally:
        try:
            await asyncio.to_thread(clear)
        except RelayError as error:
            log.warning("weights are left on the relay", relay=url, reason=str(error))


@contextlib.asynccontextmanager
async def _served(
    config: Config, directory: Path, port: int, rights: RelayRights, certificate: Certificate | None
) -> AsyncIterator[Address]:
    """The directory over HTTP, or HTTPS: where it listens."""
    # Few runs serve their weights, and what serves HTTP takes long to import.
    from elastic.protocol.http_server import BodyLimits, CallerLimits, serving, too_many
    from elastic.weights.server import BLOB_BYTES_MAX, relay_app

    host = config.run.host
    try:
        listener = listening_socket(host, port)
    except OSError as error:
        words = f"cannot serve weights on {str(Address(host, port)).removesuffix(':0')}: {error.strerror or error}"
        raise cannot_listen(error, f"{words}; name another run.host or weights.port") from error
    bounded = BodyLimits(relay_app(open_relay(str(directory)), rights), BLOB_BYTES_MAX)
    app = CallerLimits(bounded, too_many)
    close_timeout_s = config.scheduler.release_timeout_s
    async with serving(app, listener, close_timeout_s=close_timeout_s, certificate=certificate):
        yield address_of(listener)
