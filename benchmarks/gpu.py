"""All of Elastic that has a GPU to compute on, in one command and one table, within 25 minutes on an H100 or H200.

Every part runs in a process of its own with a time limit, so that one that fails does not hide the rest. Weights are
random, in the shapes of Qwen3. The parts:

- engine: the embedded engine's tokens per second, and how much of its greedy output, in bfloat16, is the CPU's in
  float32 (`greedy_equal_share`: tokens before the first difference; random weights have near ties everywhere);
- pages: KV pages by CUDA's virtual memory management: mapped and taken back per second, and whether a page keeps its
  place and its content;
- coserving_small, coserving_large: `benchmarks/coserving.py` on the device in short windows (ROSE's Tables 1, 2, 4, 5);
- deltas: comparing an 8B model's weights with the version before on the device, over a copy of the same bytes there,
  and encoding what changed on the host;
- trainer: a step of GRPO;
- trainer_ranks: the same by the trainer of transformers' models, in bfloat16 with float32 masters, a rank on each GPU
  that there is: 1.7B with all of its state on the devices, 8B with masters and moments in host memory;
- activation: weights from host memory into the device, over a bare copy of the same bytes.

    python benchmarks/gpu.py [--json] [--parts PART …] [--cpu]

`--cpu` runs tiny shapes on the CPU, as a test of the benchmark itself; its figures mean nothing.
"""

import argparse
import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, cast

from benchmarks._common import Arguments, Figures, benchmark, option
from benchmarks._configurations import configuration
from benchmarks._episodes import EpisodePlayer, PlayedEpisode, episode
from benchmarks._shapes import SHAPES, random_weights
from elastic.config import EngineConfig, RolloutConfig
from elastic.core.types import WeightMode
from elastic.environments.base import Environment, StepResult
from elastic.system.cores import cores
from elastic.testing.faults.shell.models import ModelEnvironment, NoSettings
from elastic.weights.source import TensorSource

if TYPE_CHECKING:
    from elastic.worker.trainer.base import PolicyTrainer

REPETITIONS = 5
CONTEXT = 1024


@dataclass(frozen=True)
class GpuExtent:
    """What the parts are run with."""

    device: str
    small: str
    large: str
    batch: int
    prompt_tokens: int
    new_tokens: int
    pages: int
    window_s: float
    quick_windows: bool


GPU = GpuExtent("cuda", "qwen3-0.6b", "qwen3-8b", 64, 256, 256, 4096, 10.0, False)
CPU = GpuExtent("cpu", "tiny-rollouts", "tiny-serving", 4, 16, 8, 64, 2.0, True)


def main(parsed: Arguments) -> Figures:
    scale = CPU if parsed.cpu else GPU
    if parsed.in_process:
        return PARTS[parsed.in_process].run(scale)
    if not parsed.cpu and (missing := _missing()):
        return {"skipped_because": missing}
    return {"device": _device_name(scale), **{name: _apart(name, parsed.cpu) for name in parsed.parts}}


def _missing() -> str:
    import torch

    return "" if torch.cuda.is_available() else "torch finds no CUDA device here; --cpu tries the benchmark itself"


def _device_name(scale: GpuExtent) -> str:
    import torch

    return torch.cuda.get_device_name() if scale.device == "cuda" else f"cpu, torch {torch.__version__}"


def _apart(name: str, cpu: bool) -> Figures:
    """A part's figures, or what became of it."""
    print(f"{name} …", file=sys.stderr, flush=True)
    command = [sys.executable, __file__, "--json", "--in-process", name, *(["--cpu"] if cpu else [])]
    begun_s = time.monotonic()
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PARTS[name].timeout_s, check=False)
    except subprocess.TimeoutExpired:
        return {"failed": f"not within {PARTS[name].timeout_s:g} s"}
    took_s = round(time.monotonic() - begun_s, 1)
    if done.returncode != 0:
        return {"failed": done.stderr.strip()[-1500:], "took_s": took_s}
    return {**json.loads(done.stdout.splitlines()[-1]), "took_s": took_s}


def _settle(device: str) -> None:
    import torch

    if device == "cuda":
        torch.cuda.synchronize()


def _median_s(work: Callable[[], object], device: str) -> float:
    """Of several runs after one that warms up, the device's work included."""
    taken_s: list[float] = []
    for _ in range(REPETITIONS + 1):
        _settle(device)
        begun_s = time.perf_counter()
        work()
        _settle(device)
        taken_s.append(time.perf_counter() - begun_s)
    return median(taken_s[1:])


