"""A scheduler that takes over a saved state is where the other one was, and goes on like it."""

import pickle
from random import Random
from typing import Any

import pytest

from elastic.core import saved_state
from elastic.core.digest import digest
from elastic.core.saved_state import StateError
from elastic.core.scheduler import Scheduler
from elastic.core.step_controller import StepController
from elastic.testing.faults.core.incarnation import fresh_core
from elastic.testing.faults.core.world import simulate
from tests.core.conftest import part
from tests.seeds import seeds


@pytest.mark.parametrize("seed", seeds(2, 6))
def test_wherever_a_run_is_cut_it_goes_on_as_it_would_have(seed: int) -> None:
    outcome = simulate(seed)
    events = max((journal.events for journal in outcome.journals), key=len)
    for cut in Random(f"{seed}/cut").sample(range(len(events)), 2):
        former = fresh_core(outcome.settings)
        for now_ns, event in events[:cut]:
            former.handle(event, now_ns)
        saved = saved_state.save(former, {"beside": (1, "2")})
        later = fresh_core(outcome.settings)
        assert saved_state.restore(later, saved) == ({"beside": (1, "2")},)
        assert digest(later) == digest(former)
        for now_ns, event in events[cut:]:
            assert later.handle(event, now_ns) == former.handle(event, now_ns), f"seed {seed}, cut {cut}"
            assert later.next_wakeup_ns() == former.next_wakeup_ns()
        assert digest(later) == digest(former)


@pytest.fixture
def core() -> Scheduler:
    return fresh_core(simulate(1).settings)


class Malice:
    def __reduce__(self) -> Any:
        return print, ("executed",)


@pytest.mark.parametrize("other", [Malice(), Random, print])
def test_nothing_is_looked_up_but_the_programs_own_types(
    core: Scheduler, other: object, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(StateError):
        saved_state.restore(core, pickle.dumps((dict[str, Any](), other)))
    assert not capsys.readouterr().out


def test_what_is_damaged_or_of_another_shape_is_refused(core: Scheduler) -> None:
    saved = saved_state.save(core)
    for cut in range(0, len(saved) - 1, 7):
        with pytest.raises(StateError):
            saved_state.restore(core, saved[:cut])
    part(core, StepController).new_attribute = 1  # type: ignore[attr-defined]
    with pytest.raises(StateError, match="StepController has other attributes"):
        saved_state.restore(core, saved)
