"""What the report's charts are made of: scales, ticks, and pictures that `pictures.html.j2` draws as SVG.

Colours and type are the style sheet's, by class, so that charts follow the page into dark mode and onto paper.
Coordinates are SVG user units, y downwards.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

Ticks: TypeAlias = Sequence[tuple[float, str]]
"""Values and their labels."""

Legend: TypeAlias = Sequence[tuple[str, str]]
"""Classes and what they stand for."""

_NARROW, _WIDE = frozenset("fijlrt.,:;'|!()[] "), frozenset("mwMW%@")
_TIME_STEPS_S = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14_400, 21_600, 43_200, 86_400)


@dataclass(frozen=True, slots=True)
class Scale:
    """Values from `low` to `high` on pixels from `start` to `end`; outside it they are held at the edge."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        held = min(max(value, self.low), self.high)
        low, high, at = (math.log(v) if self.log else v for v in (self.low, self.high, held))
        share = (at - low) / (high - low) if high > low else 0.5
        return self.start + (self.end - self.start) * share


class Bar(NamedTuple):
    """A bar of a distribution, from 0 up to `high`. Its title is told of it where one points at it."""

    start: float
    end: float
    high: float
    title: str


class Label(NamedTuple):
    """Words at a place of the picture, in its units."""

    x: float
    y: float
    words: str


@dataclass(frozen=True, kw_only=True)
class Plot:
    """One plot. `y` runs from its bottom edge (`y.start`) to its top (`y.end`); `title` names quantity and unit.

    `paths` are SVG's, each with its class. `rules` are values of `x` that are marked from the top to the bottom.
    """

    x: Scale
    y: Scale
    levels: Ticks
    title: str
    paths: Sequence[tuple[str, str]] = ()
    bars: Sequence[Bar] = ()
    dots: Sequence[tuple[float, float]] = ()
    rules: Sequence[tuple[float, str]] = ()
    labels: Sequence[Label] = ()


@dataclass(frozen=True, kw_only=True)
class Plots:
    """Plots under one another, over one axis. `events` are values of that axis and what happened there. Screen readers
    read `label`.
    """

    label: str
    width: float
    plots: Sequence[Plot]
    ticks: Ticks
    title: str
    legend: Legend = ()
    events: Sequence[tuple[float, str]] = ()

    kind = "plots"


class Span(NamedTuple):
    """A stretch of a lane, with `words` in it."""

    start: float
    end: float
    class_: str
    title: str = ""
    words: str = ""


class Mark(NamedTuple):
    at: float
    class_: str
    shape: Literal["triangle", "dot", "line"]
    title: str = ""


@dataclass(frozen=True, kw_only=True)
class LaneRow:
    """A lane with its name on the left and a note on the right."""

    name: str
    spans: Sequence[Span]
    marks: Sequence[Mark] = ()
    note: str = ""
    title: str = ""


@dataclass(frozen=True, kw_only=True)
class Lanes:
    """Lanes over one scale, each of a `height` and so much as `pitch` below the one before; with an axis where there
    are ticks. Below it are legends, each with a name."""

    label: str
    width: float
    x: Scale
    rows: Sequence[LaneRow]
    pitch: float
    height: float
    ticks: Ticks = ()
    axis_title: str = ""
    legends: Sequence[tuple[str, Legend]] = ()

    kind = "lanes"


Picture: TypeAlias = Plots | Lanes


def nice_ceiling(value: float, ticks: int = 4) -> tuple[float, float]:
    """The axis end and the tick spacing (1, 2 or 5 × 10ⁿ) that just hold `value` in about `ticks` steps."""
    if value <= 0:
        return 1.0, 1.0
    power = 10.0 ** math.floor(math.log10(value / ticks))
    step = next(m * power for m in (1, 2, 5, 10) if m * power * ticks >= value * (1 - 1e-9))
    return math.ceil(value / step - 1e-9) * step, step


