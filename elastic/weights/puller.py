"""The worker's side: a version's weights off a relay, verified, or an error and nothing else."""

import time
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator
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
from elastic.weights.held import Change, Held, Staged, Tiles, as_of
from elastic.weights.layout import tile_ends
from elastic.weights.manifest import decode_manifest, manifest_key, request_key
from elastic.weights.plan import Update, shortest_path
from elastic.weights.relay import Relay
from elastic.weights.sharding import Shard, needed
from elastic.weights.store import Store
from elastic.weights.tensors import assemble, box_of, by_tensor, views
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
    """A version's weights, and what it took."""

    version: int
    model: dict[str, Any] | None
    """The model's `config.json`, as the keyframe gave it."""
    tensors: dict[str, Tensor]
    """What they are until the next version is put in force."""
    size_bytes: int
    """Off the relay, manifests not counted."""
    full_bytes: int
    path: tuple[Update, ...]
    wire_s: float
    """Spent waiting for the relay."""
    decode_s: float
    apply_s: float


class Times:
    """What a version takes until it is staged."""

    def __init__(self) -> None:
        self.size_bytes = 0
        self.wire_s = self.decode_s = 0.0

    @contextmanager
    def on_the_wire(self) -> Iterator[None]:
        begun_s = time.monotonic()
        try:
            yield
        finally:
            self.wire_s += time.monotonic() - begun_s


class StagedVersion(NamedTuple):
    weights: Staged
    path: tuple[Update, ...]
    times: Times


