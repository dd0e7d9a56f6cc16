"""A relay inside a Ray cluster: blobs are objects of its store, which its nodes hand on to each other.

- A detached actor on the head knows the blobs and owns them. The first `put` makes it. It ends some seconds after the
  last blob is deleted, and with its blobs once nobody has asked it for hours: a run was killed and not taken up again.
- Workers on the cluster's nodes read from the store of their node. All others, the trainer among them, go by the Ray
  Client.
- Who may use the cluster may read and write: tokens and certificates are of no use here. Workers believe what the
  trainer has signed.
"""

import contextlib
import math
import os
import threading
import time
from collections.abc import Sequence
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import numpy as np

from elastic.system.plain_values import told
from elastic.weights.blobs import Buffer, check_key
from elastic.weights.errors import BlobConflict, BlobNotFound, RelayError, RelayUnavailable
from providers.ray_connection import HEAD, NAMESPACE, NODE_VARIABLE, RayConnection, RayUnusable, ray
from providers.vendor_calls import called

OPTION, ANSWER_TIMEOUT_S = "answer_timeout_s", 60.0
"""What a URL's query may say: the longest time that the cluster may take for one call. Without it, so long."""
EMPTY_S, UNUSED_S = 10.0, 6 * 3600.0
"""How long an index waits without a blob, and with blobs that nobody asks for: a run's trainer asks at each version."""
ATTEMPTS, RETRY_S = 5, 0.2
"""How often a call to the index is tried: an empty index may end meanwhile, and two may be made at once."""


class BlobIndex:
    """The actor that owns a relay's blobs. It handles one call at a time."""

    def __init__(self, empty_s: float, unused_s: float) -> None:
        self._limits_s = empty_s, unused_s
        self._blobs: dict[str, Any] = {}
        self._asked_s = time.monotonic()
        threading.Thread(target=self._end_when_unused, daemon=True).start()

    def put(self, key: str, content: bytes) -> bool:
        """Keep a blob. Returns False if the key has another blob, which stays."""
        self._asked_s = time.monotonic()
        if key not in self._blobs:
            self._blobs[key] = ray().put(np.frombuffer(content, np.uint8))
            return True
        return memoryview(ray().get(self._blobs[key])) == content

    def find(self, key: str) -> list[Any]:
        """Return the reference of the blob's object in a list, so that Ray does not send the object along."""
        self._asked_s = time.monotonic()
        return [self._blobs[key]] if key in self._blobs else []

    def read(self, key: str, start: int, length: int | None) -> bytes | None:
        """Return a part of a blob, for readers outside the cluster."""
        return next((_slice(ray().get(blob), start, length) for blob in self.find(key)), None)

    def list_keys(self, prefix: str) -> list[str]:
        self._asked_s = time.monotonic()
        return sorted(key for key in self._blobs if key.startswith(prefix))

    def delete(self, key: str) -> None:
        self._asked_s = time.monotonic()
        self._blobs.pop(key, None)

    def _end_when_unused(self) -> None:
        empty_s, unused_s = self._limits_s
        while time.monotonic() - self._asked_s < (unused_s if self._blobs else empty_s):
            time.sleep(min(empty_s, unused_s) / 10)
        os._exit(0)


