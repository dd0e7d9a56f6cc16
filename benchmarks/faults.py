"""Worlds full of faults by the thousand, and whether they and the unit tests notice a core that is wrong.

`--quick` lives through a fixed small set of seeds and judges no mutant. Without it: ten million events and more, and a
sample of mutants; `--all-mutants` judges every one of them, which takes hours.
"""

import argparse
import json
import multiprocessing
import os
import sys
import time
from collections import Counter
from typing import Any

from _common import Arguments, emit
from _judges import judge
from _mutants import all_mutants, sample

QUICK_SEEDS = 60
EVENTS_WANTED = 10_000_000
BATCH = 200
MUTANTS = 150
MUTATION_SEED = 1


def live_through(seeds: range) -> tuple[int, int, list[str]]:
    """Events, faults, and what failed."""
    from elastic.sim.world import WorldFailed, simulate

    events, faults, failures = 0, 0, []
    for seed in seeds:
        try:
            outcome = simulate(seed)
        except WorldFailed as failure:
            failures.append(str(failure))
        else:
            events += outcome.events
            faults += outcome.faults
    return events, faults, failures


def worlds(quick: bool) -> dict[str, Any]:
    events, faults, seeds, failures = 0, 0, 0, []
    began_s = time.monotonic()
    with multiprocessing.get_context("spawn").Pool(os.cpu_count()) as pool:
        while not seeds or (not quick and events < EVENTS_WANTED):
            batch = QUICK_SEEDS // 2 if quick else BATCH
            ranges = [range(seeds + n * batch, seeds + (n + 1) * batch) for n in range(2 * (os.cpu_count() or 1))]
            ranges = ranges[:2] if quick else ranges
            for found in pool.map(live_through, ranges, chunksize=1):
                events, faults, failures = events + found[0], faults + found[1], failures + found[2]
            seeds += batch * len(ranges)
    return {
        "events": events,
        "faults": faults,
        "seeds": seeds,
        "failed_seeds": failures,
        "events_per_s": events / (time.monotonic() - began_s),
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


def main(arguments: Arguments, mutants: int | None, seed: int) -> dict[str, Any]:
    # Mutants first: they are judged in forks of a process that has not imported the core.
    judged: dict[str, Any] = {"mutants": None, "mutants_killed": None}
    if not arguments.quick:
        judged = mutation(mutants, seed)
    return worlds(arguments.quick) | judged


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a fixed small set of seeds, no mutants")
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line of standard output")
    parser.add_argument("--all-mutants", action="store_true", help="judge every mutant")
    parser.add_argument("--mutants", type=int, default=MUTANTS, help="judge so many, drawn evenly")
    parser.add_argument("--mutation-seed", type=int, default=MUTATION_SEED, help="which mutants are drawn")
    parser.add_argument("--only-mutants", action="store_true", help="no worlds of their own")
    given = parser.parse_args()
    wanted = None if given.all_mutants else given.mutants
    if given.only_mutants:
        print(json.dumps(mutation(wanted, given.mutation_seed)))
    else:
        chosen = Arguments(quick=given.quick, json=given.json)
        emit(main(chosen, wanted, given.mutation_seed), chosen)
