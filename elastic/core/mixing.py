"""Which environment a group has: its share of a run's groups, by the group's number in the whole run. Pure."""

from collections.abc import Sequence


def next_of(ratios: Sequence[float], counts: Sequence[int]) -> int:
    """The environment of the next group, where each has had `counts` groups: the one that lacks most of its share.

    Of those that lack the same, the first is chosen. One with a ratio of 0 is never chosen while another's is above 0.
    """
    whole, number = sum(ratios), sum(counts) + 1
    return max(range(len(ratios)), key=lambda one: (ratios[one] * number / whole - counts[one], -one))


def counts_before(ratios: Sequence[float], number: int) -> list[int]:
    """How many groups of each environment come before the group with this number."""
    counts = [0] * len(ratios)
    if len(ratios) == 1:
        return [number]
    for _ in range(number):
        counts[next_of(ratios, counts)] += 1
    return counts
