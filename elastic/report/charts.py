"""The report's pictures, each a function of the summary; None where the run left nothing to draw."""

from collections.abc import Mapping, Sequence
from statistics import mean
from typing import NamedTuple

from markupsafe import Markup

from elastic.core.types import Account, EndCause
from elastic.report import svg, units
from elastic.report.lanes import WorkerLane
from elastic.report.summary import Histogram, Quantiles, Summary
from elastic.report.usage import Usage
from elastic.report.weights import PARTS, WeightUpdates, mean_split_s

FULL_WIDTH = 984
HALF_WIDTH = 476
LEFT = 52
HALF_BOTTOM = 204
KNOWN_PROVIDERS = ("trainer", "reserved", "serving", "spot", "serverless", "ray")
"""Providers with the same colour in every report; others take the colours that remain."""
COLOURS = 9
MOST_LANES = 80
ACCOUNT_FAMILIES: Mapping[str, tuple[Account, ...]] = {
    "working": (Account.DECODE, Account.PREFILL, Account.TRAINING, Account.SERVING),
    "waiting": (Account.IDLE, Account.ASLEEP, Account.DRAINING, Account.PARKED),
    "overhead": (
        Account.BOOTING,
        Account.LOADING,
        Account.APPLYING,
        Account.RECOMPUTE,
        Account.SWITCHING,
        Account.LOST,
        Account.UNATTRIBUTED,
    ),
}
PERCENT: svg.Ticks = [(v, f"{v}") for v in (0, 25, 50, 75, 100)]


class Layers(NamedTuple):
    """Quantities that add up, as step functions with values between `edges`; each has a class of the style sheet."""

    title: str
    edges: Sequence[float]
    values: Sequence[Sequence[float]]
    classes: Sequence[str]

    @property
    def peak(self) -> float:
        return max(map(sum, zip(*self.values, strict=True)), default=0.0)


def provider_classes(names: Sequence[str]) -> dict[str, str]:
    """The style sheet's colour class of each provider."""
    others = [name for name in names if name not in KNOWN_PROVIDERS]
    slots = {name: i for i, name in enumerate(KNOWN_PROVIDERS)}
    spare = COLOURS - len(KNOWN_PROVIDERS)
    slots |= {name: len(KNOWN_PROVIDERS) + i % spare for i, name in enumerate(others)}
    return {name: f"provider-{slots[name]}" for name in names}


def elasticity(summary: Summary) -> Markup | None:
    """Rollout throughput above workers, by provider over one time axis, preemptions marked (RLBoost Fig. 8)."""
    history = summary.timeline
    if not history.providers:
        return None
    classes = provider_classes(list(summary.providers))
    names = [name for name in summary.providers if name in history.providers]
    series = {name: history.providers[name] for name in names}
    throughput = Layers(
        "accepted tokens/s",
        history.step_edges_s,
        [series[name].tokens_per_s for name in names],
        [f"area {classes[name]}" for name in names],
    )
    workers = Layers(
        "workers",
        history.edges_s,
        [level for name in names for level in (series[name].up_workers, series[name].booting_workers)],
        [f"{kind} {classes[name]}" for name in names for kind in ("area", "area faint")],
    )
    preemptions = [end for end in summary.lease_ends if end.cause == EndCause.PREEMPTED]
    upper, lower, plots = _two_panels(
        (throughput, 190, svg.ticks_to(throughput.peak, units.si)),
        (workers, 110, svg.ticks_to(max(1.0, workers.peak), units.si, least_step=1.0)),
        (0.0, summary.wall_s),
        svg.time_ticks(summary.wall_s, 12),
        svg.time_title(summary.wall_s),
    )
    marks = [_preemption(upper, lower, end.at_s, f"{end.provider}: {end.lease} preempted") for end in preemptions]
    legend = svg.legend(LEFT, 16, [(f"area {classes[name]}", units.shortened(name, 14)) for name in names])
    explained = _preemption_legend(FULL_WIDTH - 12, 16) if preemptions else svg.NOTHING
    label = "Rollout throughput and workers by provider over time"
    return svg.drawing(FULL_WIDTH, 456, label, legend, explained, plots, *marks)


