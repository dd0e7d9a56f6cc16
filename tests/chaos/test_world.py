"""Runs of the production shell on virtual time: whatever goes wrong, they come to what they had to come to."""

import os
import subprocess
import sys
from typing import Any

import pytest

from elastic.chaos.faults import Fault, FaultKind, Plan
from elastic.chaos.world import WorldFailed, simulate
from elastic.runtime.journal import JournalReader
from elastic.runtime.rollout import Rollouts
from elastic.runtime.trainer import GatewayTrainer

FIXED = range(60)
"""Seeds that every change is tried with."""


@pytest.mark.parametrize("first", range(FIXED.start, FIXED.stop, 10))
def test_runs_come_to_their_end(first: int) -> None:
    for seed in range(first, first + 10):
        simulate(seed)


def test_a_fresh_seed_does_too() -> None:
    first = int.from_bytes(os.urandom(3), "big")
    for seed in range(first, first + 10):
        simulate(seed)


def test_one_seed_gives_one_history_whatever_the_hashes() -> None:
    program = "from elastic.chaos.world import simulate; print([simulate(seed).history for seed in (3, 6, 11)])"
    found = {
        subprocess.run(
            [sys.executable, "-c", program],
            env=os.environ | {"PYTHONHASHSEED": number},
            capture_output=True,
            check=True,
        ).stdout
        for number in ("1", "2")
    }
    assert len(found) == 1


def kills(seed: int, *kinds: FaultKind) -> Plan:
    faults = tuple(Fault(kind=kind, at_s=2 + 0.9 * n, chance=0.2, duration_s=0.4) for n, kind in enumerate(kinds))
    return Plan(
        seed=seed,
        steps=4,
        groups=4,
        places=2,
        staleness_bound=1,
        checkpoint_every=2,
        faults=faults,
        end_s=2 + len(faults),
    )


EVERYTHING = (
    FaultKind.KILL_ORCHESTRATOR,
    FaultKind.KILL_TRAINER,
    FaultKind.KILL_WORKER,
    FaultKind.KILL_BOTH,
    FaultKind.CUT,
)


def never(*_: Any, **__: Any) -> Any:
    return None


def skipping_one(read: Any) -> Any:
    return lambda self, after=0: read(self, after + 1)


BUGS: dict[str, tuple[type[Any], str, Any]] = {
    "a trainer that is behind is not given what it lacks": (GatewayTrainer, "_go_on", lambda self: self._joined()),
    "orders are not saved": (GatewayTrainer, "saved", lambda self: []),
    "orders are not recalled": (GatewayTrainer, "remember", never),
    "accepted tokens are not saved": (Rollouts, "saved", lambda self: ({t: [] for t in self._running}, [])),
    "turns are not recalled": (Rollouts, "recalled", never),
    "an event is passed over": (JournalReader, "entries", skipping_one(JournalReader.entries)),
}


@pytest.mark.slow
@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_found(monkeypatch: pytest.MonkeyPatch, bug: str) -> None:
    kind, name, instead = BUGS[bug]
    monkeypatch.setattr(kind, name, instead)

    def worlds() -> None:
        for seed in range(20):
            simulate(seed, kills(seed, *EVERYTHING))

    with pytest.raises(WorldFailed):
        worlds()
