"""Leases held only while there are rollouts to do, what that saves and costs; and what thousands of leases take.

- `pause`: the planner's workload in simulation (`examples/planner.toml`: 8B, 64 groups of 16, the trainer on 16 H100,
  up to 48 more on a replayed spot market that boots for a minute), in three arms. Leases are held for the whole `run`;
  for `rollouts`, given back for as long as the last pause foresees; `late`, given back in every pause and asked for
  when the rollouts are there. `saved_share` is of the spot bill, which goes by the second, `saved_share_of_all` of the
  whole bill, and `time_lost_share` of the run's time, each over `run`. A pause grows with the weights' update
  (`simulation.numbers.update_s`, the keys).
- `slices`: one core, one turn, and thousands of leases, each of which brings it a token and ends. CPU time an event,
  and the size of the core's saved state, early and late.
"""

import time
import tomllib
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks import ROOT
from benchmarks._common import Arguments, Figures, benchmark
from elastic.compose.plan import RunPlan, resolve
from elastic.compose.runs import new_run_dir
from elastic.config import Config
from elastic.core import commands as c
from elastic.core import events as e
from elastic.core import saved_state
from elastic.core.scheduler import Scheduler
from elastic.core.types import NS_PER_S, Account, Capabilities, Chunk, Chunks, EndCause, Offer, Plan, WorkerRole
from elastic.report import summarise
from elastic.runtime.journal import RunDirectory
from elastic.simulation import run as simulation
from elastic.system.cores import cores
from elastic.testing.faults.core.incarnation import policies
from elastic.testing.faults.core.settings import SMALL_LIMITS, WorldSettings

PLANNER = ROOT / "examples" / "planner.toml"
ARMS = ("run", "rollouts", "late")
UPDATES_S = (5.0, 60.0, 180.0, 600.0)
STEPS = 8
QUICK_STEPS = 5
SLICES = 10_000
MEASURED = 1_000
"""Leases over which CPU time is taken: the second so many are `early`, the last ones `late`."""


def plan_of(arm: str, update_s: float, steps: int, directory: Path) -> RunPlan:
    body: dict[str, Any] = tomllib.loads(PLANNER.read_text())
    body["run"] |= {"steps": steps, "directory": str(directory)}
    body["simulation"]["numbers"] = {"update_s": update_s}
    if arm != "run":
        body["holding"] = {"policy": "rollouts", "settings": {"foreseen": arm != "late"}}
    body["providers"]["spot"]["billing"] = "second"
    return resolve(Config.model_validate(body), ["spot"], str(PLANNER))


def arm(name: str, update_s: float, steps: int) -> dict[str, float]:
    with TemporaryDirectory() as directory:
        plan = plan_of(name, update_s, steps, Path(directory))
        outcome = simulation.simulate(plan, new_run_dir(plan.config), simulation.Experiment())
        assert not outcome.failed, outcome.failed
        summary = summarise(RunDirectory(outcome.run_dir))
    spot = summary.providers["spot"]
    return {
        "wall_s": summary.wall_s,
        "spot_usd": spot.usd,
        "usd": summary.usd,
        "leases": spot.leases,
        "idle_s": spot.accounts_s[Account.IDLE],
        "booting_s": spot.accounts_s[Account.BOOTING],
    }


def pauses(steps: int) -> Figures:
    """By the pause; arms are shared by all cores."""
    with ProcessPoolExecutor(cores()) as processes:
        begun = {
            f"{update_s:g}": {name: processes.submit(arm, name, update_s, steps) for name in ARMS}
            for update_s in UPDATES_S
        }
        return {key: compared({name: one.result() for name, one in arms.items()}) for key, arms in begun.items()}


def compared(arms: dict[str, dict[str, float]]) -> Figures:
    held = arms["run"]
    return {
        "arms": arms,
        "saved_share": {name: 1 - arms[name]["spot_usd"] / held["spot_usd"] for name in ("rollouts", "late")},
        "saved_share_of_all": {name: 1 - arms[name]["usd"] / held["usd"] for name in ("rollouts", "late")},
        "time_lost_share": {name: arms[name]["wall_s"] / held["wall_s"] - 1 for name in ("rollouts", "late")},
    }


