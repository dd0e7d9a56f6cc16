"""A pool whose nodes are all a Ray cluster's, and a real job on it, whose trainer's machine is lost."""

from pathlib import Path
from typing import Any

import pytest

from benchmarks import _pools
from benchmarks._ray_nodes import RayNodes
from benchmarks._waiting import until
from tests.pool.live import LivePool

pytestmark = [pytest.mark.ray, pytest.mark.timeout(900)]

PATIENCE_S = 240.0
STEPS = 8


def test_a_trainer_whose_machine_is_lost_goes_on_on_another_of_the_cluster(
    tmp_path: Path, checkpoint: Path, nodes: RayNodes
) -> None:
    """It is sent its files, gives its checkpoints back, and is drained and paid for as any node's."""
    pool = LivePool(tmp_path, checkpoint, within_s=600)
    asked = f'address = "{nodes.address}", directory = "{tmp_path}/nodes", resources = {{ place = 1 }}'
    asked += f", poll_s = 0.5, answer_timeout_s = {PATIENCE_S}"
    pool.start(rollout=f'kind = "ray"\nray = {{ {asked} }}', train=f'kind = "ray"\nray = {{ {asked} }}', start_s=300)

    def training() -> dict[str, Any] | None:
        there = pool.elastic("pool", "status", pool.path)["nodes"]
        return next((node for node in there if node["phase"] == "train" and node["node_agent"]["up"]), None)

    try:
        changes = (f"run.steps={STEPS}", "trainer.checkpoint_every_steps=1")
        pool.submit("one", 1, *(word for change in changes for word in ("--set", change)), train_s=200)
        node = until("a training node", training, PATIENCE_S)
        assert node["devices"] == ["cpu:1@train-1"], "the rollout node has cpu:0"
        assert node["machine"]["label"] == f"the Ray cluster at {nodes.address}"
        assert node["machine"]["memory_bytes"] > 0
        kept = pool.run_dir("one") / "checkpoints"
        pool.until(lambda _: list(kept.glob("*.safetensors")))
        (machine,) = nodes.with_words("cpu:1")
        nodes.kill(machine)
        nodes.add()
        jobs = pool.until(lambda jobs: jobs["one"]["over"])
        assert (jobs["one"]["state"], jobs["one"]["steps_done"]) == ("finished", STEPS)
        logs = sorted(tmp_path.glob("nodes/*/lab-train-1/logs/resident-one.log"))
        said = "".join(log.read_text() for log in logs)
        resumed = [line for line in said.splitlines() if '"event": "resuming"' in line]
        assert any('"checkpoint": "none"' not in line for line in resumed), "it began where the other had come to"
        assert list(tmp_path.glob("nodes/*/lab-train-1/jobs/one/*/one*/model.checkpoint/config.json"))
        assert _pools.residual_nano_usd(_pools.LivePool(pool.path)) == 0
        pool.elastic("pool", "drain", "train-1", pool.path)
        assert training() is None
    finally:
        pool.stop()
    assert nodes.actors_left(PATIENCE_S) == []
