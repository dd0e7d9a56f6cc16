"""Rows that a curriculum orders: every pass has each once, whatever dies, and what is no row ends the run in words."""

import itertools
import pickle
from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.core import commands as c
from elastic.core import events as e
from elastic.core import saved_state
from elastic.core.rows import KNOWN_MAX, PassOrder, PassView, RowProgress
from elastic.core.scheduler import Scheduler
from elastic.core.types import PolicyFault
from policies.curriculum import ByDifficulty, OrderedPasses
from tests.core.conftest import CoreHarness

MakeCore = Callable[..., CoreHarness]


@given(
    rows=st.integers(1, 40),
    seed=st.integers(0, 2**63),
    rewards=st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0]), max_size=120),
    kills=st.sets(st.integers(0, 120)),
)
def test_every_pass_has_each_row_once_whatever_is_killed(
    rows: int, seed: int, rewards: list[float], kills: set[int]
) -> None:
    """A process that goes on has the state of the one before, and nothing else."""
    curriculum, progress = OrderedPasses(rows, seed, ByDifficulty().order), RowProgress()
    undisturbed, taken = RowProgress(), list[int]()
    for place, reward in enumerate(rewards):
        if place in kills:
            progress = pickle.loads(pickle.dumps(progress))
        row = progress.next_row(curriculum)
        assert row == undisturbed.next_row(curriculum)
        progress.note(row, reward)
        undisturbed.note(row, reward)
        taken.append(row)
    for start in range(0, len(taken), rows):
        of_pass = Counter(taken[start : start + rows])
        assert max(of_pass.values()) == 1
        assert set(of_pass) <= set(range(rows))


def test_rows_that_have_something_to_teach_come_first() -> None:
    curriculum, progress = OrderedPasses(10, 3, ByDifficulty().order), RowProgress()
    known = {4: 0.5, 7: 1.0, 2: 0.0, 9: 0.125}
    for _ in range(10):
        progress.next_row(curriculum)
    for row, reward in known.items():
        progress.note(row, reward)
    of_pass = [progress.next_row(curriculum) for _ in range(10)]
    assert of_pass[:2] == [4, 9]
    assert of_pass[-2:] == [7, 2]


def test_what_is_remembered_of_rows_is_bounded() -> None:
    progress = RowProgress()
    for row in range(KNOWN_MAX + 5):
        progress.note(row, 0.5)
    progress.note(5, 1.0)
    assert len(progress.rewards) == KNOWN_MAX
    assert list(progress.rewards)[-1] == 5


def orders(*first: object) -> Callable[[PassView], PassOrder]:
    return lambda _: PassOrder(first=first)  # type: ignore[arg-type]


def never_ends(_: PassView) -> PassOrder:
    return PassOrder(first=itertools.count())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("order", "told"),
    [
        (orders(10), "returned 10 (int), which is no row; allowed: an int from 0 to 9"),
        (orders(-1), "returned -1 (int), which is no row"),
        (orders("a"), "returned 'a' (str), which is no row"),
        (orders("a" * 1000), "aaa (str), which is no row"),
        (orders(True), "returned True (bool), which is no row"),
        (lambda _: [3, 4], "returned [3, 4] (list); allowed: a PassOrder"),
        (never_ends, "returned 10 (int), which is no row"),
        (orders(3, 3), "returned row 3 twice"),
    ],
)
def test_a_curriculum_that_returns_what_is_no_row_is_told_in_words(
    order: Callable[[PassView], PassOrder], told: str
) -> None:
    with pytest.raises(PolicyFault) as bad:
        RowProgress().next_row(OrderedPasses(10, 0, order))
    assert told in str(bad.value)
    assert len(str(bad.value)) < 200


def test_a_group_has_the_row_that_the_core_chose_also_in_the_next_process(make_core: MakeCore) -> None:
    curriculum = OrderedPasses(5, 1, ByDifficulty().order)
    core = make_core(curricula={"": curriculum}, groups=2, steps=2)
    begun = [start.row for start in core.trainer(capacity=8) if isinstance(start, c.StartGroup)]
    assert len(set(begun)) == 2
    scheduler = core.scheduler
    other = Scheduler(scheduler.plan, scheduler.limits, scheduler.policies, 0)
    saved_state.restore(other, saved_state.save(scheduler))
    for one in (scheduler, other):
        for trajectory, reward in (("0/0/0", 1.0), ("0/0/1", 0.0)):
            one.handle(e.TrajectoryFinished(trajectory=trajectory, reward=reward, tokens=0), 0)
        progress = one.pieces[0].rows[""]
        assert progress.rewards == {begun[0]: 0.5}
        assert progress.given == 2
