"""The logs of all our processes: one JSON object a line, tracebacks as Python prints them.

structlog's own default shows the local variables of every frame, and tokens and session keys are among them. So that is
left behind also where nobody has said where logs go: in somebody else's process, and in tests.
"""

import logging
import os
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


def log_to(descriptor: int) -> None:
    """Structured logs of this process go to an open file from now on."""
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.TimeStamper(fmt="iso"),
            structlog.processors.add_log_level,
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=lambda *_: _LogFile(descriptor),
        cache_logger_on_first_use=False,
    )
