"""A run's progress: a live panel on a terminal, a line a step elsewhere."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from elastic.runtime.status import RunStatus


class Progress:
    """Shows each status. Use `context` around the run; `observe` is the orchestrator's observer."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, refresh_per_second=4, transient=True) if console.is_terminal else None
        self._last_step = -1

    @property
    def context(self) -> AbstractContextManager[object]:
        return self._live if self._live is not None else nullcontext()

    @property
    def observe(self) -> Callable[[RunStatus], None]:
        return self._draw if self._live is not None else self._print

    def say(self, text: str) -> None:
        """A line of its own, above the panel where there is one."""
        self._console.print(text, highlight=False, soft_wrap=True)

    def _draw(self, status: RunStatus) -> None:
        assert self._live is not None
        self._live.update(render(status))

    def _print(self, status: RunStatus) -> None:
        if status.step != self._last_step and status.last_success_rate is not None:
            self._last_step = status.step
            self._console.print(line(status), highlight=False, soft_wrap=True)


def line(status: RunStatus) -> str:
    """One step in one line, for logs."""
    workers = " ".join(f"{name}:{p.ready}" for name, p in status.providers.items())
    return (
        f"step {status.step}/{status.steps}  success {_percent(status.last_success_rate)}  "
        f"{status.tokens_per_s:,.0f} tokens/s  workers {workers}  preemptions {status.preemptions}  "
        f"${status.usd:.4f}  {status.elapsed_s:.0f} s" + ("" if status.pacing_holds else "  (CPU busy: pacing slips)")
    )


def render(status: RunStatus) -> Group:
    """The live panel."""
    head = Table.grid(padding=(0, 2))
    head.add_row(
        Text(status.run, style="bold"),
        f"step {min(status.step + 1, status.steps)}/{status.steps}",
        ProgressBar(total=status.steps, completed=status.step, width=24),
        f"{_clock(status.elapsed_s)}",
        Text(status.phase if status.phase != "running" else f"trainer {status.trainer}", style="dim"),
    )
    facts = Table.grid(padding=(0, 2))
    facts.add_row(
        f"success {_percent(status.last_success_rate)}",
        f"{status.tokens_per_s:,.0f} tokens/s",
        f"{status.trajectories_running} trajectories",
        f"{status.queued_turns} turns queued",
        f"{status.preemptions} preemptions",
        f"${status.usd:.4f}",
    )
    table = Table(box=None, padding=(0, 2), header_style="dim")
    table.add_column("provider")
    for name in ("ready", "booting", "turns", "credits", "tokens", "preempted", "cost"):
        table.add_column(name, justify="right")
    for name, p in status.providers.items():
        table.add_row(
            name,
            str(p.ready),
            str(p.booting),
            str(p.running_turns),
            str(p.capacity_turns),
            f"{p.tokens:,}",
            str(p.preemptions),
            f"${p.usd:.4f}",
        )
    parts: list[Table | Text] = [head, facts, table]
    if not status.pacing_holds:
        parts.append(Text(f"CPU {status.cpu_share:.0%} busy: paced engines may miss their speed", style="yellow"))
    return Group(*parts)


def _percent(share: float | None) -> str:
    return "  –" if share is None else f"{share:.0%}"


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"