def _two_panels(
    above: tuple[Layers, float, svg.Ticks],
    below: tuple[Layers, float, svg.Ticks],
    span: tuple[float, float],
    ticks: svg.Ticks,
    title: str,
) -> tuple[svg.Panel, svg.Panel, Markup]:
    """Draw layers, each in so many units of height and with its ticks, above others over one axis; with both plots."""
    top, plots, drawn = 58.0, list[svg.Panel](), list[Markup]()
    for layers, height, levels in (above, below):
        plot = svg.panel(LEFT, top, FULL_WIDTH - LEFT - 12, height, span, (0.0, levels[-1][0]))
        drawn += [
            svg.left_axis(plot, levels, layers.title),
            svg.stack(plot, layers.edges, layers.values, layers.classes),
        ]
        plots.append(plot)
        top += height + 52
    upper, lower = plots
    drawn += [svg.bottom_axis(upper, [(v, "") for v, _ in ticks]), svg.bottom_axis(lower, ticks, title)]
    return upper, lower, svg.group(*drawn)


def _half(label: str, *children: Markup) -> Markup:
    """A picture of half the page's width."""
    return svg.drawing(HALF_WIDTH, HALF_BOTTOM + 46, label, *children)


def _half_panel(
    x: tuple[float, float], y: tuple[float, float], right: float = 16, top: float = 34, log: bool = False
) -> svg.Panel:
    return svg.panel(LEFT, top, HALF_WIDTH - LEFT - right, HALF_BOTTOM - top, x, y, log)


def success(summary: Summary) -> Markup | None:
    """Success rate by step with a band of one standard error."""
    points: list[_Percent] = []
    for step in summary.steps:
        if (rate := step.success_rate) is not None:
            error = step.standard_error or 0.0
            points.append(_percent(step.step, rate, max(0.0, rate - error), min(1.0, rate + error)))
    return _trend(points, PERCENT, "Success rate by training step", "success, %", "training step")


class _Percent(NamedTuple):
    """A share in per cent at `x`, between the `least` and the `most` that it may be."""

    x: int
    share: float
    least: float
    most: float


def _percent(x: int, share: float, least: float, most: float) -> _Percent:
    return _Percent(x, 100 * share, 100 * least, 100 * most)


def _trend(points: Sequence[_Percent], levels: svg.Ticks, label: str, quantity: str, over: str) -> Markup | None:
    """A line through the points in their band, with the values at its ends."""
    if not points:
        return None
    first, last = points[0], points[-1]
    plot = _half_panel((first.x, last.x), (0.0, levels[-1][0]), right=58)
    ends = [first] if first is last else [first, last]
    names = [svg.text(plot.x(last.x) + 8, plot.y(last.share) + 4, f"{last.share:.3g} %", "value")]
    if first is not last:
        below = min(plot.y(first.share) + 20, plot.y.start - 6)
        names.append(svg.text(plot.x(first.x) + 4, below, f"{first.share:.3g} %", "value"))
    return _half(
        label,
        svg.left_axis(plot, levels, quantity),
        svg.band(plot, [(point.x, point.least, point.most) for point in points], "band"),
        svg.line(plot, ((point.x, point.share) for point in points), "line"),
        *(svg.dot(plot.x(end.x), plot.y(end.share), "dot") for end in ends),
        *names,
        svg.bottom_axis(plot, svg.whole_ticks(first.x, last.x, 6), over),
    )


def cost(summary: Summary) -> Markup | None:
    """Cost so far, stacked by provider over time, each provider's sum at its end."""
    history = summary.timeline
    if not history.providers or summary.total.usd <= 0:
        return None
    classes = provider_classes(list(summary.providers))
    names = [name for name in summary.providers if name in history.providers and summary.providers[name].usd > 0]
    spent = Layers(
        "cost so far, $",
        history.edges_s,
        [history.providers[name].usd for name in names],
        [f"area {classes[name]}" for name in names],
    )
    _, step = svg.nice_ceiling(spent.peak)
    levels = svg.ticks_to(spent.peak, lambda value: _dollars(value, step))
    plot = _half_panel((0.0, summary.wall_s), (0.0, levels[-1][0]), right=124)
    labels = [f"{units.shortened(name, 10)} {units.usd(summary.providers[name].usd)}" for name in names]
    return _half(
        "Cost by provider over time",
        svg.left_axis(plot, levels, spent.title),
        svg.stack(plot, spent.edges, spent.values, spent.classes),
        _end_labels(plot, spent.values, labels),
        svg.bottom_axis(plot, svg.time_ticks(summary.wall_s, 5), svg.time_title(summary.wall_s)),
    )


