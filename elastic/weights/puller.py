"""The worker's side: a version's weights off a relay, verified, or an error and nothing else."""

from collections.abc import Callable, Mapping, Sequence
from itertools import compress

import numpy as np
import structlog
from torch import Tensor

from elastic.system.host import here
from elastic.weights.errors import (
    BlobNotFound,
    RelayError,
    RelayUnavailable,
    WeightsCorrupted,
    WeightsError,
    WeightsForged,
    WeightsRefusal,
)
from elastic.weights.memory import Memory
from elastic.weights.plan import PublishedUpdate, shortest_path
from elastic.weights.reading import CHUNK_BYTES, SHARE_BYTES, TRANSFERS, RelayReading
from elastic.weights.records import TensorEntry, request_key
from elastic.weights.relay import Relay
from elastic.weights.sharding import Shard, ShardOf, needed, whole, whole_shapes
from elastic.weights.signing import Trust
from elastic.weights.source import PullReport, WeightChanges
from elastic.weights.staging import BaseMismatch, ResidentWeights, StagedVersion, Staging
from elastic.weights.tensors import assemble, box_of, by_tensor, views
from elastic.weights.versions import VERSIONS, updates_in

log = structlog.get_logger(__name__)


CHANGES_SHARE = 1 / 8
"""The share of all elements above which changes by tensor take as much memory as the tensors."""


