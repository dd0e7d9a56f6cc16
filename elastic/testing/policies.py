"""What the policies' conformance suite needs: policies under test, and a run full of faults that asks them."""

import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from elastic.compose.named_policies import named_policy
from elastic.core.types import NS_PER_S, Plan
from elastic.testing.faults.core.settings import MS, SimulatedProviderSettings, WorldSettings
from elastic.testing.faults.core.world import simulate
from policies.curriculum import OrderedPasses

ROWS = 3
"""Of the data of a run that asks a curriculum."""
SPOT = SimulatedProviderSettings(
    name="spot", leases=2, overlap=1, life_ns=4 * NS_PER_S, notice_ns=1500 * MS, boot_ns=400 * MS
)
SERVING = SimulatedProviderSettings(
    name="serving", leases=1, usd_per_gpu_hour=1.25, boot_ns=200 * MS, serving_gap_ns=2 * NS_PER_S
)
WORLD = WorldSettings(
    plan=Plan(steps=2, groups=2, group_size=2),
    providers=(SPOT, SERVING),
    seeding_ns=500 * MS,
    capacity_turns=2,
    max_batch=1,
    max_turns=2,
    max_new_tokens=10,
    train_ns=3 * NS_PER_S,
    fault_span_ns=4 * NS_PER_S,
)
"""A small run in which every decision is to be made: leases end by time, and turns wait for each other."""


class PolicyMistake(AssertionError):
    """A policy has done what its contract does not allow."""


@dataclass(frozen=True)
class PolicyUnderTest:
    """A policy that is installed as `DECISION.NAME`, with settings of its own."""

    decision: str
    name: str
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def __str__(self) -> str:
        return f"{self.decision}.{self.name}"

    def make(self) -> Any:
        """One that is equal to all others. Raises `ConfigError` where there is none such."""
        key = (self.decision, "policy")
        return named_policy(
            self.decision, self.name, self.settings, where="the test", key=key, settings_key=(*key[:1], "settings")
        )


class TwiceAsked:
    """A policy of which each question is asked twice, the second time of another that is equal to it."""

    def __init__(self, under_test: PolicyUnderTest) -> None:
        self.questions = 0
        self.mistakes: list[str] = []
        """Different answers to the same question."""
        self._one, self._other = under_test.make(), under_test.make()

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._one, name)
        return functools.partial(self._asked, name, found) if callable(found) else found

    def _asked(self, name: str, ask: Callable[..., Any], *arguments: Any) -> Any:
        self.questions += 1
        first = ask(*arguments)
        second = getattr(self._other, name)(*arguments)
        if first != second:
            self.mistakes.append(f"{name} answered {first!r}, and {second!r} to the same question")
        return first


@dataclass(frozen=True)
class RunLived:
    """What a run came to: a hash of all that has happened in it, and how many questions each policy was asked."""

    history: str
    questions: Mapping[str, int]


def live_through(together: Sequence[PolicyUnderTest], seed: int) -> RunLived:
    """A run that asks these policies, of different decisions, while all kinds of faults strike. Its journal is replayed
    after each event.

    Raises `PolicyMistake` where a policy gives two answers to a question, and `WorldFailed` where an invariant of the
    core does not hold, the run does not end, or its replay comes to something else.
    """
    asked = {str(one): TwiceAsked(one) for one in together}
    place: dict[str, Any] = {one.decision: asked[str(one)] for one in together}
    if (curriculum := place.pop("curriculum", None)) is not None:
        place["curricula"] = {"": OrderedPasses(ROWS, seed, curriculum.order)}
    try:
        history = simulate(seed, msgspec.structs.replace(WORLD, policies=place), digests=True).history
    finally:
        if mistakes := [f"{name}: {mistake}" for name, one in asked.items() for mistake in one.mistakes]:
            raise PolicyMistake(mistakes[0])
    return RunLived(history, {name: one.questions for name, one in asked.items()})


def history_elsewhere(together: Sequence[PolicyUnderTest], seed: int) -> str:
    """The same run's history in another process, whose sets and dictionaries of texts are in another order."""
    told = json.dumps([[one.decision, one.name, dict(one.settings)] for one in together])
    environment = {**os.environ, "PYTHONHASHSEED": "7" if os.environ.get("PYTHONHASHSEED") != "7" else "8"}
    command = [sys.executable, "-c", "from elastic.testing.policies import main; main()", told, str(seed)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=600).stdout


def main() -> None:
    told, seed = sys.argv[1:]
    together = [PolicyUnderTest(*one) for one in json.loads(told)]
    sys.stdout.write(live_through(together, int(seed)).history)
