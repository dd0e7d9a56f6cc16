"""What policies of other packages answer is checked, and a fault names the policy, its package and what is allowed."""

from dataclasses import dataclass, field
from types import MappingProxyType, SimpleNamespace
from typing import Any, cast

import msgspec
import numpy as np
import pytest

from elastic.compose.checked_policies import CheckedPolicy
from elastic.core.cluster import Cluster, WaitLimits
from elastic.core.cluster.policy import BillShare, PlacementChoice
from elastic.core.device_sharing import Budget
from elastic.core.policy import BatchView, Move, SeedingPlan
from elastic.core.rows import PassOrder, PassView
from elastic.core.types import PolicyFault
from elastic.pool.control import PoolCommandManager
from elastic.pool.control_messages import PlanJob, PoolRefusal
from policies.clusters import CLUSTER_POLICIES
from tests.cluster.conftest import THREE_OF_EACH, timed_job

WHOSE = "decision.theirs of the package theirs 1"
TURN = SimpleNamespace(id="t", oldest_version=0)
FLEET = SimpleNamespace(with_room=lambda worker, version: TURN if worker == "w" else None)
LOADS = [SimpleNamespace(id="w", movable_pending=lambda: ["t"], movable_executing=lambda: ["u"])]
MARKET = SimpleNamespace(available=lambda provider: 3)
OFFER = SimpleNamespace(provider="spot")
LEAVING = SimpleNamespace(left_ns=5)
BATCH = BatchView(wanted=2, launched=0, running=0, finished=0, rejected=0)
GROUP = SimpleNamespace(members={"a": None})
SLICE = SimpleNamespace(nodes=("n", "m"))
SHARES = [BillShare(job="a", used=1, alone=2)]
VIEW = PassView(0, 2, {})
NAN = float("nan")


@dataclass(frozen=True)
class Answering:
    """A policy with the same answer to everything."""

    answer: Any
    weight: float = 1.0

    def __getattr__(self, name: str) -> Any:
        def answered(*_: object) -> Any:
            if isinstance(self.answer, BaseException):
                raise self.answer
            return self.answer

        return answered


class Unprintable:
    def __repr__(self) -> str:
        raise SystemExit(4)


@dataclass(frozen=True)
class Sampling:
    replaces_rejected: Any = field(default=1)


def asked(decision: str, method: str, answer: Any, *arguments: Any) -> Any:
    return getattr(CheckedPolicy(Answering(answer), decision, WHOSE), method)(*arguments)


ASKED: dict[str, tuple[str, tuple[Any, ...]]] = {
    "route": ("routing", (TURN, FLEET)),
    "moves": ("balancing", (LOADS, {})),
    "first": ("seeding", ()),
    "following": ("seeding", (SeedingPlan(window_ns=1), None)),
    "leases_wanted": ("provisioning", (OFFER, MARKET)),
    "pause_ns": ("holding", (OFFER, None, None)),
    "takes": ("departure", (TURN, LEAVING, 0)),
    "stays_ns": ("departure", ([TURN], LEAVING)),
    "lead_ns": ("replacement", (OFFER, None)),
    "drop_reason": ("selection", ([0.0, 1.0],)),
    "launches": ("sampling", (BATCH, [])),
    "order": ("curriculum", (VIEW,)),
    "keeps": ("tail", (SLICE,)),
    "strays": ("drift", (GROUP, {})),
    "bills": ("charging", (SHARES, 10)),
    "allowance_ns": ("admission", (None,)),
    "begin_step": ("memory", (9, ())),
    "observe": ("memory", (Budget(pages=1, serving_pages=1), 9, 0, 0)),
}


