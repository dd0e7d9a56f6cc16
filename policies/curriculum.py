"""Which row of a data set a group is about: it follows from the group's number in the whole run, and nothing else.

So whatever dies, no row is repeated and none is left out. Each pass over the data has every row once.
"""

from collections.abc import Callable, Mapping
from hashlib import blake2b

ROUNDS = 4

Curriculum = Callable[[int, int, int], int]
"""The row for a group's number, of so many rows, with a seed."""


def in_order(number: int, rows: int, seed: int) -> int:
    """The rows as they come, over and over."""
    return number % rows


def shuffled(number: int, rows: int, seed: int) -> int:
    """Every pass in another order, which follows from the seed."""
    turn, place = divmod(number, rows)
    return permuted(place, rows, f"{seed}/{turn}")


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


CURRICULA: Mapping[str, Curriculum] = {"shuffled": shuffled, "in_order": in_order}
"""By the names that configurations give them."""
