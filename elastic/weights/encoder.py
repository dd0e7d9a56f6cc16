"""Keyframes and deltas onto a relay: what one trainer rank has of them, and, from rank 0, the manifest."""

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import closing
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import structlog
from torch import Tensor

from elastic.system.host import here
from elastic.weights.blobs import Buffer
from elastic.weights.bucket import encode_bucket
from elastic.weights.choice import COSTS, choose_codec, estimate_change
from elastic.weights.codecs import CODECS
from elastic.weights.codecs.base import TILE_ELEMENTS, EncodedBucket
from elastic.weights.codecs.sums import tile_sums
from elastic.weights.digest import blob_digest_of, digest_of
from elastic.weights.errors import BlobConflict
from elastic.weights.layout import Layout
from elastic.weights.records import (
    NOTHING,
    BucketEntry,
    DeltaBegun,
    DeltaManifest,
    DeltaPart,
    Manifest,
    PartOf,
    begun_key,
    bucket_key,
    delta_manifest_key,
    delta_prefix,
    keyframe_key,
    layout_of,
    manifest_key,
    open_part,
    part_key,
    state_of,
)
from elastic.weights.relay import Relay, claim
from elastic.weights.sharding import Cell, Shard, cells, owned, whole_shapes
from elastic.weights.signing import SigningKey
from elastic.weights.tensors import DTYPES, Bits, cut, entries_of, entries_of_boxes, flatten
from elastic.weights.versions import withdraw_keyframe
from elastic.weights.waiting import awaited

log = structlog.get_logger(__name__)

PART_TIMEOUT_S = 120.0
"""For the other ranks' parts of a version, unless settings say otherwise."""


BUCKET_ELEMENTS = 32 << 20
"""Patterns of a bucket: 64 MiB of weights."""


class PublishSettings(msgspec.Struct, frozen=True, kw_only=True):
    keyframe_every: int = 16
    """Versions between keyframes; the first version is one."""
    merge_every: int = 4
    """Versions that a merged delta spans; every so many versions there is one. 1 for none."""
    keyframe_in_buckets: bool = False
    """Objects of their own, which workers pull while others are still put: for relays with a slow way there."""
    puts_at_once: int = 1
    """Buckets under way to the relay while the next one is encoded."""
    keep_versions: int = 4
    bucket_elements: int = BUCKET_ELEMENTS
    tile_elements: int = TILE_ELEMENTS
    link_bytes_per_s: float = 31e6
    """A worker's share of the slowest link; codecs are chosen for it."""
    codec: str | None = None
    """Always this one instead."""
    part_timeout_s: float = PART_TIMEOUT_S
    """How long another rank's part of a version is waited for."""


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
    float32: frozenset[str] = frozenset()
    """The model's tensors that travel as float32."""

    @classmethod
    def of_all(
        cls, shards: Sequence[Shard], workers: Sequence[Shard] = (), float32: Collection[str] = ()
    ) -> "list[TrainerRank]":
        """Each rank's share, where together they hold the model in these `shards`: each element is published once.

        `workers` are the shards in which it is hosted, so that each rank of theirs pulls its own and no more. Raises
        `ValueError` where no rank holds some part.
        """
        boxes = chain.from_iterable(local.boxes for shard in shards for local in shard.values())
        every = cells(whole_shapes(boxes), shards, workers)
        return [cls(every, shard, rank, len(shards), frozenset(float32)) for rank, shard in enumerate(shards)]


class Version(NamedTuple):
    """What this rank publishes of a version; the sums are of all tiles, where this rank writes the manifests."""

    version: int
    layout: Layout
    bits: Bits
    sums: npt.NDArray[np.uint64]


