"""A pool whose rollout nodes are a Ray cluster's: its real process and node agents, small residents and jobs.

Its process is killed, a machine is lost and comes back, a node is drained and asked for again, and in the end nothing
of it is left at Ray.
"""

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks._ray_nodes import RayNodes
from tests.pool.test_devices import NVIDIA, stand_in
from tests.pool.test_joined_nodes import goes_on, up
from tests.pool.test_pool_process import Pool, running

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]

PATIENCE_S = 240.0
NODES = ("rollout-1", "rollout-2")


def asked_of(nodes: RayNodes, directory: Path) -> Mapping[str, Any]:
    own = {"address": nodes.address, "resources": {"place": 1.0}, "poll_s": 0.5, "directory": str(directory)}
    own["answer_timeout_s"] = PATIENCE_S
    return {"kind": "ray", "ray": own}


def waits(status: Mapping[str, Any]) -> list[str]:
    return [words for words in status["asked_for"].values() if "it waits for room in the Ray cluster" in words]


def shipped(directory: Path) -> int:
    """How many node agents find the package that the pool has Ray ship, elsewhere than where the pool has it."""
    found = 0
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            command = process.cmdline()
            if "join" in command and any(str(directory / "nodes") in word for word in command):
                places = process.environ()["PYTHONPATH"].split(":")
                found += any((Path(place) / "shipped").is_dir() for place in places if place != str(directory))
    return found


async def until_up(pool: Pool, *nodes: str) -> None:
    await pool.until(up(*nodes), f"{nodes} are not up", PATIENCE_S)


async def test_nodes_come_from_the_cluster_and_go_back_to_it(tmp_path: Path, nodes: RayNodes) -> None:
    (tmp_path / "shipped").mkdir()
    (tmp_path / "shipped" / "__init__.py").touch()
    asked = asked_of(nodes, tmp_path / "nodes")
    asked["ray"]["runtime_env"] = {"py_modules": [str(tmp_path / "shipped")]}
    async with running(tmp_path, up_within_s=PATIENCE_S, silence_s=30.0, **asked) as pool:
        await until_up(pool, *NODES)
        assert shipped(tmp_path) == len(NODES)
        (first,) = [node for node in (await pool.status())["nodes"] if node["name"] == "rollout-1"]
        assert first["devices"] == ["cpu:0@rollout-1"]
        assert first["machine"]["label"] == f"the Ray cluster at {nodes.address}"
        await pool.begin("one", steps=10_000, rollout_s=0.5)
        await goes_on(pool)

        pool.kill()
        pool.start()
        await until_up(pool, *NODES)
        assert len(nodes.actors_left(0)) == 4, "an actor and a group for each node, and no others"
        await goes_on(pool)

        nodes.kill(next(iter(nodes.cluster.worker_nodes)))
        await pool.until(lambda status: len(waits(status)) == 1, "no node is missed", PATIENCE_S)
        assert "none of its nodes" not in waits(await pool.status())[0]
        nodes.add()
        await until_up(pool, *NODES)
        await goes_on(pool)

        await pool.control.cancel("one")
        await pool.until_over("one")
        await pool.control.drain("rollout-2")
        await until_up(pool, "rollout-1")
        await pool.control.put_back("rollout-2")
        await until_up(pool, *NODES)
        await pool.control.stop()
        assert pool.process is not None
        assert pool.process.wait(PATIENCE_S) == 0
    assert nodes.actors_left(PATIENCE_S) == []


async def test_what_a_cluster_has_not_is_said(tmp_path: Path, nodes: RayNodes) -> None:
    asked = asked_of(nodes, tmp_path / "nodes")
    asked["ray"]["resources"]["unobtainium"] = 3.0
    async with running(tmp_path / "lacking", up_within_s=PATIENCE_S, **asked) as pool:
        await pool.until(lambda status: len(waits(status)) == 2, "they do not wait", PATIENCE_S)
        assert "unobtainium 3, and none of its nodes has as much: they have" in waits(await pool.status())[0]


async def test_what_a_node_lacks_that_ray_has_promised_is_said(
    tmp_path: Path, nodes: RayNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    promised = nodes.add_other(num_cpus=1, num_gpus=1)
    asked = asked_of(nodes, tmp_path / "nodes")
    del asked["ray"]["resources"]
    stand_in(tmp_path, "nvidia-smi", NVIDIA)
    (tmp_path / "lacking").mkdir()
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")  # For the pool's process alone.
    pool = Pool(tmp_path / "lacking", devices="cuda", **asked)
    pool.start()
    lacks = "a node of pool lab has 1 devices (cuda); found 0 here: none"
    try:
        await pool.until(lambda status: lacks in str(status["asked_for"]), "it is not said", PATIENCE_S)
    finally:
        await pool.control.stop(now=True)
        assert pool.process is not None
        await asyncio.to_thread(pool.process.wait, PATIENCE_S)
        nodes.kill(promised)


def test_a_pool_does_not_begin_without_its_cluster(tmp_path: Path) -> None:
    pool = Pool(tmp_path, kind="ray", ray={"address": "ray://127.0.0.1:9"})
    run = [sys.executable, "-P", "-m", "elastic.cli", "pool-run", str(pool.directory)]
    for _ in range(2):
        ended = subprocess.run(run, capture_output=True, text=True, timeout=PATIENCE_S)
        assert ended.returncode == 2
        assert "pool.rollout.ray: the Ray cluster at ray://127.0.0.1:9 does not answer" in ended.stderr
