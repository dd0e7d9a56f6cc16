"""A bound on bandwidth: a token bucket, and a relay whose reads, or a port whose bytes, go through it."""

import socket
import threading
import time
from contextlib import suppress

from elastic.weights.blobs import Buffer
from elastic.weights.relay import Relay

BURST_S = 0.01
"""How much an idle link may send at once, in seconds of its rate."""

SLICE_S, SLICE_BYTES_MIN = 0.05, 64 << 10
"""A `get` takes no more than this at once, in seconds of the slowest link's rate, lest only its mean be capped."""

CHUNK_BYTES_MIN = 16 << 10
"""A record of TLS: the most that a connection of a slow port has others wait for."""


class Link:
    """Lets `bytes_per_s` through, all users together, first come first served."""

    def __init__(self, bytes_per_s: float) -> None:
        if not bytes_per_s > 0:
            raise ValueError(f"bytes_per_s: must be positive (found {bytes_per_s})")
        self.bytes_per_s = bytes_per_s
        self._lock = threading.Lock()
        self._free_s = 0.0
        self.carried_bytes = 0

    def send(self, size_bytes: int) -> None:
        """Block for as long as the link takes to get to `size_bytes` and to carry them."""
        with self._lock:
            self.carried_bytes += size_bytes
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


class LinkedPort:
    """A TCP port before another one on this machine, with a link of its own for each direction."""

    def __init__(self, port: int, bytes_per_s: float) -> None:
        self._target = port
        self._up, self._down = Link(bytes_per_s), Link(bytes_per_s)
        self._chunk_bytes = max(int(bytes_per_s * SLICE_S / 8), CHUNK_BYTES_MIN)
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def carried_bytes(self) -> int:
        """In both directions."""
        return self._up.carried_bytes + self._down.carried_bytes

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            far = socket.create_connection(("127.0.0.1", self._target))
            for link, source, sink in ((self._up, near, far), (self._down, far, near)):
                threading.Thread(target=self._pump, args=(link, source, sink), daemon=True).start()

    def _pump(self, link: Link, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while chunk := source.recv(self._chunk_bytes):
                link.send(len(chunk))
                sink.sendall(chunk)
        with suppress(OSError):
            sink.shutdown(socket.SHUT_WR)
