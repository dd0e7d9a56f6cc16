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
    0: "4bcf2c2f7e418dba0bfb370df1514777",
    2: "f544c63f0ac86b4fb71f3b6d193a85de",
    3: "7c4cf5a6ef6b6cc6eb1d19ff80c5dbc0",
    7: "d125bc601be42ad5e540903e57095863",
    12: "72d87cbf2cfb6efbda569139ca60fe7f",
    13: "d4c6ec03e901867ca44f4da46047303b",
    17: "94d43d4a8d661865f57fd44cf2b6d3e8",
    18: "4afa3e70f61754710d4be0593a3e448d",
    20: "4b454ce9255f082d4f22a67b05adc7d8",
    22: "1b517df62677f8d7f9bc56a364a280f8",
}
RUNS = {0: "3c0247134846d3eecba5b68d8c2d4214", 1: "ea175647980b11701f42055c2dbb591d"}

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
