"""Everything that one pull reads off a relay: until its deadline, several blobs at once, again where it broke."""

import time
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial

from elastic.weights.codecs.base import Buffer
from elastic.weights.delta import (
    DeltaBegun,
    DeltaManifest,
    begun_key,
    begun_of,
    bucket_key,
    decode_begun,
    decode_delta_manifest,
    delta_manifest_key,
)
from elastic.weights.errors import BlobNotFound, WeightsCorrupted
from elastic.weights.plan import Update
from elastic.weights.relay import Relay
from elastic.weights.versions import published_updates
from elastic.weights.waiting import awaited, fetch, look_again, patiently

CHUNK_BYTES = 8 << 20
"""What a broken transfer has to fetch again, and how often the deadline is looked at."""

BUCKET_BYTES_MAX = 1 << 20
"""A bucket's blob may have this and 6 bytes an element: more than any codec takes."""

TRANSFERS = 3
"""Buckets under way or waiting to be decoded; more of them only take memory."""


class Reading:
    """Raises `RelayError`, and `WeightsCorrupted` for what is cut short, too long, or no manifest."""

    def __init__(self, relay: Relay, deadline_s: float, transfers: int, chunk_bytes: int) -> None:
        self.deadline_s = deadline_s
        self.size_bytes = 0
        """Read so far, manifests not counted."""
        self.wire_s = 0.0
        """Spent waiting for the relay."""
        self.encode_s = 0.0
        """Spent waiting for what the trainer had not put there yet."""
        self._relay = relay
        self._transfers = transfers
        self._chunk_bytes = chunk_bytes

    def updates(self, version: int, begun: bool) -> list[Update]:
        """What there is on the way to `version`, with `begun` also what is still being published."""
        with self._on_the_wire():
            return patiently(
                self.deadline_s, f"list for version {version}", lambda: published_updates(self._relay, begun)
            )

    def look_again(self, since_s: float) -> bool:
        """Wait a little for what has not been there `since_s` (monotonic); whether there is time for that."""
        begun_s = time.monotonic()
        try:
            return look_again(since_s, self.deadline_s)
        finally:
            self.encode_s += time.monotonic() - begun_s

    def get(self, key: str) -> bytes:
        with self._on_the_wire():
            return fetch(self._relay, key, self.deadline_s)

    def get_into(self, key: str, memory: memoryview) -> None:
        """Fill `memory`, which is as large as the blob is to be."""
        with self._on_the_wire():
            for start in range(0, len(memory), self._chunk_bytes):
                chunk = memory[start : start + self._chunk_bytes]
                content = fetch(self._relay, key, self.deadline_s, start, len(chunk))
                if len(content) != len(chunk):
                    found = start + len(content)
                    raise WeightsCorrupted(f"{key}: ends at byte {found}; its manifest says {len(memory)}")
                chunk[:] = content
        self.size_bytes += len(memory)

    def delta(self, version: int, base: int) -> tuple[DeltaBegun, DeltaManifest | None]:
        """What is to come, and the manifest if all of it is there."""
        try:
            manifest = decode_delta_manifest(self.get(delta_manifest_key(version, base)))
        except BlobNotFound:
            return decode_begun(self.get(begun_key(version, base))), None
        return begun_of(manifest), manifest

    def awaited_manifest(self, begun: DeltaBegun) -> DeltaManifest:
        key = delta_manifest_key(begun.version, begun.base_version)
        with self._on_the_wire() as there:
            return decode_delta_manifest(awaited(self._relay, key, self.deadline_s, absent=there.not_yet))

    def buckets(self, begun: DeltaBegun, wanted: Iterable[int], there: bool) -> Iterator[tuple[int, Buffer]]:
        """Each `wanted` bucket's number and blob, in order; the next ones are on their way meanwhile."""
        waiting: deque[tuple[int, Future[tuple[Buffer, _There]]]] = deque()
        with ThreadPoolExecutor(self._transfers, thread_name_prefix="puller") as executor:
            try:
                for number in wanted:
                    waiting.append((number, executor.submit(self._bucket, begun, number, there)))
                    if len(waiting) >= self._transfers:
                        yield self._landed(*waiting.popleft())
                while waiting:
                    yield self._landed(*waiting.popleft())
            finally:
                for _, future in waiting:
                    future.cancel()

    def _bucket(self, begun: DeltaBegun, number: int, there: bool) -> "tuple[Buffer, _There]":
        key = bucket_key(begun.version, begun.base_version, number)
        most = BUCKET_BYTES_MAX + 6 * begun.buckets[number][1] * begun.tile_elements
        since = _There()
        get = fetch if there else partial(awaited, absent=since.not_yet)
        blob = bytearray()
        while True:
            chunk = get(self._relay, key, self.deadline_s, len(blob), self._chunk_bytes)
            blob += chunk
            if len(chunk) < self._chunk_bytes:
                return blob, since
            if len(blob) > most:
                raise WeightsCorrupted(f"{key}: more than {most} bytes")

    def _landed(self, number: int, future: "Future[tuple[Buffer, _There]]") -> tuple[int, Buffer]:
        with self._on_the_wire() as there:
            blob, since = future.result()
            there.since_s = max(there.since_s, since.since_s)
        self.size_bytes += len(blob)
        return number, blob

    @contextmanager
    def _on_the_wire(self) -> "Iterator[_There]":
        there = _There()
        begun_s = there.since_s
        try:
            yield there
        finally:
            self.encode_s += there.since_s - begun_s
            self.wire_s += time.monotonic() - there.since_s


class _There:
    """Since when something has been on the relay, as far as one knows: since one first asked, or later."""

    def __init__(self) -> None:
        self.since_s = time.monotonic()

    def not_yet(self) -> None:
        self.since_s = time.monotonic()
