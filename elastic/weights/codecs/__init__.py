"""Lossless formats for what changes between two versions of bf16 weights, by name."""

from types import MappingProxyType
from typing import Final

from elastic.weights.codecs.base import Codec
from elastic.weights.codecs.compressed import Compressed
from elastic.weights.codecs.dense import Dense, Raw
from elastic.weights.codecs.exponent_class import ExponentClass
from elastic.weights.codecs.gap8 import Gap8

CODECS: Final = MappingProxyType[str, Codec](
    {codec.name: codec for codec in (ExponentClass(), Gap8(), Compressed(Gap8()), Dense(), Raw())}
)
