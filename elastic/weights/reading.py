"""Everything that one pull reads off a relay: until its deadline, several blobs at once, again where it broke."""

import random
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import closing, contextmanager
from functools import partial
from math import inf
from typing import TypeVar

from elastic.weights.delta import (
    Bucket,
    DeltaBegun,
    DeltaManifest,
    begun_key,
    begun_of,
    bucket_key,
    decode_begun,
    decode_delta_manifest,
    delta_manifest_key,
)
from elastic.weights.digest import ArrivingBlob, digest_of
from elastic.weights.errors import BlobNotFound, WeightsCorrupted, WeightsForged, WeightsRefusal
from elastic.weights.plan import PublishedUpdate
from elastic.weights.relay import Relay
from elastic.weights.signing import Trust
from elastic.weights.source import PullReport
from elastic.weights.versions import published_updates
from elastic.weights.waiting import awaited, fetch, look_again, patiently

CHUNK_BYTES = 8 << 20
"""What a broken transfer has to fetch again, and how often the deadline is looked at."""

SHARE_BYTES, SHARES = 1 << 20, 32
"""A smaller keyframe is fetched in so many chunks, none smaller than this, so that the workers of a site share it."""

BUCKET_BYTES_MAX = 1 << 20
"""A bucket's blob may have this and 6 bytes an element: more than any codec takes."""

TRANSFERS = 3
"""Chunks of a keyframe under way, or buckets under way or waiting to be decoded; more of them only take memory."""

T = TypeVar("T")


