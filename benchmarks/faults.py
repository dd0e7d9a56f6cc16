"""Worlds full of faults by the thousand, and whether they and the unit tests notice code that is wrong.

Four kinds of worlds, of `elastic/testing/faults`: `core`'s, cheap, of the core and its `Run`; under `jobs` those of a
pool's production shell, and there under `runs_in_pools` those of such a pool with production runs in it; and `shell`'s,
whose keys begin with `shell_`. There `needless` counts
acts without a cause in the world, `shell_coverage` is the share of the shell's lines that its first worlds go through
(sixteen in the quick run, at most a hundred in others), and `shell_bugs` are planted one at a time.

`--quick` lives through the seeds that CI has first and checks no mutant; it takes minutes, most of them for planted
bugs. Without it: a million events and more of each kind, and a sample of mutants. `--minutes 60` lives through worlds
of the production shell for an hour, from a fresh seed on; a world that fails is told at once, with the command that
replays it. `--nightly`: ten million events of the cheap worlds; of the production shell three million, and three
hundred thousand faults. `--all-mutants` checks every mutant, which takes hours.
"""

import argparse
import multiprocessing
import os
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from benchmarks._checkers import check_mutants
from benchmarks._common import Figures, emit
from benchmarks._mutants import all_mutants, sample
from benchmarks._processes import scratch_directory
from benchmarks._shell import (
    WorldsSeen,
    import_shell,
    is_production_shell,
    live_through,
    live_through_shell_watched,
    planted_bugs,
    shell_lines,
)
from elastic.system.cores import cores

BATCH, SHELL_BATCH = 50, 5
ROUND = 6
"""Batches for each core at a time; after them it is seen whether that is enough."""
FAILURES_MAX = 100


@dataclass(frozen=True)
class Extent:
    """How many worlds: `seeds` of them, or as many as it takes to see so much, or for so long."""

    seeds: int = 0
    events: int = 0
    faults: int = 0
    minutes: float = 0.0

    def reached(self, seen: WorldsSeen, took_s: float) -> bool:
        enough = seen.seeds >= self.seeds and seen.events >= self.events and seen.faults >= self.faults
        return enough and took_s >= 60 * self.minutes

    def batches(self, begin: int, first: int, size: int, count: int) -> list[range]:
        """The next seeds from `begin` on; not more than are wanted, where their number is all that is."""
        end = begin + count * size
        if not (self.events or self.faults or self.minutes):
            end = min(end, first + self.seeds)
        return [range(start, min(start + size, end)) for start in range(begin, end, size)]


QUICK = Extent(seeds=100)
FULL = Extent(events=1_000_000)
NIGHTLY = Extent(events=10_000_000, faults=100_000)
SHELL = {QUICK: Extent(seeds=16), FULL: Extent(events=500_000), NIGHTLY: Extent(events=3_000_000, faults=300_000)}
"""As much of the production shell; as many seeds as of the cheap worlds where their number is all that is wanted."""
JOBS = {QUICK: Extent(seeds=24), FULL: Extent(events=25_000), NIGHTLY: Extent(faults=10_000)}
"""The same of worlds of a pool's production shell."""
RUNS_IN_POOLS = {QUICK: Extent(seeds=4), FULL: Extent(seeds=100), NIGHTLY: Extent(faults=10_000)}
"""The same of worlds of jobs in a pool."""
WATCHED = 100
"""Worlds whose lines are seen, where these are not all."""
BUG_SEEDS = 60
MUTANTS = 150
MUTATION_SEED = 1