def engine(scale: GpuExtent) -> Figures:
    weights = random_weights(scale.small, scale.device)
    many, seconds = _generate(scale, scale.device, weights, scale.batch, scale.new_tokens)
    few = 4
    ours, _ = _generate(scale, scale.device, weights, few, min(32, scale.new_tokens))
    reference, _ = _generate(scale, "cpu", weights, few, min(32, scale.new_tokens))
    equal = sum(_same(*pair) for pair in zip(ours, reference, strict=True))
    return {
        "model": scale.small,
        "batch": scale.batch,
        "tokens_per_s": sum(map(len, many)) / seconds,
        "greedy_equal_share": equal / sum(map(len, reference)),
    }


def _same(one: Sequence[int], other: Sequence[int]) -> int:
    """Tokens before the first difference."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


class OneTurn(ModelEnvironment):
    """Begins with a prompt, and ends with its answer."""

    def __init__(self, prompt: Sequence[int]) -> None:
        super().__init__(NoSettings())
        self._prompt = prompt

    async def reset(self, seed: int) -> list[int]:
        return list(self._prompt)

    async def step(self, token_ids: list[int]) -> StepResult:
        return StepResult([], True)


def _generate(
    scale: GpuExtent, device: str, weights: Mapping[str, Any], batch: int, new_tokens: int
) -> tuple[list[list[int]], float]:
    """Greedy answers; how long they took, after a first round that is not timed."""
    from elastic.engine.model.config import Qwen3Config
    from elastic.engine.torch.engine import TorchEngine

    config = Qwen3Config(**SHAPES[scale.small])
    settings = EngineConfig.model_validate(
        {
            "device": device,
            "max_context_tokens": CONTEXT,
            "prefill_chunk_tokens": CONTEXT,
            "max_batch": batch,
            "kv_blocks": batch * CONTEXT // 16,
            "kv_block_tokens": 16,
            "threads": cores() if device == "cpu" else 1,
        }
    )
    prompts = [[(7 * number + i) % config.vocab_size for i in range(scale.prompt_tokens)] for number in range(batch)]
    greedy = RolloutConfig.model_validate({"max_tokens_per_turn": new_tokens}).model_copy(update={"temperature": 0.0})
    running = TorchEngine(config, settings)
    played, taken_s = list[PlayedEpisode](), 0.0
    try:
        player = EpisodePlayer(running, greedy, (), CONTEXT)
        running.load_version(TensorSource(1, weights), WeightMode.FINISH)
        for _ in range(2):
            played = [episode(cast(Environment, OneTurn(prompt)), number) for number, prompt in enumerate(prompts)]
            begun_s = time.perf_counter()
            player.play(played)
            taken_s = time.perf_counter() - begun_s
        return [one.data.token_ids[scale.prompt_tokens :] for one in played], taken_s
    finally:
        running.close()


def pages(scale: GpuExtent) -> Figures:
    import torch

    from elastic.engine.kv import PagePool
    from elastic.engine.kv.backends import mappable_page_bytes, open_backend

    page_bytes = mappable_page_bytes(2 << 20 if scale.device == "cuda" else 4096, scale.device)
    backend = open_backend(scale.pages, page_bytes, scale.device)
    pool = PagePool(backend)
    try:
        space, other = pool.space(), pool.space()
        begun_s = time.perf_counter()
        mapped = [space.map() for _ in range(scale.pages)]
        for virtual, _ in mapped:
            space.unmap(virtual)
        _settle(scale.device)
        took_s = time.perf_counter() - begun_s
        (first, index), (_, neighbour) = space.map(), other.map()
        view, others = (backend.view(number, torch.uint8).view(-1, page_bytes) for number in (0, 1))
        zeroed = not view[index].any().item()
        view[index].fill_(7)
        others[neighbour].fill_(9)
        kept = bool((view[index] == 7).all().item()) and bool((others[neighbour] == 9).all().item())
        space.unmap(first)
        return {
            "by": type(backend).__name__,
            "page_bytes": page_bytes,
            "map_and_unmap_per_s": 2 * scale.pages / took_s,
            "new_pages_are_zero": zeroed,
            "pages_keep_their_content": kept,
        }
    finally:
        pool.close()


def coserving_small(scale: GpuExtent) -> Figures:
    return _coserving(scale, serving="qwen3-1.7b", rollout=scale.small, baselines=True)


def coserving_large(scale: GpuExtent) -> Figures:
    return _coserving(scale, serving=scale.large, rollout=scale.large, baselines=False)


def _coserving(scale: GpuExtent, serving: str, rollout: str, baselines: bool) -> Figures:
    command = [
        sys.executable,
        str(Path(__file__).with_name("coserving.py")),
        "--json",
        "--window-s",
        str(scale.window_s),
    ]
    if scale.quick_windows:
        command += ["--quick"]
    else:
        command += ["--device", "cuda", "--serving-model", serving, "--rollout-model", rollout]
        command += ["--densities", "1", "--windows", "mean", "burstiest"]
        command += [] if baselines else ["--baselines-at", "--no-extras"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command[1:])}: exit {done.returncode}: {done.stderr[-1000:]}")
    figures = json.loads(done.stdout.splitlines()[-1])
    kept = (
        "slo",
        "density",
        "reclaim_ms_p50",
        "reclaim_ms_p99",
        "reclaims",
        "activation_ms",
        "cuts",
        "lease_s",
        "device",
    )
    return {key: figures[key] for key in kept if key in figures}


def deltas(scale: GpuExtent) -> Figures:
    """Where the changes are made up: 2 % of the elements, the lowest bit of their pattern."""
    import numpy as np
    import torch

    from elastic.weights.codecs import CODECS
    from elastic.weights.compact import compact
    from elastic.weights.layout import tile_ends
    from elastic.weights.tensors import entries_of

    tensors = {name: tensor.to(scale.device) for name, tensor in random_weights(scale.large, scale.device).items()}
    flat = [tensor.contiguous().view(-1).view(torch.int16) for tensor in tensors.values()]
    before = [patterns.clone() for patterns in flat]
    generator = torch.Generator(device=scale.device).manual_seed(0)
    for patterns in flat:
        index = torch.randint(patterns.numel(), (patterns.numel() // 50,), device=scale.device, generator=generator)
        patterns[index] ^= 1
    copy = [torch.empty_like(patterns) for patterns in flat]

    def copied() -> None:
        for target, source in zip(copy, flat, strict=True):
            target.copy_(source)

    changed = 0

    def compared() -> None:
        nonlocal changed
        changed = 0
        for old, new in zip(before, flat, strict=True):
            for found, _ in compact(old, new):
                changed += found.numel()

    memcpy_s, compare_s = _median_s(copied, scale.device), _median_s(compared, scale.device)
    largest = max(range(len(flat)), key=lambda number: flat[number].numel())
    old, new = (one[largest].cpu().numpy().view(np.uint16) for one in (before, flat))
    name = list(tensors)[largest]
    shape = torch.empty(tensors[name].shape, dtype=torch.bfloat16, device="meta")
    ends = tile_ends(entries_of({name: shape}), 1 << 16)
    codec = CODECS["exponent_class"]
    encode_s = _median_s(lambda: codec.encode(old, new, ends), "cpu")
    elements = sum(patterns.numel() for patterns in flat)
    return {
        "model": scale.large,
        "gigabytes": 2 * elements / 1e9,
        "changed_share": changed / elements,
        "memcpy_gb_per_s": 2 * elements / memcpy_s / 1e9,
        "compare_s": compare_s,
        "compare_over_memcpy": memcpy_s / compare_s,
        "encode_gb_per_s_per_core": old.nbytes / encode_s / 1e9,
    }


def trainer(scale: GpuExtent) -> Figures:
    import torch

    from elastic.config import TrainerConfig
    from elastic.engine.model.config import Qwen3Config
    from elastic.engine.model.qwen3 import Qwen3
    from elastic.worker.trainer.embedded.trainer import GRPOTrainer

    config = Qwen3Config(**SHAPES[scale.small])
    torch.manual_seed(0)
    with torch.device(scale.device):
        model = Qwen3(config)
    settings = TrainerConfig.model_validate({"micro_batch_tokens": 4096, "updates_per_step": 1})
    groups = 2
    made = GRPOTrainer(settings, model, groups, 1.0)
    return {"model": scale.small, **_steps(made, scale, groups, config.vocab_size)}


def _steps(made: "PolicyTrainer", scale: GpuExtent, groups: int, vocabulary: int) -> Figures:
    """What a step of so many groups takes, and this process's memory on its device."""
    import torch

    from elastic.protocol.wire import TrainGroupFrame
    from elastic.testing.trajectories import PlainTrajectory

    members, tokens = 4, scale.prompt_tokens + scale.new_tokens

    def step() -> dict[str, float]:
        for index in range(groups):
            trajectories = []
            for member in range(members):
                ids = [(index + 3 * member + i) % vocabulary for i in range(tokens)]
                ours = [int(i >= scale.prompt_tokens) for i in range(tokens)]
                logprobs = [mine * -math.log(vocabulary) for mine in ours]
                versions = [mine * made.version for mine in ours]
                trajectories.append(
                    PlainTrajectory(f"{index}/{member}", ids, ours, logprobs, versions, float(member % 2)).packed()
                )
            made.train_group(TrainGroupFrame(made.version, f"g{index}", index, trajectories))
        return made.update()

    step_s = _median_s(step, scale.device)
    metrics = step()
    return {
        "step_s": step_s,
        "tokens_per_s": groups * members * tokens / step_s,
        "groups_unusable": metrics["groups_unusable"],
        "tokens_left_out": metrics["tokens_left_out"],
        "peak_memory_gb": torch.cuda.max_memory_allocated() / 1e9 if scale.device == "cuda" else None,
    }


