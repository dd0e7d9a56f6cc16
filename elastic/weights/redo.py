"""The files of a `KeptStore`: what is held, and the redo log of what is being written over it.

Nothing in them is believed for being there: what weights should be is in the manifest that their trainer signed, which
lies beside them, and every index and length is checked before it is used.

A log is the length of its head (8 bytes, little-endian), the head (a `LogRecord` as JSON), the tag of each tile, and
for each change its indices and its values, everything padded to 8 bytes. Tags change while it is in use, the rest does
not.
"""

import mmap
import struct
from collections.abc import Callable, Iterable, Iterator
from itertools import compress
from typing import Any, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from elastic.weights.codecs.base import BucketUpdate, ascend
from elastic.weights.delta import BaseVersion, DeltaManifest, decode_delta_manifest, state_of
from elastic.weights.digest import blob_digest_of
from elastic.weights.errors import WeightsCorrupted
from elastic.weights.held import Change, Held, Proof, Staged, Tiles
from elastic.weights.manifest import Manifest, Natural, decode_manifest
from elastic.weights.relay import Buffer
from elastic.weights.signing import Trust
from elastic.weights.tensors import Bits

SCHEMA_VERSION = 2

PATTERNS_NAME = r"patterns-[0-9a-f]{16}"
"""The name of a file of patterns, beside the one that names it. No other path is followed."""

_LENGTH = struct.Struct("<Q")
_ALIGNMENT = 8

T = TypeVar("T", bound="HeldRecord | LogRecord")


class HeldRecord(msgspec.Struct, frozen=True, kw_only=True):
    """`Held`: which file has the patterns, which tensors they are of, and what the trainer signed of them."""

    patterns: str
    hosted: tuple[bool, ...]
    signed: bytes
    keyframe: bool
    schema_version: int = SCHEMA_VERSION


class ChangeRecord(msgspec.Struct, frozen=True, array_like=True):
    base: BaseVersion
    version: Natural
    first_tile: Natural
    begin: Natural
    end: Natural
    ends: list[Natural]
    dense: bool


class LogRecord(msgspec.Struct, frozen=True, kw_only=True):
    held: HeldRecord
    """What there will be."""
    base: Natural
    changes: tuple[ChangeRecord, ...]
    checksum: str
    """XXH3-128 of what comes after the tags."""
    schema_version: int = SCHEMA_VERSION


def record_of(held: Held, file: str) -> HeldRecord:
    return HeldRecord(patterns=file, hosted=held.hosted, signed=held.proof.signed, keyframe=held.proof.keyframe)


def decode_record(data: bytes, kind: type[T]) -> T:
    """Raises `WeightsCorrupted`."""
    try:
        record = msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise WeightsCorrupted(f"{kind.__name__}: {error}") from error
    if record.schema_version != SCHEMA_VERSION:
        raise WeightsCorrupted(
            f"{kind.__name__}: schema version {record.schema_version}; this program reads {SCHEMA_VERSION}"
        )
    return record


def held_of(record: HeldRecord, trust: Trust, open_patterns: Callable[[int], Bits]) -> Held:
    """What the record is of, with so many patterns, unchecked. Raises `WeightsCorrupted` where it is not signed."""
    proof = Proof(record.signed, record.keyframe)
    manifest = _manifest_of(proof, trust)
    if len(record.hosted) != len(manifest.tensors):
        raise WeightsCorrupted(f"{len(record.hosted)} of {len(manifest.tensors)} tensors are said to be held or not")
    elements = sum(entry.size_bytes for entry in compress(manifest.tensors, record.hosted)) // 2
    sums = np.frombuffer(manifest.tile_sums, "<u8").astype(np.uint64)
    return Held(
        manifest.version,
        manifest.run,
        manifest.model,
        manifest.tensors,
        record.hosted,
        open_patterns(elements),
        {manifest.tile_elements: (state_of(sums), sums)},
        proof,
    )


def check_patterns(held: Held, trust: Trust) -> None:
    """Raises `WeightsCorrupted` unless these are the patterns that were signed: as a whole, or else tile by tile."""
    manifest = _manifest_of(held.proof, trust)
    if isinstance(manifest, Manifest) and all(held.hosted):
        if blob_digest_of([held.bits.data]) != manifest.blob_digest:
            raise WeightsCorrupted("their digest is not the manifest's")
    elif wrong := held.wrong_tiles():
        raise WeightsCorrupted(f"the sums of {len(wrong)} tiles are wrong")


def _manifest_of(proof: Proof, trust: Trust) -> Manifest | DeltaManifest:
    return decode_manifest(proof.signed, trust) if proof.keyframe else decode_delta_manifest(proof.signed, trust)


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
    head = msgspec.json.encode(record)
    head += b" " * (-len(head) % _ALIGNMENT)
    return [_LENGTH.pack(len(head)), head, staged.tags.tobytes(), *arrays]


def read_log(log: mmap.mmap, bits: Bits, trust: Trust, held: Held | None = None) -> Staged:
    """What was written for `bits`, with its tags in the log. Raises `WeightsCorrupted` or `ValueError`."""
    at = _LENGTH.size + int(np.frombuffer(log, "<u8", 1)[0])
    record = decode_record(log[_LENGTH.size : at], LogRecord)
    if held is None:
        held = held_of(record.held, trust, lambda elements: _of_size(bits, elements))

    def take(dtype: type[np.generic], count: int) -> npt.NDArray[Any]:
        nonlocal at
        array = np.frombuffer(log, dtype, count, at)
        at += array.nbytes + -array.nbytes % _ALIGNMENT
        return array

    size, (_, sums) = next(iter(held.state.items()))
    tiles = Tiles(held.tensors, held.hosted, size)
    tags = take(np.int64, len(sums))
    if xxhash.xxh3_128_hexdigest(memoryview(log)[at:]) != record.checksum:
        raise WeightsCorrupted("log: its checksum does not match")
    changes: list[Change] = []
    for change in record.changes:
        ends = np.array(change.ends, np.int64)
        count = change.ends[-1] if change.ends else 0
        index = None if change.dense else take(np.uint32, count)
        update = BucketUpdate(index, take(np.uint16, count), ends, np.zeros(len(ends), np.uint64))
        changes.append(Change(change.base, change.version, change.first_tile, change.begin, change.end, update))
        _check_bounds(changes[-1], tiles)
    return Staged(held, record.base, changes, tags)


def _of_size(bits: Bits, elements: int) -> Bits:
    if elements != bits.size:
        raise WeightsCorrupted(f"log of {elements} elements; {bits.size} are held")
    return bits


def _check_bounds(change: Change, tiles: Tiles) -> None:
    """Raises `WeightsCorrupted` unless it writes within its tiles: compiled code does not look."""
    first, last = change.first_tile, change.first_tile + len(change.update.ends)
    index, ends = change.update.index, change.update.ends
    if last >= len(tiles.begins) or tiles.elements(slice(first, last)) != slice(change.begin, change.end):
        raise WeightsCorrupted(f"log: a change of elements {change.begin} to {change.end} is not of whole tiles")
    inside = (
        np.array_equal(ends, tiles.ends[first:last] - change.begin)
        if index is None
        else ascend(ends, len(index)) and (not index.size or int(index.max()) < change.end - change.begin)
    )
    if not inside:
        raise WeightsCorrupted(f"log: a change goes beyond elements {change.begin} to {change.end}")


def _padded(changes: Iterable[Change]) -> Iterator[Buffer]:
    for change in changes:
        for array in (change.update.index, change.update.value):
            if array is not None:
                yield array.tobytes()
                yield bytes(-array.nbytes % _ALIGNMENT)
