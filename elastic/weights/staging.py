"""What a worker holds of a version, and how an update takes it to the next one.

A delta is decoded into *overwrites* while the version before is still served. They are written over the patterns only
when all of them have arrived and verified. Writing them again, from the first on, changes nothing, so an engine that
was stopped in between begins again.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import compress
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from elastic.weights.bucket import Bucket
from elastic.weights.codecs.base import BucketUpdate
from elastic.weights.codecs.sums import apply_update, kept_small, tile_sums, zero_sums
from elastic.weights.errors import WeightsCorrupted
from elastic.weights.layout import Tiles, tile_ends
from elastic.weights.memory import Memory
from elastic.weights.plan import PublishedUpdate
from elastic.weights.reading import RelayReading
from elastic.weights.records import (
    NOTHING,
    SCHEMA_VERSION,
    DeltaBegun,
    DeltaManifest,
    Manifest,
    TensorEntry,
    bucket_key,
    delta_manifest_key,
    open_update,
    state_of,
)
from elastic.weights.signing import Trust
from elastic.weights.source import PullReport
from elastic.weights.tensors import Bits

Overwrite: TypeAlias = tuple[slice, BucketUpdate]
"""Consecutive elements of the held weights, and their new patterns."""

BUCKET_BYTES_MAX = 1 << 20
"""Largest blob of a bucket: this, and 6 bytes for each element. No codec takes more."""

NOTHING_PULLED = PullReport(size_bytes=0, full_bytes=0)


class BaseMismatch(WeightsCorrupted):
    """The delta may be right, but not for what is held."""


class ResidentWeights(NamedTuple):
    """Whole, verified weights of one version."""

    version: int
    run: str
    model: dict[str, Any]
    """The model's `config.json`."""
    tensors: tuple[TensorEntry, ...]
    hosted: tuple[bool, ...]
    """Which of the tensors these are."""
    bits: Bits
    """The bits of the hosted tensors, one after the other."""
    state: dict[int, tuple[str, npt.NDArray[np.uint64]]]
    """Tile size → what identifies the weights, and their tiles' sums; of further sizes made when first asked for."""

    def audited(self, first: int = 0) -> Iterator[tuple[int, bool]]:
        """Yields each hosted tile, from `first` on and around, and whether its recomputed sum is the one maintained."""
        size, (_, sums) = next(iter(self.state.items()))
        tiles = Tiles(self.tensors, self.hosted, size)
        hosted = np.flatnonzero(tiles.hosted)
        for tile in np.roll(hosted, -np.searchsorted(hosted, first)).tolist():
            (piece,) = tiles.pieces(tile, 1)
            yield tile, bool(tile_sums(self.bits[piece.elements], piece.ends)[0] == sums[tile])


@dataclass(eq=False)
class StagedVersion:
    """A version on its way in: `weights` is what there will be once `overwrites` are written, in order.

    Without a `base` its patterns are memory of its own, into which every change goes at once.
    """

    weights: ResidentWeights
    base: int | None = None
    overwrites: list[Overwrite] = field(default_factory=list[Overwrite])
    path: tuple[PublishedUpdate, ...] = ()
    report: PullReport = NOTHING_PULLED

    def patterns(self, elements: slice) -> Bits:
        """Returns these elements after `overwrites`; a copy only where there are any."""
        touching = [each for each in self.overwrites if each[0].start < elements.stop and elements.start < each[0].stop]
        if not touching:
            return self.weights.bits[elements]
        changed = self.weights.bits[elements].copy()
        for span, update in touching:
            index = np.arange(update.value.size) if update.index is None else update.index.astype(np.int64)
            place = index + (span.start - elements.start)
            inside = (place >= 0) & (place < changed.size)
            changed[place[inside]] = update.value[inside]
        return changed

    def write(self) -> None:
        for elements, update in self.overwrites:
            apply_update(update, self.weights.bits[elements])


