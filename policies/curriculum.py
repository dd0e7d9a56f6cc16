"""Which row of a data set a group is about.

`in_order` and `shuffled` are functions of how many groups of its environment came before it, and of nothing else. Other
curricula order each pass by what groups have come to (`elastic.core.rows`), as `ByDifficulty` does. Either way no row
is repeated and none is left out, whatever dies: each pass over the data has every row once.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import msgspec

from elastic.core.rows import PassOrder, PassView, permuted

PlaceCurriculum = Callable[[int, int, int], int]
"""The row for a group's place, of so many rows, with a seed."""
PassCurriculum = Callable[[PassView], PassOrder]
"""Which rows come first in a pass, and which last (`elastic.core.policy.CurriculumPolicy.order`)."""


def in_order(place: int, rows: int, seed: int) -> int:
    """The rows as they come, over and over."""
    return place % rows


def shuffled(place: int, rows: int, seed: int) -> int:
    """Every pass in another order, which follows from the seed."""
    number, place = divmod(place, rows)
    return permuted(place, rows, f"{seed}/{number}")


class ByDifficulty(msgspec.Struct, frozen=True):
    """First the rows whose last group came to a mean reward that is neither 0 nor 1: they have something to teach.
    Those that came to one of these come last, and rows of which nothing is known between them."""

    def order(self, view: PassView, /) -> PassOrder:
        known = view.rewards.items()
        return PassOrder(
            first=[row for row, reward in known if reward not in (0.0, 1.0)],
            last=[row for row, reward in known if reward in (0.0, 1.0)],
        )


CURRICULA: Mapping[str, PlaceCurriculum] = {"shuffled": shuffled, "in_order": in_order}
"""By the names that configurations give them."""


@dataclass(frozen=True)
class OrderedPasses:
    """The rows of an environment, ordered pass by pass (`elastic.core.rows.Curriculum`)."""

    rows: int
    seed: int
    ordering: PassCurriculum

    def order(self, view: PassView) -> PassOrder:
        return self.ordering(view)
