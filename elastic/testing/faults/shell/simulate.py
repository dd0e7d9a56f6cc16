"""Runs worlds: their faults, until the run has ended, and then their checks."""

from elastic.testing.faults.kinds import Fault
from elastic.testing.faults.outcome import Lived
from elastic.testing.faults.shell.checker import check_world
from elastic.testing.faults.shell.injection import inject
from elastic.testing.faults.shell.plan import WorldPlan, draw_plan
from elastic.testing.faults.shell.stage import Stage, Tell, live_on_stage
from elastic.testing.faults.shell.world import World


class RunWorld(World):
    """The world of one run, alone on its stage."""

    def inject(self, fault: Fault) -> bool:
        return inject(self, fault)

    def check(self) -> None:
        check_world(self)


def simulate(seed: int, plan: WorldPlan | None = None, tell: Tell | None = None) -> Lived:
    """Run one world. Missing arguments are drawn from the seed. Raises `WorldFailed`."""
    plan = plan or draw_plan(seed)
    return live_on_stage("run", RunWorld(plan, Stage(plan.seed, tell)), draw_plan(plan.seed, plan.only).faults)
