"""Hugging Face checkpoint directories: `config.json` with `model.safetensors`, or with an index and shards."""

import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from elastic.files import sync
from elastic.model.config import ModelConfigError, Qwen3Config
from elastic.model.qwen3 import Qwen3, parameter_shapes

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
TIED = "lm_head.weight"


class CheckpointError(Exception):
    """A checkpoint cannot be read or written, or does not match its config; names the file or tensor."""


def read_config(directory: Path) -> Qwen3Config:
    """The model's shape. Raises `CheckpointError`."""
    path = directory / CONFIG_FILE
    try:
        return Qwen3Config.from_dict(_read_json(path))
    except ModelConfigError as error:
        raise CheckpointError(f"{path}: {error}") from error


def read_tensors(directory: Path, config: Qwen3Config) -> dict[str, Tensor]:
    """Every stored parameter under its Hugging Face name, on the CPU, in the file's own dtype.

    Raises `CheckpointError` naming the first tensor that is missing, unexpected or of another shape.
    """
    tensors = {name: tensor for path in _weight_files(directory) for name, tensor in _read_file(path)}
    if config.tie_word_embeddings:
        tensors.pop(TIED, None)
    _check(directory, tensors, parameter_shapes(config))
    return tensors


def load_model(directory: Path, device: torch.device | str = "cpu") -> Qwen3:
    """Load a checkpoint as a model with float32 parameters. Raises `CheckpointError`."""
    config = read_config(directory)
    tensors = read_tensors(directory, config)
    with torch.device("meta"):
        model = Qwen3(config)
    model = model.to_empty(device=device).to(torch.float32)
    model.tie_weights()
    load_tensors(model, tensors)
    return model


def load_tensors(model: Qwen3, tensors: Mapping[str, Tensor]) -> None:
    """Copy `tensors` into the model's parameters, in place, converting to their dtype and device."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(tensors[name])


def model_tensors(model: Qwen3) -> dict[str, Tensor]:
    """Copy the model's parameters to the CPU as a checkpoint stores them: in bfloat16, tied ones once."""
    return {
        name: parameter.detach().to("cpu", torch.bfloat16, copy=True).contiguous()
        for name, parameter in model.named_parameters()
    }


def write_checkpoint(directory: Path, config: Qwen3Config, tensors: Mapping[str, Tensor]) -> None:
    """Write a checkpoint so that a reader, or a crash, never meets a half-written file.

    A new directory appears complete; in an existing one each file is replaced whole, the weights first.
    Raises `CheckpointError` when a tensor does not match `config`, or the disk refuses.
    """
    _check(directory, tensors, parameter_shapes(config))
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=directory.parent))
        try:
            save_file(dict(tensors), staging / WEIGHTS_FILE, metadata={"format": "pt"})
            (staging / CONFIG_FILE).write_text(json.dumps(config.to_dict(), indent=2) + "\n", encoding="utf-8")
            for name in (WEIGHTS_FILE, CONFIG_FILE):
                sync(staging / name)
            _publish(staging, directory)
        finally:
            shutil.rmtree(staging, ignore_errors=True)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{directory}: cannot be written ({error})") from error


def _publish(staging: Path, directory: Path) -> None:
    staging.chmod(0o755)
    if not directory.exists():
        staging.rename(directory)
    else:
        for name in (WEIGHTS_FILE, CONFIG_FILE):
            os.replace(staging / name, directory / name)
        sync(directory)
    sync(directory.parent)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise CheckpointError(f"{path}: not valid JSON ({error})") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: expected a JSON object (found {type(value).__name__})")
    return value


def _weight_files(directory: Path) -> list[Path]:
    single, index = directory / WEIGHTS_FILE, directory / INDEX_FILE
    if single.exists():
        return [single]
    if not index.exists():
        raise CheckpointError(f"{directory}: found neither {WEIGHTS_FILE} nor {INDEX_FILE}")
    weight_map = _read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise CheckpointError(f"{index}: weight_map must map tensor names to file names")
    return [directory / name for name in sorted(set(weight_map.values()))]


def _read_file(path: Path) -> Iterator[tuple[str, Tensor]]:
    try:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a dict
                yield name, file.get_tensor(name)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path}: cannot be read ({error})") from error


def _check(directory: Path, tensors: Mapping[str, Tensor], expected: Mapping[str, tuple[int, ...]]) -> None:
    for name, shape in expected.items():
        if name not in tensors:
            raise CheckpointError(f"{directory}: {name}: missing; expected shape {list(shape)}")
        found = tuple(tensors[name].shape)
        if found != shape:
            raise CheckpointError(f"{directory}: {name}: expected shape {list(shape)}, found {list(found)}")
    unexpected = sorted(tensors.keys() - expected.keys())
    if unexpected:
        raise CheckpointError(
            f"{directory}: {unexpected[0]}: not a parameter of this config "
            f"(found shape {list(tensors[unexpected[0]].shape)})"
        )
