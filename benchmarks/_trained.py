"""The small model that benchmarks of trainers train, and the environment that has peft."""

from typing import Any

from benchmarks import ROOT

TRAINED_SHAPE: dict[str, Any] = {
    "hidden_size": 384,
    "intermediate_size": 1024,
    "num_hidden_layers": 6,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "tie_word_embeddings": True,
}
"""Qwen3's, but for what a benchmark chooses: vocabulary, context and types."""
TRAINERS_PYTHON = ROOT / ".cache" / "trainers" / "bin" / "python"
WITHOUT_PEFT = "peft is not installed in .cache/trainers: `make .cache/trainers/installed`"
