"""What the policies' conformance suite needs: policies under test, and what asks them: a run and a pool full of faults,
and a serving device."""

import functools
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import msgspec

from elastic.compose.checked_policies import CheckedPolicy
from elastic.compose.named_policies import named_policy
from elastic.core.decisions import DECISIONS, OF_DEVICES, OF_POOLS, OF_RUNS
from elastic.core.device_sharing import ArrivingPrefill, QueuedPrefill, ServingView
from elastic.core.types import NS_PER_S, Plan
from elastic.testing.faults.core.settings import MS, SimulatedProviderSettings, WorldSettings
from elastic.testing.faults.core.world import simulate
from elastic.testing.faults.pool.pool_worlds import PoolWorld, draw_pool, with_tails
from policies.clusters import CLUSTER_POLICIES
from policies.curriculum import OrderedPasses

ROWS = 3
"""The rows of data of a run that asks a curriculum."""
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


POOLS_MOST = 8
MOMENTS, PAGES = 100, 64
"""The times at which a serving device's policies are asked, and the pages of its KV memory."""


class PolicyMistake(AssertionError):
    """A policy has given two answers to one question."""


@dataclass(frozen=True)
class PolicyUnderTest:
    """A policy that is installed as `DECISION.NAME`, with settings of its own."""

    decision: str
    name: str
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def __str__(self) -> str:
        return f"{self.decision}.{self.name}"

    def make(self) -> Any:
        """One that is equal to all others, whose answers nobody checks. Raises `ConfigError` where there is none."""
        key = (self.decision, "policy")
        made = named_policy(
            self.decision, self.name, self.settings, where="the test", key=key, settings_key=(*key[:1], "settings")
        )
        return made.unchecked if isinstance(made, CheckedPolicy) else made


class TwiceAsked:
    """A policy of which each question is asked twice, the second time of another that is equal to it."""

    def __init__(self, under_test: PolicyUnderTest) -> None:
        self.questions = 0
        self.mistakes: list[str] = []
        """Different answers to the same question."""
        decision, whose = under_test.decision, str(under_test)
        self._one, self._other = (CheckedPolicy(under_test.make(), decision, whose) for _ in range(2))
        self._contract = DECISIONS[decision]

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._one, name)
        is_method = callable(getattr(self._contract, name, None))
        return functools.partial(self._asked, name, found) if is_method else found

    def _asked(self, name: str, ask: Callable[..., Any], *arguments: Any) -> Any:
        self.questions += 1
        first = ask(*arguments)
        second = getattr(self._other, name)(*arguments)
        if first != second:
            self.mistakes.append(f"{name} answered {first!r}, and {second!r} to the same question")
        return first


@dataclass(frozen=True)
class RunLived:
    """What a run, a pool and a device came to: hashes of all that has happened, and how many questions each policy was
    asked."""

    history: str
    questions: Mapping[str, int]


def live_through(together: Sequence[PolicyUnderTest], seed: int) -> RunLived:
    """Live through what asks these policies, of different decisions: a run or a pool while all kinds of faults strike,
    whose journal is replayed, or a serving device.

    Raises `PolicyMistake` where a policy gives two answers to a question, `PolicyFault` for an answer that it may not
    give, and `WorldFailed` or `AssertionError` where an invariant of the core does not hold, a run or a pool does not
    end, or its replay comes to something else.
    """
    asked = {str(one): TwiceAsked(one) for one in together}
    place = {one.decision: asked[str(one)] for one in together}
    lived = ((OF_RUNS, _run), (OF_POOLS, _pools), (OF_DEVICES, _device))
    try:
        history = "".join(live(own, seed) for kind, live in lived if (own := {d: place[d] for d in place if d in kind}))
    finally:
        if mistakes := [f"{name}: {mistake}" for name, one in asked.items() for mistake in one.mistakes]:
            raise PolicyMistake(mistakes[0])
    return RunLived(history, {name: one.questions for name, one in asked.items()})


def _run(asked: Mapping[str, TwiceAsked], seed: int) -> str:
    place: dict[str, Any] = dict(asked)
    if (curriculum := place.pop("curriculum", None)) is not None:
        place["curricula"] = {"": OrderedPasses(ROWS, seed, curriculum.order)}
    return simulate(seed, msgspec.structs.replace(WORLD, policies=place), digests=True).history


def _pools(asked: Mapping[str, TwiceAsked], seed: int) -> str:
    """One pool after the other until each policy was asked, of `POOLS_MOST` at most; in every second one tails move."""
    found = ""
    for number in range(POOLS_MOST):
        plan = draw_pool(seed + number)
        plan = plan if number % 2 else with_tails(plan)
        policies = msgspec.structs.replace(CLUSTER_POLICIES["ours"], **asked)
        found += PoolWorld(plan, policies=policies).run().history
        if number and all(one.questions for one in asked.values()):
            break
    return found


def _device(asked: Mapping[str, TwiceAsked], seed: int) -> str:
    """What a device's policies answer at moments that the seed draws."""
    rng, answers = Random(seed), list[object]()
    admission, memory = asked.get("admission"), asked.get("memory")
    if admission is not None:
        answers += [admission.allowance_ns(_moment(rng)) for _ in range(MOMENTS)]
    if memory is not None:
        answers.append(memory.lease_ns)
        for _ in range(MOMENTS // 10):
            budget = memory.begin_step(PAGES, [rng.randrange(PAGES) for _ in range(rng.randrange(5))])
            for _ in range(10):
                answers.append(budget)
                budget = memory.observe(budget, PAGES, rng.randrange(PAGES), rng.choice((0, 0, rng.randrange(9))))
    return hashlib.blake2b(repr(answers).encode(), digest_size=16).hexdigest()


def _moment(rng: Random) -> ServingView:
    now_ns = rng.randrange(NS_PER_S, 2 * NS_PER_S)
    return ServingView(
        now_ns=now_ns,
        queued=[
            QueuedPrefill(now_ns - rng.randrange(NS_PER_S), rng.randrange(100 * MS)) for _ in range(rng.randrange(3))
        ],
        last_tokens_ns=[now_ns - rng.randrange(50 * MS) for _ in range(rng.randrange(3))],
        decode_ns=rng.randrange(20 * MS),
        arriving=ArrivingPrefill(rng.randrange(200 * MS), rng.randrange(20 * MS)),
    )


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
