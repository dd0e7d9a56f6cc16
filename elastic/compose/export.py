"""A run's policy as a Hugging Face directory: weights as the base policy's files have them, all that is beside them
there, and a model card."""

import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from elastic.compose.checkpoints import adapter_of, checkpoints, policy_of
from elastic.compose.runs import load_run_config
from elastic.config import Config, ConfigError
from elastic.runtime.journal import RunDirectory
from elastic.system.files import sync

if TYPE_CHECKING:
    from torch import Tensor

SHARD_BYTES = 5 * 10**9
"""The most bytes of one file of weights, as transformers writes them."""
BESIDE = (".json", ".txt", ".model", ".jinja", ".tiktoken")
"""Ends of the names of files that belong to a policy beside its weights: its config, tokenizer and template."""
OF_TOKENS = ("tokenizer", "vocab", "merges", "special_tokens", "added_tokens", "chat_template")
"""Beginnings of those of tokenizers, which stand beside an adapter, too."""
CARD_FILE = "README.md"


class Exported(msgspec.Struct, frozen=True, kw_only=True):
    """What was written: the policy of version `step`."""

    run: str
    step: int
    directory: str
    tensors: int
    size_bytes: int


def export(
    run: RunDirectory,
    directory: Path,
    step: int | None = None,
    shard_bytes: int = SHARD_BYTES,
    *,
    merge: bool = False,
) -> Exported:
    """Write the policy of a run's checkpoint, its newest unless a `step` is given, to a new `directory`.

    What a run has trained as an adapter is written as one, in peft's form; with `merge`, added to the base. It appears
    there complete, or not at all. Raises `ConfigError` for a step of which there is no checkpoint, for a directory that
    holds something, for `merge` without an adapter, and for files that cannot be read or written.
    """
    from safetensors import SafetensorError

    from elastic.engine.model.stored import CheckpointError, check_words

    config = load_run_config(run.path)
    path, base = _checkpoint(run, step), config.model.checkpoint
    if not base.is_dir():
        raise ConfigError(f"elastic export: {base}: the run's base policy, which is exported with it, is not there")
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ConfigError(f"-o {directory}: is there, and not empty; allowed: a directory that is empty, or none yet")
    try:
        check_words(base)
        directory.parent.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=directory.parent))
        try:
            adapter = adapter_of(config, path)
            if merge and not adapter:
                raise ConfigError(f"--merge: run {run.name} trains whole models, which are merged; allowed: without it")
            if adapter and not merge:
                tensors, size_bytes = _write_adapter(config, adapter, staging)
            else:
                tensors, size_bytes = _write(config, path, staging, shard_bytes)
            found = Exported(
                run=run.name, step=int(path.stem), directory=str(directory), tensors=tensors, size_bytes=size_bytes
            )
            adapts = bool(adapter) and not merge
            (staging / CARD_FILE).write_text(_card(config, found, adapts=adapts), encoding="utf-8")
            for file in staging.iterdir():
                sync(file)
            staging.chmod(0o755)
            staging.replace(directory)
            sync(directory.parent)
        finally:
            shutil.rmtree(staging, ignore_errors=True)
    except CheckpointError as error:
        raise ConfigError(f"elastic export: {error}") from error
    except (OSError, SafetensorError) as error:
        why = getattr(error, "strerror", None) or error
        raise ConfigError(f"-o {directory}: cannot be written ({why})") from error
    return found


def _checkpoint(run: RunDirectory, step: int | None) -> Path:
    there = {int(path.stem): path for path in checkpoints(run.path)}
    if not there:
        raise ConfigError(
            f"elastic export: run {run.name} has no checkpoint yet; trainer.checkpoint_every_steps has it"
        )
    wanted = max(there) if step is None else step
    if wanted not in there:
        steps = ", ".join(map(str, sorted(there)))
        raise ConfigError(f"--step: found {step}; run {run.name} has checkpoints of steps {steps}")
    return there[wanted]


