"""Two jobs that take turns on a pool whose rollout nodes come from a Ray cluster, live, on this machine.

Three Ray nodes have room for one of the pool's two rollout nodes each, so that there is one to spare. Once both jobs
run, the head (its GCS, whose state is on disk, and its client server) is killed and started again; then a Ray node that
has a rollout node is killed with all its processes, and a new one is added for the next round. The jobs are those of
`jobs_live.py`: FrozenLake, paced. `identical_share` of all trajectories are the same, token for token, as of each job's
run alone on this machine, unpaced, and `weights_identical_share` of the jobs have the same last weights, bit for bit.

With `--quick` two small jobs, one restart and one kill. `replaced_s`: from each kill until the pool has all its nodes
again. Where Ray is missing: `skipped_because`; `make test-ray` makes an environment that has it.
"""

import random
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks._common import Arguments, Figures, benchmark
from benchmarks._pools import JOBS, LivePool, left_over, residual_nano_usd, started_pool, write_pool
from benchmarks._ray_nodes import NODES, RayNodes, ray_nodes, why_not
from benchmarks._runs import elastic, sets
from benchmarks._shapes import write_policy
from benchmarks.jobs_live import (
    ARM_WITHIN_S,
    COLOCATED,
    FULL_STEPS,
    QUICK_NAMES,
    ROLLOUT_NODES,
    TRAIN_NODES,
    Jobs,
    begun,
    episodes,
)
from elastic.runtime.journal import RunDirectory
from tests.proof import check_run, same_episode, same_weights

SEED = 1
FULL_ROUNDS, QUICK_ROUNDS = 3, 1
QUICK_STEPS = 4
SLO = 2.0
"""One with which the small jobs share a training node, of which there is one, rather than come one after the other."""
SILENCE_S = 5.0
MEMORY_GB = 4.5
NODES_WITHIN_S = 240.0
LAST_IN_LINE = ("nice", "-n", "19")
UNPACED = (
    "engine.pacing={prefill_tokens_per_s=1e9, decode_step_s={1=1e-6}}",
    "trainer.pacing={train_tokens_per_s=1e9}",
)


@dataclass(frozen=True)
class Lived:
    """What jobs on the cluster came to: the directories of their runs by name, how long all took, how long each lost
    node was missed, and what bills miss of the pool's costs."""

    runs: Mapping[str, Path]
    wall_s: float
    replaced_s: Sequence[float]
    residual_nano_usd: int


def on_ray(
    directory: Path, jobs: Jobs, rounds: int, nodes: RayNodes, adding: Future[None], meanwhile: Callable[[], None]
) -> Lived:
    """All jobs on a pool of the cluster, whose head, and then a node of which, is killed in each round. The pool and
    its jobs may come before the cluster's nodes; `meanwhile` is called once the jobs run."""
    files = str(directory / "nodes")
    ray = {"address": nodes.address, "directory": files, "poll_s": 0.5, "resources.place": 1.0}
    file = write_pool(
        directory,
        "ours",
        (ROLLOUT_NODES, TRAIN_NODES),
        rollout={"kind": "ray", "memory_gb": MEMORY_GB, **{f"ray.{key}": value for key, value in ray.items()}},
        limits={"silence_s": SILENCE_S},
    )
    replaced_s, rng = list[float](), random.Random(jobs.seed)
    with started_pool(file) as pool:
        began_s = time.monotonic()
        submitted = jobs.submit(pool, jobs.names, directory / "runs")
        adding.result()
        up = await_nodes(pool, frozenset())
        begun(pool)
        meanwhile()
        while len(replaced_s) < rounds and not all(job["over"] for job in pool.jobs()):
            nodes.restart_head()
            nodes.kill(rng.choice(nodes.with_words(files)))
            killed_s = time.monotonic()
            if len(replaced_s) + 1 < rounds:
                nodes.add()
            up = await_nodes(pool, up)
            replaced_s.append(time.monotonic() - killed_s)
        pool.wait_over(jobs.names, ARM_WITHIN_S)
        return Lived(submitted, time.monotonic() - began_s, replaced_s, residual_nano_usd(pool))


def alone(directory: Path, jobs: Jobs, name: str) -> Path:
    """The run of a job on its trainer's device alone, at full speed, as far as nothing else needs the machine."""
    place = directory / name
    own = [f"run.directory={place}", *COLOCATED[1], *jobs.settings(name), *UNPACED]
    elastic("run", str(JOBS / f"{name}.toml"), "--providers", COLOCATED[0], "--json", *sets(own), within=LAST_IN_LINE)
    (run,) = (path for path in place.iterdir() if path.is_dir())
    return run


def await_nodes(pool: LivePool, before: frozenset[int]) -> frozenset[int]:
    """Wait until the pool has all its rollout nodes, and others than `before`; returns their node agents' processes."""
    complete: Callable[[dict[str, Any]], bool] = lambda now: len(_up(now)) == ROLLOUT_NODES and _up(now) != before  # noqa: E731
    return _up(pool.until("all rollout nodes", complete, NODES_WITHIN_S))


def _up(status: dict[str, Any]) -> frozenset[int]:
    agents = [node["node_agent"] for node in status["nodes"] if node["phase"] == "rollout"]
    return frozenset(agent["pid"] for agent in agents if agent["up"])


def main(arguments: Arguments) -> Figures:
    if why := why_not():
        return {"skipped_because": why}
    quick, directory = arguments.quick, arguments.scratch
    for name in () if quick else QUICK_NAMES:
        elastic("prepare", str(JOBS / f"{name}.toml"))
    with ThreadPoolExecutor(len(QUICK_NAMES) + 2) as beside:
        policy = beside.submit(write_policy, directory / "policy") if quick else None
        jobs = Jobs(QUICK_NAMES, QUICK_STEPS if quick else FULL_STEPS, SEED, policy, (f"job.slo={SLO}",))
        apart = dict[str, Future[Path]]()

        def begin_apart() -> None:
            apart.update({name: beside.submit(alone, directory / "apart", jobs, name) for name in jobs.names})

        with ray_nodes(0, directory / "gcs") as nodes:
            adding = beside.submit(nodes.add, NODES)
            lived = on_ray(directory / "ray", jobs, QUICK_ROUNDS if quick else FULL_ROUNDS, nodes, adding, begin_apart)
            actors = nodes.actors_left()
        runs_alone = {name: run.result() for name, run in apart.items()}
    expected, found = episodes(runs_alone), episodes(lived.runs)
    checks = [check_run(RunDirectory(run)) for run in lived.runs.values()]
    return {
        "measured": "live, on this machine; engines and training paced to modelled devices",
        "steps": jobs.steps,
        "wall_s": lived.wall_s,
        "head_restarts": len(lived.replaced_s),
        "node_kills": len(lived.replaced_s),
        "replaced_s": lived.replaced_s,
        "tokens_lost": sum(check.tokens_lost for check in checks),
        "trained_twice": sum(check.groups_twice for check in checks),
        "imbalance_ns": sum(check.ledger_imbalance_ns for check in checks),
        "bill_residual_nano_usd": lived.residual_nano_usd,
        "identical_share": mean(same_episode(row, found.get(key)) for key, row in expected.items()),
        "weights_identical_share": mean(same_weights(run, lived.runs[name]) for name, run in runs_alone.items()),
        "left_at_ray": len(actors),
        "processes_left": left_over(directory / "ray"),
    }


if __name__ == "__main__":
    benchmark(__doc__, main)
