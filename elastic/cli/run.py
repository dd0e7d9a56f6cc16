"""`elastic run` and `elastic prepare`: display around the composition root."""

import asyncio
import logging
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path
from typing import TextIO, cast

import structlog
import typer
from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar
from rich.table import Table

from elastic import compose
from elastic.cli.app import EXIT_FAILED, EXIT_INTERRUPTED, bad_input, emit
from elastic.cli.progress import Progress
from elastic.config import Config
from elastic.report import as_json as report_as_json
from elastic.report import closing_table, summarise, write_html
from elastic.runtime.gateway import GatewayError
from elastic.runtime.journal import JournalError, JournalReader
from elastic.runtime.orchestrator import Orchestrator
from functions.base import FunctionError
from providers.base import ProviderUnavailable


def dry_run_command(config: Config, names: list[str], where: str, *, as_json: bool) -> None:
    plan = compose.resolve(config, names, where)
    rows = compose.acquisitions(plan)
    if as_json:
        emit({"config": config.model_dump(mode="json"), "would_acquire": rows})
        return
    console = Console()
    console.print_json(config.model_dump_json())
    table = Table(title="would acquire, at most", title_justify="left", box=None, header_style="dim")
    for column in ("provider", "workers", "GPUs each", "$/GPU-hour", "$/hour"):
        table.add_column(column, justify="left" if column == "provider" else "right")
    for row in rows:
        table.add_row(
            row.provider,
            str(row.max_workers),
            str(row.gpus_per_worker),
            f"{row.usd_per_gpu_hour:.2f}",
            f"{row.usd_per_hour_max:.2f}",
        )
    console.print(table)


def run_command(config: Config, names: list[str], where: str, resumed: Path | None, *, as_json: bool) -> int:
    """Run to the end and report; returns the exit code."""
    plan = compose.resolve(config, names, where)
    if resumed and _all_done(resumed, config.run.steps):
        conclude(resumed, as_json=as_json)
        return 0
    compose.check_base_policy(plan)
    run_dir = resumed or compose.new_run_dir(config)
    progress = Progress(Console(stderr=True))
    try:
        with _logging_to(run_dir / "logs" / "orchestrator.log"), progress.context:
            outcome = compose.run_loop(_execute(plan, run_dir, resume=resumed is not None, progress=progress))
    except (GatewayError, ProviderUnavailable, FunctionError) as error:
        if not resumed:
            shutil.rmtree(run_dir, ignore_errors=True)
        bad_input(str(error))
    except JournalError as error:
        typer.echo(f"error: the run failed: {error}", err=True)
        return EXIT_FAILED
    try:
        conclude(run_dir, as_json=as_json)
    except (JournalError, OSError) as error:
        typer.echo(f"warning: no report could be written: {error}", err=True)
    if outcome.interrupted:
        typer.echo(f"stopped; go on with: elastic run --resume {run_dir}", err=True)
        return EXIT_INTERRUPTED
    if outcome.failed:
        typer.echo(f"error: the run failed: {outcome.failed}", err=True)
        typer.echo(f"hint: logs are in {run_dir / 'logs'}; go on with: elastic run --resume {run_dir}", err=True)
        return EXIT_FAILED
    return 0


def _all_done(run_dir: Path, steps: int) -> bool:
    past = compose.past_life(run_dir)
    done = past.status == "finished" and past.steps_done >= steps
    if done:
        typer.echo(f"all {past.steps_done} steps of {run_dir} are done; --set run.steps=N asks for more", err=True)
    return done


async def _execute(plan: compose.RunPlan, run_dir: Path, *, resume: bool, progress: Progress) -> compose.RunOutcome:
    loop = asyncio.get_running_loop()

    def stop_on_signals(orchestrator: Orchestrator) -> None:
        signals = iter((_stop, _kill))

        def act() -> None:
            next(signals, _kill)(orchestrator, progress)

        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, act)

    return await compose.execute(plan, run_dir, resume=resume, observe=progress.observe, on_ready=stop_on_signals)


def _stop(orchestrator: Orchestrator, progress: Progress) -> None:
    progress.say("stopping: workers hand over what they have; once more kills them at once")
    orchestrator.stop(compose.INTERRUPTED)


def _kill(orchestrator: Orchestrator, progress: Progress) -> None:
    progress.say("killing everything")
    orchestrator.kill(compose.INTERRUPTED)


def conclude(run_dir: Path, *, as_json: bool) -> None:
    """The closing table and the report's path; with `--json` the same as one object."""
    reader = JournalReader(run_dir / "journal.sqlite")
    try:
        summary = summarise(reader)
    finally:
        reader.close()
    path = run_dir / "report.html"
    write_html(summary, path)
    if as_json:
        emit(report_as_json(summary) | {"report": str(path)})
    else:
        console = Console()
        console.print(closing_table(summary))
        console.print(f"report: {path}", soft_wrap=True, highlight=False)


class _LogFile:
    """A log that cannot be written is no reason to fail: the journal says so of the disk that is full."""

    def __init__(self, file: FileIO) -> None:
        self._file = file

    def write(self, text: str) -> None:
        with suppress(OSError):
            self._file.write(text.encode())

    def flush(self) -> None:
        """Nothing is held back."""


@contextmanager
def _logging_to(path: Path) -> Iterator[None]:
    """Structured logs go to the run's own file, out of the way of the display."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab", buffering=0) as file:
        structlog.configure(
            processors=[
                structlog.processors.TimeStamper(fmt="iso"),
                structlog.processors.add_log_level,
                structlog.processors.format_exc_info,
                structlog.processors.JSONRenderer(),
            ],
            wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
            logger_factory=structlog.WriteLoggerFactory(file=cast(TextIO, _LogFile(file))),
            cache_logger_on_first_use=False,
        )
        try:
            yield
        finally:
            structlog.reset_defaults()


def prepare_command(config: Config, where: str, *, force: bool) -> None:
    plan = compose.resolve(config, [], where)
    console = Console(stderr=True)
    columns = (TextColumn("base policy"), BarColumn(), TextColumn("{task.completed}/{task.total}"), TimeElapsedColumn())
    with Bar(*columns, console=console) as bar:
        task = bar.add_task("warm-up", total=None)

        def show(done: int, total: int, loss: float) -> None:
            bar.update(task, completed=done, total=total)

        made = compose.prepare(config, plan, show, force=force)
    typer.echo(f"{config.model.checkpoint}: {'made' if made else 'is there already'}", err=True)
