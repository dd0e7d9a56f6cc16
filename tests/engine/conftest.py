"""Which engines are tested: all that are installed, and that of a co-served device; and this machine's own memory
management in the place of a CUDA driver's."""

import ctypes
import mmap
import os
from enum import IntEnum
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch

from elastic.config import EngineConfig
from elastic.engine.coserving.executor import CoServing
from elastic.engine.coserving.memory import SPARE_PAGES
from elastic.engine.coserving.rollout import SharedRolloutEngine
from elastic.engine.coserving.spec import ModelSpec
from elastic.engine.kv.slab import SlabBackend
from elastic.engine.model.config import Qwen3Config
from elastic.testing.engines import *  # noqa: F403
from elastic.testing.engines import CONFIG, EngineUnderTest, installed_engines
from policies.admission import NoAdmission
from policies.kvmemory import PreemptiveMemory

VLLM_IS_HERE = find_spec("vllm") is not None
VLLM = EngineUnderTest(
    "vllm",
    # On a CPU blocks are multiples of 32, and one of them is none.
    {"kv_block_tokens": 32, "vllm": {"start_timeout_s": 1200.0}},
    kept=True,
    timeout_s=1200.0,
    block_tokens=32,
    spare_blocks=1,
    tolerance=0.25,
    has_pacing=False,
    waits_for_sink=False,
)


class _Sole:
    """A rollout engine with which its executor ends."""

    def __init__(self, executor: CoServing, engine: SharedRolloutEngine) -> None:
        self._executor = executor
        self._engine = engine

    def __getattr__(self, name: str):
        return getattr(self._engine, name)

    def close(self) -> None:
        self._engine.close()
        self._executor.close()


@pytest.fixture(scope="session")
def cost_profiles(tmp_path_factory):
    return tmp_path_factory.mktemp("profiles")


@pytest.fixture
def lend_device(weights, cost_profiles):
    """Makes the rollout engine of a device whose serving model has nothing to do."""
    executors: list[CoServing] = []

    def lend(model_config, settings: EngineConfig):
        rollout = ModelSpec(Qwen3Config.from_dict(model_config), settings, torch.float32)
        layout = rollout.layout(page_bytes=1 << 20)
        # A page holds a block, so that there is as much memory as the settings say.
        backend = SlabBackend(settings.kv_blocks + SPARE_PAGES, layout.block_bytes)
        serving = ModelSpec(CONFIG, settings.model_copy(update={"max_context_tokens": 16}), torch.float32)
        executor = CoServing(
            serving, backend, NoAdmission(), PreemptiveMemory(headroom_share=0), profiles=cost_profiles
        )
        executors.append(executor)
        executor.start(lambda chunks: None, weights())
        return _Sole(executor, executor.attach(rollout))

    yield lend
    for executor in executors:
        executor.close()


@pytest.fixture(params=[*(kind for kind in installed_engines() if kind != "vllm" or VLLM_IS_HERE), "coserving"])
def engine_under_test(request) -> EngineUnderTest:
    """Every engine that is installed, and that of a co-served device."""
    if request.param == "coserving":
        return EngineUnderTest("torch", create=request.getfixturevalue("lend_device"))
    return VLLM if request.param == "vllm" else EngineUnderTest(request.param)


_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000
_NO_ACCESS = 0


class _Refusal(Exception):
    pass


def _answered(call):
    """As cuda-python does: a tuple of the error and the result, if there is one."""

    def answering(driver, *arguments):
        try:
            if driver.failing == call.__name__:
                raise _Refusal
            result = call(driver, *arguments)
        except _Refusal:
            return (driver.CUresult.CUDA_ERROR_INVALID_VALUE,)
        return (driver.CUresult.CUDA_SUCCESS,) if result is None else (driver.CUresult.CUDA_SUCCESS, result)

    answering.__name__ = call.__name__
    return answering


