"""What training on a batch costs: the `transformers` trainer beside TRL's `GRPOTrainer`, and the memory of a head.

One batch of log-normal lengths on one small Qwen3 with a large vocabulary, forward and backward, in float32, with the
same threads on both sides, which take turns in processes of their own. TRL's loss path is the one of its trainer
(`compute_loss`), in micro-batches of eight in order of arrival, and of every other size in `SIZES`; ours also makes an
update. `ratio` is our speed over that at eight, `ratio_best` over the best size: of medians, with their spreads, and
under `cpu` by CPU time, which other work on the machine leaves as it is.
`loss_difference` is between the losses of the first pass, under `ranks` between those of one rank and two. `peak_bytes`
is what log-probabilities and entropy of one row add to a process at a vocabulary of 150,000, with their gradient, by
chunks and from the whole matrix of logits.

`lora` is ours with adapters of rank 8 to all linear layers, and its state beside the whole model's as checkpoints have
them.

`reference` is ours with a KL to a frozen policy: what it adds to a pass, by CPU time, beside a forward pass alone.

`ranks` is ours on one rank and on two of CPUs, each a process with the same threads: a step, and `state_bytes` of
weights, masters and moments that a rank holds, in the mean.

TRL needs `make .cache/trl/installed`, adapters `make .cache/trainers/installed`; without them their figures are null.
Neither side recomputes activations.
"""

import json
import math
import os
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NoReturn, cast

from benchmarks import ROOT
from benchmarks._common import TRAINERS_PYTHON, WITHOUT_PEFT, Arguments, Figures, benchmark
from benchmarks._shapes import SHAPES

if TYPE_CHECKING:
    from elastic.protocol.wire import TrajectoryData
    from elastic.worker.trainer.base import PolicyTrainer
    from elastic.worker.trainer.packing import PackedRow

MODEL = {**SHAPES["trained"], "vocab_size": 32_000, "max_position_embeddings": 4096}
"""22 million parameters."""
MEDIAN_TOKENS, SIGMA, TOKENS_MAX, PROMPT_TOKENS = 256, 1.0, 2048, 16
SIZES = (8, 1, 2)
"""TRL's micro-batches, in sequences; the first is what it is compared at."""
ROW_TOKENS = 4096
THREADS = 1
"""Two wait for each other where cores are shared."""
HEAD = {"tokens": 512, "hidden": 64, "vocabulary": 150_000}
TRL_PYTHON = ROOT / ".cache" / "trl" / "bin" / "python"
LORA = {"r": 8, "lora_alpha": 16}
STEP = {"updates_per_step": 1, "micro_batch_tokens": ROW_TOKENS, "learning_rate": 1e-12, "mismatch_max": 1e9}
"""Of `[trainer]`."""
WITHOUT_TRL = "TRL is not installed in .cache/trl: `make .cache/trl/installed`"
RANKS = 2


def batch_of(sequences: int) -> list[dict[str, Any]]:
    """Prompts with completions, their log-probabilities where they were sampled, and their rewards."""
    rng = random.Random(0)
    uniform = -math.log(MODEL["vocab_size"])
    batch: list[dict[str, Any]] = []
    for number in range(sequences):
        length = max(2, min(TOKENS_MAX, round(rng.lognormvariate(math.log(MEDIAN_TOKENS), SIGMA))))
        ids = [rng.randrange(2, MODEL["vocab_size"]) for _ in range(PROMPT_TOKENS + length)]
        logprobs = [uniform + rng.gauss(0.0, 0.2) for _ in range(length)]
        batch.append({"ids": ids, "logprobs": logprobs, "reward": float(number % 2)})
    return batch


