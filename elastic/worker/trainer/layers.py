"""A model's tensors by layer, from the input to the output. Pure."""

import re
from collections.abc import Mapping

_NUMBERED = re.compile(r"(?:^|\.)layers\.(\d+)\.")
EMBEDDING, HEAD = "embedding", "head"


def layer_of(tensor: str) -> str:
    """The layer of a tensor by its Hugging Face name: a number, or what comes before or after those."""
    if (numbered := _NUMBERED.search(tensor)) is not None:
        return numbered[1]
    return EMBEDDING if "embed" in tensor else HEAD


def changed_shares(changed: Mapping[str, int], elements: Mapping[str, int]) -> dict[str, float]:
    """The share of each layer's elements that changed (ROSE Fig. 6); both are given by tensor. {} where nothing is."""
    if not changed:
        return {}
    layers = sorted({layer_of(name) for name in elements}, key=_position)
    totals = dict.fromkeys(layers, 0)
    moved = dict.fromkeys(layers, 0)
    for name, count in elements.items():
        totals[layer_of(name)] += count
        moved[layer_of(name)] += changed.get(name, 0)
    return {layer: moved[layer] / totals[layer] for layer in layers if totals[layer]}


def _position(layer: str) -> float:
    outer = {EMBEDDING: -1.0, HEAD: float("inf")}
    return outer[layer] if layer in outer else int(layer)
