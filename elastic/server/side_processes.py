"""Processes beside the server's, which answer one order after the other: what an order breaks is theirs alone.

One process imports a module and calls its `main`, which calls `answer_orders`: those that answer are its forks, each of
which begins within milliseconds. They end when the server closes their sockets, or dies.
"""

import atexit
import contextlib
import gc
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import structlog

from elastic.system.processes import inherited, used_ticks

log = structlog.get_logger(__name__)

START_TIMEOUT_S = 60.0
NICENESS = 5
"""The server itself goes first."""
ANSWER_BYTES_MAX = 256 * 2**20
STUCK_S = 1.0
"""Where for so long no order was answered, they are stuck, and another process begins for one that waits."""
PID_BYTES = 16
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_READY, _FORK = b"r", b"f"
_ANSWERING = """
from elastic.system.imports import importing
with importing():
    from {module} import main
main({descriptor})
"""


class NoneFree(Exception):
    """Every process that the order might have had was busy for too long, or too many orders of its owner wait."""


class Starved(TimeoutError):
    """The answer takes too long, and its process had a processor for less than half of that time."""


@dataclass(frozen=True)
class SideLimits:
    """How many processes there are, and who gets them.

    Attributes:
        processes: At once, where some are stuck.
        per_owner: At once, for the orders of one owner.
        kept: While nothing is stuck, whether or not there is anything to do.
        waiting: Orders that wait for a process; each holds a thread of the server's.
        waiting_per_owner: Of these the orders of one owner.
        wait_s: Longest that an order waits for a process.
    """

    processes: int
    per_owner: int
    kept: int
    waiting: int
    waiting_per_owner: int
    wait_s: float


class SideProcesses:
    """Processes of one module, forked as they are needed. Threads may share them."""

    def __init__(self, module: str, limits: SideLimits) -> None:
        self._limits = limits
        self._imported = _ImportedModule(module)
        self._free: list[_SideProcess] = []
        self._busy: Counter[Hashable] = Counter()
        self._waiting: Counter[Hashable] = Counter()
        self._changed = threading.Condition()
        self._answered_s = 0.0
        atexit.register(self.end)

    @property
    def busy(self) -> int:
        """How many orders are being answered now."""
        return self._busy.total()

    def ask(self, owner: Hashable, order: object, within_s: float) -> Any:
        """Return the answer to an order; both are copies.

        Raises `NoneFree`; `TimeoutError`, of which `Starved`, if the answer takes too long; `EOFError` or `OSError` if
        the process ends.
        """
        with self._queued(owner):
            self._imported.begin()
            process = self._take(owner)
        answered = False
        try:
            if process is not None and process.is_over():
                process.end()
                process = None
            process = process or self._imported.fork()
            answer = process.ask(order, within_s)
            answered = True
            return answer
        finally:
            self._give_back(owner, process, answered)

    def warm(self) -> None:
        """Import the module, so that no order need wait for that."""
        try:
            self._imported.begin()
        except (EOFError, OSError) as error:
            if not self._imported.is_over:
                log.error("a process beside the server does not start", error=repr(error))

    def end(self) -> None:
        """End the processes that nobody uses."""
        with self._changed:
            ended, self._free = self._free, []
        for process in ended:
            process.end()
        self._imported.end()

    @contextlib.contextmanager
    def _queued(self, owner: Hashable) -> Iterator[None]:
        """A context: an order waits for a process. Raises `NoneFree`."""
        with self._changed:
            if self._waiting.total() >= self._limits.waiting or self._waiting[owner] >= self._limits.waiting_per_owner:
                raise NoneFree
            self._waiting[owner] += 1
        try:
            yield
        finally:
            with self._changed:
                _count_down(self._waiting, owner)

    def _take(self, owner: Hashable) -> "_SideProcess | None":
        """Return a free process, the owner's last one if possible, or None where a new one may begin. Raises
        `NoneFree`."""
        limits = self._limits
        began_s = time.monotonic()

        def is_turn() -> bool:
            is_stuck = time.monotonic() - max(began_s, self._answered_s) > STUCK_S
            processes = limits.processes if is_stuck else limits.kept
            return self._busy[owner] < limits.per_owner and (bool(self._free) or self._busy.total() < processes)

        with self._changed:
            while not self._changed.wait_for(is_turn, STUCK_S):
                if time.monotonic() - began_s > limits.wait_s:
                    raise NoneFree
            self._busy[owner] += 1
            if not self._free:
                return None
            own = (place for place, process in enumerate(self._free) if process.owner == owner)
            return self._free.pop(next(own, -1))

    def _give_back(self, owner: Hashable, process: "_SideProcess | None", is_whole: bool) -> None:
        """Let others have the process; what an order has broken, or nobody needs, is ended."""
        with self._changed:
            self._answered_s = time.monotonic()
            if process is not None and is_whole and len(self._free) < self._limits.kept:
                process.owner = owner
                self._free.append(process)
                process = None
            _count_down(self._busy, owner)
            self._changed.notify_all()
        if process is not None:
            process.end()


