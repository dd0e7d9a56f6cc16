"""The worker's side: a version's weights off a relay, verified, or an error and nothing else."""

import time
from collections import deque
from collections.abc import Container, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from itertools import compress
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import structlog
from torch import Tensor

from elastic.weights.codecs.base import Buffer
from elastic.weights.codecs.sums import apply_update, tile_sums, zero_sums
from elastic.weights.delta import (
    NOTHING,
    Bucket,
    DeltaBegun,
    DeltaManifest,
    begun_key,
    begun_of,
    bucket_key,
    checksum_of,
    decode_begun,
    decode_delta_manifest,
    delta_manifest_key,
    state_of,
)
from elastic.weights.errors import BlobNotFound, RelayError, WeightsCorrupted
from elastic.weights.layout import tile_counts, tile_ends
from elastic.weights.manifest import TensorEntry, decode_manifest, manifest_key, request_key
from elastic.weights.memory import Memory
from elastic.weights.plan import Update, shortest_path
from elastic.weights.relay import Relay
from elastic.weights.sharding import Shard, needed
from elastic.weights.tensors import Bits, assemble, box_of, views
from elastic.weights.versions import published_updates
from elastic.weights.waiting import POLL_S, awaited, fetch, patiently

log = structlog.get_logger(__name__)

CHUNK_BYTES = 8 << 20
"""What a broken transfer has to fetch again, and how often the deadline is looked at."""

BUCKET_BYTES_MAX = 1 << 20
"""A bucket's blob may have this and 6 bytes an element: more than any codec takes."""

TRANSFERS = 3
"""Buckets under way or waiting to be decoded; more of them only take memory."""


class Pulled(NamedTuple):
    """A version's weights, and what it took. `tensors` are the caller's: no later pull changes them."""

    version: int
    model: dict[str, Any] | None
    """The model's `config.json`, as the keyframe gave it."""
    tensors: dict[str, Tensor]
    size_bytes: int
    """Off the relay, manifests not counted."""
    full_bytes: int
    path: tuple[Update, ...]
    wire_s: float
    """Spent waiting for the relay."""
    decode_s: float
    apply_s: float


class _Held(NamedTuple):
    """Whole, verified weights of one version; the patterns are never changed again."""

    version: int
    run: str
    model: dict[str, Any] | None
    tensors: tuple[TensorEntry, ...]
    hosted: tuple[bool, ...]
    """Which of the tensors these are."""
    bits: Bits
    """Of the hosted tensors, one after the other."""
    state: dict[int, tuple[str, npt.NDArray[np.uint64]]]
    """Tile size → what identifies the weights, and their tiles' sums; made when first asked for."""


class _Times:
    def __init__(self) -> None:
        self.size_bytes = 0
        self.wire_s = self.decode_s = self.apply_s = 0.0

    @contextmanager
    def on_the_wire(self) -> Iterator[None]:
        begun_s = time.monotonic()
        try:
            yield
        finally:
            self.wire_s += time.monotonic() - begun_s


