"""Where nothing is shared, runs have the events and the commands that they had before anything could be.

The hashes are of the program before leases could be held for rollouts alone, wait for a turn on a shared pool, or the
trainer's device be had by permit. (No worker in these worlds lies about its accounts, of which there were fewer.) A
change that is meant to alter what unshared runs do records them anew: the failure shows what is found.
"""

import hashlib
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest

from elastic import compose, simulation
from elastic.config import Config
from elastic.core.scheduler import Scheduler
from elastic.sim.faults import draw_faults
from elastic.sim.settings import draw_settings
from elastic.sim.world import simulate

WORLDS = {
    0: "e29791b4337fa1f26500f48896237fa4",
    2: "f56521036cda984c993b98e4d281019a",
    3: "93b3a357338043a4f130a442217ad0b7",
    7: "a9c18b52e66bfd00c96231f87d882488",
    12: "3d681373578cf493cac9129a5e52780b",
    13: "8ebf6c3ab4d08e52a392d4744e167ad4",
    17: "43f1ab0f098c8cba4ef7a0901a68b422",
    18: "20dd22d8e71cecdb0cad619e6f6867bb",
    20: "5f26792ef2bf325da126fea16b75af90",
    22: "fec33ca1cd8b589c0a518027be8de079",
}
RUNS = {0: "96767a66bb24607bc90f83e83420dd58", 1: "e7f195de04d5c25ee9bbef2b7a6b4f10"}

ROLLOUT = {"groups": 3, "group_size": 4, "max_turns": 4, "max_tokens_per_turn": 64}
SPOT = "time_s,event,instance_id\n0,add,a\n0,add,b\n4,remove,a\n6,add,c\n9,remove,b\n"


@pytest.mark.parametrize(("seed", "recorded"), WORLDS.items())
def test_worlds_of_faults(seed: int, recorded: str) -> None:
    rng = Random(seed)
    settings = draw_settings(rng)
    outcome = simulate(seed, settings, draw_faults(rng, settings.fault_span_ns))
    assert outcome.history == recorded


@pytest.mark.parametrize(("staleness_bound", "recorded"), RUNS.items())
def test_simulated_runs(staleness_bound: int, recorded: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    history, handle = hashlib.blake2b(digest_size=16), Scheduler.handle

    def note(scheduler: Scheduler, event: Any, now_ns: int) -> list[Any]:
        commands = handle(scheduler, event, now_ns)
        history.update(msgspec.msgpack.encode((now_ns, event, commands)))
        return commands

    monkeypatch.setattr(Scheduler, "handle", note)
    (tmp_path / "spot.csv").write_text(SPOT)
    body = {
        "run": {"steps": 3, "directory": str(tmp_path / "runs"), "seed": 3},
        "model": {"checkpoint": str(tmp_path)},
        "rollout": ROLLOUT | {"staleness_bound": staleness_bound},
        "trainer": {"updates_per_step": 1},
        "engine": {"pacing": {"prefill_tokens_per_s": 8000, "decode_step_s": {1: 0.014, 16: 0.024}}},
        "providers": {
            "spot": {"trace": str(tmp_path / "spot.csv"), "max_workers": 2, "usd_per_gpu_hour": 2.0},
            "serverless": {"max_workers": 2, "cold_start_s": 1.0, "lease_s": 12.0, "usd_per_gpu_hour": 3.0},
        },
    }
    config = Config.model_validate(body)
    plan = compose.resolve(config, ["spot", "serverless"], "test")
    assert simulation.simulate(plan, compose.new_run_dir(config), simulation.Experiment()).failed == ""
    assert history.hexdigest() == recorded
