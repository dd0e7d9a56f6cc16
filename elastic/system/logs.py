"""The logs of all our processes: one JSON object a line, tracebacks as Python prints them.

structlog's own default shows the local variables of every frame, and tokens and session keys are among them. So that is
left behind also where nobody has said where logs go: in somebody else's process, and in tests.
"""

import logging
import os
import time
from contextlib import suppress

import structlog

STANDARD_ERROR = 2


class _LogFile:
    """A log that cannot be written is no reason to fail: the journal says so of the disk that is full."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def msg(self, line: str) -> None:
        with suppress(OSError):
            os.write(self._descriptor, f"{line}\n".encode())

    debug = info = warning = error = critical = msg


def show_no_locals() -> None:
    """Tracebacks tell no local variables, wherever logs go by structlog's own default."""
    if structlog.is_configured():
        return
    *processors, _ = structlog.get_config()["processors"]
    renderer = structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)
    structlog.configure(processors=[*processors, renderer])


def log_to(descriptor: int, level: int = logging.INFO) -> None:
    """Structured logs of this process, from `level` up, go to an open file from now on."""
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.TimeStamper(fmt="iso"),
            structlog.processors.add_log_level,
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=lambda *_: _LogFile(descriptor),
        cache_logger_on_first_use=False,
    )


class PaceLog:
    """Tells the log, at level debug, now and then how many paced pieces of work have taken no longer than modelled, of
    how many since it was told last. Used by one thread."""

    EVERY_S = 2.0

    def __init__(self, what: str) -> None:
        self._what = what
        self._held = self._of = 0
        self._told_s = time.monotonic()

    def took(self, *, held: bool) -> None:
        self._held += held
        self._of += 1
        now_s = time.monotonic()
        if now_s - self._told_s >= self.EVERY_S:
            structlog.get_logger(__name__).debug("pace", what=self._what, held=self._held, of=self._of)
            self._held, self._of, self._told_s = 0, 0, now_s
