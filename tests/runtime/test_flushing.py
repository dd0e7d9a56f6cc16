"""The control of the flush interval: within its bounds, soon where the load wants it, and at rest once it is there."""

import asyncio
from collections import deque
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.runtime.flushing import FELT, KEPT, LOOK_S, STEP_MAX, WANTED_SHARE, CoreLoad, FlushControl, follow_load
from elastic.runtime.snapshot import conditions
from elastic.runtime.status import core_words
from tests.core.conftest import CoreHarness

LEAST_S, MOST_S = 0.03, 0.25
A_SECOND = round(1 / LOOK_S)


class Core:
    """A core whose load is a fixed share, and frames that cost `frames_share` where they come every `LEAST_S`.

    Workers follow `late` looks after they are told. `noise` is how far a look may be off, as a share of it.
    """

    def __init__(self, late: int = 1, noise: float = 0.0, seed: int = 0) -> None:
        self.control = FlushControl(LEAST_S, MOST_S)
        self.fixed_share = self.frames_share = 0.0
        self.told = 0
        self._intervals_s = deque([LEAST_S] * (late + 1), maxlen=late + 1)
        self._noise, self._rng = noise, Random(seed)

    def look(self, times: int = 1) -> list[float]:
        """The intervals in force."""
        found: list[float] = []
        for _ in range(times):
            share = min(1.0, self.fixed_share + self.frames_share * LEAST_S / self._intervals_s[0])
            self.told += self.control.note(max(0.0, share * (1 + self._rng.uniform(-self._noise, self._noise))))
            self._intervals_s.append(self.control.interval_s)
            found.append(self.control.interval_s)
        return found


def settled_s(frames_share: float) -> float:
    return min(MOST_S, max(LEAST_S, LEAST_S * frames_share / WANTED_SHARE))


@given(st.lists(st.floats(0, 20), max_size=40), st.floats(0.001, 0.3), st.floats(0.001, 1.0))
def test_it_stays_within_its_bounds_and_moves_by_bounded_steps(shares: list[float], least_s: float, most_s: float):
    control, last_s = FlushControl(least_s, most_s), least_s
    for share in shares:
        changed = control.note(share)
        assert control.least_s <= control.interval_s <= control.most_s
        assert changed == (control.interval_s != last_s)
        assert control.interval_s <= last_s * STEP_MAX + 1e-12
        last_s = control.interval_s


def test_an_idle_core_changes_nothing() -> None:
    core = Core()
    core.fixed_share = 0.9 * WANTED_SHARE
    assert set(core.look(200)) == {LEAST_S}
    assert core.told == 0


@pytest.mark.parametrize("late", [0, 1, 2])
@given(frames_share=st.floats(0.0, 2.0), before=st.floats(0.0, 2.0))
def test_a_step_of_the_load_is_followed_within_a_second_or_two(late: int, frames_share: float, before: float) -> None:
    """And then nobody is told anything any more."""
    core = Core(late)
    core.frames_share = before
    core.look(10 * A_SECOND)
    core.frames_share = frames_share
    core.look(2 * A_SECOND)
    wanted_s, felt = settled_s(frames_share), FELT**2
    assert wanted_s / felt <= core.control.interval_s <= wanted_s * felt
    told = core.told
    core.look(10 * A_SECOND)
    assert core.told == told


def test_it_is_back_within_a_second_of_the_loads_end() -> None:
    core = Core(late=0)
    core.frames_share, core.fixed_share = 2.0, 0.5
    assert core.look(10 * A_SECOND)[-1] == MOST_S
    core.frames_share = core.fixed_share = 0.0
    assert core.look(A_SECOND - 1)[-1] == LEAST_S


@given(seed=st.integers(0, 1000), frames_share=st.floats(0.2, 0.9), late=st.integers(0, 2))
def test_noise_neither_drives_it_away_nor_has_workers_told_all_the_time(seed: int, frames_share: float, late: int):
    core = Core(late, noise=0.2, seed=seed)
    core.frames_share = frames_share
    core.look(4 * A_SECOND)
    told = core.told
    intervals_s = core.look(60 * A_SECOND)
    wanted_s = settled_s(frames_share)
    assert all(wanted_s / 2 <= interval_s <= wanted_s * 2 for interval_s in intervals_s)
    assert core.told - told <= 60


def test_the_share_that_is_shown_is_that_of_seconds() -> None:
    control = FlushControl(LEAST_S, MOST_S)
    control.note(1.0)
    assert control.share == pytest.approx(1 - KEPT)
    for _ in range(100):
        control.note(1.0)
    assert control.share > 0.99


def test_a_full_core_is_a_condition_of_the_run() -> None:
    scheduler = CoreHarness().scheduler
    assert "CoreSaturated" not in {found.type for found in conditions(scheduler, 0, CoreLoad(0.9, 0.25))}
    (found,) = (one for one in conditions(scheduler, 0, CoreLoad(0.95, 0.25)) if one.type == "CoreSaturated")
    assert "95%" in found.message


def test_what_is_shown_says_what_a_kill_would_lose() -> None:
    assert core_words(0.12, 0.03, 1000.0) == "core 12%, tokens every 30 ms: killed workers lose 30 at the most"


async def test_workers_are_told_of_each_new_interval() -> None:
    """A core that is full all the time: three steps from the least interval to the longest."""
    told: list[float] = []
    loop, control = asyncio.get_running_loop(), FlushControl(LEAST_S, MOST_S)
    there = asyncio.Event()

    def tell(interval_s: float) -> None:
        told.append(interval_s)
        if interval_s == MOST_S:
            there.set()

    following = asyncio.create_task(follow_load(control, tell, loop.time))
    async with asyncio.timeout(20.0):
        await there.wait()
    following.cancel()
    assert told == sorted(told)
    assert control.interval_s == MOST_S
