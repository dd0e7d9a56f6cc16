"""TRL's own trainer has its rollouts at the doors of a live run, whose workers are killed."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

pytest.importorskip("vllm")
pytest.importorskip("trl")

from benchmarks import _served
from elastic.integrations.trl import KEY_VARIABLE

PROGRAM = Path(__file__).with_name("trl_trainer.py")
STEPS = 4
TIMEOUT_S = 1200.0
WITHIN = 0.02
"""Of one: how likely sampled tokens are to the trainer, in float32, over how likely they were to a worker."""

pytestmark = pytest.mark.timeout(TIMEOUT_S + 60)


def test_four_steps_while_workers_are_killed(tmp_path: Path) -> None:
    model, out, log = tmp_path / "tiny", tmp_path / "out", tmp_path / "trainer.log"
    with _served.DoorsRun(tmp_path, workers=2, options=("--model-name", str(model))) as run:
        command = [sys.executable, str(PROGRAM), str(model), run.url(), str(run.root), str(out), str(STEPS)]
        environment = {**os.environ, KEY_VARIABLE: run.control_key(), "HF_HUB_OFFLINE": "1"}
        with log.open("wb") as output, _served.client(run) as client:
            trainer = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
            try:
                for version in range(1, STEPS + 1):
                    run.until(f"a turn of version {version}", under_way(trainer, client, version), TIMEOUT_S)
                    run.kill_processes("worker", run.workers()[:1])
                run.until("the trainer's end", lambda: trainer.poll() is not None, TIMEOUT_S)
            finally:
                trainer.kill()
        assert trainer.returncode == 0, log.read_text()[-4000:]
        assert run.kills == {"worker": STEPS}
        for step in range(1, STEPS + 1):
            assert_same(run.pulled(1 + step), load_file(out / f"checkpoint-{step}" / "model.safetensors"))
    assert_trained_on_what_was_served(json.loads((out / "state.json").read_text())["log_history"])


def under_way(trainer: "subprocess.Popen[bytes]", client: Any, version: int) -> Callable[[], bool]:
    """Whether a turn is at a worker, with that version or a later one in force."""

    def found() -> bool:
        assert trainer.poll() is None, "the trainer has ended"
        label = client.get("/get_weight_version").json()["weight_version"]
        loads = client.get("/v1/loads").json()["loads"]
        return int(label.rpartition("-")[2]) >= version and loads[0]["num_running_reqs"] > 0

    return found


def assert_same(served: dict[str, torch.Tensor], wrote: dict[str, torch.Tensor]) -> None:
    assert served.keys() == wrote.keys()
    for name, tensor in served.items():
        assert torch.equal(tensor, wrote[name].to(tensor.dtype)), name


def assert_trained_on_what_was_served(history: list[dict[str, float]]) -> None:
    """By the ratio of each token's probabilities, which TRL takes of its own model and of what it was answered."""
    ratios = [step["ratio"] for step in history if "ratio" in step]
    assert len(ratios) == STEPS
    assert all(abs(ratio - 1) < WITHIN for ratio in ratios), ratios
