"""Bits and speed of the weight codecs on RL-like updates of a 61 M-parameter model.

Bits are a changed element's, beside the entropy of the model behind the codecs: whether an element changed, and by
what integer, each given its tensor and the exponent of its old value, counted on the same data. Speeds are
single-threaded CPU time over that of copying the bf16 weights once (`memcpy`), higher is faster: medians over
repetitions, each with its own `memcpy`. Sums of tiles are maintained, except by the COO baseline.
`extrapolated` is computed from these for larger models (`_extrapolation.py`), beside what ROSE measured.
"""

import time
from collections.abc import Callable
from itertools import pairwise
from statistics import median
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from benchmarks._common import Arguments, Figures, benchmark
from benchmarks._coo import Coo
from benchmarks._extrapolation import extrapolated
from benchmarks._updates import LEARNING_RATES, Bits, Snapshot, snapshots
from elastic.weights.codecs import CODECS
from elastic.weights.codecs.base import TILE_ELEMENTS, Codec
from elastic.weights.codecs.sums import apply_update
from elastic.weights.layout import bucket_tiles, tile_ends
from elastic.weights.tensors import entries_of

T = TypeVar("T")

BUCKET_ELEMENTS = 32 << 20
CODECS_SHOWN: dict[str, Codec] = {
    "coo": Coo(),
    **{name: CODECS[name] for name in ("gap8", "gap8_zstd", "exponent_class", "dense")},
}


def main(arguments: Arguments) -> Figures:
    torch.set_num_threads(1)
    wanted = ["0.01", "0.05"] if arguments.quick else list(LEARNING_RATES)
    repetitions = 3 if arguments.quick else 9
    figures: Figures = dict.fromkeys(LEARNING_RATES)
    for snapshot in snapshots(wanted):
        figures[snapshot.name] = measure(snapshot, repetitions)
    return {"changed": figures, "extrapolated": extrapolated(figures, memcpy_bytes_per_s())}


def memcpy_bytes_per_s() -> float:
    """Of bf16 weights on one core: the median of several copies, by CPU time."""
    source = np.ones(BUCKET_ELEMENTS, np.uint16)
    target = np.empty_like(source)
    np.copyto(target, source)
    return source.nbytes / median(cpu_s(lambda: np.copyto(target, source))[0] for _ in range(9))


def measure(snapshot: Snapshot, repetitions: int) -> Figures:
    old, new, buckets = flat_buckets(snapshot)
    changed = int(np.count_nonzero(old != new))
    return {
        "fraction": changed / old.size,
        "learning_rate": snapshot.learning_rate,
        "model_entropy_bits": model_entropy_bits(snapshot) / changed,
        "codecs": {
            name: measure_codec(codec, old, new, buckets, changed, repetitions if name != "dense" else 2)
            for name, codec in CODECS_SHOWN.items()
        },
    }


def measure_codec(
    codec: Codec, old: Bits, new: Bits, buckets: list[npt.NDArray[np.int64]], changed: int, repetitions: int
) -> dict[str, float]:
    spans = list(pairwise([0, *(int(ends[-1]) for ends in buckets)]))
    local_ends = [ends - begin for ends, (begin, _) in zip(buckets, spans, strict=True)]
    copy, target = np.empty_like(old), old.copy()

    def encode() -> list[Any]:
        return [codec.encode(old[b:e], new[b:e], ends) for (b, e), ends in zip(spans, local_ends, strict=True)]

    def decode_and_apply() -> None:
        for bucket, (b, e), ends in zip(encoded, spans, local_ends, strict=True):
            update = codec.decode(bucket.shared, bucket.payload, bucket.payload_ends, old[b:e], ends)
            apply_update(update, target[b:e])

    encoded = encode()
    decode_and_apply()
    assert np.array_equal(target, new), codec.name
    encode_ratios, decode_ratios = [], []
    for _ in range(repetitions):
        memcpy_s, _ = cpu_s(lambda: np.copyto(copy, old))
        encode_ratios.append(memcpy_s / cpu_s(encode)[0])
        memcpy_s, _ = cpu_s(lambda: np.copyto(copy, old))
        decode_ratios.append(memcpy_s / cpu_s(decode_and_apply)[0])
    return {
        "bits": 8 * sum(bucket.size_bytes for bucket in encoded) / changed,
        "encode_over_memcpy": median(encode_ratios),
        "decode_apply_over_memcpy": median(decode_ratios),
        "encode_spread": max(encode_ratios) - min(encode_ratios),
        "decode_apply_spread": max(decode_ratios) - min(decode_ratios),
    }


def flat_buckets(snapshot: Snapshot) -> tuple[Bits, Bits, list[npt.NDArray[np.int64]]]:
    """All patterns in a row, and the ends of each bucket's tiles, as a publisher cuts them."""
    old = np.concatenate([bits.reshape(-1) for bits in snapshot.old.values()])
    new = np.concatenate([bits.reshape(-1) for bits in snapshot.new.values()])
    shapes = {name: torch.empty(bits.shape, dtype=torch.bfloat16, device="meta") for name, bits in snapshot.old.items()}
    ends = tile_ends(entries_of(shapes), TILE_ELEMENTS)
    return old, new, [ends[first:last] for first, last in bucket_tiles(ends, BUCKET_ELEMENTS)]


def model_entropy_bits(snapshot: Snapshot) -> float:
    """Bits of (changed or not | tensor, old exponent) and (integer difference | tensor, old exponent)."""
    total = 0.0
    for name in snapshot.old:
        old, new = (bits.reshape(-1).astype(np.int32) for bits in (snapshot.old[name], snapshot.new[name]))
        exponent = (old >> 7) & 0xFF
        moved = old != new
        elements, changes = np.bincount(exponent, minlength=256), np.bincount(exponent[moved], minlength=256)
        total += _information(changes, elements) + _information(elements - changes, elements)
        difference = (exponent[moved].astype(np.int64) << 17) + (new - old)[moved] + (1 << 16)
        _, counts = np.unique(difference, return_counts=True)
        total -= float((counts * np.log2(counts)).sum())
        total += float((changes[changes > 0] * np.log2(changes[changes > 0])).sum())
    return total


def _information(counts: npt.NDArray[np.int64], totals: npt.NDArray[np.int64]) -> float:
    used = counts > 0
    return float(-(counts[used] * np.log2(counts[used] / totals[used])).sum())


def cpu_s(function: Callable[[], T]) -> tuple[float, T]:
    begun_s = time.process_time()
    result = function()
    return time.process_time() - begun_s, result


if __name__ == "__main__":
    benchmark(__doc__, main)