class _ImportedModule:
    """The process that has imported a module, begun with the first fork, and anew after it has died."""

    def __init__(self, module: str) -> None:
        self._module = module
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._line: socket.socket | None = None
        self.is_over = False

    def begin(self) -> None:
        """Import the module, if that has not been done. Raises `EOFError`, `OSError`, of which `TimeoutError`."""
        with self._lock:
            self._begun()

    def fork(self) -> "_SideProcess":
        """Return a new process. Raises as `begin` does."""
        with self._lock:
            with contextlib.suppress(EOFError, OSError):
                return self._forked(self._begun())
            self._end()
            return self._forked(self._begun())

    def end(self) -> None:
        self.is_over = True
        if (process := self._process) is not None:
            process.kill()  # Nobody waits until it has imported all.
        with self._lock:
            self._end()

    def _begun(self) -> socket.socket:
        if self._line is not None:
            return self._line
        ours, theirs = socket.socketpair()
        with theirs:
            # Not the server's own environment: no order needs its secrets.
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", _ANSWERING.format(module=self._module, descriptor=theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                env=inherited(),
                start_new_session=True,
            )
        self._line = ours
        try:
            ours.settimeout(START_TIMEOUT_S)
            if ours.recv(1) != _READY:
                raise EOFError
        except BaseException:
            self._end()
            raise
        return ours

    def _forked(self, line: socket.socket) -> "_SideProcess":
        ours, theirs = socket.socketpair()
        with ours, theirs:
            socket.send_fds(line, [_FORK], [theirs.fileno()])
            pid, descriptors, _, _ = socket.recv_fds(line, PID_BYTES, 1, socket.MSG_CMSG_CLOEXEC)
            if not descriptors:
                raise EOFError
            return _SideProcess(Connection(ours.detach()), descriptors[0], int(pid))

    def _end(self) -> None:
        if self._line is not None:
            self._line.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._line = self._process = None


class _SideProcess:
    """The server's end of a process, which `pidfd` refers to. `owner` is whose order it answered last."""

    def __init__(self, line: Connection, pidfd: int, pid: int) -> None:
        self._line, self._pidfd, self._pid = line, pidfd, pid
        self.owner: Hashable = None

    def is_over(self) -> bool:
        """Return whether it has ended while it had nothing to do."""
        return self._line.poll()

    def ask(self, order: object, within_s: float) -> Any:
        """Return the answer. Raises `EOFError`, `OSError`, of which `TimeoutError`; then the process is to be ended."""
        used_s = self._used_s()
        self._line.send_bytes(pickle.dumps(order))
        if within_s <= 0 or not self._line.poll(within_s):
            used_s = self._used_s() - used_s
            raise Starved(f"{used_s:.1f} s") if used_s < within_s / 2 else TimeoutError
        return pickle.loads(self._line.recv_bytes(ANSWER_BYTES_MAX))

    def _used_s(self) -> float:
        """Return how long it has had a processor. Raises `OSError` if it has ended."""
        ticks = used_ticks(self._pid)
        if ticks is None:
            raise ProcessLookupError(f"process {self._pid} has ended")
        return ticks / TICKS_PER_S

    def end(self) -> None:
        self._line.close()
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        os.close(self._pidfd)


def answer_orders(descriptor: int, answer: Callable[[Any], object]) -> None:
    """Fork a process for each socket that comes by this descriptor, until the server closes that.

    A fork answers at its socket until the server closes it. What `answer` raises ends the fork.
    """
    os.nice(NICENESS)
    gc.freeze()
    with socket.socket(fileno=descriptor) as line:
        try:
            line.sendall(_READY)
        except BrokenPipeError:
            return  # The server was killed meanwhile.
        while True:
            _, descriptors, _, _ = socket.recv_fds(line, 1, 1, socket.MSG_CMSG_CLOEXEC)
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass  # It is over.
            if not descriptors:
                return
            child = os.fork()
            if not child:
                break
            os.close(descriptors[0])
            pidfd = os.pidfd_open(child)
            socket.send_fds(line, [str(child).encode()], [pidfd])
            os.close(pidfd)
    with Connection(descriptors[0]) as line, contextlib.suppress(EOFError, OSError):
        while True:
            line.send_bytes(pickle.dumps(answer(pickle.loads(line.recv_bytes()))))


def _count_down(counts: Counter[Hashable], owner: Hashable) -> None:
    counts[owner] -= 1
    if not counts[owner]:
        del counts[owner]
