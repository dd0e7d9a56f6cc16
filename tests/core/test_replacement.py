"""Leases that end by time: their replacements are asked for so early that turns move to a ready worker."""

from itertools import pairwise

import pytest

from elastic.core import commands as c
from elastic.core import events as e
from elastic.core.types import NS_PER_S, EndCause, Offer, WorkerRole
from elastic.testing.faults.core.settings import SMALL_LIMITS
from policies.provisioning import MarginalValue
from policies.replacement import EarlyReplacement
from tests.core.conftest import CoreHarness

DRAIN_S = SMALL_LIMITS.drain_timeout_ns / NS_PER_S
BOOT_S = 2.0
LEAD_S = EarlyReplacement().margin * BOOT_S
LIFE_S = 20.0


def offer(core: CoreHarness, available: int = 1, replacements: int = 1) -> list[c.Command]:
    return core.tell(
        e.OfferChanged(
            offer=Offer(
                provider="functions",
                role=WorkerRole.ELASTIC,
                available=available,
                replacements=replacements,
                usd_per_gpu_hour=1.0,
                boot_s=BOOT_S,
            )
        )
    )


def arrive(core: CoreHarness, lease: str, life_s: float = LIFE_S) -> None:
    core.grant(lease, expires_s=core.now_s + life_s)
    core.join(f"{lease}/w")
    core.beat(f"{lease}/w")


@pytest.fixture
def core(core: CoreHarness) -> CoreHarness:
    """A run with one lease of `LIFE_S`, from now on, ready at once."""
    core.trainer()
    offer(core)
    arrive(core, "functions-1")
    offer(core, available=0)
    return core


def asked(out: list[c.Command]) -> list[str]:
    return [command.lease for command in out if isinstance(command, c.AcquireLease)]


def drained(out: list[c.Command]) -> list[str]:
    return [command.worker for command in out if isinstance(command, c.DrainWorker)]


ALIVE = ("trainer", "functions-1/w")
DUE_S = LIFE_S - DRAIN_S - LEAD_S
"""When the replacement of the first lease is asked for."""
RETRY_S = SMALL_LIMITS.retry_base_ns / NS_PER_S


def test_a_replacement_is_asked_for_before_the_worker_leaves(core: CoreHarness) -> None:
    assert not asked(core.wait(LIFE_S - DRAIN_S - LEAD_S - 0.1, ALIVE))
    assert asked(core.wait(0.2, ALIVE)) == ["functions-2"]
    arrive(core, "functions-2")
    out = core.wait(LEAD_S - 0.2, (*ALIVE, "functions-2/w"))
    assert not core.scheduler.fleet.leaving
    out += core.wait(0.2, (*ALIVE, "functions-2/w"))
    assert list(core.scheduler.fleet.leaving) == ["functions-1/w"]
    assert drained(out) == []
    assert drained(core.wait(DRAIN_S, (*ALIVE, "functions-2/w"))) == ["functions-1/w"]


def test_a_lease_that_was_slow_to_get_ready_has_its_replacement_the_earlier(core: CoreHarness) -> None:
    """What is measured counts for the very lease that it was measured on."""
    slow_s = 2 * BOOT_S
    core.tell(e.LeaseEnded(lease="functions-1", cause=EndCause.RELEASED))
    offer(core, available=1)
    core.grant("functions-2", expires_s=core.now_s + LIFE_S)
    core.wait(slow_s, ("trainer",))
    core.join("functions-2/w")
    core.beat("functions-2/w")
    offer(core, available=0)
    due_s = LIFE_S - DRAIN_S - EarlyReplacement().margin * slow_s - slow_s
    assert not asked(core.wait(due_s - 0.1, ("trainer", "functions-2/w")))
    assert asked(core.wait(0.2, ("trainer", "functions-2/w")))


def test_its_replacement_has_one_too(core: CoreHarness) -> None:
    core.wait(LIFE_S - DRAIN_S - LEAD_S + 0.1, ALIVE)
    arrive(core, "functions-2")
    core.tell(e.LeaseEnded(lease="functions-1", cause=EndCause.RELEASED))
    assert asked(core.wait(LIFE_S - DRAIN_S, ("trainer", "functions-2/w"))) == ["functions-3"]


def test_none_without_an_offer_of_successors(core: CoreHarness) -> None:
    offer(core, available=0, replacements=0)
    assert not asked(core.wait(LIFE_S - DRAIN_S, ALIVE))
    core.tell(e.LeaseEnded(lease="functions-1", cause=EndCause.EXPIRED))
    assert asked(offer(core, available=1)) == ["functions-2"]


def test_none_for_a_lease_that_has_gone_before(core: CoreHarness) -> None:
    core.tell(e.LeaseEnded(lease="functions-1", cause=EndCause.LOST))
    assert not asked(core.wait(LIFE_S, ("trainer",)))


def test_what_getting_ready_took_counts_when_it_is_longer_than_declared(core: CoreHarness) -> None:
    offer(core, available=1)
    core.grant("functions-2", expires_s=core.now_s + 2 * LIFE_S)
    core.wait(2 * BOOT_S, ALIVE)
    core.join("functions-2/w")
    assert core.scheduler.leases.ready_ns("functions") == 2 * BOOT_S * NS_PER_S


