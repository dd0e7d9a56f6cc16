"""What only virtual memory management can get wrong: driver errors, addresses, and what is left behind."""

import sys

import pytest
import torch

from elastic.engine.kv import PagePool
from elastic.engine.kv.vmm import VmmBackend, VmmError, VmmUnavailable, load_driver

PAGE_BYTES = 8192


@pytest.fixture
def driver(host_driver):
    return host_driver()


@pytest.fixture
def pool(driver):
    pool = PagePool(VmmBackend(4, PAGE_BYTES, "cpu", driver))
    yield pool
    driver.failing = ""
    pool.close()


def test_a_pages_place_in_the_view_is_its_virtual_number(pool, driver) -> None:
    a, b = pool.space(), pool.space()
    for space in (a, b):
        assert [space.map() for _ in range(2)] == [(0, 0), (1, 1)]
    a.unmap(0)
    assert b.map() == (2, 2)
    starts = [space.view(torch.uint8).data_ptr() for space in (a, b)]
    assert sorted(driver.ranges) == sorted(starts)
    assert sorted(driver.mapped) == sorted(
        [starts[0] + PAGE_BYTES, *(starts[1] + page * PAGE_BYTES for page in range(3))]
    )


def test_nothing_is_left_behind(pool, driver) -> None:
    spaces = [pool.space() for _ in range(2)]
    for space in spaces:
        space.map()
    spaces[0].close()
    assert (len(driver.ranges), len(driver.mapped), len(driver.handles)) == (1, 1, 4)
    pool.close()
    assert (driver.ranges, driver.mapped, driver.handles) == ({}, {}, {})


@pytest.mark.parametrize("call", ["cuMemMap", "cuMemSetAccess"])
def test_a_page_that_cannot_be_mapped_is_free_again(pool, driver, call) -> None:
    space = pool.space()
    space.map()
    driver.failing = call
    with pytest.raises(VmmError, match=f"{call}: CUDA_ERROR_INVALID_VALUE"):
        space.map()
    driver.failing = ""
    pool.check()
    assert (pool.free, len(space), len(driver.mapped)) == (3, 1, 1)
    assert space.map() == (1, 1)


def test_a_page_that_cannot_be_unmapped_stays_mapped(pool, driver) -> None:
    space = pool.space()
    space.map()
    driver.failing = "cuMemUnmap"
    with pytest.raises(VmmError, match="cuMemUnmap"):
        space.unmap(0)
    pool.check()
    assert (pool.free, len(space)) == (3, 1)


def test_a_space_without_addresses_is_none(pool, driver) -> None:
    driver.failing = "cuMemAddressReserve"
    with pytest.raises(VmmError, match="cuMemAddressReserve"):
        pool.space()
    driver.failing = ""
    pool.space().map()
    pool.check()


def test_closing_goes_on_after_an_error(pool, driver) -> None:
    pool.space().map()
    driver.failing = "cuMemUnmap"
    with pytest.raises(VmmError, match="cuMemUnmap"):
        pool.close()
    assert not driver.handles


def test_pages_that_do_not_fit_the_device_are_all_given_back(driver) -> None:
    create, made = driver.cuMemCreate, []

    def cuMemCreate(*arguments):
        made.append(arguments)
        driver.failing = "cuMemCreate" if len(made) > 2 else ""
        return create(*arguments)

    driver.cuMemCreate = cuMemCreate
    with pytest.raises(VmmError, match="cpu: no room for 4 pages of 8192 bytes: cuMemCreate"):
        VmmBackend(4, PAGE_BYTES, "cpu", driver)
    assert (len(made), driver.handles) == (3, {})


def test_a_page_must_suit_the_device(driver) -> None:
    with pytest.raises(ValueError, match="page_bytes: must be a multiple of the device's 4096 "):
        VmmBackend(4, 6144, "cpu", driver)


def test_a_device_without_virtual_memory_management_is_named(driver) -> None:
    driver.supported = 0
    with pytest.raises(VmmUnavailable, match="cpu has no virtual memory management"):
        VmmBackend(4, PAGE_BYTES, "cpu", driver)


def test_without_cuda_python_the_extra_is_named(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", None)
    with pytest.raises(VmmUnavailable, match=r"cuda-python is not installed; .*\.\[cuda\]"):
        load_driver()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_without_a_device_cuda_python_is_of_no_use() -> None:
    pytest.importorskip("cuda.bindings.driver", reason="cuda-python is not installed")
    with pytest.raises(VmmUnavailable, match="no CUDA driver or device"):
        load_driver()


def test_the_host_stands_in_for_calls_that_cuda_python_has(driver) -> None:
    real = pytest.importorskip("cuda.bindings.driver", reason="cuda-python is not installed")
    for name in dir(driver):
        if name.startswith("cu"):
            assert callable(getattr(real, name))
        elif name.startswith("CU"):
            for member, value in getattr(vars(type(driver))[name], "__dict__", {}).items():
                if member.startswith("CU_"):
                    assert getattr(getattr(real, name), member).value == value
