"""Lossless formats for what changes between two versions of bf16 weights, by name."""

from types import MappingProxyType
from typing import Final

import numpy as np

from elastic.weights.codecs import _place as _place
from elastic.weights.codecs.base import Codec
from elastic.weights.codecs.compressed import Compressed
from elastic.weights.codecs.dense import Dense, Raw
from elastic.weights.codecs.exponent_class import ExponentClass
from elastic.weights.codecs.gap8 import Gap8
from elastic.weights.codecs.sums import apply_update

_CODECS: dict[str, Codec] = {
    codec.name: codec for codec in (ExponentClass(), Gap8(), Compressed(Gap8()), Dense(), Raw())
}

CODECS: Final = MappingProxyType(_CODECS)


def register(codec: Codec) -> None:
    """Let both sides in this process take a further format, which is only used where a publisher is set to it."""
    _CODECS[codec.name] = codec


def warm_up() -> None:
    """Compile every codec, or load what an earlier process compiled: seconds once, then a fraction of one."""
    old, ends = np.arange(100, dtype=np.uint16), np.array([100])
    for codec in CODECS.values():
        bucket = codec.encode(old, old[::-1].copy(), ends)
        apply_update(codec.decode(bucket.shared, bucket.payload, bucket.payload_ends, old, ends), old.copy())