CAPABILITIES = Capabilities(engine="model", replayable_sampling=True, max_context_tokens=4096, device="none")


class Slices:
    """One core whose only turn goes from lease to lease."""

    def __init__(self) -> None:
        settings = WorldSettings(plan=Plan(steps=1, groups=1, group_size=2))
        self.core = Scheduler(settings.plan, SMALL_LIMITS, policies(settings), 0)
        self.now_ns = self.events = 0
        self.offer("trainer", WorkerRole.TRAINER)
        self.come("trainer-1", 0)
        self.slice(1)
        self.now_ns += 2 * NS_PER_S
        self.tell(e.Tick())
        self.tell(e.WorkerSlept(worker="trainer-1", epoch=1))
        self.tell(e.TurnRequested(turn="0/0/0/0", trajectory="0/0/0", prompt_tokens=10, max_new_tokens=10**9))

    def tell(self, event: e.Event) -> list[c.Command]:
        self.events += 1
        return self.core.handle(event, self.now_ns)

    def offer(self, provider: str, role: WorkerRole) -> None:
        self.tell(e.OfferChanged(offer=Offer(provider=provider, role=role, available=1, usd_per_gpu_hour=2.0)))

    def come(self, lease: str, version: int) -> None:
        self.tell(e.LeaseGranted(lease=lease, workers=(lease,)))
        self.tell(e.WorkerJoined(worker=lease, epoch=1, capabilities=CAPABILITIES, weights_version=version))
        self.beat(lease)

    def beat(self, worker: str) -> None:
        self.tell(
            e.WorkerReported(
                worker=worker,
                epoch=1,
                capacity_turns=4,
                pending=0,
                executing=0,
                progress=self.now_ns,
                accounts_ns={Account.IDLE: 1},
                decoded_tokens=0,
            )
        )

    def slice(self, number: int) -> None:
        self.now_ns += NS_PER_S // 100
        if number > 1:
            self.tell(e.LeaseEnded(lease=f"spot-{number - 1}", cause=EndCause.EXPIRED))
        self.offer("spot", WorkerRole.ELASTIC)
        self.come(f"spot-{number}", 0)
        self.beat("trainer-1")
        for turn in self.core.turns.live.values():
            worker = f"spot-{number}"
            assert turn.worker == worker
            chunk = Chunk(turn.slot, turn.accepted, 1, 0)
            self.tell(e.TokensReceived(worker=worker, epoch=1, chunks=Chunks.of([chunk])))


def slices(count: int) -> dict[str, float]:
    world, spent_s, events, state_bytes = Slices(), dict[str, float](), dict[str, int](), dict[str, int]()
    first, last = MEASURED + 2, count + 2 - MEASURED
    windows = {"first": range(2, first), "early": range(first, first + MEASURED)}
    windows |= {"between": range(first + MEASURED, last), "late": range(last, count + 2)}
    for name, numbers in windows.items():
        began, begun_s = world.events, time.process_time()
        for number in numbers:
            world.slice(number)
        spent_s[name], events[name] = time.process_time() - begun_s, world.events - began
        state_bytes[name] = len(saved_state.save(world.core))
    early_us, late_us = (1e6 * spent_s[name] / events[name] for name in ("early", "late"))
    ledger = world.core.ledger
    return {
        "slices": count,
        "event_us_early": early_us,
        "event_us_late": late_us,
        "late_over_early": late_us / early_us,
        "state_bytes_early": state_bytes["early"],
        "state_bytes_late": state_bytes["late"],
        "books_kept": len(ledger.books),
        "imbalance_ns": ledger.imbalance_ns(),
    }


def figures(arguments: Arguments) -> Figures:
    steps = QUICK_STEPS if arguments.quick else STEPS
    return {
        "steps": steps,
        "pause": pauses(steps),
        "slices": slices(SLICES),
    }


if __name__ == "__main__":
    benchmark(__doc__, figures)
