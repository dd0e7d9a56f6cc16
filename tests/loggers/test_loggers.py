"""The loggers themselves: what they have is told whole, also after a kill, and no row comes twice."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from elastic.report.tracking import TrackedRow, TrackedRun, TrackedSample, logger_named

pytestmark = [pytest.mark.loggers, pytest.mark.filterwarnings("ignore")]

NAMES = ("trackio", "tensorboard", "wandb", "mlflow")
WRITER = """
import sys
from pathlib import Path
from tests.loggers.test_loggers import rows, tracked
from elastic.report.tracking import logger_named
name, directory, first, behind = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
logger = logger_named(name, tracked(directory))
print(*sorted(logger.open()), flush=True)
for row in rows(first, behind):
    logger.write(row)
print("written", flush=True)
sys.stdin.readline()
logger.close()
"""


def tracked(directory: Path) -> TrackedRun:
    return TrackedRun(name="run-one", project="elastic-tests", directory=directory, settings={"seed": 3})


def rows(first: int, behind: int) -> list[TrackedRow]:
    sample = TrackedSample(
        trajectory="0/0/0",
        reward=0.5,
        messages=[{"role": "user", "content": "where to?"}, {"role": "assistant", "content": "left " * 5000}],
    )
    return [
        TrackedRow(
            step=step, at_s=1_767_225_600.0 + step, figures={"actor/lr": step / 8, "time/step": 1.5}, samples=[sample]
        )
        for step in range(first, behind)
    ]


def environment(directory: Path) -> Mapping[str, str]:
    """That of a logger's process, which finds nothing of this user's."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("WANDB_", "MLFLOW_", "TRACKIO_"))}
    own = {"HOME": str(directory), "TRACKIO_DIR": str(directory / "trackio"), "WANDB_MODE": "offline"}
    return kept | own


def start(name: str, directory: Path, first: int, behind: int) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", WRITER, name, str(directory), str(first), str(behind)],
        env=environment(directory),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def said(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


@pytest.mark.parametrize("name", NAMES)
def test_what_a_logger_has_is_a_beginning_of_what_was_written(name: str, tmp_path: Path) -> None:
    with start(name, tmp_path, 0, 3) as first:
        assert said(first) == ""
        assert said(first) == "written"
        first.communicate("\n", timeout=120)
    assert first.returncode == 0
    with start(name, tmp_path, 3, 6) as killed:
        assert said(killed) == "0 1 2"
        assert said(killed) == "written"
        killed.send_signal(signal.SIGKILL)
    with start(name, tmp_path, 0, 0) as asking:
        found = [int(step) for step in said(asking).split()]
        asking.communicate("\n", timeout=120)
    assert found == list(range(len(found)))
    assert 3 <= len(found) <= 6
    if name != "wandb":
        assert len(found) == 6, "these have what was written, at once"
    with start(name, tmp_path, len(found), 6) as last:
        assert said(last) == " ".join(map(str, found))
        last.communicate("\n", timeout=120)
    with start(name, tmp_path, 0, 0) as asking:
        assert said(asking) == "0 1 2 3 4 5"
        asking.communicate("\n", timeout=120)


def test_a_row_that_mlflow_and_trackio_are_given_twice_is_there_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # MLflow keeps artifacts below the folder that it is used in.
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'mlflow.db'}")
    for name in ("mlflow", "trackio"):
        logger = logger_named(name, tracked(tmp_path))
        logger.open()
        for row in [*rows(0, 2), *rows(0, 2)]:
            logger.write(row)
        assert logger.open() == {0, 1}
    from mlflow import MlflowClient
    from trackio.sqlite_storage import SQLiteStorage

    client = MlflowClient()
    experiment = client.get_experiment_by_name("elastic-tests")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    assert [one.value for one in client.get_metric_history(run.info.run_id, "actor/lr")] == [0.0, 0.125]
    assert len(SQLiteStorage.get_logs("elastic-tests", "run-one", run_id="run-one")) == 2
    (trace, *_) = SQLiteStorage.get_traces("elastic-tests", "run-one")
    assert trace["metadata"]["reward"] == 0.5


def test_settings_that_a_kill_kept_from_mlflow_come_with_the_next_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow import MlflowClient

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'mlflow.db'}")
    client = MlflowClient()
    number = client.create_experiment("elastic-tests")
    made = client.create_run(number, run_name="run-one", tags={"elastic.run": "run-one"}).info.run_id
    for _ in range(2):
        logger = logger_named("mlflow", tracked(tmp_path))
        assert logger.open() == set()
        logger.close()
        assert client.get_run(made).data.params == {"seed": "3"}


@pytest.mark.parametrize("lost_bytes", [1, 4, 40])
def test_a_torn_row_of_tensorboard_is_none(lost_bytes: int, tmp_path: Path) -> None:
    logger = logger_named("tensorboard", tracked(tmp_path))
    logger.open()
    for row in rows(0, 3):
        logger.write(row)
    logger.close()
    (path,) = (tmp_path / "tensorboard").glob("events*")
    os.truncate(path, path.stat().st_size - lost_bytes)
    again = logger_named("tensorboard", tracked(tmp_path))
    assert again.open() == {0, 1}
    again.write(rows(2, 3)[0])
    again.close()
    assert logger_named("tensorboard", tracked(tmp_path)).open() == {0, 1, 2}


def test_a_database_of_mlflow_that_a_kill_left_half_made_stands_in_nobody_s_way(tmp_path: Path) -> None:
    """Its draft is seen while it is made, and then its process is killed: SQLite does not undo half of it."""
    with start("mlflow", tmp_path, 0, 1) as killed:
        while killed.poll() is None and not [*tmp_path.glob("mlflow/draft-*/mlflow.db")]:
            time.sleep(0.01)
        killed.kill()
    assert [*tmp_path.glob("mlflow/draft-*/mlflow.db")]
    assert not (tmp_path / "mlflow" / "mlflow.db").exists()
    with start("mlflow", tmp_path, 0, 2) as first:
        assert said(first) == ""
        assert said(first) == "written"
        first.communicate("\n", timeout=120)
    assert not [*tmp_path.glob("mlflow/draft-*")]


def test_mlflow_s_database_is_where_it_is_said_to_be_whatever_the_folder_is_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And where it was removed, another one is made, though the process has known the former."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    folder = tmp_path / "50% what?#'it's"
    logger = logger_named("mlflow", tracked(folder))
    for _ in range(2):
        assert logger.open() == set()
        logger.write(rows(0, 1)[0])
        assert logger.open() == {0}
        (folder / "mlflow" / "mlflow.db").unlink()
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)


def test_what_others_start_does_not_carry_the_mark_of_wandb_s_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment(tmp_path).items():
        monkeypatch.setenv(name, value)
    logger = logger_named("wandb", tracked(tmp_path))
    logger.open()
    with subprocess.Popen(["sleep", "600"]) as another:
        logger.write(rows(0, 1)[0])
        assert logger.open() <= {0}, "which ends the process that had it open"
        logger.close()
        assert another.poll() is None
        another.kill()
