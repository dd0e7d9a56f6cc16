"""The digest is of everything that the scheduler knows."""

import dataclasses
from collections import deque
from collections.abc import Iterator, Mapping
from enum import Enum
from random import Random

import msgspec
import pytest

from elastic.core.digest import BY_KEY, LEFT_OUT, attributes, digest, left_out
from elastic.core.scheduler import Scheduler
from elastic.testing.faults.core.faults import draw_faults
from elastic.testing.faults.core.settings import draw_settings
from elastic.testing.faults.core.world import SimulatedWorld

OTHER = "something else"


def things(start: object) -> Iterator[object]:
    """Every object of the core's own that can be reached and changed, each once."""
    seen: set[int] = set()
    left: list[object] = [start]
    while left:
        thing = left.pop()
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        if isinstance(thing, Mapping):
            left += [*thing.keys(), *thing.values()]
        elif isinstance(thing, list | tuple | deque):
            left += thing
        elif type(thing).__module__.startswith("elastic.core.") and not isinstance(thing, msgspec.Struct | Enum | type):
            yield thing
            left += [getattr(thing, name) for name in attributes(thing)]


@pytest.fixture(scope="module")
def worlds() -> list[Scheduler]:
    """Schedulers in the middle of runs in which much goes on, and goes wrong; together they have every attribute."""
    found: list[Scheduler] = []
    for seed in (4, 8):
        rng = Random(seed)
        settings = draw_settings(rng)
        world = SimulatedWorld(seed, settings, draw_faults(rng, settings.fault_span_ns))
        world.loop.after(0, world.run.begin)
        world.loop.run(settings.fault_span_ns // 2)
        found.append(world.run.scheduler)
    return found


def test_no_attribute_is_forgotten(worlds) -> None:
    """Worlds' schedulers are hashed once for each of their attributes."""
    met: set[str] = set()
    for scheduler in worlds:
        before = digest(scheduler)
        for thing in things(scheduler):
            for name in attributes(thing):
                kind = type(thing).__name__
                met |= {f"{kind}.{name}", name}
                if left_out(kind, name) or f"{kind}.{name}" in BY_KEY:
                    continue
                kept = getattr(thing, name)
                setattr(thing, name, OTHER)
                assert digest(scheduler) != before, f"{kind}.{name} is not in the digest"
                setattr(thing, name, kept)
        assert digest(scheduler) == before
    stale = {*LEFT_OUT, *BY_KEY} - met
    assert not stale, f"there is no {stale}"


def test_what_is_replayed_has_an_order(worlds) -> None:
    """The order of a set is not the same in another process."""
    for scheduler in worlds:
        for thing in things(scheduler):
            for name in attributes(thing):
                assert not isinstance(getattr(thing, name), set | frozenset), f"{type(thing).__name__}.{name} is a set"


def test_dataclasses_have_no_attributes_but_their_fields(worlds) -> None:
    """Others would not be seen."""
    for thing in (thing for scheduler in worlds for thing in things(scheduler) if dataclasses.is_dataclass(thing)):
        assert set(attributes(thing)) == {field.name for field in dataclasses.fields(thing)}
