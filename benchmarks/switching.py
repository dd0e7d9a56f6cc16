"""What it takes to switch a device to another job: cold, and warm from host memory (Weave's Fig. 4, Table 2).

Live, in real processes, one for each side:

- rollout: an engine of the model; cold is a process that starts, pulls the weights off a relay and says a token.
- vllm: as rollout, with vLLM's engine, whose process is started anew or sleeps. Not with `--quick`; where vLLM is not
  installed, here or by `make test-vllm`: `skipped_because`. On a CPU its weights stay where they are as it sleeps:
  nothing is copied.
- vllm_in_a_pool: two jobs on vLLM take turns on one rollout node of a pool, until their ends (not with `--quick`).
  `cold_s` are the times of each job's first time slice, from its grant until its first token is accepted, `warm_s` is
  the median of all later ones. `vllm_processes` that there have been are two if each outlives its slices;
  `cold_planned_s` is what the jobs' plan says of a start of vLLM, `cold_measured_s` what the pool has learned of it.
- train: a trainer with masters, moments and the gradients of a step under way; cold is a process that starts, reads its
  checkpoint and trains a group.

Warm they park and resume in turn. Figures are medians, in seconds. `cold_bare_s` is `cold_s` without interpreter and
imports; `warm_s` goes from resuming until the token or the trained group is there: `resume_s`, then `work_s`;
`memcpy_s` copies as many bytes from warm memory to warm memory in the same process. `cold_over_resume` and
`cold_over_warm` are the smallest `cold_s` over `resume_s` and over `warm_s` of all, `resume_over_memcpy` is the largest
`resume_s` over `memcpy_s`.
"""

import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from benchmarks import ROOT
from benchmarks._common import Arguments, Figures, benchmark, skipped_without_vllm
from benchmarks._configurations import KINDS, written
from benchmarks._pools import live_pool, residual_nano_usd, slice_starts_s
from benchmarks._processes import processes_in
from benchmarks._shapes import SHAPES, write_policy

COLD_TIMES, WARM_TIMES = 3, 7
POOLED_STEPS = 8
MODELS = {"rollout": "140m", "vllm": "140m", "train": "48m"}
"""By side, the name of a shape."""
POOLED = "vllm_in_a_pool"
HAS_VLLM = ROOT / ".cache" / "vllm-venv" / "bin" / "python"
VLLM_PROCESS = "elastic.engine.vllm.process"
PROCESS_TIMEOUT_S, MARGIN_S = 600.0, 60.0


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        _, _, side, model, directory, times = sys.argv
        if side == "train":
            _train(model, Path(directory), int(times))
        elif side == POOLED:
            print(json.dumps(in_a_pool(Path(directory), model, int(times))), flush=True)
        else:
            _rollout(side, model, Path(directory), int(times))
        return
    benchmark(__doc__, measured)


def measured(arguments: Arguments) -> Figures:
    cold_times, warm_times = (1, 3) if arguments.quick else (COLD_TIMES, WARM_TIMES)
    figures: Figures = {}
    for side, model in MODELS.items():
        if side == "vllm" and (why := "it takes too long for --quick" if arguments.quick else _why_no_vllm()):
            figures[side] = figures[POOLED] = {"skipped_because": why}
            continue
        with tempfile.TemporaryDirectory() as directory:
            _run(side, model, directory, 0)
            runs = [_run(side, model, directory, warm_times) for _ in range(cold_times)]
        ratios = sorted(ratio for run in runs for ratio in run.pop("ratios"))
        middle = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
        figures[side] = {model: middle | ({"resume_over_memcpy_all": ratios} if ratios else {})}
        if side == "vllm":
            figures[POOLED] = _child(POOLED, "example", str(arguments.scratch), POOLED_STEPS)
    each = [figures[side][model] for side, model in MODELS.items() if model in figures[side]]
    return figures | {
        "cold_over_resume": min(figure["cold_s"] / figure["resume_s"] for figure in each),
        "cold_over_warm": min(figure["cold_s"] / figure["warm_s"] for figure in each),
        "resume_over_memcpy": max(figure["resume_s"] / figure["memcpy_s"] for figure in each if "memcpy_s" in figure),
        "kind": "live, on this machine's CPU: the device is an arena",
    }


def _why_no_vllm() -> str:
    return "" if HAS_VLLM.exists() else skipped_without_vllm()


