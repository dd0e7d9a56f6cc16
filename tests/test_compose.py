"""Runs on disk: found, claimed by one process at a time, and remembered."""

import os
from pathlib import Path

import pytest

from elastic import compose
from elastic.config import Config, ConfigError
from elastic.runtime.journal import Journal


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return Config.model_validate({"run": {"name": "r", "directory": str(tmp_path)}, "model": {"checkpoint": "base"}})


def test_runs_are_found_by_name_path_or_latest(config: Config, tmp_path: Path) -> None:
    runs = [compose.new_run_dir(config) for _ in range(3)]
    for age, run in enumerate(runs):
        os.utime(run / "config.json", (age, age))
    assert compose.list_runs(tmp_path) == runs
    assert compose.find_run(tmp_path, "latest") == runs[-1]
    assert compose.find_run(tmp_path, runs[0].name) == runs[0]
    assert compose.find_run(Path("elsewhere"), str(runs[1])) == runs[1]
    assert compose.load_run_config(runs[0]) == config
    with pytest.raises(ConfigError, match=f"no run 'x'.*{runs[2].name}"):
        compose.find_run(tmp_path, "x")


def test_a_run_is_one_process_at_a_time(tmp_path: Path) -> None:
    with (
        compose._claimed(tmp_path),
        pytest.raises(ConfigError, match="still going on in another process"),
        compose._claimed(tmp_path),
    ):
        pass
    with compose._claimed(tmp_path):
        pass


def test_past_life_is_what_the_journal_says(tmp_path: Path) -> None:
    assert compose.past_life(tmp_path) == compose.PastLife()
    journal = Journal(tmp_path / "journal.sqlite", 0.01)
    journal.meta("providers", "serving,spot")
    journal.meta("status", "finished")
    journal.step(6, 1, {})
    journal.close()
    past = compose.past_life(tmp_path)
    assert past == compose.PastLife(providers=("serving", "spot"), status="finished", steps_done=7)


def test_archived_journals_are_numbered(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    for text in ("one", "two"):
        path.write_text(text)
        compose._archive(path)
    compose._archive(path)
    assert {p.name: p.read_text() for p in tmp_path.iterdir()} == {
        "journal-1.sqlite": "one",
        "journal-2.sqlite": "two",
    }
