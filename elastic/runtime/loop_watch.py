"""Watches for code of others that holds the event loop: environments, and policies and markets of other packages, run
on it, and one that sleeps or computes stops everything else.

- A thread says whose code it is once the loop has not turned for `HELD_S`, and once more when it turns again.
- A signal that asks the process to end interrupts code that has held the loop for half of that time: it raises
  `Interrupted` where the code stands, so that the loop gets to act on the signal. Code that lets nothing interrupt it
  ends with the process, `STUBBORN_S` later.
- A policy or market is interrupted once it has held the loop for `limit_s`; where there is no loop, as in simulations,
  once it has been asked for so long.

A run that ends this way goes on from its journal like one that was killed.
"""

import asyncio
import contextlib
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

import structlog

import elastic
from elastic.system import plug_ins
from elastic.system.signals import handled

log = structlog.get_logger(__name__)

HELD_S = 2.0
BEAT_S = 0.2
"""How often the loop shows that it turns, and the thread looks."""
STUBBORN_S = 20.0
LOOP = "the event loop"
_WAKE = signal.SIGURG
"""The signal by which the thread reaches the main thread: ignored by default, and by everybody else."""


_ELASTIC = os.path.dirname(elastic.__file__) + os.sep
_ENVIRONMENTS = os.path.join(_ELASTIC, "environments", "")
_ROLLOUT, _ANSWERS = os.path.join(_ELASTIC, "runtime", "rollout.py"), os.path.join(_ENVIRONMENTS, "answers.py")
"""By their names: what a process has no use for is not imported to be watched."""
_MAKE_ENVIRONMENTS = os.path.join(_ELASTIC, "compose", "")
_NOT_USERS = (os.path.dirname(asyncio.__file__), os.path.dirname(structlog.__file__))


class Interrupted(BaseException):
    """This code held the event loop for too long, or as the process was told to end."""


class LoopWatch:
    """Watches the running loop while its context lasts; for the main thread. `say` is called by another thread."""

    def __init__(
        self,
        say: Callable[[str], None],
        limit_s: float = math.inf,
        held_s: float = HELD_S,
        stubborn_s: float = STUBBORN_S,
    ) -> None:
        self._say, self._limit_s, self._held_s, self._stubborn_s = say, limit_s, held_s, stubborn_s
        self._beat_s = time.monotonic()
        self._main = threading.get_ident()
        self._over = threading.Event()
        self._told_to_end_s: float | None = None
        self._held = "the simulation"
        self._asked: FrameType | None = None
        """Where there is no loop: the frame that asks, since `_beat_s`."""

    @contextlib.contextmanager
    def watching(self) -> Iterator["LoopWatch"]:
        """A context: the loop is watched."""
        loop, self._held = asyncio.get_running_loop(), LOOP
        loop.call_soon(self._beat, loop)
        with self.watching_plug_ins():
            yield self

    @contextlib.contextmanager
    def watching_plug_ins(self) -> Iterator[None]:
        """A context without a loop: policies and markets of other packages are watched as they are asked."""
        thread = threading.Thread(target=self._look, name="loop watch", daemon=True)
        with handled((_WAKE,), self._interrupt):
            thread.start()
            try:
                yield
            finally:
                self._over.set()
                thread.join()

    def told_to_end(self) -> None:
        """Note a signal that asks the process to end, as soon as it comes."""
        self._told_to_end_s = self._told_to_end_s or time.monotonic()

    def _beat(self, loop: asyncio.AbstractEventLoop) -> None:
        self._beat_s = time.monotonic()
        if not self._over.is_set():
            loop.call_later(BEAT_S, self._beat, loop)

    def _look(self) -> None:
        told, looked_s = "", time.monotonic()
        while not self._over.wait(BEAT_S):
            late_s, looked_s = time.monotonic() - looked_s - BEAT_S, time.monotonic()
            if self._held != LOOP and (asked := asking(self._innermost())) is not self._asked:
                self._asked, self._beat_s = asked, looked_s
            held_s = looked_s - self._beat_s
            if late_s > self._held_s / 2:
                continue  # The whole process stood still.
            if held_s < self._held_s and not (self._told_to_end_s and held_s > self._held_s / 2):
                if told and held_s < 2 * BEAT_S:
                    self._report(f"{self._held} goes on: {told} held it")
                    told = ""
                continue
            innermost = self._innermost()
            plug_in = asked_plug_in(innermost)
            holder = plug_in or holder_of(innermost)
            if holder and not told and held_s >= self._held_s:
                self._report(f"{holder} holds {self._held} since {held_s:.0f} s; all else waits")
                told = holder
            ends_s = self._told_to_end_s
            if ends_s is None and plug_in and held_s > self._limit_s:
                ends_s = self._beat_s + self._limit_s
            if holder and ends_s is not None:
                signal.pthread_kill(self._main, _WAKE)
                if looked_s - max(ends_s, self._beat_s) > self._stubborn_s:
                    self._report(f"{holder} lets nothing interrupt it: the process ends without it")
                    os._exit(1)

    def _innermost(self) -> FrameType | None:
        return sys._current_frames().get(self._main)

    def _report(self, words: str) -> None:
        log.warning("event loop", what=words)
        self._say(f"warning: {words}")

    def _interrupt(self, _: int, frame: FrameType | None) -> None:
        if self._told_to_end_s is not None and (asked_plug_in(frame) or holder_of(frame)):
            raise Interrupted("the process was told to end while this held the event loop")
        if frame is not None and asked_plug_in(frame):
            at = f"{frame.f_code.co_filename}:{frame.f_lineno}"
            raise Interrupted(f"this held {self._held} for more than {self._limit_s:g} s, at {at}")


def asked_plug_in(innermost: FrameType | None) -> str:
    """Return whose policy or market is being asked, what for, and where it stands; empty if none is."""
    frame = asking(innermost)
    if frame is None or frame is innermost or innermost is None:
        return ""
    asked, name = frame.f_locals.get("self"), frame.f_locals.get("name")
    at = f"{innermost.f_code.co_filename}:{innermost.f_lineno}"
    return f"{asked.whose}: {name} ({at})" if isinstance(asked, plug_ins.AskedPlugIn) else ""


def asking(innermost: FrameType | None) -> FrameType | None:
    """Return the frame that asks code of another package."""
    frame = innermost
    while frame is not None and frame.f_code.co_filename != plug_ins.__file__:
        frame = frame.f_back
    return frame


def holder_of(innermost: FrameType | None) -> str:
    """Return which environment's code runs below a rollout loop, and where it stands; empty if none does: what else a
    loop calls is Elastic's own."""
    frames: list[FrameType] = []
    frame = innermost
    while frame is not None and frame.f_code.co_filename != _ROLLOUT:
        frames.append(frame)
        frame = frame.f_back
    if frame is None or not frames:
        return ""
    inner = [one for one in frames if one.f_code.co_filename != contextlib.__file__]
    while inner and inner[-1].f_code.co_filename.startswith(_MAKE_ENVIRONMENTS):
        inner.pop()
    if not inner:
        return ""
    entry, at = inner[-1].f_code, inner[0]
    file = entry.co_filename
    ours = file.startswith(_ELASTIC) and (not file.startswith(_ENVIRONMENTS) or file == _ANSWERS)
    if ours or os.path.dirname(file) in _NOT_USERS:
        return ""
    place = f"{at.f_code.co_filename}:{at.f_lineno}"
    within = "" if at is inner[-1] else f" in {at.f_code.co_qualname}"
    return f"environment {entry.co_qualname} ({place}{within})"
