"""A run that was evaluated: its journal, and what evaluations came to in it."""

from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path

import msgspec

from elastic.config import JournalConfig
from elastic.core.evaluation import EvaluationRecord, SetFigures
from elastic.core.scores import metrics
from elastic.core.types import NS_PER_S
from elastic.runtime.journal import EvaluationRow, RunDirectory, SampleRow, StepRow

SAMPLES, PASSES = 2, (1, 2)


def evaluation(
    version: int, at_s: float, sets: Mapping[str, Sequence[Sequence[float]]], *, timed_out: bool = False
) -> EvaluationRow:
    """Of tasks with these rewards; one more episode failed in each set."""
    every = [task for tasks in sets.values() for task in tasks]
    record = EvaluationRecord(
        version=version,
        started_ns=round((at_s - 4) * NS_PER_S),
        ended_ns=round(at_s * NS_PER_S),
        timed_out=timed_out,
        metrics=metrics(every, SAMPLES, PASSES),
        sets={
            name: SetFigures(
                finished=sum(map(len, tasks)),
                failed=1,
                cut_off=0,
                metrics=metrics(tasks, SAMPLES, PASSES),
                rewards=[[*task] for task in tasks],
            )
            for name, tasks in sets.items()
        },
    )
    return EvaluationRow(version=version, t_ns=round(at_s * NS_PER_S), record=record)


def evaluated_run(
    directory: Path, *rows: EvaluationRow | SampleRow | StepRow, status: str = "finished", **section: object
) -> Path:
    """A run with these records, and `section` as its `[evaluation]`."""
    config = msgspec.json.encode({"evaluation": section}).decode()
    notes = {"run": "measured", "status": status, "config": config}
    directory.mkdir(parents=True, exist_ok=True)
    with closing(RunDirectory(directory).begin_journal(JournalConfig.model_validate({}), notes=notes)) as journal:
        journal.append(*rows)
    return directory
