"""A rank's way to its weights, in any process of any engine: told where a version is, it has its share of it, verified.

- What is held is served as it is while the next version is staged; `apply` alone writes over it.
- The next version takes only what changed, as long as it is published by the same trainer.
- A version that does not verify is an error, and what was held stays.
"""

import uuid
from collections.abc import Callable
from typing import TYPE_CHECKING

from elastic.system.host import here
from elastic.weights.errors import VersionSuperseded
from elastic.weights.reading import SHARE_BYTES
from elastic.weights.relay import Relay, open_relay
from elastic.weights.sharding import Shard, ShardOf
from elastic.weights.signing import Trust
from elastic.weights.source import PullReport, RelaySource, TensorSource, WeightChanges

if TYPE_CHECKING:
    from elastic.weights.puller import Puller
    from elastic.weights.staging import StagedVersion

AUDIT_SHARE = 0.02
"""Largest share of one core that audits of the held weights take."""


AUDIT_REST_MAX_S = 5.0
"""A tile takes milliseconds; the first one waits for code to be compiled, which is no reason to rest for minutes."""


def _rest(busy_s: float) -> None:
    here().sleep(min(AUDIT_REST_MAX_S, busy_s / AUDIT_SHARE))


class WeightsClient:
    """Stages versions on one thread, and applies them on that or another.

    With a `shard` (`elastic.weights.placements`), or a function that makes it of the shapes of the model's tensors,
    tensors and changes are the rank's own, by its own names; without one they are the model's. A blob is fetched in
    parts of `share_bytes` at least.
    """

    def __init__(self, shard: Shard | ShardOf | None = None, share_bytes: int = SHARE_BYTES) -> None:
        self._shard = shard
        self._share_bytes = share_bytes
        self._lock = here().lock()
        self._puller: Puller | None = None
        self._relay: Relay | None = None
        self._source: RelaySource | None = None
        """The relay that the puller reads, and the key whose signatures it accepts."""
        self._staged: tuple[RelaySource, StagedVersion, WeightChanges | None] | None = None
        self._received_before = 0
        """By pullers of before this one."""

    def stage(self, source: RelaySource, timeout_s: float) -> PullReport:
        """Fetch and verify a version, also while its trainer is still encoding it. What is held stays in force.

        Raises `WeightsError`, and `TimeoutError` where the pull before has not ended in time.
        """
        begun_s = here().monotonic()
        # The pull that an order before this one began may still be under way.
        if not self._lock.acquire(timeout=timeout_s):
            raise TimeoutError(f"the pull before that of version {source.version} has not ended")
        try:
            self._staged = None
            puller = self._open(source)
            staged = puller.stage(source.version, timeout_s - (here().monotonic() - begun_s), follow=True)
            self._staged = source, staged, puller.changes(staged)
        finally:
            self._lock.release()
        return staged.report

    def apply(self, source: RelaySource) -> TensorSource:
        """Hold the version that was staged last, which must be that of `source`; again is a no-op.

        The tensors stay as they are until the next one is applied. Raises `VersionSuperseded`.
        """
        # The holder of the lock was told of a later version, and reads what this would write over.
        if not self._lock.acquire(blocking=False):
            raise VersionSuperseded(f"version {source.version}: another one is being staged")
        try:
            if self._staged is None or self._staged[0] != source or self._puller is None:
                raise VersionSuperseded(f"version {source.version}: it is not the one that was staged last")
            _, staged, changes = self._staged
            tensors = self._puller.apply(staged)
            staged.overwrites.clear()
            self._staged = source, staged, None
            return TensorSource(source.version, tensors, changes)
        finally:
            self._lock.release()

    @property
    def received_bytes(self) -> int:
        """Bytes read off relays so far; any thread may ask."""
        puller = self._puller
        return self._received_before + (0 if puller is None else puller.received_bytes)

    def audit(self) -> bool:
        """Returns whether the held weights verify; if not, the next `stage` replaces them. Blocks, mostly asleep."""
        puller = self._puller
        return puller is None or not puller.audit(rest=_rest)

    def close(self) -> None:
        """Closes connections and frees the held weights."""
        self._received_before, self._puller, self._staged = self.received_bytes, None, None
        self._close_relay()

    def _close_relay(self) -> None:
        if self._relay is not None:
            self._relay.close()

    def _open(self, source: RelaySource) -> "Puller":
        """The puller of before, which may have to read elsewhere, unless somebody else is to be believed."""
        # Compiled code takes a second to import, and a process that only serves tensors of its own needs none.
        from elastic.weights.codecs import warm_up
        from elastic.weights.puller import Puller

        puller, before, trust = self._puller, self._source, Trust(source.run, source.publisher)
        if puller is not None and before is not None and trust == Trust(before.run, before.publisher):
            if _place(source) != _place(before):
                self._close_relay()
                puller.follow(*self._opened(source, trust))
        else:
            if puller is None:
                # Deltas come after the keyframe; by then their decoders are loaded.
                here().thread(target=warm_up, name="warm-up").start()
            self.close()
            relay, another_copy = self._opened(source, trust)
            self._puller = puller = Puller(
                relay, trust, shard=self._shard, another_copy=another_copy, share_bytes=self._share_bytes
            )
        self._source = source
        return puller

    def _opened(self, source: RelaySource, trust: Trust) -> tuple[Relay, Callable[[int], bool]]:
        """The relay to read, and whether it has another copy of a version that did not verify."""
        relay = open_relay(source.relay, source.relay_token or None, source.relay_anchor)
        if source.cache:
            from elastic.weights.peer_cache import PeerCacheRelay

            near = open_relay(source.cache, source.cache_token or None, source.cache_anchor)
            relay = PeerCacheRelay(relay, near, uuid.uuid4().hex, trust)
            self._relay = relay
            return relay, relay.refuse
        self._relay = relay
        return relay, lambda version: False


def _place(source: RelaySource) -> tuple[str, ...]:
    cache = source.cache, source.cache_token, source.cache_anchor
    return source.relay, source.relay_token, source.relay_anchor, *cache
