"""Functions in Modal's containers: a pool's calls, several of one container at once where they come together.

A function is loaded at its first call, and stays. It keeps nothing between calls; one that takes its process along
takes the calls along that came together with it.
"""

import functools
import os
import time
from collections.abc import Callable
from typing import Any

import msgspec
import psutil

from elastic.worker.modal_app import app, image
from functions.modal_calls import RemoteAnswer, RemoteCall
from functions.process import Answer, Loaded, Missing, call, load

_IMPORTED_S = time.time()
_decode = msgspec.msgpack.Decoder(RemoteCall).decode


@app.function(
    image=image, name="function", timeout=600, startup_timeout=300, scaledown_window=2, enable_memory_snapshot=True
)
def function(call: bytes) -> bytes:
    """`RemoteCall` in, `RemoteAnswer` out."""
    return _answered(call)


@app.function(
    image=image, name="batch", timeout=600, startup_timeout=300, scaledown_window=2, enable_memory_snapshot=True
)
def batch(calls: list[bytes]) -> list[bytes]:
    """As `function`, for calls that a container takes at once."""
    return [_answered(call) for call in calls]


def _answered(encoded: bytes) -> bytes:
    begun_s = time.time()
    order = _decode(encoded)
    answer = _run(order)
    if not order.load_only:
        time.sleep(max(0.0, begun_s + order.pacing_s - time.time()))
    return msgspec.msgpack.encode(
        RemoteAnswer(
            answer=answer,
            container=os.environ.get("MODAL_TASK_ID", ""),
            born_s=_born_s(),
            begun_s=begun_s,
            ended_s=time.time(),
        )
    )


def _born_s() -> float:
    """Unix time of this container's first process's start, or of this module's import where it was restored from a
    snapshot."""
    return min(_IMPORTED_S, psutil.Process().create_time())


def _run(order: RemoteCall) -> Answer:
    try:
        found = _loaded(order.function)
    except Exception as error:
        return Missing(f"{type(error).__name__}: {error}")
    if order.load_only:
        return Loaded()
    return call(found, msgspec.msgpack.decode(order.payload))


@functools.lru_cache(maxsize=64)
def _loaded(name: str) -> Callable[[Any], Any]:
    return load(name)
