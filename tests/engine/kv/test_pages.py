import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elastic.engine.kv import KvLayout, OutOfPages, PagePool
from elastic.engine.kv.layout import common_page_bytes
from elastic.engine.kv.slab import SlabBackend


def make_pool(total: int = 8, page_bytes: int = 1024) -> PagePool:
    return PagePool(SlabBackend(total, page_bytes))


@given(st.lists(st.tuples(st.integers(0, 2), st.booleans(), st.integers(0, 7)), max_size=200))
def test_no_page_is_lost_or_in_two_spaces(operations: list[tuple[int, bool, int]]) -> None:
    pool = make_pool()
    spaces = [pool.space() for _ in range(3)]
    for number, wants_more, which in operations:
        space = spaces[number]
        if wants_more:
            before = pool.free
            try:
                virtual, _ = space.map()
            except OutOfPages:
                assert before == 0
            else:
                assert virtual in space.physical
                assert pool.free == before - 1
        elif space.physical:
            space.unmap(sorted(space.physical)[which % len(space)])
        pool.check()
        assert sum(map(len, spaces)) + pool.free == pool.total


def test_unmapping_what_is_not_mapped_is_refused() -> None:
    space = make_pool().space()
    virtual, _ = space.map()
    space.unmap(virtual)
    with pytest.raises(ValueError, match="virtual page 0 is not mapped"):
        space.unmap(virtual)


def test_a_page_changes_hands_clean() -> None:
    """Bits of one dtype may be infinities in another's."""
    pool = make_pool(total=1)
    a, b = pool.space(), pool.space()
    virtual, _ = a.map()
    a.view(torch.float32).fill_(-1.0)
    a.unmap(virtual)
    b.map()
    assert not b.view(torch.bfloat16).any()


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
    assert 0 <= layout.waste_share < 1


def test_a_page_must_hold_a_block() -> None:
    with pytest.raises(ValueError, match="at least 4096 are needed"):
        KvLayout(page_bytes=2048, slot_bytes=128, layers=2, block_tokens=16)
    with pytest.raises(ValueError, match="multiple of a slot's 96"):
        KvLayout(page_bytes=2048, slot_bytes=96, layers=2, block_tokens=16)


def test_a_page_suits_both_models() -> None:
    page = common_page_bytes(2 << 20, 2 * 2 * 80 * 2, 4 * 2 * 64 * 4)
    assert page >= 2 << 20
    assert page % (2 * 2 * 80 * 2) == page % (4 * 2 * 64 * 4) == 0
