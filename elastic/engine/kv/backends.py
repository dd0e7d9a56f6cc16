"""Which page backend a device gets."""

from contextlib import suppress

import structlog
import torch

from elastic.engine.kv.layout import common_page_bytes
from elastic.engine.kv.pages import PageBackend
from elastic.engine.kv.slab import SlabBackend
from elastic.engine.kv.vmm import VmmBackend, VmmUnavailable, page_granularity_bytes

_log = structlog.get_logger(__name__)


def mappable_page_bytes(at_least: int, device: torch.device | str) -> int:
    """The smallest page of `at_least` bytes that `open_backend` can give out on this device."""
    if torch.device(device).type == "cuda":
        with suppress(VmmUnavailable):
            return common_page_bytes(at_least, page_granularity_bytes(device))
    return at_least


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
