"""What a run knows of those who train elsewhere and have it generate: what they offer, whether turns are held, and for
how long nothing is asked for now and then."""

from collections import deque
from dataclasses import dataclass, field

from elastic.core.affinity import Affinity
from elastic.core.events import VersionOffered
from elastic.core.types import NS_PER_S, Nanoseconds

GAPS_KEPT = 64
GAP_LEAST_NS = NS_PER_S
"""Requests that follow within as long follow one another: nothing is given back, and gets ready again, meanwhile."""
GAP_MARGIN = 1.25
"""A gap that is so many times as long as one of before is not like it."""
LABELS_KEPT = 64
"""Versions whose labels are kept: tokens of older ones are of turns that have lasted through as many updates."""


@dataclass(slots=True)
class Serving:
    """The state of a run without groups. The first of the `offers` is the next to be served."""

    offers: list[VersionOffered] = field(default_factory=list[VersionOffered])
    look: str = ""
    """The `look` of the offer whose version is served now."""
    labels: dict[int, str] = field(default_factory=dict[int, str])
    """What trainers call the last versions."""
    held: bool = False
    """Whether turns that wait are held in the queue."""
    quiet_since_ns: Nanoseconds | None = None
    """Since when no turn is requested; None while one is."""
    asked: bool = False
    """Whether any was ever."""
    gaps_ns: deque[Nanoseconds] = field(default_factory=lambda: deque[Nanoseconds](maxlen=GAPS_KEPT))
    """How long the last gaps between a last answer and the next request took, of those that others train in."""
    affinity: Affinity = field(default_factory=Affinity)

    def note_gap(self, gap_ns: Nanoseconds) -> None:
        if gap_ns >= GAP_LEAST_NS:
            self.gaps_ns.append(gap_ns)

    def foreseen_ns(self, quiet_ns: Nanoseconds) -> Nanoseconds | None:
        """How long a gap that has taken so long will be in all: as the shortest of the longer ones; None where none of
        them was."""
        return min((gap_ns for gap_ns in self.gaps_ns if gap_ns > quiet_ns), default=None)
