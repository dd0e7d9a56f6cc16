"""A bound on bandwidth: a token bucket, and a relay whose reads go through it."""

import threading
import time

from elastic.weights.blobs import Buffer
from elastic.weights.relay import Relay

BURST_S = 0.01
"""What a link that was idle may send at once, in seconds of its rate."""

SLICE_S, SLICE_BYTES_MIN = 0.05, 64 << 10
"""A `get` takes no more than this at once, in seconds of the slowest link's rate, lest only its mean be capped."""


class Link:
    """Lets `bytes_per_s` through, all users together, first come first served."""

    def __init__(self, bytes_per_s: float) -> None:
        if not bytes_per_s > 0:
            raise ValueError(f"bytes_per_s: must be positive (found {bytes_per_s})")
        self.bytes_per_s = bytes_per_s
        self._lock = threading.Lock()
        self._free_s = 0.0

    def send(self, size_bytes: int) -> None:
        """Block for as long as the link takes to get to `size_bytes` and to carry them."""
        with self._lock:
            begin_s = max(self._free_s, time.monotonic() - BURST_S)
            self._free_s = begin_s + size_bytes / self.bytes_per_s
            wait_s = self._free_s - time.monotonic()
        if wait_s > 0:
            time.sleep(wait_s)


class RelayAround:
    """A `Relay` that is another one, which may be replaced while it is in use."""

    def __init__(self, relay: Relay) -> None:
        self.relay = relay

    def asked(self) -> Relay:
        """The relay that the next request goes to."""
        return self.relay

    def put(self, key: str, *parts: Buffer) -> None:
        self.asked().put(key, *parts)

    def get(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        return self.asked().get(key, start, length)

    def list_keys(self, prefix: str = "") -> list[str]:
        return self.asked().list_keys(prefix)

    def delete(self, key: str) -> None:
        self.asked().delete(key)

    def close(self) -> None:
        self.relay.close()


class LinkedRelay(RelayAround):
    """A relay whose `get` crosses one or more links, in sequence; the rest is as before."""

    def __init__(self, relay: Relay, *links: Link) -> None:
        super().__init__(relay)
        self._links = links
        self._slice_bytes = max(int(min(link.bytes_per_s for link in links) * SLICE_S), SLICE_BYTES_MIN)

    def get(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        content = bytearray()
        while True:
            wanted = self._slice_bytes if length is None else min(length - len(content), self._slice_bytes)
            part = self.relay.get(key, start + len(content), wanted)
            for link in self._links:
                link.send(len(part))
            content += part
            if len(part) < wanted or len(content) == length:
                return bytes(content)
