"""All policies of ours pass the suite of policies, as they are installed."""

import itertools
from dataclasses import dataclass

import pytest

from elastic.compose.named_policies import ENTRY_POINTS
from elastic.system.installed import installed
from elastic.testing.policies import PolicyMistake, PolicyUnderTest, live_through
from elastic.testing.policy_conformance import *  # noqa: F403
from elastic.testing.policy_conformance import SEED, test_another_process_comes_to_the_same

pytest.mark.nightly(test_another_process_comes_to_the_same)  # Processes that start cost seconds.

DEFAULTS = [
    PolicyUnderTest("routing", "affinity"),
    PolicyUnderTest("balancing", "continuous"),
    PolicyUnderTest("seeding", "adaptive", {"initial_ns": 10**9}),
    PolicyUnderTest("provisioning", "marginal_value"),
    PolicyUnderTest("holding", "rollouts"),
    PolicyUnderTest("replacement", "early"),
    PolicyUnderTest("departure", "use_notice"),
    PolicyUnderTest("selection", "non_zero_variance"),
    PolicyUnderTest("sampling", "dynamic", {"most": 2.0}),
    PolicyUnderTest("curriculum", "by_difficulty"),
    PolicyUnderTest("placement", "ours"),
    PolicyUnderTest("tail", "long"),
    PolicyUnderTest("drift", "slo_at_stake"),
    PolicyUnderTest("charging", "idle_as_alone"),
    PolicyUnderTest("admission", "slo", {"slo": {"ttft_ns": 5 * 10**8, "tpot_ns": 10**8}, "longest_ns": 10**8}),
    PolicyUnderTest("memory", "preemptive"),
]
OTHERS = [
    PolicyUnderTest("routing", "static"),
    PolicyUnderTest("seeding", "fixed", {"duration_ns": 10**9}),
    PolicyUnderTest("provisioning", "take_all"),
    PolicyUnderTest("selection", "every_group"),
    PolicyUnderTest("sampling", "fixed"),
    PolicyUnderTest("placement", "weave"),
    PolicyUnderTest("admission", "exclusive"),
    PolicyUnderTest("memory", "fine_grained"),
]
BESIDES = [
    PolicyUnderTest("routing", "turn_wise"),
    PolicyUnderTest("placement", "gavel"),
    PolicyUnderTest("memory", "static"),
]
PLACEMENTS = [
    [PolicyUnderTest("placement", name)] for name in ("solo", "naive", "random", "most_idle", "ours_without_moves")
]


TOGETHER = [DEFAULTS, OTHERS, BESIDES, *PLACEMENTS]


@pytest.fixture(params=TOGETHER, ids=["defaults", "others", "besides", *(str(one) for (one,) in PLACEMENTS)])
def policies_under_test(request: pytest.FixtureRequest) -> list[PolicyUnderTest]:
    return request.param


def test_none_of_ours_is_left_out() -> None:
    tried = {str(one) for together in TOGETHER for one in together}
    assert tried >= {name for name, point in installed(ENTRY_POINTS).items() if point.module.startswith("policies.")}


@dataclass(frozen=True)
class Uninstalled(PolicyUnderTest):
    def make(self) -> object:
        return Fickle()


class Fickle:
    """It drops every other group."""

    count = itertools.count()

    def drop_reason(self, rewards: object) -> str | None:
        return "odd" if next(self.count) % 2 else None


def test_one_that_remembers_is_found_out() -> None:
    with pytest.raises(PolicyMistake, match="drop_reason answered None, and 'odd' to the same question"):
        live_through([Uninstalled("selection", "fickle")], SEED)
