"""With `--json`, standard output is one JSON object and nothing else."""

import json
from contextlib import closing
from pathlib import Path

import psutil
import pytest

from elastic.compose.runs import claimed, new_run_dir
from elastic.config import load_config
from elastic.core.types import NS_PER_S
from elastic.runtime.journal import RUNNING, RunDirectory, SampleRow
from elastic.runtime.left_behind import left_behind, write_down
from tests.journal_rows import run_status


def parsed(out: str) -> dict:
    (only,) = out.splitlines()
    body = json.loads(only)
    assert isinstance(body, dict)
    return body


def test_doctor(elastic) -> None:
    code, out, _ = elastic("doctor", "--json")
    body = parsed(out)
    assert code == (0 if body["healthy"] else 1)
    found = {finding["what"] for finding in body["findings"]}
    assert {"python", "torch", "numba", "xxhash", "zstandard", "disk", "elastic.providers"} <= found


def test_doctor_looks_for_what_a_run_has_left(elastic, config: Path) -> None:
    run_dir = new_run_dir(load_config(config))
    write_down(run_dir, {"spot": "one process"})

    def found() -> dict:
        findings = parsed(elastic("doctor", config, "--json").out)["findings"]
        return {one["what"]: one for one in findings}.get(f"{run_dir.name}: spot", {})

    with claimed(run_dir):
        assert "one process" in found()["found"]
    assert left_behind(run_dir) == {"spot": "one process"}
    assert found()["found"] == "nothing is left any more"
    assert left_behind(run_dir) == {}
    assert not found()


def test_doctor_tells_little_from_none(elastic, monkeypatch: pytest.MonkeyPatch) -> None:
    little = psutil.virtual_memory()._replace(available=10**9)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: little)
    code, out, _ = elastic("doctor")
    assert code == 1
    assert any(line.split()[:2] == ["low", "machine"] for line in out.splitlines())


def test_dry_run_starts_nothing(elastic, config: Path) -> None:
    code, out, err = elastic("run", config, "--providers", "serving,spot", "--seed", 9, "--dry-run", "--json")
    assert (code, err) == (0, "")
    body = parsed(out)
    assert body["config"]["run"]["seed"] == 9
    rows = {row["provider"]: row for row in body["would_acquire"]}
    assert set(rows) == {"trainer", "serving", "spot"}
    assert rows["spot"]["usd_per_hour_max"] == 2.0
    assert body["would_call"] is None
    assert not (config.parent / "runs").exists()


def test_dry_run_shows_what_is_not_said_in_the_file(elastic, config: Path) -> None:
    prices = ("--set", "rewards.name=frozenlake", "--set", "rewards.usd_per_s=0.25", "--set", "rewards.concurrency=3")
    _, out, _ = elastic("run", config, "--providers", "spot", "--dry-run", "--json", *prices)
    body = parsed(out)
    assert body["config"]["providers"].keys() == {"spot"}
    assert body["config"]["providers"]["spot"]["speed"] == 1.0
    assert body["config"]["environment"]["settings"]["sizes"] == [4]
    assert body["would_call"] == {"function": "frozenlake", "concurrency": 3, "usd_per_s": 0.25, "usd_per_call": 0.0}
    _, out, _ = elastic("run", config, "--providers", "spot", "--dry-run", *prices)
    assert "at most 3 calls at once: $0.25 a second" in out


def test_limits_shorter_than_the_longest_turn_are_named(elastic, config: Path) -> None:
    _, out, err = elastic("run", config, "--dry-run", "--json")
    assert json.loads(out)["warnings"] == []
    assert "warning" not in err
    longer = ("--set", "rollout.max_tokens_per_turn=160")
    _, out, err = elastic("run", config, "--dry-run", "--json", *longer)
    (warning,) = json.loads(out)["warnings"]
    assert "scheduler.drain_timeout_s = 5 is less than the 5.33 s" in warning
    assert warning in err
    _, out, _ = elastic("doctor", config, "--json")
    assert "limits" in [finding["what"] for finding in json.loads(out)["findings"]]
    longest = ("--set", "rollout.max_tokens_per_turn=16384", "--set", "engine.max_context_tokens=20000")
    _, out, _ = elastic("run", config, "--dry-run", "--json", *longest, "--set", "engine.kv_blocks=2000")
    assert len(json.loads(out)["warnings"]) == 4


