"""The models of benchmarks, by name, with random weights: their shapes, their tensors, and checkpoints of them."""

from pathlib import Path
from typing import Any


def _qwen3(hidden: int, intermediate: int, layers: int, heads: int, tied: bool = True) -> dict[str, Any]:
    """As in the model's `config.json` on Hugging Face."""
    return {
        "vocab_size": 151_936,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rope_theta": 1e6,
        "tie_word_embeddings": tied,
    }


TRAINED: dict[str, Any] = {
    "hidden_size": 384,
    "intermediate_size": 1024,
    "num_hidden_layers": 6,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "tie_word_embeddings": True,
}
"""Qwen3's, but for what a benchmark of trainers chooses: vocabulary, context and types."""


def _of_millions(vocabulary: int, hidden: int, intermediate: int, layers: int, heads: int) -> dict[str, Any]:
    return {
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 4,
        "head_dim": 64,
    }


_SMALLEST = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
SHAPES: dict[str, dict[str, Any]] = {
    "example": {},
    "smallest": {**_SMALLEST, "head_dim": 16},
    "smallest-for-vllm": {**_SMALLEST, "head_dim": 32},
    "48m": _of_millions(32_768, 512, 1536, layers=10, heads=8),
    "61m": _of_millions(32_768, 512, 1536, layers=14, heads=8),
    "140m": _of_millions(65_536, 768, 2048, layers=14, heads=12),
    "tiny-serving": {
        "vocab_size": 256,
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
    },
    "tiny-rollouts": {
        "vocab_size": 32,
        "hidden_size": 96,
        "intermediate_size": 256,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 1,
        "head_dim": 16,
    },
    "qwen3-0.6b": _qwen3(hidden=1024, intermediate=3072, layers=28, heads=16),
    "qwen3-1.7b": _qwen3(hidden=2048, intermediate=6144, layers=28, heads=16),
    "qwen3-4b": _qwen3(hidden=2560, intermediate=9728, layers=36, heads=32),
    "qwen3-8b": _qwen3(hidden=4096, intermediate=12288, layers=36, heads=32, tied=False),
}
"""Arguments of `Qwen3Config`. Those of `example` are its defaults, as examples have them."""
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
