"""The report's pictures, each a function of the summary; None where the run left nothing to draw."""

from collections.abc import Mapping, Sequence
from statistics import mean
from typing import NamedTuple

from elastic.core.types import Account, EndCause
from elastic.report import svg, units
from elastic.report.lanes import WorkerLane
from elastic.report.summary import Histogram, Quantiles, Summary
from elastic.report.usage import Usage
from elastic.report.weights import PARTS, WeightUpdates, mean_split_s

FULL_WIDTH = 984
HALF_WIDTH = 476
LEFT = 52
LANES_LEFT = 110
KNOWN_PROVIDERS = ("trainer", "reserved", "serving", "spot", "serverless", "ray")
"""Providers with colours of their own. The name of any other says which of the colours that remain it has."""
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


class Percent(NamedTuple):
    """A share in per cent at `x`, between the `least` and the `most` that it may be."""

    x: int
    share: float
    least: float
    most: float


def provider_classes(names: Sequence[str]) -> dict[str, str]:
    """The style sheet's colour class of each provider.

    A name has the same colour in every report, unless another one there has it already: then the next that is free.
    """
    slots = {name: place for place, name in enumerate(KNOWN_PROVIDERS) if name in names}
    spare = range(len(KNOWN_PROVIDERS), COLOURS)
    for name in sorted({*names} - slots.keys()):
        first = fnv1a(name) % len(spare)
        wished = [*spare[first:], *spare[:first], *range(len(KNOWN_PROVIDERS))]
        slots[name] = next((slot for slot in wished if slot not in slots.values()), wished[0])
    return {name: f"provider-{slots[name]}" for name in names}


def fnv1a(text: str) -> int:
    """A hash of 32 bits that the server's page computes, too (`providerColours`)."""
    found = 0x811C9DC5
    for byte in text.encode():
        found = (found ^ byte) * 0x01000193 & 0xFFFFFFFF
    return found


def elasticity(summary: Summary) -> svg.Picture | None:
    """Rollout throughput above workers, by provider over one time axis, preemptions marked (RLBoost Fig. 8)."""
    history = summary.timeline
    if not history.providers:
        return None
    classes = provider_classes(list(summary.providers))
    series = {name: history.providers[name] for name in summary.providers if name in history.providers}
    levels = [level for one in series.values() for level in (one.up_workers, one.booting_workers)]
    of_levels = [f"{kind} {classes[name]}" for name in series for kind in ("area", "area faint")]
    areas = {name: f"area {classes[name]}" for name in series}
    throughput = [one.tokens_per_s for one in series.values()]
    x = svg.Scale(0.0, summary.wall_s, LEFT, FULL_WIDTH - 12)
    preempted = [end for end in summary.lease_ends if end.cause == EndCause.PREEMPTED]
    legend = [(class_, units.shortened(name, 14)) for name, class_ in areas.items()]
    return svg.Plots(
        label="Rollout throughput and workers by provider over time",
        width=FULL_WIDTH,
        plots=[
            _stacked("accepted tokens/s", x, 248, 190, history.step_edges_s, throughput, list(areas.values())),
            _stacked("workers", x, 410, 110, history.edges_s, levels, of_levels, least_step=1.0),
        ],
        ticks=svg.time_ticks(summary.wall_s, 12),
        title=svg.time_title(summary.wall_s),
        legend=[*legend, ("event-mark", "preemption")] if preempted else legend,
        events=[
            (end.at_s, f"{end.provider}: {end.lease} preempted at {units.duration(end.at_s)}") for end in preempted
        ],
    )


def _stacked(
    title: str,
    x: svg.Scale,
    bottom: float,
    height: float,
    edges: Sequence[float],
    layers: Sequence[Sequence[float]],
    classes: Sequence[str],
    least_step: float = 0.0,
    labels: Sequence[str] = (),
) -> svg.Plot:
    """Quantities that add up, as step functions with values between `edges`; at their ends their `labels`."""
    peak = max((sum(values) for values in zip(*layers, strict=True)), default=0.0)
    levels = svg.ticks_to(peak, units.si, least_step)
    y = svg.Scale(0.0, levels[-1][0], bottom, bottom - height)
    areas = svg.stack(x, y, edges, layers, classes)
    return svg.Plot(x=x, y=y, levels=levels, title=title, paths=areas, labels=_end_labels(x, y, layers, labels))


