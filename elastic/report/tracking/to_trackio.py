"""Trackio: its database on this machine (`TRACKIO_DIR`), from which `trackio sync` brings a project to a Space.

A row is one transaction under an id that its run and step make, and the database has each id once. So each row is there
whole or not at all, and once, whatever dies.
"""
# It is installed beside elastic by those who use it.
# pyright: reportMissingImports=false

from datetime import UTC, datetime

from trackio.sqlite_storage import SQLiteStorage
from trackio.trace import Trace

from elastic.report.tracking.delivery import TrackedRow, TrackedRun


class TrackioLogger:
    def __init__(self, run: TrackedRun) -> None:
        self._run = run

    def open(self) -> set[int]:
        run = self._run
        return {log["step"] for log in SQLiteStorage.get_logs(run.project, run.name, run_id=run.name)}

    def write(self, row: TrackedRow) -> None:
        run = self._run
        told = dict[str, object](row.figures)
        for place, sample in enumerate(row.samples):
            about = {"trajectory": sample.trajectory, "reward": sample.reward}
            # It is what `trackio.log` keeps of a trace; a class of its own has no other name for that.
            told[f"samples/{place}"] = Trace(sample.messages, about)._to_dict(run.project, run.name, row.step)
        SQLiteStorage.bulk_log(
            run.project,
            run.name,
            [told],
            steps=[row.step],
            timestamps=[datetime.fromtimestamp(row.at_s, UTC).isoformat()],
            log_ids=[f"{run.name}:{row.step}"],
            config=dict(run.settings),
            run_id=run.name,
        )

    def close(self) -> None:
        return None
