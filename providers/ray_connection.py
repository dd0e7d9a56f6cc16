"""A process's connection to a Ray cluster, shared by all in it that use the cluster.

- Ray's calls block, and some outlast the time that they are given once the head is gone. Each is made on a thread of
  its own, which never keeps the process, and is waited for until a deadline.
- Ray keeps one connection for a process, to one cluster: the first user makes it, the last one ends it.
"""

import asyncio
import importlib
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")

GRACE_VARIABLE, GRACE_S = "RAY_CLIENT_RECONNECT_GRACE_PERIOD", 5
"""For Ray's client to find a lost head again, before its calls fail; whoever made these asks again."""

NAMESPACE = "elastic-relays"
"""The connection's, and so that of the relays' actors; of all others their provider says it."""

TOLD_CHARACTERS = 400

_changing = threading.Lock()
_users: "set[RayConnection]" = set()


class RayConnection:
    """One user's share of the process's connection. Its methods block; see `call` and `called`."""

    def __init__(self, address: str) -> None:
        self.address = address

    def open(self) -> None:
        """Raises `ImportError`, `RuntimeError` for another version, and `ConnectionError`."""
        with _changing:
            if not ray().is_initialized():
                if _users:  # Ray's client has given this connection up, but makes no other before it is ended.
                    _users.clear()
                    ray().shutdown()
                os.environ.setdefault(GRACE_VARIABLE, str(GRACE_S))
                try:
                    self._init()
                except ConnectionAbortedError:  # The head was too busy to start this client's process in its time.
                    self._init()
                _users.add(self)
            elif _users:  # Else it is somebody else's, who ends it.
                _users.add(self)

    def close(self) -> None:
        """Actors stay."""
        with _changing:
            if self in _users:
                _users.discard(self)
                if not _users:
                    ray().shutdown()

    def reset(self) -> None:
        """End a connection that has failed, for all; each of its users makes a new one, or finds it made."""
        with _changing:
            if self in _users:
                _users.clear()
                ray().shutdown()

    def _init(self) -> None:
        ray().init(self.address, namespace=NAMESPACE, log_to_driver=False, logging_level="ERROR")


def ray() -> Any:
    """The package: an extra, which types need not know. Raises `ImportError`."""
    return importlib.import_module("ray")


async def call(timeout_s: float, function: Callable[..., T], *arguments: Any) -> T:
    """What `function` returns. Raises what it raises, and `TimeoutError`."""
    try:
        async with asyncio.timeout(timeout_s):
            return await asyncio.wrap_future(_begun(function, *arguments))
    except TimeoutError as error:
        raise _late(error, timeout_s) from error


def called(timeout_s: float, function: Callable[..., T], *arguments: Any) -> T:
    """As `call`, for threads."""
    try:
        return _begun(function, *arguments).result(timeout_s)
    except TimeoutError as error:
        raise _late(error, timeout_s) from error


def told(error: BaseException) -> str:
    """What Ray says, on one line."""
    return " ".join(str(error).split())[:TOLD_CHARACTERS] or type(error).__name__


def _begun(function: Callable[..., T], *arguments: Any) -> Future[T]:
    future: Future[T] = Future()

    def work() -> None:
        future.set_running_or_notify_cancel()
        try:
            result = function(*arguments)
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(result)

    threading.Thread(target=work, name=f"ray: {function.__name__}", daemon=True).start()
    return future


def _late(error: TimeoutError, timeout_s: float) -> TimeoutError:
    return error if str(error) else TimeoutError(f"no answer within {timeout_s:g} s")
