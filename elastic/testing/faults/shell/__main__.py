"""Replays the world of a seed, and finds a small set of its faults that still makes it fail.

python -m elastic.testing.faults.shell SEED [--only cut,lie] [--faults 0,3,7] [--shrink [--shrink-within 60]] [--log]
python -m elastic.testing.faults.shell SEED --pool [--only kill_pool] [--faults 0,3,7] [--log]   jobs in a pool
"""

import argparse
import sys
from collections.abc import Callable
from typing import TypeVar

import msgspec

from elastic.testing.faults.shell.faults import Fault, FaultKind, draw_plan
from elastic.testing.faults.shell.pooled.plan import KINDS, PooledFault, draw_pooled
from elastic.testing.faults.shell.pooled.world import PooledWorldFailed, live_pooled
from elastic.testing.faults.shell.shrink import SHRINK_S, shrunk
from elastic.testing.faults.shell.simulate import WorldFailed, simulate

F = TypeVar("F", Fault, PooledFault)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m elastic.testing.faults.shell", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("seed", type=int)
    parser.add_argument("--only", metavar="KINDS", default="", help="draw only faults of these kinds")
    parser.add_argument("--faults", metavar="NUMBERS", help="of those drawn only these; `none` for none")
    parser.add_argument("--shrink", action="store_true", help="leave out what the failure does not need")
    parser.add_argument(
        "--shrink-within", type=float, metavar="SECONDS", default=SHRINK_S, help="for --shrink; %(default)g by default"
    )
    parser.add_argument("--log", action="store_true", help="print what the processes log")
    parser.add_argument("--pool", action="store_true", help="live through a world of jobs in a pool")
    given = parser.parse_args()
    tell = print if given.log else None
    if given.pool:
        return _pooled(parser, given, tell)
    plan = draw_plan(given.seed, _kinds(parser, given.only))
    if given.faults is not None:
        plan = msgspec.structs.replace(plan, faults=_picked(parser, plan.faults, given.faults))
    try:
        print(simulate(plan.seed, plan, tell))
    except WorldFailed as failure:
        print(failure, file=sys.stderr)
        if given.shrink:
            found = shrunk(plan, given.shrink_within)
            print(f"{len(found.plan.faults)} of {len(plan.faults)} faults do: {found}", file=sys.stderr)
        return 1
    return 0


def _kinds(parser: argparse.ArgumentParser, names: str) -> list[FaultKind]:
    try:
        return [FaultKind(name) for name in names.split(",") if name]
    except ValueError as error:
        parser.error(f"--only: {error}; allowed: {', '.join(FaultKind)}")


def _pooled(parser: argparse.ArgumentParser, given: argparse.Namespace, tell: Callable[[str], None] | None) -> int:
    """Replay a world of jobs in a pool."""
    if given.shrink:
        parser.error("--shrink: not with --pool; --faults picks some by hand")
    only = [kind for kind in given.only.split(",") if kind]
    if unknown := [kind for kind in only if kind not in KINDS]:
        parser.error(f"--only: unknown {', '.join(unknown)}; allowed with --pool: {', '.join(KINDS)}")
    plan = draw_pooled(given.seed, only)
    if given.faults is not None:
        plan = msgspec.structs.replace(plan, faults=_picked(parser, plan.faults, given.faults))
    try:
        print(live_pooled(plan, tell))
    except PooledWorldFailed as failure:
        print(failure, file=sys.stderr)
        return 1
    return 0


def _picked(parser: argparse.ArgumentParser, faults: tuple[F, ...], numbers: str) -> tuple[F, ...]:
    try:
        return () if numbers == "none" else tuple(faults[int(number)] for number in numbers.split(","))
    except (ValueError, IndexError):
        parser.error(f"--faults {numbers}: numbers from 0 to {len(faults) - 1} with commas between them are allowed")


if __name__ == "__main__":
    sys.exit(main())
