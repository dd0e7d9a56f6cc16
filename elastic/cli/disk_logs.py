"""`elastic logs` for runs on disk."""

import time
from pathlib import Path

import typer

from elastic.cli.account import run_on_disk
from elastic.cli.output import bad_input
from elastic.compose.runs import is_claimed
from elastic.report.log_files import LogFollower, log_files

POLL_S = 0.1


def disk_logs_command(name: str, directory: Path, source: str, tail: int | None, *, follow: bool) -> None:
    run = run_on_disk(directory, name)
    path = run.path / "logs" / f"{source}.log"
    if not path.is_file():
        there = ", ".join(log_files(path.parent)) or "none"
        bad_input(f"--source: run {run.name} has no log {source!r}; there are: {there}")
    follower = LogFollower(source, lambda: path.open("rb"))
    follower.seek("", tail)
    while True:
        goes_on = follow and is_claimed(run.path)
        lines = follower.read()
        for one in lines:
            typer.echo(one.line)
        if not lines:
            if not goes_on:
                return
            time.sleep(POLL_S)
