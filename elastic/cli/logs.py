"""`elastic logs`."""

import time
from pathlib import Path
from typing import Annotated

import typer

from elastic.cli.account import run_on_disk
from elastic.cli.options import AnyRunName, Follow, Remote, RunsDirectory, Tail
from elastic.cli.output import bad_input
from elastic.cli.remote import detaching, is_hosted, latest, server
from elastic.compose.runs import is_claimed
from elastic.report.log_files import LogFollower, log_files

POLL_S = 0.1


def logs(
    name: AnyRunName = "latest",
    follow: Follow = False,
    source: Annotated[str, typer.Option(help="Whose log: `process`, `orchestrator`, a worker's name, …")] = "",
    tail: Tail = None,
    remote: Remote = False,
    directory: RunsDirectory = Path("runs"),
) -> None:
    """Print a run's log.

    Example: elastic logs latest -f
    """
    if remote or is_hosted(name):
        with server() as client:
            run = latest(client, name)
            with detaching(run):
                for line in client.logs(run, source=source or "process", tail=tail, follow=follow):
                    typer.echo(line.line)
    else:
        _print_disk_logs(name, directory, source or "orchestrator", tail, follow=follow)


def _print_disk_logs(name: str, directory: Path, source: str, tail: int | None, *, follow: bool) -> None:
    run = run_on_disk(directory, name)
    path = run.path / "logs" / f"{source}.log"
    if not path.is_file():
        there = ", ".join(log_files(path.parent)) or "none"
        bad_input(f"--source: run {run.name} has no log {source!r}; there are: {there}")
    follower = LogFollower(source, lambda: path.open("rb"))
    follower.seek("", tail)
    while True:
        goes_on = follow and is_claimed(run.path)
        lines = follower.read(over=not goes_on)
        for one in lines:
            typer.echo(one.line)
        if not lines:
            if not goes_on:
                return
            time.sleep(POLL_S)
