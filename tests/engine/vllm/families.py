"""The families of vLLM's kernels for linear layers that this machine has, as `kernels/sitecustomize.py` names them."""

import torch


def of_this_machine() -> list[str]:
    """Return what can be forced here. `copies` stands for all that pack, also where the processor has none of them."""
    found = ["torch", "copies"]
    if torch.cpu._is_avx512_bf16_supported():
        found.append("onednn")
    if torch.cpu._is_amx_tile_supported():
        found.append("sgl")
    return found
