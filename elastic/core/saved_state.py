"""A scheduler's whole state as bytes, so that a run that goes on need not hear everything once more.

What the state consists of is found by walking the parts, as in `elastic.core.digest`: a new attribute is saved without
being named here. Plan, limits and policies are not saved: the scheduler that takes the state over has its own.
"""

import dataclasses
import io
import pickle
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Mapping
from enum import Enum
from typing import Any, cast

import msgspec

from elastic.core.scheduler import Scheduler

LEFT_OUT = ("handlers", "due", "_handlers", "_due", "plan", "limits", "policies")
"""Handlers and constructor arguments, which are not saved."""
_PLAIN = {
    **{("collections", kind.__name__): kind for kind in (Counter, OrderedDict, defaultdict, deque)},
    **{("builtins", kind.__name__): kind for kind in (set, frozenset)},
    ("msgspec._core", "UNSET"): msgspec.UNSET,
}


class StateError(Exception):
    """The bytes are no state that this program has saved."""


def save(scheduler: Scheduler, *others: object) -> bytes:
    """The state of the scheduler and, beside it, `others`: values made of plain types and this program's own."""
    pieces, given = _pieces(scheduler)
    names = {id(piece): name for name, piece in (pieces | given).items()}

    class Pickler(pickle.Pickler):
        def persistent_id(self, obj: object) -> str | None:
            return names.get(id(obj))

    out = io.BytesIO()
    state = {name: _attributes(piece) for name, piece in pieces.items()}
    Pickler(out, protocol=5).dump((state, others))
    return out.getvalue()


def restore(scheduler: Scheduler, saved: bytes) -> tuple[Any, ...]:
    """Put a fresh scheduler into a saved state; returns the `others`. Raises `StateError`, and it is of no use then.

    Nothing in the bytes is executed: they name data types of this program, and nothing else is looked up.
    """
    pieces, given = _pieces(scheduler)

    class Unpickler(pickle.Unpickler):
        def persistent_load(self, pid: str) -> object:
            return (pieces | given)[pid]

        def find_class(self, module_name: str, global_name: str, /) -> Any:
            if (plain := _PLAIN.get((module_name, global_name))) is not None:
                return plain
            if (module_name, global_name) == ("msgspec._utils", "rebuild"):
                return _rebuild
            found = super().find_class(module_name, global_name) if module_name.startswith("elastic.") else None
            if not isinstance(found, type) or found.__module__ != module_name or not _is_data(cast(type[Any], found)):
                raise StateError(f"{module_name}.{global_name} is no type of this program's state")
            return found

    try:
        state, others = Unpickler(io.BytesIO(saved)).load()
        for name, piece in pieces.items():
            if state[name].keys() != _attributes(piece).keys():
                raise StateError(f"{name} has other attributes: another version has saved it")
            vars(piece).update(state[name])
    except StateError:
        raise
    except Exception as error:
        raise StateError(f"{type(error).__name__}: {error}") from error
    return others


def _is_data(kind: type[Any]) -> bool:
    own = kind.__module__.startswith("elastic.core.")
    named_tuple = tuple in kind.__mro__ and hasattr(kind, "_fields")
    return own or named_tuple or issubclass(kind, (Enum, msgspec.Struct)) or dataclasses.is_dataclass(kind)


def _rebuild(kind: type, fields: Mapping[str, Any]) -> Any:
    """How msgspec has structs made that take their fields by name only."""
    return kind(**fields)


def _pieces(scheduler: Scheduler) -> tuple[dict[str, object], dict[str, object]]:
    """Return the parts that every scheduler has from its start, and its constructor arguments, by name."""
    run, parts = scheduler.pieces
    given: dict[str, object] = {"plan": run.plan, "limits": run.limits, "policies": run.policies}
    return {type(piece).__name__: piece for piece in (scheduler, run, *parts)}, given


def _attributes(piece: object) -> dict[str, Any]:
    return {name: value for name, value in vars(piece).items() if name not in LEFT_OUT}
