"""What the report's charts are drawn with: scales, ticks, axes, stacked areas and legends as SVG.

Colours and type are the style sheet's, by class, so that charts follow the page into dark mode and onto paper.
Coordinates are SVG user units, y downwards.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from elastic.report.markup import Markup, tag

Ticks: TypeAlias = Sequence[tuple[float, str]]
"""Values and their labels."""

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
    left: float, top: float, width: float, height: float, x: tuple[float, float], y: tuple[float, float]
) -> Panel:
    """A panel with linear scales over the value ranges `x` and `y`."""
    return Panel(Scale(*x, left, left + width), Scale(*y, top + height, top))


def logarithmic(scale: Scale) -> Scale:
    return replace(scale, log=True)


def drawing(width: float, height: float, label: str, *children: Markup) -> Markup:
    """An SVG picture. Screen readers read `label`."""
    return tag("svg", *children, viewBox=f"0 0 {width:g} {height:g}", role="img", aria_label=label)


def text(x: float, y: float, words: str, class_: str = "tick", anchor: str = "start") -> Markup:
    return tag("text", words, x=x, y=y, class_=class_, text_anchor=anchor)


def nice_ceiling(value: float, ticks: int = 4) -> tuple[float, float]:
    """The axis end and the tick spacing (1, 2 or 5 × 10ⁿ) that just hold `value` in about `ticks` steps."""
    if value <= 0:
        return 1.0, 1.0
    power = 10.0 ** math.floor(math.log10(value / ticks))
    step = next(m * power for m in (1, 2, 5, 10) if m * power * ticks >= value * (1 - 1e-9))
    return math.ceil(value / step - 1e-9) * step, step


def spaced(high: float, step: float) -> list[float]:
    return [i * step for i in range(math.floor(high / step + 1e-9) + 1)]


def time_ticks(high_s: float, most: int) -> Ticks:
    """Round times as min:s, or as h:min from an hour on."""
    step_s = next((s for s in _TIME_STEPS_S if high_s / s <= most), math.ceil(high_s / most / 86_400) * 86_400)
    return [(t, _clock(t, high_s)) for t in spaced(high_s, step_s)]


def time_title(high_s: float) -> str:
    return f"time since the run began ({'h:min' if high_s >= 3600 else 'min:s'})"


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
    lines = [
        tag("line", x1=left, x2=right, y1=plot.y(v), y2=plot.y(v), class_="axis" if v == plot.y.low else "grid")
        for v, _ in ticks
    ]
    labels = [text(left - 8, plot.y(v) + 4, label, anchor="end") for v, label in ticks]
    return tag("g", *lines, *labels, text(left, plot.y.end - 12, title, "unit"))


def bottom_axis(plot: Panel, ticks: Ticks, title: str = "") -> Markup:
    bottom = plot.y.start
    marks = [tag("line", x1=plot.x(v), x2=plot.x(v), y1=bottom, y2=bottom + 4, class_="axis") for v, _ in ticks]
    labels = [text(plot.x(v), bottom + 18, label, anchor="middle") for v, label in ticks]
    name = text((plot.x.start + plot.x.end) / 2, bottom + 36, title, "unit", "middle") if title else None
    return tag("g", *marks, *labels, name)


def step_area(plot: Panel, edges: Sequence[float], low: Sequence[float], high: Sequence[float], class_: str) -> Markup:
    """The area between two step functions with values between `edges`."""
    there = _steps(plot, edges, high)
    back = _steps(plot, edges[::-1], low[::-1])
    return tag("path", d=f"M{there}L{back}Z", class_=class_)


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


def line(plot: Panel, points: Sequence[tuple[float, float]], class_: str) -> Markup:
    return tag("path", d="M" + _path(plot, points), class_=class_)


def band(plot: Panel, points: Sequence[tuple[float, float, float]], class_: str) -> Markup:
    """The area between the second and third coordinate over the first."""
    there = _path(plot, [(x, high) for x, _, high in points])
    back = _path(plot, [(x, low) for x, low, _ in reversed(points)])
    return tag("path", d=f"M{there}L{back}Z", class_=class_)


def _path(plot: Panel, points: Sequence[tuple[float, float]]) -> str:
    return "L".join(f"{plot.x(x):.1f},{plot.y(y):.1f}" for x, y in points)


def swatch(x: float, y: float, class_: str) -> Markup:
    return tag("rect", x=x, y=y, width=11, height=11, rx=2, class_=class_)


def legend(x: float, y: float, entries: Sequence[tuple[str, str]]) -> Markup:
    """Swatches (by class) and names in a row that starts at x; `y` is the text's base line."""
    parts: list[Markup] = []
    for class_, name in entries:
        parts += [swatch(x, y - 10, class_), text(x + 16, y, name)]
        x += 16 + text_width(name) + 16
    return tag("g", *parts)


def text_width(words: str) -> float:
    """Estimate a text's width at the charts' letter size of 12 units, since fonts cannot be measured here."""
    return sum(4.2 if c in _NARROW else 10.5 if c in _WIDE else 7.0 for c in words)