class HostDriver:
    """What the VMM backend needs of `cuda.bindings.driver`, by this machine's own memory management.

    Handles are parts of a file in memory, reservations are addresses without access. What NVIDIA's documentation
    forbids is refused; whoever touches a page that is not mapped crashes, as on a device. The call named by
    `failing` is refused in any case.
    """

    GRANULARITY = mmap.PAGESIZE
    CUresult = IntEnum("CUresult", {"CUDA_SUCCESS": 0, "CUDA_ERROR_INVALID_VALUE": 1})
    CUdevice_attribute = SimpleNamespace(CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED=102)
    CUmemAllocationType = SimpleNamespace(CU_MEM_ALLOCATION_TYPE_PINNED=1)
    CUmemLocationType = SimpleNamespace(CU_MEM_LOCATION_TYPE_DEVICE=1)
    CUmemAllocationGranularity_flags = SimpleNamespace(CU_MEM_ALLOC_GRANULARITY_MINIMUM=0)
    CUmemAccess_flags = SimpleNamespace(CU_MEM_ACCESS_FLAGS_PROT_READWRITE=3)

    @staticmethod
    def CUmemAllocationProp() -> SimpleNamespace:
        return SimpleNamespace(type=0, location=SimpleNamespace(type=0, id=-1))

    CUmemAccessDesc = SimpleNamespace

    def __init__(self) -> None:
        self.failing = ""
        self.supported = 1
        self.ranges: dict[int, int] = {}
        self.handles: dict[int, int] = {}
        self.mapped: dict[int, int] = {}
        """First addresses and offsets in the file, each with its size."""
        self._file = os.memfd_create("pages")
        self._file_bytes = 0

    def close(self) -> None:
        os.close(self._file)

    @_answered
    def cuDeviceGet(self, ordinal):
        return ordinal

    @_answered
    def cuDeviceGetAttribute(self, attribute, _device):
        self._require(attribute == 102)
        return self.supported

    @_answered
    def cuMemGetAllocationGranularity(self, allocation, _option):
        self._require((allocation.type, allocation.location.type, allocation.location.id) == (1, 1, 0))
        return self.GRANULARITY

    @_answered
    def cuMemAddressReserve(self, size, alignment, hint, flags):
        self._require(size > 0 and size % self.GRANULARITY == alignment == hint == flags == 0)
        address = self._mmap(None, size, _NO_ACCESS, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE, -1, 0)
        self.ranges[address] = size
        return address

    @_answered
    def cuMemCreate(self, size, allocation, flags):
        self._require(size % self.GRANULARITY == flags == 0 and allocation.type == 1)
        handle, self._file_bytes = self._file_bytes, self._file_bytes + size
        os.ftruncate(self._file, self._file_bytes)
        self.handles[handle] = size
        return handle

    @_answered
    def cuMemMap(self, address, size, offset, handle, flags):
        self._require(offset == flags == 0 and size <= self.handles[handle] and self._reserved(address, size))
        self._require(not any(address < at + held and at < address + size for at, held in self.mapped.items()))
        self._mmap(address, size, _NO_ACCESS, mmap.MAP_SHARED | _MAP_FIXED, self._file, handle)
        self.mapped[address] = size

    @_answered
    def cuMemSetAccess(self, address, size, accesses, count):
        (access,) = accesses
        self._require(self.mapped.get(address) == size and count == 1 and access.flags == 3)
        self._require((access.location.type, access.location.id) == (1, 0))
        assert _libc.mprotect(address, size, mmap.PROT_READ | mmap.PROT_WRITE) == 0

    @_answered
    def cuMemUnmap(self, address, size):
        self._require(self.mapped.get(address) == size)
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE | _MAP_FIXED
        self._mmap(address, size, _NO_ACCESS, flags, -1, 0)
        del self.mapped[address]

    @_answered
    def cuMemRelease(self, handle):
        self._require(handle in self.handles)
        del self.handles[handle]

    @_answered
    def cuMemAddressFree(self, address, size):
        self._require(self.ranges.get(address) == size)
        self._require(not any(address <= at < address + size for at in self.mapped))
        assert _libc.munmap(address, size) == 0
        del self.ranges[address]

    def _reserved(self, address: int, size: int) -> bool:
        return any(at <= address and address + size <= at + held for at, held in self.ranges.items())

    def _require(self, allowed: bool) -> None:
        if not allowed:
            raise _Refusal

    def _mmap(self, *arguments) -> int:
        address = _libc.mmap(*arguments)
        assert address != ctypes.c_void_p(-1).value, os.strerror(ctypes.get_errno())
        return address


@pytest.fixture(scope="session")
def host_driver():
    """Makes drivers, each with memory of its own."""
    made: list[HostDriver] = []

    def make() -> HostDriver:
        made.append(HostDriver())
        return made[-1]

    yield make
    for driver in made:
        driver.close()
