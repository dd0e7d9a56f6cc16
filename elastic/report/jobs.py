"""What many jobs on one pool cost and how they fared: a summary, its tables as text, and a page with lanes by node."""

from collections.abc import Sequence
from importlib.resources import files

import msgspec

from elastic.cluster.types import DeviceAccount
from elastic.report import charts, svg, units
from elastic.report.markup import Markup, tag

LANES_MAX = 40
LANES_S = 7200.0
"""How much of the beginning lanes show: later cycles look the same."""


class PooledJob(msgspec.Struct, frozen=True, kw_only=True):
    """One job. `planned_slowdown` is over its planned solo time, `slowdown` over what its steps alone would have taken;
    both count the time from its first step to its last. None where it took no step."""

    name: str
    state: str
    reason: str
    how: str
    steps: int
    slo: float
    planned_slowdown: float | None
    slowdown: float | None
    met: bool
    moves: int
    usd: float
    usd_alone: float


class PooledNode(msgspec.Struct, frozen=True, kw_only=True):
    """Where a node's time went while it was of a group."""

    name: str
    phase: str
    slice_share: float
    switching_share: float
    idle_share: float
    down_share: float


class NodeSlice(msgspec.Struct, frozen=True):
    node: str
    job: str
    begun_s: float
    ended_s: float


class PoolReport(msgspec.Struct, frozen=True, kw_only=True):
    """`usd` is the cost of all groups' nodes, `usd_unbilled` the part of it that no job is billed. `cycles` are those
    of the groups as planned when the last job joined.
    """

    policy: str
    hours: float
    usd: float
    usd_per_hour: float
    usd_unbilled: float
    usd_alone: float
    slo_met_share: float
    rejected: int
    moves: int
    idle_share: dict[str, float]
    admissions: dict[str, int]
    cycles: list[dict[str, float | str]]
    jobs: list[PooledJob]
    nodes: list[PooledNode]


def as_text(report: PoolReport) -> str:
    """Tables that are legible without colour."""
    head = (
        f"{report.policy}: {len(report.jobs)} jobs in {report.hours:,.1f} h, ${report.usd:,.2f} "
        f"(${report.usd_per_hour:,.2f} an hour; alone ${report.usd_alone:,.2f}), "
        f"{report.slo_met_share:.1%} within their SLO, {report.rejected} rejected, {report.moves} moves"
    )
    idle = ", ".join(f"{phase} {share:.1%}" for phase, share in report.idle_share.items())
    lines = [head, f"bubbles (idle share of groups' nodes): {idle}", ""]
    lines.append(
        f"{'job':<16} {'state':<10} {'how':<7} {'steps':>6} {'SLO':>6} {'planned':>8} {'actual':>8} {'moves':>5} "
        f"{'$':>10} {'$ alone':>10}"
    )
    for job in report.jobs:
        planned, actual = _times(job.planned_slowdown), _times(job.slowdown)
        lines.append(
            f"{job.name:<16} {job.state:<10} {job.how:<7} {job.steps:>6} {job.slo:>6.2f} {planned:>8} {actual:>8} "
            f"{job.moves:>5} {job.usd:>10,.2f} {job.usd_alone:>10,.2f}" + (f"  {job.reason}" if not job.met else "")
        )
    if report.cycles:
        lines += ["", f"{'group':<12} {'cycle, s':>10} {'bound by':>10}  members"]
        for cycle in report.cycles:
            lines.append(
                f"{cycle['group']:<12} {cycle['cycle_s']:>10,.1f} {cycle['limit_s']:>10,.1f}  {cycle['members']}"
            )
    return "\n".join(lines)


def _times(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f} ×"


def as_page(report: PoolReport, slices: Sequence[NodeSlice]) -> str:
    """One HTML page with the lanes of the first hours, in the style of a run's report."""
    style = files("elastic.report").joinpath("report.css").read_text(encoding="utf-8")
    picture = node_lanes(slices, LANES_S)
    page = tag(
        "html",
        tag(
            "head",
            tag("meta", charset="utf-8"),
            tag("meta", name="color-scheme", content="light dark"),
            tag("title", f"{report.policy}: many jobs"),
            tag("style", Markup(style)),
        ),
        tag(
            "body",
            tag(
                "main",
                tag("h1", f"{len(report.jobs)} jobs, placed by {report.policy}"),
                tag("figure", tag("h2", "Turns by node"), tag("div", picture, class_="picture")),
                tag("pre", as_text(report)),
            ),
        ),
        lang="en",
    )
    return f"<!DOCTYPE html>\n{page}\n"


def node_lanes(slices: Sequence[NodeSlice], until_s: float) -> Markup:
    """Each node's slices over one time axis; one colour a job, as far as there are colours."""
    shown = [each for each in slices if each.begun_s < until_s]
    nodes = sorted({each.node for each in shown})[:LANES_MAX]
    classes = charts.provider_classes(list(dict.fromkeys(each.job for each in shown)))
    left, top, pitch = 110, 12, 16
    bottom = top + pitch * max(1, len(nodes))
    high_s = min(until_s, max((each.ended_s for each in shown), default=1.0))
    plot = svg.panel(left, top, charts.FULL_WIDTH - left - 12, bottom - top, (0.0, high_s), (0.0, 1.0))
    rows: list[Markup] = []
    for i, node in enumerate(nodes):
        y = top + pitch * i
        rows.append(svg.text(left - 12, y + 11, units.shortened(node, 14), "value", "end"))
        for each in shown:
            if each.node == node and each.ended_s > each.begun_s:
                width = max(0.5, plot.x(min(each.ended_s, high_s)) - plot.x(each.begun_s))
                words = f"{each.job}: {units.duration(each.ended_s - each.begun_s)}"
                bar = tag(
                    "rect",
                    tag("title", words),
                    x=plot.x(each.begun_s),
                    y=y,
                    width=width,
                    height=pitch - 3,
                    class_=f"area {classes[each.job]}",
                )
                rows.append(bar)
    axis = svg.bottom_axis(plot, svg.time_ticks(high_s, 12), svg.time_title(high_s))
    return svg.drawing(charts.FULL_WIDTH, bottom + 46, "Turns by node", *rows, axis)


def shares(accounts_ns: dict[DeviceAccount, int], whole_ns: int) -> dict[str, float]:
    """Each account's share of a time, all of them named."""
    return {account.value: accounts_ns.get(account, 0) / whole_ns if whole_ns else 0.0 for account in DeviceAccount}
