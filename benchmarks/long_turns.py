"""Long turns with the limits that nobody has set: what is fenced, moved and sent again without need.

Simulated runs of an 8B model on H100 profiles, four workers beside the trainer, whose turns are 14,000 tokens long and
take minutes. `alpha0` and `alpha1` are synchronous training and training one version ahead; in `…_declining` the worker
with most turns has a minute in which it gives back whatever it is sent, though it announces credit. `hand_tuned` is
`alpha1` with limits that were set by hand; `overhead_over_hand_tuned` is each arm's allocation overhead (that
of the workers' leases) less that of the same arm under those limits, in points. Which fences and moves were needless
the modelled world says, not the core.

`short_turns_over_best_theta` is the other end: 512 trajectories of turns of at most 64 tokens on two H100, rollout
throughput with the default Θ over the best of a sweep of fixed ones, at the worse of two batch sizes.

`hardware_prefill` and `hardware_decode` are an H800's rollout time over an H20's, each alone with the same task: one
reads four times what it writes, the other writes sixteen times what it reads (RollArt, Figure 4: 0.53, and 1.27–2.04).
Decoding cannot differ by more than bandwidth does here, 1.19, since both devices reach the same share of it.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from random import Random
from statistics import mean
from typing import Any

from benchmarks._common import Arguments, Figures, benchmark
from benchmarks._configurations import configuration
from elastic.compose import scheduling
from elastic.compose.plan import resolve
from elastic.compose.scheduling import policies, run_plan
from elastic.core.ledger import overhead_share
from elastic.core.scheduler import Scheduler
from elastic.core.types import NS_PER_S, Account, TrajectoryId
from elastic.runtime.journal import NullJournal
from elastic.simulation import run as simulation
from elastic.simulation.performance import Episode, Episodes, EpisodeTurn, SimulatedRun, SimulationError
from elastic.simulation.performance.worker import WorkerModel

H100 = "H100/Qwen3-8B"
WORKERS = 4
TURN_TOKENS = 14_000
DECLINES_AT_S, DECLINES_S = 600.0, 60.0

THETAS, QUICK_THETAS = (4, 8, 16, 32, 64, 128), (16, 128)
SHORT_BATCHES = (64, 256)


class Task:
    """Episodes of `turns` turns, each of which reads `observation` tokens and writes up to `tokens`."""

    def __init__(self, tag: str, turns: int, observation: int, tokens: int, shortest_share: float) -> None:
        self.tag = tag
        self.turns = turns
        self.observation = observation
        self.tokens = tokens
        self.shortest_share = shortest_share

    def episode(self, trajectory: TrajectoryId) -> Episode:
        chance = Random(trajectory)
        turns = (EpisodeTurn(self.observation, self._tokens(chance)) for _ in range(self.turns))
        return Episode(tuple(turns), float(chance.random() < 0.5), self.tag)

    def _tokens(self, chance: Random) -> int:
        return max(1, round(self.tokens * chance.uniform(self.shortest_share, 1.0)))

    def notes(self) -> list[str]:
        return []


LONG = Task("long", turns=1, observation=512, tokens=TURN_TOKENS, shortest_share=0.9)
SHORT = Task("short", turns=4, observation=32, tokens=64, shortest_share=0.1)


def simulated(
    task: Episodes,
    *kinds: str,
    steps: int,
    groups: int,
    engine: Mapping[str, Any],
    turn_tokens: int,
    workers: int,
    staleness: int = 0,
    profiles: Mapping[str, str] | None = None,
) -> SimulatedRun:
    """A run that has not begun."""
    rollout = {"groups": groups, "max_tokens_per_turn": turn_tokens, "staleness_bound": staleness}
    config = configuration(
        *("long-turns", *kinds),
        policy="Qwen3-8B",
        run={"steps": steps},
        engine=engine,
        providers={"reserved": {"max_workers": workers}},
        rollout=rollout,
    )
    plan = resolve(config, ["reserved"], "long turns")
    scheduler = Scheduler(run_plan(plan), scheduling.limits(config), policies(config), 0)
    experiment = simulation.Experiment(profile=H100, profiles=dict(profiles or {}))
    run = simulation.build(plan, experiment, scheduler, NullJournal())
    run.environments.episodes = task
    return run


def lived(run: SimulatedRun) -> str:
    """Runs to the end; why it failed, empty if it did not."""
    try:
        return run.live()
    except SimulationError as error:
        return str(error)


def long_turns(steps: int, staleness: int, *kinds: str, declining: bool) -> Figures:
    run = simulated(
        LONG,
        *kinds,
        steps=steps,
        groups=16,
        engine={"max_batch": 32, "max_context_tokens": 16_384},
        turn_tokens=TURN_TOKENS,
        workers=WORKERS,
        staleness=staleness,
    )
    if declining:
        run.loop.at(round(DECLINES_AT_S * NS_PER_S), lambda: busiest(run).decline(round(DECLINES_S * NS_PER_S)))
    failed = lived(run)
    books = [book for book in run.scheduler.ledger.books.values() if book.provider == "reserved"]
    accounts_ns = Counter[Account]()
    for book in books:
        accounts_ns.update(book.accounts_ns)
    return {
        "leases": len({book.lease for book in books}),
        "needless_fences": run.acts.needless_fences,
        "needless_moves": run.acts.needless_moves,
        "resent_turns": run.acts.resent_turns,
        "allocation_overhead": overhead_share(accounts_ns),
        "failed": bool(failed),
        "cause": failed,
    }


def busiest(run: SimulatedRun) -> WorkerModel:
    """The rollout worker with most turns."""
    workers = [w for w in run.scheduler.fleet.workers.values() if w.provider == "reserved"]
    return run.worker(max(workers, key=lambda worker: worker.outstanding).id)


def arms(steps: int) -> Figures:
    found: Figures = {}
    over: dict[str, float] = {}
    for name, staleness, declining in (
        ("alpha0", 0, False),
        ("alpha1", 1, False),
        ("alpha0_declining", 0, True),
        ("alpha1_declining", 1, True),
    ):
        found[name] = long_turns(steps, staleness, declining=declining)
        by_hand = long_turns(steps, staleness, "hand-tuned", declining=declining)
        over[name] = 100 * (found[name]["allocation_overhead"] - by_hand["allocation_overhead"])
        if name == "alpha1":
            found["hand_tuned"] = by_hand
    return found | {"overhead_over_hand_tuned": over}


def short_rollout_s(batch: int, theta: int | None) -> float:
    engine = {"max_batch": batch, "max_context_tokens": 1024} | ({} if theta is None else {"max_pending": theta})
    run = simulated(
        SHORT,
        "unseeded",
        steps=3,
        groups=64,
        engine=engine,
        turn_tokens=SHORT.tokens,
        workers=2,
    )
    return rollout_s(run)


def rollout_s(run: SimulatedRun) -> float:
    """Mean over the run's steps but the first, in which workers boot."""
    if failed := lived(run):
        raise RuntimeError(failed)
    return mean(record.rollout_ns for record in run.scheduler.history[1:]) / NS_PER_S


