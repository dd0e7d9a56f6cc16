"""Policies by the names that configurations give them: ours, and those of a third party's package."""

from pathlib import Path
from typing import Any

import pytest

from elastic.compose.device_sharing import sharing_policies
from elastic.compose.named_policies import policy_names
from elastic.compose.plan import resolve
from elastic.compose.pool_config import cluster_policies, load_pool
from elastic.compose.reference import explained, installed_policies
from elastic.compose.scheduling import WORDS, policies
from elastic.config import ConfigError, load_config
from elastic.core.cluster import ClusterPolicies
from elastic.core.decisions import DECISIONS, OF_DEVICES, OF_POOLS, OF_RUNS
from elastic.core.device_sharing import SharingPolicies
from elastic.core.policy import Policies
from policies.admission import SloAdmission
from policies.clusters import CLUSTER_POLICIES
from policies.kvmemory import PreemptiveMemory
from policies.provisioning import HoldForRollouts
from policies.seeding import FixedWindow
from policies.tails import LongTail
from providers.serving_messages import ExecutorSettings

EXAMPLE = Path(__file__).parents[1] / "examples" / "frozenlake.toml"
POOL = EXAMPLE.with_name("pool.toml")
THEIRS = """
from dataclasses import dataclass
from typing import Annotated

import msgspec


class Last(msgspec.Struct, frozen=True):
    weight: Annotated[float, msgspec.Meta(gt=0)] = 1.0

    def route(self, turn, fleet):
        return None


@dataclass(frozen=True)
class Halved:
    least: int
    part: float = 0.5

    def __post_init__(self):
        if not 0 <= self.part <= 1:
            raise ValueError(f"part must be a share (found {self.part})")

    def drop_reason(self, rewards):
        return None


class Remembering:
    def route(self, turn, fleet):
        return None


class Settled(msgspec.Struct, frozen=True):
    patience: Annotated[float, msgspec.Meta(ge=0, description="how long a job may stray")] = 2.0

    def strays(self, group, measured):
        return None


class Unread(msgspec.Struct, frozen=True):
    weight: "Nowhere" = 1.0

    def route(self, turn, fleet):
        return None


class Leaving(Last, frozen=True):
    def __post_init__(self):
        raise SystemExit


@dataclass(frozen=True)
class Aimless:
    weight: float = 1.0
"""
POINTS = """[elastic.policies]
routing.last = theirs_of_policies:Last
routing.remembering = theirs_of_policies:Remembering
routing.aimless = theirs_of_policies:Aimless
routing.unread = theirs_of_policies:Unread
routing.leaving = theirs_of_policies:Leaving
routing.gone = nosuch.module:Policy
selection.halved = theirs_of_policies:Halved
drift.none_of_these = theirs_of_policies:Settled
"""


@pytest.fixture
def theirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    about = tmp_path / "theirs_of_policies-1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs-of-policies\nVersion: 1\n")
    (about / "entry_points.txt").write_text(POINTS)
    (tmp_path / "theirs_of_policies.py").write_text(THEIRS)
    monkeypatch.syspath_prepend(str(tmp_path))


def chosen(*overrides: str) -> Policies:
    return policies(load_config(EXAMPLE, overrides), "here")


def test_every_decision_has_policies_and_every_section_names_one() -> None:
    assert all(policy_names(decision) for decision in DECISIONS)
    assert {*WORDS, "curriculum"} == set(OF_RUNS)
    assert set(OF_POOLS) == set(ClusterPolicies.__struct_fields__)
    assert set(OF_DEVICES) == set(SharingPolicies.__struct_fields__)
    assert {*WORDS, "curricula"} == set(Policies.__struct_fields__)


def test_the_configurations_own_keys_are_settings_of_ours() -> None:
    found = chosen("seeding.policy=fixed", "seeding.window_s=0.5", "holding.policy=rollouts")
    assert (found.seeding, found.holding) == (FixedWindow(500_000_000), HoldForRollouts())
    assert chosen("seeding.policy=none").seeding == FixedWindow(0)
    late = chosen("holding.policy=rollouts", "holding.settings.foreseen=false")
    assert late.holding == HoldForRollouts(foreseen=False)
    nobody = chosen(*(f"{one}.policy=none" for one in ("balancing", "holding", "replacement", "departure")))
    assert (nobody.balancing, nobody.holding, nobody.replacement, nobody.departure) == (None, None, None, None)


@pytest.mark.usefixtures("theirs")
def test_a_third_partys_is_named_as_ours_with_settings_of_its_own() -> None:
    assert repr(chosen("routing.policy=last", "routing.settings.weight=2").routing) == "Last(weight=2.0)"
    assert "least=1" in repr(chosen("selection.policy=halved", "selection.settings.least=1").selection)