def _run(side: str, model: str, directory: str, times: int) -> Figures:
    """One process, from its start: what it says of itself, and how long it took until it had the device. With no
    `times` it prepares weights on a relay, or a checkpoint."""
    began_s = time.monotonic()
    found = _child(side, model, directory, times)
    return {"cold_s": found.pop("first_at_s") - began_s, **found} if found else {}


def _child(side: str, model: str, directory: str, times: int) -> Figures:
    """The figures that a process of this file prints, of vLLM's environment where there is one for a side of vLLM's."""
    python = str(HAS_VLLM) if side.startswith("vllm") and HAS_VLLM.exists() else sys.executable
    done = subprocess.run(
        [python, __file__, "--child", side, model, directory, str(times)],
        stdout=subprocess.PIPE,
        check=True,
        text=True,
        timeout=PROCESS_TIMEOUT_S,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    return json.loads(done.stdout.splitlines()[-1]) if times else {}


def in_a_pool(directory: Path, model: str, steps: int) -> Figures:
    """Two jobs on vLLM of so many steps, in this process's environment."""
    policy = write_policy(directory / "policy", model)
    job = written(directory / "job.toml", "vllm-job", policy=policy, run={"steps": steps})
    jobs = {f"job-{seed}": (job, [f"run.seed={seed}"]) for seed in (1, 2)}
    processes: set[int] = set()
    with live_pool(directory, "ours", 1, 1) as pool:
        runs = pool.submit_at_once(jobs, directory / "runs")

        def over(status: dict[str, Any]) -> bool:
            processes.update(_of_vllm(directory))
            return all(one["over"] for one in status["jobs"])

        pool.until("the jobs' ends", over, PROCESS_TIMEOUT_S - MARGIN_S)
        reported, residual = pool.report()["jobs"], residual_nano_usd(pool)
    starts = [slice_starts_s(run) for run in runs.values()]
    cold, warm = [first for first, *_ in starts], sorted(start for _, *later in starts for start in later)
    return {
        "cold_s": cold,
        "warm_s": statistics.median(warm),
        "warm_s_all": warm,
        "cold_over_warm": min(cold) / statistics.median(warm),
        "vllm_processes": len(processes),
        "steps_done": [one["steps"] for one in reported],
        "cold_planned_s": KINDS["vllm-job"]["job"]["plan"]["rollout_cold_s"],
        "cold_measured_s": [one["cold_s"] for one in reported],
        "residual_nano_usd": residual,
    }


def _of_vllm(directory: Path) -> set[int]:
    """The processes of vLLM that are children of processes which have to do with a directory."""
    found: set[int] = set()
    for process in processes_in(directory):
        with contextlib.suppress(psutil.Error):
            found.update(child.pid for child in process.children() if VLLM_PROCESS in child.cmdline())
    return found


def _warm(
    times: int, parkable: Any, state_copies: Callable[[int], float], work: Callable[[], None], marks: dict[str, float]
) -> None:
    """Parks and resumes in turn, each beside a bare copy of as many bytes, and says what was measured."""
    rows: list[dict[str, float]] = []
    parked = resumed = parkable.park()
    for _ in range(times):
        resumed_at_s = time.monotonic()
        resumed = parkable.resume()
        work()
        warm_s = time.monotonic() - resumed_at_s
        parked = parkable.park()
        row = {"resume_s": resumed.seconds, "work_s": warm_s - resumed.seconds, "warm_s": warm_s}
        row |= {"park_s": parked.seconds}
        if resumed.state_bytes:
            row |= {"memcpy_s": state_copies(resumed.state_bytes)}
        rows.append(row)
    found = {key: statistics.median(row[key] for row in rows) for key in rows[0]} | {
        "state_bytes": resumed.state_bytes,
        "rest_bytes": parked.rest_bytes,
        "ratios": [row["resume_s"] / row["memcpy_s"] for row in rows if "memcpy_s" in row],
    }
    print(json.dumps({**marks, **found}), flush=True)


def _bare_copies() -> Callable[[int], float]:
    """How long a copy takes of so many bytes; source and target are touched before."""
    import torch

    kept: dict[int, tuple[Any, Any]] = {}

    def copy_s(size_bytes: int) -> float:
        if size_bytes not in kept:
            kept[size_bytes] = torch.ones(size_bytes, dtype=torch.uint8), torch.zeros(size_bytes, dtype=torch.uint8)
        source, target = kept[size_bytes]
        began_s = time.monotonic()
        target.copy_(source)
        return time.monotonic() - began_s

    return copy_s


def _rollout(side: str, model: str, directory: Path, times: int) -> None:
    import torch

    from elastic.config import EngineConfig
    from elastic.core.types import SamplingParameters, WeightMode
    from elastic.engine import create_engine
    from elastic.engine.base import GenerateRequest
    from elastic.engine.model.checkpoint import model_tensors
    from elastic.engine.model.config import Qwen3Config
    from elastic.engine.model.qwen3 import Qwen3
    from elastic.engine.torch.engine import TorchEngine
    from elastic.weights.directory import DirectoryRelay
    from elastic.weights.publisher import publish_keyframe
    from elastic.weights.signing import SigningKey
    from elastic.weights.source import RelaySource

    torch.set_num_threads(1)
    imported_s = time.monotonic()
    config, key_file = Qwen3Config(**SHAPES[model]), directory / "publisher"
    if not times:
        key = SigningKey()
        tensors = {name: tensor.bfloat16() for name, tensor in model_tensors(Qwen3(config)).items()}
        publish_keyframe(DirectoryRelay(directory / "relay"), "run", 1, tensors, config.to_dict(), key)
        key_file.write_text(key.public)
        return
    kind = {"kind": "vllm", "kv_block_tokens": 32} if side == "vllm" else {"kind": "torch", "device": "cpu"}
    settings = {**kind, "max_context_tokens": 64, "kv_blocks": 16, "max_batch": 4}
    wanted = EngineConfig.model_validate(settings)
    engine = create_engine(config.to_dict(), wanted) if side == "vllm" else TorchEngine(config, wanted)
    said = threading.Event()
    engine.start(lambda chunks: said.set())
    source = RelaySource(run="run", version=1, relay=str(directory / "relay"), publisher=key_file.read_text())
    engine.prefetch(source, PROCESS_TIMEOUT_S)
    engine.load_version(source, WeightMode.FINISH)
    turns = iter(range(1_000_000))

    def say_a_token() -> None:
        said.clear()
        sampling = SamplingParameters(max_new_tokens=1, temperature=1.0, noise_seed=0)
        engine.submit([GenerateRequest(request_id=f"t{next(turns)}", token_ids=[1, 2, 3], start=0, sampling=sampling)])
        if not said.wait(PROCESS_TIMEOUT_S):
            raise TimeoutError("the engine said nothing")

    say_a_token()
    first_s = time.monotonic()
    _warm(times, engine, _bare_copies(), say_a_token, {"cold_bare_s": first_s - imported_s, "first_at_s": first_s})
    engine.close()


def _train(model: str, directory: Path, times: int) -> None:
    import torch

    from elastic.config import TrainerConfig
    from elastic.engine.model.checkpoint import load_model, model_tensors, write_checkpoint
    from elastic.engine.model.config import Qwen3Config
    from elastic.engine.model.qwen3 import Qwen3
    from elastic.protocol.wire import TrainGroupFrame
    from elastic.testing.trajectories import PlainTrajectory
    from elastic.worker.trainer.embedded.trainer import GRPOTrainer

    torch.set_num_threads(1)
    imported_s = time.monotonic()
    config, groups = Qwen3Config(**SHAPES[model]), 1000
    if not times:
        write_checkpoint(directory / "base", config, model_tensors(Qwen3(config)))
    trainer = GRPOTrainer(
        TrainerConfig.model_validate({"updates_per_step": 1}), load_model(directory / "base", "cpu"), groups, 1.0
    )
    if not times:
        trainer.save(directory / "state.safetensors")
        return
    trainer.load(directory / "state.safetensors")
    slots = iter(range(groups))

    def train_a_group() -> None:
        slot = next(slots)
        trajectories = [
            PlainTrajectory(
                f"t{slot}.{reward}", [1, 2, 3, 4], [0, 0, 1, 1], [0.0, 0.0, -9.0, -9.0], [0] * 4, reward
            ).packed()
            for reward in (0.0, 1.0)
        ]
        trainer.train_group(TrainGroupFrame(1, f"g{slot}", slot, trajectories))

    train_a_group()
    first_s = time.monotonic()
    _warm(times, trainer, _bare_copies(), train_a_group, {"cold_bare_s": first_s - imported_s, "first_at_s": first_s})


if __name__ == "__main__":
    main()
