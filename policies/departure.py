"""What a worker does between the notice of its lease's end and that end. Source: RLBoost §4.2.

Difference from the paper: there all turns move as soon as notice comes, and the device's remaining time is lost.
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence

import msgspec

from elastic.core.policy import LeavingView, TurnView
from elastic.core.types import NS_PER_S, Nanoseconds, TurnId


class UseNotice(msgspec.Struct, frozen=True):
    """Turns that are likely to end in time stay to their end; the others leave one by one, as late as possible.

    The likelihood is estimated from finished turns of the same tag that were longer than this turn is now: the share of
    them that would have ended in the remaining time. A turn that leaves is prefilled elsewhere, so departures are
    spaced by the prefill time. Turns leave in ascending order of what staying is worth: the prefill saved, times the
    chance to end in time.
    """

    likely: float = 0.5

    def takes(self, turn: TurnView, leaving: LeavingView, cached_tokens: int) -> bool:
        prefill_s = _prefill_s(turn.context_tokens - cached_tokens, leaving)
        return self._chance(turn, leaving, prefill_s) >= self.likely

    def stays_ns(self, turns: Sequence[TurnView], leaving: LeavingView) -> Mapping[TurnId, Nanoseconds]:
        stays_ns = {turn.id: leaving.left_ns for turn in turns}
        chances = {turn.id: self._chance(turn, leaving, 0.0) for turn in turns}
        must_leave = [turn for turn in turns if chances[turn.id] < self.likely]
        last_first = sorted(
            must_leave,
            key=lambda turn: (chances[turn.id] * _prefill_s(turn.context_tokens, leaving), turn.context_tokens),
            reverse=True,
        )
        at_ns = leaving.left_ns
        for turn in last_first:
            stays_ns[turn.id] = max(0, at_ns)
            at_ns -= round(_prefill_s(turn.context_tokens, leaving) * NS_PER_S / max(1, leaving.receivers))
        return stays_ns

    def _chance(self, turn: TurnView, leaving: LeavingView, prefill_s: float) -> float:
        """Return the probability that the turn ends in the time left, after `prefill_s` of it."""
        left_s = leaving.left_ns / NS_PER_S - prefill_s
        reach = turn.accepted + int(max(0.0, left_s) * leaving.decode_tokens_per_s)
        if reach >= turn.max_new_tokens:
            return 1.0
        lengths = sorted(turn.demand.lengths)
        first = bisect_right(lengths, turn.accepted)
        longer = len(lengths) - first
        return (bisect_right(lengths, reach) - first) / longer if longer else 0.0


def _prefill_s(tokens: int, leaving: LeavingView) -> float:
    """0 where the speed is unknown."""
    speed = leaving.prefill_tokens_per_s
    return max(0, tokens) / speed if speed else 0.0
