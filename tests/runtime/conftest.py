"""The gateway is tested on both event loops: their transports differ where it matters to it."""

import asyncio
from collections.abc import Callable, Mapping

import pytest
import uvloop


@pytest.hookimpl
def pytest_asyncio_loop_factories(item: pytest.Item) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    asyncio_alone: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {"asyncio": asyncio.new_event_loop}
    return asyncio_alone | {"uvloop": uvloop.new_event_loop} if item.path.name == "test_gateway.py" else asyncio_alone
