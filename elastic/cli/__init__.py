"""The command line: `elastic run, report, runs, serve, prepare, worker, doctor`. Parsing and display only."""

import sys
from collections.abc import Sequence

from elastic.system.imports import importing


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point, of this process's arguments or others. Ctrl-C says one line also while modules are imported."""
    try:
        with importing():
            from elastic.cli.app import main as run

        run(arguments)
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        sys.exit(130)
