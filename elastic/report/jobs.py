"""What many jobs on one pool cost and how they fared: a summary, its tables as text, and a page with lanes by node."""

from collections.abc import Sequence

import msgspec

from elastic.core.cluster.types import DeviceAccount
from elastic.pool.status import StoryPart
from elastic.report import charts, document, svg, units
from elastic.report.document import Chart, Figure, Page, Table

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

    - `usd_planned`: what its steps would have cost at the planned cycles of its groups, without its starts.
    - `marginal_usd_per_hour`: what an hour of the pool cost more once it was in; `saved_if_left_usd_per_hour`: what it
      would cost less now without it; `alone_usd_per_hour`: as many nodes as it asked for, of those that it had last.
    - `phases_s` and `cycle_s` are medians, switching left out of the phases. `switch_share` is of its cycles;
      `cold_s` of `switch_s` went into cold starts of its rollouts.
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
    usd_planned: float
    usd_alone: float
    alone_usd_per_hour: float
    marginal_usd_per_hour: float | None
    saved_if_left_usd_per_hour: float
    phases_s: dict[str, float]
    cycle_s: float | None
    switches: int
    switch_s: float
    cold_s: float
    switch_share: float | None
    story: list[StoryPart]


class PooledNode(msgspec.Struct, frozen=True, kw_only=True):
    """Where a node's time went while it was in a group: `hours`, which cost `usd`."""

    name: str
    phase: str
    kind: str
    site: str
    usd_per_gpu_hour: float
    hours: float
    usd: float
    slice_share: float
    switching_share: float
    idle_share: float
    down_share: float


class PooledKind(msgspec.Struct, frozen=True, kw_only=True):
    """The nodes of a kind together: how many were in groups, for how many `hours` in all, which cost `usd`."""

    name: str
    site: str
    usd_per_gpu_hour: float
    nodes: int
    hours: float
    usd: float


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
    kinds: list[PooledKind]
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
    for table in tables(report):
        lines += ["", *_aligned([table.header, *table.rows])]
    if report.marks:
        lines += ["", f"what went wrong ({len(report.marks)}):"]
        lines += [_told(mark) for mark in report.marks[-MARKS_MAX:]]
    return "\n".join(lines)


def job_text(report: PoolReport, job: PooledJob) -> str:
    """One job of a pool: where it stands, what it pays, how it came there."""
    rows = [["job", f"{job.name} on {title(report)}"], ["state", f"{job.state}: {job.reason}"]]
    for table in _tables_of_jobs([job]):
        cells = zip(table.header, table.rows[0], strict=True)
        rows += [[head.lower(), said] for head, said in cells if head not in _SAID]
    lines = _aligned([[f"{name}:", said] for name, said in rows])
    lines += ["", "what became of it:"]
    lines += [f"{part.at_s:>10.1f} s  {part.state}: {part.cause}" for part in job.story]
    lines += [_told(mark) for mark in report.marks if mark.job == job.name]
    return "\n".join(lines)


def title(report: PoolReport) -> str:
    jobs = f"{len(report.jobs)} {'job' if len(report.jobs) == 1 else 'jobs'}"
    return f"pool {report.name}, {jobs} placed by {report.policy}" if report.name else f"{report.policy}: {jobs}"


def _told(mark: PoolMark) -> str:
    return f"{mark.at_s:>10.1f} s  {_where(mark)}: {mark.what}"


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
    return units.NONE if value is None else f"{value:.3f} ×"


_WORDS = ("State", "Site", "Admitted", "Group", "Members, in their order")
_SAID = ("Job", "State")


def tables(report: PoolReport) -> list[Table]:
    """All tables of a pool that have a row, but that of what went wrong."""
    groups = Table(
        title="Groups",
        header=["Group", "Cycle, planned", "Lasted", "Longest that all bear", "Members, in their order"],
        rows=[
            [one.group, *map(units.duration, (one.cycle_s, one.measured_s, one.limit_s)), one.members]
            for one in report.cycles
        ],
        note="As planned when the last job had joined: a cycle has one turn of each member in each phase. Lasted: the "
        "median of its members' cycles, whichever jobs were in the group then.",
    )
    nodes = Table(
        title="Nodes",
        header=["Node", "Site", "$/GPU-hour", "Cost", "Slices", "Switching", "Idle", "Down"],
        rows=[_of_node(one) for one in report.nodes],
        note="Of the time in which a node was of a group; the rest is the pool's own.",
    )
    kinds = Table(
        title="Kinds of nodes",
        header=["Kind", "Site", "$/GPU-hour", "Nodes", "Node-hours", "Cost"],
        rows=[_of_kind(one) for one in report.kinds],
        note="Their costs sum to that of all nodes, and so do the jobs' bills with what no job is billed.",
    )
    return [table for table in (*_tables_of_jobs(report.jobs), groups, kinds, nodes) if table.rows]