def over_best_theta(batch: int, thetas: Sequence[int]) -> float:
    """Throughput with the default Θ over the best of a sweep of fixed ones."""
    return min(short_rollout_s(batch, theta) for theta in thetas) / short_rollout_s(batch, None)


READS = Task("reads", turns=8, observation=512, tokens=128, shortest_share=0.5)
WRITES = Task("writes", turns=1, observation=512, tokens=8192, shortest_share=0.5)


def slower(task: Task) -> float:
    """An H800's rollout time over an H20's."""
    times_s = [
        rollout_s(
            simulated(
                task,
                "unseeded",
                steps=3,
                groups=8,
                engine={"max_batch": 16, "max_context_tokens": 16_384},
                turn_tokens=task.tokens,
                workers=1,
                profiles={"reserved": f"{device}/Qwen3-8B"},
            )
        )
        for device in ("H800", "H20")
    ]
    return times_s[0] / times_s[1]


def main(arguments: Arguments) -> Figures:
    thetas = QUICK_THETAS if arguments.quick else THETAS
    return arms(steps=3 if arguments.quick else 10) | {
        "short_turns_over_best_theta": min(over_best_theta(batch, thetas) for batch in SHORT_BATCHES),
        "hardware_prefill": slower(READS),
        "hardware_decode": slower(WRITES),
    }


if __name__ == "__main__":
    benchmark(__doc__, main)
