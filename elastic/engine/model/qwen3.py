"""The Qwen3 transformer, for training; parameter names are those of Hugging Face's `Qwen3ForCausalLM`.

RMSNorm before each block, per-head RMSNorm of queries and keys, rotary positions, grouped-query attention,
SwiGLU, tied or untied embeddings. Shapes: B sequences, T positions, N tokens, D hidden, V vocabulary.
Source: Qwen3 technical report, §2.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from elastic.engine.model.config import Qwen3Config


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class Attention(nn.Module):
    def __init__(self, config: Qwen3Config) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.queries_per_key = config.num_attention_heads // config.num_key_value_heads
        query_size = config.num_attention_heads * config.head_dim
        key_size = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, query_size, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, key_size, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, key_size, bias=False)
        self.o_proj = nn.Linear(query_size, config.hidden_size, bias=False)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)

    def forward(self, x: Tensor, rotation: Tensor, packing: "Packing") -> Tensor:
        """x: [N, D]; rotation: [N, 2, head_dim]. Returns [N, D]."""
        q = rotate(self.q_norm(self._heads(self.q_proj(x))), rotation)
        k = rotate(self.k_norm(self._heads(self.k_proj(x))), rotation)
        v = self._heads(self.v_proj(x))
        q, k, v = (packing.pad(t).transpose(1, 2) for t in (q, k, v))
        k, v = (t.repeat_interleave(self.queries_per_key, dim=1) for t in (k, v))
        # Padding stands on the right, so that the causal mask alone keeps it from every token.
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(packing.unpad(out.transpose(1, 2)).flatten(1))

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim))


class MLP(nn.Module):
    def __init__(self, config: Qwen3Config) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nn.Module):
    def __init__(self, config: Qwen3Config) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: Tensor, rotation: Tensor, packing: "Packing") -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), rotation, packing)
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    def __init__(self, config: Qwen3Config) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class Qwen3(nn.Module):
    """A causal language model; freshly initialised as Hugging Face does it, from torch's generator."""

    def __init__(self, config: Qwen3Config) -> None:
        super().__init__()
        self.config = config
        self.model = Decoder(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.apply(self._initialise)
        self.tie_weights()

    def forward(self, input_ids: Tensor, lengths: Tensor | None = None) -> Tensor:
        """Logits [B, T, V] of `input_ids` [B, T], right-padded where `lengths` [B] is given.

        Padding costs nothing outside attention, gets no gradient, and its logits are zero.
        """
        packing = Packing(input_ids.shape, lengths, input_ids.device)
        return packing.pad(self.lm_head(self._states(input_ids, packing)))

    def states(self, input_ids: Tensor, lengths: Tensor | None = None) -> Tensor:
        """The states [N, D] from which `forward` makes the logits of all tokens but padding, row by row."""
        return self._states(input_ids, Packing(input_ids.shape, lengths, input_ids.device))

    def _states(self, input_ids: Tensor, packing: "Packing") -> Tensor:
        x = self.model.embed_tokens(packing.unpad(input_ids))
        rotation = rotations(self.config, packing.positions).to(x.dtype)
        for layer in self.model.layers:
            x = layer(x, rotation, packing)
        return self.model.norm(x)

    def tie_weights(self) -> None:
        """Make the head share the embedding's parameter, where the config says so; needed again after `to_empty`."""
        if self.config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def _initialise(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=self.config.initializer_range)


class Packing:
    """The way between right-padded [B, T, …] and the tokens alone, [N, …]."""

    def __init__(self, shape: torch.Size, lengths: Tensor | None, device: torch.device) -> None:
        self._batch, self._time = shape
        positions = torch.arange(self._time, device=device).expand(self._batch, self._time)
        self._index: Tensor | None = None
        if lengths is not None:
            self._index = (positions < lengths.to(device)[:, None]).flatten().nonzero().squeeze(1)
        self.positions = self.unpad(positions)

    def unpad(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        return tokens if self._index is None else tokens.index_select(0, self._index)

    def pad(self, x: Tensor) -> Tensor:
        if self._index is not None:
            x = x.new_zeros(self._batch * self._time, *x.shape[1:]).index_copy(0, self._index, x)
        return x.unflatten(0, (self._batch, self._time))


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Over the last dimension, in float32 whatever the type of `x` (as Hugging Face does it)."""
    return weight * F.rms_norm(x.float(), x.shape[-1:], eps=eps).to(x.dtype)


def rotations(config: Qwen3Config, positions: Tensor) -> Tensor:
    """Cosines and sines of rotary angles, [N, 2, head_dim] in float32; the sines' first half is negated."""
    pairs = torch.arange(0, config.head_dim, 2, device=positions.device, dtype=torch.float32)
    frequencies = 1.0 / config.rope_theta ** (pairs / config.head_dim)
    angles = positions[:, None].float() * frequencies
    cos, sin = angles.cos(), angles.sin()
    return torch.stack((torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)), 1)


def rotate(x: Tensor, rotation: Tensor) -> Tensor:
    """Rotate x [N, heads, head_dim], whose pairs are (i, i + head_dim / 2), by `rotations`."""
    first, second = x.chunk(2, -1)
    return x * rotation[:, :1] + torch.cat((second, first), -1) * rotation[:, 1:]
