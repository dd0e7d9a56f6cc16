"""What `kill -9` of the orchestrator and of the trainer's process costs a run: nothing but time.

The example runs with small settings on serving and spot capacity, with real processes. At seeded moments, some of them
while the run is being taken up, the orchestrator, the trainer, or both at once are killed, and `elastic run --resume`
goes on. Where the trainer has several ranks, one of the further ones is killed at times, and so is a worker. What the
journals of all incarnations prove is counted (`tests/proof.py`), and the end is compared with that of a run with the
same seed that nobody has disturbed: `identical_share` of its trajectories are the same, with their log-probabilities,
and `trained_twice` counts a last checkpoint that is not the same bit for bit, too.

`resumed_s` runs from the start of the process that takes the run up to the first token that it accepts. Where the
trainer was killed with it there may be nothing to generate until another trainer has booted.

`--trainer KIND` has another kind of trainer, on `--gpus N` ranks on CPUs; `--kills N` disturbs so many times.

`long_resume_s` is how long reading takes for a journal of a million events: the simulated example's, with made-up
token ids in its frames and the state saved beside its last checkpoint, as a live run saves it; page cache warm.
"""

import gc
import itertools
import random
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

import msgspec

from benchmarks._common import Arguments, Figures, benchmark, option
from benchmarks._crashes import CrashingRun, Victim
from benchmarks._runs import EXAMPLE, prepare
from elastic.compose.incarnations import past_incarnations, previous_incarnation
from elastic.compose.plan import resolve
from elastic.config import load_config
from elastic.runtime.journal import RunDirectory
from elastic.simulation import run as simulation
from tests.proof import check_run, same_episode, same_weights, trajectories
from tests.retold import retell

SEED = 7
VICTIMS: Mapping[Victim, int] = {"orchestrator": 66, "trainer": 17, "both": 17}
VICTIMS_OF_RANKS: Mapping[Victim, int] = {"orchestrator": 34, "trainer": 17, "both": 15, "rank": 17, "worker": 17}
SETTINGS = (
    "rollout.groups=4",
    "rollout.group_size=4",
    "seeding.window_s=0.3",
    "trainer.checkpoint_every_steps=2",
    "trainer.max_restarts=1000",
    "providers.serving={hosts=1, max_workers=1}",
)
VARIANTS = (("weights.relay=http",), ("rewards.name=frozenlake",), ())
"""Runs are disturbed with these settings besides, in turn; what is sampled and trained does not hang on them."""
FULL_STEPS, QUICK_STEPS = 16, 3
LONG_STEPS, LONG_EVENTS = 540, 1_000_000


def market(directory: Path) -> Path:
    """One spot instance at a time; each is taken away after half a minute, and the next one comes soon."""
    path = directory / "market.csv"
    rows = [f"{30 * n},add,node{n}\n{30 * n + 28},remove,node{n}\n" for n in range(200)]
    path.write_text("time_s,event,instance_id\n" + "".join(rows))
    return path


def begin(directory: Path, steps: int, trainer: Sequence[str], *settings: str) -> CrashingRun:
    spot = f'providers.spot={{trace="{market(directory)}", max_workers=1, boot_delay_s=0}}'
    chosen = (f"run.steps={steps}", spot, *SETTINGS, *trainer, *settings)
    return CrashingRun.of_example(directory / "runs", *chosen, providers="serving,spot", seed=SEED)


def crash(directory: Path, steps: int, victims: deque[Victim], rng: random.Random, trainer: Sequence[str]) -> Figures:
    """Disturb runs with these settings of their trainer until there are no more victims."""
    with begin(directory, steps, trainer) as calm:
        calm.wait()
    expected = trajectories(RunDirectory(calm.run_dir))
    totals, kills, resumed_s = Counter[str](), Counter[str](), list[float]()
    same = seen = 0
    for settings in itertools.cycle(VARIANTS):
        with begin(directory, steps, trainer, *settings) as run:
            run.disturb(rng, victims)
            totals["leftovers"] += len(run.leftovers())
        kept = RunDirectory(run.run_dir)
        kills += run.kills
        resumed_s += run.resumed_s()
        totals.update(msgspec.structs.asdict(check_run(kept)))
        totals["groups_twice"] += not same_weights(calm.run_dir, run.run_dir)
        found = trajectories(kept)
        same += sum(same_episode(row, found.get(name)) for name, row in expected.items())
        seen += len(expected.keys() | found.keys())
        if not victims:
            break
    return {
        "kills": kills.total(),
        "by": {**dict.fromkeys(VICTIMS, 0), **kills},
        "tokens_lost": totals["tokens_lost"],
        "tokens_duplicated": totals["tokens_duplicated"],
        "trained_twice": totals["groups_twice"],
        "ledger_imbalance_ns": totals["ledger_imbalance_ns"],
        "leftovers": totals["leftovers"],
        "resumed_s_p50": median(resumed_s) if resumed_s else None,
        "resumed_s_max": max(resumed_s, default=None),
        "steps_repeated": totals["turns_repeated"],
        "identical_share": same / seen,
    }


def long_resume_s(directory: Path, steps: int, events: int) -> float:
    simulated, run = RunDirectory(directory / "simulated"), RunDirectory(directory / "long")
    config = load_config(EXAMPLE, [f"run.steps={steps}"])
    plan = resolve(config, ["serving", "spot"], str(EXAMPLE))
    for kept in (simulated, run):
        kept.path.mkdir()
    simulation.simulate(plan, simulated.path, simulation.Experiment())
    retell(config, list(plan.providers), simulated, run, events)
    gc.collect()
    began_s = time.perf_counter()
    past_incarnations(run)
    former = previous_incarnation(run, config)
    took_s = time.perf_counter() - began_s
    if former.state is None:
        raise RuntimeError("nothing was found to go on from")
    return took_s


def main(arguments: Arguments) -> Figures:
    prepare()
    rng = random.Random(SEED)
    planned = VICTIMS if arguments.gpus == 1 else VICTIMS_OF_RANKS
    victims: list[Victim] = [victim for victim, count in planned.items() for _ in range(count)]
    rng.shuffle(victims)
    trainer = [f"trainer.kind={arguments.trainer}"]
    if arguments.gpus > 1:
        trainer += [f"trainer.gpus={arguments.gpus}", 'trainer.engine={device="cpu"}']
    steps, long_s = FULL_STEPS, None
    if arguments.quick:
        steps = QUICK_STEPS
        victims = ["orchestrator", "both", "orchestrator"] if arguments.gpus == 1 else ["rank"]
    directory = arguments.scratch
    figures = crash(directory, steps, deque(victims[: arguments.kills]), rng, trainer)
    if not arguments.quick:
        long_s = long_resume_s(directory, LONG_STEPS, LONG_EVENTS)
    return {**figures, "long_resume_s": long_s}


if __name__ == "__main__":
    benchmark(
        __doc__,
        main,
        option("--trainer", default="embedded", help="the kind of the runs' trainer"),
        option("--gpus", type=int, default=1, help="the ranks of the runs' trainer"),
        option("--kills", type=int, help="how often runs are disturbed; all of what is planned unless given"),
    )
