"""Everything that one pull reads off a relay: until its deadline, several blobs at once, again where it broke."""

import random
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import closing, contextmanager
from functools import partial
from math import inf
from typing import TypeVar

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
from elastic.weights.digest import ArrivingBlob, digest_of
from elastic.weights.errors import BlobNotFound, WeightsCorrupted
from elastic.weights.plan import PublishedUpdate
from elastic.weights.relay import Relay
from elastic.weights.signing import Trust
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

    def __init__(self, relay: Relay, trust: Trust, deadline_s: float, transfers: int, chunk_bytes: int) -> None:
        self.trust = trust
        self.deadline_s = deadline_s
        self.size_bytes = 0
        """Read so far, manifests not counted."""
        self.wire_s = 0.0
        """Spent waiting for the relay."""
        self.encode_s = 0.0
        """Seconds spent waiting for objects that the trainer had not put yet."""
        self._relay = relay
        self._transfers = transfers
        self._chunk_bytes = chunk_bytes

    def updates(self, version: int, begun: bool) -> list[PublishedUpdate]:
        """Lists the relay's updates.

        With `begun` also those of `version` itself that are still being published. An unfinished update of an earlier
        version is left out: it may never be finished.
        """
        ask = f"list for version {version}"
        with self._on_the_wire():
            there = patiently(self.deadline_s, ask, lambda: published_updates(self._relay))
            if not begun:
                return there
            coming = patiently(self.deadline_s, ask, lambda: published_updates(self._relay, begun=True))
        return [*there, *(update for update in coming if update.version == version)]

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

    def get_into(self, key: str, memory: memoryview) -> str:
        """Fill `memory`, which is as large as the blob is to be; the digest by pieces of what came."""
        blob = ArrivingBlob(memory)
        step = min(self._chunk_bytes, max(SHARE_BYTES, len(memory) // SHARES))

        def fill(start: int) -> None:
            chunk = memory[start : start + step]
            content = fetch(self._relay, key, self.deadline_s, start, len(chunk))
            if len(content) != len(chunk):
                found = start + len(content)
                raise WeightsCorrupted(f"{key}: ends at byte {found}; its manifest says {len(memory)}")
            chunk[:] = content
            blob.landed(start, start + len(chunk))

        with self._on_the_wire():
            for start, filled in self._several(fill, _from_anywhere(range(0, len(memory), step))):
                filled.result()
                self.size_bytes += len(memory[start : start + step])
        return blob.digest()

    def delta(self, version: int, base: int) -> tuple[DeltaBegun, DeltaManifest | None]:
        """What is to come, and the manifest if all of it is there."""
        try:
            signed = self.get(delta_manifest_key(version, base))
        except BlobNotFound:
            return decode_begun(self.get(begun_key(version, base)), self.trust), None
        manifest = decode_delta_manifest(signed, self.trust)
        return begun_of(manifest), manifest

    def awaited_manifest(self, begun: DeltaBegun) -> DeltaManifest:
        key = delta_manifest_key(begun.version, begun.base_version)
        with self._on_the_wire() as there:
            signed = awaited(self._relay, key, self.deadline_s, absent=there.not_yet)
        return decode_delta_manifest(signed, self.trust)

    def buckets(self, begun: DeltaBegun, wanted: Sequence[int], there: bool) -> Iterator[tuple[int, Buffer, str]]:
        """Each `wanted` bucket's number, blob and digest, as they arrive; the next ones are on their way meanwhile.

        If all are `there`, the workers of a site begin at different ones; else in the order in which they are put.
        """
        order = _from_anywhere(wanted) if there else wanted
        with closing(self._several(partial(self._bucket, begun, there), order)) as arriving:
            while (landed := self._landed(arriving)) is not None:
                yield landed

    def _several(self, job: Callable[[int], T], order: Sequence[int]) -> "Generator[tuple[int, Future[T]], None, None]":
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

    def _bucket(self, begun: DeltaBegun, there: bool, number: int) -> "tuple[Buffer, str, _There]":
        key = bucket_key(begun.version, begun.base_version, number)
        most = BUCKET_BYTES_MAX + 6 * begun.buckets[number][1] * begun.tile_elements
        since = _There(-inf)
        get = fetch if there else partial(awaited, absent=since.not_yet)
        blob = bytearray()
        while True:
            chunk = get(self._relay, key, self.deadline_s, len(blob), self._chunk_bytes)
            blob += chunk
            if len(chunk) < self._chunk_bytes:
                return blob, digest_of(blob), since
            if len(blob) > most:
                raise WeightsCorrupted(f"{key}: more than {most} bytes")

    def _landed(
        self, arriving: "Iterator[tuple[int, Future[tuple[Buffer, str, _There]]]]"
    ) -> tuple[int, Buffer, str] | None:
        """The next bucket that arrives; None after the last one."""
        with self._on_the_wire() as there:
            number, bucket = next(arriving, (0, None))
            if bucket is None:
                return None
            blob, digest, since = bucket.result()
            there.since_s = max(there.since_s, since.since_s)
        self.size_bytes += len(blob)
        return number, blob, digest

    @contextmanager
    def _on_the_wire(self) -> "Iterator[_There]":
        begun_s = time.monotonic()
        there = _There(begun_s)
        try:
            yield there
        finally:
            self.encode_s += there.since_s - begun_s
            self.wire_s += time.monotonic() - there.since_s


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
