import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.engine.kv import KvLayout
from elastic.engine.kv.layout import common_page_bytes

layouts = st.builds(
    lambda heads, size, itemsize, layers, tokens, spare: KvLayout(
        page_bytes=common_page_bytes(
            layers * tokens * heads * 2 * size * itemsize + spare, heads * 2 * size * itemsize
        ),
        slot_bytes=heads * 2 * size * itemsize,
        layers=layers,
        block_tokens=tokens,
    ),
    st.integers(1, 3),
    st.sampled_from([8, 20, 32]),
    st.sampled_from([2, 4]),
    st.integers(1, 4),
    st.sampled_from([4, 16]),
    st.integers(0, 50_000),
)


@given(layouts, st.integers(1, 3))
def test_layers_and_blocks_of_a_layout_never_overlap(layout: KvLayout, pages: int) -> None:
    slots = [
        layer * layout.layer_slots + layout.origin(page, block) + token
        for page in range(pages)
        for layer in range(layout.layers)
        for block in range(min(layout.blocks_per_page, 3))
        for token in range(layout.block_tokens)
    ]
    assert len(set(slots)) == len(slots)
    assert max(slots) < pages * layout.page_slots
    assert 0 <= layout.page_bytes - layout.blocks_per_page * layout.block_bytes < layout.page_bytes


def test_a_page_must_hold_a_block() -> None:
    with pytest.raises(ValueError, match="at least 4096 are needed"):
        KvLayout(page_bytes=2048, slot_bytes=128, layers=2, block_tokens=16)
    with pytest.raises(ValueError, match="multiple of a slot's 96"):
        KvLayout(page_bytes=2048, slot_bytes=96, layers=2, block_tokens=16)


def test_a_page_suits_both_models() -> None:
    page = common_page_bytes(2 << 20, 2 * 2 * 80 * 2, 4 * 2 * 64 * 4)
    assert page >= 2 << 20
    assert page % (2 * 2 * 80 * 2) == page % (4 * 2 * 64 * 4) == 0
