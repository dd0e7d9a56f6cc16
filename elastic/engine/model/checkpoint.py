"""Hugging Face checkpoint directories: `config.json` with `model.safetensors`, or with an index and shards."""

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from elastic.engine.model.config import Qwen3Config
from elastic.engine.model.qwen3 import Qwen3
from elastic.engine.model.stored import (
    CONFIG_FILE,
    TIED,
    WEIGHTS_FILE,
    CheckpointError,
    check_shapes,
    check_values,
    parameter_shapes,
    read_config,
    stored_tensors,
    weight_files,
)
from elastic.system.files import sync


def read_tensors(directory: Path, config: Qwen3Config) -> dict[str, Tensor]:
    """Every stored parameter under its Hugging Face name, on the CPU, in the file's own dtype.

    Raises `CheckpointError` naming the first tensor that is missing, unexpected or of another shape.
    """
    check_values(directory, stored_tensors(directory), tied=config.tie_word_embeddings)
    tensors = {name: tensor for path in weight_files(directory) for name, tensor in _read_file(path)}
    if config.tie_word_embeddings:
        tensors.pop(TIED, None)
    _check(directory, tensors, config)
    return tensors


def load_model(directory: Path, device: torch.device | str = "cpu") -> Qwen3:
    """Load a checkpoint as a model with float32 parameters. Raises `CheckpointError`."""
    config = read_config(directory)
    tensors = read_tensors(directory, config)
    with torch.device("meta"), _Uninitialised():
        model = Qwen3(config)
    model = model.to_empty(device=device).to(torch.float32)
    model.tie_weights()
    load_tensors(model, tensors)
    return model


class _Uninitialised(TorchFunctionMode):
    """A context in which modules are made without initial values. To draw some for no device, torch would import its
    compiler, which takes a process 2 s and 100 MB."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        if getattr(func, "__module__", "") == nn.init.__name__:
            return given["tensor"] if "tensor" in given else args[0]
        return func(*args, **given)


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
    _check(directory, tensors, config)
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


def _read_file(path: Path) -> Iterator[tuple[str, Tensor]]:
    try:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a dict
                yield name, file.get_tensor(name)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path}: cannot be read ({error})") from error


def _check(directory: Path, tensors: Mapping[str, Tensor], config: Qwen3Config) -> None:
    check_shapes(directory, {name: tuple(tensor.shape) for name, tensor in tensors.items()}, parameter_shapes(config))
