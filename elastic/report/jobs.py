"""What many jobs on one pool cost and how they fared: a summary, its tables as text, and a page with lanes by node."""

from collections.abc import Sequence
from importlib.resources import files

import msgspec

from elastic.core.cluster.types import DeviceAccount
from elastic.pool.standing import StoryPart
from elastic.report import charts, svg, units
from elastic.report.markup import Markup, tag

LANES_MAX = 40
LEGEND_MAX = 6
BARS_MAX = 12
MARKS_MAX = 40
LANES_S = 7200.0
"""How much of a simulation's beginning lanes show: later cycles look the same."""
LIVE_LANES_S, CYCLES_SHOWN = 300.0, 12
"""Extent of the lanes of a live pool, as a time and as a number of cycles."""
_GOOD = ("submitted", "profiling", "queued", "placed", "running", "finished")


class PooledJob(msgspec.Struct, frozen=True, kw_only=True):
    """One job. `planned_slowdown` is over its planned solo time, `slowdown` over what its steps alone would have taken;
    both count the time from its first step to its last. None where it took no step.

    - `marginal_usd_per_hour`: what an hour of the pool cost more once it was in; `saved_if_left_usd_per_hour`: what it
      would cost less now without it; `alone_usd_per_hour`: the nodes that it asked for.
    - `phases_s` and `cycle_s` are medians, switching left out of the phases. `switch_share` is of its cycles.
    """

    name: str
    state: str
    reason: str
    how: str
    group: str
    steps: int
    steps_wanted: int
    slo: float
    planned_slowdown: float | None
    slowdown: float | None
    met: bool
    moves: int
    resubmissions: int
    usd: float
    usd_alone: float
    alone_usd_per_hour: float
    marginal_usd_per_hour: float | None
    saved_if_left_usd_per_hour: float
    phases_s: dict[str, float]
    cycle_s: float | None
    switches: int
    switch_s: float
    switch_share: float | None
    story: list[StoryPart]


class PooledNode(msgspec.Struct, frozen=True, kw_only=True):
    """Where a node's time went while it was in a group."""

    name: str
    phase: str
    slice_share: float
    switching_share: float
    idle_share: float
    down_share: float


class NodeSlice(msgspec.Struct, frozen=True):
    """One job on one node for one turn. `switch_s` of it went to resuming and parking; a phase that is not `finished`
    goes on in a later one."""

    node: str
    job: str
    begun_s: float
    ended_s: float
    phase: str = ""
    switch_s: float = 0.0
    finished: bool = True


class PoolMark(msgspec.Struct, frozen=True):
    """Something that went wrong: on a node, with a job, or both."""

    at_s: float
    node: str
    job: str
    what: str


