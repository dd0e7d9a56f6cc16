"""The report's pictures of evaluations: avg@k above pass@k by version, in all and of each environment."""

from collections.abc import Mapping, Sequence

from elastic.core.scores import Estimate
from elastic.report import svg, units
from elastic.report.charts import HALF_WIDTH, LEFT, PERCENT
from elastic.report.document import Chart
from elastic.report.evaluations import Evaluations

MOST_ENVIRONMENTS = 8
"""The most environments with charts of their own."""
RIGHT = 104
"""What names and values at the ends of lines take."""

LARGEST_DRAWN = 1e300
"""Rewards may have any finite size: larger ones are drawn at this, where sums of some are numbers, too."""

Points = Sequence[tuple[int, Estimate]]
"""What a metric came to, by version."""


def charts_of(evaluations: Evaluations) -> list[Chart]:
    """Empty where nothing was evaluated; environments have charts of their own where there are several."""
    versions = evaluations.versions
    names = list(dict.fromkeys(name for one in versions for name in one.environments))
    charts = [_chart("Evaluation", [(one.version, one.metrics) for one in versions])]
    for name in names[:MOST_ENVIRONMENTS] if len(names) > 1 else []:
        own = [(one.version, one.environments[name].metrics) for one in versions if name in one.environments]
        charts.append(_chart(f"Evaluation: {name}", own))
    return [chart for chart in charts if chart.picture is not None]


def _chart(title: str, metrics: Sequence[tuple[int, Mapping[str, Estimate]]]) -> Chart:
    return Chart(
        title=title,
        picture=_picture(title, metrics),
        caption="By weights version. Bands: one standard error over tasks. pass@k is the chance that one of k episodes "
        "has a reward above 0; dashed is the largest k.",
    )


def _picture(title: str, metrics: Sequence[tuple[int, Mapping[str, Estimate]]]) -> svg.Picture | None:
    lines: dict[str, list[tuple[int, Estimate]]] = {}
    for version, found in metrics:
        for name, estimate in found.items():
            lines.setdefault(name, []).append((version, estimate))
    if not lines:
        return None
    first, last = metrics[0][0], metrics[-1][0]
    x = svg.Scale(first, last, LEFT, HALF_WIDTH - RIGHT)
    means = {name: points for name, points in lines.items() if name.startswith("avg")}
    passes = [(name, points) for name, points in lines.items() if name not in means]
    plots = [_means(x, name, points) for name, points in means.items()]
    if passes:
        plots.append(_passes(x, [passes[0], *passes[1:][-1:]]))
    return svg.Plots(
        label=title, width=HALF_WIDTH, plots=plots, ticks=svg.whole_ticks(first, last, 6), title="weights version"
    )


def _means(x: svg.Scale, name: str, points: Points) -> svg.Plot:
    """A reward has any scale, and may be below 0."""
    reach = [value for _, one in points for value in _band(one)]
    high, step = svg.nice_ceiling(max(0.0, *reach) - min(0.0, *reach))
    low = step * (min(0.0, *reach) // step)
    levels = [(low + level, f"{low + level:g}") for level in svg.spaced(high + step, step) if low + level <= high]
    y = svg.Scale(low, levels[-1][0], 134, 38)
    return _plot(x, y, levels, name, [("", points)])


def _passes(x: svg.Scale, lines: Sequence[tuple[str, Points]]) -> svg.Plot:
    shares = [(name, [(at, _percent(one)) for at, one in points]) for name, points in lines]
    return _plot(x, svg.Scale(0.0, 100.0, 274, 178), PERCENT, "passed, %", shares)


def _percent(one: Estimate) -> Estimate:
    error = None if one.error is None else 100 * one.error
    return Estimate(mean=100 * one.mean, error=error, tasks=one.tasks)


def _band(one: Estimate) -> tuple[float, float]:
    mean, error = _drawn(one.mean), _drawn(one.error or 0.0)
    return mean - error, mean + error


def _drawn(value: float) -> float:
    return max(-LARGEST_DRAWN, min(LARGEST_DRAWN, value))


def _plot(x: svg.Scale, y: svg.Scale, levels: svg.Ticks, title: str, lines: Sequence[tuple[str, Points]]) -> svg.Plot:
    """Lines in their bands, the second one dashed, with names and last values at their ends."""
    paths: list[tuple[str, str]] = []
    labels: list[svg.Label] = []
    for (name, points), class_ in zip(lines, ("line", "line faint"), strict=False):
        there = svg.path(x, y, ((at, _band(one)[1]) for at, one in points))
        back = svg.path(x, y, ((at, _band(one)[0]) for at, one in reversed(points)))
        paths.append((f"M{there}L{back}Z", "band"))
        paths.append((f"M{svg.path(x, y, ((at, one.mean) for at, one in points))}", class_))
        at, last = points[-1]
        value = units.share(last.mean / 100) if levels is PERCENT else units.reward(last.mean)
        labels.append(svg.Label(x(at) + 8, y(last.mean) + 4, f"{name} {value}".strip()))
    dots = [(at, one.mean) for _, points in lines for at, one in points]
    return svg.Plot(x=x, y=y, levels=levels, title=title, paths=paths, dots=dots, labels=svg.apart(labels))
