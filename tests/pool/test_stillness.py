"""A silent process hangs if it does nothing, and not if it computes or is kept from it."""

import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest

from elastic.pool.stillness import Silence, Stillness
from elastic.system.processes import is_due, used_ticks

IDLE = "import sys; print(flush=True); sys.stdin.read()"
BUSY = "print(flush=True)\nwhile True: pass"


def looks(stillness: Stillness, used: list[int | None], *, due: bool = False, since_s: float = 0.0) -> list[float]:
    """What is found at looks a second apart."""
    return [stillness.hangs(one, lambda: due, since_s + number) for number, one in enumerate(used)]


def test_who_uses_no_processor_hangs_after_its_limit() -> None:
    assert looks(Stillness(2.0), [5, 5, 5, 5]) == [0, 0, 2, 3]


def test_who_computes_or_waits_for_a_processor_or_is_gone_does_not() -> None:
    assert not any(looks(Stillness(2.0), [5, 6, 6, 7, 7, 8]))
    assert not any(looks(Stillness(2.0), [5] * 9, due=True))
    assert not any(looks(Stillness(2.0), [5, 5, None, None, None, None]))


def test_what_was_not_looked_at_for_long_may_have_been_held_up_like_who_looks() -> None:
    stillness = Stillness(2.0)
    assert not any(looks(stillness, [5, 5]))
    assert looks(stillness, [5, 5, 5], since_s=600.0) == [0, 0, 2]


def test_who_was_still_and_spoke_again_has_three_times_as_long_for_a_while() -> None:
    stillness = Stillness(2.0)
    assert not any(looks(stillness, [5, 5]))
    stillness.spoke(1.5)
    assert stillness.limit_s(2.0) == 4.5
    assert looks(stillness, [5] * 6, since_s=10.0) == [0, 0, 0, 0, 0, 5]
    assert stillness.limit_s(5000.0) == 2.0


def test_who_says_nothing_hangs_after_its_limit_whatever_it_does() -> None:
    silence = Silence(3.0)
    assert [silence.hangs(1.0, now_s) for now_s in (1.5, 2.0, 3.0, 4.0, 5.0)] == [0, 0, 0, 3, 4]


def test_who_was_silent_and_spoke_again_has_three_times_as_long_for_a_while_and_ten_times_at_most() -> None:
    silence = Silence(3.0)
    assert not any(silence.hangs(1.0, now_s) for now_s in (1.0, 2.0, 3.0, 3.5))
    assert silence.hangs(3.75, 4.0) == 0
    assert silence.limit_s(4.0) == 7.5, "at the last look it had been silent for 2.5 s"
    assert [silence.hangs(3.75, now_s) for now_s in (5.0, 6.0, 7.0, 8.0, 9.0, 10.0, 11.0, 12.0)] == [0] * 7 + [8.25]
    assert silence.hangs(300.0, 300.5) == 0, "it had been silent for longer than anybody may be"
    assert silence.limit_s(301.0) == 24.75
    silence.hangs(301.0, 301.0)
    for now_s in range(302, 314):
        silence.hangs(301.0, float(now_s))
    silence.hangs(314.0, 314.0)
    assert silence.limit_s(314.0) == 30.0
    assert silence.limit_s(5000.0) == 3.0


def test_who_was_held_up_knows_nothing_of_the_time_in_between() -> None:
    silence = Silence(3.0)
    assert silence.hangs(1.0, 1.0) == 0
    assert [silence.hangs(1.0, now_s) for now_s in (60.0, 61.0, 62.0, 63.0)] == [0, 0, 0, 3]


@pytest.fixture(params=[IDLE, BUSY], ids=["idle", "busy"])
def process(request: pytest.FixtureRequest) -> Iterator[psutil.Process]:
    child = subprocess.Popen([sys.executable, "-S", "-c", request.param], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.readline()
    yield psutil.Process(child.pid)
    child.kill()
    child.communicate()


def test_a_process_is_due_while_it_runs_or_waits_to_and_never_while_it_is_stopped(process: psutil.Process) -> None:
    busy = BUSY in process.cmdline()
    while is_due(process.pid) is not busy:
        pass  # The one that waits for its input is just on its way there.
    process.suspend()
    while is_due(process.pid):
        pass
    used = used_ticks(process.pid)
    assert used is not None
    assert used_ticks(process.pid) == used
    process.kill()
    process.wait()
    assert used_ticks(process.pid) is None
    assert not is_due(process.pid)
