"""Processes beside the server's, which answer one order after the other: what an order breaks is theirs alone.

Such a process is a module that calls `answer_orders`. It ends when the server closes its socket, or dies.
"""

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection

from elastic.system.processes import inherited

START_TIMEOUT_S = 60.0
NICENESS = 5
"""The server itself goes first."""
ANSWER_BYTES_MAX = 256 * 2**20
_READY = b"ready"


class SideProcess:
    """A process of this module. It is ready once `ready` has returned."""

    def __init__(self, module: str) -> None:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            # Not the server's own environment: no order needs its secrets.
            self._child = subprocess.Popen(
                [sys.executable, "-P", "-m", module, str(theirs.fileno())],
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

    def ask(self, order: bytes, within_s: float) -> bytes:
        """Return the answer. Raises `EOFError`, `OSError`, of which `TimeoutError`; then the process is to be ended."""
        self._line.send_bytes(order)
        if not self._line.poll(within_s):
            raise TimeoutError
        return self._line.recv_bytes(ANSWER_BYTES_MAX)

    def end(self) -> None:
        self._line.close()
        self._child.kill()
        self._child.wait()


def answer_orders(descriptor: int, answer: Callable[[bytes], bytes]) -> None:
    """Answer at the socket of this descriptor until the server closes it."""
    os.nice(NICENESS)
    with Connection(descriptor) as line, contextlib.suppress(EOFError, OSError):
        line.send_bytes(_READY)
        while True:
            line.send_bytes(answer(line.recv_bytes()))