class Side:
    """A process that answers one order a line."""

    def __init__(self, python: Path | str, script: Path, model: Path, *options: str) -> None:
        command = [str(python), str(script), *(["--child"] if script == Path(__file__) else [])]
        self._process = subprocess.Popen(
            [*command, str(model), *options], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def ask(self, size: int) -> dict[str, float]:
        """One pass in micro-batches of this size: its seconds and its loss."""
        given, said = cast(IO[str], self._process.stdin), cast(IO[str], self._process.stdout)
        given.write(f"{size}\n")
        given.flush()
        for line in said:
            if line.startswith("{"):
                return json.loads(line)
        raise RuntimeError(f"a side ended with status {self._process.wait()}")

    def close(self) -> None:
        cast(IO[str], self._process.stdin).close()
        self._process.wait()


def child(model: Path, *, adapts: bool, compares: bool) -> None:
    """Our side: the whole model, or an adapter to it, or with a reference."""
    import torch

    from elastic.config import TrainerConfig
    from elastic.worker.trainer.transformers import TransformersSettings
    from elastic.worker.trainer.transformers.model import CausalModel
    from elastic.worker.trainer.transformers.trainer import TransformersTrainer

    torch.set_num_threads(THREADS)
    own = TransformersSettings.model_validate({"activation_checkpointing": False, "lora": LORA if adapts else None})
    settings = TrainerConfig.model_validate(STEP | ({"kl_coefficient": 0.1} if compares else {}))
    given = model, torch.device("cpu"), own.attention, own.activation_checkpointing
    if own.lora is None:
        loaded = CausalModel(*given)
    else:
        from elastic.worker.trainer.transformers.lora import AdaptedModel

        loaded = AdaptedModel(*given, own.lora, seed=0)
    reference = CausalModel(*given) if compares else None
    trainer = TransformersTrainer(settings, own, loaded, 1, 1.0, reference=reference)
    trajectories = trajectories_of(model)
    for step, _ in enumerate(sys.stdin):
        took = pass_of(trainer, trajectories, step)
        if not step:
            trainer.save(saved := model / f"state-{adapts}.safetensors")
            took |= {"state_bytes": saved.stat().st_size, "held_bytes": held_bytes(trainer)}
        if reference is not None:
            cpu_s = time.process_time()
            with torch.no_grad():
                for row in packed_rows(trajectories):
                    loaded.distribution(row, 1.0)
            took["forward_cpu_s"] = time.process_time() - cpu_s
        print(json.dumps(took), flush=True)


def ranked_child(model: Path, ranks: int) -> NoReturn:
    """Our side, of so many ranks."""
    from benchmarks._configurations import configuration
    from elastic.worker.trainer import create_trainer

    config = configuration("trainer-ranks", policy=model, engine={"device": "cpu"}, trainer={"gpus": ranks})
    trainer, trajectories = create_trainer(config), trajectories_of(model)
    for step, _ in enumerate(sys.stdin):
        took = pass_of(trainer, trajectories, step)
        if not step:
            took["held_bytes"] = held_bytes(trainer)
        print(json.dumps(took), flush=True)
    os._exit(0)  # The other ranks end with this one.


def held_bytes(trainer: "PolicyTrainer") -> int:
    """Weights, masters and moments, of all its ranks."""
    parked = trainer.park()
    trainer.resume()
    return parked.state_bytes


def trajectories_of(model: Path) -> "list[TrajectoryData]":
    """The batch, as rollouts would send it."""
    from elastic.testing.trajectories import PlainTrajectory

    return [
        PlainTrajectory(
            str(number),
            one["ids"],
            [0] * PROMPT_TOKENS + [1] * len(one["logprobs"]),
            [0.0] * PROMPT_TOKENS + one["logprobs"],
            [0] * len(one["ids"]),
            one["reward"],
        ).packed()
        for number, one in enumerate(json.loads((model / "batch.json").read_text())["batch"])
    ]


def pass_of(trainer: "PolicyTrainer", trajectories: "list[TrajectoryData]", step: int) -> dict[str, float]:
    """A step on the batch: its seconds, those of this process's CPU, and its loss."""
    from elastic.protocol.wire import TrainGroupFrame

    begun_s, cpu_s = time.perf_counter(), time.process_time()
    trainer.train_group(TrainGroupFrame(step, "g", 0, trajectories))
    loss = trainer.update()["loss"]
    return {"seconds": time.perf_counter() - begun_s, "cpu_s": time.process_time() - cpu_s, "loss": loss}


def packed_rows(trajectories: "list[TrajectoryData]") -> "list[PackedRow]":
    """As the trainer packs them."""
    from elastic.worker.trainer.packing import PackedTrajectory, Packer, row_of

    packer = Packer[None](ROW_TOKENS)
    pieces = [PackedTrajectory(None, one, 0.0) for one in trajectories]
    return [row_of([part.batch for part in parts]) for parts in (*packer.take(pieces), *packer.rest())]


def head_peak_bytes(how: str) -> int:
    """What the head takes in a process of its own."""
    ended = subprocess.run([sys.executable, __file__, "--head", how], capture_output=True, text=True, check=True)
    return int(ended.stdout)


def head(how: str) -> None:
    import torch

    from elastic.worker.trainer.distribution import Head, logits_distribution, token_distribution

    torch.set_num_threads(1)
    hidden = torch.randn(HEAD["tokens"], HEAD["hidden"], requires_grad=True)
    weight = torch.randn(HEAD["vocabulary"], HEAD["hidden"], requires_grad=True)
    ids = torch.randint(HEAD["vocabulary"], (HEAD["tokens"],))
    small = token_distribution(hidden[:16], Head(weight[:1000]), ids[:16] % 1000, 1.0)
    torch.autograd.grad(small.logprobs.sum(), (hidden, weight))
    Path("/proc/self/clear_refs").write_text("5")  # The peak begins at what is there now.
    before = _status_bytes("VmRSS")
    if how == "ours":
        found = token_distribution(hidden, Head(weight), ids, 1.0)
    else:
        found = logits_distribution(hidden @ weight.T, ids, 1.0)
    torch.autograd.grad(found.logprobs.sum(), (hidden, weight))
    print(_status_bytes("VmHWM") - before)


def _status_bytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(f"{name}:")).split()[1]) * 1024


