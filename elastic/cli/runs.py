"""`elastic runs`: the runs on disk and on a server, and what is to be known of each."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from elastic.cli.account import or_remote, run_on_disk
from elastic.cli.control import stop
from elastic.cli.logs import logs
from elastic.cli.options import AnyRunName, AsJson, Follow, Remote, RunsDirectory
from elastic.cli.output import console, duration, emit, say, tell
from elastic.cli.remote import detaching, is_hosted, latest, server
from elastic.cli.tables import show_listing
from elastic.cli.trajectories import trajectories, trajectory
from elastic.cli.whole_help import WholeHelp
from elastic.compose.runs import is_claimed
from elastic.protocol.api import ENDED, EvaluationFigures, HostedRun, RunBudget
from elastic.protocol.api_client import Client
from elastic.report import as_json as report_as_json
from elastic.report import closing_table, evaluation_words, source_words, sources_of, summarise
from elastic.runtime.journal import (
    PUBLISHER,
    RELAY,
    RUNNING,
    SIMULATED,
    UNEXPECTED,
    DirectoryStore,
    JournalError,
    RunDirectory,
    SampleRow,
)
from elastic.runtime.status import RunStatus, core_words, refilled_words, tokens_at_risk, upstream_words

runs = typer.Typer(cls=WholeHelp, name="runs", rich_markup_mode=None)
HostedName = Annotated[str, typer.Argument(metavar="RUN", help="A run's id on the server, or `latest` there.")]


@runs.callback(invoke_without_command=True)
def list_runs(
    context: typer.Context,
    remote: Remote = False,
    as_json: AsJson = False,
    directory: RunsDirectory = Path("runs"),
) -> None:
    """List the runs there are, oldest first; with --remote those on the server.

    Example: elastic runs --json
    """
    if context.invoked_subcommand is not None:
        return
    if remote:
        _list_hosted(as_json=as_json)
    else:
        rows = [_row(run) for run in DirectoryStore(directory).runs()]
        _show_rows(rows, or_remote(f"no runs in {directory}"), as_json=as_json)


@runs.command("list")
def list_hosted_runs(
    phase: Annotated[str, typer.Option(help="Only those in this phase, such as running.")] = "",
    project: Annotated[str, typer.Option(metavar="NAME", help="Only this project's.")] = "",
    as_json: AsJson = False,
) -> None:
    """List the runs on the server, oldest first.

    Example: elastic runs list --phase running --json
    """
    _list_hosted(phase, project, as_json=as_json)


def _list_hosted(phase: str = "", project: str = "", *, as_json: bool) -> None:
    filters = {key: value for key, value in (("phase", phase), ("project", project)) if value}
    with server() as client:
        rows = [_hosted_row(run) for run in client.runs(**filters)][::-1]
    _show_rows(rows, f"no runs on {client.url}", as_json=as_json)


def _hosted_row(run: HostedRun) -> dict[str, str]:
    status = f"{run.phase}: {run.cause}" if run.cause and run.phase in ENDED else run.phase.value
    return {
        "run": run.id,
        "started_at": run.started_at or "",
        "providers": ",".join(run.providers),
        "status": status,
    }


def _row(run: RunDirectory) -> dict[str, str]:
    try:
        with run.newest_journal() as journal:
            meta = journal.meta()
    except JournalError as error:
        unreadable = f"unreadable: {str(error).partition(': ')[2]}"
        meta = {"status": unreadable if run.journal_paths() else "no journal"}
    if meta.get("status") == RUNNING and not is_claimed(run.path):
        meta["status"] = UNEXPECTED
    if SIMULATED in meta:
        meta["status"] = f"{meta.get('status', '')} (simulated)"
    return {"run": run.name} | {key: meta.get(key, "") for key in ("started_at", "providers", "status")}


def _source(run: RunDirectory) -> dict[str, str] | None:
    """Return what a program that pulls the run's weights needs to know: where they are, and whose signature counts."""
    with run.newest_journal() as journal:
        meta = journal.meta()
    if PUBLISHER not in meta or RELAY not in meta:
        return None
    return {"run": run.name, "relay": meta[RELAY], "publisher": meta[PUBLISHER]}


