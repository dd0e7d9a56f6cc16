"""Processes beside the server's, which answer one order after the other: what an order breaks is theirs alone.

Such a process imports a module and calls its `main`, which calls `answer_orders`. It ends when the server closes its
socket, or dies.
"""

import atexit
import contextlib
import os
import pickle
import socket
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import structlog

from elastic.system.processes import inherited

log = structlog.get_logger(__name__)

START_TIMEOUT_S = 60.0
NICENESS = 5
"""The server itself goes first."""
ANSWER_BYTES_MAX = 256 * 2**20
_READY = b"ready"


class NoneFree(Exception):
    """Every process that the order might have had was busy for too long, or too many orders of its owner wait."""


@dataclass(frozen=True)
class SideLimits:
    """How many processes there are, and who gets them.

    Attributes:
        processes: At once.
        per_owner: At once, for the orders of one owner.
        kept: While there is nothing to do.
        waiting_per_owner: Orders of one owner that wait for a process; each holds a thread of the server's.
        wait_s: Longest that an order waits for a process.
    """

    processes: int
    per_owner: int
    kept: int
    waiting_per_owner: int
    wait_s: float


class SideProcesses:
    """Processes of one module, started as they are needed. Threads may share them."""

    def __init__(self, module: str, limits: SideLimits) -> None:
        self._module, self._limits = module, limits
        self._free: list[_SideProcess] = []
        self._busy: Counter[Hashable] = Counter()
        self._waiting: Counter[Hashable] = Counter()
        self._changed = threading.Condition()
        atexit.register(self.end)

    @property
    def busy(self) -> int:
        """How many orders are being answered now."""
        return self._busy.total()

    def ask(self, owner: Hashable, order: object, within_s: float) -> Any:
        """Return the answer to an order; both are copies.

        Raises `NoneFree`; `TimeoutError` if the answer takes too long; `EOFError` or `OSError` if the process ends.
        """
        process = self._take(owner)
        answered = False
        try:
            process = process or self._started()
            answer = process.ask(order, within_s)
            answered = True
            return answer
        finally:
            self._give_back(owner, process, answered)

    def warm(self) -> None:
        """Start the processes that are kept, so that orders need not wait. An order that comes meanwhile starts one."""
        for _ in range(self._limits.kept):
            with self._changed:
                if self._busy.total() + len(self._free) >= self._limits.kept:
                    return
                self._busy[self] += 1
            process = None
            try:
                process = self._started()
            except (EOFError, OSError) as error:
                log.error("a process beside the server does not start", module=self._module, error=repr(error))
            finally:
                self._give_back(self, process, True)

    def end(self) -> None:
        """End the processes that nobody uses."""
        with self._changed:
            ended, self._free = self._free, []
        for process in ended:
            process.end()

    def _take(self, owner: Hashable) -> "_SideProcess | None":
        """Return a free process, or None where a new one may be started. Raises `NoneFree`."""
        limits = self._limits

        def is_turn() -> bool:
            return self._busy[owner] < limits.per_owner and self._busy.total() < limits.processes

        with self._changed:
            if self._waiting[owner] >= limits.waiting_per_owner:
                raise NoneFree
            self._waiting[owner] += 1
            try:
                if not self._changed.wait_for(is_turn, limits.wait_s):
                    raise NoneFree
                self._busy[owner] += 1
                return self._free.pop() if self._free else None
            finally:
                _count_down(self._waiting, owner)

    def _started(self) -> "_SideProcess":
        process = _SideProcess(self._module)
        try:
            process.ready()
        except BaseException:
            process.end()
            raise
        return process

    def _give_back(self, owner: Hashable, process: "_SideProcess | None", is_whole: bool) -> None:
        """Let others have the process; what an order has broken, or nobody needs, is ended."""
        with self._changed:
            if process is not None and is_whole and len(self._free) < self._limits.kept:
                self._free.append(process)
                process = None
            _count_down(self._busy, owner)
            self._changed.notify_all()
        if process is not None:
            process.end()


class _SideProcess:
    def __init__(self, module: str) -> None:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            # Not the server's own environment: no order needs its secrets.
            self._child = subprocess.Popen(
                [sys.executable, "-P", "-c", f"from {module} import main; main({theirs.fileno()})"],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                env=inherited(),
                start_new_session=True,
            )
            self._line = Connection(ours.detach())

    def ready(self) -> None:
        """Wait until it has imported what it needs. Raises `EOFError`, `OSError`, of which `TimeoutError`."""
        if not self._line.poll(START_TIMEOUT_S):
            raise TimeoutError
        self._line.recv_bytes()

    def ask(self, order: object, within_s: float) -> Any:
        """Return the answer. Raises `EOFError`, `OSError`, of which `TimeoutError`; then the process is to be ended."""
        self._line.send_bytes(pickle.dumps(order))
        if within_s <= 0 or not self._line.poll(within_s):
            raise TimeoutError
        return pickle.loads(self._line.recv_bytes(ANSWER_BYTES_MAX))

    def end(self) -> None:
        self._line.close()
        self._child.kill()
        self._child.wait()


def answer_orders(descriptor: int, answer: Callable[[Any], object]) -> None:
    """Answer at the socket of this descriptor until the server closes it. What `answer` raises ends the process."""
    os.nice(NICENESS)
    with Connection(descriptor) as line, contextlib.suppress(EOFError, OSError):
        line.send_bytes(_READY)
        while True:
            line.send_bytes(pickle.dumps(answer(pickle.loads(line.recv_bytes()))))


def _count_down(counts: Counter[Hashable], owner: Hashable) -> None:
    counts[owner] -= 1
    if not counts[owner]:
        del counts[owner]
