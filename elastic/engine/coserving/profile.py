"""What an iteration costs: measured tables, kept on disk per model and device, and corrected online.

Source: ROSE §4.1: T_prf(L, m), prefill by length and mode (monolithic or chunked), and T_dec(b), decode by batch
size; here by context too. Pure but for reading and writing the file.
"""

from bisect import bisect_right
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from elastic.core.types import Nanoseconds
from elastic.system.files import write_whole
from elastic.system.given import OtherEncoding, read_text

FORMAT = 1


class CostProfileError(Exception):
    """A profile cannot be used. The message names the file, its device and models, and the wanted ones."""


class Grid(msgspec.Struct, frozen=True):
    """Costs measured at every (x, y); linear between, and beyond the ends as at the ends' slope."""

    xs: tuple[int, ...]
    ys: tuple[int, ...]
    costs_ns: tuple[tuple[Nanoseconds, ...], ...]
    """One row for each x, one column for each y."""

    def __post_init__(self) -> None:
        if not self.xs or not self.ys or [len(row) for row in self.costs_ns] != [len(self.ys)] * len(self.xs):
            raise ValueError(f"{len(self.xs)} × {len(self.ys)} costs were expected")
        if min(map(min, self.costs_ns)) <= 0:
            raise ValueError("costs must be positive")

    def at(self, x: float, y: float) -> float:
        low, x_share = _between(self.xs, x)
        left, y_share = _between(self.ys, y)
        rows = self.costs_ns[low : low + 2]
        across = [_mix(row[left : left + 2], y_share) for row in rows]
        return max(0.0, _mix(across, x_share))


class CostProfile(msgspec.Struct, frozen=True, kw_only=True):
    """The measurements of one model on one device."""

    format: int = FORMAT
    model: str
    device: str
    prefill: Grid
    """Tokens computed in one iteration × tokens of the same sequence before them."""
    decode: Grid
    """Sequences × the longest context."""


class Prefill(msgspec.Struct, frozen=True, gc=False):
    """`count` prompt tokens of one sequence that has `start` tokens in the cache."""

    start: int
    count: int


class Shape(msgspec.Struct, frozen=True, gc=False):
    """The parts of an iteration's work that its cost depends on."""

    prefills: Sequence[Prefill] = ()
    decodes: int = 0
    context: int = 0
    """The longest context of a decode."""


class CostModel:
    """Predicts iterations, and learns from each how far off the profile is.

    There is one correction for prefill and one for decode. They follow quickly upwards, so that a profile that
    is too cheerful does not break the SLO for long, and slowly downwards, so that one quick iteration proves
    nothing.
    """

    FOLLOW_UP = 0.5
    FOLLOW_DOWN = 0.05
    LARGEST_RATIO = 2.0
    """A single hiccup of the host counts as no more than this."""
    MOST = 64.0

    def __init__(self, profile: CostProfile) -> None:
        self.profile = profile
        self.prefill_factor = 1.0
        self.decode_factor = 1.0

    def iteration_ns(self, shape: Shape) -> Nanoseconds:
        return int(sum(self.parts_ns(shape)))

    def parts_ns(self, shape: Shape) -> tuple[float, float]:
        """How long the iteration's prefill takes, and how long its decoding."""
        prefill, decode = self._profiled(shape)
        return prefill * self.prefill_factor, decode * self.decode_factor

    def prefill_ns(self, start: int, end: int, chunk_tokens: int, shared: Shape = Shape()) -> Nanoseconds:  # noqa: B008
        """Prefill of positions `start` to `end`, `chunk_tokens` an iteration (all at once: monolithic), where each
        iteration also decodes what `shared` says."""
        total_ns = 0
        for begin in range(start, end, chunk_tokens):
            piece = Prefill(begin, min(chunk_tokens, end - begin))
            total_ns += self.iteration_ns(msgspec.structs.replace(shared, prefills=(piece,)))
        return total_ns

    def observe(self, shape: Shape, measured_ns: Nanoseconds) -> None:
        """An iteration of this shape took so long."""
        prefill, decode = self._profiled(shape)
        if prefill + decode <= 0:
            return
        # A mixed iteration tells of both, each as much as it was part of it.
        ratio = min(self.LARGEST_RATIO, measured_ns / sum(self.parts_ns(shape)))
        part = prefill / (prefill + decode)
        self.prefill_factor = self._follow(self.prefill_factor, ratio, part)
        self.decode_factor = self._follow(self.decode_factor, ratio, 1 - part)

    def _follow(self, factor: float, ratio: float, part: float) -> float:
        speed = (self.FOLLOW_UP if ratio > 1 else self.FOLLOW_DOWN) * part
        return min(self.MOST, max(1 / self.MOST, factor * (1 + speed * (ratio - 1))))

    def _profiled(self, shape: Shape) -> tuple[float, float]:
        prefill = self._profiled_prefill(shape.prefills) if shape.prefills else 0.0
        decode = self.profile.decode.at(shape.decodes, shape.context) if shape.decodes else 0.0
        return prefill, decode

    def _profiled_prefill(self, pieces: Sequence[Prefill]) -> float:
        """Return the prefill cost of an iteration. Several pieces cost as one piece of all their tokens, since they
        share the constant costs; they attend to their average context."""
        count = sum(piece.count for piece in pieces)
        return self.profile.prefill.at(count, sum(piece.count * piece.start for piece in pieces) / count)


class ProfileRange(NamedTuple):
    """The largest iterations that a profile must cover."""

    prefill_tokens: int
    batch: int
    context: int


def read_profile(path: Path, model: str, device: str, reach: ProfileRange) -> CostProfile:
    """Raises `CostProfileError` for a file that cannot be read, is of another model or device, or short of `reach`."""
    try:
        profile = msgspec.json.decode(read_text(path), type=CostProfile)
    except OSError as error:
        raise CostProfileError(f"{path}: cannot be read ({error.strerror})") from error
    except (msgspec.MsgspecError, OtherEncoding) as error:
        raise CostProfileError(f"{path}: not a cost profile ({error})") from error
    for what, found, wanted in (
        ("format", profile.format, FORMAT),
        ("model", profile.model, model),
        ("device", profile.device, device),
    ):
        if found != wanted:
            raise CostProfileError(f"{path}: profile of another {what}: found {found!r}, wanted {wanted!r}")
    measured = ProfileRange(profile.prefill.xs[-1], profile.decode.xs[-1], profile.decode.ys[-1])
    if any(there < wanted for there, wanted in zip(measured, reach, strict=True)):
        raise CostProfileError(f"{path}: measured for smaller iterations: found {measured}, wanted {reach}")
    return profile


def write_profile(path: Path, profile: CostProfile) -> None:
    write_whole(path, msgspec.json.encode(profile), durable=False)


def _between(points: Sequence[int], value: float) -> tuple[int, float]:
    """The interval that `value` is in (or the nearest), and where: 0 at its lower end, 1 at its upper."""
    if len(points) == 1 or value <= points[0]:
        return 0, 0.0
    low = min(bisect_right(points, value), len(points) - 1) - 1
    return low, (value - points[low]) / (points[low + 1] - points[low])


def _mix(ends: Sequence[float], share: float) -> float:
    return ends[0] if len(ends) == 1 else ends[0] + share * (ends[1] - ends[0])
