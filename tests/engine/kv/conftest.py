"""Every page backend there is, to run the same tests on."""

from contextlib import ExitStack

import pytest
import torch

from elastic.engine.kv import PagePool
from elastic.engine.kv.slab import SlabBackend
from elastic.engine.kv.vmm import VmmBackend, VmmUnavailable, page_granularity_bytes


def _cuda_granularity_bytes() -> int:
    if not torch.cuda.is_available():
        pytest.skip("torch finds no CUDA device here")
    try:
        return page_granularity_bytes()
    except VmmUnavailable as reason:
        pytest.skip(str(reason))


@pytest.fixture(scope="session", params=["slab", "slab on cuda", "vmm on the host", "vmm on cuda"])
def make_pool(request, host_driver):
    """Makes pools of so many of the smallest pages that the backend takes; all are closed in the end."""
    if request.param == "slab on cuda" and not torch.cuda.is_available():
        pytest.skip("torch finds no CUDA device here")
    least_bytes = _cuda_granularity_bytes() if request.param == "vmm on cuda" else 4096
    with ExitStack() as closing:

        def make(total: int = 8) -> PagePool:
            if request.param.startswith("slab"):
                device = "cuda" if request.param.endswith("cuda") else "cpu"
                pool = PagePool(SlabBackend(total, least_bytes, device))
            elif request.param == "vmm on cuda":
                pool = PagePool(VmmBackend(total, least_bytes))
            else:
                pool = PagePool(VmmBackend(total, least_bytes, "cpu", host_driver()))
            closing.callback(pool.close)
            return pool

        yield make
