"""Which codec a bucket gets: the one with the shortest predicted time over a given link. Pure.

A transfer is a pipeline of encoding, the wire and decoding, each about a bucket at a time; its speed is that of the
slowest stage, and the other two are paid once in a while. Costs are nanoseconds on one core, as measured by
`benchmarks/weights.py`; only their ratio to the link matters.
"""

import math
from typing import NamedTuple

OVERLAP = 0.25
"""What the stages that are not the slowest add to a bucket's time."""


class Cost(NamedTuple):
    """Nanoseconds to encode or decode: for every element, and for every changed one."""

    element_ns: float
    change_ns: float


COSTS = {
    "exponent_class": Cost(0.25, 18.0),
    "gap8": Cost(0.15, 9.0),
    "gap8_zstd": Cost(0.15, 13.0),
    "dense": Cost(5.0, 0.0),
    "raw": Cost(0.7, 0.0),
}


class Change(NamedTuple):
    """What is expected of a bucket: its elements, how many differ, and the mean log2(1 + steps) of those that do."""

    elements: int
    changed: int
    octaves: float = 1.0


def predicted_bytes(codec: str, change: Change) -> float:
    """What a bucket takes on the wire: a fit to RL updates between 0.5 and 30 % changed, good to about 10 %."""
    elements, changed, octaves = change
    gap_octaves = math.log2(max(elements, 1) / max(changed, 1))
    match codec:
        case "exponent_class":
            return 1000 + changed * (1.0 + 0.55 * gap_octaves + 1.0 + 1.3 * octaves) / 8
        case "gap8":
            return (2 + 2 * (octaves > 8)) * changed + max(elements / 255 - changed, 0)
        case "gap8_zstd":
            return 16 + changed * (2.9 + 0.9 * gap_octaves + 1.0 + 1.3 * octaves) / 8
        case "dense":
            return 1.37 * elements
        case _:
            return 2.0 * elements


def choose_codec(change: Change, link_bytes_per_s: float) -> str:
    """The name of the fastest codec for a bucket with about this change."""
    return min(COSTS, key=lambda codec: _predicted_s(codec, change, link_bytes_per_s))


def _predicted_s(codec: str, change: Change, link_bytes_per_s: float) -> float:
    cost = COSTS[codec]
    coding_s = (cost.element_ns * change.elements + cost.change_ns * change.changed) / 1e9
    stages = sorted((coding_s, predicted_bytes(codec, change) / link_bytes_per_s, coding_s))
    return stages[2] + OVERLAP * (stages[0] + stages[1])
