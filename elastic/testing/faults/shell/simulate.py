"""Runs worlds: their faults, until the run has ended, and then their judgement."""

from collections.abc import Callable
from functools import partial

from elastic.core.types import NS_PER_S
from elastic.testing.faults.shell.faults import Fault, WorldPlan, draw_plan
from elastic.testing.faults.shell.judge import judge
from elastic.testing.faults.shell.strikes import strike
from elastic.testing.faults.shell.world import Outcome, World


class WorldFailed(AssertionError):
    """A world has failed. Its plan, which the seed draws, is enough to replay it."""

    def __init__(self, plan: WorldPlan, found: str, cause: Exception) -> None:
        self.plan = plan
        self.cause = cause
        super().__init__(f"seed {plan.seed}: {found}\nreplay it: {plan.command()}")


def simulate(seed: int, plan: WorldPlan | None = None, tell: Callable[[str], None] | None = None) -> Outcome:
    """Run one world. Missing arguments are drawn from the seed. Raises `WorldFailed`."""
    return live(World(plan or draw_plan(seed), tell))


def live(world: World) -> Outcome:
    """Run the world until its run has ended and no process is left. Raises `WorldFailed`, also if that takes much
    too long."""
    with world.begins():
        try:
            for fault in world.plan.faults:
                world.after(fault.at_s, partial(_strike, world, fault))
            world.go_on()
            judge(world)
            return world.outcome()
        except Exception as error:
            found = f"at {world.clock.now_ns / NS_PER_S:.3f} s: {type(error).__name__}: {error}"
            raise WorldFailed(world.plan, found, error) from error


def _strike(world: World, fault: Fault) -> None:
    world.befalls(fault, strike(world, fault))
