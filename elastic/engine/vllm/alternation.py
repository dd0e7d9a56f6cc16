"""Another model than the one that is served: a second engine on the device, awake while serving rests.

Both engines have their memory for good: asleep at level 1 or 2 the second has given back its weights and KV, but the
first, whose memory vLLM fixes as it starts, cannot use what is free then. Not tried on a GPU: a CPU frees nothing.
"""

import threading
import time
from collections.abc import Callable
from types import TracebackType

import structlog

from elastic.core.types import NS_PER_S, Nanoseconds
from elastic.engine.base import RolloutEngine

POLL_S = 0.05
_log = structlog.get_logger(__name__)


class RestfulServing:
    """When rollouts may be awake: once serving has had nothing to do for `rest_ns`, until it has. Pure."""

    def __init__(self, rest_ns: Nanoseconds, now_ns: Nanoseconds) -> None:
        self._rest_ns = rest_ns
        self._busy_until_ns = now_ns

    def may_be_awake(self, load: int, now_ns: Nanoseconds) -> bool:
        """`load` is how many requests serving has."""
        if load:
            self._busy_until_ns = now_ns
        return now_ns - self._busy_until_ns >= self._rest_ns


class Alternation:
    """Puts `rollouts` to sleep when `serving_load` says that serving has requests, and wakes them when it has rested.

    Rollouts begin asleep. What runs as they fall asleep ends as ABORTED and goes on elsewhere. As a context it has a
    thread of its own; at its end rollouts are as they were last.
    """

    def __init__(self, rollouts: RolloutEngine, serving_load: Callable[[], int], rest_s: float) -> None:
        self._rollouts = rollouts
        self._load = serving_load
        self._rest = RestfulServing(int(rest_s * NS_PER_S), time.monotonic_ns())
        self._awake = True
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="alternation", daemon=True)

    def __enter__(self) -> "Alternation":
        self._follow()
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(POLL_S):
            try:
                self._follow()
            except RuntimeError as error:  # the engine is closed, or starts again
                _log.warning("rollouts beside serving neither slept nor woke", reason=str(error))

    def _follow(self) -> None:
        awake = self._rest.may_be_awake(self._load(), time.monotonic_ns())
        if awake is self._awake:
            return
        if awake:
            self._rollouts.wake()
        else:
            self._rollouts.sleep()
        self._awake = awake
