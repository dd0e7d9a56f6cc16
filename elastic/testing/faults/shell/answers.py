"""The world's replacements for what production code asks its process for: clocks, random numbers, threads, files."""

import contextlib
import functools
import gc
import importlib.metadata
import itertools
import random
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from elastic.core.types import NS_PER_S
from elastic.protocol import ticket_store as ticket_book
from elastic.runtime import orchestrator
from elastic.runtime.journal import writer
from elastic.system import boot_clock, machine
from elastic.testing.faults.shell import threads
from elastic.testing.faults.shell.loops import Ordered, WorldClock
from elastic.weights import client, codecs, digest, publisher, reading, signing
from elastic.weights.relay import Relay
from elastic.worker import rollout_resident, service, trainer_host

OpenRelay = Callable[[str, str | None, str], Relay]

AUDIT_PAUSE_S = 8.0
"""Pause between audits of weights. Worlds are short, and their weights small."""
SHARE_BYTES = 256
"""Bytes of a keyframe that one range request reads, so that small keyframes need several requests too."""

COLLECTS = 20_000, 20, 100
"""Thresholds of the garbage collector, higher than the defaults: a world's garbage goes with the world."""

POOLED = digest, publisher, reading, trainer_host
THREADED = client, rollout_resident, trainer_host, writer


@contextlib.contextmanager
def governs(clock: WorldClock, seed: str, longest_turn_s: float, open_relay: OpenRelay) -> Iterator[None]:
    """While the context lasts, production code gets the world's clock, numbers, threads, journal, relay and boot id.

    The list of installed packages is read once, and slow checks run less often, above all in runs of hours: both would
    take most of a world's time.
    """
    _prepared()
    rare_s = longest_turn_s / 100
    answers: list[tuple[Any, str, Any]] = [
        (time, "monotonic_ns", clock.monotonic_ns),
        (time, "perf_counter_ns", clock.monotonic_ns),
        (time, "clock_gettime_ns", lambda _clock: clock.boottime_ns()),
        (time, "time_ns", clock.unix_ns),
        (time, "monotonic", lambda: clock.monotonic_ns() / NS_PER_S),
        (time, "perf_counter", lambda: clock.monotonic_ns() / NS_PER_S),
        (time, "thread_time", lambda: clock.monotonic_ns() / NS_PER_S),
        (time, "time", lambda: clock.unix_ns() / NS_PER_S),
        (time, "sleep", threads.sleep),
        (threading, "_time", lambda: clock.monotonic_ns() / NS_PER_S),
        (threading.Condition, "wait", threads.wait_on),
        *((module, "threading", threads.THREADING) for module in THREADED),
        *((module, "ThreadPoolExecutor", threads.SimulatedPool) for module in POOLED),
        (signing, "Ed25519PrivateKey", SimpleNamespace(generate=_private_key)),
        (ticket_book, "secrets", _Secrets),
        (boot_clock, "boot_id", clock.boot_id),
        (importlib.metadata, "entry_points", functools.partial(_entry_points, open_relay)),
        (sqlite3, "connect", clock.connect),
        (machine, "out_of_descriptors", clock.out_of_descriptors),
        (orchestrator, "SAMPLE_INTERVAL_S", max(0.5, rare_s)),
        (service, "SHARE_INTERVAL_S", max(0.05, rare_s / 10)),
        (service, "AUDIT_PAUSE_S", max(AUDIT_PAUSE_S, rare_s)),
        (trainer_host, "REQUEST_POLL_S", max(1.0, rare_s)),
        (reading, "SHARE_BYTES", SHARE_BYTES),
        (codecs, "warm_up", _warm),
        (trainer_host, "warm_up", _warm),
    ]
    former = [(where, name, getattr(where, name)) for where, name, _ in answers]
    chance, collects = random.getstate(), gc.get_threshold()
    random.seed(seed)
    gc.set_threshold(*COLLECTS)
    Ordered.ages = itertools.count()
    try:
        for where, name, answer in answers:
            setattr(where, name, answer)
        yield
    finally:
        for where, name, answer in former:
            setattr(where, name, answer)
        random.setstate(chance)
        gc.set_threshold(*collects)


_installed = functools.cache(importlib.metadata.entry_points)


@functools.cache
def _prepared() -> None:
    """Compile the decoders of weights, and exclude everything imported so far from garbage collection."""
    codecs.warm_up()
    gc.freeze()


def _entry_points(open_relay: OpenRelay, **which: str) -> Any:
    if which == {"group": "elastic.relays"}:
        return [SimpleNamespace(name="http", load=lambda: open_relay)]
    return _installed(**which)


def _private_key() -> Ed25519PrivateKey:
    return Ed25519PrivateKey.from_private_bytes(random.randbytes(32))


class _Secrets:
    choice = staticmethod(random.choice)

    @staticmethod
    def token_urlsafe(count: int) -> str:
        return random.randbytes(count).hex()


def _warm() -> None:
    pass
