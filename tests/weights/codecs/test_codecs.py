"""Every codec gives back the new bits, and the sums that a plain reference finds. `test_fuzz` has what is garbage."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic.weights.codecs import CODECS
from elastic.weights.codecs._integers import change_of, changed
from elastic.weights.codecs.base import CodecError
from elastic.weights.codecs.exponent_class import ExponentClass
from elastic.weights.codecs.sums import apply_update, tile_sums

SPECIALS = np.array([0x0000, 0x8000, 0x0001, 0x8001, 0x007F, 0x0080, 0x7F80, 0xFF80, 0x7FC0, 0xFFFF, 0x7F7F], np.uint16)


def mix_reference(index, pattern):
    mask = (1 << 64) - 1
    x = ((index << 16 | pattern) + 0x9E3779B97F4A7C15) * 0xBF58476D1CE4E5B9 & mask
    x ^= x >> 32
    x = x * 0x94D049BB133111EB & mask
    return x ^ (x >> 29)


def sums_reference(bits, ends):
    spans = itertools.pairwise([0, *ends])
    return [sum(mix_reference(i, int(bits[begin + i])) for i in range(end - begin)) % 2**64 for begin, end in spans]


def round_trip(codec, old, new, ends):
    bucket = codec.encode(old, new, ends)
    before = old.copy()
    update = codec.decode(bucket.shared, bucket.payload, bucket.payload_ends, old, ends)
    assert np.array_equal(old, before)
    result = old.copy()
    apply_update(update, result)
    assert np.array_equal(result, new)
    apply_update(update, result)
    assert np.array_equal(result, new)
    return bucket, update


@st.composite
def weights(draw):
    """(old, new, tile ends): patterns of all kinds, from untouched to rewritten, in tiles of all sizes."""
    sizes = draw(st.lists(st.sampled_from([0, 1, 2, 63, 64, 65, 100, 128, 700]), min_size=1, max_size=5))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    total = sum(sizes)
    kind = draw(st.sampled_from(["any", "normal", "special", "constant"]))
    if kind == "any":
        old = rng.integers(0, 1 << 16, total, dtype=np.uint16)
    elif kind == "normal":
        old = (rng.normal(0, 0.02, total).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    elif kind == "special":
        old = rng.choice(SPECIALS, total)
    else:
        old = np.full(total, draw(st.integers(0, 0xFFFF)), np.uint16)
    share = draw(st.sampled_from([0.0, 0.01, 0.2, 1.0]))
    moved = rng.random(total) < share
    change = draw(st.sampled_from(["step", "any", "special"]))
    new = old.copy()
    if change == "step":
        new[moved] += rng.integers(-2, 3, moved.sum()).astype(np.uint16)
    elif change == "any":
        new[moved] = rng.integers(0, 1 << 16, moved.sum(), dtype=np.uint16)
    else:
        new[moved] = rng.choice(SPECIALS, moved.sum())
    return old, new, np.cumsum(sizes)


@pytest.mark.parametrize("name", sorted(CODECS))
@given(weights())
def test_decoding_gives_the_new_bits_and_their_sums(name, case):
    old, new, ends = case
    bucket, update = round_trip(CODECS[name], old, new, ends)
    assert (tile_sums(old, ends) + bucket.sum_changes).tolist() == tile_sums(new, ends).tolist()
    assert update.sum_changes.tolist() == bucket.sum_changes.tolist()


@given(weights())
@settings(max_examples=20)
def test_sums_are_those_of_the_reference(case):
    _, new, ends = case
    assert tile_sums(new, ends).tolist() == sums_reference(new, ends)


@pytest.mark.parametrize("name", sorted(CODECS))
@given(weights(), st.data())
@settings(max_examples=30)
def test_a_tile_decodes_alone(name, case, data):
    old, new, ends = case
    codec = CODECS[name]
    bucket = codec.encode(old, new, ends)
    tile = data.draw(st.integers(0, len(ends) - 1))
    begin, end = [0, *ends][tile], ends[tile]
    first, last = [0, *bucket.payload_ends][tile], bucket.payload_ends[tile]
    payload = bucket.payload[first : last + 8]
    alone = old[begin:end].copy()
    update = codec.decode(bucket.shared, payload, np.array([last - first]), alone, np.array([end - begin]))
    apply_update(update, alone)
    assert np.array_equal(alone, new[begin:end])


@pytest.mark.parametrize("name", sorted(CODECS))
def test_another_base_is_noticed(name, rl_update):
    old, new, ends = rl_update
    codec = CODECS[name]
    bucket = codec.encode(old, new, ends)
    other = old.copy()
    other[::50] ^= 1
    try:
        update = codec.decode(bucket.shared, bucket.payload, bucket.payload_ends, other, ends)
    except CodecError:
        return
    result = other.copy()
    apply_update(update, result)
    agrees = tile_sums(other, ends) + update.sum_changes == tile_sums(new, ends)
    assert agrees.all() == np.array_equal(result, new)


def test_exponent_class_is_the_smallest(rl_update):
    old, new, _ = rl_update
    sizes = {name: codec.encode(*rl_update).size_bytes for name, codec in CODECS.items()}
    assert min(sizes, key=lambda name: sizes[name]) == "exponent_class"
    assert sizes["exponent_class"] < 0.25 * 6 * np.count_nonzero(old != new), "of what index and value take"


def test_exponent_class_is_near_the_entropy_of_its_model():
    """Independent changes whose chance depends on the exponent alone: what is counted is all there is to know."""
    rng = np.random.default_rng(3)
    old = (rng.normal(0, 0.02, 1 << 21).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    chance = np.clip(0.004 * 2.0 ** (122 - (old >> 7 & 0xFF).astype(float)), 0, 1)
    moved = rng.random(old.size) < chance
    new = old.copy()
    new[moved] += np.where(rng.random(moved.sum()) < 0.5, 1, 0xFFFF).astype(np.uint16)
    entropy = -(chance * np.log2(chance, where=chance > 0, out=np.zeros_like(chance))).sum()
    rest = 1 - chance
    entropy -= (rest * np.log2(rest, where=rest > 0, out=np.zeros_like(rest))).sum()
    entropy += moved.sum()
    size = ExponentClass().encode(old, new, np.array([1 << 20, 1 << 21])).size_bytes
    assert size * 8 <= 1.03 * entropy


@given(st.integers(0, 0xFFFF), st.integers(0, 0xFFFF))
def test_any_two_patterns_have_a_change(old, new):
    if old != new:
        change = change_of(old, new)
        assert 0 <= change < 1 << 16
        assert changed(old, change) == new


def test_neighbouring_values_are_one_step_apart():
    assert change_of(0x3F80, 0x3F81) == 0
    assert change_of(0x3F81, 0x3F80) == 1
    assert change_of(0xBF80, 0xBF81) == 1
    assert change_of(0x8000, 0x0000) == 0


@pytest.mark.parametrize("name", sorted(CODECS))
def test_what_cannot_be_encoded_is_refused(name):
    codec = CODECS[name]
    bits = np.zeros(10, np.uint16)
    with pytest.raises(ValueError, match="flat uint16"):
        codec.encode(bits, bits.astype(np.int32), np.array([10]))
    with pytest.raises(ValueError, match="do not add up"):
        codec.encode(bits, bits, np.array([4, 9]))