def _end_labels(
    x: svg.Scale, y: svg.Scale, layers: Sequence[Sequence[float]], labels: Sequence[str]
) -> list[svg.Label]:
    """Names beside the middle of each layer's end, pushed up where they would touch."""
    found: list[svg.Label] = []
    low, free_y = 0.0, y.start + 4.0
    for values, words in zip(layers, labels, strict=False):
        free_y = min(free_y, y(low + values[-1] / 2) + 4)
        found.append(svg.Label(x.end + 8, free_y, words))
        low, free_y = low + values[-1], free_y - 16
    return found


def _half_scales(low: float, high: float, top: float, right: float = 16, log: bool = False) -> list[svg.Scale]:
    """Those of a plot of half the page's width, over values from `low` to `high` and from 0 to `top`."""
    return [svg.Scale(low, high, LEFT, HALF_WIDTH - right, log), svg.Scale(0.0, top, 204, 78 if log else 34)]


def success(summary: Summary) -> svg.Picture | None:
    """Success rate by step with a band of one standard error."""
    points: list[Percent] = []
    for step in summary.steps:
        if (rate := step.success_rate) is not None:
            error = step.standard_error or 0.0
            points.append(_percent(step.step, rate, max(0.0, rate - error), min(1.0, rate + error)))
    return _trend(points, PERCENT, "Success rate by training step", "success, %", "training step")


def _percent(x: int, share: float, least: float, most: float) -> Percent:
    return Percent(x, 100 * share, 100 * least, 100 * most)


def _trend(points: Sequence[Percent], levels: svg.Ticks, label: str, quantity: str, over: str) -> svg.Picture | None:
    """A line through the points in their band, with the values at its ends."""
    if not points:
        return None
    first, last = points[0], points[-1]
    x, y = _half_scales(first.x, last.x, levels[-1][0], right=58)
    there = svg.path(x, y, ((point.x, point.most) for point in points))
    back = svg.path(x, y, ((point.x, point.least) for point in reversed(points)))
    line = svg.path(x, y, ((point.x, point.share) for point in points))
    labels = [svg.Label(x(last.x) + 8, y(last.share) + 4, f"{last.share:.3g} %")]
    if first is not last:
        labels.append(svg.Label(x(first.x) + 4, min(y(first.share) + 20, y.start - 6), f"{first.share:.3g} %"))
    plot = svg.Plot(
        x=x,
        y=y,
        levels=levels,
        title=quantity,
        paths=[(f"M{there}L{back}Z", "band"), (f"M{line}", "line")],
        dots=[(end.x, end.share) for end in {first, last}],
        labels=labels,
    )
    ticks = svg.whole_ticks(first.x, last.x, 6)
    return svg.Plots(label=label, width=HALF_WIDTH, plots=[plot], ticks=ticks, title=over)


def cost(summary: Summary) -> svg.Picture | None:
    """Cost so far, stacked by provider over time, each provider's sum at its end."""
    history = summary.timeline
    if not history.providers or summary.total.usd <= 0:
        return None
    classes = provider_classes(list(summary.providers))
    names = [name for name in summary.providers if name in history.providers and summary.providers[name].usd > 0]
    plot = _stacked(
        "cost so far, $",
        svg.Scale(0.0, summary.wall_s, LEFT, HALF_WIDTH - 124),
        204,
        170,
        history.edges_s,
        [history.providers[name].usd for name in names],
        [f"area {classes[name]}" for name in names],
        labels=[f"{units.shortened(name, 10)} {units.usd(summary.providers[name].usd)}" for name in names],
    )
    return svg.Plots(
        label="Cost by provider over time",
        width=HALF_WIDTH,
        plots=[plot],
        ticks=svg.time_ticks(summary.wall_s, 5),
        title=svg.time_title(summary.wall_s),
    )


def accounts(summary: Summary) -> svg.Picture | None:
    """Where each provider's GPU time went: one bar per provider, as shares of its own time."""
    bars = {name: usage for name, usage in summary.providers.items() if usage.gpu_s > 0}
    if not bars:
        return None
    if len(bars) > 1:
        bars["all"] = summary.total
    scale = svg.Scale(0.0, 1.0, LANES_LEFT, FULL_WIDTH - 208)
    used = {account for account, spent_s in summary.total.accounts_s.items() if spent_s > 0}
    legends = {
        family: [(f"segment account-{account}", account.value) for account in members if account in used]
        for family, members in ACCOUNT_FAMILIES.items()
    }
    return svg.Lanes(
        label="GPU time by account and provider",
        width=FULL_WIDTH,
        x=scale,
        rows=[_account_bar(scale, name, usage) for name, usage in bars.items()],
        pitch=38,
        height=26,
        legends=[(family, entries) for family, entries in legends.items() if entries],
    )


