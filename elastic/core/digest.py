"""A hash of the scheduler's whole state: two runs in the same state have the same digest (invariant 13).

What is hashed is found by walking the objects, so that a new attribute counts without being named here. The exceptions
are named, each with its reason.
"""

import hashlib
from collections import deque
from collections.abc import Mapping
from functools import cache
from typing import Any, cast

import msgspec

from elastic.core.scheduler import Scheduler

DIGEST_BYTES = 16

LEFT_OUT: Mapping[str, str] = {
    "handlers": "who hears what never changes",
    "due": "who is called for what never changes",
    "Scheduler._handlers": "who hears what never changes",
    "Scheduler._due": "who is called for what never changes",
    "Scheduler._parts": "all of them are attributes of its own",
    "Scheduler._control_manager": "keeps nothing: what it has done is in `RunState.controls`",
    "Scheduler._evaluation_manager": "keeps nothing: what it does is in `RunState.evaluation` and `evaluated`",
    "Scheduler._serving_manager": "keeps nothing: what it knows is in `RunState.serving`",
    "ServingManager._run": "as `Scheduler._serving_manager`",
    "ServingManager._leases": "as `Scheduler._serving_manager`",
    "StepController._serving": "as `Scheduler._serving_manager`",
    "EvaluationManager._run": "as `Scheduler._evaluation_manager`",
    "EvaluationManager._turns": "as `Scheduler._evaluation_manager`",
    "EvaluationManager._rewards": "as `Scheduler._evaluation_manager`",
    "GroupManager._evaluations": "as `Scheduler._evaluation_manager`",
    "StepController._evaluations": "as `Scheduler._evaluation_manager`",
    "ControlManager._run": "as `Scheduler._control_manager`",
    "ControlManager._leases": "as `Scheduler._control_manager`",
    "RunState.groups_launched": "counts the groups that were started, each of which was in the digest",
    "RunState.launched_of": "as `groups_launched`, from which it follows",
    "RunState.policies": "they decide, and keep nothing",
    "Fleet._loads": "an index of `workers`, brought up to date when it is asked for",
    "Fleet._indexed": "as `_loads`",
    "Fleet._opened": "whether dispatch has seen what `_loads` has: it would decide the same once more",
    "Scheduler._followed": "whether the step was told of what waits, as `Fleet.help_changed`",
    "Fleet.help_changed": "whether the trainer's device was told of `_helping`: it would do the same once more",
    "Fleet._places": "an index of `workers`, as `_loads`",
    "Fleet.places": "as `_places`",
    "Fleet._out_of_order": "as `_loads`: whom it does not have right yet",
    "Ledger.closed_nano_usd_max": "follows from the books that are closed, or folded",
    "LoadEnds._alike": "an index of the workers of `Fleet`, as `Fleet._loads`",
    "LoadEnds._placed": "as `_alike`",
    "Patience._known": "follows from `_longest`",
    "Step._group_of": "an index of `groups` by their members",
    "Timers._heap": "an index of `_waits`, brought up to date when it is asked for",
    "Timers._old_heap": "as `_heap`",
    "Timers._queued": "as `_heap`",
    "TurnQueue.changed": "whether dispatch has seen the queue, as `Fleet._opened`",
    "TurnQueue._needs": "an index of the turns of `Turns.live` that are queued",
    "TurnQueue._lines": "as `_needs`, cleaned up as turns come to the head",
    "TurnQueue.heads": "as `_needs`",
    "Turns.moving": "an index of the turns in `live` that are on their way",
}
"""Attributes that follow from others, or hold no state: `Class.attribute`, or an attribute of any class."""

WHILE_EMPTY: Mapping[str, str] = {
    "Ledger.strays_nano_usd": "as `folded`: runs that are billed for leases alone",
    "Ledger.folded": "runs of few leases have the digests that they had before books could be folded",
    "Ledger._folded_aliens": "as `folded`",
    "LeaseTable.failed_starts": "runs whose workers start have the digests that they had before this was kept",
    "LeaseTable.stopped": "as `failed_starts`",
    "RunState.evaluated": "runs that are not evaluated have the digests that they had before any was",
    "RunState.evaluation": "as `evaluated`, and none is under way",
    "RunState.serving": "runs with groups have the digests that they had before there were any without",
    "RunState.rows": "runs whose rows follow from their groups' places have none",
    "RunState.controls": "runs that were told nothing have the digests that they had before they could be",
}
"""Attributes that are left out while they are false."""

BY_KEY: Mapping[str, str] = {
    "Fleet._of_lease": "the workers are in `workers`",
    "Step._in_state": "the groups are in `groups`",
}
"""Attributes that lead to objects which are in the digest elsewhere: only under which keys, and in which order."""


def digest(scheduler: Scheduler) -> str:
    """The state as a hexadecimal hash. Order counts, since the core's decisions may depend on it."""
    return hashlib.blake2b(_Walk().encode(scheduler), digest_size=DIGEST_BYTES).hexdigest()


class _Walk:
    """msgspec goes through dataclasses, structs and containers; this leads it through the other objects, each once."""

    def __init__(self) -> None:
        self._seen: set[int] = set()
        self.encode = msgspec.msgpack.Encoder(enc_hook=self._enter).encode

    def _enter(self, thing: Any) -> Any:
        if isinstance(thing, deque):
            return list(cast("deque[Any]", thing))
        if id(thing) in self._seen:
            return type(thing).__name__
        self._seen.add(id(thing))
        slots = _slots(thing.__class__)
        if len(slots) == 1 and not hasattr(thing, "__dict__"):
            return getattr(thing, slots[0])
        kind, found = type(thing).__name__, dict[str, Any]()
        for name in attributes(thing):
            if not left_out(kind, name):
                value = getattr(thing, name)
                if f"{kind}.{name}" in WHILE_EMPTY and not value:
                    continue
                found[name] = _keys(value) if f"{kind}.{name}" in BY_KEY else value
        return found


@cache
def _slots(kind: type) -> tuple[str, ...]:
    return tuple(name for base in kind.__mro__ for name in getattr(base, "__slots__", ()))


def attributes(thing: object) -> list[str]:
    """Every attribute that an instance has, in slots or not."""
    return [*(name for name in _slots(thing.__class__) if hasattr(thing, name)), *getattr(thing, "__dict__", ())]


def left_out(kind: str, name: str) -> bool:
    return name in LEFT_OUT or f"{kind}.{name}" in LEFT_OUT


def _keys(value: Any) -> Any:
    """The keys of nested dictionaries, without what the innermost lead to."""
    if isinstance(value, dict):
        return [(key, _keys(inner)) for key, inner in value.items()]  # pyright: ignore[reportUnknownVariableType]
    return None
