"""Which row of a data set each group of an environment is about, where a curriculum orders them. Pure.

A pass over the data has every row once. A curriculum says as a pass begins which rows come first in it, and which last;
those between them come shuffled. What it is told of rows is what groups about them came to, in the order of the events.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import islice
from typing import NamedTuple, Protocol

from elastic.core.types import PolicyFault

ROUNDS = 4
SHOWN_CHARACTERS = 60
KNOWN_MAX = 65_536
"""Rows whose rewards are remembered: those of which was heard last."""


class PassView(NamedTuple):
    """What a curriculum is told as a pass begins: its number, how many rows there are, and the mean reward of the last
    group about a row, by row, of those of which was heard lately."""

    number: int
    rows: int
    rewards: Mapping[int, float]


class PassOrder(NamedTuple):
    first: Sequence[int] = ()
    last: Sequence[int] = ()


class Curriculum(Protocol):
    """The rows of one environment: how many there are, from which seed they are shuffled, and in which order they
    come."""

    @property
    def rows(self) -> int: ...

    @property
    def seed(self) -> int: ...

    def order(self, view: PassView, /) -> PassOrder: ...


@dataclass(slots=True)
class RowProgress:
    """How far an environment is in its data."""

    rewards: dict[int, float] = field(default_factory=dict[int, float])
    number: int = -1
    """The number of the pass."""
    given: int = 0
    """Rows of this pass that groups have had."""
    walked: int = 0
    """How far along the shuffled rows that is."""
    first: list[int] = field(default_factory=list[int])
    last: list[int] = field(default_factory=list[int])
    set_apart: set[int] = field(default_factory=set[int])
    """Those that come first or last in this pass."""

    def next_row(self, curriculum: Curriculum) -> int:
        """The row of the next group. Raises `PolicyFault`."""
        if self.number < 0 or self.given == curriculum.rows:
            self._begin(curriculum)
        place = self.given
        self.given += 1
        if place < len(self.first):
            return self.first[place]
        if place >= curriculum.rows - len(self.last):
            return self.last[place - (curriculum.rows - len(self.last))]
        while True:
            row = permuted(self.walked, curriculum.rows, f"{curriculum.seed}/{self.number}")
            self.walked += 1
            if row not in self.set_apart:
                return row

    def _begin(self, curriculum: Curriculum) -> None:
        number, rows = self.number + 1, curriculum.rows
        first, last = listed(curriculum.order(PassView(number, rows, dict(self.rewards))), rows)
        self.number, self.given, self.walked = number, 0, 0
        self.first, self.last, self.set_apart = first, last, {*first, *last}

    def note(self, row: int, reward: float) -> None:
        """Remember the mean reward of the last group about this row."""
        self.rewards.pop(row, None)
        self.rewards[row] = reward
        if len(self.rewards) > KNOWN_MAX:
            del self.rewards[next(iter(self.rewards))]


def listed(order: PassOrder, rows: int) -> tuple[list[int], list[int]]:
    """The rows that come first and last in a pass over so many. Raises `PolicyFault` for what is no such order."""
    try:
        first, last = (list(islice(of_pass, rows + 1)) for of_pass in (order.first, order.last))
    except Exception as error:
        found = f"{order!r:.{SHOWN_CHARACTERS}} ({type(order).__name__})"
        raise PolicyFault(f"returned {found}; allowed: a PassOrder, of lists of rows") from error
    seen = set[int]()
    for row in (*first, *last):
        if type(row) is not int or not 0 <= row < rows:
            found = f"{row!r:.{SHOWN_CHARACTERS}} ({type(row).__name__})"
            raise PolicyFault(f"returned {found}, which is no row; allowed: an int from 0 to {rows - 1}")
        if row in seen:
            raise PolicyFault(f"returned row {row} twice; allowed: each row once in a pass")
        seen.add(row)
    return first, last


def permuted(place: int, size: int, key: str) -> int:
    """Where a place from 0 to `size` - 1 goes in a permutation that follows from the key.

    A Feistel network over the next even number of bits, walked until it comes back below `size`: no table is needed.
    """
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    while True:
        left, right = place >> half, place & mask
        for number in range(ROUNDS):
            left, right = right, left ^ (_hash(right, number, key) & mask)
        place = left << half | right
        if place < size:
            return place


def _hash(value: int, number: int, key: str) -> int:
    return int.from_bytes(blake2b(f"{key}/{number}/{value}".encode(), digest_size=8).digest(), "big")
