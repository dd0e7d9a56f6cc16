"""The trainer's side: a version's weights onto a relay, as keyframe and deltas."""

import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import structlog
import torch
from torch import Tensor

from elastic.weights.choice import COSTS, choose_codec, estimate_change
from elastic.weights.codecs import CODECS
from elastic.weights.codecs.base import TILE_ELEMENTS
from elastic.weights.codecs.sums import tile_sums, zero_sums
from elastic.weights.compact import Mirror, on_device
from elastic.weights.delta import (
    NOTHING,
    BucketEntry,
    DeltaBegun,
    DeltaManifest,
    DeltaPart,
    PartOf,
    begun_key,
    bucket_key,
    checksum_of,
    decode_part,
    delta_manifest_key,
    encode_begun,
    encode_bucket,
    encode_delta_manifest,
    encode_part,
    layout_of,
    part_key,
    state_of,
)
from elastic.weights.errors import BlobConflict, BlobNotFound
from elastic.weights.layout import bucket_tiles, changed_by_tensor, tile_ends
from elastic.weights.manifest import (
    REQUESTS,
    Manifest,
    TensorEntry,
    encode_manifest,
    keyframe_key,
    manifest_key,
    request_key,
)
from elastic.weights.memory import Memory
from elastic.weights.plan import Update
from elastic.weights.relay import Relay
from elastic.weights.sharding import Cell, Shard, breaks, owned
from elastic.weights.tensors import Bits, cut, entries_of, entries_of_boxes, filling, views
from elastic.weights.versions import collect_garbage, published_updates, withdraw_keyframe
from elastic.weights.waiting import awaited, fetch

log = structlog.get_logger(__name__)

LATER_TIMEOUT_S = 600.0
"""For what is published after a version can be pulled already: a merged delta, a keyframe, garbage collection."""

PART_TIMEOUT_S = 120.0
"""For the other ranks' parts of a version."""


class PublishSettings(msgspec.Struct, frozen=True, kw_only=True):
    keyframe_every: int = 16
    """Versions between keyframes; the first version is one."""
    merge_every: int = 4
    """Versions that a merged delta spans; every so many versions there is one. 1 for none."""
    keep_versions: int = 4
    bucket_elements: int = 32 << 20
    """64 MiB of weights."""
    tile_elements: int = TILE_ELEMENTS
    link_bytes_per_s: float = 31e6
    """A worker's share of the slowest link; codecs are chosen for it."""
    codec: str | None = None
    """Always this one instead."""


class Published(NamedTuple):
    """What it took to make a version available; later objects of the same version are not counted."""

    version: int
    kind: str
    size_bytes: int
    full_bytes: int
    changed: dict[str, int]
    """Changed elements by tensor; empty for a keyframe."""
    encode_s: float
    put_s: float


@dataclass(frozen=True)
class Share:
    """The part of one trainer rank in versions that several ranks publish together, or that are cut into cells.

    `cells` are the same for all ranks; `shard` is what this one holds. The ranks publish the same versions with the
    same settings; rank 0 writes the manifests, when the others have put their parts.
    """

    cells: tuple[Cell, ...]
    shard: Shard
    rank: int = 0
    ranks: int = 1


class _Held(NamedTuple):
    """What this rank publishes of a version; the sums are of all tiles, where this rank writes the manifests."""

    version: int
    tensors: tuple[TensorEntry, ...]
    bits: Bits
    sums: npt.NDArray[np.uint64]


class _Encoded(NamedTuple):
    """What a delta, or a rank's part of it, came to."""

    sums: npt.NDArray[np.uint64]
    changed: tuple[int, ...]
    """Of each tensor."""
    size_bytes: int
    put_s: float