class Puller:
    """Keeps the version it pulled last, so that the next one takes only what changed. For one thread at a time.

    With a `shard` it hosts just that, and where versions are published in cells it pulls nothing else.
    Memory: the weights it holds; for the next version what changes (6 bytes for each element that does), or where
    it does not build on what is held all of it; and `TRANSFERS` buckets. A pull that fails leaves nothing behind.
    With a kept `store` it begins with what its predecessor held.
    """

    def __init__(
        self,
        relay: Relay,
        *,
        shard: Shard | None = None,
        store: Store | None = None,
        transfers: int = TRANSFERS,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        self._relay = relay
        self._shard = shard
        self._store = store or Store()
        self._inherited = self._store.held is not None
        self._distrusted = False
        self._transfers = transfers
        self._chunk_bytes = chunk_bytes

    @property
    def version(self) -> int | None:
        return self._store.held.version if self._store.held else None

    def pull(self, version: int, timeout_s: float = 30.0, *, follow: bool = False) -> Pulled:
        """`stage` it, and `apply` that."""
        return self.apply(self.stage(version, timeout_s, follow=follow))

    def apply(self, staged: StagedVersion) -> Pulled:
        """Put a staged version in force; again is a no-op. What is held must be what it was when that was staged."""
        begun_s = time.monotonic()
        self._store.put(staged.weights)
        self._inherited = False
        if staged.weights.base is None:
            self._distrusted = False
        held, times = staged.weights.held, staged.times
        apply_s = time.monotonic() - begun_s
        return Pulled(
            held.version,
            held.model,
            self._tensors(held),
            times.size_bytes,
            held.bits.nbytes,
            staged.path,
            times.wire_s,
            times.decode_s,
            apply_s,
        )

    def changes(self, staged: StagedVersion) -> list[tuple[str, Tensor, Tensor]] | None:
        """What a staged version writes over the one before, for whoever has a copy of that elsewhere.

        (Tensor, places in it, flat, values), in the order in which they came about: later ones overwrite. None where it
        builds on nothing, where much of it changes, and with a `shard`, whose tensors are put together anew.
        """
        weights = staged.weights
        if weights.base is None or self._shard is not None:
            return None
        found: list[tuple[str, Tensor, Tensor]] = []
        for change in weights.changes:
            if change.update.index is None:
                return None
            place = change.update.index.astype(np.int64) + change.begin
            found += by_tensor(weights.held.tensors, place, change.update.value)
        return found

    def stage(self, version: int, timeout_s: float = 30.0, *, follow: bool = False) -> StagedVersion:
        """`version`, bit for bit as published: from what is held by the shortest chain of deltas, or a keyframe.

        What is held, and served, stays as it is meanwhile.
        With `follow` it may still be under way: buckets are decoded as they appear, and count when the manifest says
        that they are right.
        An object that does not verify is refused, and so is the held version as a base for another; what is left
        is tried, in the end a keyframe; where there is none, one is asked for. A broken transfer goes on where it
        broke, until `timeout_s` is over.
        Raises `WeightsCorrupted` where nothing verifies, else the last `RelayError`.
        """
        deadline_s = time.monotonic() + timeout_s
        times = Times()
        refused: dict[Update, Exception] = {}
        base = None if self._distrusted else self._store.held
        if base is not None and self._inherited and base.version == version and not self._recognised(base, deadline_s):
            base = None
        while True:
            with times.on_the_wire():
                path = self._path(version, base, refused, deadline_s, follow)
            if path is None:
                if refused:
                    self._ask_for_keyframe(version)
                raise next(reversed(refused.values()), BlobNotFound(f"version {version}: not published, or deleted"))
            try:
                return StagedVersion(self._follow(path, base, deadline_s, times), tuple(path), times)
            except _Refused as refusal:
                log.warning("weights refused", update=refusal.update, reason=str(refusal.cause))
                # The base may be what is wrong: without it every delta gets a second chance, from a keyframe.
                if base is None or refusal.fatal:
                    refused[refusal.update] = refusal.cause
                base = None

    def audit(self, rest: Callable[[float], object] = lambda busy_s: None) -> list[int]:
        """Tiles whose recomputed sums differ from those that updates maintained; empty when all is well.

        They are reported, and the next version begins with a keyframe. Any thread may audit, beside everything else;
        it ends when another version is put in force. After each tile it takes a `rest`, given the seconds that took.
        """
        wrong: list[int] = []
        begun_s = time.monotonic()
        held = self._store.at_rest()
        for tile, right in held.audited() if held else ():
            if self._store.at_rest() is not held:
                return []
            if not right:
                wrong.append(tile)
            rest(time.monotonic() - begun_s)
            begun_s = time.monotonic()
        if held and wrong:
            log.error("weights held are wrong", version=held.version, tiles=len(wrong), first=wrong[0])
            self._distrusted = True
        return wrong

    def _tensors(self, held: Held) -> dict[str, Tensor]:
        entries = list(compress(held.tensors, held.hosted))
        return views(entries, held.bits) if self._shard is None else assemble(entries, held.bits, self._shard)

    def _ask_for_keyframe(self, version: int) -> None:
        """Nothing on the relay leads to `version`; its trainer can put what does."""
        try:
            self._relay.put(request_key(version), b"")
        except RelayError as error:
            log.warning("keyframe not asked for", version=version, reason=str(error))

    def _path(
        self, version: int, base: Held | None, refused: Container[Update], deadline_s: float, follow: bool
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

    def _recognised(self, held: Held, deadline_s: float) -> bool:
        """Whether what a predecessor left as this version is what the relay calls so; it may be another run's."""
        bases = [update.base for update in published_updates(self._relay) if update.version == held.version]
        try:
            return bool(bases) and self._is_published(held, bases[0], deadline_s)
        except (WeightsCorrupted, BlobNotFound) as error:
            log.warning("kept weights not recognised", version=held.version, reason=str(error))
            return False

    def _is_published(self, held: Held, base: int | None, deadline_s: float) -> bool:
        key = delta_manifest_key(held.version, NOTHING if base is None else base)
        try:
            manifest = decode_delta_manifest(fetch(self._relay, key, deadline_s))
        except BlobNotFound:
            keyframe = decode_manifest(fetch(self._relay, manifest_key(held.version), deadline_s))
            return keyframe.run == held.run and checksum_of(held.run, held.bits.data) == keyframe.blob_checksum
        state = held.state.get(manifest.tile_elements)
        return manifest.run == held.run and state is not None and state[0] == manifest.state

    def _follow(self, path: Iterable[Update], base: Held | None, deadline_s: float, times: Times) -> Staged:
        held = base
        changes: list[Change] | None = None if base is None else []
        for update in path:
            try:
                if update.base is None:
                    held, changes = self._pull_keyframe(update.version, deadline_s, times), None
                else:
                    assert held is not None
                    held = self._pull_delta(held, update, deadline_s, times, changes)
            except (WeightsCorrupted, BlobNotFound) as error:
                raise _Refused(update, error, fatal=not isinstance(error, _BaseMismatch)) from error
        assert held is not None
        return Staged.afresh(held) if base is None or changes is None else Staged.over(base, held, changes)

    def _pull_keyframe(self, version: int, deadline_s: float, times: Times) -> Held:
        try:
            with times.on_the_wire():
                content = fetch(self._relay, manifest_key(version), deadline_s)
        except BlobNotFound:
            return self._pull_full(version, deadline_s, times)
        manifest = decode_manifest(content)
        if manifest.version != version:
            raise WeightsCorrupted(f"manifest of version {version}: it is that of version {manifest.version}")
        bits = self._store.room(manifest.blob_bytes // 2)
        blob = bits.view(np.uint8)
        with times.on_the_wire():
            fetch_into(self._relay, manifest.blob, blob.data, deadline_s, self._chunk_bytes)
        begun_s = time.monotonic()
        if checksum_of(manifest.run, blob.data) != manifest.blob_checksum:
            raise WeightsCorrupted(f"{manifest.blob}: its checksum is not the manifest's")
        times.decode_s += time.monotonic() - begun_s
        times.size_bytes += manifest.blob_bytes
        hosted = (True,) * len(manifest.tensors)
        return Held(version, manifest.run, manifest.model, manifest.tensors, hosted, bits, {})

    def _pull_full(self, version: int, deadline_s: float, times: Times) -> Held:
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
        bits = self._store.room(elements)
        bits[:] = 0
        nothing = Held(NOTHING, begun.run, None, begun.tensors, hosted, bits, state)
        return self._pull_delta(nothing, Update(version, NOTHING), deadline_s, times, changes=None)

    def _pull_delta(
        self, base: Held, update: Update, deadline_s: float, times: Times, changes: list[Change] | None
    ) -> Held:
        """What `update` makes of `base` after `changes`, to which it adds its own; without a list it writes at once."""
        assert update.base is not None
        key = delta_manifest_key(update.version, update.base)
        with times.on_the_wire():
            begun, manifest = self._begin(update.version, update.base, deadline_s)
        begun_s = time.monotonic()
        sums = _check_base(begun, base, update, amid=bool(changes))
        tiles = Tiles(base.tensors, base.hosted, begun.tile_elements)
        times.decode_s += time.monotonic() - begun_s
        checksums: dict[int, str] = {}
        resulting = sums.copy()
        coming: list[Change] = []
        wanted = [number for number, (first, count) in enumerate(begun.buckets) if tiles.runs(first, count)]
        for number, blob in self._buckets(begun, wanted, manifest is not None, deadline_s, times):
            checksums[number] = checksum_of(begun.run, blob)
            if manifest and checksums[number] != manifest.buckets[number].checksum:
                raise WeightsCorrupted(f"{key}: the checksum of bucket {number} is not the manifest's")
            bucket = Bucket(blob)
            for run in tiles.runs(*begun.buckets[number]):
                begun_s = time.monotonic()
                elements, first = tiles.elements(run), begun.buckets[number][0]
                old, ends = as_of(base.bits, changes or (), elements), tiles.ends[run] - elements.start
                decoded = bucket.decode(old, ends, run.start - first, run.stop - first)
                resulting[run] += decoded.sum_changes
                if changes is None:
                    apply_update(decoded, old)
                else:
                    span = elements.start, elements.stop
                    coming.append(Change(update.base, update.version, run.start, *span, decoded))
                times.decode_s += time.monotonic() - begun_s
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
        if changes is not None:
            changes += coming
        return base._replace(version=update.version, state={manifest.tile_elements: (manifest.state, expected)})

    def _begin(self, version: int, base: int, deadline_s: float) -> tuple[DeltaBegun, DeltaManifest | None]:
        """What is to come, and the manifest if all of it is there."""
        try:
            manifest = decode_delta_manifest(fetch(self._relay, delta_manifest_key(version, base), deadline_s))
        except BlobNotFound:
            return decode_begun(fetch(self._relay, begun_key(version, base), deadline_s)), None
        return begun_of(manifest), manifest

    def _buckets(
        self, begun: DeltaBegun, wanted: Iterable[int], there: bool, deadline_s: float, times: Times
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


def _landed(number: int, future: Future[Buffer], times: Times) -> tuple[int, Buffer]:
    with times.on_the_wire():
        blob = future.result()
    times.size_bytes += len(blob)
    return number, blob


def _check_base(manifest: DeltaBegun, base: Held, update: Update, amid: bool) -> npt.NDArray[np.uint64]:
    """The sums of all tiles in `base`, of which the patterns are not there yet `amid` a chain."""
    where = f"delta of version {update.version} from {update.base}"
    if (manifest.version, manifest.base_version) != update:
        raise WeightsCorrupted(f"{where}: it is that of {manifest.version} from {manifest.base_version}")
    if manifest.run != base.run or manifest.tensors != base.tensors:
        raise _BaseMismatch(f"{where}: it is for other tensors, or another run, than what is held")
    ends = tile_ends(manifest.tensors, manifest.tile_elements)
    if sum(tiles for _, tiles in manifest.buckets) != len(ends):
        raise WeightsCorrupted(f"{where}: its tensors have {len(ends)} tiles, its buckets others")
    if manifest.tile_elements not in base.state:
        if amid or not all(base.hosted):
            raise _BaseMismatch(f"{where}: tiles of {manifest.tile_elements} elements, which only a keyframe can begin")
        sums = tile_sums(base.bits, ends)
        base.state[manifest.tile_elements] = state_of(sums), sums
    state, sums = base.state[manifest.tile_elements]
    if state != manifest.base_state:
        raise _BaseMismatch(f"{where}: it is from other weights than those held as version {base.version}")
    return sums
