"""`elastic report` and `elastic runs`."""

from pathlib import Path

import typer

from elastic.cli.account import run_on_disk
from elastic.cli.output import EXIT_FAILED, console, emit
from elastic.cli.tables import show_listing
from elastic.compose.runs import is_claimed
from elastic.report import as_json as report_as_json
from elastic.report import as_markdown, closing_table, compare, comparison_table, summarise, write_html
from elastic.runtime.journal import RUNNING, UNEXPECTED, DirectoryStore, JournalError, RunDirectory


def report_command(
    name: str, directory: Path, output: Path | None, other: str | None, *, markdown: bool, as_json: bool
) -> None:
    run, other_run = run_on_disk(directory, name), run_on_disk(directory, other) if other else None
    try:
        summary = summarise(run)
        comparison = compare(summary, summarise(other_run)) if other_run else None
    except JournalError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(EXIT_FAILED) from error
    if as_json:
        emit(report_as_json(summary, comparison))
    elif markdown:
        typer.echo(as_markdown(summary, comparison))
    else:
        path = output or run.path / "report.html"
        write_html(summary, path, comparison)
        shown = console()
        shown.print(closing_table(summary))
        if comparison is not None:
            shown.print(comparison_table(summary, comparison))
        shown.print(f"report: {path}", soft_wrap=True, highlight=False)


def runs_command(directory: Path, *, as_json: bool) -> None:
    rows = [_row(run) for run in DirectoryStore(directory).runs()]
    show_rows(rows, f"no runs in {directory}", as_json=as_json)


def show_rows(rows: list[dict[str, str]], nothing: str, *, as_json: bool) -> None:
    """A list of runs, on disk or on a server."""
    if as_json:
        emit({"runs": rows})
        return
    if not rows:
        console().print(nothing)
        return
    cells = [(row["run"], row["started_at"], row["providers"] or "–", row["status"]) for row in rows]
    show_listing(("run", "started", "providers", "status"), cells)


def show_run_command(name: str, directory: Path, *, as_json: bool) -> None:
    """How a run on disk stands. Raises `JournalError` where it has not begun."""
    run = run_on_disk(directory, name)
    row, summary = _row(run), summarise(run)
    if as_json:
        emit(row | {"directory": str(run.path), "report": report_as_json(summary, None)})
        return
    shown = console()
    shown.print(f"{run.name}  {row['status']}  in {run.path}", soft_wrap=True, highlight=False)
    shown.print(
        f"step {len(summary.steps)}/{summary.steps_planned or '–'}  ${summary.usd:.4f}  "
        f"preemptions {summary.total.preemptions}",
        highlight=False,
    )
    shown.print(closing_table(summary))


def _row(run: RunDirectory) -> dict[str, str]:
    try:
        with run.newest_journal() as journal:
            meta = journal.meta()
    except JournalError:
        meta = {"status": "no journal"}
    if meta.get("status") == RUNNING and not is_claimed(run.path):
        meta["status"] = UNEXPECTED
    return {"run": run.name} | {key: meta.get(key, "") for key in ("started_at", "providers", "status")}