def _of_kind(kind: PooledKind) -> list[str]:
    price, hours = f"{kind.usd_per_gpu_hour:.2f}", f"{kind.hours:.4f}"
    return [kind.name, kind.site or units.NONE, price, str(kind.nodes), hours, units.usd(kind.usd)]


def _of_node(node: PooledNode) -> list[str]:
    shares = (node.slice_share, node.switching_share, node.idle_share, node.down_share)
    price = [f"{node.usd_per_gpu_hour:.2f}", units.usd(node.usd)]
    return [node.name, node.site or units.NONE, *price, *(f"{share:.1%}" for share in shares)]


def _tables_of_jobs(jobs: Sequence[PooledJob]) -> list[Table]:
    return [
        Table(
            title="Jobs",
            header=["Job", "State", "Admitted", "Steps", "SLO", "Planned", "Actual", "Moves", "Again", "Group"],
            rows=[_status(job) for job in jobs],
            note="Planned: its time over that of its steps alone as they were planned, which the SLO bounds. Actual: "
            "over what these steps would have taken alone. Moves and resubmissions cost a restart each.",
        ),
        Table(
            title="Bills",
            header=[
                *("Job", "Bill", "As planned", "Alone", "Saved", "Joining, an hour", "Alone, an hour"),
                "Leaving saves, an hour",
            ],
            rows=[_bill(job) for job in jobs],
            note="A bill is a job's slices and switches, and a part of its group's bubbles in proportion to those that "
            "it would have paid for alone. As planned: for its steps, at the planned cycles of its groups, without "
            "starts. Joining: by how much the pool cost more an hour once it was in. Leaving "
            "saves: what the pool would cost less without it, as it stands.",
        ),
        Table(
            title="Phases and switches",
            header=["Job", "Rollout", "Training", "Cycle", "Switches", "Switching", "Of its cycles", "Cold starts"],
            rows=[
                [
                    job.name,
                    *map(units.duration, (job.phases_s.get("rollout"), job.phases_s.get("train"), job.cycle_s)),
                    f"{job.switches:,}",
                    units.duration(job.switch_s),
                    units.share(job.switch_share),
                    units.duration(job.cold_s),
                ]
                for job in jobs
            ],
            note="Medians. A cycle is from one rollout phase to the next; switching is what resuming and parking took, "
            "with states copied between device and host memory, and cold starts of the rollouts' engine.",
        ),
    ]


def _status(job: PooledJob) -> list[str]:
    unmet = job.planned_slowdown is not None and not job.met
    return [
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
    ]


def _bill(job: PooledJob) -> list[str]:
    saved = 1 - job.usd / job.usd_alone if job.usd_alone else None
    more = job.marginal_usd_per_hour
    return [
        job.name,
        units.usd(job.usd),
        units.usd(job.usd_planned),
        units.usd(job.usd_alone),
        units.NONE if saved is None else f"{100 * saved:.0f} %",
        units.NONE if more is None else f"+{units.usd(more)}",
        units.usd(job.alone_usd_per_hour),
        units.usd(job.saved_if_left_usd_per_hour) if job.group else units.NONE,
    ]


def as_page(report: PoolReport, slices: Sequence[NodeSlice], job: str = "") -> str:
    """One HTML page with every node's turns, in the style of a run's report; of one `job`, with its own in colour."""
    low_s, high_s = window(report, slices)
    part = ""
    if low_s > 0:
        part = " Shown are the last cycles; those before look the same."
    elif high_s < max((each.ended_s for each in slices), default=0.0):
        part = " Shown are the first hours; later cycles look the same."
    lanes = Chart(
        title="Turns by node",
        picture=node_lanes(report, slices, low_s, high_s, job),
        caption="Each bar is a turn: one job computes on a node at a time, in one colour a job. Its pale beginning is "
        "switching: states come to the device and leave it. Grey is nobody's time: bubbles, which the group pays "
        f"for.{part}",
        wide=True,
    )
    named = next((each for each in report.jobs if each.name == job), None)
    further = [_marks(report, job), *([] if named is None else [_story(named)])]
    return document.as_html(
        Page(
            title=f"{report.name or report.policy}: {job or 'many jobs'}",
            heading=_heading(report) if named is None else f"{job} on pool {report.name}",
            headline=_headline(report) if named is None else _job_headline(named),
            charts=[lanes, *_bars(report)],
            tables=[*tables(report), *(table for table in further if table.rows)],
        )
    )


