import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.weights.choice import COSTS, ExpectedChange, choose_codec, predicted_bytes
from elastic.weights.plan import PublishedUpdate, needed_from, shortest_path

updates = st.sets(
    st.tuples(st.integers(0, 8), st.none() | st.integers(0, 8))
    .filter(lambda pair: pair[1] is None or pair[1] < pair[0])
    .map(lambda pair: PublishedUpdate(*pair)),
    max_size=20,
)


def reachable(published: set[PublishedUpdate], held: int | None) -> set[int]:
    found = {update.version for update in published if update.base is None} | ({held} - {None})
    while more := {update.version for update in published if update.base in found} - found:
        found |= more
    return found


@given(updates, st.none() | st.integers(0, 8), st.integers(0, 8))
def test_a_path_leads_from_what_is_held_to_what_is_wanted(
    published: set[PublishedUpdate], held: int | None, wanted: int
):
    path = shortest_path(published, held, wanted)
    assert (path is not None) == (wanted in reachable(published, held))
    at = held
    for update in path or ():
        assert update in published
        assert update.base in (None, at)
        at = update.version
    assert path is None or at == wanted


@given(updates, st.integers(0, 8))
def test_what_a_newcomer_needs_is_enough(published: set[PublishedUpdate], wanted: int):
    kept = {update for update in published if update.version in needed_from(published, [wanted])}
    assert (shortest_path(kept, None, wanted) is None) == (shortest_path(published, None, wanted) is None)


def test_a_merged_delta_beats_a_chain_and_a_chain_beats_a_keyframe():
    chain = {PublishedUpdate(v, v - 1) for v in range(1, 5)} | {PublishedUpdate(0, None), PublishedUpdate(4, None)}
    assert shortest_path(chain, 0, 4) == [PublishedUpdate(v, v - 1) for v in range(1, 5)]
    assert shortest_path(chain | {PublishedUpdate(4, 0)}, 0, 4) == [PublishedUpdate(4, 0)]
    assert shortest_path(chain, None, 4) == [PublishedUpdate(4, None)]
    assert shortest_path(chain, 4, 4) == []


@pytest.mark.parametrize(
    ("changed", "bits", "gbps", "codec"),
    [
        (0.01, 2.0, 0.03, "exponent_class"),
        (0.7, 3.0, 0.1, "exponent_class"),
        (0.01, 2.0, 400, "gap8"),
        (0.013, 2.0, 0.03, "exponent_class"),
        (0.013, 2.0, 0.5, "gap8"),
        (0.057, 2.0, 5, "gap8"),
        (1.0, 16.0, 0.01, "dense"),
        (1.0, 16.0, 400, "raw"),
    ],
)
def test_the_link_and_what_changed_decide(changed: float, bits: float, gbps: float, codec: str):
    change = ExpectedChange(1 << 25, int(changed * (1 << 25)), bits)
    assert choose_codec(change, gbps * 125e6) == codec


def test_the_copy_before_encoding_counts_as_encoding() -> None:
    """Decoding that is hidden behind it costs little, so that fewer bytes do not pay there."""
    assert choose_codec(ExpectedChange(1 << 25, int(0.013 * (1 << 25))), 0.1 * 125e6) != "exponent_class"


@given(st.integers(0, 1 << 25), st.floats(0, 16), st.floats(1e3, 1e12))
def test_some_codec_is_chosen_for_everything(changed: int, bits: float, link_bytes_per_s: float):
    change = ExpectedChange(1 << 25, changed, bits)
    assert choose_codec(change, link_bytes_per_s) in COSTS
    assert all(predicted_bytes(codec, change) >= 0 for codec in COSTS)
