"""What vLLM's layerwise reload leaves out, and what it warns of.

A reload processes each layer that takes weights: what a kernel computes with may be a packed copy of them, made then.
A layer that is tied to another one takes none, is not processed, and goes on computing with a copy of the former
weights (`vllm.model_executor.model_loader.reload`, limitation 2): on CPUs with AMX, AVX-512 and bfloat16, or zentorch
that is the head of every tied model. So it is processed once more, after the layer that it shares its weights with.

On a CPU the kernel of a layer of experts packs weights when it is made, and not again when they change
(`UnquantizedFusedMoEMethod._setup_kernel`): it would read new weights as if they were packed. So it is made anew.
"""

# pyright: reportMissingImports=false

import logging
from types import TracebackType
from typing import Any, NamedTuple

LOADERS = "vllm.model_executor"
"""The logger above all of vLLM's loaders and layers."""
_LEFT_OUT = "Failed to load weights"
_OF_COST_ONLY = ("Allocating ",)
"""Beginnings of warnings that say what a load costs, and nothing about what it came to."""


class LeftOut(NamedTuple):
    """Layers of a model that took no weights in a reload: those that share theirs with one that did, those that have
    none to take (but buffers that they compute, or padding), and the names of all others."""

    tied: list[Any]
    without: list[Any]
    unloaded: list[str]


def layers_left_out(model: Any) -> LeftOut:
    """Call it after the weights are loaded and before the reload is finalised."""
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    infos = {name: (layer, get_layerwise_info(layer)) for name, layer in model.named_modules()}
    empty = {
        name: (layer, info)
        for name, (layer, info) in infos.items()
        if info.can_load() and info.load_numel <= 0 and info.load_numel_total and info.kernel_tensors is not None
    }
    taken = {
        id(parameter)
        for name, (_, info) in infos.items()
        if name not in empty and info.kernel_tensors is not None
        for parameter in info.kernel_tensors[0].values()
    }
    taken |= {id(parameter) for name, (layer, _) in infos.items() if name not in empty for parameter in _own(layer)}
    found = LeftOut([], [], [])
    for name, (layer, info) in empty.items():
        if not info.kernel_tensors[0] or _is_padding(layer):
            found.without.append(layer)
        elif all(id(parameter) in taken for parameter in info.kernel_tensors[0].values()):
            found.tied.append(layer)
        else:
            found.unloaded.append(name)
    return found


def make_kernels_anew(model: Any) -> None:
    """Have kernels that pack weights only when they are made be made anew by the reload that follows."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return  # Elsewhere kernels read parameters in place, and graphs have captured their addresses.
    for layer in model.modules():
        method = getattr(layer, "quant_method", None)
        if method is not None and getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None


def pack_again(layers: list[Any]) -> None:
    """Have vLLM process layers as it does after it has loaded them, with the weights that they have now."""
    for layer in layers:
        if hasattr(layer, "_already_called_process_weights_after_loading"):
            del layer._already_called_process_weights_after_loading
        layer.quant_method.process_weights_after_loading(layer)


def _is_padding(layer: Any) -> bool:
    """Whether this rank's part of the vocabulary has no token: vLLM pads vocabularies to multiples of 64 and cuts them
    into equal parts, so that a small one does not reach the last ranks."""
    part = getattr(layer, "shard_indices", None)
    return part is not None and part.num_org_elements == 0


def _own(layer: Any) -> list[Any]:
    return [parameter for parameter in layer._parameters.values() if parameter is not None]


class LoaderWarnings(logging.Handler):
    """A context that keeps the warnings of vLLM's loaders."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self._found.append(record.getMessage())

    def __enter__(self) -> "LoaderWarnings":
        logging.getLogger(LOADERS).addHandler(self)
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        logging.getLogger(LOADERS).removeHandler(self)

    def beside(self, left_out: LeftOut) -> list[str]:
        """Return the warnings but those that are known: of layers that take no weights, and of what a load costs."""
        known = {f"{type(layer).__name__}: {_LEFT_OUT}" for layer in (*left_out.tied, *left_out.without)}
        return [text for text in self._found if text not in known and not text.startswith(_OF_COST_ONLY)]
