"""Decoders are given what no encoder wrote: an error, or an update that is sound; never a crash.

Run as a program it fuzzes decoders, each in a process that it forks, so that a crash is an exit status and not the end
of all tests. What the decoder reads ends where the memory that may be read ends.
"""

import ctypes
import mmap
import os
import struct
import subprocess
import sys
import traceback

import msgspec
import numpy as np
import pytest

from elastic.weights.bucket import Bucket, BucketHeader, encode_bucket
from elastic.weights.codecs import CODECS, warm_up
from elastic.weights.codecs.base import PADDING, CodecError
from elastic.weights.codecs.sums import apply_update, tile_sums
from elastic.weights.errors import WeightsCorrupted

CASES = 150
ENDS = np.array([0, 1, 70, 700, 764, 764, 3000])
EDGES = [0, 1, -1, 7, 8, 9, 127, 128, 2**31, 2**32 - 1, 2**62, 2**63 - 1, -(2**63)]


class Guarded:
    """Room behind which nothing can be read: doing so ends the process."""

    def __init__(self, size: int) -> None:
        pages = -(-size // mmap.PAGESIZE)
        self._map = mmap.mmap(-1, (pages + 1) * mmap.PAGESIZE)
        self._end = pages * mmap.PAGESIZE
        beyond = ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(self._map)) + self._end)
        assert ctypes.CDLL(None, use_errno=True).mprotect(beyond, mmap.PAGESIZE, 0) == 0

    def holding(self, content: bytes) -> memoryview:
        """`content`, at the very end."""
        view = memoryview(self._map)[self._end - len(content) : self._end]
        view[:] = content
        return view


