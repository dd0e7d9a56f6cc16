"""`elastic report` and `elastic runs`."""

from pathlib import Path

import typer
from rich.console import Console
from rich.table import Table

from elastic import compose
from elastic.cli.app import EXIT_FAILED, emit
from elastic.report import Summary, as_markdown, closing_table, compare, summarise, write_html
from elastic.report import as_json as report_as_json
from elastic.runtime.journal import JournalError, JournalReader


def _summary(run_dir: Path) -> Summary:
    reader = JournalReader(run_dir / "journal.sqlite")
    try:
        return summarise(reader)
    finally:
        reader.close()


def report_command(
    name: str, directory: Path, output: Path | None, other: str | None, *, markdown: bool, as_json: bool
) -> None:
    run_dir = compose.find_run(directory, name)
    other_dir = compose.find_run(directory, other) if other else None
    try:
        summary = _summary(run_dir)
        comparison = compare(summary, _summary(other_dir)) if other_dir else None
    except JournalError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(EXIT_FAILED) from error
    if as_json:
        emit(report_as_json(summary, comparison))
    elif markdown:
        typer.echo(as_markdown(summary, comparison))
    else:
        path = output or run_dir / "report.html"
        write_html(summary, path, comparison)
        console = Console()
        console.print(closing_table(summary))
        console.print(f"report: {path}", soft_wrap=True, highlight=False)


def runs_command(directory: Path, *, as_json: bool) -> None:
    rows = [_row(run_dir) for run_dir in compose.list_runs(directory)]
    if as_json:
        emit({"runs": rows})
        return
    table = Table(box=None, header_style="dim")
    for column in ("run", "started", "providers", "status"):
        table.add_column(column)
    for row in rows:
        table.add_row(row["run"], row["started_at"], row["providers"] or "–", row["status"])
    Console().print(table if rows else f"no runs in {directory}")


def _row(run_dir: Path) -> dict[str, str]:
    try:
        reader = JournalReader(run_dir / "journal.sqlite")
        meta = reader.meta()
        reader.close()
    except JournalError:
        meta = {"status": "no journal"}
    if meta.get("status") == compose.RUNNING and not compose.is_claimed(run_dir):
        meta["status"] = compose.UNEXPECTED
    return {"run": run_dir.name} | {key: meta.get(key, "") for key in ("started_at", "providers", "status")}
