"""The page backend on CUDA's virtual memory management: every space has addresses of its own.

Physical pages are created once. A space is a reserved range of addresses, as long as the pool, into which pages are
mapped and out of which they are taken, so that a page's index in the space's view is its virtual number: what a
kernel indexes stays where it is while memory changes hands. Where nothing is mapped nothing may be touched. Calls go
through cuda-python (extra `cuda`), in the order of NVIDIA's "CUDA Driver API", Virtual Memory Management. Source:
ROSE §4.1.
"""

from collections.abc import Callable
from contextlib import ExitStack
from importlib import import_module
from typing import Any

import torch
from torch import Tensor


class VmmUnavailable(RuntimeError):
    """CUDA's virtual memory management is not available here; the message says what is missing."""


class VmmError(RuntimeError):
    """The driver refused a call; the message names the call and the driver's error."""


class VmmBackend:
    """`total` pages of `page_bytes` on a CUDA device; `driver` makes the calls in place of cuda-python's.

    Raises `VmmUnavailable`; `ValueError` for pages that are no multiple of the device's granularity; `VmmError` where
    so many do not fit into its memory.
    """

    def __init__(self, total: int, page_bytes: int, device: torch.device | str = "cuda", driver: Any = None) -> None:
        self.total = total
        self.page_bytes = page_bytes
        self._driver = driver or load_driver()
        # With its number, as torch's tensors have it.
        self._device = torch.empty(0, device=device).device
        self._settle()
        allocation = _on_device(self._driver, self._device)
        granularity = _granularity_bytes(self._driver, allocation)
        if page_bytes % granularity:
            raise ValueError(f"page_bytes: must be a multiple of the device's {granularity} (found {page_bytes})")
        self._access = self._driver.CUmemAccessDesc()
        self._access.location = allocation.location
        self._access.flags = self._driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        self._views: dict[int, Tensor] = {}
        """Each space's bytes, from its first address on."""
        with ExitStack() as created:
            try:
                self._pages = [self._create(allocation, created) for _ in range(total)]
            except VmmError as error:
                raise VmmError(f"{self._device}: no room for {total} pages of {page_bytes} bytes: {error}") from error
            self._created = created.pop_all()

    def begin(self, space: int) -> None:
        self._settle()
        reserved_bytes = self.total * self.page_bytes
        address = int(_call(self._driver.cuMemAddressReserve, reserved_bytes, 0, 0, 0))
        # torch's public ways to a tensor from an address ask the driver about it, which knows nothing of what is
        # only reserved.
        storage = torch._C._construct_storage_from_data_pointer(address, self._device, reserved_bytes)
        self._views[space] = torch.empty(0, dtype=torch.uint8, device=self._device).set_(storage)

    def map(self, space: int, virtual: int, physical: int) -> int:
        address = self._address(space, virtual)
        with ExitStack() as undo:
            _call(self._driver.cuMemMap, address, self.page_bytes, 0, self._pages[physical], 0)
            undo.callback(_call, self._driver.cuMemUnmap, address, self.page_bytes)
            _call(self._driver.cuMemSetAccess, address, self.page_bytes, [self._access], 1)
            # What one model wrote may read as infinities in another's dtype, which masking cannot silence.
            self._views[space].narrow(0, virtual * self.page_bytes, self.page_bytes).zero_()
            undo.pop_all()
        return virtual

    def unmap(self, space: int, virtual: int, physical: int) -> None:
        # The driver does not promise to wait for kernels that still use the page.
        self._settle()
        _call(self._driver.cuMemUnmap, self._address(space, virtual), self.page_bytes)

    def view(self, space: int, dtype: torch.dtype) -> Tensor:
        return self._views[space].view(dtype)

    def end(self, space: int) -> None:
        _call(self._driver.cuMemAddressFree, self._address(space, 0), self.total * self.page_bytes)
        del self._views[space]

    def close(self) -> None:
        self._created.close()

    def _create(self, allocation: Any, created: ExitStack) -> Any:
        page = _call(self._driver.cuMemCreate, self.page_bytes, allocation, 0)
        created.callback(_call, self._driver.cuMemRelease, page)
        return page

    def _settle(self) -> None:
        """Wait for the device; by that its context becomes this thread's, too."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _address(self, space: int, virtual: int) -> int:
        return self._views[space].data_ptr() + virtual * self.page_bytes


def load_driver() -> Any:
    """`cuda.bindings.driver`, ready for use. Raises `VmmUnavailable`."""
    try:
        driver = import_module("cuda.bindings.driver")
    except ImportError as error:
        raise VmmUnavailable(
            "cuda-python is not installed; `pip install -e '.[cuda]'` in a clone of elastic brings it"
        ) from error
    try:
        _call(driver.cuInit, 0)
    except RuntimeError as error:  # also what cuda-python raises where there is no driver to load
        raise VmmUnavailable(f"no CUDA driver or device: {error}") from error
    return driver


def page_granularity_bytes(device: torch.device | str = "cuda") -> int:
    """What the size of a page must be a multiple of. Raises `VmmUnavailable`."""
    driver = load_driver()
    return _granularity_bytes(driver, _on_device(driver, torch.device(device)))


def _on_device(driver: Any, device: torch.device) -> Any:
    """The driver's properties of a physical page on this device."""
    supported = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
    ordinal = device.index or 0
    if not _call(driver.cuDeviceGetAttribute, supported, _call(driver.cuDeviceGet, ordinal)):
        raise VmmUnavailable(f"{device} has no virtual memory management")
    allocation = driver.CUmemAllocationProp()
    allocation.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    allocation.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    allocation.location.id = ordinal
    return allocation


def _granularity_bytes(driver: Any, allocation: Any) -> int:
    minimum = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
    return _call(driver.cuMemGetAllocationGranularity, allocation, minimum)


def _call(function: Callable[..., tuple[Any, ...]], *arguments: Any) -> Any:
    """A driver call's result, if it has one."""
    error, *result = function(*arguments)
    if error.value:
        raise VmmError(f"{function.__name__}: {error.name}")
    return result[0] if result else None
