"""`elastic top`: what goes on now, in a terminal: runs and pools of this machine, and of a server."""

import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.segment import Segment
from rich.text import Text

from elastic.cli.account import run_on_disk
from elastic.cli.options import Remote, RunsDirectory
from elastic.cli.output import console, duration
from elastic.cli.pool import asked, find_pool, pool_tables
from elastic.cli.progress import beginning, render
from elastic.cli.remote import is_hosted, server
from elastic.cli.tables import FittedListing
from elastic.compose.runs import is_claimed
from elastic.core.cluster.types import JobState
from elastic.pool.control_messages import PoolControl
from elastic.protocol.api import ENDED, HostedJob, HostedPool, HostedRun, RunFigures, RunPhase
from elastic.protocol.api_client import Client
from elastic.runtime.journal import DirectoryStore, JournalError, RunDirectory, SampleRow
from elastic.runtime.status import RunStatus

_BARS = "▁▂▃▄▅▆▇█"
_WIDTH = 60
"""Columns of a line of bars, each a sample."""
_COLUMNS = ("phase", "step", "success", "reward", "tokens/s", "workers", "preempted", "cost")
_RIGHT = _COLUMNS[1:]
_SPARE = ("preempted", "success", "workers", "phase", "reward", "tokens/s")
"""What a narrow terminal leaves out, the first one first."""
_LIVING = (JobState.SUBMITTED, JobState.PROFILING, JobState.QUEUED, JobState.PLACED, JobState.RUNNING)
_MOST = 200
"""Runs, or jobs, that are asked for at a time."""
_GO_ON = tuple(phase.value for phase in RunPhase if phase not in ENDED)


def top(
    name: Annotated[
        str,
        typer.Argument(metavar="RUN", help="A run's name, path or id, or `latest`; all that go on, unless given."),
    ] = "",
    pool: Annotated[str, typer.Option("--pool", metavar="POOL", help="A pool in place of a run.")] = "",
    every_s: Annotated[float, typer.Option(min=0.2, help="How often to look.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Look once.")] = False,
    remote: Remote = False,
    directory: RunsDirectory = Path("runs"),
    pools: Annotated[Path, typer.Option("--pools", help="Where pools are kept.")] = Path("pools"),
) -> int:
    """Watch what goes on: all living runs, one run, or a pool; with --remote those of the server.

    Until Ctrl-C. Where no terminal is it looks once.

    Example: elastic top latest
    """
    if remote or is_hosted(name):
        with server() as client:
            return _watch(_hosted(client, name, pool), every_s, once=once)
    if pool:
        path = find_pool(pool, pools)
        return _watch(lambda: pool_tables(asked(PoolControl(path).status()), path), every_s, once=once)
    if name:
        return _watch(_of_run(run_on_disk(directory, name)), every_s, once=once)
    return _watch(lambda: _on_disk(directory), every_s, once=once)


class Screen:
    """As much as a terminal has lines for; the last one tells how many are not seen."""

    def __init__(self, shown: RenderableType) -> None:
        self._shown = shown

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        room = options.height or console.height
        lines = console.render_lines(self._shown, options.reset_height(), pad=False)
        if left := max(0, len(lines) - room):
            lines = [*lines[: room - 1], [Segment(f"… {left + 1} more lines: there is no room for them here")]]
        for line in lines:
            yield from line
            yield Segment.line()


def bars(values: Sequence[float]) -> str:
    """The last values as bars between 0 and the highest of them."""
    shown = list(values)[-_WIDTH:]
    most = max(shown, default=0.0)
    return "".join(_BARS[round((len(_BARS) - 1) * max(0.0, value) / most)] if most > 0 else _BARS[0] for value in shown)


def _watch(look: Callable[[], RenderableType], every_s: float, *, once: bool) -> int:
    if once or not console().is_terminal:
        console().print(Group(look()), crop=False)  # A text by itself would be wrapped, whatever it says.
        return 0
    try:
        with Live(Screen(look()), console=console(), auto_refresh=False, screen=True) as live:
            while True:
                time.sleep(every_s)
                live.update(Screen(look()), refresh=True)
    except KeyboardInterrupt:
        return 0


def _of_run(run: RunDirectory) -> Callable[[], RenderableType]:
    """One run on disk, with the speed that its journal has told of."""

    def look() -> RenderableType:
        try:
            with run.newest_journal() as journal:
                samples = journal.thinned(SampleRow, _WIDTH)
        except JournalError as error:
            return Text(f"{run.name}: its journal cannot be read now: {error}")
        if not samples:
            return Text(f"{run.name}: it has not told of itself yet")
        return _panel(samples[-1].status, [row.status.tokens_per_s for row in samples])

    return look


