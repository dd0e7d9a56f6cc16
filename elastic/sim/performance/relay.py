"""Where workers pull weights from: each has a link of its own, and what leaves the relays has a limit."""

from elastic.core.types import NS_PER_S, Nanoseconds
from elastic.sim.loop import EventLoop
from elastic.sim.performance.profile import Profile


class RelayModel:
    def __init__(self, loop: EventLoop, profile: Profile) -> None:
        self._loop = loop
        self._profile = profile
        self._free_ns: Nanoseconds = 0

    def pull(self, have: int | None, wanted: int, puller: Profile) -> tuple[int, Nanoseconds]:
        """What a pull moves, and when it is there: a keyframe to one without weights, else a delta a version."""
        profile = self._profile
        first = have is None or have > wanted
        whole = profile.keyframe_bytes
        size_bytes = whole if first else min(whole, profile.delta_bytes * (wanted - (have or 0)))
        sent_ns = round(size_bytes / profile.relay_bytes_per_s * NS_PER_S)
        begin_ns = max(self._loop.now_ns, self._free_ns)
        self._free_ns = begin_ns + sent_ns
        besides_s = puller.first_load_s if first else puller.load_s
        link_ns = round((size_bytes / puller.link_bytes_per_s + besides_s) * NS_PER_S)
        return round(size_bytes), max(begin_ns + link_ns, self._free_ns)
