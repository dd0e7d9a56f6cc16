"""The worker's side: a version's weights off a relay, verified, or an error and nothing else."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import compress
from operator import ge
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import structlog
from torch import Tensor

from elastic.weights.codecs.sums import apply_update, tile_sums, zero_sums
from elastic.weights.delta import (
    NOTHING,
    Bucket,
    DeltaBegun,
    begun_of,
    delta_manifest_key,
    state_of,
)
from elastic.weights.errors import BlobNotFound, Refusal, RelayError, WeightsCorrupted, WeightsError, WeightsForged
from elastic.weights.held import Change, Held, Proof, Staged, Tiles, as_of, kept_small
from elastic.weights.layout import tile_ends
from elastic.weights.manifest import TensorEntry, decode_manifest, manifest_key, request_key
from elastic.weights.plan import Update, shortest_path
from elastic.weights.reading import CHUNK_BYTES, TRANSFERS, Reading
from elastic.weights.relay import Relay
from elastic.weights.sharding import Shard, ShardOf, needed, whole
from elastic.weights.signing import Trust
from elastic.weights.source import WeightChanges
from elastic.weights.store import Store
from elastic.weights.tensors import assemble, box_of, by_tensor, views, whole_shapes

log = structlog.get_logger(__name__)


CHANGES_SHARE = 1 / 8
"""Of all elements; with more of them, changes by tensor take as much memory as the tensors."""


class Pulled(NamedTuple):
    """A version's weights, and what it took."""

    version: int
    model: dict[str, Any]
    """The model's `config.json`."""
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
    encode_s: float
    """Spent waiting for what the trainer had not put there yet."""


class StagedVersion(NamedTuple):
    """A version that can be put in force, and what it took so far."""

    weights: Staged
    path: tuple[Update, ...]
    size_bytes: int
    wire_s: float
    decode_s: float
    encode_s: float
    refused: tuple[Refusal, ...]
    """What did not verify on the way here, or, in the audits since the version before, of what was held."""


