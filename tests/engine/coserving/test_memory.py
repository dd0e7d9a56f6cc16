import time
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from elastic.core.types import Nanoseconds
from elastic.engine.coserving.blocks import LeasedBlocks
from elastic.engine.coserving.memory import SPARE_PAGES, SharedMemory
from elastic.engine.coserving.spec import PageLending
from elastic.engine.kv import KvLayout
from elastic.engine.kv.slab import SlabBackend
from policies.kvmemory import FineGrainedMemory, PreemptiveMemory, StaticPartition

MS = 1_000_000
LAYOUT = KvLayout(page_bytes=4 * 64, slot_bytes=16, layers=1, block_tokens=4)
PAGES = 12


@dataclass
class Pages:
    pages: int = 0

    def trim(self) -> None: ...


@dataclass
class FakeEngine:
    pool: Pages = field(default_factory=Pages)
    waited_ns: Nanoseconds = 0

    def needed_since_ns(self) -> Nanoseconds:
        return time.monotonic_ns() - self.waited_ns

    def tidy(self) -> None: ...

    def give_back(self, most_pages: int) -> None:
        self.pool.pages = min(self.pool.pages, most_pages)


def no_failure() -> None:
    raise AssertionError("nothing may fail here")


@pytest.fixture
def memory():
    shared = SharedMemory(SlabBackend(100 + SPARE_PAGES, 64), PreemptiveMemory(headroom_share=0.2), no_failure)
    shared.serving, shared.rollout = FakeEngine(waited_ns=50 * MS), FakeEngine()
    yield shared
    shared.pages.close()


def test_a_reclaim_lasts_from_the_need_until_serving_has_its_pages(memory: SharedMemory):
    memory.rollout.pool.pages = 80
    with memory.serving_lending().growing(15):
        memory.serving.pool.pages = 15
        assert not memory.reclaims_ns
    assert memory.budget.cuts == 1
    assert memory.rollout.pool.pages == 40
    (reclaim_ns,) = memory.reclaims_ns
    assert 50 * MS <= reclaim_ns < 50_000 * MS


def test_pages_that_were_free_are_no_reclaim(memory: SharedMemory):
    memory.rollout.pool.pages = 60
    with memory.serving_lending().growing(5):
        memory.serving.pool.pages = 5
    assert not memory.reclaims_ns


def test_what_was_lacking_is_free_before_it_is_mapped(memory: SharedMemory):
    memory.rollout.pool.pages = 80
    held = memory.pages.space()
    for _ in range(80):
        held.map()
    with memory.serving_lending().growing(40):
        assert memory.rollout.pool.pages <= 60


def test_a_new_steps_smaller_budget_is_no_reclaim(memory: SharedMemory):
    memory.rollout.pool.pages = 80
    memory.serving.pool.pages = 5
    memory.share(time.monotonic_ns())
    memory.begin_step()
    memory.share(time.monotonic_ns())
    assert memory.rollout.pool.pages == memory.budget.pages == 75
    assert not memory.reclaims_ns


def test_a_step_that_begins_a_moment_after_another_knows_what_serving_uses(memory: SharedMemory):
    memory.serving.pool.pages = 50
    memory.share(time.monotonic_ns())
    for _ in range(2):
        memory.begin_step()
        assert memory.budget.expected_pages == 50


class Sequences:
    """An engine as the memory sees it: blocks in use by sequences, of which the newest are given up first."""

    def __init__(self, memory: SharedMemory, lending: PageLending) -> None:
        space = memory.pages.space()
        space.map()  # for padding
        self.pool = LeasedBlocks(
            space, LAYOUT, memory.pages.total, 0, lambda: 0, lending.growth, lending.growing, lambda page, index: None
        )
        self.held: list[list[int]] = []

    def begin(self, blocks: int) -> None:
        self.held.append(self.pool.allocate(blocks))

    def end(self, which: int) -> None:
        if self.held:
            self.pool.release(self.held.pop(which % len(self.held)))

    def needed_since_ns(self) -> Nanoseconds:
        return 0

    def tidy(self) -> None:
        self.pool.trim()

    def give_back(self, most_pages: int) -> None:
        self.pool.trim()
        while self.pool.pages > most_pages:
            self.end(-1)
            self.pool.trim()


class Sharing(RuleBasedStateMachine):
    """Serving and rollouts come and go; whatever rollouts hold, serving gets what its share allows, at once."""

    @initialize(policy=st.sampled_from([PreemptiveMemory(), FineGrainedMemory(), StaticPartition()]))
    def start(self, policy) -> None:
        self.now_ns = 0
        self.memory = memory = SharedMemory(SlabBackend(PAGES + SPARE_PAGES, LAYOUT.page_bytes), policy, no_failure)
        self.serving = memory.serving = Sequences(memory, memory.serving_lending())
        self.rollout = memory.rollout = Sequences(memory, memory.rollout_lending())

    @rule(blocks=st.integers(1, 20))
    def serve(self, blocks: int) -> None:
        if blocks <= self.serving.pool.available:
            self.serving.begin(blocks)

    @rule(blocks=st.integers(1, 20))
    def roll_out(self, blocks: int) -> None:
        if blocks <= self.rollout.pool.available:
            self.rollout.begin(blocks)

    @rule(who=st.booleans(), which=st.integers(0, 50))
    def end(self, who: bool, which: int) -> None:
        (self.serving if who else self.rollout).end(which)

    @rule()
    def begin_step(self) -> None:
        self.memory.begin_step()

    @rule(elapsed_ms=st.integers(1, 300))
    def look(self, elapsed_ms: int) -> None:
        self.now_ns += elapsed_ms * MS
        self.memory.share(self.now_ns)
        assert self.rollout.pool.pages <= self.memory.budget.pages

    @rule()
    def serving_takes_all_that_is_its_share(self) -> None:
        blocks = self.memory.budget.serving_pages * LAYOUT.blocks_per_page - self.serving.pool.used
        if blocks:
            self.serving.begin(blocks)
        assert self.serving.pool.pages == self.memory.budget.serving_pages

    @invariant()
    def consistent(self) -> None:
        if hasattr(self, "memory"):
            self.memory.pages.check()
            self.serving.pool.check()
            self.rollout.pool.check()


Sharing.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestSharing = Sharing.TestCase