class Puller:
    """Keeps the version it pulled last, so that the next one takes only what changed. For one thread at a time.

    It believes what `trust` says is the trainer's, and nothing else, wherever it found it.
    With a `shard` it hosts just that, and where versions are published in cells it pulls nothing else.
    What did not verify is read once more while `another_copy` says, of a version, that the relay has one to offer.
    Memory: the weights it holds; for the next version what changes (6 bytes for each element that does, at most a copy
    of all), or where it does not build on what is held all of it; and `TRANSFERS` buckets. A pull that fails leaves
    nothing behind.
    """

    def __init__(
        self,
        relay: Relay,
        trust: Trust,
        *,
        shard: Shard | ShardOf | None = None,
        another_copy: Callable[[int], bool] = lambda version: False,
        transfers: int = TRANSFERS,
        chunk_bytes: int = CHUNK_BYTES,
        share_bytes: int = SHARE_BYTES,
        changes_share: float = CHANGES_SHARE,
    ) -> None:
        self._relay = relay
        self._trust = trust
        self._shard = shard
        self._another_copy = another_copy
        self._memory = Memory()
        self._resident: ResidentWeights | None = None
        self._writing: StagedVersion | None = None
        self._distrusted = False
        self._audited = 0
        """The next tile to audit."""
        self._transfers = transfers
        self._chunk_bytes = chunk_bytes
        self._share_bytes = share_bytes
        self._changes_share = changes_share
        self._refused: list[WeightsRefusal] = []
        self._reading: RelayReading | None = None
        self._received_bytes = 0
        """By the pulls before the one that is under way, or was last."""

    @property
    def resident(self) -> ResidentWeights | None:
        """The version held, always a whole one: a version that is half written is completed first."""
        if (staged := self._writing) is not None:
            staged.write()
            self._resident, self._writing = staged.weights, None
        return self._resident

    @property
    def version(self) -> int | None:
        return self.resident.version if self.resident else None

    @property
    def received_bytes(self) -> int:
        """Read off the relay by all pulls so far, manifests not counted; any thread may ask."""
        return self._received_bytes + (self._reading.size_bytes if self._reading is not None else 0)

    def follow(self, relay: Relay, another_copy: Callable[[int], bool] = lambda version: False) -> None:
        """Read from there from now on: it has the same blobs, of the same trainer. What is held stays."""
        self._relay, self._another_copy = relay, another_copy

    def pull(self, version: int, timeout_s: float = 30.0, *, follow: bool = False) -> dict[str, Tensor]:
        """`stage` it, and `apply` that."""
        return self.apply(self.stage(version, timeout_s, follow=follow))

    def apply(self, staged: StagedVersion) -> dict[str, Tensor]:
        """Put a staged version in force; again is a no-op. What is held must be what it was when that was staged.

        The tensors are this rank's, and stay as they are until the next version is put in force.
        """
        if staged.weights is not self.resident:
            if staged.base is not None and staged.base != self.version:
                raise ValueError(
                    f"version {staged.weights.version} was staged over {staged.base}; held is {self.version}"
                )
            self._writing = staged
        if staged.base is None:
            self._distrusted = False
        assert self.resident is not None
        return self._tensors(self.resident)

    def changes(self, staged: StagedVersion) -> WeightChanges | None:
        """The elements that a staged version changes, for an engine with a copy of its own. None for a keyframe,
        where much changes, and of weights of which some are float32: nearly all of these change with every version.
        """
        weights = staged.weights
        changed = sum(update.value.size for _, update in staged.overwrites)
        entries, shard = list(compress(weights.tensors, weights.hosted)), self._layout(weights)
        rounded = all(entry.dtype == "bfloat16" for entry in entries)
        if staged.base is None or not rounded or changed > self._changes_share * weights.bits.size:
            return None
        found: list[tuple[str, Tensor, Tensor]] = []
        for elements, update in staged.overwrites:
            index = np.arange(update.value.size) if update.index is None else update.index.astype(np.int64)
            found += by_tensor(entries, index + elements.start, update.value, shard)
        return WeightChanges(staged.base, found)

    def stage(self, version: int, timeout_s: float = 30.0, *, follow: bool = False) -> StagedVersion:
        """`version`, bit for bit as published: from what is held by the shortest chain of deltas, or a keyframe.

        What is held, and served, stays as it is meanwhile.
        With `follow` it may still be under way: buckets are decoded as they appear, and count when the manifest says
        that they are right.
        An object that does not verify is refused, and so is the held version as a base for another; what is left
        is tried, in the end a keyframe; where there is none, one is asked for. A broken transfer goes on where it
        broke, until `timeout_s` is over.
        Raises `WeightsCorrupted` where nothing verifies, also if the relay or the time is gone before anything else
        comes; else the last `RelayError`. Either says what was `refused`.
        """
        try:
            return self._stage(version, timeout_s, follow)
        except WeightsError as error:
            error.refused = self._refusals()
            raise

    def _stage(self, version: int, timeout_s: float, follow: bool) -> StagedVersion:
        reading = RelayReading(self._relay, timeout_s, self._transfers, self._chunk_bytes, self._share_bytes)
        self._received_bytes, self._reading = self.received_bytes, reading
        staging = Staging(reading, self._trust, self._hosted, self._memory)
        refused: dict[PublishedUpdate, Exception] = {}
        base = None if self._distrusted else self.resident
        while True:
            try:
                path = self._path(version, base, refused, reading, follow)
            except RelayUnavailable as error:
                if not refused:
                    raise
                # Nothing else would have been needed but for the refusal.
                raise next(reversed(refused.values())) from error
            if path is None:
                raise next(reversed(refused.values()), BlobNotFound(f"version {version}: not published, or deleted"))
            staged = None if base is None else StagedVersion(base, base.version)
            for update in path:
                try:
                    staged = staging.take(update, staged)
                except (WeightsCorrupted, BlobNotFound) as error:
                    self._refuse(_named(update), str(error))
                    fatal = not isinstance(error, BaseMismatch)
                    if fatal and self._another_copy(update.version):
                        break
                    # The base may be what is wrong: without it every delta gets a second chance, from a keyframe. What
                    # is forged says nothing of the base.
                    if base is None or fatal:
                        refused[update] = error
                    if not isinstance(error, WeightsForged):
                        base = None
                    break
            else:
                assert staged is not None
                staged.path, staged.report = tuple(path), self._report(reading, staged.weights)
                return staged

    def _report(self, reading: RelayReading, held: ResidentWeights) -> PullReport:
        # Of differences between clock readings, what is left for decoding may round to less than nothing.
        decode_s = max(0.0, here().monotonic() - reading.begun_s - reading.wire_s - reading.encode_s)
        return PullReport(
            size_bytes=reading.size_bytes,
            full_bytes=held.bits.nbytes,
            encode_s=reading.encode_s,
            wire_s=reading.wire_s,
            decode_s=decode_s,
            refused=self._refusals(),
        )

    def audit(self, rest: Callable[[float], object] = lambda busy_s: None) -> list[int]:
        """Tiles whose recomputed sums differ from those that updates maintained; empty when all is well.

        They are refused: the next pull, of the same version or another, begins with a keyframe. Any thread may audit,
        beside everything else; it ends when another version is put in force. After each tile it takes a `rest`, given
        the processor's seconds that took.
        """
        wrong: list[int] = []
        begun_s = here().thread_time()
        held = None if self._writing is not None else self._resident
        for tile, right in held.audited(self._audited) if held else ():
            if self._writing is not None or self._resident is not held:
                break
            self._audited = tile + 1
            if not right:
                wrong.append(tile)
            rest(here().thread_time() - begun_s)
            begun_s = here().thread_time()
        if held and wrong:
            self._distrusted = True
            self._refuse(
                f"weights held as version {held.version}", f"audit: {len(wrong)} tiles are wrong, first tile {wrong[0]}"
            )
        return wrong

    def _refuse(self, what: str, reason: str) -> None:
        log.warning("weights refused", what=what, reason=reason)
        self._refused.append(WeightsRefusal(what, reason))

    def _refusals(self) -> tuple[WeightsRefusal, ...]:
        """Returns the refusals since the last call, and forgets them. Any thread may add refusals meanwhile."""
        told = tuple(self._refused)
        del self._refused[: len(told)]
        return told

    def _tensors(self, held: ResidentWeights) -> dict[str, Tensor]:
        entries, shard = list(compress(held.tensors, held.hosted)), self._layout(held)
        return views(entries, held.bits) if shard is None else assemble(entries, held.bits, shard)

    def _layout(self, held: ResidentWeights) -> Shard | None:
        """What is put together from cells, without a shard whole tensors; None where these lie as they are."""
        if (shard := self._resolved(held.tensors)) is not None or not any(entry.begin for entry in held.tensors):
            return shard
        return whole(whole_shapes(map(box_of, held.tensors)))

    def _resolved(self, tensors: Sequence[TensorEntry]) -> Shard | None:
        if callable(self._shard):
            self._shard = self._shard(whole_shapes(map(box_of, tensors)))
        return self._shard

    def _hosted(self, tensors: Sequence[TensorEntry]) -> tuple[bool, ...]:
        """Return which of a version's tensors or cells to hold. Raises `WeightsCorrupted` if it lacks one."""
        try:
            shard = self._resolved(tensors)
            return tuple(needed(map(box_of, tensors), shard)) if shard is not None else (True,) * len(tensors)
        except ValueError as error:
            raise WeightsCorrupted(str(error)) from error

    def _path(
        self,
        version: int,
        base: ResidentWeights | None,
        refused: Mapping[PublishedUpdate, Exception],
        reading: RelayReading,
        follow: bool,
    ) -> list[PublishedUpdate] | None:
        """Returns the cheapest path to `version`. With `follow`, waits until there is one, which may end with an update
        under way. An unfinished update of an earlier version is no part of it: it may never be finished.
        """
        held = base.version if base else None
        if held == version:
            return []
        begun_s = here().monotonic()
        while True:
            keys = reading.list_keys(VERSIONS)
            for coming in (None, version) if follow else (None,):
                path = shortest_path((each for each in updates_in(keys, coming) if each not in refused), held, version)
                if path is not None:
                    return path
            if refused:
                self._ask_for_keyframe(version)
            # One that is damaged may be replaced, which only a later pull can tell.
            if not follow or PublishedUpdate(version, None) in refused or not reading.look_again(begun_s):
                return None

    def _ask_for_keyframe(self, version: int) -> None:
        """Asks the trainer for a keyframe of `version`, since nothing on the relay leads to it."""
        try:
            self._relay.put(request_key(version), b"")
        except RelayError as error:
            log.warning("keyframe not asked for", version=version, reason=str(error))


def _named(update: PublishedUpdate) -> str:
    origin = "" if update.base is None else f" from {update.base}"
    return f"{'keyframe' if update.base is None else 'delta'} of version {update.version}{origin}"
