"""What is on the wire: decoders as plain as can be, and bytes that stay what they are."""

from itertools import chain, pairwise

import numpy as np
import pytest

from elastic.weights.bucket import Bucket, encode_bucket
from elastic.weights.codecs import CODECS
from elastic.weights.codecs.sums import apply_update, tile_sums

CLASSES, LEVELS = 12, 48


def changed_reference(old: int, change: int) -> int:
    """The pattern that is `change` (0: one up, 1: one down, 2: two up, …) in order of value from `old`."""
    rank = old ^ (0xFFFF if old >> 15 else 0x8000)
    rank = (rank + (-1 if change % 2 else 1) * (change // 2 + 1)) % 0x10000
    return rank ^ (0x8000 if rank >> 15 else 0xFFFF)


class Reader:
    def __init__(self, data: bytes) -> None:
        self.data = data

    def take(self, size: int) -> bytes:
        taken, self.data = self.data[:size], self.data[size:]
        assert len(taken) == size
        return taken

    def number(self, size: int) -> int:
        return int.from_bytes(self.take(size), "little")

    def varint(self) -> int:
        byte = self.number(1)
        return byte if byte < 0x80 else (byte & 0x7F) | self.varint() << 7


def decode_gap8(_shared: bytes, tile: bytes, old: list[int]) -> list[int]:
    reader = Reader(tile)
    count, gap_bytes, wides = (reader.varint() for _ in range(3))
    gaps, changes = reader.take(gap_bytes), reader.take(count)
    wide = [reader.number(2) for _ in range(wides)]
    assert not reader.data
    new, at, skipped = list(old), -1, 0
    found = iter(changes)
    for gap in gaps:
        skipped += gap
        if gap < 255:
            at += skipped + 1
            change = next(found)
            new[at] = changed_reference(old[at], wide.pop(0) if change == 255 else change)
            skipped = 0
    assert next(found, None) is None
    return new


def table_reference(codes: bytes) -> list[int]:
    """How many of 4096 slots each token has."""
    weights = [round(16 * 2 ** ((code - 1) / 20)) if code else 0 for code in codes]
    slots = [max(weight * 4096 // sum(weights), 1) if weight else 0 for weight in weights]
    while excess := sum(slots) - 4096:
        largest = slots.index(max(slots))
        slots[largest] -= min(excess, max(slots[largest] // 8, 1))
    return slots


class Rans:
    """Two states that take turns."""

    def __init__(self, states: tuple[int, int]) -> None:
        self.states = states

    def token(self, table: list[int], words: Reader) -> int:
        state, later = self.states
        slot, token = state % 4096, 0
        while slot >= table[token]:
            slot -= table[token]
            token += 1
        state = table[token] * (state // 4096) + slot
        if state < 1 << 16:
            state = state << 16 | words.number(2)
        self.states = later, state
        return token


def decode_exponent_class(shared: bytes, tile: bytes, old: list[int]) -> list[int]:
    head, reader = Reader(shared), Reader(tile)
    flags = head.number(LEVELS // 8)
    tables = {
        level: [table_reference(head.take(head.number(1))) for _ in range(2)]
        for level in range(LEVELS)
        if flags >> level & 1
    }
    assert not head.data
    counts = [reader.varint() for _ in range(CLASSES)]
    if not sum(counts):
        assert not reader.data
        return old
    top = reader.number(1)
    levels = [reader.number(1) if count else None for count in counts]
    size = reader.varint()
    raw, raw_bits = int.from_bytes(reader.take(size), "little"), 0
    first_gap, first_change, next_gap, next_change = (reader.number(4) for _ in range(4))
    gaps, changes = Rans((first_gap, next_gap)), Rans((first_change, next_change))

    def value(token: int) -> int:
        nonlocal raw, raw_bits
        bits = max(token // 8 - 1, 0)
        low, raw, raw_bits = raw % (1 << bits), raw >> bits, raw_bits + bits
        return (token - 8 * bits << bits) | low

    new = list(old)
    exponents = [bits >> 7 & 0xFF for bits in old]
    for number, (count, level) in enumerate(zip(counts, levels, strict=True)):
        members = [i for i, exponent in enumerate(exponents) if min(max(top - exponent, 0), CLASSES - 1) == number]
        rank = -1
        for _ in range(count):
            assert level is not None
            gap_table, change_table = tables[level]
            gap, change = gaps.token(gap_table, reader), changes.token(change_table, reader)
            rank += value(gap) + 1
            new[members[rank]] = changed_reference(old[members[rank]], value(change))
    assert {*gaps.states, *changes.states} == {1 << 16}, "where the encoder began"
    assert not reader.data
    assert size == -(-raw_bits // 8)
    return new


REFERENCES = {"gap8": decode_gap8, "exponent_class": decode_exponent_class}


def weights(kind: str, share: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(5)
    ends = np.array([0, 1, 64, 700, 3000])
    old = rng.integers(0, 1 << 16, ends[-1], dtype=np.uint16)
    if kind == "normal":
        old = (rng.normal(0, 0.02, ends[-1]).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    anything = rng.integers(0, 1 << 16, ends[-1], dtype=np.uint16)
    step = old + rng.choice([1, 2, 0xFFFF], ends[-1]).astype(np.uint16)
    return old, np.where(rng.random(ends[-1]) < share, anything if kind == "any" else step, old), ends


@pytest.mark.parametrize("share", [0.0, 0.002, 0.1, 1.0])
@pytest.mark.parametrize("kind", ["any", "normal"])
@pytest.mark.parametrize("name", sorted(REFERENCES))
def test_the_reference_decodes_what_is_encoded(name: str, kind: str, share: float):
    old, new, ends = weights(kind, share)
    bucket = CODECS[name].encode(old, new, ends)
    tiles = zip(pairwise([0, *ends]), pairwise([0, *bucket.payload_ends]), strict=True)
    decoded = [
        REFERENCES[name](bucket.shared, bucket.payload[first:last], old[begin:end].tolist())
        for (begin, end), (first, last) in tiles
    ]
    assert list(chain.from_iterable(decoded)) == new.tolist()


def golden_weights(name: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Small steps, a few leaps, a long gap, and no chance in it."""
    numbers = np.arange(420)
    old = (0x3C00 + numbers * 37 % 0x0300 + 0x8000 * (numbers % 2)).astype(np.uint16)
    new = old.copy()
    new[5:100:7] += 1
    new[6:100:11] -= 2
    new[50], new[380], new[419] = 0x7FC0, 0x8000, old[419] + 300
    ends = np.array([64, 400, 420])
    if name in ("dense", "raw"):
        return old[:20], new[:20], np.array([7, 20])
    return old, new, ends


GOLDEN = {
    "dense": (
        "0b00000093a564656e73650092173a28b52ffd200e7100003cbc3cbc3cbc3c00254a6f94badc28b52ffd201ad10000bd3dbd3dbd"
        "3dbd3ebe3ebe3ebe03284d7297bde1062b50739ac00000000000000000"
    ),
    "exponent_class": (
        "1700000093ae6578706f6e656e745f636c617373cd015693254969a8150000000004bdd8bdc93ad8d1a9a9000000000000000000"
        "0000000000000000000000000000000000000000000000000000000000000000000000000000000000000000a90500000000f169"
        "000000dd000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000"
        "00000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000"
        "dd04000000f1030000f11c00d1d1bd0000000000000000000000000000000000000000000000bd68d1d100bd0000000000000000"
        "00000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000"
        "000000000000000000000000000000000000000000000000000000000000000000000000000000bd03dd00dd03dd00dd030000f1"
        "04000000f10401030204000000000000007d0307030503020a059b83ef01aa1a330119d3b108664c662e02000301030000000000"
        "00007d0a080c08026607616e460171f14501b52324007f5b24000000000001000000000000007d0301179b190600dc1f0c000000"
        "0100000001000000000000000000"
    ),
    "gap8": (
        "0b00000093a46761703800932139400e0e0105000504010601040500060203060103000201000301020001ff00000a85090a0104"
        "03020600050401ff1c0003010002010300ffd97901010113ff57020000000000000000"
    ),
    "gap8_zstd": (
        "1000000093a9676170385f7a73746400932a4b5b28b52ffd20210901000e0e010500050401060104050006020306010300020100"
        "0301020001ff00000a8528b52ffd2018c10000090a010403020600050401ff1c0003010002010300ffd97928b52ffd2007390000"
        "01010113ff57020000000000000000"
    ),
    "raw": (
        "0900000093a372617700920e28003c25bc4a3c6fbc943cbabcdc3c03bd283d4dbd723d97bdbd3de1bd063e2bbe503e73be9a3ec0"
        "be0000000000000000"
    ),
}
ENCODED_ALIKE = ("exponent_class", "gap8", "raw")
"""Whereas zstd's versions need not write the same."""


@pytest.mark.parametrize("name", sorted(CODECS))
def test_bytes_that_were_written_once_are_read_for_ever(name: str):
    old, new, ends = golden_weights(name)
    blob = bytes.fromhex(GOLDEN[name])
    result = old.copy()
    apply_update(Bucket(blob).decode(old, ends), result)
    assert np.array_equal(result, new)
    if name in ENCODED_ALIKE:
        assert b"".join(encode_bucket(name, CODECS[name].encode(old, new, ends))).hex() == GOLDEN[name]


def test_sums_stay_what_they_are():
    _, new, ends = golden_weights("gap8")
    assert tile_sums(new, ends).tolist() == [16692853572249693174, 4809279284869892442, 7267061901426093869]
