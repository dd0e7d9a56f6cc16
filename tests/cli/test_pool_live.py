"""A pool as a user starts it: it is up when the command returns, outlives its process's death, and ends when told."""

import asyncio
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from elastic.compose.runs import is_claimed
from elastic.pool.control_messages import PoolControl
from elastic.protocol.run_control import ControlError
from tests.cli.test_signals import until
from tests.pool.stand_in import POOL
from tests.pool.test_pool_process import running

pytestmark = pytest.mark.slow


def pid_of(directory: Path) -> int:
    """Of the pool's process; 0 while it does not answer."""
    try:
        return asyncio.run(PoolControl(directory, 5.0).status()).pid
    except ControlError:
        return 0


def test_a_pool_is_up_comes_back_and_ends(
    start, elastic, refused, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command line's supervisor and a pool as processes, one of which is killed."""
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "pool.toml"
    # Node agents outlive the kill however long the next process takes to begin on full cores.
    file.write_text(POOL.format(directory=tmp_path) + "[limits]\nsilence_s = 60\n")
    process = start("pool", "start", file, "--json")
    out, err = process.communicate(timeout=90)
    assert process.returncode == 0, err
    told = json.loads(out)
    directory = Path(told["directory"])
    supervisor = psutil.Process(told["supervisor"])
    try:
        assert "2 rollout and 1 training nodes" in err
        refused(elastic("pool", "start", file), "is running already")
        os.kill(told["pid"], signal.SIGKILL)
        until(lambda: pid_of(directory) not in (0, told["pid"]), 60)
        log = (directory / "logs" / "supervisor.log").read_text()
        assert "the pool's process was killed by SIGKILL" in log
        nodes = until(lambda: up(elastic), 60)
        assert [node["name"] for node in nodes] == ["rollout-1", "rollout-2", "train-1"]
        node_agents = [psutil.Process(node["node_agent"]["pid"]) for node in nodes]
        of_pool = [supervisor, *supervisor.children(recursive=True), *node_agents]
    finally:
        code, _, err = elastic("pool", "stop", "--wait-s", "60")
    assert code == 0, err
    assert "has ended" in err
    assert not [one for one in of_pool if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]
    assert not is_claimed(directory)
    code, out, err = elastic("report", "lab", "--json")
    assert code == 0, err
    assert json.loads(out)["jobs"] == []


def up(elastic: Callable[..., tuple[int, str, str]]) -> list[dict[str, object]]:
    nodes = json.loads(elastic("pool", "status", "--json")[1])["nodes"]
    return nodes if len(nodes) == 3 and all(node["node_agent"]["up"] for node in nodes) else []


def test_a_pool_that_cannot_be_is_not_waited_for(start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The supervisor as a process: it must notice by itself that the pool's process has ended."""
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "pool.toml"
    file.write_text(POOL.format(directory=tmp_path))
    (tmp_path / "pools" / "lab").mkdir(parents=True)
    (tmp_path / "pools" / "lab" / "journal.sqlite").write_text("no database")
    process = start("pool", "start", file, "--max-restarts", "0")
    _, err = process.communicate(timeout=90)
    assert process.returncode in (1, 2)
    assert "could not be started" in err
    assert "journal.sqlite" in err
    assert "Traceback" not in err


@pytest.mark.nightly
async def test_the_report_of_a_live_pool_and_of_its_jobs(tmp_path: Path, elastic) -> None:
    async with running(tmp_path) as pool:
        for job in ("one", "two"):
            await pool.control.submit(pool.submit(job, steps=4))
        await pool.until_over("one", "two")
        code, out, err = await asyncio.to_thread(elastic, "report", pool.directory, "--json")
        assert code == 0, err
        report = json.loads(out)
    assert [job["state"] for job in report["jobs"]] == ["finished", "finished"]
    for job in report["jobs"]:
        assert job["steps"] == 4
        assert job["switches"] >= 8
        assert 0.2 < job["phases_s"]["rollout"] < 2.0
        assert 0 < job["usd"] <= job["alone_usd_per_hour"] * report["hours"]
    assert sum(job["usd"] for job in report["jobs"]) + report["usd_unbilled"] == pytest.approx(report["usd"])
    assert report["usd"] <= report["usd_paid"]
    page = await asyncio.to_thread(Path(report["report"]).read_text)
    for words in ("Turns by node", "rollout-1", "train-1", "Bill beside the bill alone"):
        assert words in page
    code, out, err = await asyncio.to_thread(elastic, "report", "one", "--pools", tmp_path)
    assert code == 0, err
    assert "one on pool lab, 2 jobs placed by ours" in out
    assert "running: its residents are up" in out