class Staging:
    """Takes a staged version from update to update, off one reading, and believes what `trust` says.

    `hosted` says which of a version's tensors or cells to hold; it raises `WeightsCorrupted` where one is missing.
    """

    def __init__(
        self,
        reading: RelayReading,
        trust: Trust,
        hosted: Callable[[Sequence[TensorEntry]], tuple[bool, ...]],
        memory: Memory,
    ) -> None:
        self._reading = reading
        self._trust = trust
        self._hosted = hosted
        self._memory = memory

    def take(self, update: PublishedUpdate, staged: StagedVersion | None) -> StagedVersion:
        """Returns the version that `update` leads to, from the `staged` one or from nothing.

        Raises `RelayError`, and `WeightsCorrupted` for what does not verify: `staged` is of no use then. Raises
        `BaseMismatch` where the update is for other weights than those staged.
        """
        record = open_update(self._reading.get, *update, self._trust, self._reading.listed)
        if isinstance(record, Manifest):
            return self._take_keyframe(record)
        if update.base is None:
            staged = self._nothing(record.announced)
        assert staged is not None
        self._change(staged, record)
        return staged

    def _take_keyframe(self, manifest: Manifest) -> StagedVersion:
        self._hosted(manifest.tensors)
        bits = self._memory.empty(manifest.blob_bytes // 2)
        blob = bits.view(np.uint8)
        if self._reading.get_into(manifest.blob, blob.data) != manifest.blob_digest:
            raise WeightsCorrupted(f"{manifest.blob}: its digest is not the manifest's")
        hosted = (True,) * len(manifest.tensors)
        sums = np.frombuffer(manifest.tile_sums, "<u8").astype(np.uint64)
        state = {manifest.tile_elements: (state_of(sums), sums)}
        return StagedVersion(
            ResidentWeights(manifest.version, manifest.run, manifest.model, manifest.tensors, hosted, bits, state)
        )

    def _nothing(self, record: DeltaBegun) -> StagedVersion:
        """Returns the zeros that a keyframe in cells is a delta from, of the hosted cells."""
        hosted = self._hosted(record.tensors)
        bits = self._memory.empty(sum(entry.size_bytes // 2 for entry in compress(record.tensors, hosted)))
        bits[:] = 0
        return StagedVersion(ResidentWeights(NOTHING, record.run, record.model, record.tensors, hosted, bits, {}))

    def _change(self, staged: StagedVersion, record: DeltaBegun | DeltaManifest) -> None:
        """Makes the staged version the one that a delta leads to, bucket by bucket as these arrive."""
        base, begun = staged.weights, record.announced
        what = f"delta of version {begun.version} from {begun.base_version}"
        tiles = Tiles(base.tensors, base.hosted, begun.tile_elements)
        pieces = {number: held for number, span in enumerate(begun.buckets) if (held := tiles.pieces(*span))}
        resulting = _sums_before(staged, begun, what).copy()
        manifest = record if isinstance(record, DeltaManifest) else None
        numbers, digests = list(pieces), dict[int, str]()
        wanted = [
            (
                bucket_key(begun.version, begun.base_version, number),
                BUCKET_BYTES_MAX + 6 * begun.buckets[number][1] * begun.tile_elements,
            )
            for number in numbers
        ]
        with closing(self._reading.several(wanted, coming=manifest is None)) as arriving:
            for place, blob, digest in arriving:
                number = numbers[place]
                digests[number] = digest
                if manifest is not None and digest != manifest.buckets[number].digest:
                    raise WeightsCorrupted(f"{what}: the digest of bucket {number} is not the manifest's")
                bucket, first = Bucket(blob), begun.buckets[number][0]
                for run, elements, ends in pieces[number]:
                    old = staged.patterns(elements)
                    update = bucket.decode(old, ends, run.start - first, run.stop - first)
                    resulting[run] += update.sum_changes
                    if staged.base is None:
                        apply_update(update, old)
                    else:
                        staged.overwrites.append((elements, kept_small(update, old, ends)))
        if manifest is None:
            # What was decoded counts only if the manifest, which is written last, says that it was right.
            signed = self._reading.awaited(delta_manifest_key(begun.version, begun.base_version))
            manifest = self._trust.open(signed, DeltaManifest, SCHEMA_VERSION)
            if manifest.announced != begun or any(manifest.buckets[n].digest != d for n, d in digests.items()):
                raise WeightsCorrupted(f"{what}: its buckets are not the manifest's")
        expected = np.frombuffer(manifest.tile_sums, "<u8").astype(np.uint64)
        if not np.array_equal(resulting[tiles.hosted], expected[tiles.hosted]):
            raise WeightsCorrupted(f"{what}: it does not make the trainer's weights")
        if state_of(expected) != manifest.state:
            raise WeightsCorrupted(f"{what}: its tiles' sums are not those of its state")
        staged.weights = base._replace(version=begun.version, state={begun.tile_elements: (manifest.state, expected)})


def _sums_before(staged: StagedVersion, begun: DeltaBegun, what: str) -> npt.NDArray[np.uint64]:
    """Returns the sums of all tiles. Raises `BaseMismatch` unless the delta is from the weights that are staged."""
    base = staged.weights
    if (begun.run, begun.model, begun.tensors) != (base.run, base.model, base.tensors):
        raise BaseMismatch(f"{what}: it is for other tensors, another model or run, than what is held")
    if begun.tile_elements not in base.state:
        ends = tile_ends(begun.tensors, begun.tile_elements)
        if base.version == NOTHING:
            sums = zero_sums(ends)
        elif staged.overwrites or not all(base.hosted):
            raise BaseMismatch(f"{what}: tiles of {begun.tile_elements} elements, which only a keyframe can begin")
        else:
            sums = tile_sums(base.bits, ends)
        base.state[begun.tile_elements] = state_of(sums), sums
    state, sums = base.state[begun.tile_elements]
    if state != begun.base_state:
        raise BaseMismatch(f"{what}: it is from other weights than those held as version {base.version}")
    return sums
