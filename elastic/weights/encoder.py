"""Keyframes and deltas onto a relay: what one trainer rank has of them, and, from rank 0, the manifest."""

import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import structlog
from torch import Tensor

from elastic.weights.blobs import Buffer
from elastic.weights.bucket import encode_bucket
from elastic.weights.choice import COSTS, choose_codec, estimate_change
from elastic.weights.codecs import CODECS
from elastic.weights.codecs.base import TILE_ELEMENTS, EncodedBucket
from elastic.weights.codecs.sums import tile_sums, zero_sums
from elastic.weights.digest import blob_digest_of, digest_of
from elastic.weights.errors import BlobConflict
from elastic.weights.layout import bucket_tiles, changed_by_tensor, tile_ends
from elastic.weights.records import (
    NOTHING,
    BucketEntry,
    DeltaBegun,
    DeltaManifest,
    DeltaPart,
    Manifest,
    PartOf,
    TensorEntry,
    begun_key,
    bucket_key,
    delta_manifest_key,
    keyframe_key,
    layout_of,
    manifest_key,
    open_part,
    part_key,
    state_of,
)
from elastic.weights.relay import Relay, claim
from elastic.weights.sharding import Cell, Shard, breaks, owned
from elastic.weights.signing import SigningKey
from elastic.weights.tensors import Bits, cut, entries_of, entries_of_boxes, flatten
from elastic.weights.versions import withdraw_keyframe
from elastic.weights.waiting import awaited

log = structlog.get_logger(__name__)

PART_TIMEOUT_S = 120.0
"""For the other ranks' parts of a version."""


class PublishSettings(msgspec.Struct, frozen=True, kw_only=True):
    keyframe_every: int = 16
    """Versions between keyframes; the first version is one."""
    merge_every: int = 4
    """Versions that a merged delta spans; every so many versions there is one. 1 for none."""
    keyframe_in_buckets: bool = False
    """Objects of their own, which workers pull while others are still put: for relays with a slow way there."""
    puts_at_once: int = 1
    """Buckets under way to the relay. With more than one, encoding does not wait for the last one to arrive."""
    keep_versions: int = 4
    bucket_elements: int = 32 << 20
    """64 MiB of weights."""
    tile_elements: int = TILE_ELEMENTS
    link_bytes_per_s: float = 31e6
    """A worker's share of the slowest link; codecs are chosen for it."""
    codec: str | None = None
    """Always this one instead."""


@dataclass(frozen=True)
class TrainerRank:
    """The part of one trainer rank in versions that several ranks publish together, or that are cut into cells.

    `cells` are the same for all ranks; `shard` is what this one holds. The ranks publish the same versions with the
    same settings; rank 0 writes the manifests, when the others have put their parts.
    """

    cells: tuple[Cell, ...]
    shard: Shard
    rank: int = 0
    ranks: int = 1


class Version(NamedTuple):
    """What this rank publishes of a version; the sums are of all tiles, where this rank writes the manifests."""

    version: int
    tensors: tuple[TensorEntry, ...]
    bits: Bits
    sums: npt.NDArray[np.uint64]


class PublishReport(NamedTuple):
    """What it took to make a version available; later objects of the same version are not counted."""

    version: int
    kind: str
    size_bytes: int
    full_bytes: int
    changed: dict[str, int]
    """Changed elements by tensor; empty for a keyframe."""
    encode_s: float
    put_s: float


