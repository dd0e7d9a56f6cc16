"""What many jobs on one pool cost and how they fared: a summary, its tables as text, and a page with lanes by node."""

from collections.abc import Sequence
from importlib.resources import files

import msgspec

from elastic.cluster.types import DeviceAccount
from elastic.report import charts, svg, units
from elastic.report.markup import Markup, tag

LANES_MAX = 40
LEGEND_MAX = 6
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
    lanes = tag(
        "figure",
        tag("h2", "Turns by node"),
        tag("div", node_lanes(slices, LANES_S), class_="picture"),
        tag(
            "figcaption",
            "Each bar is a turn: one job computes on a node at a time, in one colour a job. Gaps are bubbles, which "
            "the group pays for. Shown are the first hours; later cycles look the same.",
        ),
    )
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
                tag("h1", f"{len(report.jobs)} jobs on one pool, placed by {report.policy}"),
                _headline(report),
                lanes,
                _jobs_table(report),
                _groups_table(report),
                _nodes_table(report),
            ),
        ),
        lang="en",
    )
    return f"<!DOCTYPE html>\n{page}\n"


def _headline(report: PoolReport) -> Markup:
    saved = 1 - report.usd / report.usd_alone if report.usd_alone else 0.0
    idle = [f"{share:.0%} {phase}" for phase, share in report.idle_share.items()]
    figures = (
        ("Cost", f"${report.usd:,.0f}", f"${report.usd_per_hour:,.2f} an hour, for {report.hours:,.1f} h"),
        ("Against alone", f"−{saved:.0%}" if saved >= 0 else f"+{-saved:.0%}", f"alone ${report.usd_alone:,.0f}"),
        ("Within their SLO", f"{report.slo_met_share:.0%}", f"{report.rejected} rejected"),
        ("Bubbles", idle[-1] if idle else "–", ", ".join(["idle share of groups' nodes", *idle[:-1]])),
        ("Moves", str(report.moves), "a restart each"),
    )
    cells = [
        tag("div", tag("dt", name), tag("dd", tag("b", value), tag("span", note))) for name, value, note in figures
    ]
    return tag("dl", *cells, class_="headline")


def _table(title: str, note: str, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Markup:
    head = tag("thead", tag("tr", *(tag("th", each) for each in heads)))
    body = tag("tbody", *(tag("tr", *(tag("td", each) for each in row)) for row in rows))
    table = tag("div", tag("table", head, body), class_="scroll")
    return tag("section", tag("h2", title), table, tag("p", note, class_="note"))


def _jobs_table(report: PoolReport) -> Markup:
    rows = [
        (
            job.name,
            job.state if job.met else f"{job.state}: {job.reason}",
            job.how,
            f"{job.steps:,}",
            f"{job.slo:.2f} ×",
            _times(job.planned_slowdown),
            _times(job.slowdown),
            str(job.moves),
            f"${job.usd:,.2f}",
            f"${job.usd_alone:,.2f}",
        )
        for job in report.jobs
    ]
    heads = ("Job", "State", "Admitted", "Steps", "SLO", "Planned", "Actual", "Moves", "Bill", "Alone")
    note = (
        "Planned: its time over that of its steps alone as they were planned, which the SLO bounds. Actual: over what "
        "these steps would have taken alone. The bill is its slices and switches, and a part of its group's bubbles."
    )
    return _table("Jobs", note, heads, rows)


def _groups_table(report: PoolReport) -> Markup:
    rows = [
        (
            str(each["group"]),
            f"{float(each['cycle_s']):,.1f} s",
            f"{float(each['limit_s']):,.1f} s",
            str(each["members"]),
        )
        for each in report.cycles
    ]
    note = "As planned when the last job had joined: a cycle has one turn of each member in each phase."
    return _table("Groups", note, ("Group", "Cycle", "Longest that all bear", "Members, in their order"), rows)


def _nodes_table(report: PoolReport) -> Markup:
    rows = [
        (
            node.name,
            *(f"{share:.1%}" for share in (node.slice_share, node.switching_share, node.idle_share, node.down_share)),
        )
        for node in report.nodes
    ]
    note = "Of the time in which a node was of a group; the rest is the pool's own."
    return _table("Nodes", note, ("Node", "Slices", "Switching", "Idle", "Down"), rows)


def node_lanes(slices: Sequence[NodeSlice], until_s: float) -> Markup:
    """Each node's slices over one time axis; one colour a job, as far as there are colours."""
    shown = [each for each in slices if each.begun_s < until_s]
    nodes = sorted({each.node for each in shown})[:LANES_MAX]
    classes = charts.provider_classes(list(dict.fromkeys(each.job for each in shown)))
    left, top, pitch = 110, 34, 16
    bottom = top + pitch * max(1, len(nodes))
    high_s = min(until_s, max((each.ended_s for each in shown), default=1.0))
    plot = svg.panel(left, top, charts.FULL_WIDTH - left - 12, bottom - top, (0.0, high_s), (0.0, 1.0))
    named = [(f"area {kind}", units.shortened(job, 14)) for job, kind in classes.items()][:LEGEND_MAX]
    rows: list[Markup] = [svg.legend(left, 16, named)]
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
