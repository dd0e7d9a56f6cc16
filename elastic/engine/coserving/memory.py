"""The KV memory that two models share: one pool of pages, divided by the memory policy. Serving takes pages back from
rollouts.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Protocol

from elastic.core.device_sharing import MemoryPolicy
from elastic.core.types import NS_PER_S, Nanoseconds
from elastic.engine.coserving.blocks import LeasedBlocks
from elastic.engine.coserving.spec import PageLending
from elastic.engine.kv import PageBackend, PagePool

SPARE_PAGES = 2
"""One for each model's padding; they are never lent."""
SAMPLE_EVERY_NS = NS_PER_S // 10
SAMPLES_KEPT = 600
CARRIED_SAMPLES = 20
"""The latest count towards the next step, too, which may begin a moment later."""


class PageHolder(Protocol):
    """The part of an engine that the shared memory uses."""

    pool: LeasedBlocks


class PageOwner(PageHolder, Protocol):
    def needed_since_ns(self) -> Nanoseconds:
        """Since when serving needs the pages that it is about to map."""
        ...


class PageBorrower(PageHolder, Protocol):
    def tidy(self) -> None:
        """Returns unused pages to the pool."""
        ...

    def give_back(self, most_pages: int) -> None:
        """Hold at most so many pages, at once."""
        ...


class SharedMemory:
    """Used by the executor's thread, or under its lock. `serving` is set once, `rollout` while there is one.

    `lose_rollout` is called where the rollouts' part fails to give back what it must; after that it holds nothing.
    """

    def __init__(self, backend: PageBackend, policy: MemoryPolicy, lose_rollout: Callable[[], None]) -> None:
        if backend.total <= SPARE_PAGES:
            raise ValueError(f"a device of {backend.total} pages is too small: at least {SPARE_PAGES + 1} are needed")
        self.pages = PagePool(backend)
        self.usable = backend.total - SPARE_PAGES
        self.serving: PageOwner | None = None
        self.rollout: PageBorrower | None = None
        self.serving_peak = 0
        self.reclaims_ns: deque[Nanoseconds] = deque(maxlen=10_000)
        """From serving's need of pages, for which rollouts gave up some, to its having them."""
        self._policy = policy
        self._lose_rollout = lose_rollout
        self._recent: deque[int] = deque(maxlen=SAMPLES_KEPT)
        self._sampled_ns = 0
        self.budget = policy.begin_step(self.usable, ())

    @property
    def most_rollout_pages(self) -> int:
        """The most pages that rollouts may have, which is while serving needs none."""
        return self._policy.begin_step(self.usable, ()).pages

    @property
    def serving_pages(self) -> int:
        return self.serving.pool.pages if self.serving is not None else 0

    @property
    def rollout_pages(self) -> int:
        return self.rollout.pool.pages if self.rollout is not None else 0

    def serving_lending(self) -> PageLending:
        # Serving's KV is of no use once its request is over: prompts of different users share nothing.
        return PageLending(self._serving_growth, self._serving_growing, lease_ns=0)

    def rollout_lending(self) -> PageLending:
        return PageLending(self._rollout_growth, lambda pages: nullcontext(), self._policy.lease_ns)

    def begin_step(self) -> None:
        """The budget of a new step, from serving's use since the last."""
        self.budget = self._policy.begin_step(self.usable, tuple(self._recent))
        latest = tuple(self._recent)[-CARRIED_SAMPLES:]
        self._recent.clear()
        self._recent.extend(latest)

    def share(self, now_ns: Nanoseconds) -> None:
        """Returns unused pages, and lets the memory policy share the pool anew by serving's present use."""
        if self.serving is not None:
            self.serving.pool.trim()
        self._ask_rollout(lambda rollout: rollout.tidy())
        self.serving_peak = max(self.serving_peak, self.serving_pages)
        if now_ns - self._sampled_ns >= SAMPLE_EVERY_NS:
            self._sampled_ns = now_ns
            self._recent.append(self.serving_pages)
        self._observe(0)

    def _serving_growth(self) -> int:
        return min(self.budget.serving_pages - self.serving_pages, self._free + self.rollout_pages)

    def _rollout_growth(self) -> int:
        return min(self.budget.pages - self.rollout_pages, self._free - self.budget.reserve_pages)

    @property
    def _free(self) -> int:
        """Free pages, but for the spare one of a rollout model that is yet to come."""
        return self.pages.free - (self.rollout is None)

    @contextmanager
    def _serving_growing(self, pages: int) -> Iterator[None]:
        """Makes room before serving maps so many pages, and applies the policy to its new use afterwards.

        Rollouts give up what is lacking.
        """
        assert self.serving is not None
        needed_since_ns = self.serving.needed_since_ns()
        gave_back = pages > self._free and self._observe(pages)
        yield
        if self._observe(0) or gave_back:
            self.reclaims_ns.append(time.monotonic_ns() - needed_since_ns)

    def _observe(self, needed_pages: int) -> bool:
        """Let the policy act on serving's use; whether rollouts gave something back for it."""
        self.budget = self._policy.observe(self.budget, self.usable, self.serving_pages, needed_pages)
        if self.rollout is None or self.rollout_pages <= self.budget.pages:
            return False
        self._ask_rollout(lambda rollout: rollout.give_back(self.budget.pages))
        return True

    def _ask_rollout(self, act: Callable[[PageBorrower], None]) -> None:
        """Serving must not suffer where the rollouts' part fails."""
        if self.rollout is None:
            return
        try:
            act(self.rollout)
        except Exception:
            self._lose_rollout()
