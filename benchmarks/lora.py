"""What adapters cost on the way to workers, whether a worker that keeps a former one is found, what merging changes.

`bytes_per_update` is what a version adds to the relay after an update of the same small Qwen3, trained whole and by an
adapter, with the size of the model beside it: the median of `UPDATES`. `merged_difference` is the mean |log-ratio| of
128 tokens between the base with an adapter that has learnt, and the weights of both in one, as `elastic export --merge`
writes them, in bfloat16. `wrong_adapter_found_s` is from the first version that a worker says it serves and does not to
its lease's end, in a live run on vLLM where a planted fault leaves every adapter but the first where it is;
`tokens_given` are the worker's with versions that it did not serve.

The first two need peft (`make .cache/trainers/installed`), the last one vLLM (`make .cache/vllm-venv/installed`).
"""

import json
import os
import random
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks import ROOT
from benchmarks._common import TRAINERS_PYTHON, WITHOUT_PEFT, Arguments, Figures, benchmark
from benchmarks._shapes import SHAPES

VLLM_PYTHON = ROOT / ".cache" / "vllm-venv" / "bin" / "python"
WITHOUT_VLLM = "vLLM is not installed in .cache/vllm-venv: `make .cache/vllm-venv/installed`"
IN_MINUTES = "a run on vLLM takes minutes"
VOCABULARY = 8192
MODEL = {**SHAPES["trained"], "vocab_size": VOCABULARY, "max_position_embeddings": 1024, "dtype": "bfloat16"}
"""13 million parameters."""
LORA = {"r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"]}
"""What peft adapts where it is not told."""
UPDATES = 3
GROUPS, MEMBERS, TOKENS = 2, 4, 48
RATES = {"full_delta": 1e-5, "adapter": 1e-4}
LEARNT_RATE = 1e-2
RUN_TIMEOUT_S = 1500.0


def child(directory: Path) -> Figures:
    """In an interpreter that has peft."""
    import torch
    import transformers

    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model("qwen3", **MODEL)
    model = transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    model.save_pretrained(directory / "model")
    bytes_per_update: dict[str, float] = {
        name: _bytes_per_update(directory, name, None if name == "full_delta" else LORA, rate)
        for name, rate in RATES.items()
    }
    size_bytes = 2 * sum(parameter.numel() for parameter in model.parameters())
    return {
        "bytes_per_update": {**bytes_per_update, "model": size_bytes},
        "adapter_over_model": bytes_per_update["adapter"] / size_bytes,
        "merged_difference": _merged_difference(directory),
    }


def _trainer(directory: Path, lora: dict[str, Any] | None, rate: float) -> tuple[Any, Any, Any]:
    """A trainer of the model, with its configuration and its own settings."""
    from benchmarks._configurations import configuration
    from elastic.worker.trainer.transformers import Transformers, TransformersSettings

    config = configuration("lora", policy=directory / "model", trainer={"learning_rate": rate})
    own = TransformersSettings.model_validate({"lora": lora})
    return Transformers.create(config, own, "cpu"), config, own


def _step(trainer: Any) -> None:
    from elastic.protocol.wire import TrainGroupFrame
    from elastic.testing.trajectories import PlainTrajectory

    rng = random.Random(trainer.version)
    for index in range(GROUPS):
        trajectories = [
            PlainTrajectory(
                f"{index}.{member}",
                [rng.randrange(VOCABULARY) for _ in range(TOKENS)],
                [0, *[1] * (TOKENS - 1)],
                [-9.0] * TOKENS,
                [trainer.version] * TOKENS,
                float(member % 2),
            ).packed()
            for member in range(MEMBERS)
        ]
        trainer.train_group(TrainGroupFrame(trainer.version, f"g{index}", index, trajectories))
    trainer.update()


def _bytes_per_update(directory: Path, name: str, lora: dict[str, Any] | None, rate: float) -> float:
    from elastic.weights.directory import DirectoryRelay
    from elastic.weights.publisher import Publisher, PublishSettings

    trainer, _, _ = _trainer(directory, lora, rate)
    relay = DirectoryRelay(directory / name)
    publisher = Publisher(relay, "lora", MODEL, PublishSettings(keyframe_every=100, merge_every=1))
    publisher.publish(0, trainer.tensors(), [])
    sizes: list[int] = []
    for version in range(1, UPDATES + 1):
        _step(trainer)
        sizes.append(publisher.publish(version, trainer.tensors(), [version - 1]).size_bytes)
    return statistics.median(sizes)


