"""Elastic. What a script with phases of its own needs is at hand as `elastic.phase`, and imported when it is used."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from elastic.pool.phases import (
        PhaseError,
        on_consolidate,
        phase,
        progress,
        should_yield,
        steps_done,
        yield_device,
    )

__all__ = ["PhaseError", "on_consolidate", "phase", "progress", "should_yield", "steps_done", "yield_device"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    # Never `from elastic import phases` here: what is asked for may be the submodule's own import.
    return getattr(importlib.import_module("elastic.pool.phases"), name)