def write_model(directory: Path) -> None:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    Qwen3ForCausalLM(Qwen3Config(**MODEL)).save_pretrained(directory)


def measured(model: Path, sequences: int, rounds: int, *, with_trl: bool) -> Figures:
    tokens = sum(len(one["ids"]) for one in batch_of(sequences))
    given = {"batch": batch_of(sequences), "prompt_tokens": PROMPT_TOKENS, "threads": THREADS}
    (model / "batch.json").write_text(json.dumps(given))
    ours = Side(sys.executable, Path(__file__), model)
    adapting = Side(TRAINERS_PYTHON, Path(__file__), model, "--lora") if TRAINERS_PYTHON.exists() else None
    theirs = Side(TRL_PYTHON, Path(__file__).with_name("_trl_loss.py"), model) if with_trl else None
    comparing = Side(sys.executable, Path(__file__), model, "--reference")
    ranked = Side(sys.executable, Path(__file__), model, "--ranks", str(RANKS))
    our_passes: list[dict[str, float]] = []
    ranked_passes: list[dict[str, float]] = []
    reference_passes: list[dict[str, float]] = []
    adapter_passes: list[dict[str, float]] = []
    their_passes: dict[int, list[dict[str, float]]] = {size: [] for size in SIZES}
    for _ in range(rounds):
        our_passes.append(ours.ask(0))
        ranked_passes.append(ranked.ask(0))
        reference_passes.append(comparing.ask(0))
        adapter_passes += [] if adapting is None else [adapting.ask(0)]
        for size in SIZES if theirs is not None else ():
            assert theirs is not None
            their_passes[size].append(theirs.ask(size))
    ours.close()
    comparing.close()
    ranked.close()
    our_s = _column(our_passes, "seconds")
    figures: Figures = {
        "tokens": tokens,
        "ours_tokens_per_s": tokens / statistics.median(our_s),
        "reference": _reference(our_passes, reference_passes),
        "ranks": _ranks(our_passes, ranked_passes),
        "lora": None,
        "skipped_because": {},
    }
    if adapting is None:
        figures["skipped_because"]["lora"] = WITHOUT_PEFT
    else:
        adapting.close()
        figures["lora"] = {
            "tokens_per_s": tokens / statistics.median(_column(adapter_passes, "seconds")),
            "state_bytes": adapter_passes[0]["state_bytes"],
            "state_over_full": adapter_passes[0]["state_bytes"] / our_passes[0]["state_bytes"],
        }
    if theirs is None:
        absent = dict.fromkeys(("trl_tokens_per_s", "ratio", "ratio_best", "loss_difference"))
        figures["skipped_because"]["trl"] = WITHOUT_TRL
        return {**figures, **absent}
    theirs.close()
    their_s = {size: _column(passes, "seconds") for size, passes in their_passes.items()}
    first, first_theirs = our_passes[0]["loss"], their_passes[SIZES[0]][0]["loss"]
    return {
        **figures,
        "trl_tokens_per_s": tokens / statistics.median(their_s[SIZES[0]]),
        **_ratios(our_s, their_s),
        "cpu": _ratios(
            _column(our_passes, "cpu_s"), {size: _column(passes, "cpu_s") for size, passes in their_passes.items()}
        ),
        "loss_difference": abs(first - first_theirs),
        "losses": {"ours": first, "trl": first_theirs},
    }


