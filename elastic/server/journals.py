"""What a run's journals say of it: figures, series, trajectories, workers, leases. Reads only, also while it runs."""

import contextlib
from pathlib import Path

import msgspec

from elastic.resources import RunFigures
from elastic.runtime.journal import JournalError, JournalReader, RunDirectory, SampleRow


def figures_of(run_dir: Path, former: int = 0) -> RunFigures | None:
    """How the run stood last, as its journals but for the `former` oldest say; None where they say nothing yet."""
    for path in reversed(RunDirectory(run_dir).journal_paths()[former:]):
        with contextlib.suppress(JournalError, OSError):
            with JournalReader(path) as journal:
                sample = journal.last(SampleRow)
            if sample is not None:
                return RunFigures.model_validate(msgspec.to_builtins(sample.status))
    return None