def accounts(summary: Summary) -> Markup | None:
    """Draw where each provider's GPU time went: one bar per provider, as shares of its own time."""
    bars = {name: usage for name, usage in summary.providers.items() if usage.gpu_s > 0}
    if not bars:
        return None
    if len(bars) > 1:
        bars["all"] = summary.total
    left, right, pitch, top = 110, 208, 38, 10
    bottom = top + pitch * len(bars)
    scale = svg.Scale(0.0, 1.0, left, FULL_WIDTH - right)
    rows = [_account_bar(scale, top + pitch * i, name, usage) for i, (name, usage) in enumerate(bars.items())]
    used = {account for account, spent_s in summary.total.accounts_s.items() if spent_s > 0}
    return svg.drawing(
        FULL_WIDTH, bottom + 76, "GPU time by account and provider", *rows, _account_legend(left, bottom + 18, used)
    )


def latency(quantiles: Quantiles, values: Histogram, what: str, counted: str = "turns") -> Markup | None:
    """A distribution over a logarithmic time axis, with its median and tail marked."""
    if not values.counts or quantiles.p50 is None or quantiles.p95 is None or quantiles.p99 is None:
        return None
    edges = values.edges_s
    levels = svg.ticks_to(max(values.counts), units.si, least_step=1.0)
    plot = _half_panel((edges[0], edges[-1]), (0.0, svg.nice_ceiling(max(values.counts))[0]), top=78, log=True)
    marks = (("p50", quantiles.p50), ("p95", quantiles.p95), ("p99", quantiles.p99))
    return _half(
        what,
        svg.left_axis(plot, levels, counted),
        *(_bar(plot, edges[i], edges[i + 1], number, counted) for i, number in enumerate(values.counts) if number > 0),
        *(_quantile(plot, value, 16 + 15 * i) for i, (_, value) in enumerate(marks)),
        *(_quantile_name(plot, value, name, 16 + 15 * i) for i, (name, value) in enumerate(marks)),
        svg.bottom_axis(plot, [(v, units.duration(v)) for v in svg.log_ticks(edges[0], edges[-1], 6)], what),
    )


def lanes(summary: Summary) -> Markup | None:
    """Every worker's lifetime, by provider over one time axis."""
    order = list(summary.providers)
    shown = sorted(summary.lanes, key=lambda lane: order.index(lane.provider))[:MOST_LANES]
    if not shown:
        return None
    classes = provider_classes(order)
    left, top = 110, 12
    pitch = 16 if len(shown) <= 24 else 9
    bottom = top + pitch * len(shown)
    plot = svg.panel(left, top, FULL_WIDTH - left - 12, bottom - top, (0.0, summary.wall_s), (0.0, 1.0))
    rows: list[Markup] = []
    for i, lane in enumerate(shown):
        y = top + pitch * i
        if i == 0 or lane.provider != shown[i - 1].provider:
            rows.append(svg.text(left - 12, y + 11, units.shortened(lane.provider, 14), "value", "end"))
        rows.append(_lane(plot, y, pitch - 3, lane, classes[lane.provider]))
    hidden = len(summary.lanes) - len(shown)
    note = svg.text(left, bottom + 52, f"and {hidden:,} more workers", "tick") if hidden else svg.NOTHING
    return svg.drawing(
        FULL_WIDTH,
        bottom + (62 if hidden else 46),
        "Workers over time",
        *rows,
        svg.bottom_axis(plot, svg.time_ticks(summary.wall_s, 12), svg.time_title(summary.wall_s)),
        note,
    )


