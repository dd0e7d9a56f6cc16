"""Replays the world of a seed, and finds a small set of its faults that still makes it fail.

python -m elastic.chaos SEED [--only cut,lie] [--faults 0,3,7] [--shrink [--shrink-within 60]] [--log]
"""

import argparse
import sys

import msgspec

from elastic.chaos.faults import Fault, FaultKind, WorldPlan, draw_plan
from elastic.chaos.shrink import SHRINK_S, shrunk
from elastic.chaos.simulate import WorldFailed, simulate


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m elastic.chaos", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("seed", type=int)
    parser.add_argument("--only", metavar="KINDS", default="", help="draw only faults of these kinds")
    parser.add_argument("--faults", metavar="NUMBERS", help="of those drawn only these; `none` for none")
    parser.add_argument("--shrink", action="store_true", help="leave out what the failure does not need")
    parser.add_argument(
        "--shrink-within", type=float, metavar="SECONDS", default=SHRINK_S, help="for --shrink; %(default)g by default"
    )
    parser.add_argument("--log", action="store_true", help="print what the processes log")
    given = parser.parse_args()
    plan = draw_plan(given.seed, _kinds(parser, given.only))
    if given.faults is not None:
        plan = msgspec.structs.replace(plan, faults=_picked(parser, plan, given.faults))
    tell = print if given.log else None
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


def _picked(parser: argparse.ArgumentParser, plan: WorldPlan, numbers: str) -> tuple[Fault, ...]:
    count = len(plan.faults)
    try:
        return () if numbers == "none" else tuple(plan.faults[int(number)] for number in numbers.split(","))
    except (ValueError, IndexError):
        parser.error(f"--faults {numbers}: numbers from 0 to {count - 1} with commas between them are allowed")


if __name__ == "__main__":
    sys.exit(main())
