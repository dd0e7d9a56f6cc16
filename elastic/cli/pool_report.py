"""`elastic report` of a pool, and of a job on it."""

from pathlib import Path
from typing import NamedTuple

import msgspec
import typer

from elastic.cli.output import EXIT_FAILED, console, emit, say
from elastic.compose.pool_config import POOL_CONFIG, load_pool
from elastic.config import ConfigError, given_path
from elastic.pool.journal import PoolJournalError, read_deaths, read_entries, read_records
from elastic.report import as_json as report_as_json
from elastic.report import closing_table, summarise, write_html
from elastic.report.jobs import NodeSlice, PoolReport, as_page, as_text, job_text
from elastic.report.pool import history_of, pool_report
from elastic.report.texts import told_samples
from elastic.runtime.journal import JournalError, RunDirectory

PAGE = "report.html"
JOB_PAGE = "pool.html"
"""Beside a run's own report: the job's part of its pool's."""


class Pooled(NamedTuple):
    """A pool, and a job on it, or none; `run` is where the job's run is kept."""

    pool: Path
    job: str = ""
    run: Path | None = None


def pooled(name: str, directory: Path) -> Pooled | None:
    """The pool with this name or path, or the job with this name on a pool in `directory`; None where there is neither.

    Where several pools have had such a job, the latest submission counts.
    """
    for candidate in (directory / name, given_path(name)):
        if name and (candidate / POOL_CONFIG).is_file():
            return Pooled(candidate)
    found: list[tuple[int, Pooled]] = []
    for config in directory.glob(f"*/{POOL_CONFIG}"):
        try:
            entries = read_entries(config.parent)
        except PoolJournalError:
            continue
        for entry in entries:
            if entry.job == name:
                run = Path(entry.directory)
                found.append((RunDirectory(run).start_ns(), Pooled(config.parent, name, run)))
    return max(found, key=lambda each: each[0])[1] if found else None


def pool_report_command(what: Pooled, output: Path | None, *, as_json: bool) -> int:
    """Write the page and print the tables; returns the exit code."""
    try:
        report, slices = live_report(what.pool)
    except PoolJournalError as error:
        say(f"error: {error}")
        return EXIT_FAILED
    if what.job:
        return _job_report(what, report, slices, output, as_json=as_json)
    path = output or what.pool / PAGE
    _write(path, as_page(report, slices))
    if as_json:
        emit(msgspec.to_builtins(report) | {"report": str(path)})
    else:
        print(as_text(report))
        typer.echo(f"report: {path}")
    return 0


def live_report(pool: Path) -> tuple[PoolReport, list[NodeSlice]]:
    """Return the report of the pool in this directory, as its journal has it by now. Raises `PoolJournalError`."""
    config = load_pool(pool / POOL_CONFIG)
    try:
        history = history_of(read_records(pool), config.policies())
    except (msgspec.MsgspecError, ValueError) as error:
        raise PoolJournalError(f"{pool}: {error}") from error
    history.note_deaths(read_deaths(pool))
    now_ns = history.cluster.now_ns
    report = pool_report(history, config.pool.policy, now_ns=now_ns, name=config.pool.name)
    return report, [*history.slices, *history.open_slices(now_ns)]


def _job_report(
    what: Pooled, report: PoolReport, slices: list[NodeSlice], output: Path | None, *, as_json: bool
) -> int:
    job = next((job for job in report.jobs if job.name == what.job), None)
    if job is None:
        raise ConfigError(f"job {what.job} is not in the journal of {what.pool} yet")
    own = RunDirectory(what.run) if what.run is not None and (what.run / "journal.sqlite").exists() else None
    path = output or (own.path if own is not None else what.pool) / (
        JOB_PAGE if own is not None else f"{job.name}.html"
    )
    _write(path, as_page(report, slices, job.name))
    try:
        summary = summarise(own) if own is not None else None
    except JournalError as error:
        say(f"warning: its run has no report: {error}")
        summary = None
    if summary is not None and own is not None:
        write_html(summary, own.path / PAGE, chosen=told_samples(own))
    marks = [mark for mark in report.marks if mark.job == job.name]
    if as_json:
        emit(
            {
                "pool": report.name,
                "job": msgspec.to_builtins(job),
                "marks": msgspec.to_builtins(marks),
                "run": None if summary is None else report_as_json(summary),
                "report": str(path),
            }
        )
        return 0
    print(job_text(report, job))
    if summary is not None and own is not None:
        print()
        console().print(closing_table(summary))
        typer.echo(f"report of its run: {own.path / PAGE}")
    typer.echo(f"report: {path}")
    return 0


def _write(path: Path, page: str) -> None:
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--output: {path} cannot be written ({error.strerror})") from error
