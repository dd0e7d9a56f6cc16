"""A run's progress: a live panel on a terminal, a line a step elsewhere; and a bar for what is not a run."""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import msgspec
from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from elastic.cli.output import console, program, say
from elastic.core.types import NS_PER_S
from elastic.runtime.status import PROVIDER_STOPPED, RunStatus, ServingStatus, tokens_per_s, total_tokens
from elastic.system.host import here

LINES_APART_S = 5.0
_NAME_WIDTH = 18
"""Columns of a name that there is room for beside how far a run is."""
TRAINER = {
    "absent": "trainer starts",
    "awake": "trainer generates",
    "resting": "trainer hands over",
    "asleep": "trainer takes groups",
    "waking": "trainer wakes",
}


@contextmanager
def bar(title: str) -> Iterator[Callable[[int, int, str], None]]:
    """On standard error, on a terminal as a bar, else as lines some seconds apart; what it yields is told what is done,
    of how much, and what is next."""
    if not console(stderr=True).is_terminal:
        yield _lines(title)
        return
    columns = (
        TextColumn(title),
        BarColumn(),
        TextColumn("{task.completed}/{task.total}"),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    with Bar(*columns, console=console(stderr=True)) as progress:
        task = progress.add_task("starting", total=None)

        def show(done: int, total: int, what: str) -> None:
            progress.update(task, completed=done, total=total, description=what)

        yield show


def _lines(title: str) -> Callable[[int, int, str], None]:
    said_s = here().monotonic()

    def show(done: int, total: int, what: str) -> None:
        nonlocal said_s
        if here().monotonic() - said_s >= LINES_APART_S:
            said_s = here().monotonic()
            say(f"{title}: {done}/{total} {what}".rstrip())

    return show


class ProgressDisplay:
    """Shows each status. Use `context` around the run; `observe` is the orchestrator's observer."""

    def __init__(self, console: Console, *, learns: bool = True) -> None:
        """`learns`: a policy does, so that rewards mean something; in a simulation none does."""
        self._learns = learns
        self._console = console
        self._live = Live(console=console, refresh_per_second=4, transient=True) if console.is_terminal else None
        self._last_step = -1
        self._stage: tuple[object, ...] = ()
        self._marks = deque([(0, 0)], maxlen=2)
        self._stopped = frozenset[str]()

    @property
    def context(self) -> AbstractContextManager[object]:
        return self._live if self._live is not None else nullcontext()

    @property
    def observe(self) -> Callable[[RunStatus], None]:
        return self._draw if self._live is not None else self._print

    def say(self, text: str) -> None:
        """A line of its own, above the panel where there is one."""
        self._console.print(text, highlight=False, soft_wrap=True)

    def _say_news(self, status: RunStatus) -> None:
        for warning in status.warnings:
            self.say(f"warning: {warning.message}")
        self._say_what_stopped(status)

    def _draw(self, status: RunStatus) -> None:
        assert self._live is not None
        self._say_news(status)
        self._live.update(render(status, learns=self._learns))

    def _print(self, status: RunStatus) -> None:
        self._say_news(status)
        if status.last_success_rate is None:
            self._print_stage(status)
        elif status.step != self._last_step:
            self._last_step = status.step
            self._console.print(
                line(status, self._tokens_per_s(status), learns=self._learns), highlight=False, soft_wrap=True
            )

    def _print_stage(self, status: RunStatus) -> None:
        """What happens before the first step is over: a line whenever somebody is further than before."""
        there = tuple((name, p.booting > 0, p.ready > 0) for name, p in status.providers.items())
        stage = (status.phase, status.trainer, there, status.serving and status.serving.version)
        if stage != self._stage:
            self._stage = stage
            self.say(beginning(status))

    def _say_what_stopped(self, status: RunStatus) -> None:
        """Say once of each provider that is stopped why, and how it is offered again."""
        stopped = frozenset(one.message for one in status.conditions if one.type == PROVIDER_STOPPED)
        for message in sorted(stopped - self._stopped):
            provider = message.partition(" ")[0]
            self.say(f"{message}; offer it again with: {program()} cap {status.run} {provider}=none")
        self._stopped = stopped

    def _tokens_per_s(self, status: RunStatus) -> float:
        """Since the line before: at a step's end itself nobody generates."""
        self._marks.append((round(status.elapsed_s * NS_PER_S), total_tokens(status.providers)))
        return tokens_per_s(self._marks)


def beginning(status: RunStatus) -> str:
    """Where a run is whose first step is not over, in one line."""
    parts = [f"step {status.step + 1}/{status.steps} begins" if status.phase == "running" else status.phase]
    if evaluation := status.evaluation:
        parts = [f"version {evaluation.version} is evaluated: {evaluation.ended} of {evaluation.episodes} episodes"]
    if serving := status.serving:
        parts = (
            [_version(serving), _requests(serving), f"{status.tokens_per_s:,.0f} tokens/s"]
            if status.phase == "running"
            else parts
        )
    elif status.phase in ("starting", "running"):
        parts.append(TRAINER.get(status.trainer, status.trainer))
    workers = [
        f"{name}:{p.ready}{f' (and {p.booting} on their way)' if p.booting else ''}"
        for name, p in status.providers.items()
    ]
    parts += [f"workers {' '.join(workers)}"] if workers else []
    return "  ".join([*parts, f"{status.elapsed_s:.0f} s"])


def _version(serving: ServingStatus) -> str:
    return f"version {serving.version}{f' ({serving.label})' if serving.label else ''}"


def _requests(serving: ServingStatus) -> str:
    return f"requests {serving.running} running, {serving.waiting} {'held' if serving.held else 'waiting'}"


def line(status: RunStatus, rate: float, *, learns: bool = True) -> str:
    """One step in one line, for logs."""
    workers = " ".join(f"{name}:{p.ready}" for name, p in status.providers.items())
    parts = [
        f"step {status.step}/{status.steps}",
        *(
            [f"success {_percent(status.last_success_rate)}", f"mean reward {_reward(status.last_mean_reward)}"]
            if learns
            else []
        ),
        f"{rate:,.0f} tokens/s",
        f"workers {workers}" if status.phase == "running" else status.phase,
        f"preemptions {status.preemptions}",
        *_deaths(status),
        f"${status.usd:.4f}",
        f"{status.elapsed_s:.0f} s",
    ]
    if slips := pacing_slips(status):
        parts.append(f"({slips})")
    return "  ".join(parts)


def render(status: RunStatus, *, learns: bool = True) -> Group:
    """The live panel: fits 80 columns, and nothing in it moves while figures change."""
    warning = Text(pacing_slips(status), style="yellow")
    return Group(*_head(status), _facts(status, learns=learns), _table(status), warning)


def pacing_slips(status: RunStatus) -> str:
    """How far engines run below the speed that they model; empty where they keep it."""
    if status.pacing_holds or status.late_share is None:
        return ""
    return (
        f"{status.late_share:.0%} of paced iterations took longer than modelled, with the CPU at {status.cpu_share:.0%}"
    )


def _head(status: RunStatus) -> list[Text | Table]:
    """How far it is; a long name has a line of its own."""
    if len(status.run) > _NAME_WIDTH:
        name = Text(status.run, style="bold", no_wrap=True, overflow="ellipsis")
        return [name, *_head(msgspec.structs.replace(status, run=""))]
    head = Table.grid(padding=(0, 2, 0, 0))
    if status.run:
        head.add_column(no_wrap=True, style="bold")
    head.add_column(no_wrap=True)
    head.add_column(width=20)
    head.add_column(no_wrap=True, justify="right", min_width=5)
    head.add_column(no_wrap=True, style="dim")
    named = [status.run] if status.run else []
    if serving := status.serving:
        head.add_row(*named, _version(serving), "", _clock(status.elapsed_s), status.phase)
        return [head]
    width = len(str(status.steps))
    head.add_row(
        *named,
        f"step {min(status.step + 1, status.steps):>{width}}/{status.steps}",
        ProgressBar(total=status.steps, completed=status.step, width=20),
        _clock(status.elapsed_s),
        TRAINER.get(status.trainer, status.trainer) if status.phase == "running" else status.phase,
    )
    return [head]


def _facts(status: RunStatus, *, learns: bool) -> Text:
    if serving := status.serving:
        return Text(f"{_requests(serving)}  {status.tokens_per_s:>6,.0f} tokens/s", no_wrap=True, overflow="ellipsis")
    success, reward = _percent(status.last_success_rate), _reward(status.last_mean_reward)
    learnt = f"success {success}  mean reward {reward} " if learns else ""
    return Text(
        f"{learnt}{status.tokens_per_s:>6,.0f} tokens/s "
        f"{status.trajectories_running:>4} trajectories {status.queued_turns:>4} queued",
        no_wrap=True,
        overflow="ellipsis",
    )


def _table(status: RunStatus) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False, show_footer=True)
    everyone = status.providers.values()
    table.add_column("provider", "all", min_width=10, no_wrap=True)
    for name, total, width in (
        ("ready", str(sum(p.ready for p in everyone)), 5),
        ("booting", str(sum(p.booting for p in everyone)), 7),
        ("turns", _load(sum(p.running_turns for p in everyone), sum(p.capacity_turns for p in everyone)), 9),
        ("tokens", f"{sum(p.tokens for p in everyone):,}", 11),
        ("preempted", str(status.preemptions), 9),
        ("died", str(sum(p.deaths for p in everyone)), 4),
        ("cost", f"${status.usd:.4f}", 10),
    ):
        table.add_column(name, total, justify="right", min_width=width, no_wrap=True)
    for name, p in status.providers.items():
        table.add_row(
            name,
            str(p.ready),
            str(p.booting),
            _load(p.running_turns, p.capacity_turns),
            f"{p.tokens:,}",
            str(p.preemptions),
            str(p.deaths),
            f"${p.usd:.4f}",
        )
    return table


def _load(running: int, capacity: int) -> str:
    return f"{running}/{capacity}"


def _deaths(status: RunStatus) -> list[str]:
    """Say which process died, and whether another came in its place; nothing where none has died."""
    died = {name: p for name, p in status.providers.items() if p.deaths}
    words = " ".join(
        f"{name}:{p.deaths} ({'replaced' if p.replaced == p.deaths else f'{p.replaced} replaced'})"
        for name, p in died.items()
    )
    return [f"deaths {words}"] if died else []


def _percent(share: float | None) -> str:
    return "   –" if share is None else f"{share:4.0%}"


def _reward(mean: float | None) -> str:
    return "     –" if mean is None else f"{mean:6.3f}"


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"
