"""How codecs write a gap and a pattern's change as small integers. All without branches: they would be coin tosses."""

# pyright: reportMissingImports=false
import numpy as np
from numba import njit

from elastic.weights.codecs._simd import highest_bit

TOKENS = 256
"""A natural number is a token and raw bits: below 16 the number itself, above eight tokens an octave."""


def token_limit(bits: int) -> int:
    """How many tokens integers of at most `bits` bits have."""
    return 16 + 8 * (bits - 4)


@njit(inline="always")
def raw_bits_in(value):  # type: ignore[no-untyped-def]
    return highest_bit(np.uint64(value | 8)) - 3


@njit(inline="always")
def token_of(value, raw_bits):  # type: ignore[no-untyped-def]
    """The token of a number with `raw_bits_in` it; the raw bits are its lowest."""
    return (raw_bits << 3) + (value >> raw_bits)


@njit(inline="always")
def raw_bits_after(token):  # type: ignore[no-untyped-def]
    return max((token >> 3) - 1, 0)


@njit(inline="always")
def value_of(token, raw_bits, raw):  # type: ignore[no-untyped-def]
    return ((token - (raw_bits << 3)) << raw_bits) | raw


@njit(inline="always")
def change_of(old, new):  # type: ignore[no-untyped-def]
    """By how many representable numbers `new` differs from `old`, as a natural number: 0 is one up, 1 one down, …

    Patterns count in order of value, through zero, so that a change of sign near zero stays small. Any two
    different patterns have one, below 2^16.
    """
    difference = (ordinal(new) - ordinal(old)) & 0xFFFF
    steps = difference - ((difference & 0x8000) << 1)
    return ((steps << 1) ^ (steps >> 63)) - ((steps > 0) << 1)


@njit(inline="always")
def changed(old, change):  # type: ignore[no-untyped-def]
    """Return the pattern whose `change_of` from `old` is `change`."""
    down = change & 1
    steps = ((change >> 1) + 1) ^ -down
    return pattern((ordinal(old) + steps + down) & 0xFFFF)


@njit(inline="always")
def ordinal(bits):  # type: ignore[no-untyped-def]
    return bits ^ (0x8000 | (0x7FFF * (bits >> 15)))


@njit(inline="always")
def pattern(number):  # type: ignore[no-untyped-def]
    return number ^ (0xFFFF - 0x7FFF * (number >> 15))
