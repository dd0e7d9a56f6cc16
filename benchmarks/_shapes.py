"""Models with random weights: two tiny shapes, which share nothing but the architecture, and Qwen3's."""

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


SHAPES: dict[str, dict[str, Any]] = {
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
"""Arguments of `Qwen3Config`."""


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