def _write(config: Config, checkpoint: Path, directory: Path, shard_bytes: int) -> tuple[int, int]:
    """Write weights and what belongs to them; returns how many tensors, of how many bytes."""
    from safetensors.torch import save_file

    base = config.model.checkpoint
    for file in sorted(base.iterdir()):
        if file.suffix in BESIDE and not file.name.endswith(".index.json"):
            shutil.copyfile(file, directory / file.name)
    shards: list[dict[str, Tensor]] = [{}]
    sizes = [0]
    for name, tensor in _tensors(config, checkpoint):
        if shards[-1] and sizes[-1] + tensor.nbytes > shard_bytes:
            shards.append({})
            sizes.append(0)
        shards[-1][name] = tensor
        sizes[-1] += tensor.nbytes
    names = [f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
    if len(shards) == 1:
        names = ["model.safetensors"]
    else:
        places = {name: file for file, shard in zip(names, shards, strict=True) for name in shard}
        index = {"metadata": {"total_size": sum(sizes)}, "weight_map": places}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    for file, shard in zip(names, shards, strict=True):
        save_file(shard, directory / file, metadata={"format": "pt"})
    return sum(map(len, shards)), sum(sizes)


def _write_adapter(config: Config, adapter: "dict[str, Tensor]", directory: Path) -> tuple[int, int]:
    """Write an adapter as peft does, with its tokenizer; returns how many tensors, of how many bytes."""
    from safetensors.torch import save_file

    base = config.model.checkpoint
    for file in sorted(base.iterdir()):
        if file.suffix in BESIDE and file.name.startswith(OF_TOKENS):
            shutil.copyfile(file, directory / file.name)
    tensors = {name: tensor.contiguous() for name, tensor in adapter.items()}
    rank = next(len(tensor) for name, tensor in tensors.items() if name.endswith(".lora_A.weight"))
    about = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base),
        "r": rank,
        "lora_alpha": rank,
        "target_modules": sorted({name.split(".")[-3] for name in tensors}),
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
    }
    (directory / "adapter_config.json").write_text(json.dumps(about, indent=2) + "\n")
    save_file(tensors, directory / "adapter_model.safetensors", metadata={"format": "pt"})
    return len(tensors), sum(tensor.nbytes for tensor in tensors.values())


def _tensors(config: Config, checkpoint: Path) -> "Iterator[tuple[str, Tensor]]":
    """The policy's tensors, in the types in which the base policy's files have them."""
    import torch

    from elastic.engine.model.stored import stored_tensors

    types = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64}
    stored = stored_tensors(config.model.checkpoint)
    for name, tensor in policy_of(config, checkpoint):
        yield name, tensor.to(types[stored[name].type]).contiguous()


def _card(config: Config, found: Exported, *, adapts: bool) -> str:
    """What the Hugging Face Hub shows of a model."""
    trainer, rollout = config.trainer, config.rollout
    rows: dict[str, Any] = {
        "run": found.run,
        "step": f"{found.step} of {config.run.steps}",
        "base policy": config.model.checkpoint.name,
        "environment": ", ".join(one.name for one in config.mixture),
        "reward": config.rewards.name or "the environment's",
        "groups × trajectories a step": f"{rollout.groups} × {rollout.group_size}",
        "staleness bound": rollout.staleness_bound,
        "temperature": rollout.temperature,
        "trainer": trainer.kind,
        "learning rate, schedule": f"{trainer.learning_rate:g}, {trainer.schedule}",
        "seed": config.run.seed,
    }
    lines = [
        "---",
        *(
            ["library_name: peft", f"base_model: {config.model.checkpoint}"]
            if adapts
            else ["library_name: transformers"]
        ),
        "pipeline_tag: text-generation",
        "tags:",
        "- reinforcement-learning",
        "- grpo",
        "- elastic",
        "---",
        "",
        f"# {found.run}, step {found.step}",
        "",
        f"{'An adapter' if adapts else 'A policy'} that Elastic trained by reinforcement learning (GRPO), "
        f"{'to' if adapts else 'from'} {config.model.checkpoint.name}, whose "
        "license and limits hold for it, too.",
        "",
        "| | |",
        "| --- | --- |",
        *(f"| {name} | {value} |" for name, value in rows.items()),
    ]
    return "\n".join(lines) + "\n"
