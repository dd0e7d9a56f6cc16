"""How a worker gets its weights: off the relay that the welcome names, by way of what its host is said to have."""

import os
import threading
import time
import uuid
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from elastic import wire
from elastic.engine.base import WeightChanges
from elastic.worker.service import Pulled

if TYPE_CHECKING:
    from elastic.weights.puller import Puller, StagedVersion
    from elastic.weights.relay import Relay
    from elastic.weights.signing import Trust
    from elastic.weights.store import Store

SITE_VARIABLE, SITE_TOKEN_VARIABLE = "ELASTIC_SITE", "ELASTIC_SITE_TOKEN"
"""A relay (directory or URL) that all workers of a site reach fast, where one copy of the weights crosses to them."""

KEEP_VARIABLE = "ELASTIC_WEIGHTS"
"""A directory, best in shared memory, in which the weights of this host's workers outlive them."""

CAP_VARIABLE = "ELASTIC_WEIGHTS_GBPS"
"""What this worker may take of the link to the relay."""

AUDIT_SHARE = 0.02
"""Of one core, at most, for recomputing the sums of what is held."""


class WeightsPuller:
    """Stages a version; keeps the one that was put in force last, so that the next takes only what changed.

    What it keeps it can `audit`.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._puller: Puller | None = None
        self._relay: Relay | None = None
        self._store: Store | None = None
        self._where = "", ""
        """What the puller reads …"""
        self._trust: Trust | None = None
        """… and whom it believes."""
        self._received_before = 0
        """By pullers of before this one."""

    def __call__(self, welcome: wire.Welcome, order: wire.PullWeights) -> Pulled:
        """A version, staged and verified, decoded while the trainer encodes it. Blocks; raises `WeightsError`."""
        begun_s = time.monotonic()
        # The pull that a session before this one ordered may still be under way.
        if not self._lock.acquire(timeout=welcome.pull_timeout_s):
            raise TimeoutError(f"the pull before that of version {order.version} has not ended")
        try:
            puller = self._open(welcome, order)
            left_s = welcome.pull_timeout_s - (time.monotonic() - begun_s)
            staged = puller.stage(order.version, left_s, follow=True)
            changes = puller.changes(staged)
        finally:
            self._lock.release()
        base = staged.weights.base
        return Pulled(
            partial(self._apply, puller, staged),
            staged.size_bytes,
            staged.weights.held.bits.nbytes,
            encode_s=staged.encode_s,
            wire_s=staged.wire_s,
            decode_s=staged.decode_s,
            refused=staged.refused,
            changes=None if base is None or changes is None else WeightChanges(base, changes),
        )

    def received_bytes(self) -> int:
        """What has come off relays so far; any thread may ask."""
        puller = self._puller
        return self._received_before + (0 if puller is None else puller.received_bytes)

    def audit(self) -> bool:
        """Whether what is kept is what it should be; if not, the next pull replaces it. Blocks, mostly asleep."""
        puller = self._puller
        return puller is None or not puller.audit(rest=lambda busy_s: time.sleep(busy_s / AUDIT_SHARE))

    def _apply(self, puller: "Puller", staged: "StagedVersion") -> Mapping[str, object] | None:
        # Whoever has the lock was ordered later, and reads what this would write over.
        if not self._lock.acquire(blocking=False):
            return None
        try:
            return None if puller is not self._puller else puller.apply(staged).tensors
        finally:
            self._lock.release()

    def _open(self, welcome: wire.Welcome, order: wire.PullWeights) -> "Puller":
        """The puller of before, which may have to read elsewhere, unless the order is to believe somebody else."""
        from elastic.weights.codecs import warm_up
        from elastic.weights.puller import Puller
        from elastic.weights.signing import Trust
        from elastic.weights.store import Store, open_store

        where, trust = (welcome.relay, welcome.relay_token), Trust(welcome.run, order.publisher)
        if self._puller is not None and self._relay is not None and trust == self._trust:
            if where != self._where:
                self._relay.close()
                self._relay, self._where = _relay(welcome, trust), where
                self._puller.follow(self._relay)
            return self._puller
        if self._puller is None:
            # Deltas come after the keyframe; by then their decoders are loaded.
            threading.Thread(target=warm_up, name="warm-up", daemon=True).start()
        self.close()
        keep = os.environ.get(KEEP_VARIABLE)
        self._relay = _relay(welcome, trust)
        self._store = open_store(Path(keep), trust) if keep else Store()
        self._puller, self._where, self._trust = Puller(self._relay, trust, store=self._store), where, trust
        return self._puller

    def close(self) -> None:
        """Give connections and files back; what is kept stays."""
        self._received_before, self._puller = self.received_bytes(), None
        if self._relay is not None:
            self._relay.close()
        if self._store is not None:
            self._store.close()


def _relay(welcome: wire.Welcome, trust: "Trust") -> "Relay":
    from elastic.weights.link import BYTES_PER_S_IN_GBPS, Link, LinkedRelay
    from elastic.weights.relay import open_relay
    from elastic.weights.site import SiteRelay

    relay = open_relay(welcome.relay, welcome.relay_token)
    if cap := os.environ.get(CAP_VARIABLE):
        try:
            relay = LinkedRelay(relay, Link(float(cap) * BYTES_PER_S_IN_GBPS))
        except ValueError as error:
            raise ValueError(f"{CAP_VARIABLE}: must be a positive number (found {cap!r})") from error
    if near := os.environ.get(SITE_VARIABLE):
        relay = SiteRelay(relay, open_relay(near, os.environ.get(SITE_TOKEN_VARIABLE)), uuid.uuid4().hex, trust)
    return relay
