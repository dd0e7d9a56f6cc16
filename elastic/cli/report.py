"""`elastic report`: of a run on disk or on a server, of a pool and of its jobs."""

from pathlib import Path
from typing import Annotated

import msgspec
import typer

from elastic.cli.account import run_on_disk
from elastic.cli.options import AsJson, Remote, RunsDirectory, refuse_all_but
from elastic.cli.output import EXIT_FAILED, console, emit, say
from elastic.cli.pool_report import pool_report_command, pooled
from elastic.cli.remote import is_hosted, latest, server
from elastic.report import Summary, as_markdown, closing_table, comparison_table, inspect_logs, summarise, write_html
from elastic.report import as_json as report_as_json
from elastic.report import compare as compared
from elastic.report.texts import told_samples
from elastic.runtime.journal import JournalError


def report(
    context: typer.Context,
    name: Annotated[
        str, typer.Argument(metavar="RUN", help="A run's name or path, or `latest`; or a pool's, or a pool's job's.")
    ] = "latest",
    output: Annotated[Path | None, typer.Option(help="Write the HTML here instead of into the run.")] = None,
    compare: Annotated[
        str | None,
        typer.Option(metavar="RUN", help="A run to compare with, usually of the same seed without providers."),
    ] = None,
    markdown: Annotated[bool, typer.Option("--md", help="Print Markdown instead.")] = False,
    remote: Remote = False,
    as_json: AsJson = False,
    directory: RunsDirectory = Path("runs"),
    pools: Annotated[Path, typer.Option(help="Where pools are kept.")] = Path("pools"),
) -> int:
    """Write a run's report: what went wrong, what it cost and gained, where every GPU-second went.

    Of a pool: every node's turns, cycles, bubbles, slowdowns, switches and bills; of a job on it, its part of these.

    Example: elastic report latest --compare frozenlake-20260101-120000
    Example: elastic report lab
    """
    if remote or is_hosted(name):
        refuse_all_but(context, "--remote", "RUN", "--output", "--md", "--json", "NAME")
        _hosted_report(name, output, markdown=markdown, as_json=as_json)
        return 0
    if (shared := pooled(name, pools)) is not None:
        refuse_all_but(context, "of a pool or of its job", "--output", "--json", "--pools", "--directory", "NAME")
        return pool_report_command(shared, output, as_json=as_json)
    run = run_on_disk(directory, name, simulated=True)
    other_run = run_on_disk(directory, compare, simulated=True) if compare else None
    try:
        summary = summarise(run)
        comparison = compared(summary, summarise(other_run)) if other_run else None
        chosen = None if as_json or markdown else told_samples(run)
    except JournalError as error:
        say(f"error: {error}")
        return EXIT_FAILED
    if as_json:
        emit(report_as_json(summary, comparison))
    elif markdown:
        typer.echo(as_markdown(summary, comparison))
    else:
        path = output or run.path / "report.html"
        write_html(summary, path, comparison, chosen, inspect_logs(run.path))
        shown = console()
        shown.print(closing_table(summary))
        if comparison is not None:
            shown.print(comparison_table(summary, comparison))
        shown.print(f"report: {path}", soft_wrap=True, highlight=False)
    return 0


def _hosted_report(name: str, output: Path | None, *, markdown: bool, as_json: bool) -> None:
    with server() as client:
        run = latest(client, name)
        found = client.report(run)
        if as_json:
            emit(found)
            return
        summary = msgspec.convert(found, Summary, strict=False)
        if markdown:
            typer.echo(as_markdown(summary))
            return
        console().print(closing_table(summary))
        if output is None:
            console().print(f"report: {client.url}/v1/runs/{run}/report?format=html", soft_wrap=True, highlight=False)
        else:
            output.write_text(client.report_text(run, "html"), encoding="utf-8")
            console().print(f"report: {output}", soft_wrap=True, highlight=False)