class Publisher:
    """Publishes versions in order. A version can be pulled when `publish` returns; more follows in the background.

    It keeps two copies of the weights on the CPU: the last version, and the one that the next merged delta is from;
    with a `share` only of what this rank publishes. Tensors on a GPU are compared there, with a third copy (`Mirror`),
    so that only what changed crosses to the host. Calls must not overlap.
    """

    def __init__(
        self,
        relay: Relay,
        run: str,
        model_config: Mapping[str, Any],
        settings: PublishSettings | None = None,
        share: Share | None = None,
    ) -> None:
        self._relay = relay
        self._run = run
        self._model_config = model_config
        self._settings = settings or PublishSettings()
        self._share = share
        self._memory = Memory()
        self._leads = share is None or share.rank == 0
        self._alone = share is None or share.ranks == 1
        self._last: _Held | None = None
        self._anchor: _Held | None = None
        self._mirror: Mirror | None = None
        self._keyframe_version = 0
        self._keyframe_wanted = self._keyframe_ordered = False
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="publisher")
        self._later: Future[None] | None = None

    def publish(self, version: int, tensors: Mapping[str, Tensor]) -> Published:
        """Put `version`: a delta from the last one published, or a keyframe where there is none that fits.

        `tensors` (bfloat16; with a `share` this rank's own) may be changed again as soon as it returns. Raises
        `RelayError`, also for what failed in the background since the last call, `ValueError`, and `WeightsCorrupted`
        where another rank's part does not belong to this version.
        """
        self.wait()
        begun_s = time.monotonic()
        entries, parts = self._laid_out(tensors)
        begin, end = self._span(entries)
        bits = self._memory.empty(end - begin)
        last = self._last
        if last is None or last.tensors != entries or last.version >= version:
            mirror, last = (Mirror(parts) if on_device(parts) else None), None
            deque(filling(bits, parts), maxlen=0)
            published, held = self._publish_first(version, entries, bits, begun_s)
        else:
            # Until this is over it mirrors no version, so that a failure is followed by a copy of everything.
            mirror, self._mirror = self._mirror, None
            filled = mirror.filling(bits, last.bits, parts) if mirror else filling(bits, parts)
            self._order_keyframe(version, entries)
            published, held = self._publish_delta(last, version, bits, filled, begun_s)
            if mirror is None and on_device(parts):
                mirror = Mirror(parts)
        self._last, self._mirror = held, mirror
        self._later = self._executor.submit(self._publish_later, held, last)
        return published

    def _order_keyframe(self, version: int, entries: tuple[TensorEntry, ...]) -> None:
        """The first rank decides whether one is due before it begins with a version; there the others see it."""
        if not self._leads:
            return
        due = version - self._keyframe_version >= self._settings.keyframe_every
        self._keyframe_ordered = due or self._keyframe_wanted
        if self._keyframe_ordered and not self._alone:
            self._begin_delta(self._nothing(entries), version)

    def _is_keyframe_ordered(self, held: _Held, last: _Held) -> bool:
        if self._leads:
            return self._keyframe_ordered
        deadline_s = time.monotonic() + PART_TIMEOUT_S
        awaited(self._relay, begun_key(held.version, last.version), deadline_s)
        try:
            fetch(self._relay, begun_key(held.version, NOTHING), deadline_s)
        except BlobNotFound:
            return False
        return True

    def request_keyframe(self) -> None:
        """Publish a keyframe with the next version, whether one is due or not; for the first rank to say."""
        self._keyframe_wanted = True

    def answer_requests(self) -> bool:
        """Put a keyframe of the last version if a worker asks for one: there is none yet, or it is damaged.

        Says whether anything was asked of it; may be called from any thread. Where several ranks publish together, the
        first of them answers, and they put it with the next version.
        """
        held = self._last
        if held is None or not self._leads:
            return False
        requests = self._relay.list_keys(REQUESTS)
        if not requests:
            return False
        refused = request_key(held.version) in requests
        asked = refused or Update(held.version, None) not in published_updates(self._relay)
        if asked:
            log.warning("keyframe on request", version=held.version, requests=len(requests))
            if self._alone:
                self._renew_keyframe(held)
            else:
                self.request_keyframe()
        for key in requests:
            self._relay.delete(key)
        return asked

    def _renew_keyframe(self, held: _Held) -> None:
        """A relay leaves alone what is there already and right, so that nobody who pulls it is interrupted."""
        try:
            self._put_keyframe(held)
        except BlobConflict:
            withdraw_keyframe(self._relay, held.version)
            self._put_keyframe(held)

    def wait(self) -> None:
        """Until the background is done. Raises what went wrong there."""
        later, self._later = self._later, None
        if later is not None:
            later.result(LATER_TIMEOUT_S)

    def close(self) -> None:
        """Finish what is under way, whatever becomes of it."""
        self._executor.shutdown(wait=True)

    def _laid_out(self, tensors: Mapping[str, Tensor]) -> tuple[tuple[TensorEntry, ...], list[Tensor]]:
        """How a version lies, and what this rank publishes of it, in that order."""
        entries = entries_of(tensors)
        share = self._share
        if share is None:
            return entries, list(tensors.values())
        own = owned(share.cells, share.rank)
        parts = cut((cell.box for cell in share.cells[own.start : own.stop]), share.shard, tensors)
        return entries_of_boxes(cell.box for cell in share.cells), list(parts)

    def _nothing(self, entries: tuple[TensorEntry, ...]) -> _Held:
        """What a keyframe in cells is a delta from."""
        begin, end = self._span(entries)
        sums = zero_sums(tile_ends(entries, self._settings.tile_elements))
        return _Held(NOTHING, entries, np.zeros(end - begin, np.uint16), sums)

    def _tiles(self, entries: tuple[TensorEntry, ...], ends: npt.NDArray[np.int64], rank: int | None = None) -> slice:
        """The tiles that a rank publishes."""
        return slice(*(int(np.searchsorted(ends, edge, side="right")) for edge in self._span(entries, rank)))

    def _span(self, entries: tuple[TensorEntry, ...], rank: int | None = None) -> tuple[int, int]:
        """The elements of a version that a rank publishes, None for this one."""
        share = self._share
        own = range(len(entries)) if share is None else owned(share.cells, share.rank if rank is None else rank)
        offsets = [*(entry.offset // 2 for entry in entries), sum(entry.size_bytes for entry in entries) // 2]
        return offsets[own.start], offsets[own.stop]

    def _publish_first(
        self, version: int, entries: tuple[TensorEntry, ...], bits: Bits, begun_s: float
    ) -> tuple[Published, _Held]:
        if self._share is not None:
            encoded = self._put_delta(self._nothing(entries), version, bits)
            held = _Held(version, entries, bits, encoded.sums)
            self._anchor, self._keyframe_version = held, version
            encode_s = time.monotonic() - begun_s - encoded.put_s
            return Published(version, "keyframe", encoded.size_bytes, bits.nbytes, {}, encode_s, encoded.put_s), held
        sums = tile_sums(bits, tile_ends(entries, self._settings.tile_elements))
        held = _Held(version, entries, bits, sums)
        encoded_s = time.monotonic()
        self._put_keyframe(held)
        self._anchor = held
        put_s = time.monotonic() - encoded_s
        size = bits.nbytes
        return Published(version, "keyframe", size, size, {}, encoded_s - begun_s, put_s), held

    def _publish_delta(
        self, last: _Held, version: int, bits: Bits, filled: Iterator[int], begun_s: float
    ) -> tuple[Published, _Held]:
        encoded = self._put_delta(last, version, bits, filled)
        changed = dict.fromkeys((entry.name for entry in last.tensors), 0)
        for entry, count in zip(last.tensors, encoded.changed, strict=True):
            changed[entry.name] += count
        encode_s = time.monotonic() - begun_s - encoded.put_s
        held = _Held(version, last.tensors, bits, encoded.sums)
        size = encoded.size_bytes
        return Published(version, "delta", size, bits.nbytes, changed, encode_s, encoded.put_s), held

    def _publish_later(self, held: _Held, last: _Held | None) -> None:
        settings, anchor = self._settings, self._anchor
        merge_every = settings.merge_every
        if anchor is not None and merge_every > 1 and held.version - anchor.version >= merge_every:
            self._put_delta(anchor, held.version, held.bits)
            self._anchor = held
        if last is not None and self._is_keyframe_ordered(held, last):
            self._put_keyframe(held)
        if self._leads:
            collect_garbage(self._relay, settings.keep_versions)

    def _put_keyframe(self, held: _Held) -> None:
        if self._share is not None:
            self._put_delta(self._nothing(held.tensors), held.version, held.bits)
        else:
            tensors = views(held.tensors, held.bits)
            publish_keyframe(self._relay, self._run, held.version, tensors, self._model_config)
        self._keyframe_version, self._keyframe_wanted = held.version, False

    def _put_delta(self, base: _Held, version: int, bits: Bits, filled: Iterator[int] | None = None) -> _Encoded:
        """`bits` may still be `filled` meanwhile, as far as that says each time."""
        settings = self._settings
        ends = tile_ends(base.tensors, settings.tile_elements)
        begins = np.concatenate([[0], ends])
        begin, _ = self._span(base.tensors)
        own = self._tiles(base.tensors, ends)
        sums, changed = base.sums.copy(), np.zeros(len(ends), np.int64)
        begun = self._begin_delta(base, version)
        spans = [(first, first + tiles) for first, tiles in begun.buckets]
        buckets: list[BucketEntry] = []
        there = 0
        put_s = 0.0
        codecs = ("dense", "raw") if base.version == NOTHING else COSTS
        for number, (first, last) in enumerate(spans):
            if not own.start <= first < own.stop:
                continue
            while filled is not None and there < begins[last] - begin:
                there = next(filled)
            old, new = (flat[begins[first] - begin : begins[last] - begin] for flat in (base.bits, bits))
            codec = settings.codec or choose_codec(estimate_change(old, new), settings.link_bytes_per_s, codecs)
            encoded = CODECS[codec].encode(old, new, ends[first:last] - begins[first])
            sums[first:last] += encoded.sum_changes
            changed[first:last] = encoded.changed
            parts = encode_bucket(codec, first, encoded)
            begun_s = time.monotonic()
            self._relay.put(bucket_key(version, base.version, number), *parts)
            put_s += time.monotonic() - begun_s
            size = sum(map(len, parts))
            buckets.append(BucketEntry(first, last - first, codec, size, checksum_of(self._run, *parts)))
        deque(filled or (), maxlen=0)
        begun_s = time.monotonic()
        if self._leads:
            buckets += self._parts(base, begun, ends, sums, changed)
            self._relay.put(
                delta_manifest_key(version, base.version),
                encode_delta_manifest(_manifest(begun, sums, changed_by_tensor(base.tensors, ends, changed), buckets)),
            )
        else:
            assert self._share is not None
            part = DeltaPart(
                of=self._part_of(base, begun, self._share.rank, own),
                buckets=tuple(buckets),
                changed=tuple(changed[own].tolist()),
                tile_sums=sums[own].astype("<u8").tobytes(),
            )
            self._relay.put(part_key(version, base.version, self._share.rank), encode_part(part))
        put_s += time.monotonic() - begun_s
        size = sum(bucket.size_bytes for bucket in buckets)
        return _Encoded(sums, changed_by_tensor(base.tensors, ends, changed), size, put_s)

    def _begin_delta(self, base: _Held, version: int) -> DeltaBegun:
        """What the delta will be; the first rank tells everybody."""
        ends = tile_ends(base.tensors, self._settings.tile_elements)
        spans = bucket_tiles(ends, self._settings.bucket_elements, breaks(self._share.cells) if self._share else ())
        begun = DeltaBegun(
            run=self._run,
            version=version,
            base_version=base.version,
            base_state=state_of(base.sums),
            tensors=base.tensors,
            tile_elements=self._settings.tile_elements,
            buckets=tuple((first, last - first) for first, last in spans),
        )
        if self._leads:
            self._relay.put(begun_key(version, base.version), encode_begun(begun))
        return begun

    def _part_of(self, base: _Held, begun: DeltaBegun, rank: int, tiles: slice) -> PartOf:
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
        base: _Held,
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
            part = decode_part(content, self._part_of(base, begun, rank, own), spans)
            sums[own] = np.frombuffer(part.tile_sums, "<u8")
            changed[own] = part.changed
            buckets += part.buckets
        return buckets


def _manifest(
    begun: DeltaBegun, sums: npt.NDArray[np.uint64], changed: tuple[int, ...], buckets: Iterable[BucketEntry]
) -> DeltaManifest:
    return DeltaManifest(
        run=begun.run,
        version=begun.version,
        base_version=begun.base_version,
        base_state=begun.base_state,
        state=state_of(sums),
        tensors=begun.tensors,
        changed=changed,
        tile_elements=begun.tile_elements,
        tile_sums=sums.astype("<u8").tobytes(),
        buckets=tuple(buckets),
    )


def publish_keyframe(
    relay: Relay, run: str, version: int, tensors: Mapping[str, Tensor], model_config: Mapping[str, Any]
) -> Manifest:
    """Put full weights under `version`, the manifest last. Publishing the same again is harmless.

    `tensors` are bfloat16 on the CPU under their Hugging Face names, `model_config` the model's `config.json`.
    Raises `RelayError`, and `ValueError` for a tensor that is not bfloat16.
    """
    entries = entries_of(tensors)
    parts = [_bytes_of(tensor) for tensor in tensors.values()]
    manifest = Manifest(
        run=run,
        version=version,
        kind="keyframe",
        model=dict(model_config),
        tensors=entries,
        blob=keyframe_key(version),
        blob_bytes=sum(entry.size_bytes for entry in entries),
        blob_checksum=checksum_of(run, *parts),
    )
    relay.put(manifest.blob, *parts)
    relay.put(manifest_key(version), encode_manifest(manifest))
    return manifest


def _bytes_of(tensor: Tensor) -> memoryview:
    """The tensor's memory where it is contiguous on the CPU, else a copy of it."""
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data
