"""Gaps and changes as bytes with an escape: the fast codec, for links that are not the bottleneck.

Tile: the number of changed elements, of gap bytes and of wide changes (varints), then the three arrays. A gap is the
number of unchanged elements before a changed one, 255 standing for "255 more, and on"; a change (see `_integers`)
of 255 or more is a byte 255 and 16 bits among the wide ones.
"""

# pyright: reportMissingImports=false
import numpy as np
from numba import njit

from elastic.weights.blobs import Buffer
from elastic.weights.codecs._integers import change_of, changed
from elastic.weights.codecs._simd import LANES, changed_mask, load_u16, lowest_bit
from elastic.weights.codecs._varint import put_varint, take_varint
from elastic.weights.codecs.base import (
    PADDING,
    Bits,
    BucketUpdate,
    CodecError,
    EncodedBucket,
    Ends,
    as_bytes,
    as_ends,
    check_decode,
    check_encode,
    flat,
)
from elastic.weights.codecs.sums import mix, sum_change

_ESCAPE = 255
_HEADER_BYTES_MAX = 15


class Gap8:
    name = "gap8"

    def encode(self, old: Bits, new: Bits, tile_ends: Ends) -> EncodedBucket:
        check_encode(old, new, tile_ends)
        ends = as_ends(tile_ends)
        changed_counts, payload_ends = np.zeros((2, len(ends)), np.int64)
        sum_changes = np.zeros(len(ends), np.uint64)
        # Room for the worst case; what is not written is never touched, and so takes no memory.
        payload = np.empty(4 * old.size + old.size // _ESCAPE + _HEADER_BYTES_MAX * len(ends) + PADDING, np.uint8)
        size = _encode(flat(old), flat(new), ends, payload, payload_ends, changed_counts, sum_changes)
        payload[size : size + PADDING] = 0
        return EncodedBucket(b"", payload[: size + PADDING].tobytes(), payload_ends, changed_counts, sum_changes)

    def decode(self, shared: Buffer, payload: Buffer, payload_ends: Ends, old: Bits, tile_ends: Ends) -> BucketUpdate:
        check_decode(payload, payload_ends, old, tile_ends)
        data, data_ends, ends = as_bytes(payload), as_ends(payload_ends), as_ends(tile_ends)
        counts = np.zeros((len(ends), 3), np.int64)
        bad = _read_headers(data, data_ends, ends, counts)
        if bad >= 0:
            raise CodecError(f"tile {bad}: its parts do not add up")
        total = int(counts[:, 0].sum())
        index, value = np.empty(total, np.uint32), np.empty(total, np.uint16)
        sum_changes = np.zeros(len(ends), np.uint64)
        bad = _decode(data, data_ends, flat(old), ends, counts, index, value, sum_changes)
        if bad >= 0:
            raise CodecError(f"tile {bad}: its changes do not fit in it")
        return BucketUpdate(index, value, np.cumsum(counts[:, 0]), sum_changes)


@njit(cache=True, nogil=True, error_model="numpy")
def _encode(old, new, tile_ends, payload, payload_ends, changed_counts, sum_changes):  # type: ignore[no-untyped-def]
    largest = 0
    begin = 0
    for tile in range(tile_ends.size):
        largest = max(largest, tile_ends[tile] - begin)
        begin = tile_ends[tile]
    gaps = np.empty(largest + largest // _ESCAPE + 1, np.uint8)
    changes = np.empty(largest, np.uint8)
    wide = np.empty(largest, np.uint16)
    padded_old, padded_new = np.zeros(LANES, np.uint16), np.zeros(LANES, np.uint16)
    begin, at = 0, 0
    for tile in range(tile_ends.size):
        end = tile_ends[tile]
        whole = begin + (end - begin) // LANES * LANES
        after, gap_count, count, wide_count = begin, 0, 0, 0
        total = np.uint64(0)
        for start in range(begin, end, LANES):
            if start < whole:
                differs = changed_mask(old, new, start)
            else:
                for i in range(end - whole):
                    padded_old[i], padded_new[i] = old[whole + i], new[whole + i]
                for i in range(end - whole, LANES):
                    padded_new[i] = padded_old[i]
                differs = changed_mask(padded_old, padded_new, 0)
            while differs:
                position = start + lowest_bit(differs)
                differs &= differs - np.uint64(1)
                gap = position - after
                after = position + 1
                while gap >= _ESCAPE:
                    gaps[gap_count] = _ESCAPE
                    gap_count += 1
                    gap -= _ESCAPE
                gaps[gap_count] = gap
                gap_count += 1
                before, now = np.int64(old[position]), np.int64(new[position])
                change = change_of(before, now)
                changes[count] = min(change, _ESCAPE)
                count += 1
                if change >= _ESCAPE:
                    wide[wide_count] = change
                    wide_count += 1
                total += mix(position - begin, now) - mix(position - begin, before)
        at = put_varint(payload, at, count)
        at = put_varint(payload, at, gap_count)
        at = put_varint(payload, at, wide_count)
        for i in range(gap_count):
            payload[at + i] = gaps[i]
        at += gap_count
        for i in range(count):
            payload[at + i] = changes[i]
        at += count
        for i in range(wide_count):
            payload[at] = wide[i] & 0xFF
            payload[at + 1] = wide[i] >> 8
            at += 2
        payload_ends[tile], changed_counts[tile], sum_changes[tile] = at, count, total
        begin = end
    return at


@njit(cache=True, nogil=True, error_model="numpy")
def _read_headers(data, data_ends, tile_ends, counts):  # type: ignore[no-untyped-def]
    begin, at = 0, 0
    for tile in range(tile_ends.size):
        data_end = data_ends[tile]
        for part in range(3):
            counts[tile, part], at = take_varint(data, at, data_end)
        count, gap_count, wide_count = counts[tile]
        if count > tile_ends[tile] - begin or at + gap_count + count + 2 * wide_count != data_end:
            return tile
        begin, at = tile_ends[tile], data_end
    return -1


@njit(cache=True, nogil=True, error_model="numpy")
def _decode(data, data_ends, old, tile_ends, counts, index, value, sum_changes):  # type: ignore[no-untyped-def]
    before = np.empty(counts[:, 0].max() if counts.size else 0, np.uint16)
    begin, found = 0, 0
    for tile in range(tile_ends.size):
        count, gap_count, wide_count = counts[tile]
        wide_end = data_ends[tile]
        wide_at = wide_end - 2 * wide_count
        change_at = wide_at - count
        gap_at, gap_end = change_at - gap_count, change_at
        position = begin - 1
        for i in range(found, found + count):
            position += 1
            while gap_at < gap_end and data[gap_at] == _ESCAPE:
                position += _ESCAPE
                gap_at += 1
            if gap_at >= gap_end:
                return tile
            position += np.int64(data[gap_at])
            gap_at += 1
            change = np.int64(data[change_at])
            change_at += 1
            if change == _ESCAPE:
                if wide_at >= wide_end:
                    return tile
                change = np.int64(load_u16(data, wide_at))
                wide_at += 2
            if position >= tile_ends[tile]:
                return tile
            index[i] = position
            value[i] = change
        if gap_at != gap_end or wide_at != wide_end:
            return tile
        # Loops of their own: many reads of the base can be under way at once, the rest is vectorised.
        places, news, olds = index[found : found + count], value[found : found + count], before[:count]
        for i in range(count):
            olds[i] = old[places[i]]
        for i in range(count):
            news[i] = changed(np.int64(olds[i]), np.int64(news[i]))
        sum_changes[tile] = sum_change(places, begin, olds, news)
        found += count
        begin = tile_ends[tile]
    return -1