class GroupCycle(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A group's planned cycle, the longest that its members bear, and the median of how long theirs lasted."""

    group: str
    cycle_s: float
    limit_s: float
    members: str
    measured_s: float | None = None


class PoolReport(msgspec.Struct, frozen=True, kw_only=True):
    """`usd` is the cost of all groups' nodes, `usd_unbilled` the part of it that no job is billed, `usd_paid` that of
    all nodes. `cycles` are those of the groups as planned when the last job joined, with how long they lasted.
    """

    policy: str
    name: str
    hours: float
    usd: float
    usd_paid: float
    usd_per_hour: float
    usd_unbilled: float
    usd_alone: float
    slo_met_share: float
    rejected: int
    moves: int
    idle_share: dict[str, float]
    admissions: dict[str, int]
    switches: int
    switch_s: float
    cycles: list[GroupCycle]
    jobs: list[PooledJob]
    nodes: list[PooledNode]
    marks: list[PoolMark]


def as_text(report: PoolReport) -> str:
    """Tables that are legible without colour."""
    alone = f", alone {units.usd(report.usd_alone)}" if report.usd_alone else ""
    head = (
        f"{title(report)}: {units.usd(report.usd)} in {units.duration(report.hours * 3600)} "
        f"({units.usd(report.usd_per_hour)} an hour{alone}), {report.slo_met_share:.1%} within their SLO, "
        f"{report.rejected} rejected, {report.moves} moves"
    )
    idle = ", ".join(f"{phase} {share:.1%}" for phase, share in report.idle_share.items())
    lines = [
        head,
        f"bubbles (idle share of groups' nodes): {idle}",
        f"switches: {report.switches:,} in {units.duration(report.switch_s)}",
    ]
    for heads, rows in (
        (_JOBS, _jobs_rows(report)),
        (_BILLS, _bills_rows(report)),
        (_PHASES, _phases_rows(report)),
        (_GROUPS, _groups_rows(report)),
        (_NODES, _nodes_rows(report)),
    ):
        if rows:
            lines += ["", *_aligned([heads, *rows])]
    if report.marks:
        lines += ["", f"what went wrong ({len(report.marks)}):"]
        lines += [f"{mark.at_s:>10.1f} s  {_where(mark)}: {mark.what}" for mark in report.marks[-MARKS_MAX:]]
    return "\n".join(lines)


def job_text(report: PoolReport, job: PooledJob) -> str:
    """One job of a pool: where it stands, what it pays, how it came there."""
    rows: list[Sequence[str]] = [
        ("job", f"{job.name} on {title(report)}"),
        ("state", f"{job.state}: {job.reason}"),
        *zip((head.lower() for head in _JOBS[2:]), _job_row(job)[2:], strict=True),
        *zip((head.lower() for head in _BILLS[1:]), _bill_row(job)[1:], strict=True),
        *zip((head.lower() for head in _PHASES[1:]), _phase_row(job)[1:], strict=True),
    ]
    lines = _aligned([(f"{name}:", said) for name, said in rows])
    lines += ["", "what became of it:"]
    lines += [f"{part.at_s:>10.1f} s  {part.state}: {part.cause}" for part in job.story]
    lines += [f"{mark.at_s:>10.1f} s  {_where(mark)}: {mark.what}" for mark in report.marks if mark.job == job.name]
    return "\n".join(lines)


def title(report: PoolReport) -> str:
    jobs = f"{len(report.jobs)} {'job' if len(report.jobs) == 1 else 'jobs'}"
    return f"pool {report.name}, {jobs} placed by {report.policy}" if report.name else f"{report.policy}: {jobs}"


def _where(mark: PoolMark) -> str:
    return " on ".join(part for part in (mark.job, mark.node) if part) or "the pool"


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns as wide as they must be; the first one, and words, to the left, numbers to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    left = {0, *(i for i, head in enumerate(rows[0]) if head in _WORDS)} if len(rows[0]) > 2 else {0, 1}

    def cell(i: int, words: str) -> str:
        return words.ljust(widths[i]) if i in left else words.rjust(widths[i])

    return ["  ".join(cell(i, words) for i, words in enumerate(row)).rstrip() for row in rows]


def _times(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f} ×"


_JOBS = ("Job", "State", "Admitted", "Steps", "SLO", "Planned", "Actual", "Moves", "Again", "Group")
_BILLS = ("Job", "Bill", "Alone", "Saved", "Joining, an hour", "Alone, an hour", "Leaving saves, an hour")
_PHASES = ("Job", "Rollout", "Training", "Cycle", "Switches", "Switching", "Of its cycles")
_GROUPS = ("Group", "Cycle, planned", "Lasted", "Longest that all bear", "Members, in their order")
_WORDS = ("State", "Admitted", "Group", "Members, in their order")
_NODES = ("Node", "Slices", "Switching", "Idle", "Down")


def _jobs_rows(report: PoolReport) -> list[Sequence[str]]:
    return [_job_row(job) for job in report.jobs]


def _job_row(job: PooledJob) -> Sequence[str]:
    unmet = job.planned_slowdown is not None and not job.met
    return (
        job.name,
        job.state if job.state in _GOOD else f"{job.state}: {job.reason}",
        job.how or units.NONE,
        f"{job.steps:,}" if job.steps == job.steps_wanted else f"{job.steps:,} of {job.steps_wanted:,}",
        f"{job.slo:.2f} ×",
        _times(job.planned_slowdown) + (" missed" if unmet and job.state in _GOOD else ""),
        _times(job.slowdown),
        str(job.moves),
        str(job.resubmissions),
        job.group or units.NONE,
    )


def _bills_rows(report: PoolReport) -> list[Sequence[str]]:
    return [_bill_row(job) for job in report.jobs]


def _bill_row(job: PooledJob) -> Sequence[str]:
    saved = 1 - job.usd / job.usd_alone if job.usd_alone else None
    more = job.marginal_usd_per_hour
    return (
        job.name,
        units.usd(job.usd),
        units.usd(job.usd_alone),
        units.NONE if saved is None else f"{100 * saved:.0f} %",
        units.NONE if more is None else f"+{units.usd(more)}",
        units.usd(job.alone_usd_per_hour),
        units.usd(job.saved_if_left_usd_per_hour) if job.group else units.NONE,
    )


def _phases_rows(report: PoolReport) -> list[Sequence[str]]:
    return [_phase_row(job) for job in report.jobs]


def _phase_row(job: PooledJob) -> Sequence[str]:
    return (
        job.name,
        units.duration(job.phases_s.get("rollout")),
        units.duration(job.phases_s.get("train")),
        units.duration(job.cycle_s),
        f"{job.switches:,}",
        units.duration(job.switch_s),
        units.share(job.switch_share),
    )


def _groups_rows(report: PoolReport) -> list[Sequence[str]]:
    return [
        (
            each.group,
            units.duration(each.cycle_s),
            units.duration(each.measured_s),
            units.duration(each.limit_s),
            each.members,
        )
        for each in report.cycles
    ]


def _nodes_rows(report: PoolReport) -> list[Sequence[str]]:
    return [
        (
            node.name,
            *(f"{share:.1%}" for share in (node.slice_share, node.switching_share, node.idle_share, node.down_share)),
        )
        for node in report.nodes
    ]


def as_page(report: PoolReport, slices: Sequence[NodeSlice], job: str = "") -> str:
    """One HTML page with every node's turns, in the style of a run's report; of one `job`, with its own in colour."""
    style = files("elastic.report").joinpath("report.css").read_text(encoding="utf-8")
    low_s, high_s = window(report, slices)
    part = (
        ""
        if low_s <= 0 and high_s >= max((each.ended_s for each in slices), default=0.0)
        else (
            " Shown are the last cycles; those before look the same."
            if low_s > 0
            else " Shown are the first hours; later cycles look the same."
        )
    )
    lanes = tag(
        "figure",
        tag("h2", "Turns by node"),
        tag("div", node_lanes(report, slices, low_s, high_s, job), class_="picture full"),
        tag(
            "figcaption",
            "Each bar is a turn: one job computes on a node at a time, in one colour a job. Its pale beginning is "
            "switching: states come to the device and leave it. Grey is nobody's time: bubbles, which the group pays "
            f"for.{part}",
        ),
    )
    named = next((each for each in report.jobs if each.name == job), None)
    heading = f"{job} on pool {report.name}" if named is not None else _heading(report)
    page = tag(
        "html",
        tag(
            "head",
            tag("meta", charset="utf-8"),
            tag("meta", name="color-scheme", content="light dark"),
            tag("title", f"{report.name or report.policy}: {job or 'many jobs'}"),
            tag("style", Markup(style)),
        ),
        tag(
            "body",
            tag(
                "main",
                tag("h1", heading),
                _headline(report) if named is None else _job_headline(named),
                lanes,
                _pictures(report),
                _table("Jobs", _JOBS_NOTE, _JOBS, _jobs_rows(report)),
                _table("Bills", _BILLS_NOTE, _BILLS, _bills_rows(report)),
                _table("Phases and switches", _PHASES_NOTE, _PHASES, _phases_rows(report)),
                _table("Groups", _GROUPS_NOTE, _GROUPS, _groups_rows(report)),
                _table("Nodes", _NODES_NOTE, _NODES, _nodes_rows(report)),
                _marks_table(report, job),
                None if named is None else _story_table(named),
            ),
        ),
        lang="en",
    )
    return f"<!DOCTYPE html>\n{page}\n"


def _heading(report: PoolReport) -> str:
    jobs = f"{len(report.jobs)} {'job' if len(report.jobs) == 1 else 'jobs'}"
    return f"{jobs} on pool {report.name}" if report.name else f"{jobs} on one pool, placed by {report.policy}"


def _headline(report: PoolReport) -> Markup:
    saved = 1 - report.usd / report.usd_alone if report.usd_alone else 0.0
    idle = [f"{share:.0%} {phase}" for phase, share in report.idle_share.items()]
    lasted = units.duration(report.hours * 3600)
    figures = [
        ("Cost", units.usd(report.usd), f"{units.usd(report.usd_per_hour)} an hour, for {lasted}"),
        (
            "Against alone",
            f"−{saved:.0%}" if saved >= 0 else f"+{-saved:.0%}",
            f"each on nodes of its own: {units.usd(report.usd_alone)}",
        ),
        ("Within their SLO", f"{report.slo_met_share:.0%}", f"{report.rejected} rejected"),
        ("Bubbles", idle[-1] if idle else "–", ", ".join(["idle share of groups' nodes", *idle[:-1]])),
        ("Switching", units.duration(report.switch_s), f"{report.switches:,} turns"),
        ("Moves", str(report.moves), f"{len(report.marks)} things went wrong" if report.marks else "a restart each"),
    ]
    return _figures(figures)


def _job_headline(job: PooledJob) -> Markup:
    saved = 1 - job.usd / job.usd_alone if job.usd_alone else None
    against = units.NONE if saved is None else f"−{saved:.0%}" if saved >= 0 else f"+{-saved:.0%}"
    return _figures(
        [
            ("State", job.state, job.reason),
            ("Steps", f"{job.steps:,}", f"of {job.steps_wanted:,}"),
            ("Slowdown", _times(job.planned_slowdown), f"of at most {job.slo:g}; actual {_times(job.slowdown)}"),
            ("Bill", units.usd(job.usd), f"alone {units.usd(job.usd_alone)}"),
            ("Against alone", against, f"{units.usd(job.alone_usd_per_hour)} an hour alone"),
            ("Switching", units.share(job.switch_share), f"of its cycles, in {job.switches:,} turns"),
        ]
    )


def _figures(figures: Sequence[tuple[str, str, str]]) -> Markup:
    cells = [
        tag("div", tag("dt", name), tag("dd", tag("b", value), tag("span", note))) for name, value, note in figures
    ]
    return tag("dl", *cells, class_="headline")


def _table(name: str, note: str, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Markup | None:
    if not rows:
        return None
    head = tag("thead", tag("tr", *(tag("th", each) for each in heads)))
    body = tag("tbody", *(tag("tr", *(tag("td", each) for each in row)) for row in rows))
    table = tag("div", tag("table", head, body), class_="scroll")
    return tag("section", tag("h2", name), table, tag("p", note, class_="note"))


_JOBS_NOTE = (
    "Planned: its time over that of its steps alone as they were planned, which the SLO bounds. Actual: over what "
    "these steps would have taken alone. Moves and resubmissions cost a restart each."
)
_BILLS_NOTE = (
    "A bill is a job's slices and switches, and a part of its group's bubbles in proportion to those that it would "
    "have paid for alone. Joining: by how much the pool cost more an hour once it was in. Leaving saves: what the "
    "pool would cost less without it, as it stands."
)
_PHASES_NOTE = (
    "Medians. A cycle is from one rollout phase to the next; switching is what resuming and parking took, with states "
    "copied between device and host memory."
)
_GROUPS_NOTE = (
    "As planned when the last job had joined: a cycle has one turn of each member in each phase. Lasted: the median "
    "of its members' cycles, whoever was in the group then."
)
_NODES_NOTE = "Of the time in which a node was of a group; the rest is the pool's own."


def _marks_table(report: PoolReport, job: str) -> Markup | None:
    marks = [mark for mark in report.marks if not job or mark.job in ("", job)]
    rows = [(f"{mark.at_s:,.1f} s", mark.node or "–", mark.job or "–", mark.what) for mark in marks[-MARKS_MAX:]]
    note = "Who is killed, lost or fails ends its own turn; what it had done goes on in the next, or from its journal."
    return _table("What went wrong", note, ("After", "Node", "Job", "What"), rows)


def _story_table(job: PooledJob) -> Markup | None:
    rows = [(f"{part.at_s:,.1f} s", part.state, part.cause) for part in job.story]
    return _table("What became of it", "Of a long story the last part is kept.", ("After", "State", "Why"), rows)


def window(report: PoolReport, slices: Sequence[NodeSlice]) -> tuple[float, float]:
    """Return the time span of the lanes: the beginning of a simulated pool, the last cycles of a live one."""
    end_s = max((each.ended_s for each in slices), default=1.0)
    if not report.name:
        return 0.0, min(end_s, LANES_S)
    longest_s = max((job.cycle_s or 0.0 for job in report.jobs), default=0.0)
    first_s = min((each.begun_s for each in slices), default=0.0)
    return max(0.0, first_s - 0.02 * end_s, end_s - max(LIVE_LANES_S, CYCLES_SHOWN * longest_s)), end_s


def node_lanes(report: PoolReport, slices: Sequence[NodeSlice], low_s: float, high_s: float, job: str = "") -> Markup:
    """Each node's turns over one time axis, rollouts above training; one colour a job, as far as there are colours."""
    shown = [each for each in slices if each.begun_s < high_s and each.ended_s > low_s]
    phases = {node.name: node.phase for node in report.nodes}
    nodes = sorted({each.node for each in shown}, key=lambda node: (phases.get(node) == "train", node))[:LANES_MAX]
    jobs = [each.name for each in report.jobs if any(turn.job == each.name for turn in shown)]
    classes = charts.provider_classes(jobs)
    left, right, top, pitch, height = 110, 84, 40, 24, 18
    bottom = top + pitch * max(1, len(nodes))
    plot = svg.panel(left, top, charts.FULL_WIDTH - left - right, bottom - top, (low_s, high_s), (0.0, 1.0))
    named = [(f"area {classes[name]}", units.shortened(name, 22)) for name in jobs][:LEGEND_MAX]
    rows: list[Markup] = [svg.legend(left, 16, [*named, ("account-idle", "nobody: a bubble")])]
    busy = {node.name: node.slice_share + node.switching_share for node in report.nodes}
    for i, node in enumerate(nodes):
        y = top + pitch * i
        rows.append(svg.text(left - 12, y + 13, units.shortened(node, 14), "value", "end"))
        rows.append(
            tag("rect", x=plot.x(low_s), y=y, width=plot.x(high_s) - plot.x(low_s), height=height, class_="lane")
        )
        if node in busy:
            rows.append(svg.text(plot.x(high_s) + 8, y + 13, f"{busy[node]:.0%} busy"))
        for each in shown:
            if each.node == node:
                faint = " faint" if job and each.job != job else ""
                rows += _bar(plot, each, y, height, f"area {classes[each.job]}{faint}")
        rows += [_mark(plot, mark, y) for mark in report.marks if mark.node == node and low_s <= mark.at_s <= high_s]
    most = max(1, round(12 * high_s / max(1e-9, high_s - low_s)))
    ticks = [tick for tick in svg.time_ticks(high_s, most) if tick[0] >= low_s]
    words = f"time since the pool began ({'h:min' if high_s >= 3600 else 'min:s'})"
    axis = svg.bottom_axis(plot, ticks, words)
    return svg.drawing(charts.FULL_WIDTH, bottom + 46, "Turns by node", *rows, axis)


def _bar(plot: svg.Panel, turn: NodeSlice, y: float, height: float, class_: str) -> list[Markup]:
    begin, end = plot.x(turn.begun_s), plot.x(turn.ended_s)
    switched = min(end, plot.x(turn.begun_s + turn.switch_s))
    lasted = units.duration(turn.ended_s - turn.begun_s)
    words = f"{turn.job}: {turn.phase} {lasted}".replace(":  ", ": ")
    if turn.switch_s:
        words += f", {units.duration(turn.switch_s)} of it switching"
    if not turn.finished:
        words += "; goes on in a later turn"
    bars = [tag("rect", tag("title", words), x=begin, y=y, width=max(0.5, end - begin), height=height, class_=class_)]
    if switched - begin >= 0.3:
        bars.append(tag("rect", x=begin, y=y, width=switched - begin, height=height, class_="switched"))
    return bars


def _mark(plot: svg.Panel, mark: PoolMark, y: float) -> Markup:
    """A triangle that points at what went wrong."""
    x = plot.x(mark.at_s)
    shape = f"M{x - 5:.1f},{y - 5:.1f}h10l-5,8Z"
    return tag("path", tag("title", f"{_where(mark)}: {mark.what}"), d=shape, class_="fault")


def _pictures(report: PoolReport) -> Markup | None:
    """Draw each job's bill and slowdown beside those alone and those accepted."""
    jobs = [job for job in report.jobs if job.planned_slowdown is not None][:BARS_MAX]
    if not jobs:
        return None
    return tag(
        "div",
        tag(
            "figure",
            tag("h2", "Bill beside the bill alone"),
            tag("div", _bill_bars(jobs), class_="picture"),
            tag("figcaption", "The whole bar is what its start and its steps would have cost on nodes of its own."),
        ),
        tag(
            "figure",
            tag("h2", "Slowdown beside the SLO"),
            tag("div", _slowdown_bars(jobs), class_="picture"),
            tag("figcaption", "Bar: over its planned time alone. Dot: over its own time alone. Line: what it accepts."),
        ),
        class_="pair",
    )


_HALF, _NAMES = 476, 120


def _bill_bars(jobs: Sequence[PooledJob]) -> Markup:
    classes = charts.provider_classes([job.name for job in jobs])
    high = max(max(job.usd, job.usd_alone) for job in jobs) or 1.0
    scale = svg.Scale(0.0, high, _NAMES, _HALF - 70)
    rows: list[Markup] = []
    for i, job in enumerate(jobs):
        y = 6 + 30 * i
        rows += [
            svg.text(_NAMES - 10, y + 14, units.shortened(job.name, 16), "value", "end"),
            tag("rect", x=_NAMES, y=y, width=scale(job.usd_alone) - _NAMES, height=20, class_="lane"),
            tag("rect", x=_NAMES, y=y, width=scale(job.usd) - _NAMES, height=20, class_=f"area {classes[job.name]}"),
            svg.text(scale(max(job.usd, job.usd_alone)) + 6, y + 14, units.usd(job.usd)),
        ]
    return svg.drawing(_HALF, 12 + 30 * len(jobs), "Bill beside the bill alone", *rows)


def _slowdown_bars(jobs: Sequence[PooledJob]) -> Markup:
    classes = charts.provider_classes([job.name for job in jobs])
    high = max(max(job.slo, job.planned_slowdown or 0.0, job.slowdown or 0.0) for job in jobs)
    scale = svg.Scale(0.0, high, _NAMES, _HALF - 70)
    rows: list[Markup] = []
    for i, job in enumerate(jobs):
        y, planned = 6 + 30 * i, job.planned_slowdown or 0.0
        rows += [
            svg.text(_NAMES - 10, y + 14, units.shortened(job.name, 16), "value", "end"),
            tag("rect", x=_NAMES, y=y, width=scale(planned) - _NAMES, height=20, class_=f"area {classes[job.name]}"),
            tag("line", x1=scale(job.slo), x2=scale(job.slo), y1=y - 3, y2=y + 23, class_="axis"),
            svg.text(scale(high) + 6, y + 14, f"{planned:.2f} ×"),
        ]
        if job.slowdown is not None:
            rows.append(tag("circle", cx=scale(job.slowdown), cy=y + 10, r=3.5, class_="event-mark"))
    return svg.drawing(_HALF, 12 + 30 * len(jobs), "Slowdown beside the SLO", *rows)


def shares(accounts_ns: dict[DeviceAccount, int], whole_ns: int) -> dict[str, float]:
    """Each account's share of a time, all of them named."""
    return {account.value: accounts_ns.get(account, 0) / whole_ns if whole_ns else 0.0 for account in DeviceAccount}
