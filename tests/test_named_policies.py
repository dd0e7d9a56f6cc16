"""Policies by the names that configurations give them: ours, and those of a third party's package."""

from pathlib import Path

import pytest

from elastic.compose.named_policies import policy_names
from elastic.compose.plan import resolve
from elastic.compose.scheduling import WORDS, policies
from elastic.config import ConfigError, load_config
from elastic.core.decisions import DECISIONS
from elastic.core.policy import Policies
from policies.provisioning import HoldForRollouts
from policies.seeding import FixedWindow

EXAMPLE = Path(__file__).parents[1] / "examples" / "frozenlake.toml"
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


@dataclass(frozen=True)
class Aimless:
    weight: float = 1.0
"""
POINTS = """[elastic.policies]
routing.last = theirs_of_policies:Last
routing.remembering = theirs_of_policies:Remembering
routing.aimless = theirs_of_policies:Aimless
routing.gone = nosuch.module:Policy
selection.halved = theirs_of_policies:Halved
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
    assert {*WORDS, "curriculum"} == set(DECISIONS)
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
        (["routing.policy=gone"], "routing.policy: found 'routing.gone', whose nosuch.module:Policy cannot be loaded"),
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
