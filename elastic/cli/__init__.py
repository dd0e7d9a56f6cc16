"""The command line: `elastic run, report, runs, serve, prepare, worker, doctor`. Parsing and display only."""

import sys


def main() -> None:
    """Entry point. Ctrl-C says one line also while modules are imported."""
    try:
        from elastic.cli.app import main as run

        run()
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        sys.exit(130)