class PublishReport(NamedTuple):
    """The cost of making a version available, without the version's later objects. Bytes and changes are those of all
    ranks where rank 0 reports, and of another rank its own."""

    version: int
    kind: str
    size_bytes: int
    full_bytes: int
    changed: dict[str, int]
    """Changed patterns by tensor, of which a float32 has two; empty for a keyframe."""
    patterns: dict[str, int]
    """All patterns by tensor."""
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
        self._rank, self._ranks = (share.rank, share.ranks) if share else (0, 1)
        self._layout: Layout | None = None
        """The layout of the tensors that were laid out last."""

    @property
    def leads(self) -> bool:
        """Whether this rank writes the manifests."""
        return self._rank == 0

    @property
    def alone(self) -> bool:
        return self._ranks == 1

    def laid_out(self, tensors: Mapping[str, Tensor]) -> tuple[Layout, list[Tensor]]:
        """Returns the version's layout, the one of before if it is the same, and the tensors that this rank publishes.

        Raises `ValueError` for tensors that are neither bfloat16 nor float32, or not those of this rank's shard.
        """
        entries, parts, cells = entries_of(tensors), list(tensors.values()), ()
        if (share := self._share) is not None:
            cells, own = share.cells, owned(share.cells, share.rank)
            parts = list(cut((cell.box for cell in cells[own.start : own.stop]), share.shard, tensors))
            entries = entries_of_boxes((cell.box for cell in cells), share.float32)
            for part, entry in zip(parts, entries[own.start : own.stop], strict=True):
                if part.dtype != DTYPES[entry.dtype]:
                    raise ValueError(f"tensor {entry.name}: dtype {part.dtype}; its share says {entry.dtype}")
        if self._layout is None or self._layout.tensors != entries:
            settings = self._settings
            self._layout = Layout(entries, settings.tile_elements, settings.bucket_elements, cells, self._ranks)
        return self._layout, parts

    def put_keyframe(
        self,
        version: int,
        layout: Layout,
        bits: Bits,
        filled: Iterable[int] = (),
        sums: npt.NDArray[np.uint64] | None = None,
    ) -> tuple[Version, PublishReport]:
        """Puts a keyframe. One that lies there already and is right stays, so that pulls of it go on.

        `sums` are those of its tiles, where they are known. Takes the rest, and raises, as `put_delta` does.
        """
        if self._share is not None or self._settings.keyframe_in_buckets:
            nothing = self._nothing(layout)
            return self.put_delta(nothing, version, bits, filled)
        begun_s = here().monotonic()
        deque(filled, maxlen=0)
        held = Version(version, layout, bits, tile_sums(bits, layout.ends) if sums is None else sums)
        encoded_s = here().monotonic()
        try:
            _put_blob(self._relay, self._run, held, self._model_config, self._key)
        except BlobConflict as error:
            log.warning("keyframe replaced", version=version, reason=str(error))
            withdraw_keyframe(self._relay, version)
            _put_blob(self._relay, self._run, held, self._model_config, self._key)
        put_s = here().monotonic() - encoded_s
        size = bits.nbytes
        return held, PublishReport(
            version, "keyframe", size, size, {}, _patterns_of(layout), encoded_s - begun_s, put_s
        )

    def announce_keyframe(self, version: int, layout: Layout) -> None:
        """Says on the relay that a keyframe in cells of `version` is to come."""
        self._announce(self._nothing(layout), version)

    def is_part_wanted(self, version: int, base_version: int) -> bool:
        """Whether rank 0 has announced this delta, or keyframe in cells, and this rank's part is not on the relay."""
        keys = self._relay.list_keys(delta_prefix(version, base_version))
        return begun_key(version, base_version) in keys and part_key(version, base_version, self._rank) not in keys

    def forget_parts(self, version: int, base_version: int) -> None:
        """Take the other ranks' parts off the relay, so that these put them, and damaged buckets, again."""
        for rank in range(1, self._ranks):
            self._relay.delete(part_key(version, base_version, rank))

    def _nothing(self, layout: Layout) -> Version:
        """Returns the zeros that a keyframe in cells is a delta from."""
        own = layout.elements[self._rank]
        return Version(NOTHING, layout, np.zeros(own.stop - own.start, np.uint16), layout.zero_sums)

    def put_delta(
        self, base: Version, version: int, bits: Bits, filled: Iterable[int] = ()
    ) -> tuple[Version, PublishReport]:
        """Puts the delta from `base` to `version`. Returns that version, and what it took.

        `bits` may still be `filled` meanwhile, which yields each time how many elements are there. Raises `RelayError`,
        and `WeightsCorrupted` where another rank's part does not belong to it.
        """
        started_s = here().monotonic()
        layout, own = base.layout, base.layout.tiles[self._rank]
        sums, changed = base.sums.copy(), np.zeros(len(layout.ends), np.int64)
        begun, parts_of = self._announce(base, version)
        buckets: list[BucketEntry] = []
        with closing(_Puts(self._relay, self._settings.puts_at_once)) as puts:
            for number, tiles, codec, encoded in self._encode(base, bits, iter(filled)):
                sums[tiles] += encoded.sum_changes
                changed[tiles] = encoded.changed
                parts = encode_bucket(codec, encoded)
                puts.put(bucket_key(version, base.version, number), parts)
                size = sum(map(len, parts))
                buckets.append(BucketEntry(codec, size, digest_of(*parts)))
            puts.wait_for()
            put_s = puts.waited_s
        begun_s = here().monotonic()
        if self.leads:
            buckets += self._others_buckets(layout, parts_of, sums, changed)
        by_tensor = np.zeros(len(layout.tensors), np.int64)
        np.add.at(by_tensor, layout.tensor_of_tile, changed)
        if self.leads:
            key = delta_manifest_key(version, base.version)
            record = DeltaManifest(
                announced=begun,
                state=state_of(sums),
                changed=tuple(by_tensor.tolist()),
                tile_sums=sums.astype("<u8").tobytes(),
                buckets=tuple(buckets),
            )
        else:
            key = part_key(version, base.version, self._rank)
            record = DeltaPart(
                of=parts_of[self._rank],
                buckets=tuple(buckets),
                changed=tuple(changed[own].tolist()),
                tile_sums=sums[own].astype("<u8").tobytes(),
            )
        claim(self._relay, key, self._key.seal(record))
        put_s += here().monotonic() - begun_s
        every = _patterns_of(layout)
        per_name = dict.fromkeys(every, 0)
        for entry, count in zip(layout.tensors, by_tensor.tolist(), strict=True):
            per_name[entry.name] += count
        kind, per_name = ("keyframe", {}) if base.version == NOTHING else ("delta", per_name)
        size, encode_s = sum(bucket.size_bytes for bucket in buckets), here().monotonic() - started_s - put_s
        full = sum(entry.size_bytes for entry in layout.tensors) if self.leads else bits.nbytes
        held = Version(version, layout, bits, sums)
        return held, PublishReport(version, kind, size, full, per_name, every, encode_s, put_s)

    def _announce(self, base: Version, version: int) -> tuple[DeltaBegun, dict[int, PartOf]]:
        """Returns the delta's announcement, which rank 0 puts on the relay for workers that follow, and what says that
        a part belongs to it, by rank: rank 0 has those of all others, every other rank its own.
        """
        layout = base.layout
        begun = DeltaBegun(
            run=self._run,
            version=version,
            base_version=base.version,
            base_state=state_of(base.sums),
            model=dict(self._model_config),
            tensors=layout.tensors,
            tile_elements=layout.tile_elements,
            buckets=layout.buckets,
        )
        parts_of = {
            rank: PartOf(
                run=self._run,
                version=version,
                base_version=base.version,
                rank=rank,
                layout=layout_of(self._model_config, layout.tensors, layout.tile_elements, layout.buckets),
                base_state=state_of(base.sums[layout.tiles[rank]]),
            )
            for rank in (range(1, self._ranks) if self.leads else (self._rank,))
        }
        if self.leads:
            claim(self._relay, begun_key(version, base.version), self._key.seal(begun))
        return begun, parts_of

    def _encode(
        self, base: Version, bits: Bits, filled: Iterator[int]
    ) -> Iterator[tuple[int, slice, str, EncodedBucket]]:
        """Yields this rank's buckets, as soon as their bits are there: number, tiles, codec and the encoded bucket."""
        settings, layout = self._settings, base.layout
        codecs = ("dense", "raw") if base.version == NOTHING else COSTS
        own, begins = layout.tiles[self._rank], np.concatenate([[0], layout.ends]) - layout.elements[self._rank].start
        there = 0
        for number, (first, count) in enumerate(layout.buckets):
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

    def _others_buckets(
        self,
        layout: Layout,
        parts_of: Mapping[int, PartOf],
        sums: npt.NDArray[np.uint64],
        changed: npt.NDArray[np.int64],
    ) -> list[BucketEntry]:
        """Returns the other ranks' buckets, by rank, and fills in their sums and changes."""
        buckets: list[BucketEntry] = []
        deadline_s = here().monotonic() + self._settings.part_timeout_s
        for rank, of in parts_of.items():
            own = layout.tiles[rank]
            content = awaited(self._relay, part_key(of.version, of.base_version, rank), deadline_s)
            spans = [span for span in layout.buckets if own.start <= span[0] < own.stop]
            part = open_part(content, self._key.trust(self._run), of, spans)
            sums[own] = np.frombuffer(part.tile_sums, "<u8")
            changed[own] = part.changed
            buckets += part.buckets
        return buckets


