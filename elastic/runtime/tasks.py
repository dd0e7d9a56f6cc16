"""How the live parts of a run start what takes its time."""

import asyncio
from collections.abc import Coroutine
from typing import Any, Protocol


class Spawn(Protocol):
    """Starts a task that ends with the run at the latest."""

    def __call__(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]: ...