@pytest.mark.parametrize(("ready_s", "lead_s"), [(None, LEAD_S), (0.5, LEAD_S), (4.0, 1.5 * 4.0)])
def test_lead_is_a_margin_over_the_longer_of_declared_and_measured(ready_s: float | None, lead_s: float) -> None:
    offered = Offer(provider="p", role=WorkerRole.ELASTIC, available=0, usd_per_gpu_hour=1.0, boot_s=BOOT_S)
    ready_ns = None if ready_s is None else round(ready_s * NS_PER_S)
    assert EarlyReplacement(1.5).lead_ns(offered, ready_ns) == round(lead_s * NS_PER_S)


def test_leases_too_short_to_be_of_use_are_asked_for_ever_more_rarely(core: CoreHarness) -> None:
    """What boots for longer than it lives is never ready: it costs, and nothing comes of it."""
    core.tell(e.LeaseEnded(lease="functions-1", cause=EndCause.PREEMPTED))
    asked_at_s: list[float] = []
    out = offer(core, available=1, replacements=1)
    for _ in range(4):
        while not asked(out):
            out = core.wait(0.25, ("trainer",))
        asked_at_s.append(core.now_s)
        (lease,) = asked(out)
        core.grant(lease, expires_s=core.now_s + 1.0)
        offer(core, available=0, replacements=1)
        assert not asked(core.wait(0.5, ("trainer",)))
        core.tell(e.LeaseEnded(lease=lease, cause=EndCause.EXPIRED))
        out = offer(core, available=1, replacements=1)
    gaps_s = [later - earlier for earlier, later in pairwise(asked_at_s)]
    assert gaps_s == sorted(gaps_s)
    assert gaps_s[-1] > 2 * gaps_s[0]


def test_a_refused_replacement_is_asked_for_again(core: CoreHarness) -> None:
    assert asked(core.wait(DUE_S + 0.1, ALIVE)) == ["functions-2"]
    core.tell(e.LeaseRefused(lease="functions-2", reason="full"))
    assert asked(core.wait(RETRY_S - 0.1, ALIVE)) == []
    assert asked(core.wait(RETRY_S + 0.2, ALIVE)) == ["functions-3"]


def test_a_replacement_that_is_lost_has_another_in_its_place(core: CoreHarness) -> None:
    core.wait(DUE_S + 0.1, ALIVE)
    arrive(core, "functions-2")
    core.tell(e.LeaseEnded(lease="functions-2", cause=EndCause.LOST))
    assert asked(core.wait(RETRY_S + 0.1, ALIVE)) == ["functions-3"]


def test_a_back_off_puts_the_replacement_off_and_no_more(core: CoreHarness) -> None:
    core.wait(DUE_S - 0.2, ALIVE)
    assert asked(offer(core, available=1)) == ["functions-2"]
    offer(core, available=0)
    core.tell(e.LeaseRefused(lease="functions-2", reason="full"))
    assert asked(core.wait(RETRY_S - 0.1, ALIVE)) == []
    assert asked(core.wait(RETRY_S, ALIVE)) == ["functions-3"]
    assert core.scheduler.leases.leases["functions-3"].replaces == "functions-1"


def test_a_replacement_is_asked_for_as_soon_as_one_is_to_be_had(core: CoreHarness) -> None:
    offer(core, available=0, replacements=0)
    assert asked(core.wait(DUE_S + 0.1, ALIVE)) == []
    offer(core, available=0, replacements=1)
    assert asked(core.wait(RETRY_S, ALIVE)) == ["functions-2"]


def test_none_once_the_lease_is_being_emptied(core: CoreHarness) -> None:
    offer(core, available=0, replacements=0)
    core.wait(LIFE_S - DRAIN_S + 0.1, ALIVE)
    assert list(core.scheduler.fleet.leaving) == ["functions-1/w"]
    offer(core, available=0, replacements=1)
    assert asked(core.wait(1.0, ALIVE)) == []


def test_one_for_all_the_workers_of_a_lease(core: CoreHarness) -> None:
    """The second worker comes when the replacement has been asked for."""
    core.tell(e.LeaseEnded(lease="functions-1", cause=EndCause.RELEASED))
    offer(core)
    workers = ("functions-2/a", "functions-2/b")
    core.grant("functions-2", expires_s=core.now_s + 8.0, workers=workers)
    offer(core, available=0, replacements=2)
    core.join(workers[0])
    assert asked(core.wait(2.1, ("trainer", workers[0]))) == ["functions-3"]
    core.join(workers[1])
    assert asked(core.wait(0.1, ("trainer", *workers))) == []


@pytest.mark.parametrize(("bound", "replacements"), [(None, 2), (2, 2), (1, 0)])
def test_replacements_are_within_the_bound(make_core, bound: int | None, replacements: int) -> None:
    """Two leases end at once: of each a replacement may take the place, if that is still worth having."""
    core = make_core(provisioning=MarginalValue())
    core.trainer()
    offer(core, available=2, replacements=2)
    for lease in ("functions-1", "functions-2"):
        arrive(core, lease)
    offer(core, available=0, replacements=2)
    core.scheduler.leases.worker_bound = bound
    alive = ("trainer", "functions-1/w", "functions-2/w")
    assert len(asked(core.wait(DUE_S + 0.1, alive))) == replacements
    assert asked(core.wait(RETRY_S, alive)) == []
