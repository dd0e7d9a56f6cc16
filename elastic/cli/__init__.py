"""The command line: `elastic run, report, runs, serve, prepare, worker, doctor`. Parsing and display only."""

from elastic.cli.app import app, main

__all__ = ["app", "main"]
