"""Worlds full of faults by the thousand, and whether they and the unit tests notice a core that is wrong.

`--quick` lives through the seeds that CI has first and judges no mutant. Without it: a million events and more, and a
sample of mutants. `--nightly`: ten million events and a hundred thousand faults at the least. `--all-mutants` judges
every mutant, which takes hours.
"""

import argparse
import multiprocessing
import os
import sys
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

from _common import Arguments, emit
from _judges import judge
from _mutants import all_mutants, sample

BATCH = 50
FAILURES_MAX = 100


@dataclass(frozen=True)
class Extent:
    """How many worlds: `seeds` of them, or as many as it takes to see so much."""

    seeds: int = 0
    events: int = 0
    faults: int = 0

    def reached(self, seen: "Extent") -> bool:
        return seen.seeds >= self.seeds and seen.events >= self.events and seen.faults >= self.faults

    def batches(self, seen: "Extent", first: int, count: int) -> list[range]:
        """The next seeds; not more than are wanted, where their number is all that is."""
        begin = first + seen.seeds
        end = begin + count * BATCH
        if not (self.events or self.faults):
            end = min(end, first + self.seeds)
        return [range(start, min(start + BATCH, end)) for start in range(begin, end, BATCH)]


Failures = list[dict[str, Any]]


QUICK = Extent(seeds=200)
FULL = Extent(events=1_000_000)
NIGHTLY = Extent(events=10_000_000, faults=100_000)
MUTANTS = 150
MUTATION_SEED = 1


def live_through(seeds: range) -> tuple[int, int, Failures]:
    """Events, faults, and the seeds that failed, each with its error."""
    from elastic.sim.world import SimulatedWorldFailed, simulate

    events, faults, failures = 0, 0, Failures()
    for seed in seeds:
        try:
            outcome = simulate(seed)
        except SimulatedWorldFailed as failure:
            failures.append({"seed": seed, "error": str(failure)})
        else:
            events += outcome.events
            faults += outcome.faults
    return events, faults, failures


def worlds(wanted: Extent, first: int) -> dict[str, Any]:
    """Live through the seeds from `first` on, on every core; too many that fail are enough."""
    seen, failures = Extent(), Failures()
    began_s, cores = time.monotonic(), os.cpu_count() or 1
    with multiprocessing.get_context("spawn").Pool(cores) as pool:
        while not wanted.reached(seen) and len(failures) < FAILURES_MAX:
            batches = wanted.batches(seen, first, 2 * cores)
            found = pool.map(live_through, batches, chunksize=1)
            failures += [failure for _, _, failed in found for failure in failed]
            seen = Extent(
                seen.seeds + sum(map(len, batches)),
                seen.events + sum(events for events, _, _ in found),
                seen.faults + sum(faults for _, faults, _ in found),
            )
            told = f"{seen.seeds:,} worlds: {seen.events:,} events, {seen.faults:,} faults, {len(failures)} failed"
            print(told, file=sys.stderr, flush=True)
    return {
        "events": seen.events,
        "faults": seen.faults,
        "seeds": seen.seeds,
        "failed_seeds": failures,
        "events_per_s": seen.events / (time.monotonic() - began_s),
    }


def mutation(count: int | None, seed: int) -> dict[str, Any]:
    there_are = all_mutants()
    chosen = sample(there_are, count, seed)
    by: Counter[str] = Counter()
    survivors: list[str] = []
    for number, (mutant, noticed) in enumerate(judge([None, *chosen], os.cpu_count() or 1)):
        if mutant is None and noticed is not None:
            raise SystemExit(f"the code as it is does not pass: {noticed}")
        if mutant is not None and noticed is None:
            survivors.append(str(mutant))
            print(f"survived: {mutant}", file=sys.stderr, flush=True)
        by[noticed or "nobody"] += mutant is not None
        if number % 25 == 0:
            print(f"{number} of {len(chosen)}, {len(survivors)} survived", file=sys.stderr, flush=True)
    return {
        "mutants": len(chosen),
        "mutants_killed": len(chosen) - len(survivors),
        "mutants_there_are": len(there_are),
        "noticed_by": dict(by),
        "survivors": sorted(survivors),
    }


def main(wanted: Extent, first: int, mutants: int | None, seed: int) -> dict[str, Any]:
    # Mutants first: they are judged in forks of a process that has not imported the core.
    judged: dict[str, Any] = {"mutants": None, "mutants_killed": None}
    if mutants != 0:
        judged = mutation(mutants, seed)
    return (worlds(wanted, first) if wanted != Extent() else {}) | judged


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line of standard output")
    extent = parser.add_mutually_exclusive_group()
    extent.add_argument(
        "--quick", action="store_true", help="under 50 s on two cores: a fixed set of seeds, no mutants"
    )
    extent.add_argument("--nightly", action="store_true", help="ten million events")
    extent.add_argument("--seeds", type=int, metavar="N", help="so many worlds, and no mutants")
    extent.add_argument("--only-mutants", action="store_true", help="no worlds of their own")
    parser.add_argument("--first", type=int, default=0, help="the first world's seed")
    parser.add_argument("--mutants", type=int, default=MUTANTS, help="judge so many, drawn evenly")
    parser.add_argument("--all-mutants", action="store_true", help="judge every mutant")
    parser.add_argument("--mutation-seed", type=int, default=MUTATION_SEED, help="which mutants are drawn")
    given = parser.parse_args()
    modes = ((given.quick, QUICK), (given.nightly, NIGHTLY), (given.only_mutants, Extent()))
    chosen = next((extent for asked, extent in modes if asked), FULL)
    if given.seeds is not None:
        chosen = Extent(seeds=given.seeds)
    count = 0 if given.quick or given.seeds is not None else None if given.all_mutants else given.mutants
    figures = main(chosen, given.first, count, given.mutation_seed)
    emit(figures, Arguments(quick=given.quick, json=given.json))
    sys.exit(bool(figures.get("failed_seeds")))
