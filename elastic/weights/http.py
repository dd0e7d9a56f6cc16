"""A relay over HTTP, as `elastic.weights.server` serves it: workers pull straight from the trainer's host."""

from typing import Any
from urllib.parse import quote

import httpx
import msgspec

from elastic.protocol.http_clients import sync_client
from elastic.protocol.tls import anchored_context
from elastic.system.host import here
from elastic.weights.blobs import Buffer, check_key, pieces
from elastic.weights.errors import BlobConflict, BlobNotFound, InvalidKey, RelayError, RelayUnavailable

CONNECT_TIMEOUT_S = 5.0
SILENCE_TIMEOUT_S = 10.0
"""Longest pause within a transfer."""
ANSWER_TIMEOUT_S = 60.0
"""Longest time for an answer's body, however steadily it trickles."""

WAIT_S_MAX = 5.0
"""Longest time that a relay is asked to wait for a blob: less than the silence that counts as its end."""

CHUNK_BYTES = 1 << 20
"""Bytes of a request's body that are copied at a time."""

_ERRORS = {
    400: InvalidKey,
    404: BlobNotFound,
    408: RelayUnavailable,
    409: BlobConflict,
    429: RelayUnavailable,
    500: RelayUnavailable,
    502: RelayUnavailable,
    503: RelayUnavailable,
    504: RelayUnavailable,
}


class HttpRelay:
    """`elastic.weights.relay.Relay` at a URL. Threads may share it; the token is sent, never shown.

    Over HTTPS the relay's certificate is `anchor` (PEM) or by it; without one it is by whom this machine trusts.
    """

    def __init__(
        self,
        url: str,
        token: str | None = None,
        anchor: str = "",
        *,
        chunk_bytes: int = CHUNK_BYTES,
        answer_timeout_s: float = ANSWER_TIMEOUT_S,
    ) -> None:
        self._url = url.rstrip("/")
        self._chunk_bytes = chunk_bytes
        self._answer_timeout_s = answer_timeout_s
        headers = {"authorization": f"Bearer {token}"} if token else {}
        timeout = httpx.Timeout(SILENCE_TIMEOUT_S, connect=CONNECT_TIMEOUT_S)
        anchored: dict[str, Any] = {"verify": anchored_context(anchor)} if anchor and url.startswith("https:") else {}
        # Proxies are for the way out; a relay is named by the run itself.
        self._client = sync_client(url, by_proxy=False, headers=headers, timeout=timeout, **anchored)

    def put(self, key: str, *parts: Buffer) -> None:
        size = sum(memoryview(part).nbytes for part in parts)
        content = pieces(parts, self._chunk_bytes)
        self._send("PUT", self._blob(key), content=content, headers={"content-length": str(size)})

    def get(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        # HTTP has no empty range.
        end = "" if length is None else start + max(length, 1) - 1
        status, content = self._send("GET", self._blob(key), headers={"range": f"bytes={start}-{end}"})
        return b"" if status == httpx.codes.REQUESTED_RANGE_NOT_SATISFIABLE else content[:length]

    def get_within(self, key: str, wait_s: float) -> bytes:
        wait_s = min(max(wait_s, 0.0), WAIT_S_MAX)
        return self._send("GET", self._blob(key), params={"wait_s": f"{wait_s:.3f}"})[1]

    def list_keys(self, prefix: str = "") -> list[str]:
        url = f"{self._url}/blobs"
        _, content = self._send("GET", url, params={"prefix": prefix})
        try:
            return msgspec.json.decode(content, type=list[str])
        except msgspec.DecodeError as error:
            raise RelayError(f"{url}: not a relay ({error})") from error

    def delete(self, key: str) -> None:
        self._send("DELETE", self._blob(key))

    def close(self) -> None:
        self._client.close()

    def _blob(self, key: str) -> str:
        return f"{self._url}/blobs/{quote(check_key(key))}"

    def _send(self, method: str, url: str, **options: Any) -> tuple[int, bytes]:
        try:
            with self._client.stream(method, url, **options) as response:
                content = _read(response, self._answer_timeout_s)
        except httpx.InvalidURL as error:
            raise RelayError(f"{url}: {error}") from error
        except httpx.RequestError as error:
            raise RelayUnavailable(f"{method} {url}: {str(error) or type(error).__name__}") from error
        status = response.status_code
        if response.is_success or status == httpx.codes.REQUESTED_RANGE_NOT_SATISFIABLE:
            return status, content
        raise _ERRORS.get(status, RelayError)(f"{method} {url}: {status} {content[:300].decode(errors='replace')}")


def _read(response: httpx.Response, timeout_s: float) -> bytes:
    deadline_s = here().monotonic() + timeout_s
    content = bytearray()
    for chunk in response.iter_bytes():
        content += chunk
        if here().monotonic() > deadline_s:
            raise httpx.ReadTimeout(f"no complete answer within {timeout_s} s")
    return bytes(content)
