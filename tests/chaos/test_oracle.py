"""What the oracle of a run's world makes of a lease's time."""

from random import Random

import msgspec
import pytest

from elastic.core import commands as c
from elastic.core import events as e
from elastic.core.scheduler import Scheduler
from elastic.core.types import NS_PER_S, EndCause, Offer, Plan, WorkerRole
from elastic.testing.faults.core.incarnation import policies
from elastic.testing.faults.core.settings import SMALL_LIMITS, WorldSettings
from elastic.testing.faults.shell.oracle import CLOCKS, Oracle


class Witnessed:
    """A core whose time may be behind the world's, and its oracle."""

    def __init__(self) -> None:
        settings = WorldSettings(plan=Plan(steps=1, groups=1, group_size=2))
        limits = msgspec.structs.replace(SMALL_LIMITS, boot_timeout_ns=60 * NS_PER_S)
        self.core = Scheduler(settings.plan, limits, policies(settings), 0)
        self.now_s = 0.0
        self.found: list[AssertionError] = []
        self.oracle = Oracle(lambda: round(self.now_s * NS_PER_S), Random(0), self.found)
        self.oracle.follow(self.core)

    def tell(self, event: e.Event, at_s: float, behind_s: float) -> list[c.Command]:
        self.now_s = at_s
        commands = self.core.handle(event, round((at_s - behind_s) * NS_PER_S))
        self.oracle.hear(self.core, event, commands)
        return commands

    def hold_up(self, for_s: float) -> None:
        self.oracle.ails(CLOCKS, 2 * for_s)


@pytest.mark.parametrize(
    ("held_up", "behind_at_end_s", "right"), [(True, 0.0, True), (True, 4.0, False), (False, 0.0, False)]
)
def test_a_lease_that_is_granted_after_a_hold_up_is_judged_once_the_cores_time_is_right(
    held_up: bool, behind_at_end_s: float, right: bool
) -> None:
    """Until then the core counts what was read as having come before the hold-up's end."""
    world = Witnessed()
    offer = Offer(provider="trainer", role=WorkerRole.TRAINER, available=1, usd_per_gpu_hour=1)
    (asked,) = [k for k in world.tell(e.OfferChanged(offer=offer), 1.0, 0.0) if isinstance(k, c.AcquireLease)]
    if held_up:
        world.hold_up(4.0)
    world.tell(e.LeaseGranted(asked.lease, (asked.lease,)), 12.0, 4.0)
    world.tell(e.Tick(), 17.5, 0.0)
    world.tell(e.LeaseEnded(asked.lease, EndCause.LOST), 30.0, behind_at_end_s)
    assert (not world.found) == right, world.found
