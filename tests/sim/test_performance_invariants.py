"""Simulated runs with modelled devices keep the core's invariants after every event."""

from pathlib import Path

import pytest

from elastic.compose.plan import resolve
from elastic.compose.scheduling import limits, policies, run_plan
from elastic.config import load_config
from elastic.core import commands as c
from elastic.core import events as e
from elastic.core.invariants import check
from elastic.core.scheduler import Scheduler
from elastic.core.types import Nanoseconds
from elastic.runtime.journal import NullJournal
from elastic.simulation import run as simulation

EXAMPLES = Path(__file__).parents[2] / "examples"
SMALL = ("run.steps=3", "rollout.groups=4", "rollout.group_size=4")
MIXES: dict[str, tuple[str, tuple[str, ...], tuple[str, ...]]] = {
    "serving and spot": ("frozenlake", ("serving", "spot"), ()),
    "two steps ahead, old KV kept": (
        "frozenlake",
        ("serving", "spot"),
        ("rollout.staleness_bound=2", "weights.mode=keep"),
    ),
    "one step ahead, KV computed again, short notice": (
        "frozenlake",
        ("spot",),
        ("rollout.staleness_bound=1", "weights.mode=recompute", "providers.spot.notice_s=2"),
    ),
    "short calls": ("frozenlake-serverless", ("serverless",), ("providers.serverless.lease_s=12",)),
    "everybody": (
        "frozenlake-serverless",
        ("reserved", "serving", "spot", "serverless"),
        (
            "providers.serverless.lease_s=15",
            "providers.serverless.max_workers=2",
            "providers.reserved.max_workers=2",
        ),
    ),
}


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("mix", MIXES)
def test_invariants_hold_after_every_event(mix: str, seed: int) -> None:
    checked = 0

    class Checked(Scheduler):
        def handle(self, event: e.Event, now_ns: Nanoseconds) -> list[c.Command]:
            nonlocal checked
            commands = super().handle(event, now_ns)
            check(self)
            checked += 1
            return commands

    example, providers, overrides = MIXES[mix]
    path = EXAMPLES / f"{example}.toml"
    config = load_config(path, [*SMALL, *overrides, f"run.seed={seed}"])
    plan = resolve(config, list(providers), str(path))
    scheduler = Checked(run_plan(plan), limits(config), policies(config), 0)
    run = simulation.build(plan, simulation.Experiment(), scheduler, NullJournal())
    assert run.live() == ""
    assert scheduler.ledger.imbalance_ns() == 0
    assert checked == run.events > 500
