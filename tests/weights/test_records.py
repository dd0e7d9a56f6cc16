"""Manifests: whole and consistent, or refused, whatever lies on the relay."""

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic.weights.errors import WeightsCorrupted
from elastic.weights.layout import tile_ends
from elastic.weights.records import (
    SCHEMA_VERSION,
    TILES_MAX,
    BucketEntry,
    DeltaBegun,
    DeltaManifest,
    DeltaPart,
    Manifest,
    PartOf,
    TensorEntry,
    open_part,
)
from elastic.weights.signing import Signable
from tests.seeds import examples
from tests.weights.signed import KEY, TRUST

TENSORS = (
    TensorEntry(name="a", shape=(3, 5), dtype="bfloat16", offset=0),
    TensorEntry(name="b", shape=(7,), dtype="bfloat16", offset=30, begin=(2,)),
)
BUCKETS = (BucketEntry("raw", 10, "c"), BucketEntry("gap8", 10, "d"))
BEGUN = DeltaBegun(
    run="run",
    version=2,
    base_version=1,
    base_state="before",
    model={"hidden_size": 8, "layers": ["full", {"sliding": None}]},
    tensors=TENSORS,
    tile_elements=4,
    buckets=((0, 4), (4, 2)),
)
MANIFEST = DeltaManifest(announced=BEGUN, state="after", changed=(1, 2), tile_sums=bytes(8 * 6), buckets=BUCKETS)
PART = DeltaPart(of=PartOf(run="run", version=2, base_version=1, rank=1, layout="l", base_state="before"),
                 buckets=BUCKETS, changed=(0,) * 6, tile_sums=bytes(8 * 6))  # fmt: skip
KEYFRAME = Manifest(
    run="run",
    version=2,
    model={},
    tensors=TENSORS,
    blob="versions/00000002/keyframe.bin",
    blob_bytes=44,
    blob_digest="c",
    tile_elements=4,
    tile_sums=bytes(8 * 6),
)
RECORDS: dict[str, tuple[Signable, Callable[[bytes], Any]]] = {
    "delta": (MANIFEST, partial(TRUST.open, kind=DeltaManifest, schema_version=SCHEMA_VERSION)),
    "begun": (BEGUN, partial(TRUST.open, kind=DeltaBegun, schema_version=SCHEMA_VERSION)),
    "part": (PART, lambda data: open_part(data, TRUST, PART.of, [(0, 4), (4, 2)])),
    "keyframe": (KEYFRAME, partial(TRUST.open, kind=Manifest, schema_version=SCHEMA_VERSION)),
}

every_kind = pytest.mark.parametrize("kind", sorted(RECORDS))

anything = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=4) | st.sampled_from([0, -1, 2**40, 2**62, 2**63]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)  # fmt: skip


@every_kind
def test_what_was_sealed_is_what_is_read(kind: str):
    record, decode = RECORDS[kind]
    assert decode(KEY.seal(record)) == record


@every_kind
@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_refused(kind: str, data: bytes):
    with pytest.raises(WeightsCorrupted):
        RECORDS[kind][1](data)


@every_kind
@given(at=st.integers(0), flip=st.integers(1, 255), cut=st.booleans())
def test_a_changed_byte_is_refused(kind: str, at: int, flip: int, cut: bool):
    record, decode = RECORDS[kind]
    content = bytearray(KEY.seal(record))
    if cut:
        del content[at % len(content) :]
    else:
        content[at % len(content)] ^= flip
    with pytest.raises(WeightsCorrupted):
        decode(bytes(content))


@every_kind
@given(data=st.data())
@settings(max_examples=examples(60, 150))
def test_what_is_sealed_and_makes_no_sense_is_refused_or_harmless(kind: str, data: st.DataObject):
    record, decode = RECORDS[kind]
    forged = replaced(msgspec.to_builtins(record), data)
    sealed = KEY.seal_body(record.signed_as, json.dumps(forged).encode())
    try:
        read = decode(sealed)
    except WeightsCorrupted:
        return
    if kind == "part":
        return
    laid_out = read.announced if kind == "delta" else read
    tiles = tile_ends(laid_out.tensors, laid_out.tile_elements)
    assert len(tiles) <= TILES_MAX
    assert kind == "begun" or len(read.tile_sums) == 8 * len(tiles)
    assert kind == "keyframe" or sum(count for _, count in laid_out.buckets) == len(tiles)


def replaced(value: Any, data: st.DataObject) -> Any:
    """`value` with something else somewhere in it."""
    if isinstance(value, (dict, list, tuple)) and value and data.draw(st.integers(0, 4)):
        items = dict(value) if isinstance(value, dict) else dict(enumerate(value))
        key = data.draw(st.sampled_from(sorted(items)))
        items[key] = replaced(items[key], data)
        return items if isinstance(value, dict) else list(items.values())
    return data.draw(anything)


@every_kind
@pytest.mark.parametrize("sealed", [True, False])
def test_what_is_nested_without_end_is_refused(kind: str, sealed: bool):
    deep = b"[" * 100_000 + b"]" * 100_000
    signed = KEY.seal_body(RECORDS[kind][0].signed_as, deep)
    content = signed if sealed else b'{"signature":"","manifest":' + deep + b"}"
    with pytest.raises(WeightsCorrupted):
        RECORDS[kind][1](content)


def test_a_version_of_too_many_tiles_is_refused_before_they_are_counted_out():
    huge = (TensorEntry(name="a", shape=(2**31, 2**31), dtype="bfloat16", offset=0),)
    begun = msgspec.structs.replace(BEGUN, tensors=huge, tile_elements=1, buckets=((0, 2**62),))
    with pytest.raises(WeightsCorrupted, match=f"at most {TILES_MAX}"):
        TRUST.open(KEY.seal(begun), DeltaBegun, SCHEMA_VERSION)
