from collections.abc import Callable
from contextlib import nullcontext

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from elastic.engine.coserving.blocks import LeasedBlocks
from elastic.engine.kv import KvLayout, PagePool
from elastic.engine.kv.slab import SlabBackend
from elastic.engine.torch.blocks import chain_digest, root_digest
from tests.seeds import examples

PAGES = 6
LAYOUT = KvLayout(page_bytes=4 * 64, slot_bytes=16, layers=1, block_tokens=4)


def make_blocks(
    pool: PagePool, now_ns: Callable[[], int] = lambda: 0, lease_ns: int = 10, limit: int = PAGES
) -> LeasedBlocks:
    blocks = LeasedBlocks(
        pool.space(),
        LAYOUT,
        pool.total,
        lease_ns,
        now_ns,
        growth=lambda: min(limit - blocks.pages, pool.free),
        growing=lambda count: nullcontext(),
        on_map=lambda page, index: None,
    )
    return blocks


class TwoModels(RuleBasedStateMachine):
    """Two models on one pool, each with sequences that come, share prefixes, go, and with leases that end."""

    def __init__(self) -> None:
        super().__init__()
        self.now_ns = 0
        self.pool = PagePool(SlabBackend(PAGES, LAYOUT.page_bytes))
        self.models = [make_blocks(self.pool, lambda: self.now_ns, lease) for lease in (0, 10)]
        self.held: list[tuple[LeasedBlocks, list[int]]] = []

    @rule(which=st.integers(0, 1), count=st.integers(1, 9))
    def allocate(self, which: int, count: int) -> None:
        model = self.models[which]
        if count <= model.available:
            blocks = model.allocate(count)
            assert len(set(blocks)) == count
            self.held.append((model, blocks))
        else:
            with pytest.raises(ValueError, match="blocks wanted"):
                model.allocate(count)

    @rule(which=st.integers(0, 1), prefix=st.integers(0, 2), count=st.integers(1, 4))
    def begin_cached(self, which: int, prefix: int, count: int) -> None:
        model = self.models[which]
        digests = [root_digest(prefix)]
        for index in range(count):
            digests.append(chain_digest(digests[-1], [index]))
        blocks = model.share(digests[1:])
        missing = count - len(blocks)
        if missing > model.available:
            model.release(blocks)
            return
        fresh = model.allocate(missing)
        for block, digest in zip(fresh, digests[1 + len(blocks) :], strict=True):
            model.register(block, digest)
        self.held.append((model, blocks + fresh))

    @precondition(lambda self: self.held)
    @rule(which=st.integers(0, 100))
    def release(self, which: int) -> None:
        model, blocks = self.held.pop(which % len(self.held))
        model.release(blocks)

    @rule(elapsed=st.integers(1, 12))
    def wait(self, elapsed: int) -> None:
        self.now_ns += elapsed
        for model in self.models:
            model.expire()
            assert model.next_expiry_ns is None or model.next_expiry_ns > self.now_ns

    @rule(which=st.integers(0, 1), pages=st.integers(0, 3))
    def take_back(self, which: int, pages: int) -> None:
        model = self.models[which]
        idle = model.pages - len(
            {block // LAYOUT.blocks_per_page for m, held in self.held if m is model for block in held}
        )
        model.drop_cached(pages)
        assert model.trim() >= min(pages, idle)

    @rule(which=st.integers(0, 1))
    def forget(self, which: int) -> None:
        self.models[which].forget()

    @invariant()
    def consistent(self) -> None:
        self.pool.check()
        for model in self.models:
            model.check()
            assert model.used == len({block for m, held in self.held if m is model for block in held})


TwoModels.TestCase.settings = settings(max_examples=examples(12, 60), stateful_step_count=30, deadline=None)
TestTwoModels = TwoModels.TestCase


@given(st.lists(st.integers(1, 5), min_size=1, max_size=10))
def test_without_a_lease_everything_goes_back_at_once(counts: list[int]) -> None:
    pool = PagePool(SlabBackend(PAGES, LAYOUT.page_bytes))
    blocks = make_blocks(pool, lease_ns=0)
    for count in counts:
        held = blocks.allocate(count)
        blocks.register(held[0], root_digest(count))
        blocks.release(held)
        assert blocks.share([root_digest(count)]) == []
    blocks.trim()
    assert (pool.free, blocks.pages) == (PAGES, 0)


def test_a_model_stays_within_its_limit() -> None:
    pool = PagePool(SlabBackend(PAGES, LAYOUT.page_bytes))
    blocks = make_blocks(pool, limit=2)
    assert blocks.available == 2 * LAYOUT.blocks_per_page
    held = blocks.allocate(blocks.available)
    assert (blocks.pages, blocks.available) == (2, 0)
    blocks.release(held)
