"""What a run knows of those who train elsewhere and have it generate: what they offer, and whether turns are held."""

from dataclasses import dataclass, field

from elastic.core.affinity import Affinity
from elastic.core.events import VersionOffered

LABELS_KEPT = 64
"""Versions whose labels are kept: tokens of older ones are of turns that have lasted through as many updates."""


@dataclass(slots=True)
class Serving:
    """The state of a run without groups. The first of the `offers` is the next to be served."""

    offers: list[VersionOffered] = field(default_factory=list[VersionOffered])
    look: str = ""
    """Of the version that is served now."""
    labels: dict[int, str] = field(default_factory=dict[int, str])
    """What trainers call the last versions."""
    held: bool = False
    """Whether turns that wait are held in the queue."""
    idle: bool = False
    """Whether nothing was requested for so long that leases go back."""
    affinity: Affinity = field(default_factory=Affinity)
