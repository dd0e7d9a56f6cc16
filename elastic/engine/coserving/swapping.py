"""Stop-and-reload: the baseline that autoscaling between serving and rollouts amounts to.

The device holds one model at a time. When serving has rested for a while its weights make way for the
rollout model's; its next request ends all rollouts and waits for the reload. Source: ROSE §3.2, §6.1, in the
style of ServerlessLLM.
"""

import time

from elastic.core.types import NS_PER_S, Nanoseconds
from elastic.engine.coserving.rollout import SharedRolloutEngine
from elastic.engine.coserving.serving import SharedServingEngine
from elastic.engine.coserving.shared_device_engine import SharedDeviceEngine, Step


class Swapping:
    """`idle_ns`: how long serving rests before it makes way. `boot_ns`: the runtime's start, which is added to the
    time that copying the weights takes."""

    def __init__(self, idle_ns: Nanoseconds, boot_ns: Nanoseconds) -> None:
        self._idle_ns = idle_ns
        self._boot_ns = boot_ns
        self._serving_seen_ns = 0

    def step(
        self, serving: SharedServingEngine, rollout: SharedRolloutEngine | None, now_ns: Nanoseconds
    ) -> Step | None:
        """The change of models that is due, if any."""
        if serving.has_work:
            self._serving_seen_ns = now_ns
        if rollout is None or rollout.costs is None:
            return None
        rested_ns = now_ns - self._serving_seen_ns
        if serving.aside and (serving.has_work or not rollout.has_work):
            return lambda: self._swap(rollout, serving)
        if not serving.aside and not rollout.aside:
            return rollout.set_aside
        if rollout.aside and rollout.has_work and rested_ns > self._idle_ns:
            return lambda: self._swap(serving, rollout)
        return None

    def _swap(self, leaving: SharedDeviceEngine, coming: SharedDeviceEngine) -> None:
        leaving.set_aside()
        coming.bring_back()
        time.sleep(self._boot_ns / NS_PER_S)
