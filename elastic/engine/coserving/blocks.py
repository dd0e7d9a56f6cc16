"""A model's KV blocks on pages that come and go.

Blocks are virtual: block b lies in virtual page b // blocks_per_page, and can be used while that page is
mapped. Pages are mapped when a sequence needs blocks, lowest first, so that use stays together, and given back
as soon as no block of theirs is used or cached. A cached block is kept for a lease after its last use. Source:
ROSE §4.1.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

from sortedcontainers import SortedSet

from elastic.core.types import Nanoseconds
from elastic.engine.kv import KvLayout, PageSpace
from elastic.engine.torch.blocks import BlockPool


class LeasedBlocks(BlockPool):
    """`BlockPool` whose memory is a `PageSpace`.

    `growth` says how many more pages this model may map now; `growing` is the context in which so many are mapped,
    which frees them where others hold them. With a lease of zero nothing is cached.
    """

    def __init__(
        self,
        space: PageSpace,
        layout: KvLayout,
        total_pages: int,
        lease_ns: Nanoseconds,
        now_ns: Callable[[], Nanoseconds],
        growth: Callable[[], int],
        growing: Callable[[int], AbstractContextManager[None]],
        on_map: Callable[[int, int], None],
    ) -> None:
        self._per_page = layout.blocks_per_page
        super().__init__(total_pages * self._per_page)
        self._free.clear()
        self._space = space
        self._lease_ns = lease_ns
        self._now_ns = now_ns
        self._growth = growth
        self._growing = growing
        self._on_map = on_map
        self._expiry_ns: dict[int, Nanoseconds] = {}
        self._in_page: dict[int, list[int]] = {}
        """Free blocks of each mapped page."""
        self._open: SortedSet = SortedSet()
        """Mapped pages with a free block."""
        self._free_count = 0
        self._users_in: Counter[int] = Counter()
        """Used blocks of each mapped page."""

    @property
    def pages(self) -> int:
        """Pages that this model has mapped."""
        return len(self._in_page)

    @property
    def blocks_per_page(self) -> int:
        return self._per_page

    @property
    def available(self) -> int:
        return self._idle + max(0, self._growth()) * self._per_page

    @property
    def used(self) -> int:
        return self.pages * self._per_page - self._idle

    @property
    def next_expiry_ns(self) -> Nanoseconds | None:
        return self._expiry_ns[next(iter(self._cached))] if self._cached else None

    @property
    def _idle(self) -> int:
        return self._free_count + len(self._cached)

    def allocate(self, count: int) -> list[int]:
        if count > self._free_count:
            self._grow(-(-(count - self._free_count) // self._per_page))
        while self._free_count < count and self._cached:
            self._put_back(self._evict())
        if self._free_count < count:
            raise ValueError(f"{count} blocks wanted, {self._free_count} available")
        return [self._take() for _ in range(count)]

    def share(self, digests: Sequence[bytes]) -> list[int]:
        blocks = super().share(digests)
        for block in blocks:
            if self._expiry_ns.pop(block, None) is not None:
                self._users_in[block // self._per_page] += 1
        return blocks

    def forget(self) -> None:
        super().forget()
        self._expiry_ns.clear()

    def expire(self) -> None:
        """End the leases that are over."""
        now_ns = self._now_ns()
        while self._cached and self._expiry_ns[next(iter(self._cached))] <= now_ns:
            self._put_back(self._evict())

    def trim(self) -> int:
        """Give back every page that holds nothing; returns how many."""
        empty = [page for page in self._open if len(self._in_page[page]) == self._per_page]
        for page in empty:
            self._open.remove(page)
            del self._in_page[page]
            del self._users_in[page]
            self._free_count -= self._per_page
            self._space.unmap(page)
        return len(empty)

    def drop_cached(self, pages: int) -> None:
        """Forget cached blocks until so many pages hold nothing, oldest first, sparing pages that are in use."""
        candidates = dict.fromkeys(
            page for block in self._cached if not self._users_in[page := block // self._per_page]
        )
        doomed = set(list(candidates)[:pages])
        for block in [block for block in self._cached if block // self._per_page in doomed]:
            del self._cached[block]
            del self._expiry_ns[block]
            self._unregister(block)
            self._put_back(block)

    def check(self) -> None:
        mapped = set(self._in_page)
        assert mapped <= self._space.physical.keys(), "a page is used that is not mapped"
        free = [block for blocks in self._in_page.values() for block in blocks]
        in_use = [block for block in range(self.total) if self._users[block]]
        states = sorted([*free, *self._cached, *in_use])
        expected = sorted(page * self._per_page + i for page in mapped for i in range(self._per_page))
        assert states == expected, "a block is lost, in two states or outside of what is mapped"
        assert len(free) == self._free_count
        assert set(self._open) == {page for page, blocks in self._in_page.items() if blocks}
        assert Counter(block // self._per_page for block in in_use) == +self._users_in
        assert self._expiry_ns.keys() == self._cached.keys()
        self._check_digests(free)

    def _grow(self, wanted: int) -> None:
        """Map up to `wanted` pages."""
        count = min(wanted, self._growth())
        if count <= 0:
            return
        with self._growing(count):
            for _ in range(count):
                page, index = self._space.map()
                self._on_map(page, index)
                self._in_page[page] = [page * self._per_page + i for i in reversed(range(self._per_page))]
                self._open.add(page)
                self._free_count += self._per_page

    def _take(self) -> int:
        page = self._open[0]
        free = self._in_page[page]
        block = free.pop()
        self._free_count -= 1
        if not free:
            self._open.remove(page)
        self._users[block] = 1
        self._users_in[page] += 1
        return block

    def _rest(self, block: int) -> None:
        self._users_in[block // self._per_page] -= 1
        if not self._lease_ns:
            self._unregister(block)
        super()._rest(block)
        if block in self._cached:
            self._expiry_ns[block] = self._now_ns() + self._lease_ns

    def _put_back(self, block: int) -> None:
        page = block // self._per_page
        self._in_page[page].append(block)
        self._open.add(page)
        self._free_count += 1

    def _evict(self) -> int:
        block = super()._evict()
        del self._expiry_ns[block]
        return block