def _merged_difference(directory: Path) -> float:
    import torch
    import transformers

    from elastic.engine.base import proof_text
    from elastic.worker.trainer.transformers import Transformers

    trainer, config, own = _trainer(directory, LORA, LEARNT_RATE)
    base = trainer.proof()
    for _ in range(UPDATES):
        _step(trainer)
    trainer.save(directory / "checkpoint.safetensors")
    merged = transformers.AutoModelForCausalLM.from_pretrained(directory / "model", dtype=torch.float32)
    exported = Transformers.exported(config, own, directory / "checkpoint.safetensors")
    merged.load_state_dict({name: tensor.bfloat16().float() for name, tensor in exported}, strict=False)
    text = torch.tensor([proof_text(VOCABULARY)])
    with torch.no_grad():
        said = merged(text).logits[0, :-1].log_softmax(-1).gather(-1, text[0, 1:, None]).squeeze(-1)
    apart = [abs(one - other) for one, other in zip(base, trainer.proof(), strict=True)]
    assert statistics.mean(apart) > 0.01, "the adapter has learnt nothing"
    return (said - torch.tensor(trainer.proof())).abs().mean().item()


def wrong_adapter(directory: Path) -> Figures:
    """In vLLM's environment: a live run in which the dedicated worker keeps the first adapter that it loads."""
    from benchmarks._runs import CommandRun, elastic
    from elastic.core import events as e
    from elastic.core.types import NS_PER_S
    from elastic.runtime.journal import RunDirectory

    example = ROOT / "examples" / "frozenlake-vllm.toml"
    base = ROOT / ".cache" / "frozenlake-base"
    elastic("prepare", str(example))
    settings = (
        f"model.checkpoint={base}",
        f"engine.vllm.base={base}",
        "engine.vllm.start_timeout_s=1200",
        "trainer.engine.kind=vllm",
        "trainer.kind=transformers",
        *(f"trainer.transformers.lora.{key}={value}" for key, value in (("r", 8), ("lora_alpha", 64))),
        "trainer.learning_rate=0.01",
        "trainer.warmup_updates=0",
        "rollout.groups=4",
        "run.steps=4",
        "scheduler.boot_timeout_s=1200",
        "scheduler.queue_timeout_s=1200",
        "providers.reserved.max_workers=1",
    )
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent / "_keeps_adapters"), str(ROOT)])
    with CommandRun.of_example(directory / "runs", *settings, example=example) as run:
        run.until("its end", run.ended, RUN_TIMEOUT_S)
        found = json.loads(elastic("report", str(run.run_dir), "--json"))["mismatches"]
        if not found:
            return {"wrong_adapter_found_s": None, "tokens_given": None}
        worker, serves = found[0]["worker"], found[0]["serves"]
        with RunDirectory(run.run_dir).journals() as journals:
            (journal,) = journals
            applied: list[tuple[int, int]] = []
            ended_ns = 0
            for t_ns, event in journal.events_of(e.WeightsApplied.__name__, e.LeaseEnded.__name__):
                if isinstance(event, e.WeightsApplied) and event.worker == worker:
                    applied.append((t_ns, event.version))
                elif isinstance(event, e.LeaseEnded) and event.lease == worker:
                    ended_ns = t_ns
            (_, first), *later = applied
            given = sum(
                chunk.count
                for frame in journal.frames()
                for chunk in frame.chunks
                if frame.worker == worker and chunk.version > first
            )
        return {
            "wrong_adapter_found_s": (ended_ns - later[0][0]) / NS_PER_S,
            "tokens_given": given,
            "found_at_version": found[0]["version"],
            "serves": serves,
        }


def _in(python: Path, what: str, directory: Path) -> Figures:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [str(python), str(Path(__file__)), what, str(directory)]
    ended = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if ended.returncode:
        sys.exit(ended.stderr)
    return json.loads(ended.stdout.splitlines()[-1])


def main(arguments: Arguments) -> Figures:
    quick = arguments.quick
    figures: Figures = dict.fromkeys(("bytes_per_update", "wrong_adapter_found_s", "merged_difference"))
    skipped: dict[str, str] = {}
    if TRAINERS_PYTHON.exists():
        figures |= _in(TRAINERS_PYTHON, "--child", arguments.scratch)
    else:
        skipped["peft"] = WITHOUT_PEFT
    if quick or not VLLM_PYTHON.exists():
        skipped["wrong_adapter_found_s"] = IN_MINUTES if VLLM_PYTHON.exists() else WITHOUT_VLLM
    else:
        figures |= _in(VLLM_PYTHON, "--wrong", arguments.scratch)
    return {**figures, "skipped_because": skipped} if skipped else figures


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        print(json.dumps(child(Path(sys.argv[2]))))
    elif sys.argv[1:2] == ["--wrong"]:
        print(json.dumps(wrong_adapter(Path(sys.argv[2]))))
    else:
        benchmark(__doc__, main)
