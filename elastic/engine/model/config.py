"""The shape of a Qwen3 model, and its Hugging Face `config.json`."""

import math
from collections.abc import Mapping
from typing import Any

import msgspec

MODEL_TYPE = "qwen3"
ARCHITECTURE = "Qwen3ForCausalLM"


class ModelConfigError(ValueError):
    """This implementation cannot run this `config.json`. The message names the field, what was found and what is
    allowed.
    """


class Qwen3Config(msgspec.Struct, frozen=True, kw_only=True):
    """A Qwen3 dense decoder. The defaults are the small policy that learns FrozenLake within minutes."""

    vocab_size: int = 32
    hidden_size: int = 128
    intermediate_size: int = 384
    num_hidden_layers: int = 3
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 32
    rope_theta: float = 10_000.0
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 4096
    tie_word_embeddings: bool = True
    initializer_range: float = 0.02
    eos_token_id: int | tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        for name in _SIZES:
            value = getattr(self, name)
            if value < 1:
                raise ModelConfigError(f"{name}: must be at least 1 (found {value})")
        for name in _POSITIVE:
            value = getattr(self, name)
            if not 0 < value < math.inf:
                raise ModelConfigError(f"{name}: must be a positive number (found {value})")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ModelConfigError(
                f"num_key_value_heads: must divide num_attention_heads={self.num_attention_heads} "
                f"(found {self.num_key_value_heads})"
            )
        if self.head_dim % 2:
            raise ModelConfigError(f"head_dim: rotary embeddings need an even number (found {self.head_dim})")

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        found = self.eos_token_id
        return () if found is None else (found,) if isinstance(found, int) else found

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> "Qwen3Config":
        """Read a Hugging Face `config.json`.

        Raises `ModelConfigError` where a size is missing, a value has the wrong type, or the file asks for
        something that is not implemented (another architecture, attention biases, scaled RoPE, sliding windows).
        """
        _refuse_unsupported(raw)
        missing = [name for name in _REQUIRED if raw.get(name) is None]
        if missing:
            raise ModelConfigError(f"required but missing: {', '.join(missing)}")
        known = {name: raw[name] for name in cls.__struct_fields__ if raw.get(name) is not None}
        known["rope_theta"] = _rope_theta(raw)
        # Hugging Face leaves this out where it is false.
        known.setdefault("tie_word_embeddings", False)
        try:
            return msgspec.convert(known, cls)
        except msgspec.ValidationError as error:
            raise ModelConfigError(str(error)) from error

    def to_dict(self) -> dict[str, Any]:
        """The `config.json` that `from_dict`, transformers and vLLM read."""
        return {
            "architectures": [ARCHITECTURE],
            "model_type": MODEL_TYPE,
            **msgspec.to_builtins(self),
            "rope_parameters": {"rope_type": "default", "rope_theta": self.rope_theta},
            "hidden_act": "silu",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "use_sliding_window": False,
            "dtype": "bfloat16",
        }


_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
)
_REQUIRED = _SIZES[:-1]
_POSITIVE = ("rope_theta", "rms_norm_eps")
_ONLY_SUPPORTED: Mapping[str, Any] = {
    "hidden_act": "silu",
    "attention_bias": False,
    "use_sliding_window": False,
    "quantization_config": None,
    "compression_config": None,
}


def _refuse_unsupported(raw: Mapping[str, Any]) -> None:
    found = raw.get("model_type", MODEL_TYPE)
    if found != MODEL_TYPE:
        raise ModelConfigError(f"model_type: only {MODEL_TYPE!r} is supported (found {found!r})")
    for name, allowed in _ONLY_SUPPORTED.items():
        if raw.get(name, allowed) != allowed:
            raise ModelConfigError(f"{name}: only {allowed!r} is supported (found {raw[name]!r})")


def _rope_theta(raw: Mapping[str, Any]) -> float:
    """Transformers 5 keeps it in `rope_parameters`, earlier ones beside an optional `rope_scaling`."""
    name = "rope_parameters" if raw.get("rope_parameters") else "rope_scaling"
    rope = raw.get(name) or {}
    if not isinstance(rope, Mapping):
        raise ModelConfigError(f"{name}: expected an object (found {rope!r})")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        raise ModelConfigError(f"rope_type: only 'default' is supported (found {kind!r})")
    theta = rope.get("rope_theta", raw.get("rope_theta"))
    if theta is None:
        raise ModelConfigError("required but missing: rope_theta")
    return theta