def updates(rng: np.random.Generator):
    """(old, new) of every kind: what is typical, all patterns, nothing changed, everything changed."""
    size = int(ENDS[-1])
    normal = (rng.normal(0, 0.02, size).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    anything = rng.integers(0, 1 << 16, size, dtype=np.uint16)
    for old in (normal, anything):
        for share in (0.0, 0.02, 0.3, 1.0):
            moved = rng.random(size) < share
            yield old, np.where(moved, old + rng.integers(1, 4, size).astype(np.uint16), old)
            yield old, np.where(moved, rng.integers(0, 1 << 16, size, dtype=np.uint16), old)


def mutate(rng: np.random.Generator, content: bytes, starts: list[int]) -> bytes:
    """Another byte here and there, half of them near one of `starts`; now and then cut, doubled or reordered."""
    data = bytearray(content)
    for _ in range(rng.integers(0, 5)):
        if data:
            near = int(rng.choice(starts)) + int(rng.integers(0, 24))
            at = near if rng.random() < 0.5 and near < len(data) else int(rng.integers(0, len(data)))
            values = [0, 1, 0x7F, 0x80, 0xFF, data[at] ^ (1 << int(rng.integers(0, 8))), int(rng.integers(0, 256))]
            data[at] = int(rng.choice(values))
    kind = rng.integers(0, 12)
    begin, end = sorted(int(at) for at in rng.integers(0, len(data) + 1, 2))
    if kind == 0:
        del data[begin:end]
    elif kind == 1:
        data[begin:begin] = data[begin:end]
    elif kind == 2:
        data[begin:end] = rng.bytes(end - begin)
    return bytes(data)


def mutate_ends(rng: np.random.Generator, ends: list[int]) -> list[int]:
    found = list(ends)
    if rng.random() < 0.1:
        found[:4] = [2**62, 2**63 - 1, -(2**63), -1]  # in 64 bits no step of these is a step back
    for _ in range(rng.integers(0, 4)):
        at = int(rng.integers(0, len(found)))
        found[at] = int(rng.choice([ends[at] + 1, ends[at] - 1, ends[-1], *EDGES]))
    return found


def assert_sound(update, old: np.ndarray, ends: np.ndarray) -> None:
    """Each tile's new patterns are in that tile, and its sum is what the update says."""
    if update.index is None:
        assert len(update.value) == len(old)
    else:
        assert len(update.index) == len(update.value) <= len(old)
        edges = [0, *update.ends.tolist()]
        assert edges == sorted(edges)
        assert edges[-1] == len(update.index)
        tile = np.repeat(np.arange(len(ends)), np.diff(edges))
        assert ((np.array([0, *ends])[tile] <= update.index) & (update.index < ends[tile])).all()
        assert len(np.unique(update.index)) == len(update.index)
    result = old.copy()
    apply_update(update, result)
    assert (tile_sums(old, ends) + update.sum_changes).tolist() == tile_sums(result, ends).tolist()


def fuzz_codec(name: str, rng: np.random.Generator) -> tuple[int, int]:
    """How many mutations were errors, and how many decoded."""
    codec, refused, decoded = CODECS[name], 0, 0
    cases = [(old, codec.encode(old, new, ENDS)) for old, new in updates(rng)]
    room, base_room = Guarded(1 << 17), Guarded(1 << 14)
    for number in range(CASES):
        print(name, "tiles", number, flush=True)
        old, bucket = cases[number % len(cases)]
        shared = mutate(rng, bucket.shared, [0]) if rng.random() < 0.2 else bucket.shared
        starts = [0, *bucket.payload_ends.tolist()]
        payload = mutate(rng, bucket.payload, starts)
        ends = bucket.payload_ends.tolist()
        if rng.random() < 0.3:
            ends = mutate_ends(rng, ends)
        elif rng.random() < 0.8:
            ends = np.clip(ends, 0, max(len(payload) - PADDING, 0)).tolist()
            ends[-1] = max(len(payload) - PADDING, 0)
        base = np.frombuffer(base_room.holding(old.tobytes()), np.uint16)
        try:
            update = codec.decode(shared, room.holding(payload), np.array(ends, np.int64), base, ENDS)
        except CodecError:
            refused += 1
        else:
            decoded += 1
            assert_sound(update, old, ENDS)
    return refused, decoded


def fuzz_bucket(name: str, rng: np.random.Generator) -> tuple[int, int]:
    codec, refused, decoded = CODECS[name], 0, 0
    cases = [(old, codec.encode(old, new, ENDS)) for old, new in updates(rng)]
    room = Guarded(1 << 17)
    for number in range(CASES):
        print(name, "bucket", number, flush=True)
        old, bucket = cases[number % len(cases)]
        head, *body = encode_bucket(name, bucket)
        if rng.random() < 0.5:
            header = BucketHeader(
                str(rng.choice([name, *CODECS, "none", ""])) if rng.random() < 0.2 else name,
                int(rng.choice([len(bucket.shared), 0, 1, 2**32])) if rng.random() < 0.3 else len(bucket.shared),
                mutate_ends(rng, bucket.payload_ends.tolist()),
            )
            packed = msgspec.msgpack.encode(header)
            head = struct.pack("<I", len(packed)) + packed
        blob = mutate(rng, b"".join([head, *body]), [0, len(head)])
        first, last = sorted(int(tile) for tile in rng.integers(0, len(ENDS) + 2, 2))
        begin, end = (int([0, *ENDS, ENDS[-1]][min(tile, len(ENDS))]) for tile in (first, last))
        ends = ENDS[first:last] - begin
        try:
            update = Bucket(room.holding(blob)).decode(old[begin:end], ends, first, last)
        except WeightsCorrupted:
            refused += 1
        else:
            decoded += 1
            assert_sound(update, old[begin:end], ends)
    return refused, decoded


def main(names: list[str]) -> None:
    warm_up()
    for name in names:
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                for fuzz in (fuzz_codec, fuzz_bucket):
                    print(name, "after", *fuzz(name, np.random.default_rng(0)), flush=True)
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(status)
        print(name, "ended", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])


@pytest.fixture(scope="module")
def fuzzed() -> "subprocess.CompletedProcess[str]":
    arguments = [sys.executable, "-X", "faulthandler", __file__, *sorted(CODECS)]
    return subprocess.run(arguments, check=True, capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize("name", sorted(CODECS))
def test_what_no_encoder_wrote_is_an_error_or_sound(fuzzed: "subprocess.CompletedProcess[str]", name: str):
    """In tiles, and in whole buckets; in a process of its own, which may crash."""
    lines = [line.split()[1:] for line in fuzzed.stdout.splitlines() if line.startswith(f"{name} ")]
    assert lines[-1] == ["ended", "0"], f"at {lines[-2:]}: {fuzzed.stderr[-2000:]}"
    counts = [line[1:] for line in lines if line[0] == "after"]
    assert len(counts) == 2
    for refused, decoded in counts:
        assert min(int(refused), int(decoded)) > CASES // 20, "the decoder proper is reached, by what is wrong as well"
