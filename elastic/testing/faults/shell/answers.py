"""What a world's processes have instead of this machine: its clocks, threads, chance, disk and network."""

import contextlib
import functools
import gc
import random
import sqlite3
from collections.abc import Iterator
from typing import Any

from elastic.core.types import NS_PER_S
from elastic.system.host import Host, on
from elastic.testing.faults.shell import threads
from elastic.testing.faults.shell.loops import Machine, Ordered, WorldClock
from elastic.testing.faults.shell.network import Network
from elastic.weights import codecs
from elastic.worker.service import Intervals

AUDIT_PAUSE_S = 8.0
"""Pause between audits of weights. Worlds are short, and their weights small."""
COLLECTS = 20_000, 20, 100
"""Thresholds of the garbage collector, higher than the defaults: a world's garbage goes with the world."""


def host_of(machine: Machine, network: Network) -> Host:
    """What production code on a machine of a world asks."""

    def monotonic() -> float:
        return machine.monotonic_ns() / NS_PER_S

    def connect(*arguments: Any, **options: Any) -> sqlite3.Connection:
        if machine.is_out_of_descriptors():
            raise sqlite3.OperationalError("unable to open database file")
        return machine.connect(*arguments, **options)

    return Host(
        monotonic=monotonic,
        monotonic_ns=machine.monotonic_ns,
        boottime_ns=machine.boottime_ns,
        unix_ns=machine.unix_ns,
        thread_time=monotonic,
        boot_id=lambda: f"boot {machine.boots}",
        sleep=threads.sleep,
        lock=threads.SimulatedLock,
        condition=threads.SimulatedCondition,
        thread=threads.StartedThread,
        executor=threads.SimulatedPool,
        lane=lambda _: threads.SimulatedLane(threads.loop_here()),
        chance=random,
        connect=connect,
        out_of_descriptors=machine.is_out_of_descriptors,
        http_transport=network.http_transport,
        socketpair=network.socketpair,
        pid=lambda: 1,
        name=lambda: "node",
    )


def intervals(longest_turn_s: float) -> Intervals:
    """Pauses of workers whose turns may take so long: in worlds of hours shorter ones would take most of the time."""
    return Intervals(audit_s=max(AUDIT_PAUSE_S, longest_turn_s / 100), share_s=max(0.05, longest_turn_s / 1000))


@contextlib.contextmanager
def governs(clock: WorldClock, network: Network, seed: str) -> Iterator[None]:
    """A context: chance is drawn by the seed, and what the world itself asks of a machine has the world's time."""
    _prepared()
    chance, collects = random.getstate(), gc.get_threshold()
    random.seed(seed)
    gc.set_threshold(*COLLECTS)
    Ordered.begin_anew()
    try:
        with on(host_of(Machine(clock), network)):
            yield
    finally:
        random.setstate(chance)
        gc.set_threshold(*collects)


@functools.cache
def _prepared() -> None:
    """Compile the decoders of weights, and exclude everything imported so far from garbage collection."""
    codecs.warm_up()
    gc.freeze()
