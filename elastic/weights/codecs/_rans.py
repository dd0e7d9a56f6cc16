"""Static rANS over tokens: frequency tables, how they travel, and the two steps of the coder.

A state is a 32-bit integer in [2^16, 2^32); it is renormalised by 16-bit words. Source: J. Duda, "Asymmetric
numeral systems", arXiv:1311.2540, §2; interleaving: F. Giesen, arXiv:1402.3392.
"""

# pyright: reportMissingImports=false
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
from numba import njit

from elastic.weights.codecs._integers import TOKENS
from elastic.weights.codecs._simd import load_u16, multiply_high
from elastic.weights.codecs.base import CodecError

PRECISION = 12
TOTAL = 1 << PRECISION
LOWEST_STATE = 1 << 16

_STEPS_PER_OCTAVE = 20
"""A quantised frequency is off by 1.7 % at most, which costs 0.0003 bits a token, and takes one byte."""

_WEIGHTS = np.array([0, *(round(16 * 2 ** (code / _STEPS_PER_OCTAVE)) for code in range(TOKENS - 1))], np.int64)

Frequencies = npt.NDArray[np.uint32]
"""(tables, TOKENS); each table sums to `TOTAL`."""


def quantise(histogram: npt.NDArray[np.int64]) -> npt.NDArray[np.uint8]:
    """Return a histogram of tokens with one byte for each token, 0 for tokens that do not occur."""
    codes = np.zeros(TOKENS, np.uint8)
    used = histogram > 0
    share = histogram[used] / max(int(histogram.sum()), 1)
    codes[used] = 1 + np.clip(np.rint(_STEPS_PER_OCTAVE * np.log2(share * TOTAL)), 0, TOKENS - 2).astype(np.uint8)
    return codes


def frequencies(codes: Sequence[npt.NDArray[np.uint8]]) -> Frequencies:
    """The tables that `codes` stand for; integers only, so that both sides get the same. None may be empty."""
    tables = np.zeros((len(codes), TOKENS), np.uint32)
    if codes:
        _normalise(_WEIGHTS[np.stack(codes)], tables)
    return tables


def pack_codes(tables: Iterable[npt.NDArray[np.uint8]]) -> bytes:
    """Each table up to its last used token, after the number of these."""
    packed = bytearray()
    for codes in tables:
        length = int(np.flatnonzero(codes)[-1]) + 1
        packed += bytes([length]) + codes[:length].tobytes()
    return bytes(packed)


def unpack_codes(data: bytes, tokens_max: Sequence[int]) -> list[npt.NDArray[np.uint8]]:
    """As many tables as `tokens_max` has bounds on their lengths. Raises `CodecError`."""
    tables: list[npt.NDArray[np.uint8]] = []
    at = 0
    for most in tokens_max:
        length = data[at] if at < len(data) else 0
        codes = np.frombuffer(data[at + 1 : at + 1 + length], np.uint8)
        if len(codes) != length or length > most or not codes.any():
            raise CodecError(f"frequency table of {length} tokens: empty, cut short or longer than {most}")
        tables.append(np.pad(codes, (0, TOKENS - length)))
        at += 1 + length
    if at != len(data):
        raise CodecError(f"{len(data) - at} bytes beyond the frequency tables")
    return tables


def starts(table: Frequencies) -> Frequencies:
    """Where each token's slots begin."""
    return (np.cumsum(table, axis=-1) - table).astype(np.uint32)


def lookup(table: Frequencies) -> npt.NDArray[np.uint32]:
    """(tables, TOTAL): for each slot its token, the token's frequency − 1 and the slot's place in it, packed."""
    slots = np.empty((len(table), TOTAL), np.uint32)
    _fill_slots(table, slots)
    return slots


@njit(cache=True, nogil=True)
def _normalise(weights, tables):  # type: ignore[no-untyped-def]
    for row in range(weights.shape[0]):
        total = weights[row].sum()
        excess = -TOTAL
        for token in range(TOKENS):
            if weights[row, token]:
                tables[row, token] = max(weights[row, token] * TOTAL // total, 1)
                excess += tables[row, token]
        while excess:
            largest = np.argmax(tables[row])
            cut = min(excess, max(np.int64(tables[row, largest]) // 8, 1)) if excess > 0 else excess
            tables[row, largest] -= cut
            excess -= cut


@njit(cache=True, nogil=True)
def _fill_slots(tables, slots):  # type: ignore[no-untyped-def]
    for row in range(tables.shape[0]):
        slot = 0
        for token in range(TOKENS):
            frequency = tables[row, token]
            for place in range(frequency):
                slots[row, slot] = token | ((frequency - 1) << 8) | (place << 20)
                slot += 1


def encoder_rows(table: Frequencies) -> npt.NDArray[np.uint64]:
    """(tables, TOKENS, 4): what `put` wants of each token: bound of the state, reciprocal, complement and bias."""
    counts = table.astype(np.uint64)
    rows = np.zeros((*table.shape, 4), np.uint64)
    used = counts > 0
    rows[..., 0] = counts << np.uint64(20)
    # ceil(2^64 / f), exact for 32-bit numerators; for f = 1 it is one short, and the bias makes up for it.
    rows[used, 1] = [min(-(-(1 << 64) // int(count)), (1 << 64) - 1) for count in counts[used]]
    rows[..., 2] = np.uint64(TOTAL) - counts
    rows[..., 3] = starts(table) + np.where(counts == 1, TOTAL - 1, 0)
    return rows


@njit(inline="always")
def put(state, row, words, at):  # type: ignore[no-untyped-def]
    """Push the token that `row` (of `encoder_rows`) is of; returns the state and the last written word's place.

    Words grow downwards; the one below the last is scratch.
    """
    words[at - 1] = np.uint16(state & np.uint64(0xFFFF))
    full = np.uint64(state >= row[0])
    at -= np.int64(full)
    state >>= full << np.uint64(4)
    return state + row[3] + multiply_high(state, row[1]) * row[2], at


@njit(inline="always")
def take(state, slot, data, at):  # type: ignore[no-untyped-def]
    """Pop the token that `slot` (of `lookup`) is of; reads two bytes of `data` whether it needs them or not."""
    frequency = ((slot >> np.uint64(8)) & np.uint64(TOTAL - 1)) + np.uint64(1)
    state = frequency * (state >> np.uint64(PRECISION)) + (slot >> np.uint64(20))
    low = np.uint64(state < np.uint64(LOWEST_STATE))
    word = np.uint64(load_u16(data, at)) & (np.uint64(0) - low)
    return (state << (low << np.uint64(4))) | word, at + 2 * np.int64(low)
