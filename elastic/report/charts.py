"""The report's pictures, each a function of the summary; None where the run left nothing to draw."""

from collections.abc import Mapping, Sequence

from elastic.core.types import Account, EndCause
from elastic.report import svg, units
from elastic.report.lanes import WorkerLane
from elastic.report.markup import Markup, join, tag
from elastic.report.summary import Histogram, Quantiles, Summary
from elastic.report.usage import Usage
from elastic.report.weights import PARTS, WeightUpdates, mean_split_s

FULL_WIDTH = 984
HALF_WIDTH = 476
LEFT = 52
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
    tokens_per_s = [series[name].tokens_per_s for name in names]
    workers = [level for name in names for level in (series[name].up_workers, series[name].booting_workers)]
    worker_classes = [f"{kind} {classes[name]}" for name in names for kind in ("area", "area faint")]
    width, span_s = FULL_WIDTH - LEFT - 12, (0.0, summary.wall_s)
    top_high, top_step = svg.nice_ceiling(_peak(tokens_per_s))
    low_high, low_step = svg.nice_ceiling(max(1.0, _peak(workers)))
    low_step = max(1.0, low_step)
    upper = svg.panel(LEFT, 58, width, 190, span_s, (0.0, top_high))
    lower = svg.panel(LEFT, 300, width, 110, span_s, (0.0, low_high))
    preemptions = [end for end in summary.lease_ends if end.cause == EndCause.PREEMPTED]
    return svg.drawing(
        FULL_WIDTH,
        456,
        "Rollout throughput and workers by provider over time",
        svg.legend(LEFT, 16, [(f"area {classes[name]}", units.shortened(name, 14)) for name in names]),
        _preemption_legend(FULL_WIDTH - 12, 16) if preemptions else Markup(),
        svg.left_axis(upper, [(v, units.si(v)) for v in svg.spaced(top_high, top_step)], "accepted tokens/s"),
        _stack(upper, history.step_edges_s, tokens_per_s, [f"area {classes[name]}" for name in names]),
        svg.left_axis(lower, [(v, units.si(v)) for v in svg.spaced(low_high, low_step)], "workers"),
        _stack(lower, history.edges_s, workers, worker_classes),
        *(_preemption(upper, lower, end.at_s, f"{end.provider}: {end.lease} preempted") for end in preemptions),
        svg.bottom_axis(upper, [(v, "") for v, _ in svg.time_ticks(summary.wall_s, 12)]),
        svg.bottom_axis(lower, svg.time_ticks(summary.wall_s, 12), svg.time_title(summary.wall_s)),
    )


def success(summary: Summary) -> Markup | None:
    """Success rate by step with a band of one standard error."""
    rated = [
        (step.step, step.success_rate, step.standard_error or 0.0)
        for step in summary.steps
        if step.success_rate is not None
    ]
    if not rated:
        return None
    first, last = rated[0], rated[-1]
    plot = svg.panel(LEFT, 34, HALF_WIDTH - LEFT - 44, 170, (first[0], last[0]), (0.0, 1.0))
    _, step = svg.nice_ceiling(last[0] - first[0], 6)
    ticks = [v for v in svg.spaced(last[0], max(1.0, step)) if v >= first[0]] or [first[0]]
    ends = [first] if len(rated) == 1 else [first, last]
    return svg.drawing(
        HALF_WIDTH,
        250,
        "Success rate by training step",
        svg.left_axis(plot, [(v, f"{100 * v:.0f}") for v in (0.0, 0.25, 0.5, 0.75, 1.0)], "success, %"),
        svg.band(plot, [(x, max(0.0, y - se), min(1.0, y + se)) for x, y, se in rated], "band"),
        svg.line(plot, [(x, y) for x, y, _ in rated], "line"),
        *(tag("circle", cx=plot.x(x), cy=plot.y(y), r=3.5, class_="dot") for x, y, _ in ends),
        svg.text(plot.x(first[0]) + 4, plot.y(first[1]) + 20, f"{100 * first[1]:.0f} %", "value")
        if len(ends) > 1
        else Markup(),
        svg.text(plot.x(last[0]) + 8, plot.y(last[1]) + 4, f"{100 * last[1]:.0f} %", "value"),
        svg.bottom_axis(plot, [(v, f"{v:g}") for v in ticks], "training step"),
    )


