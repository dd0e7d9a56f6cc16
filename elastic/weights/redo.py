"""The files of a `KeptStore`: what is held, and the redo log of what is being written over it.

A log is the length of its head (8 bytes, little-endian), the head (a sealed `LogRecord`), the tag of each tile, and for
each change its indices and its values, everything padded to 8 bytes. Tags change while it is in use, the rest does not.
"""

import mmap
import struct
from collections.abc import Iterable, Iterator
from itertools import compress
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from elastic.weights.codecs.base import BucketUpdate
from elastic.weights.delta import state_of
from elastic.weights.errors import WeightsCorrupted
from elastic.weights.held import Change, Held, Staged
from elastic.weights.manifest import TensorEntry, check_tensors, open_seal, seal
from elastic.weights.relay import Buffer
from elastic.weights.tensors import Bits

SCHEMA_VERSION = 1

_LENGTH = struct.Struct("<Q")
_ALIGNMENT = 8


class HeldRecord(msgspec.Struct, frozen=True, kw_only=True):
    """`Held`, with a file for its patterns."""

    run: str
    version: int
    model: dict[str, Any]
    tensors: tuple[TensorEntry, ...]
    hosted: tuple[bool, ...]
    patterns: str
    tile_elements: int
    tile_sums: bytes
    schema_version: int = SCHEMA_VERSION


class ChangeRecord(msgspec.Struct, frozen=True, array_like=True):
    base: int
    version: int
    first_tile: int
    begin: int
    end: int
    ends: list[int]
    dense: bool


class LogRecord(msgspec.Struct, frozen=True, kw_only=True):
    held: HeldRecord
    """What there will be."""
    base: int
    changes: tuple[ChangeRecord, ...]
    checksum: str
    """XXH3-128 of what comes after the tags."""
    schema_version: int = SCHEMA_VERSION


def record_of(held: Held, file: str) -> HeldRecord:
    size, (_, sums) = next(iter(held.state.items()))
    return HeldRecord(
        run=held.run,
        version=held.version,
        model=held.model,
        tensors=held.tensors,
        hosted=held.hosted,
        patterns=file,
        tile_elements=size,
        tile_sums=sums.astype("<u8").tobytes(),
    )


def held_of(record: HeldRecord, bits: Bits) -> Held:
    sums = np.frombuffer(record.tile_sums, "<u8").astype(np.uint64)
    state = {record.tile_elements: (state_of(sums), sums)}
    return Held(record.version, record.run, record.model, record.tensors, record.hosted, bits, state)


def elements_of(record: HeldRecord) -> int:
    """How many patterns there are. Raises `WeightsCorrupted`."""
    check_tensors(record.tensors)
    if len(record.hosted) != len(record.tensors):
        raise WeightsCorrupted(f"{len(record.hosted)} of {len(record.tensors)} tensors are said to be held or not")
    return sum(entry.size_bytes for entry in compress(record.tensors, record.hosted)) // 2


def write_log(staged: Staged, file: str) -> list[Buffer]:
    """The log's parts."""
    assert staged.base is not None
    arrays = list(_padded(staged.changes))
    checksum = xxhash.xxh3_128()
    for array in arrays:
        checksum.update(array)
    record = LogRecord(
        held=record_of(staged.held, file),
        base=staged.base,
        changes=tuple(
            ChangeRecord(*change[:5], change.update.ends.tolist(), change.update.index is None)
            for change in staged.changes
        ),
        checksum=checksum.hexdigest(),
    )
    head = seal(record)
    head += b" " * (-len(head) % _ALIGNMENT)
    return [_LENGTH.pack(len(head)), head, staged.tags.tobytes(), *arrays]


def read_log(log: mmap.mmap, bits: Bits, held: Held | None = None) -> Staged:
    """What was written for `bits`, with its tags in the log. Raises `WeightsCorrupted` or `ValueError`."""
    at = _LENGTH.size + int(np.frombuffer(log, "<u8", 1)[0])
    record = open_seal(log[_LENGTH.size : at], LogRecord, SCHEMA_VERSION)
    if elements_of(record.held) != bits.size:
        raise WeightsCorrupted(f"log of {elements_of(record.held)} elements; {bits.size} are held")

    def take(dtype: type[np.generic], count: int) -> npt.NDArray[Any]:
        nonlocal at
        array = np.frombuffer(log, dtype, count, at)
        at += array.nbytes + -array.nbytes % _ALIGNMENT
        return array

    tags = take(np.int64, len(record.held.tile_sums) // 8)
    if xxhash.xxh3_128_hexdigest(memoryview(log)[at:]) != record.checksum:
        raise WeightsCorrupted("log: its checksum does not match")
    changes: list[Change] = []
    for change in record.changes:
        ends = np.array(change.ends, np.int64)
        count = change.ends[-1] if change.ends else 0
        index = None if change.dense else take(np.uint32, count)
        update = BucketUpdate(index, take(np.uint16, count), ends, np.zeros(len(ends), np.uint64))
        changes.append(Change(change.base, change.version, change.first_tile, change.begin, change.end, update))
    return Staged(held or held_of(record.held, bits), record.base, changes, tags)


def _padded(changes: Iterable[Change]) -> Iterator[Buffer]:
    for change in changes:
        for array in (change.update.index, change.update.value):
            if array is not None:
                yield array.tobytes()
                yield bytes(-array.nbytes % _ALIGNMENT)
