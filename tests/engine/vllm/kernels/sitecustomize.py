"""Forces a family of kernels for linear layers on vLLM's process, which imports this from its path: `KERNELS` names it.

`torch`: none are packed. `onednn`, `sgl`: that library's, where the processor has it. `copies`: a stand-in for all that
pack, on any processor: each layer computes with a copy of its weights that was made when they were processed.
"""

import os
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

MODULE = "vllm.model_executor.layers.utils"


def _force(utils: Any, family: str) -> None:
    import torch

    if family == "torch":
        utils.check_cpu_sgl_kernel = lambda n, k, dtype: False
        utils.ops._supports_onednn = False
    elif family == "onednn":
        utils.check_cpu_sgl_kernel = lambda n, k, dtype: False
    elif family == "sgl":
        utils._CPU_SGL_GEMM_MAX_WEIGHT_BYTES = sys.maxsize
    elif family == "copies":
        plain = utils.dispatch_cpu_unquantized_gemm

        def dispatch(layer: Any, remove_weight: bool) -> None:
            if layer.weight.is_meta or layer.weight.ndim != 2:
                plain(layer, remove_weight)
                return
            packed = layer.weight.detach().clone()
            layer.cpu_linear = lambda x, weight, bias: torch.nn.functional.linear(x, packed, bias)
            if remove_weight:
                layer.weight = torch.nn.Parameter(packed.new_empty(0), requires_grad=False)

        utils.dispatch_cpu_unquantized_gemm = dispatch


class _Forcing(Loader):
    def __init__(self, inner: Any, family: str) -> None:
        self._inner, self._family = inner, family

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._inner.exec_module(module)
        _force(module, self._family)


class _Finder(MetaPathFinder):
    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname != MODULE:
            return None
        spec = PathFinder.find_spec(fullname, path)
        if spec is not None and spec.loader is not None:
            spec.loader = _Forcing(spec.loader, os.environ["KERNELS"])
        return spec


if os.environ.get("KERNELS"):
    sys.meta_path.insert(0, _Finder())
