"""Which page backend a device gets."""

import structlog
import torch

from elastic.engine.kv.pages import PageBackend
from elastic.engine.kv.slab import SlabBackend
from elastic.engine.kv.vmm import VmmBackend, VmmUnavailable

_log = structlog.get_logger(__name__)


def open_backend(total: int, page_bytes: int, device: torch.device | str) -> PageBackend:
    """CUDA's virtual memory management where it is there, else one large buffer.

    Raises `ValueError` and `VmmError` as `VmmBackend` does.
    """
    if torch.device(device).type == "cuda":
        try:
            return VmmBackend(total, page_bytes, device)
        except VmmUnavailable as error:
            _log.warning("KV pages lie in one buffer, without virtual memory management", reason=str(error))
    return SlabBackend(total, page_bytes, device)