def _newest_sample(run: RunDirectory) -> RunStatus | None:
    """Return how the run stood when its journal last said so."""
    with run.newest_journal() as journal:
        sample = journal.last(SampleRow)
    return None if sample is None else sample.status


def _show_rows(rows: list[dict[str, str]], nothing: str, *, as_json: bool) -> None:
    """A list of runs, on disk or on a server."""
    if as_json:
        emit({"runs": rows})
        return
    if not rows:
        console().print(nothing)
        return
    cells = [(row["run"], row["started_at"], row["providers"] or "–", row["status"]) for row in rows]
    show_listing(("run", "started", "providers", "status"), cells)


@runs.command()
def show(
    name: AnyRunName = "latest",
    remote: Remote = False,
    as_json: AsJson = False,
    directory: RunsDirectory = Path("runs"),
) -> None:
    """Show how a run stands: its status and figures, how busy its orchestrator is, and what a kill would lose; on a
    server its conditions, too.

    Example: elastic runs show latest
    """
    if remote or is_hosted(name):
        _show_hosted(name, as_json=as_json)
        return
    run = run_on_disk(directory, name, simulated=True)
    row, summary, now = _row(run), summarise(run), _newest_sample(run)
    if as_json:
        core = now and {
            "share": now.core_share,
            "flush_interval_s": now.flush_interval_s,
            "kill_loses_tokens": tokens_at_risk(now.tokens_per_s, now.flush_interval_s),
        }
        upstream = now and msgspec.to_builtins(now.upstream)
        about = {"directory": str(run.path), "core": core, "upstream": upstream, "weights": _source(run)}
        emit(row | about | {"report": report_as_json(summary, None)})
        return
    shown = console()
    shown.print(f"{run.name}  {row['status']}  in {run.path}", soft_wrap=True, highlight=False)
    shown.print(
        f"step {len(summary.steps)}/{summary.steps_planned or '–'}  ${summary.usd:.4f}  "
        f"preemptions {summary.total.preemptions}",
        highlight=False,
    )
    if now is not None and now.flush_interval_s:
        shown.print(core_words(now.core_share, now.flush_interval_s, now.tokens_per_s), highlight=False)
    if now is not None and now.upstream is not None and now.upstream.calls:
        shown.print(upstream_words(now.upstream), highlight=False)
    if summary.refilled:
        shown.print(refilled_words(summary.refilled), highlight=False)
    if summary.steps and (metrics := summary.steps[-1].metrics):
        shown.print(
            "last step, " + ", ".join(f"{name} {value:.4g}" for name, value in metrics.items()), highlight=False
        )
    if words := evaluation_words(summary.evaluations):
        shown.print(words, soft_wrap=True, highlight=False)
    for source in sources_of(step.trainer for step in summary.steps[-1:]):
        shown.print(f"last step, {source_words(source)}", highlight=False)
    shown.print(closing_table(summary))


def _show_hosted(name: str, *, as_json: bool) -> None:
    with server() as client:
        run = client.run(latest(client, name))
        budget = client.budget(run.id)
    if as_json:
        emit(run.model_dump(mode="json") | {"budget": budget.model_dump(mode="json", exclude={"object", "run"})})
        return
    shown, figures = console(), run.figures
    shown.print(f"{run.id}  {run.name}  {run.phase}{f': {run.cause}' if run.cause else ''}", highlight=False)
    shown.print(
        f"step {figures.step}/{figures.steps}  {figures.tokens_per_s:,.0f} tokens/s  ${figures.usd:.4f}  "
        f"preemptions {figures.preemptions}  restarts {run.restarts}",
        highlight=False,
    )
    if figures.flush_interval_s:
        shown.print(core_words(figures.core_share, figures.flush_interval_s, figures.tokens_per_s), highlight=False)
    if (evaluation := figures.evaluation) is not None:
        shown.print(_evaluation_words(evaluation), highlight=False)
    if budget.budget_usd is not None or budget.allotted_usd is not None:
        shown.print(_budget_words(budget), highlight=False)
    rows = [(one.type, one.status, one.reason, one.lastTransitionTime, one.message) for one in run.conditions]
    show_listing(("condition", "status", "reason", "since", "message"), rows)


