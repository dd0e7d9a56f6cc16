"""A process's connection to a Ray cluster, shared by all in it that use the cluster.

- Ray's calls block, and some outlast the time that they are given once the head is gone; see `providers.vendor_calls`.
- Ray keeps one connection for a process, to one cluster: the first user makes it, the last one ends it.
"""

import asyncio
import contextlib
import importlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from elastic.system.plain_values import told
from providers.vendor_calls import call, called

T = TypeVar("T")

GRACE_VARIABLE, GRACE_S = "RAY_CLIENT_RECONNECT_GRACE_PERIOD", 5
"""How long Ray's client looks for a lost head before its calls fail. Callers repeat theirs."""
CHECK_S = 0.5
"""Between two looks at whether there still is a connection by which a call can be answered."""
LEAVE_S = 2.0
"""How long the cluster may take to answer that a connection ends. Nothing is lost with its answer."""

NODE_VARIABLE = "ELASTIC_RAY_CLUSTER"
"""The environment variable with the cluster's address for processes on its nodes."""

HEAD = "node:__internal_head__"
"""A resource that only the head of a cluster has."""

NAMESPACE = "elastic-relays"
"""Ray's namespace of the connection and of relays' actors. Providers name that of other actors."""


class RayUnusable(Exception):
    """A cluster cannot be used from here. The message says why and what to do. `passing`: it only does not answer."""

    def __init__(self, message: str, *, passing: bool = False) -> None:
        super().__init__(message)
        self.passing = passing


_changing = threading.Lock()
_users: "set[RayConnection]" = set()


class RayConnection:
    """One user's part in the process's connection. Its methods block. `runtime_env` is what Ray ships to where the
    first user's calls and actors are."""

    def __init__(self, address: str, runtime_env: Mapping[str, Any] | None = None) -> None:
        self.address, self._runtime_env = address, dict(runtime_env or {})

    def open(self, within_s: float) -> None:
        """Connect, if nobody has. Raises `RayUnusable`."""
        cluster = f"the Ray cluster at {self.address}"
        try:
            called(within_s, self._open, time.monotonic() + within_s)
        except ImportError as error:
            raise RayUnusable("Ray is not installed here; pip install -e '.[ray]' in a clone of elastic") from error
        except (ConnectionError, TimeoutError) as error:
            raise RayUnusable(
                f"{cluster} does not answer ({told(error)}); is its head up, and its client port open to this machine?",
                passing=True,
            ) from error
        except RuntimeError as error:
            raise RayUnusable(
                f"{cluster} does not take this client: {told(error)}; install its versions of Ray and Python here"
            ) from error

    async def ask(self, within_s: float, function: Callable[..., T], *arguments: Any) -> T:
        """Return what a function that asks the cluster returns.

        Raises what it raises, `TimeoutError`, and `ConnectionError` some seconds after the connection is lost: some
        calls get no answer then.
        """
        asking, lost_s = asyncio.ensure_future(call(within_s, function, *arguments)), 0.0
        try:
            while not (await asyncio.wait({asking}, timeout=CHECK_S))[0]:
                lost_s = 0.0 if ray().util.client.ray.is_connected() else lost_s + CHECK_S
                if lost_s > GRACE_S:
                    raise ConnectionError("the connection to it is lost")
            return asking.result()
        finally:
            asking.cancel()

    def close(self) -> None:
        """Leave the connection. Actors stay."""
        with _changing:
            if self in _users:
                _users.discard(self)
                if not _users:
                    _end()

    def reset(self) -> None:
        """End a failed connection for all its users. The first of them to come back makes a new one."""
        with _changing:
            if self in _users:
                _users.clear()
                _end()

    def _open(self, deadline_s: float) -> None:
        with _changing:
            if not ray().is_initialized():
                if _users:  # Ray's client has given this connection up, but makes no other before it is ended.
                    _users.clear()
                    _end()
                os.environ.setdefault(GRACE_VARIABLE, str(GRACE_S))
                while True:
                    try:
                        self._init()
                        break
                    except ConnectionAbortedError:  # The head was too busy to start this client's process in its time.
                        if time.monotonic() > deadline_s:
                            raise
                _users.add(self)
            elif _users:  # Else it is somebody else's, who ends it.
                _users.add(self)

    def _init(self) -> None:
        further = {"runtime_env": self._runtime_env} if self._runtime_env else {}
        with _leaving_soon():
            ray().init(self.address, namespace=NAMESPACE, log_to_driver=False, logging_level="ERROR", **further)


def _end() -> None:
    with _leaving_soon():
        ray().shutdown()


@contextlib.contextmanager
def _leaving_soon() -> Iterator[None]:
    """Where a connection ends in the body, also one that could not be made, wait for `LEAVE_S` at most. By itself Ray's
    client waits for ever where the link is cut, 10 s for a head that is another one by now, and 40 s for one that
    could not start this client's process.
    """
    over = threading.Event()
    threading.Thread(target=_cut_off, args=(over,), name="ray: leaving", daemon=True).start()
    try:
        yield
    finally:
        over.set()


def _cut_off(over: threading.Event) -> None:
    leaving_s = 0.0
    while not over.wait(CHECK_S):
        client = ray().util.client.ray.get_context().client_worker
        if client is None or client.is_connected():
            leaving_s = 0.0
        elif (leaving_s := leaving_s + CHECK_S) > LEAVE_S and (channel := client.channel) is not None:
            channel.close()


def ray() -> Any:
    """Return the package `ray`, an untyped extra. Raises `ImportError`."""
    return importlib.import_module("ray")
