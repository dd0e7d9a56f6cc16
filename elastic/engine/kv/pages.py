"""One pool of physical pages, and a virtual KV space for each model, whose pages are mapped on demand.

Book-keeping only: what mapping a page means on a device is the backend's. A page is free, or mapped at exactly
one place of exactly one space. Source: ROSE §4.1, "VMM-based Cross-Model KV Cache Memory Sharing".
"""

from contextlib import ExitStack
from heapq import heapify, heappop, heappush
from typing import Any, Protocol


class OutOfPages(Exception):
    """No page can be mapped: the pool is empty, or the space has reached its limit."""


class PageBackend(Protocol):
    """Physical pages on a device, and how a model's kernels reach them."""

    page_bytes: int
    total: int

    def begin(self, space: int) -> None:
        """A space is going to be used, in which nothing is mapped yet."""
        ...

    def map(self, space: int, virtual: int, physical: int) -> int:
        """Make a physical page reachable, zeroed; returns its index in `view` of that space."""
        ...

    def unmap(self, space: int, virtual: int, physical: int) -> None: ...

    def view(self, space: int, dtype: Any) -> Any:
        """All pages that the space may ever reach, as one flat tensor of `dtype`."""
        ...

    def end(self, space: int) -> None:
        """The space, in which nothing is mapped any more, will not be used again."""
        ...

    def close(self) -> None:
        """Give the device's memory back. All spaces have ended."""
        ...


class PagePool:
    """The physical pages of a backend. Used by one thread."""

    def __init__(self, backend: PageBackend) -> None:
        self.backend = backend
        self.total = backend.total
        self.mapped_ever = 0
        self.unmapped_ever = 0
        self._free = list(range(self.total - 1, -1, -1))
        self._spaces: dict[int, PageSpace] = {}
        self._spaces_ever = 0

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def page_bytes(self) -> int:
        return self.backend.page_bytes

    def space(self) -> "PageSpace":
        """A new virtual space, as long as the pool, with nothing mapped."""
        number = self._spaces_ever
        self._spaces_ever += 1
        self.backend.begin(number)
        space = self._spaces[number] = PageSpace(self, number)
        return space

    def end(self, number: int) -> None:
        self.backend.end(number)
        del self._spaces[number]

    def close(self) -> None:
        """End every space, and give the device's memory back; what fails keeps nothing else from it."""
        with ExitStack() as closing:
            closing.callback(self.backend.close)
            for space in self._spaces.values():
                closing.callback(space.close)

    def check(self) -> None:
        """Assert that no page is lost or in two places (for tests)."""
        mapped = [page for space in self._spaces.values() for page in space.physical.values()]
        assert sorted([*self._free, *mapped]) == list(range(self.total)), "a page is lost or in two places"
        assert self.mapped_ever - self.unmapped_ever == len(mapped)

    def take(self) -> int:
        if not self._free:
            raise OutOfPages(f"all {self.total} pages are mapped")
        self.mapped_ever += 1
        return self._free.pop()

    def give(self, physical: int) -> None:
        self.unmapped_ever += 1
        self._free.append(physical)


class PageSpace:
    """Virtual pages 0 to `pool.total` − 1 of one model; the lowest unmapped one is mapped first."""

    def __init__(self, pool: PagePool, number: int) -> None:
        self._pool = pool
        self._number = number
        self._unmapped = list(range(pool.total))
        heapify(self._unmapped)
        self.physical: dict[int, int] = {}
        """Physical page of each mapped virtual page."""

    def __len__(self) -> int:
        """How many pages are mapped."""
        return len(self.physical)

    def map(self) -> tuple[int, int]:
        """A virtual page that is mapped now, and its index in the space's view. Raises `OutOfPages`."""
        physical = self._pool.take()
        virtual = heappop(self._unmapped)
        try:
            index = self._pool.backend.map(self._number, virtual, physical)
        except BaseException:
            self._put_back(virtual, physical)
            raise
        self.physical[virtual] = physical
        return virtual, index

    def unmap(self, virtual: int) -> None:
        """The page's content is gone and its memory free. Raises `ValueError` for a page that is not mapped."""
        if virtual not in self.physical:
            raise ValueError(f"virtual page {virtual} is not mapped")
        self._pool.backend.unmap(self._number, virtual, self.physical[virtual])
        self._put_back(virtual, self.physical.pop(virtual))

    def view(self, dtype: Any) -> Any:
        return self._pool.backend.view(self._number, dtype)

    def close(self) -> None:
        """Give every page back; the space is not used again."""
        for virtual in list(self.physical):
            self.unmap(virtual)
        self._pool.end(self._number)

    def _put_back(self, virtual: int, physical: int) -> None:
        heappush(self._unmapped, virtual)
        self._pool.give(physical)
