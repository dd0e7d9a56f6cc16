"""A trainer of two ranks leaves its devices to vLLM while it seeds, and nobody else generates.

`make test-trainer` makes the environment.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="the environment of `make test-vllm` is not this one: `make test-trainer`")
pytest.importorskip("transformers")

from elastic.engine.model.checkpoint import model_tensors, write_checkpoint
from elastic.engine.model.config import Qwen3Config
from elastic.engine.model.qwen3 import Qwen3

TIMEOUT_S = 1500.0
STEPS = 2
CONFIG = f"""
[run]
name = "seeding"
seed = 7
steps = {STEPS}
directory = "{{directory}}/runs"
[model]
checkpoint = "{{directory}}/model"
[environment]
name = "frozenlake"
[environment.settings]
sizes = [4]
[rollout]
groups = 2
group_size = 4
max_turns = 3
max_tokens_per_turn = 8
[trainer]
kind = "transformers"
gpus = 2
updates_per_step = 1
checkpoint_every_steps = 1
step_timeout_s = {TIMEOUT_S}
[trainer.transformers]
seeding = "vllm"
offload = "all"
[engine]
kind = "vllm"
device = "cpu"
max_batch = 8
max_context_tokens = 256
kv_block_tokens = 32
kv_blocks = 64
[engine.vllm]
tensor_parallel = {{tensor_parallel}}
start_timeout_s = {TIMEOUT_S}
[scheduler]
boot_timeout_s = {TIMEOUT_S}
queue_timeout_s = {TIMEOUT_S}
load_timeout_s = 300
stall_timeout_s = 120
turn_stall_timeout_s = 120
heartbeat_timeout_s = 60
[weights]
pull_timeout_s = 120
"""

pytestmark = [pytest.mark.trainers, pytest.mark.timeout(TIMEOUT_S + 60)]


@pytest.mark.parametrize("tensor_parallel", [2, 1])
def test_the_trainers_devices_generate_by_vllm(tmp_path: Path, tensor_parallel: int) -> None:
    """One engine over both devices, or one on each. All steps are done, and the time of both devices is in accounts."""
    torch.manual_seed(0)
    policy = Qwen3(Qwen3Config())
    write_checkpoint(tmp_path / "model", policy.config, model_tensors(policy))
    config = tmp_path / "seeding.toml"
    config.write_text(CONFIG.format(directory=tmp_path, tensor_parallel=tensor_parallel))
    ended = elastic("run", str(config))
    (run_dir,) = (tmp_path / "runs").glob("*-*")
    assert ended.returncode == 0, ended.stderr[-4000:] + logs(run_dir)
    report: dict[str, Any] = json.loads(elastic("report", str(run_dir), "--json").stdout)
    assert len(report["steps"]) == STEPS
    assert report["trajectories_failed"] == {}
    assert report["ledger_imbalance_ns"] == 0
    assert report["providers"].keys() == {"trainer"}
    spent_s = report["providers"]["trainer"]["accounts_s"]
    assert min(spent_s["decode"], spent_s["asleep"], spent_s["training"], spent_s["applying"]) > 0


def elastic(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "elastic.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)


def logs(run_dir: Path) -> str:
    return "\n".join(path.read_text()[-4000:] for path in (run_dir / "logs").glob("*.log"))