def _patterns_of(layout: Layout) -> dict[str, int]:
    patterns: dict[str, int] = {}
    for entry in layout.tensors:
        patterns[entry.name] = patterns.get(entry.name, 0) + entry.patterns
    return patterns


class _Puts:
    """Blobs on their way to a relay: so many `at_once` that only the next one waits for the first of them."""

    def __init__(self, relay: Relay, at_once: int) -> None:
        self._relay = relay
        self._executor = here().executor(at_once, "puts")
        self._at_once = at_once
        self._pending: deque[Future[None]] = deque()
        self.waited_s = 0.0

    def put(self, key: str, parts: Sequence[Buffer]) -> None:
        """`claim` it. Raises what one before it came to."""
        self.wait_for(self._at_once - 1)
        self._pending.append(self._executor.submit(claim, self._relay, key, *parts))

    def wait_for(self, left: int = 0) -> None:
        """Waits until no more than so many are on their way."""
        begun_s = here().monotonic()
        while len(self._pending) > left:
            self._pending.popleft().result()
        self.waited_s += here().monotonic() - begun_s

    def close(self) -> None:
        self._executor.shutdown(cancel_futures=True)


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

    `tensors` are under their Hugging Face names, `model_config` is the model's `config.json`. Raises `RelayError`, and
    `ValueError` for a tensor that is neither bfloat16 nor float32.
    """
    layout = Layout(entries_of(tensors), tile_elements, BUCKET_ELEMENTS)
    bits = flatten(tensors)
    return _put_blob(relay, run, Version(version, layout, bits, tile_sums(bits, layout.ends)), model_config, key)


def _put_blob(relay: Relay, run: str, held: Version, model_config: Mapping[str, Any], key: SigningKey) -> Manifest:
    content = held.bits.view(np.uint8).data
    manifest = Manifest(
        run=run,
        version=held.version,
        model=dict(model_config),
        tensors=held.layout.tensors,
        blob=keyframe_key(held.version),
        blob_bytes=held.bits.nbytes,
        blob_digest=blob_digest_of(content),
        tile_elements=held.layout.tile_elements,
        tile_sums=held.sums.astype("<u8").tobytes(),
    )
    relay.put(manifest.blob, content)
    relay.put(manifest_key(held.version), key.seal(manifest))
    return manifest
