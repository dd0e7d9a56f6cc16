"""Lives through worlds: what befalls them, until the run has ended, and what is then said of it."""

from collections.abc import Callable
from functools import partial

from elastic.chaos.faults import Fault, WorldPlan, draw_plan
from elastic.chaos.judge import judge
from elastic.chaos.strikes import strike
from elastic.chaos.world import Outcome, World
from elastic.core.types import NS_PER_S


class WorldFailed(AssertionError):
    """A world went wrong; its plan, which a seed draws, is all that is needed to see it again."""

    def __init__(self, plan: WorldPlan, found: str, cause: Exception) -> None:
        self.plan = plan
        self.cause = cause
        super().__init__(f"seed {plan.seed}: {found}\nreplay it: {plan.command()}")


def simulate(seed: int, plan: WorldPlan | None = None, tell: Callable[[str], None] | None = None) -> Outcome:
    """Live through one world. What is not given is drawn from the seed. Raises `WorldFailed`."""
    return live(World(plan or draw_plan(seed), tell))


def live(world: World) -> Outcome:
    """Until the run has ended and nothing is left, or much too long. Raises `WorldFailed`."""
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