def lived(live: Callable[[range], WorldsSeen], wanted: Extent, first: int, size: int) -> tuple[WorldsSeen, float]:
    """Live through the seeds from `first` on, on every core, and how long that took; too many failures are enough.

    In forks, which have imported already what this process has.
    """
    seen = WorldsSeen()
    began_s, at_once = time.monotonic(), cores()
    if wanted.seeds:
        size = max(1, min(size, wanted.seeds // (ROUND * at_once)))
    with multiprocessing.get_context("fork").Pool(at_once) as pool:
        while not wanted.reached(seen, time.monotonic() - began_s) and len(seen.failed) < FAILURES_MAX:
            batches = wanted.batches(first + seen.seeds, first, size, ROUND * at_once)
            for found in pool.imap(live, batches):
                seen.add(found)
                for failure in found.failed:
                    print(failure["error"], file=sys.stderr, flush=True)
            told = f"{seen.seeds:,} worlds: {seen.events:,} events, {seen.faults:,} faults, {len(seen.failed)} failed"
            print(told, file=sys.stderr, flush=True)
    return seen, time.monotonic() - began_s


def worlds(live: Callable[[range], WorldsSeen], wanted: Extent, first: int, batch: int) -> Figures:
    seen, took_s = lived(live, wanted, first, batch)
    return {
        "events": seen.events,
        "faults": seen.faults,
        "seeds": seen.seeds,
        "failed_seeds": seen.failed,
        "events_per_s": seen.events / took_s,
    }


def shell_worlds(wanted: Extent, first: int) -> Figures:
    """The first of them are watched, to see which lines of the shell they go through."""
    import_shell()
    looked_at = Extent(seeds=min(wanted.seeds or WATCHED, WATCHED))
    watched, took_s = lived(live_through_shell_watched, looked_at, first, SHELL_BATCH)
    seen, lines = WorldsSeen(), shell_lines()
    seen.add(watched)
    if not wanted.reached(seen, took_s):
        left = replace(wanted, minutes=max(0.0, wanted.minutes - took_s / 60))
        more, took_s = lived(partial(live_through, "run"), left, first + watched.seeds, SHELL_BATCH)
        seen.add(more)
        seeds_per_minute = more.seeds / took_s * 60
    else:
        seeds_per_minute = watched.seeds / took_s * 60
    return {
        "production_shell": is_production_shell(),
        "shell_events": seen.events,
        "shell_faults": seen.faults,
        "shell_seeds": seen.seeds,
        "shell_failed_seeds": seen.failed,
        "seeds_per_minute": seeds_per_minute,
        "shell_coverage": len(watched.lines & lines) / len(lines),
        "needless": {"fences": seen.needless["fence"], "moves": seen.needless["move"]}
        | {"resends": seen.needless["resend"], "retries": seen.needless["retry"]},
    }


def fresh_seed() -> int:
    return int.from_bytes(os.urandom(3), "big")


def bugs(quick: bool) -> Figures:
    """In the quick run each is looked for where it is known to show, in others with fresh seeds."""
    first = fresh_seed()
    verdicts = planted_bugs(None if quick else range(first, first + BUG_SEEDS))
    return {
        "shell_bugs": len(verdicts),
        "shell_bugs_found": sum(seed is not None for seed in verdicts.values()),
        "shell_bugs_not_found": sorted(name for name, seed in verdicts.items() if seed is None),
    }


def mutation(count: int | None, seed: int) -> Figures:
    there_are = all_mutants()
    chosen = sample(there_are, count, seed)
    by: Counter[str] = Counter()
    survivors: list[str] = []
    for number, (mutant, noticed) in enumerate(check_mutants([None, *chosen], cores())):
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


def main(wanted: Extent, first: int, mutants: int | None, seed: int) -> Figures:
    # Mutants first: they are checked in forks of a process that has not imported the core.
    checked: Figures = {"mutants": None, "mutants_killed": None}
    if mutants != 0:
        checked = mutation(mutants, seed)
    if wanted == Extent():
        return checked
    if wanted.minutes:
        return shell_worlds(wanted, first)
    shell = shell_worlds(SHELL.get(wanted, wanted), first)
    jobs = worlds(partial(live_through, "pool-shell"), JOBS.get(wanted, wanted), first, SHELL_BATCH)
    jobs["runs_in_pools"] = worlds(partial(live_through, "pool"), RUNS_IN_POOLS.get(wanted, wanted), first, SHELL_BATCH)
    return (
        worlds(partial(live_through, "core"), wanted, first, BATCH)
        | {"jobs": jobs}
        | shell
        | (bugs(wanted == QUICK) if wanted in SHELL else {})
        | checked
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line of standard output")
    extent = parser.add_mutually_exclusive_group()
    extent.add_argument(
        "--quick", action="store_true", help="a fixed set of seeds, no mutants; minutes, most of them for planted bugs"
    )
    extent.add_argument("--nightly", action="store_true", help="ten million events, three million of the shell")
    extent.add_argument("--seeds", type=int, metavar="N", help="so many worlds, and no mutants")
    extent.add_argument("--minutes", type=float, metavar="M", help="the production shell alone, for so long")
    extent.add_argument("--only-mutants", action="store_true", help="no worlds of their own")
    parser.add_argument("--first", type=int, help="the first world's seed: 0, and with --minutes a fresh one")
    parser.add_argument("--mutants", type=int, default=MUTANTS, help="check so many, drawn evenly")
    parser.add_argument("--all-mutants", action="store_true", help="check every mutant")
    parser.add_argument("--mutation-seed", type=int, default=MUTATION_SEED, help="which mutants are drawn")
    given, began_s = parser.parse_args(), time.monotonic()
    modes = ((given.quick, QUICK), (given.nightly, NIGHTLY), (given.only_mutants, Extent()))
    chosen = next((extent for asked, extent in modes if asked), FULL)
    if given.seeds is not None:
        chosen = Extent(seeds=given.seeds)
    if given.minutes is not None:
        chosen = Extent(minutes=given.minutes)
    no_mutants = given.quick or given.seeds is not None or given.minutes is not None
    count = 0 if no_mutants else None if given.all_mutants else given.mutants
    first = given.first
    if first is None:
        first = 0 if given.minutes is None else fresh_seed()
    with scratch_directory():
        figures = main(chosen, first, count, given.mutation_seed)
    emit(figures, given, began_s)
    jobs = figures.get("jobs") or {}
    told = (figures, jobs, jobs.get("runs_in_pools", {}))
    sys.exit(any(each.get("failed_seeds") for each in told) or bool(figures.get("shell_failed_seeds")))