def trainer_ranks(scale: GpuExtent) -> Figures:
    """Each on as many ranks as there are devices; on CPUs two."""
    import gc
    import importlib.util

    import torch

    from elastic.worker.trainer import create_trainer

    if importlib.util.find_spec("transformers") is None:
        return {"skipped_because": "transformers is not installed here"}
    gpus, groups = (torch.cuda.device_count() if scale.device == "cuda" else 2), 4
    shapes = {"qwen3-1.7b": "none", "qwen3-8b": "optimizer"} if scale.device == "cuda" else {scale.large: "none"}
    found: Figures = {"gpus": gpus}
    for shape, offload in shapes.items():
        with tempfile.TemporaryDirectory() as directory:
            _write_model(Path(directory), shape, scale.device)
            own = {"gpus": gpus, "transformers": {"dtype": "bfloat16", "offload": offload}}
            engine = {"device": scale.device}
            made = create_trainer(configuration("gpu-ranks", policy=directory, engine=engine, trainer=own))
            if scale.device == "cuda":
                torch.cuda.reset_peak_memory_stats()
            found[shape] = {"offload": offload, **_steps(made, scale, groups, SHAPES[shape]["vocab_size"])}
            del made
            gc.collect()
            if scale.device == "cuda":
                torch.cuda.empty_cache()
    return found