def _account_bar(scale: svg.Scale, name: str, usage: Usage) -> svg.LaneRow:
    spans: list[svg.Span] = []
    x = 0.0
    for account in (a for family in ACCOUNT_FAMILIES.values() for a in family):
        spent_s = usage.accounts_s.get(account, 0.0)
        share = spent_s / usage.gpu_s
        if share > 0:
            words = f"{account} {100 * share:.0f} %"
            fits = svg.text_width(words) + 12 < scale(x + share) - scale(x)
            title = f"{account}: {units.duration(spent_s)} GPU time, {units.share(share)}"
            spans.append(svg.Span(x, x + share, f"segment account-{account}", title, words if fits else ""))
        x += share
    note = f"{units.duration(usage.gpu_s)} · {units.share(usage.overhead_share)} overhead"
    return svg.LaneRow(name=units.shortened(name, 14), spans=spans, note=note)


def latency(quantiles: Quantiles, values: Histogram, what: str, counted: str = "turns") -> svg.Picture | None:
    """A distribution over a logarithmic time axis, with its median and tail marked."""
    marks = {"p50": quantiles.p50, "p95": quantiles.p95, "p99": quantiles.p99}
    known = {name: value for name, value in marks.items() if value is not None}
    if not values.counts or not known:
        return None
    edges = values.edges_s
    levels = svg.ticks_to(max(values.counts), units.si, least_step=1.0)
    x, y = _half_scales(edges[0], edges[-1], levels[-1][0], log=True)
    bars = [
        svg.Bar(start, end, count, f"{units.duration(start)} – {units.duration(end)}: {count:,} {counted}")
        for start, end, count in zip(edges, edges[1:], values.counts, strict=False)
        if count > 0
    ]
    rules = [(value, f"{name} {units.duration(value)}") for name, value in known.items()]
    plot = svg.Plot(x=x, y=y, levels=levels, title=counted, bars=bars, rules=rules)
    ticks = [(v, units.duration(v)) for v in svg.log_ticks(edges[0], edges[-1], 6)]
    return svg.Plots(label=what, width=HALF_WIDTH, plots=[plot], ticks=ticks, title=what)


def lanes(summary: Summary) -> svg.Picture | None:
    """Every worker's lifetime, by provider over one time axis."""
    order = list(summary.providers)
    shown = sorted(summary.lanes, key=lambda lane: order.index(lane.provider))[:MOST_LANES]
    if not shown:
        return None
    classes = provider_classes(order)
    rows = [_lane(lane, classes[lane.provider], before) for lane, before in zip(shown, [None, *shown], strict=False)]
    hidden = len(summary.lanes) - len(shown)
    pitch = 16 if len(shown) <= 24 else 9
    return svg.Lanes(
        label="Workers over time",
        width=FULL_WIDTH,
        x=svg.Scale(0.0, summary.wall_s, LANES_LEFT, FULL_WIDTH - 12),
        rows=rows,
        pitch=pitch,
        height=pitch - 3,
        ticks=svg.time_ticks(summary.wall_s, 12),
        axis_title=svg.time_title(summary.wall_s) + (f"; and {hidden:,} more workers" if hidden else ""),
    )


def _lane(lane: WorkerLane, class_: str, before: WorkerLane | None) -> svg.LaneRow:
    """A worker's lane, with its provider's name where the lane `before` is another's."""
    closed_s = lane.closed_s
    ready_s = min(closed_s, closed_s if lane.ready_s is None else lane.ready_s)
    notice_s = max(ready_s, closed_s if lane.notice_s is None else min(closed_s, lane.notice_s))
    spans = (
        svg.Span(lane.opened_s, ready_s, f"area faint {class_}"),
        svg.Span(ready_s, notice_s, f"area {class_}"),
        svg.Span(notice_s, closed_s, f"area notice {class_}"),
    )
    preempted = lane.cause == EndCause.PREEMPTED
    return svg.LaneRow(
        name="" if before and before.provider == lane.provider else units.shortened(lane.provider, 14),
        spans=[span for span in spans if span.end > span.start],
        marks=[svg.Mark(closed_s, "event-mark", "triangle")] if preempted else [],
        title=f"{lane.worker}: {units.duration(closed_s - lane.opened_s)} {lane.cause.replace('_', ' ')}".rstrip(),
    )


