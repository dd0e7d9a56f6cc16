"""Rollout workers in Modal's containers: a call is a lease, its container a worker's machine.

Modal starts a preempted call again, in another container and with the same ticket, which is spent: its worker is turned
away, and the container asks for a new one. It has booted by then, and serves the run's next lease at once.
"""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from elastic.worker.modal_app import app, image, modal
from providers.modal_messages import ContainerSays, NewTicket, RolloutEnd, RolloutOrder

LEAVE_S = 20.0
"""For a worker whose container Modal takes back: of the 30 s that Modal gives after its signal."""
LEASE_S_MAX = 86400

_decode_order = msgspec.msgpack.Decoder(RolloutOrder).decode
_decode_ticket = msgspec.msgpack.Decoder(NewTicket).decode


@app.cls(image=image, timeout=LEASE_S_MAX, startup_timeout=1800, scaledown_window=2, single_use_containers=True)
class Rollout:
    """`run` is the run's name: each has containers of its own, by which Modal knows them."""

    run: str = modal.parameter()

    @modal.method()
    def work(self, encoded: bytes) -> bytes:
        """`RolloutOrder` in, `RolloutEnd` out."""
        order = _decode_order(encoded)
        queue = modal.Queue.from_name(order.queue)
        call, container = modal.current_function_call_id(), os.environ.get("MODAL_TASK_ID", "")
        lease, environment = order.lease, order.environment
        queue.put(_encoded(ContainerSays(call=call, container=container, lease=lease)))
        while (status := _worked(order.command, environment)) != 0:
            asks = ContainerSays(call=call, container=container, lease=lease, asks=True, status=status)
            queue.put(_encoded(asks))
            ticket = _answer(queue, container, order.ask_s)
            if not ticket.environment:
                break
            lease, environment = ticket.lease, ticket.environment
        return _encoded(RolloutEnd(status=status))


def _answer(queue: Any, container: str, within_s: float) -> NewTicket:
    """What the run answers; nobody there is an answer, too."""
    answer = None
    with contextlib.suppress(Exception):
        answer = queue.get(block=True, timeout=within_s, partition=container)
    return NewTicket() if answer is None else _decode_ticket(answer)


def _worked(command: Sequence[str], environment: Mapping[str, str]) -> int:
    """Have a worker work. Returns its status, negative for a signal. What it started ends with it."""
    worker = subprocess.Popen(
        [sys.executable, *command], env={**os.environ, **environment}, start_new_session=True, stdin=subprocess.DEVNULL
    )
    with _ended(worker):
        return worker.wait()


@contextlib.contextmanager
def _ended(worker: "subprocess.Popen[bytes]") -> Iterator[None]:
    try:
        yield
    except BaseException:  # Modal takes the container back: what the worker has of its turns is still handed over.
        worker.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            worker.wait(LEAVE_S)
        raise
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(worker.pid, signal.SIGKILL)
        worker.wait()


def _encoded(message: msgspec.Struct) -> bytes:
    return msgspec.msgpack.encode(message)
