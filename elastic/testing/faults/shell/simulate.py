"""Runs worlds: their faults, until the run has ended, and then their judgement."""

from collections.abc import Callable
from functools import partial

from elastic.core.types import NS_PER_S
from elastic.testing.faults.failure import WorldFailed
from elastic.testing.faults.shell.faults import Fault, WorldPlan, draw_plan, options_of
from elastic.testing.faults.shell.judge import judge
from elastic.testing.faults.shell.strikes import strike
from elastic.testing.faults.shell.world import Outcome, World


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
            plan = world.plan
            options = options_of(plan.only, plan.faults, draw_plan(plan.seed, plan.only).faults)
            raise WorldFailed("run", plan.seed, found, options) from error


def _strike(world: World, fault: Fault) -> None:
    world.befalls(fault, strike(world, fault))
