"""What can be said of a base policy before a process trains it: by its headers here, by its model in a process aside.

That process makes the model without its weights, as transformers would; so that starting a run loads no torch.
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
    check_depth,
    check_ends,
    check_not_quantised,
    check_values,
    count_float32,
    read_object,
    stored_tensors,
)
from elastic.worker.trainer.base import StoredPolicy
from elastic.worker.trainer.transformers.settings import LoraSettings, TransformersSettings

TIMEOUT_S = 120.0
"""For the process aside, which takes seconds."""


def examine(directory: Path, settings: TransformersSettings) -> StoredPolicy:
    """Return what the policy is, or the adapters to it. Raises `ConfigError` for what cannot be trained."""
    if find_spec("transformers") is None:
        raise ConfigError(
            "trainer.kind: 'transformers' needs the package transformers, which is not installed here: "
            "`pip install -e '.[transformers]'` in a clone of elastic; allowed without it: 'embedded', for Qwen3"
        )
    if settings.lora is not None and find_spec("peft") is None:
        raise ConfigError(
            "trainer.transformers.lora: needs the package peft, which is not installed here: "
            "`pip install -e '.[lora]'` in a clone of elastic; allowed without it: no such section"
        )
    try:
        raw = read_object(directory / CONFIG_FILE)
        text: Mapping[str, Any] = raw.get("text_config") or raw
        check_not_quantised(directory / CONFIG_FILE, raw)
        check_ends(directory, raw)
        stored = stored_tensors(directory)
        check_values(directory, stored, tied=bool(raw.get("tie_word_embeddings", text.get("tie_word_embeddings"))))
        check_depth(directory, text.get("num_hidden_layers"), stored)
        found = _aside(directory, settings)
    except CheckpointError as error:
        raise ConfigError(f"model.checkpoint: {error}") from error
    if adapters := int(found["adapters"]):
        return StoredPolicy(int(found["vocab_size"]), adapters)
    return StoredPolicy(int(found["vocab_size"]), _parameters(stored), count_float32(stored))


def examine_checkpoint(directory: Path, checkpoint: Path, settings: TransformersSettings) -> None:
    """A trainer's checkpoint is one of the base policy in `directory`, or of adapters to it. Raises
    `CheckpointError`."""
    _aside(directory, settings, checkpoint)


def _parameters(stored: Mapping[str, StoredTensor]) -> int:
    return sum(prod(tensor.shape) for tensor in stored.values())


def _aside(directory: Path, settings: TransformersSettings, checkpoint: Path | None = None) -> dict[str, Any]:
    """Return what `main` says. Raises `CheckpointError`, and `ConfigError` for a setting that the model does not
    take."""
    given = (str(directory), "" if checkpoint is None else str(checkpoint), settings.model_dump_json())
    command = [sys.executable, "-m", __name__, *given]
    try:
        # Nobody is asked whether a checkpoint's own code may run: it never does.
        ended = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise CheckpointError(f"{directory}: looking at it took longer than {TIMEOUT_S:g} s") from error
    try:
        answer = json.loads(ended.stdout.splitlines()[-1])
    except (IndexError, ValueError):  # It has not come to an answer, whatever models have printed before.
        raise CheckpointError(_last_words(directory, ended)) from None
    if "setting" in answer:
        raise ConfigError(answer["setting"])
    if "error" in answer:
        raise CheckpointError(answer["error"])
    return answer


def _last_words(directory: Path, ended: "subprocess.CompletedProcess[str]") -> str:
    lines = [line.strip() for line in ended.stderr.splitlines() if line.strip()]
    how = f"exit status {ended.returncode}" if ended.returncode >= 0 else f"signal {-ended.returncode}"
    return f"{directory}: transformers did not get through with it ({how}): {lines[-1] if lines else 'no word'}"


def main(directory: Path, checkpoint: Path | None, settings: TransformersSettings) -> dict[str, Any]:
    import torch
    import transformers

    from elastic.worker.trainer.checkpoint import check_header
    from elastic.worker.trainer.transformers.model import names_on_disk, no_attention

    def made(**attention: str) -> Any:
        with torch.device("meta"):
            return transformers.AutoModelForCausalLM.from_config(config, trust_remote_code=False, **attention)

    try:
        config = transformers.AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
        model = made()
        names_on_disk(directory, model, stored_tensors(directory))
        if (wanted := settings.attention) != "auto":
            try:
                made(attn_implementation=wanted)
            except (ImportError, ValueError) as error:
                return {"setting": no_attention(wanted, error)}
        trained = dict(model.named_parameters())
        if settings.lora is not None:
            trained = _adapters(model, settings.lora)
        if checkpoint is not None:
            check_header(checkpoint, {name: tuple(one.shape) for name, one in trained.items()})
    except CheckpointError as error:
        return {"error": str(error)}
    except ConfigError as error:
        return {"setting": str(error)}
    except Exception as error:  # Models raise what they like for a config that they cannot be made of.
        kind = read_object(directory / CONFIG_FILE).get("model_type")
        return {
            "error": f"{directory / CONFIG_FILE}: model_type: found {kind!r}, which transformers "
            f"{transformers.__version__} does not load as a causal language model: {_reason(error)}"
        }
    adapters = 0 if settings.lora is None else sum(one.numel() for one in trained.values())
    return {"vocab_size": config.get_text_config().vocab_size, "adapters": adapters}


def _reason(error: Exception) -> str:
    """What an error says in one line; its kind, too, where that is not of those that are raised for bad input."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    expected = isinstance(error, OSError | ValueError | ImportError)
    return ": ".join([*([] if expected and lines else [type(error).__name__]), *lines[:2]])


def _adapters(model: Any, lora: LoraSettings) -> dict[str, Any]:
    """The parameters of adapters to the model. Raises `ConfigError` for modules that it does not have."""
    from elastic.worker.trainer.transformers.lora import adapt, adapters

    try:
        adapt(model, lora, empty=True)
    except ValueError as error:
        head = model.get_output_embeddings()
        layers = ((name, one) for name, one in model.named_modules() if one is not head)
        linear = sorted({name.rpartition(".")[2] for name, one in layers if type(one).__name__ == "Linear"})
        raise ConfigError(
            f"trainer.transformers.lora.target_modules: found {lora.target_modules!r}: {str(error).splitlines()[0]}; "
            f"allowed: ends of {', '.join(linear)}"
        ) from error
    return dict(adapters(model))


if __name__ == "__main__":
    policy, saved, wished = sys.argv[1:]
    own = TransformersSettings.model_validate_json(wished)
    print(json.dumps(main(Path(policy), Path(saved) if saved else None, own)))
