"""What a process imports stays until it ends: no garbage collection need ever look through it."""

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def importing() -> Iterator[None]:
    """A context: what a process needs is imported here, which takes some two thirds of its usual time.

    Meanwhile no garbage is looked for, and all that is there afterwards is left out of garbage collections, also of
    the last one as the interpreter ends. structlog comes without Rich, by which it would show tracebacks to people.
    """
    collects, before = gc.isenabled(), len(sys.modules)
    gc.disable()
    try:
        if not {"structlog", "rich"} & sys.modules.keys():
            _import_structlog_alone()
        yield
    finally:
        if len(sys.modules) > before:
            gc.freeze()
        if collects:
            gc.enable()


def _import_structlog_alone() -> None:
    sys.modules["rich"] = None  # type: ignore[assignment]  # Python's way to say that there is none.
    try:
        import structlog  # noqa: F401
    finally:
        del sys.modules["rich"]