def _evaluation_words(evaluation: EvaluationFigures) -> str:
    told = [
        f"{name} {one.mean:.3f}{'' if one.error is None else f' ± {one.error:.3f}'}"
        for name, one in evaluation.metrics.items()
    ]
    best = "" if evaluation.best_version is None else f"; best: version {evaluation.best_version}"
    timed_out = " (timed out)" if evaluation.timed_out else ""
    return f"evaluation of version {evaluation.version}: {', '.join(told) or 'no episode finished'}{timed_out}{best}"


def _budget_words(budget: RunBudget) -> str:
    words = [f"${budget.usd:.2f} spent"]
    if budget.committed_usd is not None:
        words.append(f"${budget.committed_usd:.2f} if it is stopped now")
    words.append("no budget of its own" if budget.budget_usd is None else f"budget ${budget.budget_usd:.2f}")
    if budget.allotted_usd is not None:
        words.append(f"${budget.allotted_usd:.2f} allotted by its project")
    if budget.ends_in_s is not None:
        words.append(f"ends in {duration(budget.ends_in_s)} with what it holds")
    return "  ".join(words)


@runs.command()
def resume(
    name: HostedName,
    steps: Annotated[int | None, typer.Option(min=1, help="Train up to this many steps.")] = None,
    budget_usd: Annotated[float | None, typer.Option(min=0, help="What the run may cost in all from now on.")] = None,
    as_json: AsJson = False,
) -> None:
    """Resume a run on the server that has ended.

    Example: elastic runs resume latest --steps 200
    """
    with server() as client:
        run = client.resume(latest(client, name), steps=steps, budget_usd=budget_usd)
    tell(run, f"{run.id} goes on; follow it with: elastic logs {run.id} -f", as_json=as_json)


@runs.command()
def delete(name: Annotated[str, typer.Argument(metavar="RUN", help="A run's id on the server.")]) -> None:
    """Delete a run on the server that has ended, with its journal and checkpoints.

    Example: elastic runs delete run_01JD3K5T7WQ8M2N4P6R8S0V2X4
    """
    with server() as client:
        client.delete(name)
    say(f"deleted {name}")


@runs.command()
def events(
    name: HostedName = "latest",
    follow: Follow = False,
    after: Annotated[str, typer.Option(metavar="ID", help="Begin after the event with this id.")] = "",
) -> None:
    """Print what happens in a run on the server, one JSON object a line.

    Example: elastic runs events latest -f
    """
    with server() as client:
        run = latest(client, name)
        with detaching(run):
            for event in client.events(run, after, follow=follow):
                typer.echo(event.model_dump_json())


@runs.command()
def workers(name: HostedName = "latest") -> None:
    """Print a run's workers, past and present, with their GPU time by account, one JSON object a line.

    Example: elastic runs workers latest
    """
    _print_lines(lambda client, run: client.workers(run), name)


@runs.command()
def checkpoints(name: HostedName = "latest") -> None:
    """Print a run's checkpoints, one JSON object a line.

    Example: elastic runs checkpoints latest
    """
    _print_lines(lambda client, run: client.checkpoints(run), name)


@runs.command()
def leases(name: HostedName = "latest") -> None:
    """Print a run's leases, past and present, one JSON object a line.

    Example: elastic runs leases latest
    """
    _print_lines(lambda client, run: client.leases(run), name)


@runs.command()
def metrics(name: HostedName = "latest") -> None:
    """Print a run's finished steps, one JSON object a line.

    Example: elastic runs metrics latest
    """
    _print_lines(lambda client, run: client.metrics(run).steps, name)


def _print_lines(what: Callable[[Client, str], Any], name: str) -> None:
    """Whatever `what` yields of a run, one JSON object a line."""
    with server() as client:
        for one in what(client, latest(client, name)):
            typer.echo(one.model_dump_json())


runs.command()(trajectories)
runs.command()(trajectory)
# Under `elastic runs`, too, where some look for them.
runs.command()(logs)
runs.command()(stop)
