"""What can be said of a base policy before a process trains it: by its headers here, by its model in a process aside.

That process makes the model without its weights, as transformers would; so whoever starts a run loads no torch for it.
"""

import json
import subprocess
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from math import prod
from pathlib import Path
from typing import Any

from elastic.config import ConfigError
from elastic.engine.model.stored import (
    CONFIG_FILE,
    CheckpointError,
    StoredTensor,
    check_values,
    count_float32,
    stored_tensors,
)
from elastic.system.given import read_text
from elastic.worker.trainer.base import StoredPolicy
from elastic.worker.trainer.transformers.settings import LoraSettings

TIMEOUT_S = 120.0
"""For the process aside, which takes seconds."""


def examine(directory: Path, lora: LoraSettings | None = None) -> StoredPolicy:
    """Return what the policy is, or the adapters to it. Raises `ConfigError` for what cannot be trained."""
    if find_spec("transformers") is None:
        raise ConfigError(
            "trainer.kind: 'transformers' needs the package transformers, which is not installed here: "
            "`pip install -e '.[transformers]'` in a clone of elastic; allowed without it: 'embedded', for Qwen3"
        )
    if lora is not None and find_spec("peft") is None:
        raise ConfigError(
            "trainer.transformers.lora: needs the package peft, which is not installed here: "
            "`pip install -e '.[lora]'` in a clone of elastic; allowed without it: no such section"
        )
    try:
        raw: Mapping[str, Any] = json.loads(read_text(directory / CONFIG_FILE))
        text: Mapping[str, Any] = raw.get("text_config") or raw
        if (quantised := raw.get("quantization_config")) is not None:
            how = quantised.get("quant_method") if isinstance(quantised, dict) else None
            raise CheckpointError(
                f"{directory / CONFIG_FILE}: found a quantization_config{f' ({how})' if how else ''}: quantised "
                "weights cannot be trained; name the checkpoint that they were made of"
            )
        stored = stored_tensors(directory)
        check_values(directory, stored, tied=bool(raw.get("tie_word_embeddings", text.get("tie_word_embeddings"))))
        found = _aside(directory, lora=lora)
        if adapters := int(found["adapters"]):
            return StoredPolicy(int(found["vocab_size"]), adapters)
        return StoredPolicy(int(found["vocab_size"]), _parameters(stored), count_float32(stored))
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.checkpoint: {directory / CONFIG_FILE} cannot be read: {error}") from error
    except CheckpointError as error:
        raise ConfigError(f"model.checkpoint: {error}") from error


def examine_checkpoint(directory: Path, checkpoint: Path, lora: LoraSettings | None = None) -> None:
    """A trainer's checkpoint is one of the base policy in `directory`, or of adapters to it. Raises
    `CheckpointError`."""
    _aside(directory, checkpoint, lora)


def _parameters(stored: Mapping[str, StoredTensor]) -> int:
    return sum(prod(tensor.shape) for tensor in stored.values())


def _aside(directory: Path, checkpoint: Path | None = None, lora: LoraSettings | None = None) -> dict[str, Any]:
    """Return what `main` says. Raises `CheckpointError`."""
    given = (
        str(directory),
        "" if checkpoint is None else str(checkpoint),
        "" if lora is None else lora.model_dump_json(),
    )
    command = [sys.executable, "-m", __name__, *given]
    try:
        # Nobody is asked whether a checkpoint's own code may run: it never does.
        ended = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
        answer = json.loads(ended.stdout.splitlines()[-1]) if ended.stdout else {"error": ended.stderr[-1000:]}
    except subprocess.TimeoutExpired as error:
        raise CheckpointError(f"{directory}: looking at it took longer than {TIMEOUT_S:g} s") from error
    if "error" in answer:
        raise CheckpointError(answer["error"])
    return answer


def main(directory: Path, checkpoint: Path | None, lora: LoraSettings | None) -> dict[str, Any]:
    import torch
    import transformers

    from elastic.worker.trainer.checkpoint import check_header
    from elastic.worker.trainer.transformers.model import names_on_disk

    try:
        config = transformers.AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config, trust_remote_code=False)
        names_on_disk(directory, model, stored_tensors(directory))
        trained = dict(model.named_parameters())
        if lora is not None:
            trained = _adapters(model, lora)
        if checkpoint is not None:
            check_header(checkpoint, {name: tuple(one.shape) for name, one in trained.items()})
    except CheckpointError as error:
        return {"error": str(error)}
    except Exception as error:  # Models raise what they like for a config that they cannot be made of.
        kind = json.loads(read_text(directory / CONFIG_FILE)).get("model_type")
        return {
            "error": f"{directory / CONFIG_FILE}: model_type: found {kind!r}, which transformers "
            f"{transformers.__version__} does not load as a causal language model: {_reason(error)}"
        }
    adapters = 0 if lora is None else sum(one.numel() for one in trained.values())
    return {"vocab_size": config.get_text_config().vocab_size, "adapters": adapters}


def _reason(error: Exception) -> str:
    """What an error says in one line; its kind, too, where that is not of those that are raised for bad input."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    expected = isinstance(error, OSError | ValueError | ImportError)
    return ": ".join([*([] if expected and lines else [type(error).__name__]), *lines[:2]])


def _adapters(model: Any, lora: LoraSettings) -> dict[str, Any]:
    """The parameters of adapters to the model. Raises `CheckpointError` for modules that it does not have."""
    from elastic.worker.trainer.transformers.lora import adapt, adapters

    try:
        adapt(model, lora, empty=True)
    except ValueError as error:
        linear = sorted(
            {name.rpartition(".")[2] for name, one in model.named_modules() if type(one).__name__ == "Linear"}
        )
        raise CheckpointError(
            f"trainer.transformers.lora.target_modules: found {lora.target_modules!r}: {str(error).splitlines()[0]}; "
            f"allowed: ends of {', '.join(linear)}"
        ) from error
    return dict(adapters(model))


if __name__ == "__main__":
    policy, saved, adapting = sys.argv[1:]
    found = main(
        Path(policy), Path(saved) if saved else None, LoraSettings.model_validate_json(adapting) if adapting else None
    )
    print(json.dumps(found))
