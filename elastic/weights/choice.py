"""Which codec a bucket gets: the one with the shortest predicted time over a given link. Pure.

A transfer is a pipeline of encoding, the wire and decoding, each about a bucket at a time; its speed is that of the
slowest stage, and the other two are paid once in a while. Encoding has the copy of the new weights before it, whatever
the codec. Costs are CPU nanoseconds of one x86-64 core, fitted to updates of which 1.3 to 20 % changed; only their
ratio to the link matters.
"""

import math
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

BYTES_PER_S_IN_GBPS = 125e6

OVERLAP = 0.25
"""The share of the other stages' times that a bucket takes besides the slowest stage."""

_SAMPLES, _SAMPLE = 32, 128


COPY_NS = 0.36
"""For every element that is published: the copy that the trainer's side takes, so that training may go on."""


class Cost(NamedTuple):
    """Nanoseconds for every element, and for every changed one."""

    encode_element_ns: float
    encode_change_ns: float
    decode_element_ns: float
    decode_change_ns: float

    def stages_s(self, change: "ExpectedChange") -> tuple[float, float]:
        """Seconds that the trainer takes to encode a bucket, and that a worker takes to decode and apply it."""
        encode_ns = (COPY_NS + self.encode_element_ns) * change.elements + self.encode_change_ns * change.changed
        decode_ns = self.decode_element_ns * change.elements + self.decode_change_ns * change.changed
        return encode_ns / 1e9, decode_ns / 1e9


COSTS = {
    "exponent_class": Cost(0.73, 22.0, 0.65, 16.0),
    "gap8": Cost(0.46, 4.6, 0.06, 7.0),
    "gap8_zstd": Cost(0.46, 11.0, 0.12, 8.0),
    "dense": Cost(8.4, 0.0, 11.0, 0.0),
    "raw": Cost(4.2, 0.0, 2.1, 0.0),
}


class ExpectedChange(NamedTuple):
    """What is expected of a bucket: its elements, how many differ, and the bits it takes to say by how much."""

    elements: int
    changed: int
    bits: float = 2.0
    """Per changed element, without context; 2 for a step of AdamW at a small learning rate."""


def estimate_change(old: npt.NDArray[np.uint16], new: npt.NDArray[np.uint16]) -> ExpectedChange:
    """Estimate how much of a bucket differs, from samples over its whole length."""
    starts = range(0, old.size, max(old.size // _SAMPLES, _SAMPLE))
    before, after = (
        _ordinals(np.concatenate([bits[start : start + _SAMPLE] for start in starts] or [bits])) for bits in (old, new)
    )
    steps = np.abs(after - before)
    octaves = np.log2(steps[steps > 0]).astype(np.int64)
    counts = np.bincount(octaves, minlength=1)
    shares = counts[counts > 0] / max(octaves.size, 1)
    # Up or down, the octave of the step, and where in it.
    bits = 1 - float((shares * np.log2(shares)).sum()) + (float(octaves.mean()) if octaves.size else 0.0)
    return ExpectedChange(old.size, round(octaves.size / max(steps.size, 1) * old.size), bits)


def _ordinals(bits: npt.NDArray[np.uint16]) -> npt.NDArray[np.int64]:
    """Patterns numbered in order of value."""
    return np.where(bits & 0x8000, ~bits, bits | 0x8000).astype(np.int64)


def predicted_bytes(codec: str, change: ExpectedChange) -> float:
    """Return a bucket's predicted bytes on the wire; the error is about 10 % on RL updates."""
    elements, changed, bits = change
    positions = _entropy_bits(changed / max(elements, 1)) * elements
    match codec:
        case "exponent_class":
            # Tables and tile headers; knowing the exponents saves a third of the positions.
            return 1000 + (0.65 * positions + bits * changed) / 8
        case "gap8":
            return (2 + 2 * (bits > 8)) * changed + max(elements / 255 - changed, 0)
        case "gap8_zstd":
            return 100 + (0.9 * positions + (bits + 1.5) * changed) / 8
        case "dense":
            return 1.4 * elements
        case _:
            return 2.0 * elements


def _entropy_bits(share: float) -> float:
    return -sum(part * math.log2(part) for part in (share, 1 - share) if 0 < part < 1)


def choose_codec(change: ExpectedChange, link_bytes_per_s: float, codecs: Iterable[str] = COSTS) -> str:
    """The name of the fastest of `codecs` for a bucket with about this change."""
    return min(codecs, key=lambda codec: _predicted_s(codec, change, link_bytes_per_s))


def _predicted_s(codec: str, change: ExpectedChange, link_bytes_per_s: float) -> float:
    encode_s, decode_s = COSTS[codec].stages_s(change)
    stages = sorted((encode_s, predicted_bytes(codec, change) / link_bytes_per_s, decode_s))
    return stages[2] + OVERLAP * (stages[0] + stages[1])