class Puller:
    """Keeps the version it pulled last, so that the next one takes only what changed. For one thread at a time.

    It believes what `trust` says is the trainer's, and nothing else, wherever it found it.
    With a `shard` it hosts just that, and where versions are published in cells it pulls nothing else.
    Memory: the weights it holds; for the next version what changes (6 bytes for each element that does, at most a copy
    of all), or where it does not build on what is held all of it; and `TRANSFERS` buckets. A pull that fails leaves
    nothing behind. With a kept `store` it begins with what its predecessor held.
    """

    def __init__(
        self,
        relay: Relay,
        trust: Trust,
        *,
        shard: Shard | ShardOf | None = None,
        store: Store | None = None,
        transfers: int = TRANSFERS,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        self._relay = relay
        self._trust = trust
        self._shard = shard
        self._store = store or Store()
        self._distrusted = self._store.held is not None and not self._is_enough(self._store.held)
        self._audited = 0
        """The tile whose turn it is."""
        self._transfers = transfers
        self._chunk_bytes = chunk_bytes
        self._refused: list[Refusal] = []
        self._reading: Reading | None = None
        self._received_bytes = 0
        """By the pulls before the one that is under way, or was last."""
        if self._store.not_used:
            self._refuse("kept weights", self._store.not_used)

    @property
    def version(self) -> int | None:
        return self._store.held.version if self._store.held else None

    @property
    def received_bytes(self) -> int:
        """Read off the relay by all pulls so far, manifests not counted; any thread may ask."""
        return self._received_bytes + (self._reading.size_bytes if self._reading is not None else 0)

    def follow(self, relay: Relay) -> None:
        """Read from there from now on: it has the same blobs, of the same trainer. What is held stays."""
        self._relay = relay

    def pull(self, version: int, timeout_s: float = 30.0, *, follow: bool = False) -> Pulled:
        """`stage` it, and `apply` that."""
        return self.apply(self.stage(version, timeout_s, follow=follow))

    def apply(self, staged: StagedVersion) -> Pulled:
        """Put a staged version in force; again is a no-op. What is held must be what it was when that was staged."""
        begun_s = time.monotonic()
        self._store.put(staged.weights)
        if staged.weights.base is None:
            self._distrusted = False
        held, apply_s = staged.weights.held, time.monotonic() - begun_s
        return Pulled(
            held.version,
            held.model,
            self._tensors(held),
            staged.size_bytes,
            held.bits.nbytes,
            staged.path,
            staged.wire_s,
            staged.decode_s,
            apply_s,
            staged.encode_s,
        )

    def changes(self, staged: StagedVersion) -> WeightChanges | None:
        """What a staged version writes over the one before, for whoever has a copy of that elsewhere.

        None where it builds on nothing, and where much of it changes.
        """
        weights = staged.weights
        changed = sum(change.update.value.size for change in weights.changes)
        if weights.base is None or changed > CHANGES_SHARE * weights.held.bits.size:
            return None
        entries, shard = list(compress(weights.held.tensors, weights.held.hosted)), self._layout(weights.held)
        found: list[tuple[str, Tensor, Tensor]] = []
        for change in weights.changes:
            if change.update.index is None:
                return None
            place = change.update.index.astype(np.int64) + change.begin
            found += by_tensor(entries, place, change.update.value, shard)
        return WeightChanges(weights.base, found)

    def stage(self, version: int, timeout_s: float = 30.0, *, follow: bool = False) -> StagedVersion:
        """`version`, bit for bit as published: from what is held by the shortest chain of deltas, or a keyframe.

        What is held, and served, stays as it is meanwhile.
        With `follow` it may still be under way: buckets are decoded as they appear, and count when the manifest says
        that they are right.
        An object that does not verify is refused, and so is the held version as a base for another; what is left
        is tried, in the end a keyframe; where there is none, one is asked for. A broken transfer goes on where it
        broke, until `timeout_s` is over.
        Raises `WeightsCorrupted` where nothing verifies, else the last `RelayError`; either says what was `refused`.
        """
        try:
            return self._stage(version, timeout_s, follow)
        except WeightsError as error:
            error.refused = self._refusals()
            raise

    def _stage(self, version: int, timeout_s: float, follow: bool) -> StagedVersion:
        begun_s = time.monotonic()
        reading = Reading(self._relay, self._trust, begun_s + timeout_s, self._transfers, self._chunk_bytes)
        self._received_bytes, self._reading = self.received_bytes, reading
        refused: dict[Update, Exception] = {}
        base = None if self._distrusted else self._store.held
        while True:
            path = self._path(version, base, refused, reading, follow)
            if path is None:
                raise next(reversed(refused.values()), BlobNotFound(f"version {version}: not published, or deleted"))
            try:
                weights = self._follow(path, base, reading)
                wire_s, encode_s = reading.wire_s, reading.encode_s
                decode_s = time.monotonic() - begun_s - wire_s - encode_s
                spent = reading.size_bytes, wire_s, decode_s, encode_s
                return StagedVersion(weights, tuple(path), *spent, self._refusals())
            except _Refused as refusal:
                self._refuse(_named(refusal.update), str(refusal.cause))
                if refusal.fatal and reading.another_copy(refusal.update.version):
                    continue
                # The base may be what is wrong: without it every delta gets a second chance, from a keyframe. What is
                # forged says nothing of the base.
                if base is None or refusal.fatal:
                    refused[refusal.update] = refusal.cause
                if not isinstance(refusal.cause, WeightsForged):
                    base = None

    def audit(self, rest: Callable[[float], object] = lambda busy_s: None) -> list[int]:
        """Tiles whose recomputed sums differ from those that updates maintained; empty when all is well.

        They are refused: the next pull, of the same version or another, begins with a keyframe. Any thread may audit,
        beside everything else; it ends when another version is put in force. After each tile it takes a `rest`, given
        the seconds that took.
        """
        wrong: list[int] = []
        begun_s = time.monotonic()
        held = self._store.at_rest()
        for tile, right in held.audited(self._audited) if held else ():
            if self._store.at_rest() is not held:
                break
            self._audited = tile + 1
            if not right:
                wrong.append(tile)
            rest(time.monotonic() - begun_s)
            begun_s = time.monotonic()
        if held and wrong:
            self._distrusted = True
            self._refuse(
                f"weights held as version {held.version}", f"audit: {len(wrong)} tiles are wrong, first tile {wrong[0]}"
            )
        return wrong

    def _refuse(self, what: str, reason: str) -> None:
        log.warning("weights refused", what=what, reason=reason)
        self._refused.append(Refusal(what, reason))

    def _refusals(self) -> tuple[Refusal, ...]:
        """Those that nobody was told of yet; any thread may add to them."""
        told = tuple(self._refused)
        del self._refused[: len(told)]
        return told

    def _tensors(self, held: Held) -> dict[str, Tensor]:
        entries, shard = list(compress(held.tensors, held.hosted)), self._layout(held)
        return views(entries, held.bits) if shard is None else assemble(entries, held.bits, shard)

    def _layout(self, held: Held) -> Shard | None:
        """What is put together from cells, without a shard whole tensors; None where these lie as they are."""
        if (shard := self._resolved(held.tensors)) is not None or not any(entry.begin for entry in held.tensors):
            return shard
        return whole(whole_shapes(held.tensors))

    def _resolved(self, tensors: Sequence[TensorEntry]) -> Shard | None:
        if callable(self._shard):
            self._shard = self._shard(whole_shapes(tensors))
        return self._shard

    def _hosted(self, tensors: Sequence[TensorEntry]) -> tuple[bool, ...]:
        """Which of a version's tensors or cells to hold. Raises `WeightsCorrupted` where it lacks what is hosted."""
        try:
            shard = self._resolved(tensors)
            return tuple(needed(map(box_of, tensors), shard)) if shard is not None else (True,) * len(tensors)
        except ValueError as error:
            raise WeightsCorrupted(str(error)) from error

    def _is_enough(self, held: Held | None) -> bool:
        """Whether all that is hosted is held; a predecessor may have hosted something else."""
        try:
            return held is not None and all(map(ge, held.hosted, self._hosted(held.tensors)))
        except WeightsCorrupted:
            return False

    def _path(
        self, version: int, base: Held | None, refused: Mapping[Update, Exception], reading: Reading, follow: bool
    ) -> list[Update] | None:
        """The cheapest one there is. With `follow` one that ends with what is under way, once there is either."""
        held = base.version if base else None
        if held == version:
            return []
        begun_s = time.monotonic()
        while True:
            for begun in (False, True) if follow else (False,):
                updates = [update for update in reading.updates(version, begun) if update not in refused]
                path = shortest_path(updates, held, version)
                if path is not None:
                    return path
            if refused:
                self._ask_for_keyframe(version)
            # One that is damaged may be replaced, which only a later pull can tell.
            if not follow or Update(version, None) in refused or not reading.look_again(begun_s):
                return None

    def _ask_for_keyframe(self, version: int) -> None:
        """Nothing on the relay leads to `version`; its trainer can put what does."""
        try:
            self._relay.put(request_key(version), b"")
        except RelayError as error:
            log.warning("keyframe not asked for", version=version, reason=str(error))

    def _follow(self, path: Iterable[Update], base: Held | None, reading: Reading) -> Staged:
        held = base
        changes: list[Change] | None = None if base is None else []
        for update in path:
            try:
                if update.base is None:
                    held, changes = self._pull_keyframe(update.version, reading), None
                else:
                    assert held is not None
                    held = self._pull_delta(held, update, reading, changes)
            except (WeightsCorrupted, BlobNotFound) as error:
                raise _Refused(update, error, fatal=not isinstance(error, _BaseMismatch)) from error
        assert held is not None
        return Staged.afresh(held) if base is None or changes is None else Staged.over(base, held, changes)

    def _pull_keyframe(self, version: int, reading: Reading) -> Held:
        try:
            signed = reading.get(manifest_key(version))
        except BlobNotFound:
            return self._pull_full(version, reading)
        manifest = decode_manifest(signed, self._trust)
        if manifest.version != version:
            raise WeightsForged(f"manifest of version {version}: it is that of version {manifest.version}")
        self._hosted(manifest.tensors)
        bits = self._store.room(manifest.blob_bytes // 2)
        blob = bits.view(np.uint8)
        if reading.get_into(manifest.blob, blob.data) != manifest.blob_digest:
            raise WeightsCorrupted(f"{manifest.blob}: its digest is not the manifest's")
        hosted = (True,) * len(manifest.tensors)
        sums = np.frombuffer(manifest.tile_sums, "<u8").astype(np.uint64)
        state = {manifest.tile_elements: (state_of(sums), sums)}
        proof = Proof(signed, keyframe=True)
        return Held(version, manifest.run, manifest.model, manifest.tensors, hosted, bits, state, proof)

    def _pull_full(self, version: int, reading: Reading) -> Held:
        """A keyframe in cells: those that are hosted, which is the change from nothing."""
        begun, _ = reading.delta(version, NOTHING)
        hosted = self._hosted(begun.tensors)
        elements = sum(entry.size_bytes for entry in compress(begun.tensors, hosted)) // 2
        sums = zero_sums(tile_ends(begun.tensors, begun.tile_elements))
        state = {begun.tile_elements: (state_of(sums), sums)}
        bits = self._store.room(elements)
        bits[:] = 0
        proof = Proof(b"", keyframe=False)
        nothing = Held(NOTHING, begun.run, begun.model, begun.tensors, hosted, bits, state, proof)
        return self._pull_delta(nothing, Update(version, NOTHING), reading, changes=None)

    def _pull_delta(self, base: Held, update: Update, reading: Reading, changes: list[Change] | None) -> Held:
        """What `update` makes of `base` after `changes`, to which it adds its own; without a list it writes at once."""
        assert update.base is not None
        key = delta_manifest_key(update.version, update.base)
        begun, found = reading.delta(update.version, update.base)
        sums = _check_base(begun, base, update, amid=bool(changes))
        tiles = Tiles(base.tensors, base.hosted, begun.tile_elements)
        digests: dict[int, str] = {}
        resulting = sums.copy()
        coming: list[Change] = []
        wanted = [number for number, (first, count) in enumerate(begun.buckets) if tiles.runs(first, count)]
        for number, blob, digest in reading.buckets(begun, wanted, there=found is not None):
            digests[number] = digest
            if found and digest != found.manifest.buckets[number].digest:
                raise WeightsCorrupted(f"{key}: the digest of bucket {number} is not the manifest's")
            bucket = Bucket(blob)
            for run in tiles.runs(*begun.buckets[number]):
                elements, first = tiles.elements(run), begun.buckets[number][0]
                old, ends = as_of(base.bits, changes or (), elements), tiles.ends[run] - elements.start
                decoded = bucket.decode(old, ends, run.start - first, run.stop - first)
                resulting[run] += decoded.sum_changes
                if changes is None:
                    apply_update(decoded, old)
                else:
                    span = elements.start, elements.stop
                    kept = kept_small(decoded, old, ends)
                    coming.append(Change(update.base, update.version, run.start, *span, kept))
        manifest, signed = found or reading.awaited_manifest(begun)
        if begun_of(manifest) != begun or any(manifest.buckets[n].digest != each for n, each in digests.items()):
            raise WeightsCorrupted(f"{key}: its buckets are not the manifest's")
        expected = np.frombuffer(manifest.tile_sums, "<u8").astype(np.uint64)
        if not np.array_equal(resulting[tiles.hosted], expected[tiles.hosted]):
            raise WeightsCorrupted(f"{key}: it does not make the trainer's weights")
        if state_of(expected) != manifest.state:
            raise WeightsCorrupted(f"{key}: its tiles' sums are not those of its state")
        if changes is not None:
            changes += coming
        state = {manifest.tile_elements: (manifest.state, expected)}
        return base._replace(version=update.version, state=state, proof=Proof(signed, keyframe=False))


class _BaseMismatch(WeightsCorrupted):
    """The delta may be right, but not for what is held."""


class _Refused(Exception):
    def __init__(self, update: Update, cause: Exception, fatal: bool) -> None:
        self.update, self.cause, self.fatal = update, cause, fatal


def _named(update: Update) -> str:
    origin = "" if update.base is None else f" from {update.base}"
    return f"{'keyframe' if update.base is None else 'delta'} of version {update.version}{origin}"


def pull(
    relay: Relay, trust: Trust, version: int, *, timeout_s: float = 30.0, chunk_bytes: int = CHUNK_BYTES
) -> Pulled:
    """`version` for somebody who holds nothing; see `Puller.pull`. Blocks the caller's thread."""
    return Puller(relay, trust, chunk_bytes=chunk_bytes).pull(version, timeout_s)


def _check_base(manifest: DeltaBegun, base: Held, update: Update, amid: bool) -> npt.NDArray[np.uint64]:
    """The sums of all tiles in `base`, of which the patterns are not there yet `amid` a chain."""
    where = f"delta of version {update.version} from {update.base}"
    if (manifest.version, manifest.base_version) != update:
        raise WeightsForged(f"{where}: it is that of {manifest.version} from {manifest.base_version}")
    if (manifest.run, manifest.model, manifest.tensors) != (base.run, base.model, base.tensors):
        raise _BaseMismatch(f"{where}: it is for other tensors, another model or run, than what is held")
    if manifest.tile_elements not in base.state:
        if amid or not all(base.hosted):
            raise _BaseMismatch(f"{where}: tiles of {manifest.tile_elements} elements, which only a keyframe can begin")
        sums = tile_sums(base.bits, tile_ends(manifest.tensors, manifest.tile_elements))
        base.state[manifest.tile_elements] = state_of(sums), sums
    state, sums = base.state[manifest.tile_elements]
    if state != manifest.base_state:
        raise _BaseMismatch(f"{where}: it is from other weights than those held as version {base.version}")
    return sums
