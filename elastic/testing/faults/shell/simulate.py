"""Lives through worlds of the production shell: their faults, until all is over, and then their checks."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from elastic.testing.faults.kinds import KINDS_OF_RUNS, Fault, FaultKind
from elastic.testing.faults.outcome import Lived
from elastic.testing.faults.shell.checker import check_world
from elastic.testing.faults.shell.injection import inject
from elastic.testing.faults.shell.outside.plan import KINDS_OUTSIDE, draw_outside
from elastic.testing.faults.shell.outside.world import OutsideWorld
from elastic.testing.faults.shell.plan import WorldPlan, draw_plan
from elastic.testing.faults.shell.pooled.plan import KINDS_POOLED, PooledPlan, draw_pooled
from elastic.testing.faults.shell.pooled.world import PooledWorld
from elastic.testing.faults.shell.stage import Stage, Tell, live_on_stage
from elastic.testing.faults.shell.world import World

Plan = WorldPlan | PooledPlan


class RunWorld(World):
    """The world of one run, alone on its stage."""

    def inject(self, fault: Fault) -> bool:
        return inject(self, fault)

    def check(self) -> None:
        check_world(self)


DrivenWorld = RunWorld | PooledWorld | OutsideWorld


class ShellWorld(NamedTuple):
    """A world of the production shell: the kinds of its faults, its plans, and how it comes onto a stage."""

    kinds: Sequence[FaultKind]
    draw: Callable[[int, Sequence[FaultKind]], Plan]
    make: Callable[..., DrivenWorld]


SHELL_WORLDS = {
    "run": ShellWorld(KINDS_OF_RUNS, draw_plan, lambda plan, tell: RunWorld(plan, Stage(plan.seed, tell))),
    "outside": ShellWorld(KINDS_OUTSIDE, draw_outside, lambda plan, tell: OutsideWorld(plan, Stage(plan.seed, tell))),
    "pool": ShellWorld(KINDS_POOLED, draw_pooled, PooledWorld),
}


def simulate(plan: Plan, tell: Tell | None = None) -> Lived:
    """Live through the world of a plan. Raises `WorldFailed`, also if it takes much too long."""
    of = SHELL_WORLDS[plan.world]
    return live_on_stage(of.make(plan, tell), of.draw(plan.seed, plan.only).faults)
