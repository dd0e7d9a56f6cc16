"""The contract of a relay: a place for immutable blobs, between a trainer and its workers.

Source: docs/design.md, `Relay`.
"""

from pathlib import Path
from typing import Protocol, runtime_checkable
from urllib.parse import unquote, urlsplit, urlunsplit

import structlog

from elastic.system.installed import installed
from elastic.weights.blobs import Buffer
from elastic.weights.directory import DirectoryRelay
from elastic.weights.errors import BlobConflict, RelayError

log = structlog.get_logger(__name__)

REQUESTS = "requests/"
"""Keys of workers' requests for a keyframe begin with this. Workers put nothing else."""


class Relay(Protocol):
    """Blobs under keys such as `versions/00000007/manifest.json`.

    Every call blocks its thread, for a bounded time. A blob appears whole or not at all, and does not change
    while it exists. All calls may raise `RelayError`; `RelayUnavailable` where asking again may help.
    """

    def put(self, key: str, *parts: Buffer) -> None:
        """Store the concatenation of `parts`. Again with the same content: nothing; other content: `BlobConflict`."""
        ...

    def get(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        """Bytes from `start`, `length` at most, as a slice: nothing beyond the end. Raises `BlobNotFound`."""
        ...

    def list_keys(self, prefix: str = "") -> list[str]:
        """Keys that begin with `prefix`, sorted."""
        ...

    def delete(self, key: str) -> None:
        """Remove the blob if it is there."""
        ...

    def close(self) -> None:
        """Give connections back. Safe to call twice."""
        ...


@runtime_checkable
class WaitingRelay(Protocol):
    """A relay that lets its readers wait, since it is far cheaper than being asked again and again."""

    def get_within(self, key: str, wait_s: float) -> bytes:
        """A whole blob, which may come within `wait_s`, some seconds at most. Raises `BlobNotFound` after that."""
        ...


def claim(relay: Relay, key: str, *parts: Buffer) -> None:
    """Puts content under a key that belongs to the caller: other content there is forged, and is replaced."""
    try:
        relay.put(key, *parts)
    except BlobConflict as error:
        log.warning("blob replaced", key=key, reason=str(error))
        relay.delete(key)
        relay.put(key, *parts)


def open_relay(url: str, token: str | None = None, anchor: str = "") -> Relay:
    """The relay at `url`: `http(s)://host:port[/base]` (with its bearer `token`), `file:///directory` or a path.

    Over HTTPS its certificate is `anchor` (PEM), or by it; without one it is by whom this machine trusts. Other schemes
    are entry points of the group `elastic.relays`, each called with these three.

    Opening touches nothing. Raises `RelayError` for another scheme.
    """
    if "://" not in url:
        return DirectoryRelay(Path(url))
    parts = urlsplit(url)
    if parts.scheme == "file" and parts.netloc in ("", "localhost"):
        return DirectoryRelay(Path(unquote(parts.path)))
    kinds = installed("elastic.relays")
    if parts.scheme in kinds:
        return kinds[parts.scheme].load()(url, token, anchor)
    allowed = ", ".join(f"{scheme}://" for scheme in sorted(kinds))
    raise RelayError(f"relay {url}: allowed are {allowed}, file:/// and a directory's path")


def below(url: str, name: str) -> str:
    """The URL of the relay `name` within that at `url`."""
    parts = urlsplit(url)
    return urlunsplit(parts._replace(path=f"{parts.path.rstrip('/')}/{name}"))