def _lane(plot: svg.Panel, y: float, height: float, lane: WorkerLane, class_: str) -> Markup:
    closed_s = lane.closed_s
    ready_s = min(closed_s, closed_s if lane.ready_s is None else lane.ready_s)
    notice_s = max(ready_s, closed_s if lane.notice_s is None else min(closed_s, lane.notice_s))
    spans = (
        (lane.opened_s, ready_s, f"area faint {class_}"),
        (ready_s, notice_s, f"area {class_}"),
        (notice_s, closed_s, f"area notice {class_}"),
    )
    parts = [
        svg.rect(plot.x(start), y, max(0.5, plot.x(end) - plot.x(start)), height, kind)
        for start, end, kind in spans
        if end > start
    ]
    if lane.cause == EndCause.PREEMPTED:
        parts.append(svg.triangle(plot.x(closed_s), y + height, "event-mark"))
    words = f"{lane.worker}: {units.duration(closed_s - lane.opened_s)} {lane.cause.replace('_', ' ')}".rstrip()
    return svg.group(*parts, title=words)


def staleness(summary: Summary) -> Markup | None:
    """Trained tokens by how many versions older than the trainer they were."""
    ages, total = summary.batches.trained_tokens_by_age, summary.batches.trained_tokens
    if not total:
        return None
    count = max(ages) + 1
    plot = _half_panel((-0.5, count - 0.5), (0.0, 100.0))
    bars = [
        svg.rect(
            plot.x(age - 0.36),
            plot.y(100 * tokens / total),
            plot.x(age + 0.36) - plot.x(age - 0.36),
            plot.y.start - plot.y(100 * tokens / total),
            "bar",
            f"{age} versions: {tokens:,} tokens",
        )
        for age, tokens in ages.items()
    ]
    return _half(
        "Staleness of trained tokens",
        svg.left_axis(plot, PERCENT, "trained tokens, %"),
        *bars,
        svg.bottom_axis(plot, [(age, str(age)) for age in range(count)], "versions behind the trainer"),
    )


def weight_times(summary: Summary) -> Markup | None:
    """Draw where a version's time goes until workers serve it, above its size relative to all weights."""
    versions = summary.weights.versions
    if not versions:
        return None
    first, last = versions[0].version, versions[-1].version
    edges = [version.version - 0.5 for version in versions] + [last + 0.5]
    classes = [f"area part-{part}" for part in PARTS]
    by_version = _version_times_s(summary.weights)
    times = Layers("time, ms", edges, [[1000 * times_s[part] for times_s in by_version] for part in PARTS], classes)
    shares = [100 * version.over_full for version in versions]
    sizes = Layers("bytes, % of all weights'", edges, [shares], ["area part-wire"])
    _, _, plots = _two_panels(
        (times, 150, svg.ticks_to(times.peak, units.si)),
        (sizes, 80, svg.ticks_to(sizes.peak, lambda value: f"{value:g}")),
        (first - 0.5, last + 0.5),
        svg.whole_ticks(first, last, 12),
        "version",
    )
    legend = svg.legend(LEFT, 16, list(zip(classes, PARTS, strict=True)))
    return svg.drawing(FULL_WIDTH, 386, "Time and bytes of weight updates by version", legend, plots)


def _version_times_s(weights: WeightUpdates) -> list[dict[str, float]]:
    """Every part's time by version, zero where no worker pulled it."""
    return [
        dict.fromkeys(PARTS, 0.0)
        | {"encode": version.encode_s}
        | mean_split_s([pull for pull in weights.pulls if pull.version == version.version and not pull.first])
        for version in weights.versions
    ]


def changed_by_version(summary: Summary) -> Markup | None:
    """The share of elements that changed, by version, with a band over the layers (ROSE Fig. 11a)."""
    points: list[_Percent] = []
    for v in summary.weights.versions:
        layers = [share for layer, share in v.changed_by_layer.items() if layer.isdecimal()] or [v.changed]
        points.append(_percent(v.version, v.changed, min(layers), max(layers)))
    return _changed(points, "version")


def changed_by_layer(summary: Summary) -> Markup | None:
    """The share of elements that changed, by layer: mean over versions, with a band (ROSE Fig. 6)."""
    shares = {layer: summary.weights.changed_of(layer) for layer in summary.weights.layers if layer.isdecimal()}
    points = [_percent(int(layer), mean(found), min(found), max(found)) for layer, found in shares.items()]
    return _changed(points, "layer")