def staleness(summary: Summary) -> svg.Picture | None:
    """Trained tokens by how many versions older than the trainer they were."""
    ages, total = summary.batches.trained_tokens_by_age, summary.batches.trained_tokens
    if not total:
        return None
    count = max(ages) + 1
    x, y = _half_scales(-0.5, count - 0.5, 100.0)
    bars = [
        svg.Bar(age - 0.36, age + 0.36, 100 * tokens / total, f"{age} versions: {tokens:,} tokens")
        for age, tokens in ages.items()
    ]
    return svg.Plots(
        label="Staleness of trained tokens",
        width=HALF_WIDTH,
        plots=[svg.Plot(x=x, y=y, levels=PERCENT, title="trained tokens, %", bars=bars)],
        ticks=[(age, str(age)) for age in range(count)],
        title="versions behind the trainer",
    )


def lengths(summary: Summary) -> svg.Picture | None:
    """Mean lengths by step of trajectories that were trained on, and of those that were dropped in vain."""
    steps = summary.batches.lengths
    lines = {
        "trained": ("line", [(step.step, step.trained) for step in steps if step.trained is not None]),
        "dropped": ("line faint", [(step.step, step.dropped) for step in steps if step.dropped is not None]),
    }
    if not all(points for _, points in lines.values()):
        return None
    first, last = steps[0].step, steps[-1].step
    levels = svg.ticks_to(max(length for _, points in lines.values() for _, length in points), units.si)
    x, y = _half_scales(first, last, levels[-1][0], right=76)
    plot = svg.Plot(
        x=x,
        y=y,
        levels=levels,
        title="mean tokens",
        paths=[(f"M{svg.path(x, y, points)}", class_) for class_, points in lines.values()],
        dots=[point for _, points in lines.values() for point in points],
        labels=[svg.Label(x(points[-1][0]) + 8, y(points[-1][1]) + 4, name) for name, (_, points) in lines.items()],
    )
    ticks = svg.whole_ticks(first, last, 6)
    return svg.Plots(label="Lengths by step", width=HALF_WIDTH, plots=[plot], ticks=ticks, title="training step")


def weight_times(summary: Summary) -> svg.Picture | None:
    """Where a version's time goes until workers serve it, above its size relative to all weights."""
    versions = summary.weights.versions
    if not versions:
        return None
    first, last = versions[0].version, versions[-1].version
    x = svg.Scale(first - 0.5, last + 0.5, LEFT, FULL_WIDTH - 12)
    edges = [version.version - 0.5 for version in versions] + [last + 0.5]
    classes = [f"area part-{part}" for part in PARTS]
    by_version = _version_times_s(summary.weights)
    times_ms = [[1000 * times_s[part] for times_s in by_version] for part in PARTS]
    shares = [100 * version.over_full for version in versions]
    return svg.Plots(
        label="Time and bytes of weight updates by version",
        width=FULL_WIDTH,
        plots=[
            _stacked("time, ms", x, 208, 150, edges, times_ms, classes),
            _stacked("bytes, % of all weights'", x, 342, 80, edges, [shares], ["area part-wire"]),
        ],
        ticks=svg.whole_ticks(first, last, 12),
        title="version",
        legend=list(zip(classes, PARTS, strict=True)),
    )


def _version_times_s(weights: WeightUpdates) -> list[dict[str, float]]:
    """Every part's time by version, zero where no worker pulled it."""
    return [
        dict.fromkeys(PARTS, 0.0)
        | {"encode": version.encode_s}
        | mean_split_s([pull for pull in weights.pulls if pull.version == version.version and not pull.first])
        for version in weights.versions
    ]


def changed_by_version(summary: Summary) -> svg.Picture | None:
    """The share of elements that changed, by version, with a band over the layers (ROSE Fig. 11a)."""
    points: list[Percent] = []
    for v in summary.weights.versions:
        layers = [share for layer, share in v.changed_by_layer.items() if layer.isdecimal()] or [v.changed]
        points.append(_percent(v.version, v.changed, min(layers), max(layers)))
    return _changed(points, "version")


def changed_by_layer(summary: Summary) -> svg.Picture | None:
    """The share of elements that changed, by layer: mean over versions, with a band (ROSE Fig. 6)."""
    shares = {layer: summary.weights.changed_of(layer) for layer in summary.weights.layers if layer.isdecimal()}
    points = [_percent(int(layer), mean(found), min(found), max(found)) for layer, found in shares.items()]
    return _changed(points, "layer")


def _changed(points: Sequence[Percent], over: str) -> svg.Picture | None:
    levels = svg.ticks_to(max((point.most for point in points), default=0.0), lambda value: f"{value:g}")
    return _trend(points, levels, f"Changed elements by {over}", "changed elements, %", over)
