"""Runs that are given caps and budgets while everything goes wrong (`elastic.testing.faults.core.commands`)."""

import pytest

from elastic.core import allowance, control_manager
from elastic.core.control_manager import ControlManager
from elastic.core.controls import BUDGET_EXHAUSTED
from elastic.testing.faults.core.world import SimulatedOutcome, simulate
from elastic.testing.faults.outcome import WorldFailed

SEEDS = 3


def live(seed: int, *, digests: bool = False) -> SimulatedOutcome:
    return simulate(seed, commanded=True, digests=digests)


def test_commands_hold_in_every_world() -> None:
    """Several worlds, since a command may come at any moment."""
    ends = [live(seed).incarnations[-1].scheduler.stopped.partition(":")[0] for seed in range(SEEDS)]
    assert ends.count(BUDGET_EXHAUSTED) >= 1


def test_a_commanded_world_replays_and_repeats_itself() -> None:
    assert live(7, digests=True).history == live(7).history


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_commands_hold_in_many_worlds() -> None:
    for seed in range(SEEDS, 2000):
        live(seed)


def forget_stopping(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (allowance, control_manager):
        monkeypatch.setattr(module, "stopping_ns", lambda run: 0)


def forget_caps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allowance, "_cap_room", lambda run, offer: None)


def forget_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ControlManager, "_first", lambda self, event: True)


@pytest.mark.parametrize(
    ("plant", "found", "seeds"),
    [
        (forget_stopping, "are billed, the budget was", (10,)),
        (forget_caps, "capped at", (35,)),
        (forget_ids, "commands forgotten", (39,)),
    ],
)
def test_worlds_find_what_breaks_a_promise(plant, found: str, seeds, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    for seed in seeds:
        with pytest.raises(WorldFailed, match=found):
            live(seed)
