"""The trainer's side: a version's weights onto a relay, as keyframe and deltas."""

from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from typing import Any

import structlog
from torch import Tensor

from elastic.system.host import here
from elastic.weights.compact import Mirror, on_device
from elastic.weights.encoder import (
    Encoder,
    PublishReport,
    PublishSettings,
    TrainerRank,
    Version,
    publish_keyframe,
)
from elastic.weights.errors import BlobNotFound, WeightsError
from elastic.weights.layout import Layout
from elastic.weights.memory import Memory
from elastic.weights.plan import PublishedUpdate
from elastic.weights.records import NOTHING, begun_key, request_key
from elastic.weights.relay import REQUESTS, Relay
from elastic.weights.signing import SigningKey
from elastic.weights.tensors import count_patterns, filling
from elastic.weights.versions import collect_garbage
from elastic.weights.waiting import awaited, fetch

__all__ = ["PublishReport", "PublishSettings", "Publisher", "TrainerRank", "publish_keyframe"]

log = structlog.get_logger(__name__)

RENEW_S = 5.0
"""Between two answers to requests for a keyframe of one version: each reads or writes all of the weights."""

LATER_TIMEOUT_S = 600.0
"""How long the objects that follow a version may take: a merged delta, a keyframe, garbage collection."""


class Publisher:
    """Publishes versions in order. A version can be pulled when `publish` returns; more follows in the background.

    It keeps two copies of the weights on the CPU: the last version, and the one that the next merged delta is from;
    with a `share` only of what this rank publishes. Tensors on a GPU are compared there, with a third copy (`Mirror`),
    so that only what changed crosses to the host. Calls must not overlap, but for those of `answer_requests`.

    Where several ranks publish together, each has a publisher with its `share`, and calls the same methods. They talk
    by way of the relay alone: rank 0 announces what it begins with, and the others put their parts.

    All that is published is signed with `key`, which ranks that publish together share. What somebody else put under
    the trainer's names is replaced.
    """

    def __init__(
        self,
        relay: Relay,
        run: str,
        model_config: Mapping[str, Any],
        settings: PublishSettings | None = None,
        share: TrainerRank | None = None,
        key: SigningKey | None = None,
        mirrored: Callable[[Sequence[Tensor]], bool] = on_device,
    ) -> None:
        self._relay = relay
        self._settings = settings or PublishSettings()
        self._memory = Memory()
        self._encoder = Encoder(relay, run, model_config, self._settings, share, key or SigningKey())
        self._last: Version | None = None
        self._in_step: Version | None = None
        """The newest version with which rank 0 has begun: workers may ask for a keyframe of it, and of no other."""
        self._leading = here().lock() if self._encoder.leads and not self._encoder.alone else nullcontext()
        """Held by rank 0 of several while it puts a version, or a keyframe that was asked for: the others have the
        patterns of a version until it begins with the next one."""
        self._anchor: Version | None = None
        self._mirror: Mirror | None = None
        self._mirrored = mirrored
        self._updates: set[PublishedUpdate] = set()
        """Updates that this publisher has put and not deleted. Anything else on the relay is not its own."""
        self._answered = -1, 0.0
        """The version of the last keyframe on request, and when that was."""
        self._keyframe_version = 0
        self._keyframe_wanted = self._keyframe_ordered = False
        self._executor = here().executor(1, "publisher")
        self._later: Future[None] | None = None

    def publish(self, version: int, tensors: Mapping[str, Tensor], pulled: Collection[int] = ()) -> PublishReport:
        """Put `version`: a delta from the last one published, or a keyframe where there is none that fits.

        `tensors` (bfloat16 or float32; with a `share` this rank's own) may be changed again as soon as it returns.
        Versions that workers are pulling (`pulled`) stay on the relay, however old. Where several ranks publish
        together the version can be pulled when rank 0's returns, which waits for the others' parts. Raises
        `RelayError`, `ValueError`, and `WeightsCorrupted` where another rank's part does not belong to this version.
        """
        self._end_background()
        layout, parts = self._encoder.laid_out(tensors)
        with self._leading:
            held, last, report = self._put(version, layout, parts)
        self._later = self._executor.submit(self._publish_later, held, last, pulled)
        return report

    def _put(
        self, version: int, layout: Layout, parts: Sequence[Tensor]
    ) -> tuple[Version, Version | None, PublishReport]:
        """Put the version. Returns it, the one that it is a delta from (None: it is a keyframe), and what it took."""
        bits = self._memory.empty(count_patterns(parts))
        last = self._last
        if last is None or last.layout.tensors != layout.tensors or last.version >= version:
            mirror, last = (Mirror(parts) if self._mirrored(parts) else None), None
            held, report = self._encoder.put_keyframe(version, layout, bits, filling(bits, parts))
            self._anchor, self._keyframe_version, self._keyframe_wanted = held, version, False
        else:
            # Until this is over it mirrors no version, so that a failure is followed by a copy of everything.
            mirror, self._mirror = self._mirror, None
            filled = mirror.filling(bits, last.bits, parts) if mirror else filling(bits, parts)
            if self._encoder.leads:
                # Rank 0 decides whether one is due before it begins with a version; the others see the announcement.
                due = version - self._keyframe_version >= self._settings.keyframe_every
                self._keyframe_ordered = due or self._keyframe_wanted
                if self._keyframe_ordered and not self._encoder.alone:
                    self._encoder.announce_keyframe(version, layout)
            held, report = self._encoder.put_delta(last, version, bits, filled)
            if mirror is None and self._mirrored(parts):
                mirror = Mirror(parts)
        self._updates.add(PublishedUpdate(version, last.version if last else None))
        self._last, self._mirror = held, mirror
        if self._encoder.leads or last is None:
            self._in_step = held
        return held, last, report

    def _is_keyframe_ordered(self, held: Version, last: Version) -> bool:
        if self._encoder.leads:
            return self._keyframe_ordered
        deadline_s = here().monotonic() + self._settings.part_timeout_s
        awaited(self._relay, begun_key(held.version, last.version), deadline_s)
        self._in_step = held
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

        Says whether anything was asked of it; may be called from any thread. Where several ranks publish together each
        is to be called again and again: rank 0 hears the workers, the others hear it. It waits for them, and the next
        version for it. Raises `RelayError`, and `WeightsCorrupted` for another rank's part.
        """
        if not self._encoder.leads:
            return self._follow_request()
        with self._leading:
            return self._answer_workers()

    def _follow_request(self) -> bool:
        held = self._in_step
        if held is None or not self._encoder.is_part_wanted(held.version, NOTHING):
            return False
        self._put_keyframe(held)
        return True

    def _answer_workers(self) -> bool:
        if (held := self._in_step) is None:
            return False
        requests = self._relay.list_keys(REQUESTS)
        version, answered_s = self._answered
        if not requests or (version == held.version and here().monotonic() < answered_s + RENEW_S):
            return False
        refused = request_key(held.version) in requests
        asked = refused or PublishedUpdate(held.version, None) not in self._updates
        if asked:
            log.warning("keyframe on request", version=held.version, requests=len(requests))
            self._answered = held.version, here().monotonic()
            self._encoder.forget_parts(held.version, NOTHING)
            self._put_keyframe(held)
        for key in requests:
            self._relay.delete(key)
        return asked

    def wait(self) -> None:
        """Waits for the background's work. Raises its error."""
        later, self._later = self._later, None
        if later is not None:
            later.result(LATER_TIMEOUT_S)

    def _end_background(self) -> None:
        """Waits for the background. Its failures are logged only: merged deltas and keyframes are due again with this
        version.
        """
        try:
            self.wait()
        except WeightsError as error:
            said = f"{type(error).__name__}: {error}"
            log.warning("merged delta, keyframe or collection of garbage failed", reason=said)

    def close(self) -> None:
        """Waits for background work to end. Its errors are ignored."""
        self._executor.shutdown(wait=True)

    def _publish_later(self, held: Version, last: Version | None, pulled: Collection[int]) -> None:
        ordered = last is not None and self._is_keyframe_ordered(held, last)
        settings, anchor = self._settings, self._anchor
        merge_every = settings.merge_every
        if anchor is not None and merge_every > 1 and held.version - anchor.version >= merge_every:
            self._encoder.put_delta(anchor, held.version, held.bits)
            self._updates.add(PublishedUpdate(held.version, anchor.version))
            self._anchor = held
        if ordered:
            self._put_keyframe(held)
        if self._encoder.leads:
            own = tuple(self._updates)
            deleted = collect_garbage(self._relay, settings.keep_versions, pulled, own)
            self._updates.difference_update(update for update in own if update.version in deleted)

    def _put_keyframe(self, held: Version) -> None:
        self._encoder.put_keyframe(held.version, held.layout, held.bits, sums=held.sums)
        self._updates.add(PublishedUpdate(held.version, None))
        self._keyframe_version, self._keyframe_wanted = held.version, False