def _write_model(directory: Path, shape: str, device: str) -> None:
    """The model as transformers has it, with random weights in bfloat16."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    with torch.device(device):
        model = Qwen3ForCausalLM(Qwen3Config(**SHAPES[shape])).bfloat16()
    model.save_pretrained(directory)


def activation(scale: GpuExtent) -> Figures:
    """Into weights that stand on the device already, as a rollout model gets there that was parked in host memory."""
    import torch

    from elastic.engine.model.config import Qwen3Config
    from elastic.engine.torch.runner import Runner

    config = Qwen3Config(**SHAPES[scale.large])
    pinned = scale.device == "cuda"
    weights = {n: t.pin_memory() if pinned else t for n, t in random_weights(scale.large, scale.device).items()}
    size_bytes = sum(tensor.nbytes for tensor in weights.values())
    device = torch.device(scale.device)
    with torch.inference_mode():
        runner = Runner(config, device, CONTEXT, 2 * CONTEXT // 16, 16)
        checked = runner.verify(weights)
        activate_s = _median_s(lambda: runner.load(checked), scale.device)
        targets = {name: torch.empty_like(tensor, device=device) for name, tensor in weights.items()}

        def copied() -> None:
            for name, tensor in weights.items():
                targets[name].copy_(tensor, non_blocking=True)

        memcpy_s = _median_s(copied, scale.device)
    return {
        "model": scale.large,
        "gigabytes": size_bytes / 1e9,
        "activate_s": activate_s,
        "memcpy_s": memcpy_s,
        "over_memcpy": activate_s / memcpy_s,
    }


@dataclass(frozen=True)
class GpuPart:
    run: Callable[[GpuExtent], Figures]
    timeout_s: float


PARTS = {
    "engine": GpuPart(engine, 150),
    "pages": GpuPart(pages, 60),
    "deltas": GpuPart(deltas, 150),
    "trainer": GpuPart(trainer, 120),
    "trainer_ranks": GpuPart(trainer_ranks, 400),
    "activation": GpuPart(activation, 120),
    "coserving_small": GpuPart(coserving_small, 300),
    "coserving_large": GpuPart(coserving_large, 300),
}


if __name__ == "__main__":
    benchmark(
        __doc__,
        main,
        option("--cpu", action="store_true", help="tiny shapes on the CPU, as a test of the benchmark"),
        option("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="only these"),
        option("--in-process", choices=PARTS, help=argparse.SUPPRESS),
    )