class Reading:
    """Raises `RelayError`, and `WeightsCorrupted` for what is cut short, too long, or no manifest to `trust`."""

    def __init__(self, relay: Relay, trust: Trust, timeout_s: float, transfers: int, chunk_bytes: int) -> None:
        self.trust = trust
        self.begun_s = time.monotonic()
        self.deadline_s = self.begun_s + timeout_s
        self.size_bytes = 0
        """Read so far, manifests not counted."""
        self.wire_s = 0.0
        """Spent waiting for the relay."""
        self.encode_s = 0.0
        """Seconds spent waiting for objects that the trainer had not put yet."""
        self.relay = relay
        self._transfers = transfers
        self.chunk_bytes = chunk_bytes

    def updates(self, version: int, begun: bool) -> list[PublishedUpdate]:
        """Lists the relay's updates.

        With `begun` also those of `version` itself that are still being published. An unfinished update of an earlier
        version is left out: it may never be finished.
        """
        ask = f"list for version {version}"
        with self.on_the_wire():
            there = patiently(self.deadline_s, ask, lambda: published_updates(self.relay))
            if not begun:
                return there
            coming = patiently(self.deadline_s, ask, lambda: published_updates(self.relay, begun=True))
        return [*there, *(update for update in coming if update.version == version)]

    def look_again(self, since_s: float) -> bool:
        """Wait a little for what has not been there `since_s` (monotonic); whether there is time for that."""
        begun_s = time.monotonic()
        try:
            return look_again(since_s, self.deadline_s)
        finally:
            self.encode_s += time.monotonic() - begun_s

    def get(self, key: str) -> bytes:
        with self.on_the_wire():
            return fetch(self.relay, key, self.deadline_s)

    def get_into(self, key: str, memory: memoryview) -> str:
        """Fill `memory`, which is as large as the blob is to be; the digest by pieces of what came."""
        blob = ArrivingBlob(memory)
        step = min(self.chunk_bytes, max(SHARE_BYTES, len(memory) // SHARES))

        def fill(start: int) -> None:
            chunk = memory[start : start + step]
            content = fetch(self.relay, key, self.deadline_s, start, len(chunk))
            if len(content) != len(chunk):
                found = start + len(content)
                raise WeightsCorrupted(f"{key}: ends at byte {found}; its manifest says {len(memory)}")
            chunk[:] = content
            blob.landed(start, start + len(chunk))

        with self.on_the_wire():
            for start, filled in self.several(fill, _from_anywhere(range(0, len(memory), step))):
                filled.result()
                self.size_bytes += len(memory[start : start + step])
        return blob.digest()

    def delta(self, version: int, base: int) -> "ArrivingDelta":
        key = delta_manifest_key(version, base)
        try:
            manifest = decode_delta_manifest(self.get(key), self.trust)
            begun = begun_of(manifest)
        except BlobNotFound:
            manifest, begun = None, decode_begun(self.get(begun_key(version, base)), self.trust)
        if (begun.version, begun.base_version) != (version, base):
            raise WeightsForged(f"{key}: it is that of {begun.version} from {begun.base_version}")
        return ArrivingDelta(self, key, begun, manifest)

    def report(self, full_bytes: int, refused: tuple[WeightsRefusal, ...]) -> PullReport:
        """Of the whole pull, which is over now."""
        # Of differences between clock readings, what is left for decoding may round to less than nothing.
        decode_s = max(0.0, time.monotonic() - self.begun_s - self.wire_s - self.encode_s)
        return PullReport(
            size_bytes=self.size_bytes,
            full_bytes=full_bytes,
            encode_s=self.encode_s,
            wire_s=self.wire_s,
            decode_s=decode_s,
            refused=refused,
        )

    def several(self, job: Callable[[int], T], order: Sequence[int]) -> "Generator[tuple[int, Future[T]], None, None]":
        """Each number and what its `job` came to, as they end; as many at once as there may be transfers."""
        left = iter(order)
        pending: dict[Future[T], int] = {}
        with ThreadPoolExecutor(self._transfers, thread_name_prefix="puller") as executor:
            try:
                while True:
                    while len(pending) < self._transfers and (number := next(left, None)) is not None:
                        pending[executor.submit(job, number)] = number
                    if not pending:
                        return
                    done = next(iter(wait(pending, return_when=FIRST_COMPLETED).done))
                    yield pending.pop(done), done
            finally:
                for future in pending:
                    future.cancel()

    @contextmanager
    def on_the_wire(self) -> "Iterator[_There]":
        begun_s = time.monotonic()
        there = _There(begun_s)
        try:
            yield there
        finally:
            self.encode_s += there.since_s - begun_s
            self.wire_s += time.monotonic() - there.since_s


class ArrivingDelta:
    """A delta that may still be under way: `begun` says what is to come, and the manifest what of it was right."""

    def __init__(self, reading: Reading, key: str, begun: DeltaBegun, manifest: DeltaManifest | None) -> None:
        self.begun = begun
        self._reading = reading
        self._key = key
        self._manifest = manifest
        self._digests: dict[int, str] = {}

    def buckets(self, wanted: Sequence[int]) -> Iterator[tuple[int, Bucket]]:
        """Each `wanted` bucket and its number, as they arrive; the next ones are on their way meanwhile.

        If all are there, the workers of a site begin at different ones; else in the order in which they are put.
        """
        manifest, reading = self._manifest, self._reading
        order = wanted if manifest is None else _from_anywhere(wanted)
        with closing(reading.several(self._fetched, order)) as arriving:
            while True:
                with reading.on_the_wire() as there:
                    number, fetched = next(arriving, (0, None))
                    if fetched is None:
                        return
                    blob, digest, since = fetched.result()
                    there.since_s = max(there.since_s, since.since_s)
                reading.size_bytes += len(blob)
                self._digests[number] = digest
                if manifest is not None and digest != manifest.buckets[number].digest:
                    raise WeightsCorrupted(f"{self._key}: the digest of bucket {number} is not the manifest's")
                yield number, Bucket(blob)

    def manifest(self) -> DeltaManifest:
        """By which everything was right that has arrived; waits for it."""
        manifest = self._manifest
        if manifest is None:
            with self._reading.on_the_wire() as there:
                signed = awaited(self._reading.relay, self._key, self._reading.deadline_s, absent=there.not_yet)
            manifest = decode_delta_manifest(signed, self._reading.trust)
        right = [manifest.buckets[number].digest == digest for number, digest in self._digests.items()]
        if begun_of(manifest) != self.begun or not all(right):
            raise WeightsCorrupted(f"{self._key}: its buckets are not the manifest's")
        return manifest

    def _fetched(self, number: int) -> "tuple[bytearray, str, _There]":
        reading, begun = self._reading, self.begun
        key = bucket_key(begun.version, begun.base_version, number)
        most = BUCKET_BYTES_MAX + 6 * begun.buckets[number][1] * begun.tile_elements
        since = _There(-inf)
        get = fetch if self._manifest is not None else partial(awaited, absent=since.not_yet)
        blob = bytearray()
        while True:
            chunk = get(reading.relay, key, reading.deadline_s, len(blob), reading.chunk_bytes)
            blob += chunk
            if len(chunk) < reading.chunk_bytes:
                return blob, digest_of(blob), since
            if len(blob) > most:
                raise WeightsCorrupted(f"{key}: more than {most} bytes")


class _There:
    """Since when something has been on the relay, as far as one knows."""

    def __init__(self, since_s: float) -> None:
        self.since_s = since_s

    def not_yet(self) -> None:
        self.since_s = time.monotonic()


def _from_anywhere(order: Sequence[int]) -> list[int]:
    """The order, rotated at random: workers of one site that fetch the same blob then begin with different pieces."""
    first = random.randrange(len(order)) if order else 0
    return [*order[first:], *order[:first]]
