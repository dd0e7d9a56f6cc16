"""What holds for every page backend, and the pool above it."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic.engine.kv import OutOfPages, PagePool, PageSpace
from tests.seeds import examples


def page_of(space: PageSpace, index: int, page_bytes: int) -> torch.Tensor:
    """A page's bytes, by its index in the view."""
    return space.view(torch.uint8).narrow(0, index * page_bytes, page_bytes)


@given(st.lists(st.tuples(st.integers(0, 2), st.booleans(), st.integers(0, 7)), max_size=100))
@settings(max_examples=examples(24, 60), deadline=None)
def test_no_page_is_lost_or_in_two_spaces_and_each_keeps_what_was_written(
    make_pool, operations: list[tuple[int, bool, int]]
) -> None:
    pool: PagePool = make_pool()
    spaces = [pool.space() for _ in range(3)]
    written: list[dict[int, tuple[int, int]]] = [{} for _ in spaces]
    for step, (number, wants_more, which) in enumerate(operations):
        space, pages = spaces[number], written[number]
        if wants_more:
            before = pool.free
            try:
                virtual, index = space.map()
            except OutOfPages:
                assert before == 0
            else:
                assert pool.free == before - 1
                page = page_of(space, index, pool.page_bytes)
                assert not page.any()
                page.fill_(step % 251 + 1)
                pages[virtual] = (index, step % 251 + 1)
        elif pages:
            virtual = sorted(pages)[which % len(pages)]
            space.unmap(virtual)
            del pages[virtual]
        pool.check()
        assert sum(map(len, spaces)) + pool.free == pool.total
    for space, pages in zip(spaces, written, strict=True):
        assert space.physical.keys() == pages.keys()
        for index, value in pages.values():
            assert (page_of(space, index, pool.page_bytes) == value).all()
    for space in spaces:
        space.close()
    assert pool.free == pool.total
    pool.close()


def test_a_view_is_as_long_as_the_pool_and_shows_pages_that_come_later(make_pool) -> None:
    pool: PagePool = make_pool(total=3)
    space = pool.space()
    view = space.view(torch.bfloat16)
    assert view.numel() * view.itemsize == pool.total * pool.page_bytes
    indices = [space.map()[1] for _ in range(3)]
    assert sorted(indices) == [0, 1, 2]
    view.fill_(1.5)
    assert space.view(torch.bfloat16).eq(1.5).all()
    assert space.view(torch.uint8).data_ptr() == view.data_ptr()


def test_unmapping_what_is_not_mapped_is_refused(make_pool) -> None:
    space = make_pool().space()
    virtual, _ = space.map()
    space.unmap(virtual)
    with pytest.raises(ValueError, match="virtual page 0 is not mapped"):
        space.unmap(virtual)


def test_closing_the_pool_ends_every_space(make_pool) -> None:
    pool: PagePool = make_pool()
    for _ in range(3):
        pool.space().map()
    pool.close()
    assert pool.free == pool.total
    pool.check()
