import time
from dataclasses import dataclass, field

import pytest

from elastic.core.types import Nanoseconds
from elastic.engine.coserving.memory import SPARE_PAGES, SharedMemory
from elastic.engine.kv.slab import SlabBackend
from policies.kvmemory import PreemptiveMemory

MS = 1_000_000


@dataclass
class Pages:
    pages: int = 0

    def trim(self) -> None: ...

    def expire(self) -> None: ...


@dataclass
class Half:
    pool: Pages = field(default_factory=Pages)
    waited_ns: Nanoseconds = 0

    def needed_since_ns(self) -> Nanoseconds:
        return time.monotonic_ns() - self.waited_ns

    def give_back(self, most_pages: int) -> None:
        self.pool.pages = min(self.pool.pages, most_pages)


@pytest.fixture
def memory():
    shared = SharedMemory(SlabBackend(100 + SPARE_PAGES, 64), PreemptiveMemory(headroom_share=0.2))
    shared.serving, shared.rollout = Half(waited_ns=50 * MS), Half()
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