def _reference(ours: list[dict[str, float]], passes: list[dict[str, float]]) -> dict[str, float]:
    with_it, forward = statistics.median(_column(passes, "cpu_s")), statistics.median(_column(passes, "forward_cpu_s"))
    extra = with_it - statistics.median(_column(ours, "cpu_s"))
    return {"extra_cpu_s": extra, "forward_cpu_s": forward, "extra_over_forward": extra / forward}


def _ranks(one: list[dict[str, float]], several: list[dict[str, float]]) -> Figures:
    figures: Figures = {
        str(ranks): {
            "step_s": statistics.median(_column(passes, "seconds")),
            "state_bytes": passes[0]["held_bytes"] / ranks,
        }
        for ranks, passes in ((1, one), (RANKS, several))
    }
    over_one = figures[str(RANKS)]["state_bytes"] / figures["1"]["state_bytes"]
    return {**figures, "state_over_one": over_one, "loss_difference": abs(one[0]["loss"] - several[0]["loss"])}


def _column(passes: list[dict[str, float]], name: str) -> list[float]:
    return [one[name] for one in passes]


def _ratios(ours: list[float], theirs: dict[int, list[float]]) -> Figures:
    middle = {size: statistics.median(found) for size, found in theirs.items()}
    best = min(middle, key=lambda size: middle[size])
    return {
        "ratio": middle[SIZES[0]] / statistics.median(ours),
        "ratio_spread": _spread(theirs[SIZES[0]], ours),
        "ratio_best": middle[best] / statistics.median(ours),
        "ratio_best_spread": _spread(theirs[best], ours),
        "best_size": best,
    }


def _spread(theirs: list[float], ours: list[float]) -> list[float]:
    """The smallest and the largest ratio of passes that followed each other."""
    ratios = [one / other for one, other in zip(theirs, ours, strict=True)]
    return [min(ratios), max(ratios)]


def main(arguments: Arguments) -> Figures:
    quick = arguments.quick
    model = arguments.scratch / "model"
    write_model(model)
    sequences, rounds = (2, 1) if quick else (16, 3)
    figures = measured(model, sequences, rounds, with_trl=TRL_PYTHON.exists() and not quick)
    figures["peak_bytes"] = {how: head_peak_bytes(how) for how in ("ours", "full_logits")}
    if quick and TRL_PYTHON.exists():
        figures["skipped_because"]["trl"] = "beside it takes minutes"
    return figures


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        if "--ranks" in sys.argv:
            ranked_child(Path(sys.argv[2]), int(sys.argv[-1]))
        child(Path(sys.argv[2]), adapts="--lora" in sys.argv, compares="--reference" in sys.argv)
    elif sys.argv[1:2] == ["--head"]:
        head(sys.argv[2])
    else:
        benchmark(__doc__, main)