@pytest.mark.usefixtures("theirs")
@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["routing.policy=nosuch"], "routing.policy: found 'nosuch'; allowed: 'affinity', 'aimless', "),
        (["balancing.policy=last"], "balancing.policy: found 'last'; allowed: 'continuous', 'none', or another"),
        (
            ["routing.policy=remembering"],
            "Remembering'> (type); allowed: a frozen msgspec.Struct or",
        ),
        (["routing.policy=aimless"], "with route (elastic.core.policy.RoutingPolicy)"),
        (
            ["routing.policy=gone"],
            "routing.policy: found 'routing.gone' of the package theirs-of-policies 1, whose nosuch.module:Policy "
            "cannot be loaded",
        ),
        (["routing.policy=unread"], "types that cannot be read: NameError: name 'Nowhere' is not defined"),
        (["routing.policy=leaving"], ":Leaving cannot be made: SystemExit"),
        (["routing.policy=last", "routing.settings.wieght=2"], "routing.settings.wieght: unknown key; allowed: weight"),
        (["routing.policy=last", "routing.settings.weight=0"], "routing.settings.weight: expected `float` > 0.0"),
        (["routing.policy=last", "routing.settings.weight='x'"], "got `str` (found 'x' (str))"),
        (["selection.policy=halved"], "selection.settings: object missing required field `least`"),
        (["selection.policy=halved", "selection.settings={least=1,part=2}"], "part must be a share (found 2.0)"),
        (["balancing.policy=none", "balancing.settings.x=1"], "balancing.settings: found x, and no policy to take"),
        (["seeding.policy=mine"], "allowed: 'adaptive', 'fixed', 'auto', 'none', or another that is installed"),
    ],
)
def test_what_cannot_be_is_refused_before_a_run_begins(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        resolve(load_config(EXAMPLE, overrides), ["spot"], "here")
    (line,) = str(refused.value).splitlines()
    assert message in line


@pytest.mark.usefixtures("theirs")
def test_a_pools_sections_name_its_policies(tmp_path: Path) -> None:
    pool = tmp_path / "pool.toml"
    settled = "[drift]\npolicy = 'none_of_these'\nsettings.patience = 3\n[tail]\nsettings.done_share = 0.5\n"
    pool.write_text(settled + POOL.read_text())
    found = load_pool(pool)
    chosen = found.policies()
    assert (repr(chosen.drift), chosen.tail) == ("Settled(patience=3.0)", LongTail(done_share=0.5))
    ours = CLUSTER_POLICIES["ours"]
    assert (chosen.placement, chosen.charging) == (ours.placement, ours.charging)
    assert found.policy_names == 'ours, tail.auto {"done_share": 0.5}, drift.none_of_these {"patience": 3}'
    pool.write_text(settled.replace("patience", "haste") + POOL.read_text())
    with pytest.raises(ConfigError, match=r"pool.toml: drift.settings.haste: unknown key; allowed: patience"):
        load_pool(pool)
    pool.write_text("[charging]\npolicy = 'none'\n" + POOL.read_text())
    with pytest.raises(ConfigError, match=r"charging.policy: found 'none'; allowed: 'idle_as_alone', 'auto', or"):
        load_pool(pool)


def test_a_placement_goes_with_the_policies_of_its_name() -> None:
    assert {name: cluster_policies(name) for name in CLUSTER_POLICIES} == CLUSTER_POLICIES


@pytest.mark.parametrize(
    ("executor", "message"),
    [
        ({"admission": {"policy": "any"}}, "executor.admission.policy: found 'any'; allowed: 'exclusive', 'slo', "),
        ({"memory": {"policy": "none"}}, "executor.memory.policy: found 'none'; allowed: 'fine_grained', 'preemptive'"),
        (
            {"admission": {"policy": "slo", "settings": {"arriving_share": 2}}},
            "executor.admission.settings: arriving_share: must be in [0, 1] (found 2.0)",
        ),
        (
            {"admission": {"policy": "none", "settings": {"role": "decoder"}}},
            "executor.admission.settings: found role, and no policy to take them",
        ),
    ],
)
def test_a_shared_devices_policies_are_checked_before_a_run_begins(executor: dict[str, Any], message: str) -> None:
    config = load_config(EXAMPLE, ["providers.serving.kind=serving-replay"])
    section = {"kind": "serving-replay", "executor": executor}
    with pytest.raises(ConfigError) as refused:
        resolve(config.model_copy(update={"providers": {"serving": section}}), ["serving"], "here")
    assert f"here: providers.serving.{message}" in str(refused.value)


def test_a_shared_devices_policies_take_its_own_keys() -> None:
    found = sharing_policies(ExecutorSettings(ttft_slo_s=0.1, headroom_share=0.3), "here", "executor")  # type: ignore[call-arg]
    assert isinstance(found.admission, SloAdmission)
    assert (found.admission.slo.ttft_ns, found.admission.longest_ns) == (100_000_000, 10_000_000)
    assert found.memory == PreemptiveMemory(headroom_share=0.3)


@pytest.mark.usefixtures("theirs")
def test_policies_and_their_settings_are_listed_and_explained() -> None:
    listed = {f"{one.decision}.{one.policy}": one for one in installed_policies()}
    assert listed["drift.none_of_these"].settings == {"patience": "number ≥ 0"}
    assert "'Nowhere' is not defined" in listed["routing.unread"].fault
    assert "nosuch.module:Policy cannot be loaded" in listed["routing.gone"].fault
    (patience,) = explained("drift.settings.patience")
    assert (patience.applies, patience.default) == ("with policy none_of_these in POOL.toml", "2.0")
    assert patience.meaning == "how long a job may stray"
    (share,) = explained("providers.serving.executor.admission.settings.arriving_share")
    assert (share.applies, share.default) == ("with policy slo", "0.75")
