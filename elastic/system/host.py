"""What a process asks of the machine that it is on: clocks, threads, files, chance. `here` says which machine that is.

It is this one, unless the code that began the process has set `HOST` in the context of its loop, as worlds of faults
do for each of their processes. So code that waits, blocks, or depends on time or chance asks `here()`.
"""

import contextlib
import errno
import os
import random
import shutil
import socket
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from elastic.system.thread_lane import Lane, ThreadLane

if TYPE_CHECKING:
    import httpx

T = TypeVar("T")


class Lock(Protocol):
    """`threading.Lock`."""

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool: ...

    def release(self) -> None: ...

    def __enter__(self) -> bool: ...

    def __exit__(self, kind: Any, error: Any, traceback: Any, /) -> None: ...


class Thread(Protocol):
    """`threading.Thread`."""

    def start(self) -> None: ...

    def join(self) -> None: ...


class Chance(Protocol):
    """What is drawn for keys and secrets."""

    def randbytes(self, n: int) -> bytes: ...

    def choice(self, seq: Sequence[T]) -> T: ...


_CHANCE = random.SystemRandom()


def _boottime_ns() -> int:
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


@cache
def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _thread(*, target: Callable[[], object], name: str) -> Thread:
    return threading.Thread(target=target, name=name, daemon=True)


def _out_of_descriptors() -> bool:
    try:
        with contextlib.ExitStack() as opened:
            for _ in range(3):
                opened.enter_context(Path(os.devnull).open("rb"))
    except OSError as error:
        return error.errno in (errno.EMFILE, errno.ENFILE)
    return False


def _by_network(url: str) -> "httpx.BaseTransport | None":
    return None


@dataclass(frozen=True, kw_only=True)
class Host:
    """One machine, as a process on it has it; the defaults are this machine's."""

    monotonic: Callable[[], float] = time.monotonic
    monotonic_ns: Callable[[], int] = time.monotonic_ns
    boottime_ns: Callable[[], int] = _boottime_ns
    """Since the machine's boot. It goes on while the machine is suspended, as bills and leases do."""
    unix_ns: Callable[[], int] = time.time_ns
    thread_time: Callable[[], float] = time.thread_time
    """Seconds of a processor that the calling thread has taken."""
    boot_id: Callable[[], str] = _boot_id
    """The id of the machine's present boot."""
    sleep: Callable[[float], None] = time.sleep
    lock: Callable[[], Lock] = threading.Lock
    condition: Callable[..., threading.Condition] = threading.Condition
    """Makes a condition with the given `Lock`, or with one of its own."""
    thread: Callable[..., Thread] = _thread
    """Makes a thread with a `target` and a `name`. It does not keep the process alive."""
    executor: Callable[[int, str], Executor] = ThreadPoolExecutor
    """Makes an executor with this many threads and this prefix of their names."""
    lane: Callable[[str], Lane] = ThreadLane
    """Makes a lane whose thread has this name."""
    chance: Chance = _CHANCE
    connect: Callable[..., sqlite3.Connection] = sqlite3.connect
    write: Callable[[int, memoryview], int] = os.write
    """To a descriptor; how many of the bytes were written."""
    fsync: Callable[[int], None] = os.fsync
    disk_usage: Callable[[Path], "shutil._ntuple_diskusage"] = shutil.disk_usage
    out_of_descriptors: Callable[[], bool] = _out_of_descriptors
    """Whether this process can open no further file, or not the two that SQLite opens beside one."""
    http_transport: Callable[[str], "httpx.BaseTransport | None"] = _by_network
    """What carries HTTP requests to a URL; None for the network."""
    socketpair: Callable[[], tuple[socket.socket, socket.socket]] = socket.socketpair
    pid: Callable[[], int] = os.getpid
    name: Callable[[], str] = socket.gethostname


_THIS = Host()
HOST: ContextVar[Host] = ContextVar("host", default=_THIS)


def here() -> Host:
    """The machine that the calling code is on."""
    return HOST.get()


def after(duration_s: float) -> Callable[[object], bool]:
    """Return what says, of anything, whether so many seconds are over: what ends attempts."""
    until_s = here().monotonic() + duration_s
    return lambda _: here().monotonic() >= until_s


@contextlib.contextmanager
def on(host: Host) -> Iterator[None]:
    """A context in which code is on this machine. Threads that begin in it are not."""
    former = HOST.set(host)
    try:
        yield
    finally:
        HOST.reset(former)


def new_secret() -> str:
    """A new secret of 256 bits, in hexadecimal."""
    return here().chance.randbytes(32).hex()
