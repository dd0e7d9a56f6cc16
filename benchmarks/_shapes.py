"""The models of benchmarks, by name, with random weights: their shapes, their tensors, and checkpoints of them."""

import tomllib
from pathlib import Path
from typing import Any

from benchmarks import HERE

SHAPES: dict[str, dict[str, Any]] = tomllib.loads((HERE / "models.toml").read_text())
ON_A_DEVICE = tuple(name for name in SHAPES if name.startswith(("tiny", "qwen3")))
"""Of which two share a device."""


def write_policy(directory: Path, shape: str = "example", **fields: Any) -> Path:
    """Write an untrained checkpoint of this shape, with these fields besides where the shape has none."""
    import torch

    from elastic.engine.model.checkpoint import model_tensors, write_checkpoint
    from elastic.engine.model.config import Qwen3Config
    from elastic.engine.model.qwen3 import Qwen3

    torch.manual_seed(0)
    config = Qwen3Config(**fields | SHAPES[shape])
    write_checkpoint(directory, config, model_tensors(Qwen3(config)))
    return directory


def write_chat_policy(directory: Path, shape: str = "smallest") -> Path:
    """Write an untrained policy with the tiny tokenizer, that one can chat with."""
    from elastic.front.tiny import VOCABULARY, write_tokenizer

    write_policy(directory, shape, vocab_size=VOCABULARY)
    write_tokenizer(directory)
    return directory


def random_weights(shape: str, device: str) -> dict[str, Any]:
    """Bfloat16 tensors on the host, made on the device: billions of random numbers take minutes on a core."""
    import torch

    from elastic.engine.model.checkpoint import model_tensors
    from elastic.engine.model.config import Qwen3Config
    from elastic.engine.model.qwen3 import Qwen3

    torch.manual_seed(0)
    with torch.device(device):
        model = Qwen3(Qwen3Config(**SHAPES[shape]))
    return {name: tensor.bfloat16().cpu() for name, tensor in model_tensors(model).items()}