def spaced(high: float, step: float) -> list[float]:
    return [i * step for i in range(math.floor(high / step + 1e-9) + 1)]


def ticks_to(value: float, label: Callable[[float], str], least_step: float = 0.0) -> Ticks:
    """Round ticks from 0 to what holds `value`."""
    high, step = nice_ceiling(max(value, least_step))
    return [(v, label(v)) for v in spaced(high, max(least_step, step))]


def whole_ticks(first: int, last: int, most: int) -> Ticks:
    """Whole numbers between the two."""
    _, step = nice_ceiling(last - first, most)
    return [(v, f"{v:g}") for v in spaced(last, max(1.0, step)) if v >= first] or [(first, str(first))]


def time_ticks(high_s: float, most: int) -> Ticks:
    """Round times as min:s, or as h:min from an hour on."""
    step_s = next((s for s in _TIME_STEPS_S if high_s / s <= most), math.ceil(high_s / most / 86_400) * 86_400)
    return [(t, _clock(t, high_s)) for t in spaced(high_s, step_s)]


def time_title(high_s: float, what: str = "run") -> str:
    return f"time since the {what} began ({'h:min' if high_s >= 3600 else 'min:s'})"


def _clock(time_s: float, high_s: float) -> str:
    whole, part = divmod(round(time_s / 60) if high_s >= 3600 else round(time_s), 60)
    return f"{whole}:{part:02d}"


def log_ticks(low: float, high: float, most: int) -> list[float]:
    """1, 2, 5 of each decade within [low, high], or decades alone where that is too many."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for multiples in ((1, 2, 5), (1, 3), (1,)):
        ticks = [m * 10.0**d for d in decades for m in multiples]
        ticks = [t for t in ticks if low * (1 - 1e-9) <= t <= high * (1 + 1e-9)]
        if len(ticks) <= most:
            break
    return ticks


def stack(
    x: Scale, y: Scale, edges: Sequence[float], layers: Sequence[Sequence[float]], classes: Sequence[str]
) -> list[tuple[str, str]]:
    """Paths of areas on one another, whose heights are step functions with values between `edges`; none for one that is
    zero throughout."""
    areas: list[tuple[str, str]] = []
    low = [0.0] * (len(edges) - 1)
    for values, class_ in zip(layers, classes, strict=True):
        high = [a + b for a, b in zip(low, values, strict=True)]
        if any(values):
            there, back = _steps(x, y, edges, high), _steps(x, y, edges[::-1], low[::-1])
            areas.append((f"M{there}L{back}Z", class_))
        low = high
    return areas


def _steps(x: Scale, y: Scale, edges: Sequence[float], values: Sequence[float]) -> str:
    """The path along a step function, edges in either order; runs of one value are one line."""
    points: list[str] = []
    for i, value in enumerate(values):
        level = f"{y(value):.1f}"
        start, end = f"{x(edges[i]):.1f}", f"{x(edges[i + 1]):.1f}"
        if points and points[-1].endswith(f",{level}"):
            points[-1] = f"{end},{level}"
        else:
            points += [f"{start},{level}", f"{end},{level}"]
    return "L".join(points)


def path(x: Scale, y: Scale, points: Iterable[tuple[float, float]]) -> str:
    """The path along lines from point to point, but for the `M` that begins it."""
    return "L".join(f"{x(at):.1f},{y(value):.1f}" for at, value in points)


def apart(labels: Sequence[Label]) -> list[Label]:
    """Labels that do not cover each other: the lower of two moves down."""
    found: list[Label] = []
    for label in sorted(labels, key=lambda label: label.y):
        y = max(label.y, found[-1].y + 14) if found else label.y
        found.append(label._replace(y=y))
    return found


def text_width(words: str) -> float:
    """Estimate a text's width at the charts' letter size of 12 units, since fonts cannot be measured here."""
    return sum(4.2 if c in _NARROW else 10.5 if c in _WIDE else 7.0 for c in words)