@pytest.mark.parametrize(
    ("method", "answer", "told"),
    [
        ("route", "nowhere", "route returned 'nowhere' (str); allowed: None, or the id of a worker that"),
        ("route", 3, "returned 3 (int); allowed: str | None (ValidationError: Expected `str | null`, got `int`)"),
        ("route", object(), "(object); allowed: str | None"),
        ("moves", [Move(turn="t", to="v")], "allowed: moves of movable turns, each once, to workers among w"),
        ("moves", [Move(turn="x", to="w")], "allowed: moves of movable turns"),
        ("moves", [Move(turn="t", to="w"), Move(turn="t", to="w")], "each once"),
        ("moves", [("t", "w")], "(list); allowed: "),
        ("first", SeedingPlan(window_ns=NAN), "allowed: a SeedingPlan"),  # type: ignore[arg-type]
        ("following", SeedingPlan(window_ns=-1), "allowed: a window_ns and a worker_bound that are not negative"),
        ("leases_wanted", NAN, "returned nan (float); allowed: a whole number"),
        ("leases_wanted", 10**12, "allowed: a whole number from 0 to 3"),
        ("leases_wanted", True, "returned True (bool); allowed: a whole number"),
        ("pause_ns", -1, "allowed: nothing negative"),
        ("takes", "yes", "allowed: True or False"),
        ("stays_ns", {}, "allowed: for each of the turns, from 0 to 5"),
        ("stays_ns", {"t": 6}, "allowed: for each of the turns, from 0 to 5"),
        ("lead_ns", None, "returned None (NoneType); allowed: a whole number"),
        ("drop_reason", 0.5, "allowed: str | None"),
        ("launches", 10**9, "allowed: a whole number from 0 to 200"),
        ("order", PassOrder(first=[2]), "order returned 2 (int), which is no row; allowed: an int from 0 to 1"),
        ("order", [0], "allowed: a PassOrder"),
        ("keeps", ("k",), "allowed: None, or some of the nodes m, n"),
        ("strays", "b", "allowed: None, or a member of the group: a"),
        ("bills", {"a": 11}, "nothing negative for the members a, and at most 10 in all"),
        ("allowance_ns", 0.5, "allowed: a whole number"),
        ("begin_step", Budget(pages=10, serving_pages=0), "allowed: from 0 to all 9 pages"),
        ("observe", None, "allowed: a Budget"),
        ("route", KeyError("gone"), f"route raised KeyError: 'gone' ({__file__}, line "),
        ("order", SystemExit(3), "order raised SystemExit: 3"),
        ("route", GeneratorExit(), "route raised GeneratorExit"),
        ("route", Unprintable(), "returned a value whose repr raises SystemExit (Unprintable); allowed: str | None"),
        (
            "first",
            SeedingPlan(window_ns=10**40),
            "allowed: a window_ns and a worker_bound that are not negative, and at most",
        ),
        ("lead_ns", 10**16, "allowed: at most 9007199254740991"),
        ("drop_reason", "\x1b[31m", "allowed: None, or a reason: 1 to 1000 printable characters"),
        ("drop_reason", "\ud800", "allowed: None, or a reason: 1 to 1000 printable characters"),
        ("order", PassOrder(first=[np.float64(1)]), "which is no row"),  # type: ignore[list-item]
    ],
)
def test_an_answer_that_is_not_allowed_is_a_fault_that_says_whose(method: str, answer: Any, told: str) -> None:
    decision, arguments = ASKED[method]
    with pytest.raises(PolicyFault) as fault:
        asked(decision, method, answer, *arguments)
    assert str(fault.value).startswith(f"{WHOSE}: {method} ")
    assert told in str(fault.value)


@pytest.mark.parametrize(
    ("method", "answer"),
    [
        ("route", "w"),
        ("route", None),
        ("moves", [Move(turn="u", to="w")]),
        ("first", SeedingPlan(window_ns=1, memory={2: 3})),
        ("leases_wanted", 3),
        ("pause_ns", None),
        ("stays_ns", {"t": 5}),
        ("order", PassOrder(first=[1])),
        ("keeps", None),
        ("bills", {"a": 10}),
        ("allowance_ns", -5),
        ("launches", np.int64(2)),
        ("takes", np.True_),
        ("route", np.str_("w")),
        ("bills", MappingProxyType({"a": np.int32(10)})),
        ("order", PassOrder(first=np.array([1]))),  # type: ignore[arg-type]
    ],
)
def test_an_answer_that_is_allowed_is_passed_on(method: str, answer: Any) -> None:
    decision, arguments = ASKED[method]
    found = asked(decision, method, answer, *arguments)
    assert found == (PassOrder([1], []) if method == "order" else answer)


def test_a_policy_that_changes_a_list_changes_one_of_its_own() -> None:
    history = [1, 2]

    class Clearing(msgspec.Struct, frozen=True):
        replaces_rejected: bool = False

        def launches(self, _: BatchView, seen: list[int]) -> int:
            seen.clear()
            return 1

    assert CheckedPolicy(Clearing(), "sampling", WHOSE).launches(BATCH, history) == 1
    assert history == [1, 2]


async def test_a_pool_refuses_a_job_with_what_its_policy_did_wrong() -> None:
    lost = PlacementChoice(group="nowhere", rollout=("n",))
    policies = msgspec.structs.replace(
        CLUSTER_POLICIES["ours"], placement=CheckedPolicy(Answering(lost), "placement", WHOSE)
    )
    shell = SimpleNamespace(cluster=Cluster(THREE_OF_EACH, policies, WaitLimits(), 0))
    unused: Any = None
    manager = PoolCommandManager("lab", cast("Any", shell), unused, unused, unused, unused, unused)
    answer = await manager.answer(msgspec.json.encode(PlanJob(request=timed_job("one", slo=2.0))))
    assert isinstance(answer, PoolRefusal)
    assert answer.message.startswith(f"{WHOSE}: place returned PlacementChoice(group='nowhere'")
    assert answer.message.endswith("allowed: None as group, or one of the groups: there is none")


def test_attributes_that_a_decision_asks_for_are_checked_and_others_are_the_policys_own() -> None:
    with pytest.raises(PolicyFault, match=r"replaces_rejected returned 1 .int.; allowed: True or False"):
        _ = CheckedPolicy(Sampling(), "sampling", WHOSE).replaces_rejected
    one, other = (CheckedPolicy(Answering(0), "routing", WHOSE) for _ in range(2))
    assert (one, one.weight, hash(one)) == (other, 1.0, hash(other))