def test_doctor_names_short_limits_and_is_content(elastic) -> None:
    planner = Path(__file__).parents[2] / "examples" / "planner.toml"
    code, out, _ = elastic("doctor", planner, "--json")
    short = [finding["found"] for finding in json.loads(out)["findings"] if finding["warns"]]
    assert any("scheduler.turn_stall_timeout_s = 20 is less than the 546 s" in found for found in short)
    assert code == (not json.loads(out)["healthy"])


def test_dry_run_for_people(elastic, config: Path) -> None:
    code, out, _ = elastic("run", config, "--providers", "spot", "--dry-run")
    assert code == 0
    assert "would acquire, at most" in out
    assert "trainer" in out


def test_no_runs_yet(elastic, tmp_path: Path) -> None:
    code, out, _ = elastic("runs", "--directory", tmp_path, "--json")
    assert code == 0
    assert parsed(out) == {"runs": []}


def test_the_latest_run_is_one_run_in_every_command(elastic, config: Path) -> None:
    settings = load_config(config)
    for number in range(2):
        run = RunDirectory(new_run_dir(settings))
        journal = run.begin_journal(settings.journal)
        for name, text in (("status", f"stopped: {number}"), ("relay", "/there"), ("publisher", f"{number}b")):
            journal.meta(name, text)
        journal.close()
        (run.path / "logs").mkdir(exist_ok=True)
        (run.path / "logs" / "orchestrator.log").write_text(f"{run.name}\n")
    where = ("--directory", settings.run.directory)
    shown = parsed(elastic("runs", "show", "latest", *where, "--json").out)
    assert shown["status"] == "stopped: 1"
    assert shown["run"] == parsed(elastic("runs", *where, "--json").out)["runs"][-1]["run"]
    assert shown["weights"] == {"run": shown["run"], "relay": "/there", "publisher": "1b"}
    assert elastic("logs", "latest", *where).out.split() == [shown["run"]]
    assert parsed(elastic("report", "latest", *where, "--json").out)["run"] == shown["run"]
    assert elastic("runs", "show", *where).out.startswith(f"{shown['run']}  stopped: 1  in ")


def test_a_run_tells_how_full_its_core_is_and_what_a_kill_would_lose_now(elastic, config: Path) -> None:
    run = RunDirectory(new_run_dir(load_config(config)))
    where = ("latest", "--directory", run.path.parent)
    with closing(run.begin_journal(load_config(config).journal)) as journal:
        assert "core" not in elastic("runs", "show", *where).out
        for second, interval_s in ((1, 0.25), (2, 0.05)):
            load = {"core_share": 0.2, "flush_interval_s": interval_s, "tokens_per_s": 1000.0}
            journal.append(SampleRow(t_ns=second * NS_PER_S, status=run_status(**load)))
    shown = elastic("runs", "show", *where).out
    assert "core 20%, tokens every 50 ms: killed workers lose 50 at the most" in shown
    core = parsed(elastic("runs", "show", *where, "--json").out)["core"]
    assert core == {"share": 0.2, "flush_interval_s": 0.05, "kill_loses_tokens": 50}


def test_a_run_whose_process_was_killed_runs_no_more(elastic, config: Path) -> None:
    run = new_run_dir(load_config(config))
    journal = RunDirectory(run).begin_journal(load_config(config).journal)
    journal.meta("status", RUNNING)
    journal.close()

    def status() -> str:
        (row,) = parsed(elastic("runs", "--directory", run.parent, "--json").out)["runs"]
        return row["status"]

    with claimed(run):
        assert status() == "running"
    assert status() == "failed: it ended unexpectedly"
