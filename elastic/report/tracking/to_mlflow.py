"""MLflow: a tracking server (`MLFLOW_TRACKING_URI`), else a database below the run's directory.

A row's figures go in one request, with the time of the row and the figure `elastic/step`; a server's database makes one
transaction of it, and takes the same figure of the same step, time and value once. A store of files has no
transactions: there a process that dies amid a row may leave a part of it. What is there is asked of the store by
`elastic/step`, which is the row's last figure.
"""
# It is installed beside elastic by those who use it.
# pyright: reportMissingImports=false

import json
import os
import shutil
import tempfile
from pathlib import Path

from mlflow import MlflowClient
from mlflow.entities import Metric, Param
from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore
from sqlalchemy import make_url

from elastic.report.tracking.delivery import TrackedRow, TrackedRun

MARK = "elastic/step"
RUN_TAG = "elastic.run"
DRAFT = "draft-"
"""How the name of a folder begins in which a database is made."""
PATIENCE = {"MLFLOW_HTTP_REQUEST_TIMEOUT": "20", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0"}
"""A failed request is reported, and repeated, by the delivery of rows."""


class MlflowLogger:
    def __init__(self, run: TrackedRun) -> None:
        self._tracked = run
        self._run_id = ""
        os.environ["MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT"] = "true"  # With the password that is in it.
        for name, value in PATIENCE.items():
            os.environ.setdefault(name, value)
        self._own_artifacts: str | None = None
        if not os.environ.get("MLFLOW_TRACKING_URI"):
            os.environ["MLFLOW_TRACKING_URI"] = _uri(run.directory.absolute() / "mlflow.db")
            self._own_artifacts = (run.directory.absolute() / "artifacts").as_uri()

    def open(self) -> set[int]:
        if (database := _file(os.environ["MLFLOW_TRACKING_URI"])) is not None:
            _make(database)
        run, client = self._tracked, MlflowClient()
        self._client = client
        experiment = client.get_experiment_by_name(run.project)
        number = (
            client.create_experiment(run.project, artifact_location=self._own_artifacts)
            if experiment is None
            else experiment.experiment_id
        )
        # The tag is there from the run's first moment on: a process that dies after that finds the run again.
        found = client.search_runs([number], filter_string=f"tags.`{RUN_TAG}` = '{run.name}'", max_results=1)
        made = found[0] if found else client.create_run(number, run_name=run.name, tags={RUN_TAG: run.name})
        self._run_id = made.info.run_id
        there = made.data.params  # A process that died after the run's first moment may have left some of them out.
        if lacking := [Param(key, str(value)) for key, value in run.settings.items() if key not in there]:
            client.log_batch(self._run_id, params=lacking, synchronous=True)
        if made.info.status != "RUNNING":
            client.update_run(self._run_id, status="RUNNING")
        return {metric.step for metric in client.get_metric_history(self._run_id, MARK)}

    def write(self, row: TrackedRow) -> None:
        at_ms = round(row.at_s * 1000)
        figures = [*row.figures.items(), (MARK, float(row.step))]
        metrics = [Metric(name, value, at_ms, row.step) for name, value in figures]
        if row.samples:  # Before the figures: a file that is written again is the same.
            lines = [
                json.dumps({"trajectory": one.trajectory, "reward": one.reward, "messages": one.messages})
                for one in row.samples
            ]
            self._client.log_text(self._run_id, "\n".join(lines) + "\n", f"samples/step-{row.step:06}.jsonl")
        self._client.log_batch(self._run_id, metrics=metrics, synchronous=True)

    def close(self) -> None:
        self._client.set_terminated(self._run_id)


def _make(database: Path) -> None:
    """Have a database with MLflow's tables, unless it is there.

    It is made elsewhere and put there whole: SQLite does not undo half of MLflow's migrations, where its process dies
    amid them, and MLflow then finds tables in its way for ever.
    """
    if database.exists():
        return
    folder = database.parent
    folder.mkdir(parents=True, exist_ok=True)
    for left in folder.glob(f"{DRAFT}*"):
        shutil.rmtree(left)
    with tempfile.TemporaryDirectory(prefix=DRAFT, dir=folder) as name:
        draft = Path(name) / database.name
        _let_go(draft)
        draft.rename(database)
    _let_go(database)  # Another of this name may have been there before, and been removed.


def _let_go(database: Path) -> None:
    """Open MLflow's store and close it again: MLflow makes the tables that are missing."""
    artifacts = (database.parent / "artifacts").as_uri()
    SqlAlchemyStore(_uri(database), artifacts).engine.dispose()


def _uri(database: Path) -> str:
    quoted = str(database).replace("%", "%25").replace("?", "%3F")
    return f"sqlite:///{quoted}"


def _file(uri: str) -> Path | None:
    """The file of a database of SQLite's; None for all else."""
    if not uri.startswith("sqlite:"):
        return None
    name = make_url(uri).database
    return Path(name).absolute() if name and name != ":memory:" else None
