"""Runs blocking calls one after the other, on a thread of their own."""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import ParamSpec, Protocol, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


def promised(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> tuple[Future[T], Callable[[], None]]:
    """The future of a call's result, and what makes the call, unless the future is cancelled by then."""
    future: Future[T] = Future()

    def make() -> None:
        if not future.set_running_or_notify_cancel():
            return
        try:
            result = function(*args, **kwargs)
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(result)

    return future, make


class Lane(Protocol):
    """Makes calls one after the other, in the order in which they are asked for."""

    def submit(self, call: Callable[[], None]) -> None: ...

    def stop(self) -> None:
        """End after the calls that it has; none may be asked for any more."""
        ...


class ThreadLane:
    """On a thread that never keeps the process alive."""

    def __init__(self, name: str) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        threading.Thread(target=self._work, name=name, daemon=True).start()

    def submit(self, call: Callable[[], None]) -> None:
        self._calls.put(call)

    def stop(self) -> None:
        self._calls.put(None)

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            call()
