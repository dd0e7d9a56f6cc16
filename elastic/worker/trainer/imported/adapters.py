"""Directories of LoRA adapters as peft writes them: looked at before anything of them is believed. Nothing of torch."""

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from elastic.engine.model.stored import CheckpointError, StoredTensor, file_headers, misfit, read_object
from elastic.weights.sharding import Shape
from elastic.worker.trainer.base import OfferRefused
from elastic.worker.trainer.imported.offered import TYPES, FileState, OfferedFiles, below, pickles_in

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
PREFIX = "base_model.model."
"""Before the names of the model's own modules."""
_PART = re.compile(rf"{re.escape(PREFIX)}(?P<module>.+)\.lora_(?P<part>[AB])\.weight")
_FIXED: Mapping[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "use_dora": (False,),
    "use_rslora": (False,),
    "lora_bias": (False,),
    "fan_in_fan_out": (False,),
    "modules_to_save": (None, []),
    "rank_pattern": ({},),
    "alpha_pattern": ({},),
    "trainable_token_indices": (None,),
    "target_parameters": (None, []),
}
"""Keys of peft's whose other values are no adapter of one rank and one scale to linear layers alone."""
SCALED_MAX = 2**31
"""Above any lora_alpha."""
_NOT_ADAPTED = ("lm_head", "embed_tokens")
_FIRST = ("q_proj", "qkv_proj", "query_key_value", "c_attn", "o_proj", "down_proj")
"""Ends of names of linear layers, of which every model has one."""


def look_at_adapter(
    directory: Path,
    roots: Sequence[Path],
    base: Mapping[str, StoredTensor],
    rank_max: int,
    before: Mapping[str, Shape],
) -> OfferedFiles:
    """What is in an offered adapter's directory, which fits the `base`, and the shapes of the adapter `before` it if
    there was one. Raises `OfferRefused`."""
    place = below(directory, roots)
    try:
        for name in (CONFIG_FILE, WEIGHTS_FILE):
            if not (place / name).is_file():
                raise OfferRefused(
                    f"{directory}: has no {name}; allowed: an adapter as peft writes it{pickles_in(place)}"
                )
            below(place / name, roots)
        offered = adapter_files(place)
    except CheckpointError as error:
        raise OfferRefused(str(error)) from error
    except OSError as error:
        raise OfferRefused(f"{directory}: cannot be read ({error.strerror or error})", again=True) from error
    if (why := unfit_adapter(place, offered.tensors, base, rank_max, before)) is not None:
        raise OfferRefused(f"{directory}: {why}")
    return offered


def adapter_files(directory: Path) -> OfferedFiles:
    """Raises `CheckpointError`, and `OSError`."""
    files = {path: FileState.of(path) for path in (directory / WEIGHTS_FILE, directory / CONFIG_FILE)}
    return OfferedFiles(file_headers(directory / WEIGHTS_FILE), files)


def unfit_adapter(
    directory: Path,
    tensors: Mapping[str, StoredTensor],
    base: Mapping[str, StoredTensor],
    rank_max: int,
    before: Mapping[str, Shape],
) -> str | None:
    """Why this is no adapter to the base, or another one than `before`; None where it is. Raises `CheckpointError`."""
    about = read_object(directory / CONFIG_FILE)
    for key, allowed in _FIXED.items():
        if about.get(key, allowed[0]) not in allowed:
            return f"{key}: found {about[key]!r:.200}; allowed: {allowed[0]!r}"
    rank = about.get("r")
    if type(rank) is not int or not 1 <= rank <= rank_max:
        return f"r: found {rank!r:.200}; allowed: from 1 to {rank_max} (engine.vllm.adapter_rank)"
    if scale_of(about) is None:
        found = f"found {about.get('lora_alpha')!r:.200} with r = {rank}"
        return f"lora_alpha: {found}; allowed: r times a power of two, which bfloat16 holds exactly"
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    for name, tensor in tensors.items():
        if (why := _misplaced(name, tensor, shapes, base, rank)) is not None:
            return why
    if not tensors:
        return f"{WEIGHTS_FILE} has no tensors"
    return misfit(shapes, before) if before else None


def scale_of(about: Mapping[str, Any]) -> float | None:
    """By how much an adapter counts, by its config; None unless that is a power of two."""
    alpha, rank = about.get("lora_alpha"), about.get("r")
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not isinstance(rank, int):
        return None
    if rank < 1 or not 0 < alpha < SCALED_MAX:
        return None
    scale = alpha / rank
    return scale if math.frexp(scale)[0] == 0.5 else None


def _misplaced(
    name: str, tensor: StoredTensor, shapes: Mapping[str, Shape], base: Mapping[str, StoredTensor], rank: int
) -> str | None:
    """Why a tensor is not a part of an adapter of this rank to a linear layer of the base."""
    part = _PART.fullmatch(name)
    if part is None or part["module"].rpartition(".")[2] in _NOT_ADAPTED:
        return (
            f"found a tensor {name!r:.200}; allowed: {PREFIX}MODULE.lora_A.weight and .lora_B.weight of linear layers"
        )
    weight = base.get(f"{part['module']}.weight")
    if weight is None or len(weight.shape) != 2:
        return f"{name}: the base has no linear layer {part['module']}"
    rows, columns = weight.shape
    expected = (rank, columns) if part["part"] == "A" else (rows, rank)
    if tuple(tensor.shape) != expected:
        return f"{name}: expected shape {list(expected)}, found {list(tensor.shape)}"
    if tensor.type not in TYPES:
        return f"{name}: found {tensor.type}; allowed: {', '.join(TYPES)}"
    other = name.replace(".lora_A.", ".lora_B.") if part["part"] == "A" else name.replace(".lora_B.", ".lora_A.")
    return None if other in shapes else f"{other} is missing"


def of_no_effect(base: Mapping[str, StoredTensor]) -> dict[str, Shape]:
    """The tensors of the smallest adapter that the base can have. Raises `CheckpointError` where it can have none."""
    for end in _FIRST:
        for name, tensor in base.items():
            if name.endswith(f".{end}.weight") and len(tensor.shape) == 2:
                at, (rows, columns) = f"{PREFIX}{name.removesuffix('.weight')}", tensor.shape
                return {f"{at}.lora_A.weight": (1, columns), f"{at}.lora_B.weight": (rows, 1)}
    raise CheckpointError(
        f"the base has no linear layer that adapters are known for; allowed: one of {', '.join(_FIRST)}"
    )