def cost(summary: Summary) -> Markup | None:
    """Cost so far, stacked by provider over time, each provider's sum at its end."""
    history = summary.timeline
    if not history.providers or summary.total.usd <= 0:
        return None
    classes = provider_classes(list(summary.providers))
    names = [name for name in summary.providers if name in history.providers and summary.providers[name].usd > 0]
    layers = [history.providers[name].usd for name in names]
    high, step = svg.nice_ceiling(_peak(layers))
    plot = svg.panel(LEFT, 34, HALF_WIDTH - LEFT - 124, 170, (0.0, summary.wall_s), (0.0, high))
    return svg.drawing(
        HALF_WIDTH,
        250,
        "Cost by provider over time",
        svg.left_axis(plot, [(v, _dollars(v, step)) for v in svg.spaced(high, step)], "cost so far, $"),
        _stack(plot, history.edges_s, layers, [f"area {classes[name]}" for name in names]),
        _end_labels(
            plot, layers, [f"{units.shortened(name, 10)} {units.usd(summary.providers[name].usd)}" for name in names]
        ),
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
    high, step = svg.nice_ceiling(max(values.counts))
    plot = svg.panel(LEFT, 78, HALF_WIDTH - LEFT - 16, 126, (edges[0], edges[-1]), (0.0, high))
    plot = svg.Panel(svg.logarithmic(plot.x), plot.y)
    marks = (("p50", quantiles.p50), ("p95", quantiles.p95), ("p99", quantiles.p99))
    return svg.drawing(
        HALF_WIDTH,
        250,
        what,
        svg.left_axis(plot, [(v, units.si(v)) for v in svg.spaced(high, max(1.0, step))], counted),
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
    note = svg.text(left, bottom + 52, f"and {hidden:,} more workers", "tick") if hidden else Markup()
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
        tag("rect", x=plot.x(start), y=y, width=max(0.5, plot.x(end) - plot.x(start)), height=height, class_=kind)
        for start, end, kind in spans
        if end > start
    ]
    if lane.cause == EndCause.PREEMPTED:
        parts.append(tag("path", d=_triangle(plot.x(closed_s), y + height), class_="event-mark"))
    words = f"{lane.worker}: {units.duration(closed_s - lane.opened_s)} {lane.cause.replace('_', ' ')}".rstrip()
    return tag("g", tag("title", words), *parts)


def staleness(summary: Summary) -> Markup | None:
    """Trained tokens by how many versions older than the trainer they were."""
    ages, total = summary.batches.trained_tokens_by_age, summary.batches.trained_tokens
    if not total:
        return None
    count = max(ages) + 1
    plot = svg.panel(LEFT, 34, HALF_WIDTH - LEFT - 16, 170, (-0.5, count - 0.5), (0.0, 1.0))
    bars = [
        tag(
            "rect",
            tag("title", f"{age} versions: {tokens:,} tokens"),
            x=plot.x(age - 0.36),
            y=plot.y(tokens / total),
            width=plot.x(age + 0.36) - plot.x(age - 0.36),
            height=plot.y.start - plot.y(tokens / total),
            class_="bar",
        )
        for age, tokens in ages.items()
    ]
    return svg.drawing(
        HALF_WIDTH,
        250,
        "Staleness of trained tokens",
        svg.left_axis(plot, [(v, f"{100 * v:.0f}") for v in (0.0, 0.25, 0.5, 0.75, 1.0)], "trained tokens, %"),
        *bars,
        svg.bottom_axis(plot, [(age, str(age)) for age in range(count)], "versions behind the trainer"),
    )


def weight_times(summary: Summary) -> Markup | None:
    """Draw where a version's time goes until workers serve it, above its size relative to all weights."""
    versions = summary.weights.versions
    if not versions:
        return None
    stacked = [[1000 * times_s[part] for times_s in _version_times_s(summary.weights)] for part in PARTS]
    first, last = versions[0].version, versions[-1].version
    edges = [version.version - 0.5 for version in versions] + [last + 0.5]
    width, span = FULL_WIDTH - LEFT - 12, (first - 0.5, last + 0.5)
    top_high, top_step = svg.nice_ceiling(_peak(stacked))
    low_high, low_step = svg.nice_ceiling(100 * max(version.over_full for version in versions))
    upper = svg.panel(LEFT, 58, width, 150, span, (0.0, top_high))
    lower = svg.panel(LEFT, 262, width, 80, span, (0.0, low_high))
    _, step = svg.nice_ceiling(last - first, 12)
    ticks = [(v, f"{v:g}") for v in svg.spaced(last, max(1.0, step)) if v >= first]
    return svg.drawing(
        FULL_WIDTH,
        388,
        "Time and bytes of weight updates by version",
        svg.legend(LEFT, 16, [(f"area part-{part}", part) for part in PARTS]),
        svg.left_axis(upper, [(v, units.si(v)) for v in svg.spaced(top_high, top_step)], "time, ms"),
        _stack(upper, edges, stacked, [f"area part-{part}" for part in PARTS]),
        svg.left_axis(lower, [(v, f"{v:g}") for v in svg.spaced(low_high, low_step)], "bytes, % of all weights'"),
        _stack(lower, edges, [[100 * version.over_full for version in versions]], ["area part-wire"]),
        svg.bottom_axis(upper, [(v, "") for v, _ in ticks]),
        svg.bottom_axis(lower, ticks, "version"),
    )


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
    points: list[tuple[int, float, float, float]] = []
    for v in summary.weights.versions:
        layers = [share for layer, share in v.changed_by_layer.items() if layer.isdecimal()] or [v.changed]
        points.append((v.version, v.changed, min(layers), max(layers)))
    return _changed(points, "Changed elements by version", "version")


def changed_by_layer(summary: Summary) -> Markup | None:
    """The share of elements that changed, by layer: mean over versions, with a band (ROSE Fig. 6)."""
    shares = {layer: summary.weights.changed_of(layer) for layer in summary.weights.layers if layer.isdecimal()}
    points = [(int(layer), sum(values) / len(values), min(values), max(values)) for layer, values in shares.items()]
    return _changed(points, "Changed elements by layer", "layer")


def _changed(points: Sequence[tuple[int, float, float, float]], what: str, over: str) -> Markup | None:
    if not points:
        return None
    first, last = points[0][0], points[-1][0]
    high, step = svg.nice_ceiling(100 * max(most for _, _, _, most in points))
    plot = svg.panel(LEFT, 34, HALF_WIDTH - LEFT - 24, 170, (first, last), (0.0, min(high, 100.0)))
    _, every = svg.nice_ceiling(last - first, 6)
    ticks = [v for v in svg.spaced(last, max(1.0, every)) if v >= first]
    ends = [points[0]] if len(points) == 1 else [points[0], points[-1]]
    return svg.drawing(
        HALF_WIDTH,
        250,
        what,
        svg.left_axis(plot, [(v, f"{v:g}") for v in svg.spaced(min(high, 100.0), step)], "changed elements, %"),
        svg.band(plot, [(x, 100 * least, 100 * most) for x, _, least, most in points], "band"),
        svg.line(plot, [(x, 100 * share) for x, share, _, _ in points], "line"),
        *(tag("circle", cx=plot.x(x), cy=plot.y(100 * share), r=3.5, class_="dot") for x, share, _, _ in ends),
        svg.bottom_axis(plot, [(v, f"{v:g}") for v in ticks], over),
    )


def _peak(layers: Sequence[Sequence[float]]) -> float:
    return max(map(sum, zip(*layers, strict=True)), default=0.0)


def _stack(
    plot: svg.Panel, edges: Sequence[float], layers: Sequence[Sequence[float]], classes: Sequence[str]
) -> Markup:
    """Stack layers, without layers that are zero throughout."""
    areas: list[Markup] = []
    low = [0.0] * (len(edges) - 1)
    for values, class_ in zip(layers, classes, strict=True):
        high = [a + b for a, b in zip(low, values, strict=True)]
        if any(values):
            areas.append(svg.step_area(plot, edges, low, high, class_))
        low = high
    return tag("g", *areas)


def _preemption(upper: svg.Panel, lower: svg.Panel, at_s: float, words: str) -> Markup:
    x, y = lower.x(at_s), lower.y.end - 2
    return tag(
        "g",
        tag("title", f"{words} at {units.duration(at_s)}"),
        tag("line", x1=x, x2=x, y1=upper.y.end, y2=lower.y.start, class_="event"),
        tag("path", d=_triangle(x, y), class_="event-mark"),
    )


def _preemption_legend(right: float, y: float) -> Markup:
    words = "preemption"
    x = right - svg.text_width(words)
    return tag("g", tag("path", d=_triangle(x - 10, y), class_="event-mark"), svg.text(x, y, words))


def _triangle(x: float, y: float) -> str:
    return f"M{x - 4.5:.1f},{y - 8:.1f}h9l-4.5,8z"


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
    return tag("g", *parts)


def _account_bar(scale: svg.Scale, y: float, name: str, usage: Usage) -> Markup:
    parts = [svg.text(scale.start - 12, y + 18, units.shortened(name, 14), "value", "end")]
    x = 0.0
    for account in (a for family in ACCOUNT_FAMILIES.values() for a in family):
        share = usage.accounts_s.get(account, 0.0) / usage.gpu_s
        if share > 0:
            parts.append(_segment(scale, x, share, y, account, usage.accounts_s[account]))
        x += share
    note = f"{units.duration(usage.gpu_s)} · {units.share(usage.overhead_share)} overhead"
    return tag("g", *parts, svg.text(scale.end + 12, y + 18, note))


def _segment(scale: svg.Scale, start: float, share: float, y: float, account: Account, spent_s: float) -> Markup:
    left, width = scale(start), scale(start + share) - scale(start)
    label = f"{account} {100 * share:.0f} %"
    fits = svg.text_width(label) + 12 < width
    return tag(
        "g",
        tag("title", f"{account}: {units.duration(spent_s)} GPU time, {units.share(share)}"),
        tag("rect", x=left, y=y, width=width, height=26, class_=f"segment account-{account}"),
        svg.text(left + width / 2, y + 17, label, f"on-{account}", "middle") if fits else None,
    )


def _account_legend(x: float, y: float, used: set[str]) -> Markup:
    rows = []
    for family, members in ACCOUNT_FAMILIES.items():
        shown = [(f"segment account-{account}", account.value) for account in members if account in used]
        if shown:
            rows += [svg.text(x - 12, y, family, "unit", "end"), svg.legend(x, y, shown)]
            y += 20
    return join(rows)


def _bar(plot: svg.Panel, start: float, end: float, number: int, counted: str) -> Markup:
    left, width = plot.x(start), plot.x(end) - plot.x(start)
    return tag(
        "rect",
        tag("title", f"{units.duration(start)} – {units.duration(end)}: {number:,} {counted}"),
        x=left + 0.5,
        y=plot.y(number),
        width=max(1.0, width - 1),
        height=plot.y.start - plot.y(number),
        class_="bar",
    )


def _quantile(plot: svg.Panel, value: float, y: float) -> Markup:
    return tag("line", x1=plot.x(value), x2=plot.x(value), y1=y - 8, y2=plot.y.start, class_="event")


def _quantile_name(plot: svg.Panel, value: float, name: str, y: float) -> Markup:
    x, words = plot.x(value), f"{name} {units.duration(value)}"
    before = x + 6 + svg.text_width(words) > HALF_WIDTH
    return svg.text(x - 6 if before else x + 6, y, words, "value", "end" if before else "start")