def _heading(report: PoolReport) -> str:
    jobs = f"{len(report.jobs)} {'job' if len(report.jobs) == 1 else 'jobs'}"
    return f"{jobs} on pool {report.name}" if report.name else f"{jobs} on one pool, placed by {report.policy}"


def _headline(report: PoolReport) -> list[Figure]:
    idle = [f"{share:.0%} {phase}" for phase, share in report.idle_share.items()]
    lasted = units.duration(report.hours * 3600)
    wrong = f"{len(report.marks)} things went wrong" if report.marks else "a restart each"
    return [
        Figure("Cost", units.usd(report.usd), f"{units.usd(report.usd_per_hour)} an hour, for {lasted}"),
        Figure(
            "Against alone",
            _against(report.usd, report.usd_alone),
            f"each on nodes of its own: {units.usd(report.usd_alone)}",
        ),
        Figure("Within their SLO", f"{report.slo_met_share:.0%}", f"{report.rejected} rejected"),
        Figure("Bubbles", idle[-1] if idle else units.NONE, ", ".join(["idle share of groups' nodes", *idle[:-1]])),
        Figure("Switching", units.duration(report.switch_s), f"{report.switches:,} turns"),
        Figure("Moves", str(report.moves), wrong),
    ]


def _job_headline(job: PooledJob) -> list[Figure]:
    return [
        Figure("State", job.state, job.reason),
        Figure("Steps", f"{job.steps:,}", f"of {job.steps_wanted:,}"),
        Figure("Slowdown", _times(job.planned_slowdown), f"of at most {job.slo:g}; actual {_times(job.slowdown)}"),
        Figure("Bill", units.usd(job.usd), f"alone {units.usd(job.usd_alone)}"),
        Figure(
            "Against alone",
            _against(job.usd, job.usd_alone),
            f"{units.usd(job.alone_usd_per_hour)} an hour alone",
        ),
        Figure("Switching", units.share(job.switch_share), f"of its cycles, in {job.switches:,} turns"),
    ]


def _against(usd: float, usd_alone: float) -> str:
    if not usd_alone:
        return units.NONE
    saved = 1 - usd / usd_alone
    return f"−{saved:.0%}" if saved >= 0 else f"+{-saved:.0%}"


def _marks(report: PoolReport, job: str) -> Table:
    marks = [mark for mark in report.marks if not job or mark.job in ("", job)]
    return Table(
        title="What went wrong",
        header=["After", "Node", "Job", "What"],
        rows=[
            [f"{mark.at_s:,.1f} s", mark.node or units.NONE, mark.job or units.NONE, mark.what]
            for mark in marks[-MARKS_MAX:]
        ],
        note="Who is killed, lost or fails ends its own turn; what it had done goes on in the next, or from its "
        "journal.",
    )


def _story(job: PooledJob) -> Table:
    return Table(
        title="What became of it",
        header=["After", "State", "Why"],
        rows=[[f"{part.at_s:,.1f} s", part.state, part.cause] for part in job.story],
        note="Of a long story the last part is kept.",
    )


def window(report: PoolReport, slices: Sequence[NodeSlice]) -> tuple[float, float]:
    """Return the time span of the lanes: the beginning of a simulated pool, the last cycles of a live one."""
    end_s = max((each.ended_s for each in slices), default=1.0)
    if not report.name:
        return 0.0, min(end_s, LANES_S)
    longest_s = max((job.cycle_s or 0.0 for job in report.jobs), default=0.0)
    first_s = min((each.begun_s for each in slices), default=0.0)
    return max(0.0, first_s - 0.02 * end_s, end_s - max(LIVE_LANES_S, CYCLES_SHOWN * longest_s)), end_s


