"""Who stays on a worker that leaves, until when, and who may still begin there."""

from dataclasses import dataclass, field

import pytest

from elastic.core.demand import Demand
from elastic.core.turns import Turn
from elastic.core.types import NS_PER_S
from policies.departure import UseNotice

POLICY = UseNotice()


@dataclass
class Leaving:
    left_s: float = 100.0
    decode_tokens_per_s: float = 10.0
    prefill_tokens_per_s: float = 1000.0
    receivers: int = 1
    id: str = "w"
    left_ns: int = field(init=False)

    def __post_init__(self) -> None:
        self.left_ns = round(self.left_s * NS_PER_S)


def a_turn(
    name: str = "t", prompt: int = 0, accepted: int = 0, lengths: tuple[int, ...] = (), most: int = 9999
) -> Turn:
    demand = Demand()
    for length in lengths:
        demand.note(0, length)
    return Turn(name, name, prompt, most, 0, 0, demand=demand, accepted=accepted)


def stays_s(*turns: Turn, leaving: Leaving | None = None) -> dict[str, float]:
    stays = POLICY.stays_ns(turns, leaving or Leaving())
    return {turn: round(stay_ns / NS_PER_S, 3) for turn, stay_ns in stays.items()}


def test_turn_that_is_likely_to_end_stays_to_its_end() -> None:
    assert stays_s(a_turn(lengths=(500, 900, 5000))) == {"t": 100.0}


def test_turns_that_are_not_leave_one_after_the_other_with_time_for_a_prefill_between_them() -> None:
    turns = [a_turn(name, prompt=2000, lengths=(5000,)) for name in "abc"]
    assert sorted(stays_s(*turns).values()) == [96.0, 98.0, 100.0]


def test_several_receivers_prefill_at_once() -> None:
    turns = [a_turn(name, prompt=2000, lengths=(5000,)) for name in "abc"]
    assert sorted(stays_s(*turns, leaving=Leaving(receivers=4)).values()) == [99.0, 99.5, 100.0]


def test_too_many_for_the_time_begin_to_leave_at_once() -> None:
    turns = [a_turn(f"{n}", prompt=2000, lengths=(5000,)) for n in range(80)]
    stays = stays_s(*turns)
    assert min(stays.values()) == 0.0
    assert max(stays.values()) == 100.0


def test_what_is_dear_to_prefill_and_may_yet_end_leaves_last() -> None:
    """Both end in a third of the cases."""
    lengths = (900, 5000, 5000)
    stays = stays_s(a_turn("short", prompt=100, lengths=lengths), a_turn("long", prompt=9000, lengths=lengths))
    assert stays["short"] < stays["long"] == 100.0


def test_what_a_turn_has_decoded_tells_of_what_is_left() -> None:
    """Of those that were longer than 2000 tokens none was longer than 2500."""
    lengths = (100, 200, 300, 2500)
    assert stays_s(a_turn(accepted=0, lengths=(5000, *lengths)), leaving=Leaving(left_s=60)) == {"t": 60.0}
    leaves, stays = a_turn("a", prompt=9, accepted=1000, lengths=lengths), a_turn("b", accepted=2000, lengths=lengths)
    assert POLICY.takes(stays, Leaving(left_s=60), cached_tokens=2000)
    assert not POLICY.takes(leaves, Leaving(left_s=60), cached_tokens=1000)


@pytest.mark.parametrize(
    ("turn", "leaving", "cached", "taken"),
    [
        (a_turn(lengths=(500,)), Leaving(), 0, True),
        (a_turn(lengths=(5000,)), Leaving(), 0, False),
        # Its context takes the time that it would need; unless it is there already.
        (a_turn(prompt=60_000, lengths=(500,)), Leaving(), 0, False),
        (a_turn(prompt=60_000, lengths=(500,)), Leaving(), 50_000, True),
        # Nothing is known of such turns but how long they may be at the most.
        (a_turn(), Leaving(), 0, False),
        (a_turn(most=900), Leaving(), 0, True),
        (a_turn(lengths=(500,)), Leaving(decode_tokens_per_s=0.0), 0, False),
        (a_turn(lengths=(500,)), Leaving(left_s=0.0), 0, False),
    ],
)
def test_only_what_is_expected_to_end_may_begin(turn: Turn, leaving: Leaving, cached: int, taken: bool) -> None:
    assert POLICY.takes(turn, leaving, cached) is taken