class Encoder:
    """Encodes versions and puts them on the relay. It holds no version; `bits` are always those that this rank
    publishes.
    """

    def __init__(
        self,
        relay: Relay,
        run: str,
        model_config: Mapping[str, Any],
        settings: PublishSettings,
        share: TrainerRank | None,
        key: SigningKey,
    ) -> None:
        self._relay = relay
        self._run = run
        self._key = key
        self._model_config = model_config
        self._settings = settings
        self._share = share

    @property
    def leads(self) -> bool:
        """Whether this rank writes the manifests."""
        return self._share is None or self._share.rank == 0

    @property
    def alone(self) -> bool:
        return self._share is None or self._share.ranks == 1

    def laid_out(self, tensors: Mapping[str, Tensor]) -> tuple[tuple[TensorEntry, ...], list[Tensor]]:
        """The version's layout, and the tensors that this rank publishes, in that order."""
        entries = entries_of(tensors)
        share = self._share
        if share is None:
            return entries, list(tensors.values())
        own = owned(share.cells, share.rank)
        parts = cut((cell.box for cell in share.cells[own.start : own.stop]), share.shard, tensors)
        return entries_of_boxes(cell.box for cell in share.cells), list(parts)

    def put_keyframe(
        self,
        version: int,
        entries: tuple[TensorEntry, ...],
        bits: Bits,
        filled: Iterable[int] = (),
        sums: npt.NDArray[np.uint64] | None = None,
    ) -> tuple[Version, PublishReport]:
        """Puts a keyframe. One that lies there already and is right stays, so that pulls of it go on.

        `sums` are those of its tiles, where they are known. Takes the rest, and raises, as `put_delta` does.
        """
        coming = iter(filled)
        try:
            return self._put_keyframe(version, entries, bits, coming, sums)
        except BlobConflict as error:
            log.warning("keyframe replaced", version=version, reason=str(error))
            withdraw_keyframe(self._relay, version)
            return self._put_keyframe(version, entries, bits, coming, sums)

    def _put_keyframe(
        self,
        version: int,
        entries: tuple[TensorEntry, ...],
        bits: Bits,
        filled: Iterator[int],
        sums: npt.NDArray[np.uint64] | None,
    ) -> tuple[Version, PublishReport]:
        if self._share is not None or self._settings.keyframe_in_buckets:
            return self.put_delta(self._nothing(entries), version, bits, filled)
        begun_s = time.monotonic()
        deque(filled, maxlen=0)
        if sums is None:
            sums = tile_sums(bits, tile_ends(entries, self._settings.tile_elements))
        held = Version(version, entries, bits, sums)
        encoded_s = time.monotonic()
        _put_blob(self._relay, self._run, held, self._model_config, self._key, self._settings.tile_elements)
        put_s = time.monotonic() - encoded_s
        size = bits.nbytes
        return held, PublishReport(version, "keyframe", size, size, {}, encoded_s - begun_s, put_s)

    def put_delta(
        self, base: Version, version: int, bits: Bits, filled: Iterable[int] = ()
    ) -> tuple[Version, PublishReport]:
        """Puts the delta from `base` to `version`. Returns that version, and what it took.

        `bits` may still be `filled` meanwhile, which yields each time how many elements are there. Raises `RelayError`,
        and `WeightsCorrupted` where another rank's part does not belong to it.
        """
        started_s = time.monotonic()
        ends = tile_ends(base.tensors, self._settings.tile_elements)
        own = self._tiles(base.tensors, ends)
        sums, changed = base.sums.copy(), np.zeros(len(ends), np.int64)
        begun = self._begin(base, version)
        buckets: list[BucketEntry] = []
        with closing(_Puts(self._relay, self._settings.puts_at_once)) as puts:
            for number, tiles, codec, encoded in self._encode(base, begun, ends, own, bits, iter(filled)):
                sums[tiles] += encoded.sum_changes
                changed[tiles] = encoded.changed
                parts = encode_bucket(codec, encoded)
                puts.put(bucket_key(version, base.version, number), parts)
                size = sum(map(len, parts))
                buckets.append(BucketEntry(tiles.start, tiles.stop - tiles.start, codec, size, digest_of(*parts)))
            puts.finish()
            put_s = puts.waited_s
        begun_s = time.monotonic()
        if self.leads:
            buckets += self._parts(base, begun, ends, sums, changed)
        by_tensor = changed_by_tensor(base.tensors, ends, changed)
        if self.leads:
            manifest = _manifest(begun, sums, by_tensor, buckets)
            claim(self._relay, delta_manifest_key(version, base.version), self._key.seal(manifest))
        else:
            self._put_part(base, begun, own, sums[own], changed[own], buckets)
        put_s += time.monotonic() - begun_s
        per_name = dict.fromkeys((entry.name for entry in base.tensors), 0)
        for entry, count in zip(base.tensors, by_tensor, strict=True):
            per_name[entry.name] += count
        kind, per_name = ("keyframe", {}) if base.version == NOTHING else ("delta", per_name)
        size, encode_s = sum(bucket.size_bytes for bucket in buckets), time.monotonic() - started_s - put_s
        held = Version(version, base.tensors, bits, sums)
        return held, PublishReport(version, kind, size, bits.nbytes, per_name, encode_s, put_s)

    def announce_keyframe(self, version: int, entries: tuple[TensorEntry, ...]) -> None:
        """Says on the relay that a keyframe in cells of `version` is to come."""
        self._begin(self._nothing(entries), version)

    def _nothing(self, entries: tuple[TensorEntry, ...]) -> Version:
        """Returns the zeros that a keyframe in cells is a delta from."""
        begin, end = self._span(entries)
        sums = zero_sums(tile_ends(entries, self._settings.tile_elements))
        return Version(NOTHING, entries, np.zeros(end - begin, np.uint16), sums)

    def _encode(
        self,
        base: Version,
        begun: DeltaBegun,
        ends: npt.NDArray[np.int64],
        own: slice,
        bits: Bits,
        filled: Iterator[int],
    ) -> Iterator[tuple[int, slice, str, EncodedBucket]]:
        """This rank's buckets, as soon as their bits are there: number, tiles, codec and what that makes of them."""
        settings = self._settings
        codecs = ("dense", "raw") if base.version == NOTHING else COSTS
        begins = np.concatenate([[0], ends]) - self._span(base.tensors)[0]
        there = 0
        for number, (first, count) in enumerate(begun.buckets):
            if not own.start <= first < own.stop:
                continue
            tiles = slice(first, first + count)
            elements = slice(int(begins[tiles.start]), int(begins[tiles.stop]))
            while there < elements.stop and (step := next(filled, None)) is not None:
                there = step
            old, new = base.bits[elements], bits[elements]
            codec = settings.codec or choose_codec(estimate_change(old, new), settings.link_bytes_per_s, codecs)
            bucket_ends = begins[tiles.start + 1 : tiles.stop + 1] - elements.start
            yield number, tiles, codec, CODECS[codec].encode(old, new, bucket_ends)
        deque(filled, maxlen=0)

    def _put_part(
        self,
        base: Version,
        begun: DeltaBegun,
        own: slice,
        sums: npt.NDArray[np.uint64],
        changed: npt.NDArray[np.int64],
        buckets: Sequence[BucketEntry],
    ) -> None:
        assert self._share is not None
        part = DeltaPart(
            of=self._part_of(base, begun, self._share.rank, own),
            buckets=tuple(buckets),
            changed=tuple(changed.tolist()),
            tile_sums=sums.astype("<u8").tobytes(),
        )
        claim(self._relay, part_key(begun.version, begun.base_version, self._share.rank), self._key.seal(part))

    def _begin(self, base: Version, version: int) -> DeltaBegun:
        """Returns the delta's layout, without its content. The first rank also puts it on the relay, for workers that
        follow.
        """
        ends = tile_ends(base.tensors, self._settings.tile_elements)
        spans = bucket_tiles(ends, self._settings.bucket_elements, breaks(self._share.cells) if self._share else ())
        begun = DeltaBegun(
            run=self._run,
            version=version,
            base_version=base.version,
            base_state=state_of(base.sums),
            model=dict(self._model_config),
            tensors=base.tensors,
            tile_elements=self._settings.tile_elements,
            buckets=tuple((first, last - first) for first, last in spans),
        )
        if self.leads:
            claim(self._relay, begun_key(version, base.version), self._key.seal(begun))
        return begun

    def _part_of(self, base: Version, begun: DeltaBegun, rank: int, tiles: slice) -> PartOf:
        return PartOf(
            run=self._run,
            version=begun.version,
            base_version=begun.base_version,
            rank=rank,
            layout=layout_of(self._model_config, begun.tensors, begun.tile_elements, begun.buckets),
            base_state=state_of(base.sums[tiles]),
        )

    def _parts(
        self,
        base: Version,
        begun: DeltaBegun,
        ends: npt.NDArray[np.int64],
        sums: npt.NDArray[np.uint64],
        changed: npt.NDArray[np.int64],
    ) -> list[BucketEntry]:
        """The other ranks' buckets; takes over their sums and changes. They lie one after the other, by rank."""
        share, buckets = self._share, []
        deadline_s = time.monotonic() + PART_TIMEOUT_S
        for rank in range(1, share.ranks if share else 1):
            own = self._tiles(base.tensors, ends, rank)
            content = awaited(self._relay, part_key(begun.version, base.version, rank), deadline_s)
            spans = [span for span in begun.buckets if own.start <= span[0] < own.stop]
            part = open_part(content, self._key.trust(self._run), self._part_of(base, begun, rank, own), spans)
            sums[own] = np.frombuffer(part.tile_sums, "<u8")
            changed[own] = part.changed
            buckets += part.buckets
        return buckets

    def _tiles(self, entries: tuple[TensorEntry, ...], ends: npt.NDArray[np.int64], rank: int | None = None) -> slice:
        """The tiles that a rank publishes."""
        return slice(*(int(np.searchsorted(ends, edge, side="right")) for edge in self._span(entries, rank)))

    def _span(self, entries: tuple[TensorEntry, ...], rank: int | None = None) -> tuple[int, int]:
        """The elements of a version that a rank publishes, None for this one."""
        share = self._share
        own = range(len(entries)) if share is None else owned(share.cells, share.rank if rank is None else rank)
        offsets = [*(entry.offset // 2 for entry in entries), sum(entry.size_bytes for entry in entries) // 2]
        return offsets[own.start], offsets[own.stop]


class _Puts:
    """Blobs on their way to a relay: so many `at_once` that only the next one waits for the first of them."""

    def __init__(self, relay: Relay, at_once: int) -> None:
        self._relay = relay
        self._executor = ThreadPoolExecutor(at_once, thread_name_prefix="puts") if at_once > 1 else None
        self._at_once = at_once
        self._pending: deque[Future[None]] = deque()
        self.waited_s = 0.0

    def put(self, key: str, parts: Sequence[Buffer]) -> None:
        """`claim` it. Raises what one before it came to."""
        begun_s = time.monotonic()
        if self._executor is None:
            claim(self._relay, key, *parts)
        else:
            if len(self._pending) == self._at_once:
                self._pending.popleft().result()
            self._pending.append(self._executor.submit(claim, self._relay, key, *parts))
        self.waited_s += time.monotonic() - begun_s

    def finish(self) -> None:
        """All are there."""
        begun_s = time.monotonic()
        while self._pending:
            self._pending.popleft().result()
        self.waited_s += time.monotonic() - begun_s

    def close(self) -> None:
        if self._executor is not None:
            self._executor.shutdown(cancel_futures=True)


def _manifest(
    begun: DeltaBegun, sums: npt.NDArray[np.uint64], changed: tuple[int, ...], buckets: Iterable[BucketEntry]
) -> DeltaManifest:
    return DeltaManifest(
        run=begun.run,
        version=begun.version,
        base_version=begun.base_version,
        base_state=begun.base_state,
        state=state_of(sums),
        model=begun.model,
        tensors=begun.tensors,
        changed=changed,
        tile_elements=begun.tile_elements,
        tile_sums=sums.astype("<u8").tobytes(),
        buckets=tuple(buckets),
    )


def publish_keyframe(
    relay: Relay,
    run: str,
    version: int,
    tensors: Mapping[str, Tensor],
    model_config: Mapping[str, Any],
    key: SigningKey,
    tile_elements: int = TILE_ELEMENTS,
) -> Manifest:
    """Puts full weights under `version`, the manifest last. Publishing the same again changes nothing.

    `tensors` are bfloat16 under their Hugging Face names, `model_config` is the model's `config.json`. Raises
    `RelayError`, and `ValueError` for a tensor that is not bfloat16.
    """
    entries, bits = entries_of(tensors), flatten(tensors)
    held = Version(version, entries, bits, tile_sums(bits, tile_ends(entries, tile_elements)))
    return _put_blob(relay, run, held, model_config, key, tile_elements)


def _put_blob(
    relay: Relay, run: str, held: Version, model_config: Mapping[str, Any], key: SigningKey, tile_elements: int
) -> Manifest:
    content = held.bits.view(np.uint8).data
    manifest = Manifest(
        run=run,
        version=held.version,
        model=dict(model_config),
        tensors=held.tensors,
        blob=keyframe_key(held.version),
        blob_bytes=held.bits.nbytes,
        blob_digest=blob_digest_of([content]),
        tile_elements=tile_elements,
        tile_sums=held.sums.astype("<u8").tobytes(),
    )
    relay.put(manifest.blob, content)
    relay.put(manifest_key(held.version), key.seal(manifest))
    return manifest
