"""What the report's charts are drawn with: scales, ticks, axes, stacked areas and legends as SVG.

Colours and type are the style sheet's, by class, so that charts follow the page into dark mode and onto paper.
Coordinates are SVG user units, y downwards.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from markupsafe import Markup

from elastic.system.plain_values import printable

Ticks: TypeAlias = Sequence[tuple[float, str]]
"""Values and their labels."""

NOTHING = Markup()

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


@dataclass(frozen=True, slots=True)
class Panel:
    """One plot's two scales; y runs from its bottom edge (`y.start`) to its top (`y.end`)."""

    x: Scale
    y: Scale


def panel(
    left: float,
    top: float,
    width: float,
    height: float,
    x: tuple[float, float],
    y: tuple[float, float],
    log: bool = False,
) -> Panel:
    """A panel over the value ranges `x`, which may be logarithmic, and `y`."""
    return Panel(Scale(*x, left, left + width, log), Scale(*y, top + height, top))


def drawing(width: float, height: float, label: str, *children: Markup) -> Markup:
    """An SVG picture. Screen readers read `label`."""
    return _drawn(
        '<svg viewBox="0 0 {:g} {:g}" role="img" aria-label="{}">{}</svg>', width, height, label, group(*children)
    )


def group(*children: Markup, title: str = "") -> Markup:
    """Children under one title, which pointing at them shows."""
    return _drawn("<g>{}{}</g>", _title(title), NOTHING.join(children))


def text(x: float, y: float, words: str, class_: str = "tick", anchor: str = "start") -> Markup:
    element = '<text x="{:.2f}" y="{:.2f}" class="{}" text-anchor="{}">{}</text>'
    return _drawn(element, x, y, class_, anchor, printable(words))


def rect(x: float, y: float, width: float, height: float, class_: str, title: str = "") -> Markup:
    element = '<rect x="{:.2f}" y="{:.2f}" width="{:.2f}" height="{:.2f}" class="{}">{}</rect>'
    return _drawn(element, x, y, width, height, class_, _title(title))


def straight(x1: float, y1: float, x2: float, y2: float, class_: str) -> Markup:
    """A line between two points."""
    element = '<line x1="{:.2f}" y1="{:.2f}" x2="{:.2f}" y2="{:.2f}" class="{}"/>'
    return _drawn(element, x1, y1, x2, y2, class_)


def dot(x: float, y: float, class_: str) -> Markup:
    return _drawn('<circle cx="{:.2f}" cy="{:.2f}" r="3.5" class="{}"/>', x, y, class_)


def triangle(x: float, y: float, class_: str, title: str = "") -> Markup:
    """A triangle that points down at (x, y)."""
    return _drawn('<path d="M{:.1f},{:.1f}h9l-4.5,8z" class="{}">{}</path>', x - 4.5, y - 8, class_, _title(title))


def _title(words: str) -> Markup:
    return _drawn("<title>{}</title>", printable(words)) if words else NOTHING


def _drawn(element: str, *values: Any) -> Markup:
    return Markup(element).format(*values)


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
    high, step = nice_ceiling(value)
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


def left_axis(plot: Panel, ticks: Ticks, title: str) -> Markup:
    """Labels and grid lines; `title` names the quantity and its unit, above the axis so that it reads level."""
    left, right = plot.x.start, plot.x.end
    lines = [straight(left, plot.y(v), right, plot.y(v), "axis" if v == plot.y.low else "grid") for v, _ in ticks]
    labels = [text(left - 8, plot.y(v) + 4, label, anchor="end") for v, label in ticks]
    return group(*lines, *labels, text(left, plot.y.end - 12, title, "unit"))


def bottom_axis(plot: Panel, ticks: Ticks, title: str = "") -> Markup:
    bottom = plot.y.start
    marks = [straight(plot.x(v), bottom, plot.x(v), bottom + 4, "axis") for v, _ in ticks]
    labels = [text(plot.x(v), bottom + 18, label, anchor="middle") for v, label in ticks if label]
    return group(*marks, *labels, text((plot.x.start + plot.x.end) / 2, bottom + 36, title, "unit", "middle"))


def stack(plot: Panel, edges: Sequence[float], layers: Sequence[Sequence[float]], classes: Sequence[str]) -> Markup:
    """Areas on one another, whose heights are step functions with values between `edges`; none for one that is zero
    throughout."""
    areas: list[Markup] = []
    low = [0.0] * (len(edges) - 1)
    for values, class_ in zip(layers, classes, strict=True):
        high = [a + b for a, b in zip(low, values, strict=True)]
        if any(values):
            areas.append(_area(_steps(plot, edges, high), _steps(plot, edges[::-1], low[::-1]), class_))
        low = high
    return group(*areas)


def _area(there: str, back: str, class_: str) -> Markup:
    return _drawn('<path d="M{}L{}Z" class="{}"/>', there, back, class_)


def _steps(plot: Panel, edges: Sequence[float], values: Sequence[float]) -> str:
    """The path along a step function, edges in either order; runs of one value are one line."""
    points: list[str] = []
    for i, value in enumerate(values):
        y = f"{plot.y(value):.1f}"
        start, end = f"{plot.x(edges[i]):.1f}", f"{plot.x(edges[i + 1]):.1f}"
        if points and points[-1].endswith(f",{y}"):
            points[-1] = f"{end},{y}"
        else:
            points += [f"{start},{y}", f"{end},{y}"]
    return "L".join(points)


def line(plot: Panel, points: Iterable[tuple[float, float]], class_: str) -> Markup:
    return _drawn('<path d="M{}" class="{}"/>', _path(plot, points), class_)


def band(plot: Panel, points: Sequence[tuple[float, float, float]], class_: str) -> Markup:
    """The area between the second and third coordinate over the first."""
    there = _path(plot, ((x, high) for x, _, high in points))
    return _area(there, _path(plot, ((x, low) for x, low, _ in reversed(points))), class_)


def _path(plot: Panel, points: Iterable[tuple[float, float]]) -> str:
    return "L".join(f"{plot.x(x):.1f},{plot.y(y):.1f}" for x, y in points)


def legend(x: float, y: float, entries: Sequence[tuple[str, str]]) -> Markup:
    """Swatches (by class) and names in a row that starts at x; `y` is the text's base line."""
    parts: list[Markup] = []
    for class_, name in entries:
        parts += [rect(x, y - 10, 11, 11, class_), text(x + 16, y, name)]
        x += 16 + text_width(name) + 16
    return group(*parts)


def text_width(words: str) -> float:
    """Estimate a text's width at the charts' letter size of 12 units, since fonts cannot be measured here."""
    return sum(4.2 if c in _NARROW else 10.5 if c in _WIDE else 7.0 for c in words)
