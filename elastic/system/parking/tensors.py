"""Tensors that are taken off their device in place, and brought back.

On a CPU the device is an arena: states are copied out and back all the same, and the kernel may take the memory in
between as soon as another process needs it (`MADV_FREE`).
"""

import contextlib
import ctypes
import mmap
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, UntypedStorage

from elastic.system.host import Thread, here


class _Copy(NamedTuple):
    """`host` holds the bytes of `storage`; in page-locked memory if the storage is a GPU's."""

    storage: UntypedStorage
    host: Tensor


class _Zeros(NamedTuple):
    storage: UntypedStorage
    size_bytes: int


class ParkedTensors:
    """Tensors whose storages leave their device and come back bit for bit. References and views stay valid.

    Between `park` and `resume` their content is undefined; on a GPU it is gone. The host memory of the copies is kept
    for the next time; while the tensors are on the device, the kernel may take that memory.
    """

    def __init__(self) -> None:
        self._copies: list[_Copy] = []
        self._zeros: list[_Zeros] = []
        self._giving_back: Thread | None = None
        self.parked = False

    def park(self, tensors: Iterable[Tensor], zeros: Iterable[Tensor] = ()) -> int:
        """Take the tensors off their device; returns the bytes copied. Tensors in `zeros` contain zeros and are not
        copied.

        Does nothing if tensors are parked already. If it raises (no host memory), nothing has changed.
        """
        if self.parked:
            return 0
        if self._giving_back is not None:
            self._giving_back.join()
            self._giving_back = None
        before = [copy.host for copy in self._copies]
        copies = [_Copy(storage, _buffer(before[i : i + 1], storage)) for i, storage in enumerate(_storages(tensors))]
        for storage, host in copies:
            host.copy_(_bytes(storage), non_blocking=True)
        _settle(storage.device for storage, _ in copies)
        self._copies = copies
        self._zeros = [_Zeros(storage, storage.nbytes()) for storage in _storages(zeros)]
        self.parked = True
        storages = [each.storage for each in (*self._copies, *self._zeros)]
        for storage in storages:
            give_back(storage)
        empty_caches(storage.device for storage in storages)
        return sum(host.nbytes for _, host in copies)

    def resume(self) -> int:
        """Bring the tensors back; returns the bytes copied. Does nothing if no tensors are parked.

        If it raises (no memory on the device), the copies are kept and it can be called again.
        """
        if not self.parked:
            return 0
        for storage, host in self._copies:
            _take_again(storage, host.nbytes)
            _bytes(storage).copy_(host, non_blocking=True)
        for storage, size_bytes in self._zeros:
            _take_again(storage, size_bytes)
            _bytes(storage).zero_()
        _settle(storage.device for storage, _ in self._copies)
        self.parked = False
        # Work may begin: that takes a tenth of the time of the copies.
        hosts = [host for _, host in self._copies if not host.is_pinned()]
        if hosts:
            self._giving_back = here().thread(target=lambda: _give_back_all(hosts), name="parking")
            self._giving_back.start()
        return sum(host.nbytes for _, host in self._copies)

    def content(self, tensor: Tensor) -> Tensor:
        """Return what the tensor holds, from the host if it is parked. Read only; valid until `resume`."""
        if not self.parked:
            return tensor
        address = tensor.untyped_storage()._cdata
        for storage, host in self._copies:
            if storage._cdata == address:
                return _like(tensor, host.untyped_storage())
        if any(storage._cdata == address for storage, _ in self._zeros):
            return torch.zeros_like(tensor, device="cpu", requires_grad=False)
        return tensor


def give_back(storage: UntypedStorage) -> None:
    """Free the memory of a storage on its device, and lose its content."""
    if storage.device.type == "cpu":
        _free_lazily(storage.data_ptr(), storage.nbytes())
    else:
        storage.resize_(0)


def _give_back_all(hosts: Sequence[Tensor]) -> None:
    for host in hosts:
        give_back(host.untyped_storage())


def held_bytes(device: torch.device) -> int:
    """Return the bytes that torch holds of a GPU now, without its context."""
    return torch.cuda.memory_reserved(device) if device.type == "cuda" else 0


def empty_caches(devices: Iterable[torch.device]) -> None:
    """Free the memory that torch has cached on the devices, for other processes."""
    if any(device.type == "cuda" for device in devices):
        torch.cuda.empty_cache()


def _take_again(storage: UntypedStorage, size_bytes: int) -> None:
    if storage.nbytes() != size_bytes:
        storage.resize_(size_bytes)


def _storages(tensors: Iterable[Tensor]) -> list[UntypedStorage]:
    """Yield each storage once, in order, without empty ones."""
    found = [tensor.untyped_storage() for tensor in tensors]
    return list({storage._cdata: storage for storage in found if storage.nbytes()}.values())


def _bytes(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, 0, (storage.nbytes(),), (1,))


def _like(tensor: Tensor, storage: UntypedStorage) -> Tensor:
    empty = torch.empty(0, dtype=tensor.dtype)
    return empty.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())


def _buffer(spare: list[Tensor], storage: UntypedStorage) -> Tensor:
    size_bytes = storage.nbytes()
    if spare and spare[0].nbytes == size_bytes:
        return spare[0]
    return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=storage.device.type == "cuda")


def _settle(devices: Iterable[torch.device]) -> None:
    """Wait for copies under way on the devices."""
    for device in set(devices):
        if device.type == "cuda":
            torch.cuda.synchronize(device)


def _free_lazily(address: int, size_bytes: int) -> None:
    """Let the kernel take the whole pages in this range. Memory that is not ours alone (a file's) stays as it is."""
    begin = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    length = (address + size_bytes - begin) // mmap.PAGESIZE * mmap.PAGESIZE
    if length > 0 and hasattr(mmap, "MADV_FREE"):
        with contextlib.suppress(AttributeError):
            ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(length), mmap.MADV_FREE)
