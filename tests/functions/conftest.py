"""Function pools under test, made by kind, and closed at the test's end; on the event loop that runs use, too."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest
import uvloop

from functions.base import Call, FunctionPool
from functions.local import LocalFunctionPool, Prices

TIMEOUT_S = 20.0
MakePool = Callable[..., FunctionPool]


@pytest.hookimpl
def pytest_asyncio_loop_factories(item: pytest.Item) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Runs are on uvloop; what deals with processes is tested on asyncio's own loop, too."""
    both = {"uvloop": uvloop.new_event_loop, "asyncio": asyncio.new_event_loop}
    return both if item.path.stem == "test_local" else {"uvloop": uvloop.new_event_loop}


@pytest.fixture
def calls() -> list[Call]:
    """What the pools have metered."""
    return []


@pytest.fixture
def pool_type() -> Callable[..., FunctionPool]:
    return LocalFunctionPool


@pytest.fixture
async def make_pool(
    pool_type: Callable[..., FunctionPool], calls: list[Call], tmp_path: Path
) -> AsyncIterator[MakePool]:
    pools: list[FunctionPool] = []

    def make(function: str = "double", **settings: Any) -> FunctionPool:
        reference = function if ":" in function else f"tests.functions.samples:{function}"
        pools.append(pool_type(reference, log=tmp_path / "functions.log", meter=calls.append, **settings))
        return pools[-1]

    yield make
    for pool in pools:
        await pool.aclose()
    assert function_processes() == []


@pytest.fixture
def prices() -> Prices:
    return Prices(usd_per_s=2.0, usd_per_call=1.0)


def function_processes() -> list[psutil.Process]:
    """Our living children that run functions, here or in a container."""
    return [child for child in psutil.Process().children(recursive=True) if _runs_functions(child)]


def _runs_functions(process: psutil.Process) -> bool:
    try:
        return bool({"functions.process", "modal._container_entrypoint"} & set(process.cmdline()))
    except (psutil.NoSuchProcess, psutil.ZombieProcess):  # it may die at any moment
        return False


async def eventually(condition: Callable[[], object]) -> None:
    """Wait for something outside this process, which cannot tell us."""
    async with asyncio.timeout(TIMEOUT_S):
        while True:
            if condition():
                return
            await asyncio.sleep(0.01)
