"""The relay of weights: each worker has a link of its own, and the relay's total bandwidth is limited."""

from elastic.core.types import NS_PER_S, Nanoseconds
from elastic.simulation.loop import EventLoop
from elastic.simulation.performance.profile import Profile


class RelayModel:
    def __init__(self, loop: EventLoop, profile: Profile) -> None:
        self._loop = loop
        self._profile = profile
        self._free_ns: Nanoseconds = 0

    def pull(self, have: int | None, wanted: int, puller: Profile) -> tuple[int, Nanoseconds]:
        """Return the bytes of a pull and when it arrives: a keyframe for a worker without weights, else one delta a
        version."""
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