def _changed(points: Sequence[_Percent], over: str) -> Markup | None:
    levels = svg.ticks_to(max((point.most for point in points), default=0.0), lambda value: f"{value:g}")
    return _trend(points, levels, f"Changed elements by {over}", "changed elements, %", over)


def _preemption(upper: svg.Panel, lower: svg.Panel, at_s: float, words: str) -> Markup:
    x = lower.x(at_s)
    return svg.group(
        svg.straight(x, upper.y.end, x, lower.y.start, "event"),
        svg.triangle(x, lower.y.end - 2, "event-mark"),
        title=f"{words} at {units.duration(at_s)}",
    )


def _preemption_legend(right: float, y: float) -> Markup:
    words = "preemption"
    x = right - svg.text_width(words)
    return svg.group(svg.triangle(x - 10, y, "event-mark"), svg.text(x, y, words))


def _dollars(value: float, step: float) -> str:
    return f"{value:.0f}" if step >= 1 else f"{value:.2f}" if step >= 0.01 else f"{value:.2g}"


def _end_labels(plot: svg.Panel, layers: Sequence[Sequence[float]], labels: Sequence[str]) -> Markup:
    """Names beside the middle of each layer's end, pushed up where they would touch."""
    parts: list[Markup] = []
    low, free_y = 0.0, plot.y.start + 4.0
    for values, label in zip(layers, labels, strict=True):
        y = min(free_y, plot.y(low + values[-1] / 2) + 4)
        parts.append(svg.text(plot.x.end + 8, y, label, "value"))
        low, free_y = low + values[-1], y - 16
    return svg.group(*parts)


def _account_bar(scale: svg.Scale, y: float, name: str, usage: Usage) -> Markup:
    parts = [svg.text(scale.start - 12, y + 18, units.shortened(name, 14), "value", "end")]
    x = 0.0
    for account in (a for family in ACCOUNT_FAMILIES.values() for a in family):
        share = usage.accounts_s.get(account, 0.0) / usage.gpu_s
        if share > 0:
            parts.append(_segment(scale, x, share, y, account, usage.accounts_s[account]))
        x += share
    note = f"{units.duration(usage.gpu_s)} · {units.share(usage.overhead_share)} overhead"
    return svg.group(*parts, svg.text(scale.end + 12, y + 18, note))


def _segment(scale: svg.Scale, start: float, share: float, y: float, account: Account, spent_s: float) -> Markup:
    left, width = scale(start), scale(start + share) - scale(start)
    label = f"{account} {100 * share:.0f} %"
    fits = svg.text_width(label) + 12 < width
    return svg.group(
        svg.rect(left, y, width, 26, f"segment account-{account}"),
        svg.text(left + width / 2, y + 17, label if fits else "", f"on-{account}", "middle"),
        title=f"{account}: {units.duration(spent_s)} GPU time, {units.share(share)}",
    )


def _account_legend(x: float, y: float, used: set[str]) -> Markup:
    rows: list[Markup] = []
    for family, members in ACCOUNT_FAMILIES.items():
        shown = [(f"segment account-{account}", account.value) for account in members if account in used]
        if shown:
            rows += [svg.text(x - 12, y, family, "unit", "end"), svg.legend(x, y, shown)]
            y += 20
    return svg.group(*rows)


def _bar(plot: svg.Panel, start: float, end: float, number: int, counted: str) -> Markup:
    left, width, y = plot.x(start), plot.x(end) - plot.x(start), plot.y(number)
    words = f"{units.duration(start)} – {units.duration(end)}: {number:,} {counted}"
    return svg.rect(left + 0.5, y, max(1.0, width - 1), plot.y.start - y, "bar", words)


def _quantile(plot: svg.Panel, value: float, y: float) -> Markup:
    return svg.straight(plot.x(value), y - 8, plot.x(value), plot.y.start, "event")


def _quantile_name(plot: svg.Panel, value: float, name: str, y: float) -> Markup:
    x, words = plot.x(value), f"{name} {units.duration(value)}"
    before = x + 6 + svg.text_width(words) > HALF_WIDTH
    return svg.text(x - 6 if before else x + 6, y, words, "value", "end" if before else "start")