class Puller:
    """Keeps the version it pulled last, so that the next one takes only what changed. For one thread at a time.

    With a `shard` it hosts just that, and where versions are published in cells it pulls nothing else.
    Memory: the weights it holds, those it makes (a pull that fails leaves nothing behind), and `TRANSFERS` buckets.
    """

    def __init__(
        self,
        relay: Relay,
        *,
        shard: Shard | None = None,
        transfers: int = TRANSFERS,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        self._relay = relay
        self._shard = shard
        self._memory = Memory()
        self._transfers = transfers
        self._chunk_bytes = chunk_bytes
        self._held: _Held | None = None

    @property
    def version(self) -> int | None:
        return self._held.version if self._held else None

    def pull(self, version: int, timeout_s: float = 30.0, *, follow: bool = False) -> Pulled:
        """`version`, bit for bit as published: from what it holds by the shortest chain of deltas, or a keyframe.

        With `follow` it may still be under way: buckets are decoded as they appear, and count when the manifest says
        that they are right.
        An object that does not verify is refused, and so is the held version as a base for another; what is left
        is tried, in the end a keyframe; where there is none, one is asked for. A broken transfer goes on where it
        broke, until `timeout_s` is over.
        Raises `WeightsCorrupted` where nothing verifies, else the last `RelayError`.
        """
        deadline_s = time.monotonic() + timeout_s
        times = _Times()
        refused: dict[Update, Exception] = {}
        base = self._held
        while True:
            with times.on_the_wire():
                path = self._path(version, base, refused, deadline_s, follow)
            if path is None:
                if refused:
                    self._ask_for_keyframe(version)
                raise next(reversed(refused.values()), BlobNotFound(f"version {version}: not published, or deleted"))
            try:
                held = self._follow(path, base, deadline_s, times)
            except _Refused as refusal:
                log.warning("weights refused", update=refusal.update, reason=str(refusal.cause))
                # The base may be what is wrong: without it every delta gets a second chance, from a keyframe.
                if base is None or refusal.fatal:
                    refused[refusal.update] = refusal.cause
                base = None
                continue
            self._held = held
            return Pulled(
                version,
                held.model,
                self._tensors(held),
                times.size_bytes,
                held.bits.nbytes,
                tuple(path),
                times.wire_s,
                times.decode_s,
                times.apply_s,
            )

    def audit(self) -> list[int]:
        """Tiles whose recomputed sums differ from those that updates maintained; empty when all is well."""
        held = self._held
        if held is None:
            return []
        wrong: list[int] = []
        for size, (_, sums) in held.state.items():
            tiles = _Tiles(held.tensors, held.hosted, size)
            found = tile_sums(held.bits, tiles.ends[tiles.hosted])
            wrong += np.flatnonzero(tiles.hosted)[found != sums[tiles.hosted]].tolist()
        return wrong

    def _tensors(self, held: _Held) -> dict[str, Tensor]:
        entries = list(compress(held.tensors, held.hosted))
        return views(entries, held.bits) if self._shard is None else assemble(entries, held.bits, self._shard)

    def _ask_for_keyframe(self, version: int) -> None:
        """Nothing on the relay leads to `version`; its trainer can put what does."""
        try:
            self._relay.put(request_key(version), b"")
        except RelayError as error:
            log.warning("keyframe not asked for", version=version, reason=str(error))

    def _path(
        self, version: int, base: _Held | None, refused: Container[Update], deadline_s: float, follow: bool
    ) -> list[Update] | None:
        held = base.version if base else None
        if held == version:
            return []
        while True:
            updates = patiently(
                deadline_s, f"list for version {version}", lambda: published_updates(self._relay, begun=follow)
            )
            path = shortest_path((update for update in updates if update not in refused), held, version)
            if path is not None or not follow or time.monotonic() + POLL_S > deadline_s:
                return path
            time.sleep(POLL_S)

    def _follow(self, path: Iterable[Update], base: _Held | None, deadline_s: float, times: _Times) -> _Held:
        held = base
        for update in path:
            try:
                if update.base is None:
                    held = self._pull_keyframe(update.version, deadline_s, times)
                else:
                    assert held is not None
                    held = self._pull_delta(held, update, deadline_s, times, own=held is not base)
            except (WeightsCorrupted, BlobNotFound) as error:
                raise _Refused(update, error, fatal=not isinstance(error, _BaseMismatch)) from error
        assert held is not None
        return held

    def _pull_keyframe(self, version: int, deadline_s: float, times: _Times) -> _Held:
        try:
            with times.on_the_wire():
                content = fetch(self._relay, manifest_key(version), deadline_s)
        except BlobNotFound:
            return self._pull_full(version, deadline_s, times)
        manifest = decode_manifest(content)
        if manifest.version != version:
            raise WeightsCorrupted(f"manifest of version {version}: it is that of version {manifest.version}")
        bits = self._memory.empty(manifest.blob_bytes // 2)
        blob = bits.view(np.uint8)
        with times.on_the_wire():
            fetch_into(self._relay, manifest.blob, blob.data, deadline_s, self._chunk_bytes)
        begun_s = time.monotonic()
        if checksum_of(manifest.run, blob.data) != manifest.blob_checksum:
            raise WeightsCorrupted(f"{manifest.blob}: its checksum is not the manifest's")
        times.decode_s += time.monotonic() - begun_s
        times.size_bytes += manifest.blob_bytes
        hosted = (True,) * len(manifest.tensors)
        return _Held(version, manifest.run, manifest.model, manifest.tensors, hosted, bits, {})

    def _pull_full(self, version: int, deadline_s: float, times: _Times) -> _Held:
        """A keyframe in cells: those that are hosted, which is the change from nothing."""
        with times.on_the_wire():
            begun, _ = self._begin(version, NOTHING, deadline_s)
        if self._shard is None:
            hosted = (True,) * len(begun.tensors)
        else:
            hosted = tuple(needed(map(box_of, begun.tensors), self._shard))
        elements = sum(entry.size_bytes for entry in compress(begun.tensors, hosted)) // 2
        sums = zero_sums(tile_ends(begun.tensors, begun.tile_elements))
        state = {begun.tile_elements: (state_of(sums), sums)}
        nothing = _Held(NOTHING, begun.run, None, begun.tensors, hosted, np.zeros(elements, np.uint16), state)
        return self._pull_delta(nothing, Update(version, NOTHING), deadline_s, times, own=False)

    def _pull_delta(self, base: _Held, update: Update, deadline_s: float, times: _Times, own: bool) -> _Held:
        """What `update` makes of `base`; in place if that is our `own` to change."""
        assert update.base is not None
        key = delta_manifest_key(update.version, update.base)
        with times.on_the_wire():
            begun, manifest = self._begin(update.version, update.base, deadline_s)
        begun_s = time.monotonic()
        sums = _check_base(begun, base, update)
        tiles = _Tiles(base.tensors, base.hosted, begun.tile_elements)
        times.decode_s += time.monotonic() - begun_s
        bits = base.bits if own else self._memory.empty(base.bits.size)
        checksums: dict[int, str] = {}
        resulting = sums.copy()
        wanted = [number for number, (first, count) in enumerate(begun.buckets) if tiles.runs(first, count)]
        for number, blob in self._buckets(begun, wanted, manifest is not None, deadline_s, times):
            checksums[number] = checksum_of(begun.run, blob)
            if manifest and checksums[number] != manifest.buckets[number].checksum:
                raise WeightsCorrupted(f"{key}: the checksum of bucket {number} is not the manifest's")
            bucket = Bucket(blob)
            for run in tiles.runs(*begun.buckets[number]):
                begun_s = time.monotonic()
                old, ends = base.bits[tiles.elements(run)], tiles.ends[run] - tiles.begins[run.start]
                first = begun.buckets[number][0]
                decoded = bucket.decode(old, ends, run.start - first, run.stop - first)
                resulting[run] += decoded.sum_changes
                decoded_s = time.monotonic()
                new = bits[tiles.elements(run)]
                if not own:
                    new[:] = old
                apply_update(decoded, new)
                times.decode_s += decoded_s - begun_s
                times.apply_s += time.monotonic() - decoded_s
        if manifest is None:
            with times.on_the_wire():
                manifest = decode_delta_manifest(awaited(self._relay, key, deadline_s))
        if begun_of(manifest) != begun or any(manifest.buckets[n].checksum != sum_ for n, sum_ in checksums.items()):
            raise WeightsCorrupted(f"{key}: its buckets are not the manifest's")
        expected = np.frombuffer(manifest.tile_sums, "<u8").astype(np.uint64)
        if not np.array_equal(resulting[tiles.hosted], expected[tiles.hosted]):
            raise WeightsCorrupted(f"{key}: it does not make the trainer's weights")
        if state_of(expected) != manifest.state:
            raise WeightsCorrupted(f"{key}: its tiles' sums are not those of its state")
        state = {manifest.tile_elements: (manifest.state, expected)}
        return base._replace(version=update.version, bits=bits, state=state)

    def _begin(self, version: int, base: int, deadline_s: float) -> tuple[DeltaBegun, DeltaManifest | None]:
        """What is to come, and the manifest if all of it is there."""
        try:
            manifest = decode_delta_manifest(fetch(self._relay, delta_manifest_key(version, base), deadline_s))
        except BlobNotFound:
            return decode_begun(fetch(self._relay, begun_key(version, base), deadline_s)), None
        return begun_of(manifest), manifest

    def _buckets(
        self, begun: DeltaBegun, wanted: Iterable[int], there: bool, deadline_s: float, times: _Times
    ) -> Iterator[tuple[int, Buffer]]:
        """Each `wanted` bucket's number and blob, in order; the next ones are on their way meanwhile."""
        waiting: deque[tuple[int, Future[Buffer]]] = deque()
        with ThreadPoolExecutor(self._transfers, thread_name_prefix="puller") as executor:
            try:
                for number in wanted:
                    waiting.append((number, executor.submit(self._fetch_bucket, begun, number, there, deadline_s)))
                    if len(waiting) >= self._transfers:
                        yield _landed(*waiting.popleft(), times)
                while waiting:
                    yield _landed(*waiting.popleft(), times)
            finally:
                for _, future in waiting:
                    future.cancel()

    def _fetch_bucket(self, begun: DeltaBegun, number: int, there: bool, deadline_s: float) -> Buffer:
        key = bucket_key(begun.version, begun.base_version, number)
        most = BUCKET_BYTES_MAX + 6 * begun.buckets[number][1] * begun.tile_elements
        get = fetch if there else awaited
        blob = bytearray()
        while True:
            chunk = get(self._relay, key, deadline_s, len(blob), self._chunk_bytes)
            blob += chunk
            if len(chunk) < self._chunk_bytes:
                return blob
            if len(blob) > most:
                raise WeightsCorrupted(f"{key}: more than {most} bytes")


class _BaseMismatch(WeightsCorrupted):
    """The delta may be right, but not for what is held."""


class _Refused(Exception):
    def __init__(self, update: Update, cause: Exception, fatal: bool) -> None:
        self.update, self.cause, self.fatal = update, cause, fatal


def pull(relay: Relay, version: int, *, timeout_s: float = 30.0, chunk_bytes: int = CHUNK_BYTES) -> Pulled:
    """`version` for somebody who holds nothing; see `Puller.pull`. Blocks the caller's thread."""
    return Puller(relay, chunk_bytes=chunk_bytes).pull(version, timeout_s)


def fetch_into(relay: Relay, key: str, memory: memoryview, deadline_s: float, chunk_bytes: int = CHUNK_BYTES) -> None:
    """Fill `memory`, which is as large as the blob is to be. Raises `WeightsCorrupted` if the blob ends before."""
    for start in range(0, len(memory), chunk_bytes):
        chunk = memory[start : start + chunk_bytes]
        content = fetch(relay, key, deadline_s, start, len(chunk))
        if len(content) != len(chunk):
            found = start + len(content)
            raise WeightsCorrupted(f"{key}: ends at byte {found}; its manifest says {len(memory)}")
        chunk[:] = content


def _landed(number: int, future: Future[Buffer], times: _Times) -> tuple[int, Buffer]:
    with times.on_the_wire():
        blob = future.result()
    times.size_bytes += len(blob)
    return number, blob


class _Tiles:
    """The tiles of a version, and where the hosted ones lie among what is held."""

    def __init__(self, tensors: Sequence[TensorEntry], hosted: Sequence[bool], tile_elements: int) -> None:
        self.hosted = np.repeat(np.array(hosted, bool), tile_counts(tensors, tile_elements))
        sizes = np.diff(tile_ends(tensors, tile_elements), prepend=0)
        self.ends = np.cumsum(np.where(self.hosted, sizes, 0))
        self.begins = np.concatenate([[0], self.ends])

    def runs(self, first: int, count: int) -> list[slice]:
        """Consecutive hosted tiles of a bucket."""
        edges = np.flatnonzero(np.diff(self.hosted[first : first + count], prepend=False, append=False)) + first
        return [slice(int(begin), int(end)) for begin, end in edges.reshape(-1, 2)]

    def elements(self, tiles: slice) -> slice:
        return slice(int(self.begins[tiles.start]), int(self.begins[tiles.stop]))


def _check_base(manifest: DeltaBegun, base: _Held, update: Update) -> npt.NDArray[np.uint64]:
    """The sums of all tiles in `base`."""
    where = f"delta of version {update.version} from {update.base}"
    if (manifest.version, manifest.base_version) != update:
        raise WeightsCorrupted(f"{where}: it is that of {manifest.version} from {manifest.base_version}")
    if manifest.run != base.run or manifest.tensors != base.tensors:
        raise _BaseMismatch(f"{where}: it is for other tensors, or another run, than what is held")
    ends = tile_ends(manifest.tensors, manifest.tile_elements)
    if sum(tiles for _, tiles in manifest.buckets) != len(ends):
        raise WeightsCorrupted(f"{where}: its tensors have {len(ends)} tiles, its buckets others")
    if manifest.tile_elements not in base.state:
        if not all(base.hosted):
            raise _BaseMismatch(f"{where}: tiles of {manifest.tile_elements} elements, which only a keyframe can begin")
        sums = tile_sums(base.bits, ends)
        base.state[manifest.tile_elements] = state_of(sums), sums
    state, sums = base.state[manifest.tile_elements]
    if state != manifest.base_state:
        raise _BaseMismatch(f"{where}: it is from other weights than those held as version {base.version}")
    return sums