def node_lanes(
    report: PoolReport, slices: Sequence[NodeSlice], low_s: float, high_s: float, job: str = ""
) -> svg.Picture:
    """Each node's turns over one time axis, rollouts above training; one colour a job, as far as there are colours."""
    shown = [each for each in slices if each.begun_s < high_s and each.ended_s > low_s]
    phases = {node.name: node.phase for node in report.nodes}
    nodes = sorted({each.node for each in shown}, key=lambda node: (phases.get(node) == "train", node))[:LANES_MAX]
    jobs = [each.name for each in report.jobs if any(turn.job == each.name for turn in shown)]
    classes = {name: f"area {class_}" for name, class_ in charts.provider_classes(jobs).items()}
    busy = {node.name: f"{node.slice_share + node.switching_share:.0%} busy" for node in report.nodes}
    scale = svg.Scale(low_s, high_s, charts.LANES_LEFT, charts.FULL_WIDTH - 84)
    rows: list[svg.LaneRow] = []
    for node in nodes:
        spans = [svg.Span(low_s, high_s, "lane")]
        for turn in (turn for turn in shown if turn.node == node):
            spans += _turn(scale, turn, classes[turn.job] + (" faint" if job and turn.job != job else ""))
        marks = [
            svg.Mark(mark.at_s, "fault", "triangle", f"{_where(mark)}: {mark.what}")
            for mark in report.marks
            if mark.node == node and low_s <= mark.at_s <= high_s
        ]
        rows.append(svg.LaneRow(name=units.shortened(node, 14), spans=spans, marks=marks, note=busy.get(node, "")))
    most = max(1, round(12 * high_s / max(1e-9, high_s - low_s)))
    named = [(class_, units.shortened(name, 22)) for name, class_ in classes.items()][:LEGEND_MAX]
    return svg.Lanes(
        label="Turns by node",
        width=charts.FULL_WIDTH,
        x=scale,
        rows=rows,
        pitch=24,
        height=18,
        ticks=[tick for tick in svg.time_ticks(high_s, most) if tick[0] >= low_s],
        axis_title=svg.time_title(high_s, "pool"),
        legends=[("", [*named, ("account-idle", "nobody: a bubble")])],
    )


def _turn(scale: svg.Scale, turn: NodeSlice, class_: str) -> list[svg.Span]:
    switched_s = min(turn.ended_s, turn.begun_s + turn.switch_s)
    lasted = units.duration(turn.ended_s - turn.begun_s)
    words = f"{turn.job}: {turn.phase} {lasted}".replace(":  ", ": ")
    if turn.switch_s:
        words += f", {units.duration(turn.switch_s)} of it switching"
    if not turn.finished:
        words += "; goes on in a later turn"
    spans = [svg.Span(turn.begun_s, turn.ended_s, class_, words)]
    if scale(switched_s) - scale(turn.begun_s) >= 0.3:
        spans.append(svg.Span(turn.begun_s, switched_s, "switched"))
    return spans


def _bars(report: PoolReport) -> list[Chart]:
    """Each job's bill and slowdown beside those alone and those accepted."""
    jobs = [job for job in report.jobs if job.planned_slowdown is not None][:BARS_MAX]
    if not jobs:
        return []
    classes = {name: f"area {class_}" for name, class_ in charts.provider_classes([job.name for job in jobs]).items()}
    bills = [
        svg.LaneRow(
            name=units.shortened(job.name, 16),
            spans=[svg.Span(0.0, job.usd_alone, "lane"), svg.Span(0.0, job.usd, classes[job.name])],
            note=units.usd(job.usd),
        )
        for job in jobs
    ]
    slowdowns = [
        svg.LaneRow(
            name=units.shortened(job.name, 16),
            spans=[svg.Span(0.0, planned, classes[job.name])],
            marks=[
                svg.Mark(job.slo, "axis", "line"),
                *([] if job.slowdown is None else [svg.Mark(job.slowdown, "event-mark", "dot")]),
            ],
            note=f"{planned:.2f} ×",
        )
        for job in jobs
        for planned in [job.planned_slowdown or 0.0]
    ]
    dearest = max(max(job.usd, job.usd_alone) for job in jobs) or 1.0
    slowest = max(max(job.slo, job.planned_slowdown or 0.0, job.slowdown or 0.0) for job in jobs)
    return [
        Chart(
            title="Bill beside the bill alone",
            picture=_job_bars("Bill beside the bill alone", dearest, bills),
            caption="The whole bar is what its start and its steps would have cost on nodes of its own.",
        ),
        Chart(
            title="Slowdown beside the SLO",
            picture=_job_bars("Slowdown beside the SLO", slowest, slowdowns),
            caption="Bar: over its planned time alone. Dot: over its own time alone. Line: what it accepts.",
        ),
    ]


def _job_bars(label: str, high: float, rows: Sequence[svg.LaneRow]) -> svg.Picture:
    scale = svg.Scale(0.0, high, 120, charts.HALF_WIDTH - 70)
    return svg.Lanes(label=label, width=charts.HALF_WIDTH, x=scale, rows=rows, pitch=30, height=20)


def shares(accounts_ns: dict[DeviceAccount, int], whole_ns: int) -> dict[str, float]:
    """Each account's share of a time, all of them named."""
    return {account.value: accounts_ns.get(account, 0) / whole_ns if whole_ns else 0.0 for account in DeviceAccount}
