"""What a Hugging Face checkpoint directory has to have, and has, by its config and the headers of its files.

Without the models' library, which takes seconds to import: so whoever only starts a run can check its policy.
"""

import json
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from elastic.given import read_text
from elastic.model.config import ModelConfigError, Qwen3Config

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


def parameter_shapes(config: Qwen3Config) -> dict[str, tuple[int, ...]]:
    """Name → shape of every stored parameter; a tied `lm_head.weight` is stored once, as the embedding."""
    hidden, inner, head = config.hidden_size, config.intermediate_size, config.head_dim
    queries, keys = config.num_attention_heads * head, config.num_key_value_heads * head
    layer: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "self_attn.q_norm": (head,),
        "self_attn.k_norm": (head,),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
    }
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    for number in range(config.num_hidden_layers):
        shapes |= {f"model.layers.{number}.{name}.weight": shape for name, shape in layer.items()}
    shapes["model.norm.weight"] = (hidden,)
    return shapes if config.tie_word_embeddings else shapes | {TIED: (config.vocab_size, hidden)}


def check_stored(directory: Path) -> tuple[Qwen3Config, int]:
    """Return the config and the number of parameters of a checkpoint whose files have all of them, in their shapes.

    Their values are not read. Raises `CheckpointError` as reading them would.
    """
    config = read_config(directory)
    found = {name: shape for path in weight_files(directory) for name, shape in _headers(path)}
    if config.tie_word_embeddings:
        found.pop(TIED, None)
    expected = parameter_shapes(config)
    check_shapes(directory, found, expected)
    return config, sum(prod(shape) for shape in expected.values())


def check_shapes(
    directory: Path, found: Mapping[str, tuple[int, ...]], expected: Mapping[str, tuple[int, ...]]
) -> None:
    """Raises `CheckpointError` naming the first tensor that is missing, unexpected or of another shape."""
    for name, shape in expected.items():
        if name not in found:
            raise CheckpointError(f"{directory}: {name}: missing; expected shape {list(shape)}")
        if found[name] != shape:
            raise CheckpointError(f"{directory}: {name}: expected shape {list(shape)}, found {list(found[name])}")
    unexpected = sorted(found.keys() - expected.keys())
    if unexpected:
        raise CheckpointError(
            f"{directory}: {unexpected[0]}: not a parameter of this config (found shape {list(found[unexpected[0]])})"
        )


def weight_files(directory: Path) -> list[Path]:
    """The files with a checkpoint's tensors. Raises `CheckpointError`."""
    single, index = directory / WEIGHTS_FILE, directory / INDEX_FILE
    if single.exists():
        return [single]
    if not index.exists():
        raise CheckpointError(f"{directory}: found neither {WEIGHTS_FILE} nor {INDEX_FILE}")
    weight_map = _read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise CheckpointError(f"{index}: weight_map must map tensor names to file names")
    return [directory / name for name in sorted(set(weight_map.values()))]


def _headers(path: Path) -> Iterator[tuple[str, tuple[int, ...]]]:
    try:
        with safe_open(path, framework="np") as file:
            for name in file.keys():  # noqa: SIM118 - not a dict
                yield name, tuple(file.get_slice(name).get_shape())
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path}: cannot be read ({error})") from error


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(read_text(path))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise CheckpointError(f"{path}: not valid JSON ({error})") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: expected a JSON object (found {type(value).__name__})")
    return value