class RayRelay:
    """`elastic.weights.relay.Relay` at `ray://HOST:PORT/NAME?answer_timeout_s=…`: the client server of a cluster, and
    the relay there."""

    def __init__(self, url: str, token: str | None = None, anchor: str = "", *, unused_s: float = UNUSED_S) -> None:
        parts = urlsplit(url)
        self._url = url
        self._answer_timeout_s = _answer_timeout_s(url)
        self.name = parts.path.strip("/") or "elastic"
        """The name of its actor in the cluster."""
        self._unused_s = unused_s
        self._node = os.environ.get(NODE_VARIABLE, "")
        self._connection = RayConnection(self._node or f"ray://{parts.netloc}")

    def put(self, key: str, *parts: Buffer) -> None:
        check_key(key)
        if not self._ask("put", key, b"".join(parts), make=True):
            raise BlobConflict(f"{self._url}: {key} holds other content already; blobs are immutable")

    def get(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        check_key(key)
        content = self._ask("read", key, start, length)
        if content is None:
            raise BlobNotFound(f"{self._url}: {key}: no such blob")
        return content

    def list_keys(self, prefix: str = "") -> list[str]:
        return self._ask("list_keys", prefix) or []

    def delete(self, key: str) -> None:
        self._ask("delete", check_key(key))

    def close(self) -> None:
        with contextlib.suppress(Exception):
            called(self._answer_timeout_s, self._connection.close)

    def _ask(self, what: str, *arguments: Any, make: bool = False) -> Any:
        """Ask the index. Returns None if there is none and `make` is false."""
        self._connect()
        exceptions = ray().exceptions
        for attempt in range(ATTEMPTS):
            try:
                return called(self._answer_timeout_s, self._answer, what, arguments, make)
            except (exceptions.RayActorError, exceptions.ActorAlreadyExistsError) as error:
                if attempt == ATTEMPTS - 1:
                    raise RelayUnavailable(f"{self._url}: its actor has ended: {told(error)}") from error
                time.sleep(RETRY_S)
            except exceptions.ObjectLostError as error:
                raise BlobNotFound(f"{self._url}: its blob is lost with its node: {told(error)}") from error
            except exceptions.OutOfMemoryError as error:
                raise RelayError(f"{self._url}: no room: {told(error)}") from error
            except (exceptions.RayError, ConnectionError, TimeoutError, RuntimeError) as error:
                if isinstance(error, ConnectionError | TimeoutError):  # The next call is made by a new connection.
                    with contextlib.suppress(Exception):
                        called(self._answer_timeout_s, self._connection.reset)
                cluster = f"the Ray cluster at {self._connection.address}"
                raise RelayUnavailable(f"{self._url}: {cluster} does not answer: {told(error)}") from error
        raise AssertionError

    def _answer(self, what: str, arguments: Sequence[Any], make: bool) -> Any:
        index = self._made() if make else self._found()
        if index is None:
            return None
        if what != "read" or not self._node:
            return self._got(getattr(index, what).remote(*arguments))
        key, start, length = arguments
        found = self._got(index.find.remote(key))
        return _slice(self._got(found[0]), start, length) if found else None

    def _got(self, reference: Any) -> Any:
        return ray().get(reference, timeout=self._answer_timeout_s)

    def _found(self) -> Any:
        try:
            return ray().get_actor(self.name, namespace=NAMESPACE)
        except ValueError:
            return None

    def _made(self) -> Any:
        index: Any = ray().remote(BlobIndex)
        return index.options(
            name=self.name,
            namespace=NAMESPACE,
            get_if_exists=True,
            lifetime="detached",
            num_cpus=0,
            resources={HEAD: 0.001},
            max_restarts=0,
        ).remote(EMPTY_S, self._unused_s)

    def _connect(self) -> None:
        try:
            self._connection.open(self._answer_timeout_s)
        except RayUnusable as error:
            raise (RelayUnavailable if error.passing else RelayError)(f"{self._url}: {error}") from error


def _answer_timeout_s(url: str) -> float:
    options = dict(parse_qsl(urlsplit(url).query, keep_blank_values=True))
    with contextlib.suppress(ValueError):
        if 0.0 < (found := float(options.pop(OPTION, ANSWER_TIMEOUT_S))) < math.inf and not options:
            return found
    raise RelayError(f"relay {url}: expected ray://HOST:PORT/NAME, and of ?name=value only {OPTION}, a time in seconds")


def _slice(content: Any, start: int, length: int | None) -> bytes:
    return content[start : None if length is None else start + length].tobytes()