def _hosted(client: Client, name: str, pool: str) -> Callable[[], RenderableType]:
    if pool:
        return lambda: _pool_lines(client.pool(pool), list(islice(client.jobs(pool), _MOST)))
    if not name:
        return lambda: _list(list(islice(client.runs(phase=_GO_ON), _MOST)))
    speeds = deque[float](maxlen=_WIDTH)

    def look() -> RenderableType:
        run = client.run(name)
        speeds.append(run.figures.tokens_per_s)
        waits = [Text(f"{one.type}: {one.message}") for one in run.conditions if one.status != "True"]
        return Group(_panel(_status(run), speeds), *waits)

    return look


def _status(run: HostedRun) -> RunStatus:
    """The figures that a server tells as the status that a run shows."""
    told = run.figures.model_dump(exclude={"budget", "evaluation", "conditions"})
    return msgspec.convert(told | {"run": run.name, "phase": run.phase.value}, RunStatus)


def _panel(status: RunStatus, speeds: Sequence[float]) -> RenderableType:
    parts: list[RenderableType] = [
        render(status),
        Text(f"{bars(speeds)} tokens/s, up to {max(speeds, default=0.0):,.0f}"),
    ]
    if status.last_success_rate is None:
        parts.append(Text(beginning(status)))
    parts += [Text(f"{one.type}: {one.message}") for one in status.conditions]
    if status.budget is not None and status.budget.ends_in_s is not None:
        parts.append(Text(f"the budget of ${status.budget.budget_usd:.2f} ends in {duration(status.budget.ends_in_s)}"))
    return Group(*parts)


def _on_disk(directory: Path) -> RenderableType:
    """All runs on disk that go on."""
    found: list[tuple[str, RunStatus]] = []
    for run in DirectoryStore(directory).runs():
        if not is_claimed(run.path):
            continue
        try:
            with run.newest_journal() as journal:
                sample = journal.last(SampleRow)
        except JournalError:
            continue
        if sample is not None:
            found.append((run.name, sample.status))
    if not found:
        return Text(f"no run goes on in {directory}", no_wrap=True, overflow="ignore")
    rows = [(name, *_row(status.phase, status)) for name, status in found]
    return FittedListing(("run", *_COLUMNS), rows, spare=_SPARE, right=_RIGHT)


def _list(runs: Sequence[HostedRun]) -> RenderableType:
    if not runs:
        return Text("no run goes on there")
    rows = [(run.id, run.name, *_row(run.phase.value, run.figures)) for run in runs]
    return FittedListing(("run", "called", *_COLUMNS), rows, spare=("called", *_SPARE), right=_RIGHT)


def _row(phase: str, told: RunStatus | RunFigures) -> Sequence[str]:
    success, reward = told.last_success_rate, told.last_mean_reward
    return (
        phase,
        f"{told.step}/{told.steps}",
        "-" if success is None else f"{success:.0%}",
        "-" if reward is None else f"{reward:.3f}",
        f"{told.tokens_per_s:,.0f}",
        str(sum(one.ready for one in told.providers.values())),
        str(told.preemptions),
        f"${told.usd:.4f}",
    )


def _pool_lines(pool: HostedPool, jobs: Sequence[HostedJob]) -> RenderableType:
    """A server's pool, as far as one's project sees it."""
    if pool.away:
        return Text(f"pool {pool.id} does not answer now; it is started again")
    cost = f"${pool.usd or 0:.4f} so far, ${pool.usd_per_hour or 0:.2f} an hour"
    head = f"pool {pool.id}, up {duration(pool.now_s or 0)}: {cost}"
    nodes = [(one.name, one.phase, one.group or "-", one.job or "-", one.account) for one in pool.nodes]
    waits = [
        Text(f"{one.key} waits for {one.what}, {duration(max(0.0, one.left_s))} at the most") for one in pool.waits
    ]
    rows = [
        (
            one.id,
            one.state,
            one.group or "-",
            f"{one.steps_done}/{one.steps}",
            f"${one.usd:.4f}",
            one.reason if one.queue_place is None else f"number {one.queue_place} in the queue: {one.reason}",
        )
        for one in jobs
        if one.state in _LIVING
    ]
    columns = ("job", "state", "group", "steps", "cost", "why")
    return Group(
        Text(head),
        FittedListing(("node", "phase", "group", "job", "does"), nodes, spare=("phase", "group")),
        *waits,
        Text(),
        FittedListing(columns, rows, spare=("group", "state", "why")) if rows else Text("no job goes on"),
    )
