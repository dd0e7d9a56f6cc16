"""Changes coded with what the receiver already knows as context: the exponent of the old value. The small codec.

A step of about the learning rate changes a bf16 value the likelier, and the more, the finer its grid is: the chance
doubles with each octave down. So a tile's elements are sorted into classes by old exponent, gaps between changed
elements are counted within a class, where they are close to geometric, and gaps and changes are entropy-coded
(rANS) by the tables of the class's *level*: its mean gap in half octaves. As levels carry what differs between
tensors too, a bucket needs few tables. About 7 bits a changed element at 1 %, where index and value (ROSE §4.2)
take 48.

Bucket's shared part: one bit for each level that is used, then for each of these its table of gaps and its table of
changes. Tile: the number of changed elements of each class (varints) and, if there are any, a byte `top` (the
exponent of class 0), a level for each class with changes (bytes), the size of the raw bits (varint), the raw bits,
four rANS states and the words. Classes follow each other from large values to small.
"""

# pyright: reportMissingImports=false
import numpy as np
import numpy.typing as npt
from numba import njit

from elastic.weights.blobs import Buffer
from elastic.weights.codecs import _rans
from elastic.weights.codecs._integers import (
    TOKENS,
    change_of,
    changed,
    raw_bits_after,
    raw_bits_in,
    token_limit,
    token_of,
    value_of,
)
from elastic.weights.codecs._rans import LOWEST_STATE, TOTAL, put, take
from elastic.weights.codecs._simd import (
    CLASSES,
    LANES,
    changed_mask,
    class_masks,
    load_u64,
    lowest_bit,
    nth_bit,
    popcount,
    store_u64,
)
from elastic.weights.codecs._varint import put_varint, take_varint
from elastic.weights.codecs.base import (
    PADDING,
    TILE_ELEMENTS_MAX,
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
from elastic.weights.codecs.sums import sum_change

LEVELS = 48
"""Half octaves of mean gap, from 1 element to `TILE_ELEMENTS_MAX`."""

_GAP_TOKENS = token_limit(TILE_ELEMENTS_MAX.bit_length())
_CHANGE_TOKENS = token_limit(16)

_CHUNKS, _CHUNK = 16, 32
_TOP_SHARE = 32
"""Class 0 is to hold about 1/32 of a tile's elements; larger values hardly ever change."""

_STATE_BYTES = 16
_HEADER_BYTES_MAX = 5 * CLASSES + 1 + CLASSES + 5 + _STATE_BYTES
_SYMBOL_BYTES_MAX = 10
"""Raw bits (22 + 13) and two words of two bytes."""

_STAGGER = 272
"""Elements between classes' scratch rows: at a power of two they would all want the same few cache lines."""

_NEVER = 1 << 62


class ExponentClass:
    name = "exponent_class"

    def encode(self, old: Bits, new: Bits, tile_ends: Ends) -> EncodedBucket:
        check_encode(old, new, tile_ends)
        ends = as_ends(tile_ends)
        tiles = len(ends)
        counts, sizes = np.zeros((2, tiles, CLASSES), np.int64)
        tops = np.zeros(tiles, np.int64)
        sum_changes = np.zeros(tiles, np.uint64)
        # Room for the worst case; what is not written is never touched, and so takes no memory.
        gaps, changes = np.empty(old.size, np.uint32), np.empty(old.size, np.uint16)
        total = _extract(flat(old), flat(new), ends, tops, counts, sizes, gaps, changes, sum_changes)
        gaps, changes = gaps[:total], changes[:total]

        levels = _levels(counts, sizes)
        histograms = np.zeros((2, LEVELS, TOKENS), np.int64)
        _count(counts, levels, gaps, changes, histograms)
        used = np.flatnonzero(histograms[0].any(axis=-1))
        codes = [[_rans.quantise(histograms[kind, level]) for level in used] for kind in (0, 1)]
        gap_rows, change_rows = (_rans.encoder_rows(_rans.frequencies(kind)) for kind in codes)
        rows = np.zeros(LEVELS, np.int64)
        rows[used] = np.arange(len(used))

        payload = np.empty(tiles * _HEADER_BYTES_MAX + total * _SYMBOL_BYTES_MAX + PADDING, np.uint8)
        payload_ends = np.zeros(tiles, np.int64)
        size = _encode(counts, tops, levels, rows, gaps, changes, gap_rows, change_rows, payload, payload_ends)
        payload[size : size + PADDING] = 0
        shared = _pack_levels(used) + _rans.pack_codes(table for pair in zip(*codes, strict=True) for table in pair)
        packed = payload[: size + PADDING].tobytes()
        return EncodedBucket(shared, packed, payload_ends, counts.sum(axis=1), sum_changes)

    def decode(self, shared: Buffer, payload: Buffer, payload_ends: Ends, old: Bits, tile_ends: Ends) -> BucketUpdate:
        check_decode(payload, payload_ends, old, tile_ends)
        rows, gap_slots, change_slots = _open_tables(bytes(shared))
        data, data_ends, ends = as_bytes(payload), as_ends(payload_ends), as_ends(tile_ends)
        counts = np.zeros((len(ends), CLASSES), np.int64)
        bad = _read_counts(data, data_ends, ends, counts)
        if bad >= 0:
            raise CodecError(f"tile {bad}: more changes than elements, or cut short")
        total = int(counts.sum())
        index, value = np.empty(total, np.uint32), np.empty(total, np.uint16)
        sum_changes = np.zeros(len(ends), np.uint64)
        bad = _decode(
            data, data_ends, flat(old), ends, counts, rows, gap_slots, change_slots, index, value, sum_changes
        )
        if bad >= 0:
            raise CodecError(f"tile {bad}: does not decode against this base")
        return BucketUpdate(index, value, np.cumsum(counts.sum(axis=1)), sum_changes)


def _levels(counts: npt.NDArray[np.int64], sizes: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    mean_gap = np.maximum(sizes, 1) / np.maximum(counts, 1)
    return np.clip(np.rint(2 * np.log2(mean_gap)), 0, LEVELS - 1).astype(np.int64)


def _pack_levels(used: npt.NDArray[np.int64]) -> bytes:
    flags = np.zeros(LEVELS, np.uint8)
    flags[used] = 1
    return np.packbits(flags, bitorder="little").tobytes()


def _open_tables(
    shared: bytes,
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint32], npt.NDArray[np.uint32]]:
    """The row of each level (-1 if unused), and the rows' slots for gaps and changes."""
    head = LEVELS // 8
    if len(shared) < head:
        raise CodecError(f"bucket's levels: {len(shared)} bytes; expected at least {head}")
    used = np.flatnonzero(np.unpackbits(np.frombuffer(shared[:head], np.uint8), bitorder="little"))
    codes = _rans.unpack_codes(shared[head:], [_GAP_TOKENS, _CHANGE_TOKENS] * len(used))
    rows = np.full(LEVELS, -1, np.int64)
    rows[used] = np.arange(len(used))
    return rows, _rans.lookup(_rans.frequencies(codes[0::2])), _rans.lookup(_rans.frequencies(codes[1::2]))


@njit(cache=True, nogil=True, error_model="numpy")
def _extract(old, new, tile_ends, tops, counts, sizes, gaps, changes, sum_changes):  # type: ignore[no-untyped-def]
    """Gaps and changes of all tiles, tile by tile and class by class; returns how many there are."""
    largest = 0
    begin = 0
    for tile in range(tile_ends.size):
        largest = max(largest, tile_ends[tile] - begin)
        begin = tile_ends[tile]
    room = largest + _STAGGER
    class_gaps, class_places, class_moves = np.empty((3, CLASSES, room), np.uint32)
    olds, news = np.empty((2, largest), np.uint16)
    masks = np.empty(CLASSES, np.uint64)
    total = 0
    begin = np.int64(0)  # Of a plain 0 a type of its own would be made, and what is called compiled for it as well.
    for tile in range(tile_ends.size):
        end = tile_ends[tile]
        tops[tile] = _top_exponent(old, begin, end)
        _extract_tile(
            old,
            new,
            begin,
            end,
            tops[tile],
            masks,
            class_gaps,
            class_places,
            class_moves,
            counts[tile],
            sizes[tile],
        )
        for number in range(CLASSES):
            count = counts[tile, number]
            for i in range(count):
                gaps[total + i] = class_gaps[number, i]
            for i in range(count):
                olds[i], news[i] = class_moves[number, i] >> 16, class_moves[number, i] & 0xFFFF
            for i in range(count):
                changes[total + i] = change_of(np.int64(olds[i]), np.int64(news[i]))
            sum_changes[tile] += sum_change(class_places[number, :count], begin, olds, news)
            total += count
        begin = end
    return total


@njit(cache=True, nogil=True, error_model="numpy")
def _top_exponent(old, begin, end):  # type: ignore[no-untyped-def]
    """The exponent that about 1/32 of the elements reach, from a sample."""
    histogram = np.zeros(256, np.int64)
    step = max((end - begin) // _CHUNKS, _CHUNK)
    sampled = 0
    for start in range(begin, end, step):
        for i in range(start, min(start + _CHUNK, end)):
            histogram[(old[i] >> 7) & 0xFF] += 1
            sampled += 1
    top, reached = 256, 0
    while top > CLASSES - 2 and (top == 256 or reached * _TOP_SHARE < sampled):
        top -= 1
        reached += histogram[top]
    return top


@njit(cache=True, nogil=True, error_model="numpy")
def _extract_tile(old, new, begin, end, top, masks, gaps, places, moves, counts, sizes):  # type: ignore[no-untyped-def]
    """What changed, by class; kept short, as the rest can be vectorised afterwards."""
    after = np.zeros(CLASSES, np.int64)
    whole = begin + (end - begin) // LANES * LANES
    for start in range(begin, whole, LANES):
        _extract_lanes(old, new, start, start, top, masks, after, gaps, places, moves, counts, sizes)
    if whole < end:
        last_old, last_new = np.zeros(LANES, np.uint16), np.zeros(LANES, np.uint16)
        for i in range(end - whole):
            last_old[i], last_new[i] = old[whole + i], new[whole + i]
        _extract_lanes(last_old, last_new, 0, whole, top, masks, after, gaps, places, moves, counts, sizes)


@njit(inline="always", error_model="numpy")
def _extract_lanes(old, new, at, start, top, masks, after, gaps, places, moves, counts, sizes):  # type: ignore[no-untyped-def]
    class_masks(old, at, np.uint8(top), masks)
    differs = changed_mask(old, new, at)
    while differs:
        lane = lowest_bit(differs)
        differs &= differs - np.uint64(1)
        before = np.int64(old[at + lane])
        number = min(max(top - ((before >> 7) & 0xFF), 0), CLASSES - 1)
        earlier = masks[number] & ((np.uint64(1) << np.uint64(lane)) - np.uint64(1))
        rank = sizes[number] + popcount(earlier)
        count = counts[number]
        gaps[number, count] = rank - after[number]
        places[number, count] = start + lane
        moves[number, count] = (before << 16) | np.int64(new[at + lane])
        counts[number] = count + 1
        after[number] = rank + 1
    for number in range(CLASSES):
        sizes[number] += popcount(masks[number])


@njit(cache=True, nogil=True, error_model="numpy")
def _count(counts, levels, gaps, changes, histograms):  # type: ignore[no-untyped-def]
    at = 0
    for tile in range(counts.shape[0]):
        for number in range(CLASSES):
            level = levels[tile, number]
            for i in range(at, at + counts[tile, number]):
                gap, change = np.int64(gaps[i]), np.int64(changes[i])
                histograms[0, level, token_of(gap, raw_bits_in(gap))] += 1
                histograms[1, level, token_of(change, raw_bits_in(change))] += 1
            at += counts[tile, number]


@njit(cache=True, nogil=True, error_model="numpy")
def _encode(counts, tops, levels, rows, gaps, changes, gap_rows, change_rows, payload, payload_ends):  # type: ignore[no-untyped-def]
    """Every tile's bytes; returns their size."""
    words = np.empty(_words_capacity(counts), np.uint16)
    at = 0
    first = 0
    for tile in range(counts.shape[0]):
        total = 0
        for number in range(CLASSES):
            at = put_varint(payload, at, counts[tile, number])
            total += counts[tile, number]
        if total:
            payload[at] = tops[tile]
            at += 1
            for number in range(CLASSES):
                if counts[tile, number]:
                    payload[at] = levels[tile, number]
                    at += 1
            at = _put_raw_bits(gaps[first : first + total], changes[first : first + total], payload, at)
            at = _put_symbols(
                counts[tile],
                rows[levels[tile]],
                gaps[first : first + total],
                changes[first : first + total],
                gap_rows,
                change_rows,
                words,
                payload,
                at,
            )
        first += total
        payload_ends[tile] = at
    return at


@njit(inline="always")
def _words_capacity(counts):  # type: ignore[no-untyped-def]
    most = 0
    for tile in range(counts.shape[0]):
        most = max(most, counts[tile].sum())
    return 2 * most + 1


@njit(inline="always")
def _put_raw_bits(gaps, changes, payload, at):  # type: ignore[no-untyped-def]
    size = np.int64(0)
    for i in range(gaps.size):
        size += raw_bits_in(np.int64(gaps[i])) + raw_bits_in(np.int64(changes[i]))
    at = put_varint(payload, at, (size + 7) >> 3)
    bits, pending = np.uint64(0), np.uint64(0)
    place = at
    for i in range(gaps.size):
        gap, change = np.int64(gaps[i]), np.int64(changes[i])
        gap_bits, change_bits = raw_bits_in(gap), raw_bits_in(change)
        raw = (gap & ((1 << gap_bits) - 1)) | ((change & ((1 << change_bits) - 1)) << gap_bits)
        bits |= np.uint64(raw) << pending
        store_u64(payload, place, bits)
        pending += np.uint64(gap_bits + change_bits)
        place += np.int64(pending >> np.uint64(3))
        bits >>= pending & np.uint64(0x78)
        pending &= np.uint64(7)
    return at + ((size + 7) >> 3)


@njit(inline="always")
def _put_symbols(counts, rows, gaps, changes, gap_rows, change_rows, words, payload, at):  # type: ignore[no-untyped-def]
    """Backwards, since rANS is a stack. Two states a kind take turns, so that four steps may overlap."""
    gap_state = next_gap_state = np.uint64(LOWEST_STATE)
    change_state = next_change_state = np.uint64(LOWEST_STATE)
    word = words.size
    i = gaps.size
    for number in range(CLASSES - 1, -1, -1):
        gap_table, change_table = gap_rows[rows[number]], change_rows[rows[number]]
        for _ in range(counts[number]):
            i -= 1
            gap, change = np.int64(gaps[i]), np.int64(changes[i])
            change_state, word = put(change_state, change_table[token_of(change, raw_bits_in(change))], words, word)
            gap_state, word = put(gap_state, gap_table[token_of(gap, raw_bits_in(gap))], words, word)
            gap_state, next_gap_state = next_gap_state, gap_state
            change_state, next_change_state = next_change_state, change_state
    store_u64(payload, at, next_gap_state | (next_change_state << np.uint64(32)))
    store_u64(payload, at + 8, gap_state | (change_state << np.uint64(32)))
    at += _STATE_BYTES
    for place in range(word, words.size):
        payload[at] = words[place] & 0xFF
        payload[at + 1] = words[place] >> 8
        at += 2
    return at


@njit(cache=True, nogil=True, error_model="numpy")
def _read_counts(data, data_ends, tile_ends, counts):  # type: ignore[no-untyped-def]
    """Every tile's changes by class; returns the first tile that cannot be right, or -1."""
    begin, at = 0, 0
    for tile in range(tile_ends.size):
        total = 0
        for number in range(CLASSES):
            counts[tile, number], at = take_varint(data, at, data_ends[tile])
            total += counts[tile, number]
        if at > data_ends[tile] or total > tile_ends[tile] - begin:
            return tile
        begin, at = tile_ends[tile], data_ends[tile]
    return -1


@njit(cache=True, nogil=True, error_model="numpy")
def _decode(data, data_ends, old, tile_ends, counts, rows, gap_slots, change_slots, index, value, sum_changes):  # type: ignore[no-untyped-def]
    """All tiles' updates; returns the first tile that does not decode, or -1."""
    most = 0
    for tile in range(tile_ends.size):
        most = max(most, counts[tile].sum())
    gaps = np.empty(most, np.uint32)
    changes, moves, before = np.empty((3, most), np.uint16)
    used_rows = np.empty(CLASSES, np.int64)
    begin, at, found = 0, 0, 0
    for tile in range(tile_ends.size):
        data_end, end = data_ends[tile], tile_ends[tile]
        total = counts[tile].sum()
        for _ in range(CLASSES):
            _ignored, at = take_varint(data, at, data_end)
        if total:
            top, raw_at = _read_classes(data, at, data_end, counts[tile], rows, used_rows)
            if raw_at < 0:
                return tile
            raw_bytes, raw_at = take_varint(data, raw_at, data_end)
            if raw_at + raw_bytes + _STATE_BYTES > data_end:
                return tile
            at = _take_symbols(
                data, raw_at, raw_bytes, data_end, counts[tile], used_rows, gap_slots, change_slots, gaps, changes
            )
            places, news = index[found : found + total], value[found : found + total]
            if not _resolve(old, begin, end, top, counts[tile], gaps, changes, moves, before, places):
                return tile
            for i in range(total):
                news[i] = changed(np.int64(before[i]), np.int64(moves[i]))
            sum_changes[tile] = sum_change(places, begin, before, news)
            found += total
        if at != data_end:
            return tile
        begin = end
    return -1


@njit(inline="always")
def _read_classes(data, at, data_end, counts, rows, used_rows):  # type: ignore[no-untyped-def]
    """(`top`, where the classes end), -1 for the latter if they cannot be right; fills `used_rows`."""
    if at >= data_end or data[at] < CLASSES - 2:
        return 0, -1
    top = np.int64(data[at])
    at += 1
    for number in range(CLASSES):
        if counts[number]:
            if at >= data_end or data[at] >= LEVELS or rows[data[at]] < 0:
                return 0, -1
            used_rows[number] = rows[data[at]]
            at += 1
    return top, at


@njit(inline="always")
def _take_symbols(data, raw_at, raw_bytes, data_end, counts, rows, gap_slots, change_slots, gaps, changes):  # type: ignore[no-untyped-def]
    """Fill each class's gaps and changes; returns where the tile's bytes end, -1 if they cannot be right."""
    at = raw_at + raw_bytes
    half = np.uint64(0xFFFFFFFF)
    gap_state, change_state = load_u64(data, at) & half, load_u64(data, at) >> np.uint64(32)
    next_gap_state, next_change_state = load_u64(data, at + 8) & half, load_u64(data, at + 8) >> np.uint64(32)
    at += _STATE_BYTES
    bit, bits_end = 0, 8 * raw_bytes
    slots = np.uint64(TOTAL - 1)
    i = 0
    for number in range(CLASSES):
        if counts[number] == 0:
            continue
        gap_row, change_row = gap_slots[rows[number]], change_slots[rows[number]]
        for _ in range(counts[number]):
            gap_slot = np.uint64(gap_row[gap_state & slots])
            change_slot = np.uint64(change_row[change_state & slots])
            if at > data_end or bit > bits_end:
                return -1
            gap_state, at = take(gap_state, gap_slot, data, at)
            change_state, at = take(change_state, change_slot, data, at)
            gap_state, next_gap_state = next_gap_state, gap_state
            change_state, next_change_state = next_change_state, change_state
            gap_token, change_token = np.int64(gap_slot & np.uint64(0xFF)), np.int64(change_slot & np.uint64(0xFF))
            gap_bits, change_bits = raw_bits_after(gap_token), raw_bits_after(change_token)
            raw = np.int64(load_u64(data, raw_at + (bit >> 3)) >> np.uint64(bit & 7))
            bit += gap_bits + change_bits
            gaps[i] = value_of(gap_token, gap_bits, raw & ((1 << gap_bits) - 1))
            changes[i] = value_of(change_token, change_bits, (raw >> gap_bits) & ((1 << change_bits) - 1))
            i += 1
    lowest = np.uint64(LOWEST_STATE)
    emptied = gap_state == lowest and next_gap_state == lowest
    emptied = emptied and change_state == lowest and next_change_state == lowest
    return at if emptied and bit <= bits_end and bits_end - bit < 8 else -1


@njit(inline="always")
def _resolve(old, begin, end, top, counts, gaps, changes, moves, before, places):  # type: ignore[no-untyped-def]
    """From gaps within classes to places in the bucket; there the old pattern, and the change it is in for.

    Whether all of them are in the tile.
    """
    masks = np.empty(CLASSES, np.uint64)
    here, wait = np.empty(CLASSES, np.int64), np.empty(CLASSES, np.int64)
    place, last = np.empty(CLASSES, np.int64), np.empty(CLASSES, np.int64)
    first = 0
    for number in range(CLASSES):
        place[number] = first
        wait[number] = gaps[first] if counts[number] else _NEVER
        first += counts[number]
        last[number] = first - 1
    found = 0
    whole = begin + (end - begin) // LANES * LANES
    for start in range(begin, whole, LANES):
        found = _resolve_lanes(
            old, start, start, top, masks, here, wait, place, last, gaps, changes, moves, before, places, found
        )
    if whole < end:
        padded = np.zeros(LANES, np.uint16)
        for i in range(end - whole):
            padded[i] = old[whole + i]
        found = _resolve_lanes(
            padded, 0, whole, top, masks, here, wait, place, last, gaps, changes, moves, before, places, found
        )
        for i in range(max(found - LANES, 0), found):
            if places[i] >= end:
                return False
    return found == first


@njit(inline="always")
def _resolve_lanes(old, at, start, top, masks, here, wait, place, last, gaps, changes, moves, before, places, found):  # type: ignore[no-untyped-def]
    class_masks(old, at, np.uint8(top), masks)
    due = np.int64(0)
    for number in range(CLASSES):
        here[number] = popcount(masks[number])
        wait[number] -= here[number]
        due |= wait[number]
    if due >= 0:
        return found
    due = 0
    for number in range(CLASSES):
        due |= (wait[number] < 0) << number
    while due:
        number = lowest_bit(np.uint64(due))
        due &= due - 1
        i = place[number]
        rank = wait[number] + here[number]
        while rank < here[number]:
            lane = nth_bit(masks[number], rank)
            places[found] = start + lane
            before[found] = old[at + lane]
            moves[found] = changes[i]
            found += 1
            rank = rank + 1 + np.int64(gaps[i + 1]) if i < last[number] else _NEVER
            i += 1
        place[number] = i
        wait[number] = rank - here[number]
    return found
