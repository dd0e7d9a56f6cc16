"""Signals that ask a process to end. What its starter has it ignore, it ignores: SIGHUP under `nohup`, SIGINT of a
background job of a script. So handlers are installed here, and nowhere else."""

import asyncio
import contextlib
import signal
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

INTERRUPT = (signal.SIGINT,)
TERMINATION = (signal.SIGTERM, signal.SIGINT)
TERMINATION_OR_HANGUP = (*TERMINATION, signal.SIGHUP)


def act_on(
    numbers: tuple[signal.Signals, ...], act: Callable[[], object], note: Callable[[], object] | None = None
) -> Callable[[], None]:
    """Have the running loop call `act` at each of these signals; returns what ends that. Off the main thread, where
    there are no handlers, nothing is done.

    `note` is called before that, as soon as the signal comes, also while something holds the loop.
    """
    loop = asyncio.get_running_loop()
    handled: list[signal.Signals] = []

    def end() -> None:
        for number in handled:
            loop.remove_signal_handler(number)

    with contextlib.suppress(NotImplementedError, RuntimeError, ValueError):
        for number in _heeded(numbers):
            loop.add_signal_handler(number, act)
            handled.append(number)
            if note is not None:
                # In the place of a handler that does nothing: the loop hears of signals by a descriptor.
                signal.signal(number, lambda *_: note())
                signal.siginterrupt(number, False)
    return end


@contextlib.contextmanager
def handled(numbers: tuple[signal.Signals, ...], handler: Callable[[int, FrameType | None], Any]) -> Iterator[None]:
    """While this lasts, `handler` is called at each of these signals. For programs without a loop, on the main
    thread."""
    former = {number: signal.signal(number, handler) for number in _heeded(numbers)}
    try:
        yield
    finally:
        for number, before in former.items():
            signal.signal(number, before)


def _heeded(numbers: tuple[signal.Signals, ...]) -> list[signal.Signals]:
    return [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]
