"""Bytes off a relay for one pull: until its deadline, several blobs at once, again where a transfer broke."""

import random
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future
from contextlib import closing, contextmanager
from functools import partial
from math import inf
from typing import TypeVar

from elastic.system.host import here
from elastic.weights.digest import ArrivingBlob, digest_of
from elastic.weights.errors import WeightsCorrupted
from elastic.weights.relay import Relay
from elastic.weights.waiting import awaited, fetch, look_again, patiently

CHUNK_BYTES = 8 << 20
"""The size of a transfer's parts. A broken transfer repeats one part, and the deadline is checked after each."""

SHARE_BYTES, SHARES = 1 << 20, 32
"""A smaller blob is fetched in so many chunks, none smaller than this, so that the workers of a site share it."""

TRANSFERS = 6
"""Transfers under way, or blobs under way or waiting to be used. With fewer a worker of a site waits for pieces that
others fetch while further ones are there; more only take memory."""

T = TypeVar("T")


class RelayReading:
    """Blobs off a relay. Counts bytes, and seconds by what they were spent on.

    Every call may raise `RelayError`, and `WeightsCorrupted` for a blob of another size.
    """

    def __init__(self, relay: Relay, timeout_s: float, transfers: int, chunk_bytes: int, share_bytes: int) -> None:
        self.begun_s = here().monotonic()
        self.size_bytes = 0
        """Bytes read by `get_into` and `several` so far."""
        self.wire_s = 0.0
        """Seconds spent waiting for the relay."""
        self.encode_s = 0.0
        """Seconds spent waiting for objects that the trainer had not put yet."""
        self.listed: frozenset[str] = frozenset()
        """What `list_keys` returned last."""
        self._relay = relay
        self._deadline_s = self.begun_s + timeout_s
        self._transfers = transfers
        self._chunk_bytes = chunk_bytes
        self._share_bytes = share_bytes

    def list_keys(self, prefix: str) -> list[str]:
        with self._on_the_wire():
            keys = patiently(self._deadline_s, f"list {prefix}", lambda: self._relay.list_keys(prefix))
        self.listed = frozenset(keys)
        return keys

    def look_again(self, since_s: float) -> bool:
        """Waits a little for what has been absent since `since_s` (monotonic). Returns whether there is time for it."""
        begun_s = here().monotonic()
        try:
            return look_again(since_s, self._deadline_s)
        finally:
            self.encode_s += here().monotonic() - begun_s

    def get(self, key: str) -> bytes:
        with self._on_the_wire():
            return fetch(self._relay, key, self._deadline_s)

    def awaited(self, key: str) -> bytes:
        """Waits for a blob that may not be there yet."""
        with self._on_the_wire() as there:
            return awaited(self._relay, key, self._deadline_s, absent=there.not_yet)

    def get_into(self, key: str, memory: memoryview) -> str:
        """Fills `memory` with the blob. Returns its digest by pieces."""
        blob = ArrivingBlob(memory)
        step = min(self._chunk_bytes, max(self._share_bytes, len(memory) // SHARES))

        def fill(start: int) -> None:
            chunk = memory[start : start + step]
            content = fetch(self._relay, key, self._deadline_s, start, len(chunk))
            if len(content) != len(chunk):
                found = start + len(content)
                raise WeightsCorrupted(f"{key}: ends at byte {found}; its manifest says {len(memory)}")
            chunk[:] = content
            blob.landed(start, start + len(chunk))

        with self._on_the_wire():
            for start, filled in self._at_once(fill, _from_anywhere(range(0, len(memory), step))):
                filled.result()
                self.size_bytes += len(memory[start : start + step])
        return blob.digest()

    def several(
        self, wanted: Sequence[tuple[str, int]], coming: bool
    ) -> Generator[tuple[int, bytearray, str], None, None]:
        """Yields (place in `wanted`, blob, digest) as they arrive; the next ones are on their way meanwhile.

        `wanted` has keys and their most bytes. With `coming` they may not be there yet, and all readers begin at the
        one that is put first; else the workers of a site begin at different ones.
        """
        places = range(len(wanted))
        job = partial(self._blob, wanted, coming)
        with closing(self._at_once(job, places if coming else _from_anywhere(places))) as arriving:
            while True:
                with self._on_the_wire() as there:
                    place, fetched = next(arriving, (0, None))
                    if fetched is None:
                        return
                    blob, digest, since = fetched.result()
                    there.since_s = max(there.since_s, since.since_s)
                self.size_bytes += len(blob)
                yield place, blob, digest

    def _blob(self, wanted: Sequence[tuple[str, int]], coming: bool, place: int) -> "tuple[bytearray, str, _There]":
        key, most = wanted[place]
        since = _There(-inf)
        get = partial(awaited, absent=since.not_yet) if coming else fetch
        blob = bytearray()
        while True:
            chunk = get(self._relay, key, self._deadline_s, len(blob), self._chunk_bytes)
            blob += chunk
            if len(chunk) < self._chunk_bytes:
                return blob, digest_of(blob), since
            if len(blob) > most:
                raise WeightsCorrupted(f"{key}: more than {most} bytes")

    def _at_once(self, job: Callable[[int], T], order: Sequence[int]) -> "Generator[tuple[int, Future[T]], None, None]":
        """Yields each number with its ended `job`; runs as many at once as there may be transfers."""
        left = iter(order)
        pending: dict[Future[T], int] = {}
        ended, some = deque[Future[T]](), here().condition()

        def end(future: Future[T]) -> None:
            with some:
                ended.append(future)
                some.notify()

        with here().executor(self._transfers, "puller") as executor:
            try:
                while True:
                    while len(pending) < self._transfers and (number := next(left, None)) is not None:
                        pending[future := executor.submit(job, number)] = number
                        future.add_done_callback(end)
                    if not pending:
                        return
                    with some:
                        some.wait_for(lambda: ended)
                    done = ended.popleft()
                    yield pending.pop(done), done
            finally:
                for future in pending:
                    future.cancel()

    @contextmanager
    def _on_the_wire(self) -> "Iterator[_There]":
        begun_s = here().monotonic()
        there = _There(begun_s)
        try:
            yield there
        finally:
            self.encode_s += there.since_s - begun_s
            self.wire_s += here().monotonic() - there.since_s


class _There:
    """Since when something has been on the relay, as far as one knows."""

    def __init__(self, since_s: float) -> None:
        self.since_s = since_s

    def not_yet(self) -> None:
        self.since_s = here().monotonic()


def _from_anywhere(order: Sequence[int]) -> list[int]:
    """Returns the order, rotated at random: workers of a site that fetch the same blob begin with different pieces."""
    first = random.randrange(len(order)) if order else 0
    return [*order[first:], *order[:first]]
