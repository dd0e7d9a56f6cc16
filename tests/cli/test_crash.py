"""Runs whose processes are killed with SIGKILL at any moment, and go on: judged by their journals as in the benchmark.

A calm run with the same seed says what they must come to.
"""

import random
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks import _crashes, _runs
from elastic.runtime.journal import RunDirectory
from tests import proof

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.alone, pytest.mark.nightly]

STEPS = 6


@pytest.fixture
def begin(config: Path) -> Iterator[Callable[..., Any]]:
    """A run under way; whatever is left of it is ended with the test."""
    begun: list[Any] = []

    def run(*settings: str, providers: str = "serving,spot") -> Any:
        own = ("trainer.max_restarts=1000", "trainer.checkpoint_every_steps=2", f"run.steps={STEPS}", *settings)
        overrides = [part for setting in own for part in ("--set", setting)]
        begun.append(_crashes.CrashingRun(config.parent / "runs", [str(config), "--providers", providers, *overrides]))
        return begun[-1]

    yield run
    for one in begun:
        one.discard()


@pytest.fixture
def as_if_undisturbed(begin: Callable[..., Any]) -> Callable[[Any], None]:
    """The run has come to what it would have come to, nothing of it was lost or done twice, and nothing is left."""

    def check(run: Any) -> None:
        verdict = proof.check_run(RunDirectory(run.run_dir))
        assert verdict.tokens_lost == verdict.tokens_duplicated == 0
        assert verdict.groups_twice == verdict.turns_repeated == verdict.ledger_imbalance_ns == 0
        assert run.leftovers() == []
        calm = begin(providers="")
        calm.wait()
        expected, found = (proof.trajectories(RunDirectory(one.run_dir)) for one in (calm, run))
        assert expected.keys() == found.keys()
        assert [name for name in expected if not proof.same_episode(expected[name], found[name])] == []
        assert proof.same_weights(calm.run_dir, run.run_dir)

    return check


def under_way(run: Any) -> None:
    run.until("tokens", run.has_gone_on)


@pytest.mark.parametrize("seed", [2])
def test_killed_at_any_moment(begin, as_if_undisturbed, seed: int) -> None:
    """Orchestrator, trainer and both, now and then before they have gone on."""
    run = begin("weights.relay=http" if seed % 2 else "rewards.name=frozenlake")
    victims = deque(["orchestrator", "trainer", "both", "orchestrator"])
    run.disturb(random.Random(seed), victims)
    assert run.kills.total() >= 3
    as_if_undisturbed(run)


def test_taken_up_a_week_later_with_other_providers(begin, as_if_undisturbed) -> None:
    """Nothing of it is alive any more, nor in memory."""
    run = begin()
    under_way(run)
    run.kill("orchestrator")
    for process in _runs.processes_of(run.run_dir.name):
        process.kill()
    for place in run.memory:
        for blob in place.iterdir():
            blob.unlink()
        place.rmdir()
    run.resume("--providers", "reserved")
    run.wait()
    with RunDirectory(run.run_dir).newest_journal() as journal:
        assert journal.meta()["providers"] == "reserved"
    as_if_undisturbed(run)
