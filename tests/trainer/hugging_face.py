"""Tiny models of transformers with random weights, in directories as the Hub has them."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

VOCABULARY = 32
SIZES: Mapping[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": None,
}
WINDOW: Mapping[str, Any] = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
EXPERTS: Mapping[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
MODELS: Mapping[str, Mapping[str, Any]] = {
    "llama": SIZES,
    "qwen3": {**SIZES, "tie_word_embeddings": True},
    "qwen3_moe": {**SIZES, **EXPERTS, "num_experts": 4, "norm_topk_prob": True},
    "gemma3_text": {**SIZES, **WINDOW, "final_logit_softcapping": 5.0},
    "mistral": {**SIZES, "sliding_window": 4},
    "gpt_oss": {**SIZES, **WINDOW, "num_experts_per_tok": 2, "num_local_experts": 4, "rope_parameters": {
        "rope_type": "default", "rope_theta": 10000.0}},
}  # fmt: skip
"""By the type of their `config.json`."""


def write_model(directory: Path, kind: str, seed: int = 0) -> Path:
    """A checkpoint of this kind, in bfloat16."""
    import transformers

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = transformers.AutoConfig.for_model(kind, **MODELS[kind])
        transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(directory)
    return directory


FLOAT32_BUFFER = "model.layers.1.mlp.gate.e_score_correction_bias"
"""Of GLM's routers: persistent, no parameter."""
EXACT = (0.1, -0.2, 0.3, torch.pi)


def write_glm(directory: Path) -> Path:
    """A checkpoint with a buffer in float32 (`EXACT`); all else is bfloat16."""
    import transformers

    own = {"n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1, "tie_word_embeddings": False}
    config = transformers.AutoConfig.for_model("glm4_moe", **SIZES, **EXPERTS, **own)
    model = transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    model.get_submodule(FLOAT32_BUFFER.rpartition(".")[0]).e_score_correction_bias = torch.tensor(EXACT)
    model.save_pretrained(directory)
    return directory


def read_weights(directory: Path) -> dict[str, Tensor]:
    return {name: tensor for path in directory.glob("*.safetensors") for name, tensor in load_file(path).items()}


def change_config(directory: Path, **changes: object) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
