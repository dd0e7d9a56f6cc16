"""Runs on disk: found, claimed by one process at a time, and remembered."""

import os
from contextlib import closing
from pathlib import Path

import pytest

from elastic import compose
from elastic.compose import lives
from elastic.config import Config, ConfigError
from elastic.core.scheduler import Scheduler
from elastic.runtime.gateway import GatewayError
from elastic.runtime.journal import Journal, JournalError, JournalReader


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
        compose.claimed(tmp_path),
        pytest.raises(ConfigError, match="still going on in another process"),
        compose.claimed(tmp_path),
    ):
        pass
    with compose.claimed(tmp_path):
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


def test_what_hardly_began_says_nothing_of_the_past(tmp_path: Path) -> None:
    for name, providers in (("journal-9", "spot"), ("journal-10", "serving"), ("journal", None)):
        journal = Journal(tmp_path / f"{name}.sqlite", 0.01)
        if providers is not None:
            journal.meta("providers", providers)
        journal.close()
    assert compose.past_life(tmp_path).providers == ("serving",)
    (tmp_path / "journal.sqlite").unlink()
    assert compose.past_life(tmp_path).providers == ("serving",)


def test_a_simulated_run_cannot_go_on(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.sqlite", 0.01)
    journal.meta("providers", "spot")
    journal.meta("simulated", "{}")
    journal.close()
    with pytest.raises(ConfigError, match=r"journal\.sqlite: a simulated run; only live ones can go on"):
        compose.past_life(tmp_path)


def test_a_past_that_cannot_be_read_is_not_forgotten(tmp_path: Path) -> None:
    (tmp_path / "journal.sqlite").write_bytes(b"no database" * 1000)
    with pytest.raises(ConfigError, match=r"journal\.sqlite: .*moved away"):
        compose.past_life(tmp_path)


class TestNextLife:
    @pytest.fixture
    def run_dir(self, config: Config) -> Path:
        run_dir = compose.new_run_dir(config)
        live(run_dir, "first")
        return run_dir

    @pytest.fixture
    def changed(self, config: Config) -> Config:
        return config.model_copy(update={"run": config.run.model_copy(update={"steps": 7})})

    def test_has_room_for_its_own_journal(self, run_dir: Path, changed: Config) -> None:
        for name in ("second", "third"):
            with lives.next_life(run_dir, changed, scheduler(changed)) as past:
                live(run_dir, name)
            assert past.providers == ("spot",)
        assert journals(run_dir) == {
            "journal-1.sqlite": "first",
            "journal-2.sqlite": "second",
            "journal.sqlite": "third",
        }
        assert compose.load_run_config(run_dir).run.steps == 7

    @pytest.mark.parametrize("came_to", ["journal.sqlite", "journal.sqlite-wal", ""])
    def test_leaves_no_trace_if_it_cannot_begin(
        self, run_dir: Path, config: Config, changed: Config, came_to: str
    ) -> None:
        def refused() -> None:
            with lives.next_life(run_dir, changed, scheduler(changed)):
                if came_to:
                    (run_dir / came_to).write_text("second")
                raise GatewayError("port in use")

        with pytest.raises(GatewayError):
            refused()
        assert journals(run_dir) == {"journal.sqlite": "first"}
        assert compose.load_run_config(run_dir) == config

    def test_is_kept_once_it_has_begun(self, run_dir: Path, changed: Config) -> None:
        begun = scheduler(changed)
        begun._run.version = 3

        def broken_off() -> None:
            with lives.next_life(run_dir, changed, begun):
                live(run_dir, "second")
                raise JournalError("disk full")

        with pytest.raises(JournalError):
            broken_off()
        assert journals(run_dir) == {"journal-1.sqlite": "first", "journal.sqlite": "second"}


def test_a_journal_moves_with_what_is_not_in_its_file_yet(tmp_path: Path) -> None:
    for name in ("a.sqlite", "a.sqlite-wal", "b.sqlite", "b.sqlite-shm"):
        (tmp_path / name).write_text(name)
    lives._move_journal(tmp_path / "a.sqlite", tmp_path / "b.sqlite")
    assert {p.name: p.read_text() for p in tmp_path.iterdir()} == {
        "b.sqlite": "a.sqlite",
        "b.sqlite-wal": "a.sqlite-wal",
    }


def live(run_dir: Path, name: str) -> None:
    journal = Journal(run_dir / "journal.sqlite", 0.01)
    journal.meta("providers", "spot")
    journal.meta("status", name)
    journal.close()


def journals(run_dir: Path) -> dict[str, str]:
    found: dict[str, str] = {}
    for path in run_dir.glob("journal*.sqlite"):
        with closing(JournalReader(path)) as reader:
            found[path.name] = reader.meta()["status"]
    return found


def scheduler(config: Config) -> Scheduler:
    plan = compose.resolve(config, [], "test")
    return Scheduler(compose.run_plan(plan), compose.limits(config), compose.policies(config), 0)
