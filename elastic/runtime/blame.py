"""Finds the episode that kills env workers: which episodes play together, which alone, and which have failed.

An episode whose code was running as its env worker died begins again. Once that has happened twice in a row, it is
played alone: nothing else runs in its env worker meanwhile, so that a further death is its own doing, and the second
such one fails it.
"""

import asyncio
from collections import deque
from dataclasses import dataclass, replace
from enum import Enum

TOGETHER_MAX, ALONE_MAX = 2, 2
"""Deaths in a row while an episode's code was running: beside others, and then alone."""
WAITED_MAX = 4
"""Deaths of which an episode that waited for the policy, while others ran, is not suspected."""


@dataclass(frozen=True, slots=True)
class Deaths:
    """Those of env workers that an episode has seen in a row, without having got on."""

    running: int = 0
    """As its code was running."""
    waiting: int = 0
    """As it waited for the policy, and code of others was running."""

    @property
    def alone(self) -> bool:
        """Whether it is to be played where nothing else runs."""
        return self.running >= TOGETHER_MAX or self.waiting >= WAITED_MAX

    @property
    def failed(self) -> bool:
        return self.running >= TOGETHER_MAX + ALONE_MAX

    def told(self, cause: str) -> str:
        """Why the episode has failed; `cause` is of the last death."""
        return f"{self.running} env workers in a row died of it, the last {ALONE_MAX} while nothing else ran: {cause}"

    def one_more(self, *, running: bool) -> "Deaths":
        if running or self.alone:
            return replace(self, running=self.running + 1)
        return replace(self, waiting=self.waiting + 1)


NO_DEATHS = Deaths()


class Blame(Enum):
    """What the death of an env worker may be blamed on."""

    WORKERS = "the env worker: nothing was under way"
    ANY = "any of the episodes that were under way, which begin again"
    EPISODES = "the episode that was alone, which has failed"


class Floor:
    """Which episodes may compute in an env worker: any number together, or one alone, in the order in which they
    ask."""

    def __init__(self) -> None:
        self._together = 0
        self._alone = False
        self._waiting: deque[tuple[bool, asyncio.Future[None]]] = deque()

    async def take(self, *, alone: bool) -> None:
        if not self._waiting and self._admits(alone):
            self._admit(alone)
            return
        let_in: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((alone, let_in))
        try:
            await let_in
        except asyncio.CancelledError:
            if let_in.done() and not let_in.cancelled():
                self.give(alone=alone)
            raise

    def give(self, *, alone: bool) -> None:
        if alone:
            self._alone = False
        else:
            self._together -= 1
        while self._waiting and (self._waiting[0][1].done() or self._admits(self._waiting[0][0])):
            wants_alone, let_in = self._waiting.popleft()
            if not let_in.done():
                self._admit(wants_alone)
                let_in.set_result(None)

    def _admits(self, alone: bool) -> bool:
        return not self._alone and not (alone and self._together)

    def _admit(self, alone: bool) -> None:
        if alone:
            self._alone = True
        else:
            self._together += 1
