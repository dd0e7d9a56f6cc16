"""Tiny models of several architectures, with random weights by seed, under the names of Hugging Face checkpoints."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, LAYERS, VOCABULARY, MLP, EXPERTS = 64, 4, 2, 32, 2, 64, 128, 4
SPREAD = 0.15


class TinyModel(NamedTuple):
    """A model's `config.json`, and the shapes of its checkpoint's tensors."""

    config: Mapping[str, Any]
    shapes: Mapping[str, tuple[int, ...]]

    def tensors(self, seed: int) -> dict[str, Tensor]:
        """Random weights in bfloat16, the same for the same seed."""
        generator = torch.Generator().manual_seed(seed)
        return {
            name: (SPREAD * torch.randn(shape, generator=generator) + float(len(shape) == 1 and self._ones)).bfloat16()
            for name, shape in self.shapes.items()
        }

    def nudged(self, tensors: Mapping[str, Tensor], seed: int, share: float = 0.02) -> dict[str, Tensor]:
        """A later version of these weights: a `share` of their elements has another bit pattern, next to the old."""
        generator = torch.Generator().manual_seed(seed)
        found: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            bits = tensor.view(torch.int16)
            found[name] = (bits ^ (torch.rand(bits.shape, generator=generator) < share).short()).view(torch.bfloat16)
        return found

    def drifted(self, tensors: Mapping[str, Tensor], seed: int, share: float = 0.3) -> dict[str, Tensor]:
        """A later version that says something else: a `share` of the elements of these weights is drawn anew."""
        generator, drawn = torch.Generator().manual_seed(seed), self.tensors(seed)
        return {
            name: torch.where(torch.rand(tensor.shape, generator=generator) < share, drawn[name], tensor)
            for name, tensor in tensors.items()
        }

    @property
    def _ones(self) -> bool:
        """Whether norms multiply by their weights, not by one more than these."""
        return not self.config["model_type"].startswith("gemma")


def _attention(at: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{at}.q_proj.weight", (HEADS * HEAD_DIM, HIDDEN)
    yield f"{at}.k_proj.weight", (KV_HEADS * HEAD_DIM, HIDDEN)
    yield f"{at}.v_proj.weight", (KV_HEADS * HEAD_DIM, HIDDEN)
    yield f"{at}.o_proj.weight", (HIDDEN, HEADS * HEAD_DIM)
    yield f"{at}.q_norm.weight", (HEAD_DIM,)
    yield f"{at}.k_norm.weight", (HEAD_DIM,)


def _mlp(at: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{at}.gate_proj.weight", (MLP, HIDDEN)
    yield f"{at}.up_proj.weight", (MLP, HIDDEN)
    yield f"{at}.down_proj.weight", (HIDDEN, MLP)


def _shapes(norms: tuple[str, ...], experts: int) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCABULARY, HIDDEN)}
    for layer in range(LAYERS):
        at = f"model.layers.{layer}"
        shapes |= _attention(f"{at}.self_attn")
        if experts:
            shapes[f"{at}.mlp.gate.weight"] = (experts, HIDDEN)
        for expert in range(experts):
            shapes |= _mlp(f"{at}.mlp.experts.{expert}")
        if not experts:
            shapes |= _mlp(f"{at}.mlp")
        shapes |= {f"{at}.{norm}.weight": (HIDDEN,) for norm in norms}
    return shapes | {"model.norm.weight": (HIDDEN,)}


_COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": MLP,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "dtype": "bfloat16",
}
_NORMS = ("input_layernorm", "post_attention_layernorm")
_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}, "hidden_act": "silu"}

TINY_MODELS = {
    "qwen3": TinyModel(
        {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", **_COMMON, **_ROPE}, _shapes(_NORMS, 0)
    ),
    "qwen3_moe": TinyModel(
        {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "num_experts": EXPERTS,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": MLP,
            "decoder_sparse_step": 1,
            "norm_topk_prob": True,
            "mlp_only_layers": [],
            **_COMMON,
            **_ROPE,
        },
        _shapes(_NORMS, EXPERTS),
    ),
    "gemma3": TinyModel(
        {
            "architectures": ["Gemma3ForCausalLM"],
            "model_type": "gemma3_text",
            "hidden_activation": "gelu_pytorch_tanh",
            "query_pre_attn_scalar": HEAD_DIM,
            "sliding_window": 64,
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
                "full_attention": {"rope_type": "default", "rope_theta": 1000000.0},
            },
            **_COMMON,
        },
        _shapes((*_NORMS, "pre_feedforward_layernorm", "post_feedforward_layernorm"), 0),
    ),
}
"""By architecture. The embedded engine serves the first alone."""


def fused(live: Mapping[str, Tensor], published: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What vLLM's parameters of these names should hold, put together from a version's tensors."""
    parts = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
    found: dict[str, Tensor] = {}
    for name, tensor in live.items():
        module = next((module for module in parts if f".{module}." in name), None)
        if module is not None:
            found[name] = torch.cat([published[name.replace(module, part)] for part in parts[module]])
        elif name.endswith(("w13_weight", "w2_weight")):
            at = name[: name.index(".experts.")]
            names = ("gate_proj", "up_proj") if name.endswith("w13_weight") else ("down_proj",)
            experts = (
                torch.cat([published[f"{at}.experts.{expert}.{part}.weight"] for part in names])
                for expert in range(tensor.shape[0])
            )
            found[name] = torch.stack(list(experts))
        else:
            found[name] = published[name]
    return found
