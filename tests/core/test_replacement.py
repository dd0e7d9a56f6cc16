"""Leases that end by time: their successors are asked for so early that turns move to a ready worker."""

from itertools import pairwise

import pytest

from elastic.core import commands as c
from elastic.core import events as e
from elastic.core.types import NS_PER_S, EndCause, Offer, WorkerRole
from elastic.sim.settings import SMALL_LIMITS
from policies.provisioning import MarginalValue
from policies.replacement import EarlyReplacement
from tests.core.conftest import Desk

DRAIN_S = SMALL_LIMITS.drain_timeout_ns / NS_PER_S
BOOT_S = 2.0
LEAD_S = EarlyReplacement().margin * BOOT_S
LIFE_S = 20.0


def offer(desk: Desk, available: int = 1, successors: int = 1) -> list[c.Command]:
    return desk.tell(
        e.OfferChanged(
            offer=Offer(
                provider="functions",
                role=WorkerRole.ELASTIC,
                available=available,
                successors=successors,
                usd_per_gpu_hour=1.0,
                boot_s=BOOT_S,
            )
        )
    )


def arrive(desk: Desk, lease: str, life_s: float = LIFE_S) -> None:
    desk.grant(lease, expires_s=desk.now_s + life_s)
    desk.join(f"{lease}/w")
    desk.beat(f"{lease}/w")


@pytest.fixture
def desk(desk: Desk) -> Desk:
    """A run with one lease of `LIFE_S`, from now on, ready at once."""
    desk.trainer()
    offer(desk)
    arrive(desk, "functions-1")
    offer(desk, available=0)
    return desk


def asked(out: list[c.Command]) -> list[str]:
    return [command.lease for command in out if isinstance(command, c.AcquireLease)]


def drained(out: list[c.Command]) -> list[str]:
    return [command.worker for command in out if isinstance(command, c.DrainWorker)]


ALIVE = ("trainer", "functions-1/w")
DUE_S = LIFE_S - DRAIN_S - LEAD_S
"""When the successor of the first lease is asked for."""
RETRY_S = SMALL_LIMITS.retry_base_ns / NS_PER_S


def test_a_successor_is_asked_for_before_the_worker_leaves(desk: Desk) -> None:
    assert not asked(desk.wait(LIFE_S - DRAIN_S - LEAD_S - 0.1, ALIVE))
    assert asked(desk.wait(0.2, ALIVE)) == ["functions-2"]
    arrive(desk, "functions-2")
    out = desk.wait(LEAD_S - 0.2, (*ALIVE, "functions-2/w"))
    assert not desk.scheduler.fleet.leaving
    out += desk.wait(0.2, (*ALIVE, "functions-2/w"))
    assert list(desk.scheduler.fleet.leaving) == ["functions-1/w"]
    assert drained(out) == []
    assert drained(desk.wait(DRAIN_S, (*ALIVE, "functions-2/w"))) == ["functions-1/w"]


def test_a_lease_that_was_slow_to_get_ready_has_its_successor_the_earlier(desk: Desk) -> None:
    """What is measured counts for the very lease that it was measured on."""
    slow_s = 2 * BOOT_S
    desk.tell(e.LeaseEnded(lease="functions-1", cause=EndCause.RELEASED))
    offer(desk, available=1)
    desk.grant("functions-2", expires_s=desk.now_s + LIFE_S)
    desk.wait(slow_s, ("trainer",))
    desk.join("functions-2/w")
    desk.beat("functions-2/w")
    offer(desk, available=0)
    due_s = LIFE_S - DRAIN_S - EarlyReplacement().margin * slow_s - slow_s
    assert not asked(desk.wait(due_s - 0.1, ("trainer", "functions-2/w")))
    assert asked(desk.wait(0.2, ("trainer", "functions-2/w")))


def test_its_successor_has_one_too(desk: Desk) -> None:
    desk.wait(LIFE_S - DRAIN_S - LEAD_S + 0.1, ALIVE)
    arrive(desk, "functions-2")
    desk.tell(e.LeaseEnded(lease="functions-1", cause=EndCause.RELEASED))
    assert asked(desk.wait(LIFE_S - DRAIN_S, ("trainer", "functions-2/w"))) == ["functions-3"]


def test_none_without_an_offer_of_successors(desk: Desk) -> None:
    offer(desk, available=0, successors=0)
    assert not asked(desk.wait(LIFE_S - DRAIN_S, ALIVE))
    desk.tell(e.LeaseEnded(lease="functions-1", cause=EndCause.EXPIRED))
    assert asked(offer(desk, available=1)) == ["functions-2"]


def test_none_for_a_lease_that_has_gone_before(desk: Desk) -> None:
    desk.tell(e.LeaseEnded(lease="functions-1", cause=EndCause.LOST))
    assert not asked(desk.wait(LIFE_S, ("trainer",)))


def test_what_getting_ready_took_counts_when_it_is_longer_than_declared(desk: Desk) -> None:
    offer(desk, available=1)
    desk.grant("functions-2", expires_s=desk.now_s + 2 * LIFE_S)
    desk.wait(2 * BOOT_S, ALIVE)
    desk.join("functions-2/w")
    assert desk.scheduler.leases.ready_ns("functions") == 2 * BOOT_S * NS_PER_S


@pytest.mark.parametrize(("ready_s", "lead_s"), [(None, LEAD_S), (0.5, LEAD_S), (4.0, 1.5 * 4.0)])
def test_lead_is_a_margin_over_the_longer_of_declared_and_measured(ready_s: float | None, lead_s: float) -> None:
    offered = Offer(provider="p", role=WorkerRole.ELASTIC, available=0, usd_per_gpu_hour=1.0, boot_s=BOOT_S)
    ready_ns = None if ready_s is None else round(ready_s * NS_PER_S)
    assert EarlyReplacement(1.5).lead_ns(offered, ready_ns) == round(lead_s * NS_PER_S)


def test_leases_too_short_to_be_of_use_are_asked_for_ever_more_rarely(desk: Desk) -> None:
    """What boots for longer than it lives is never ready: it costs, and nothing comes of it."""
    desk.tell(e.LeaseEnded(lease="functions-1", cause=EndCause.PREEMPTED))
    asked_at_s: list[float] = []
    out = offer(desk, available=1, successors=1)
    for _ in range(4):
        while not asked(out):
            out = desk.wait(0.25, ("trainer",))
        asked_at_s.append(desk.now_s)
        (lease,) = asked(out)
        desk.grant(lease, expires_s=desk.now_s + 1.0)
        offer(desk, available=0, successors=1)
        assert not asked(desk.wait(0.5, ("trainer",)))
        desk.tell(e.LeaseEnded(lease=lease, cause=EndCause.EXPIRED))
        out = offer(desk, available=1, successors=1)
    gaps_s = [later - earlier for earlier, later in pairwise(asked_at_s)]
    assert gaps_s == sorted(gaps_s)
    assert gaps_s[-1] > 2 * gaps_s[0]


def test_a_refused_successor_is_asked_for_again(desk: Desk) -> None:
    assert asked(desk.wait(DUE_S + 0.1, ALIVE)) == ["functions-2"]
    desk.tell(e.LeaseRefused(lease="functions-2", reason="full"))
    assert asked(desk.wait(RETRY_S - 0.1, ALIVE)) == []
    assert asked(desk.wait(RETRY_S + 0.2, ALIVE)) == ["functions-3"]


def test_a_successor_that_is_lost_has_another_in_its_place(desk: Desk) -> None:
    desk.wait(DUE_S + 0.1, ALIVE)
    arrive(desk, "functions-2")
    desk.tell(e.LeaseEnded(lease="functions-2", cause=EndCause.LOST))
    assert asked(desk.wait(RETRY_S + 0.1, ALIVE)) == ["functions-3"]


def test_a_back_off_puts_the_successor_off_and_no_more(desk: Desk) -> None:
    desk.wait(DUE_S - 0.2, ALIVE)
    assert asked(offer(desk, available=1)) == ["functions-2"]
    offer(desk, available=0)
    desk.tell(e.LeaseRefused(lease="functions-2", reason="full"))
    assert asked(desk.wait(RETRY_S - 0.1, ALIVE)) == []
    assert asked(desk.wait(RETRY_S, ALIVE)) == ["functions-3"]
    assert desk.scheduler.leases.leases["functions-3"].succeeds == "functions-1"


def test_a_successor_is_asked_for_as_soon_as_one_is_to_be_had(desk: Desk) -> None:
    offer(desk, available=0, successors=0)
    assert asked(desk.wait(DUE_S + 0.1, ALIVE)) == []
    offer(desk, available=0, successors=1)
    assert asked(desk.wait(RETRY_S, ALIVE)) == ["functions-2"]


def test_none_once_the_lease_is_being_emptied(desk: Desk) -> None:
    offer(desk, available=0, successors=0)
    desk.wait(LIFE_S - DRAIN_S + 0.1, ALIVE)
    assert list(desk.scheduler.fleet.leaving) == ["functions-1/w"]
    offer(desk, available=0, successors=1)
    assert asked(desk.wait(1.0, ALIVE)) == []


def test_one_for_all_the_workers_of_a_lease(desk: Desk) -> None:
    """The second worker comes when the successor has been asked for."""
    desk.tell(e.LeaseEnded(lease="functions-1", cause=EndCause.RELEASED))
    offer(desk)
    workers = ("functions-2/a", "functions-2/b")
    desk.grant("functions-2", expires_s=desk.now_s + 8.0, workers=workers)
    offer(desk, available=0, successors=2)
    desk.join(workers[0])
    assert asked(desk.wait(2.1, ("trainer", workers[0]))) == ["functions-3"]
    desk.join(workers[1])
    assert asked(desk.wait(0.1, ("trainer", *workers))) == []


@pytest.mark.parametrize(("bound", "successors"), [(None, 2), (2, 2), (1, 0)])
def test_successors_are_within_the_bound(make_desk, bound: int | None, successors: int) -> None:
    """Two leases end at once: of each a successor may take the place, if that is still worth having."""
    desk = make_desk(provisioning=MarginalValue())
    desk.trainer()
    offer(desk, available=2, successors=2)
    for lease in ("functions-1", "functions-2"):
        arrive(desk, lease)
    offer(desk, available=0, successors=2)
    desk.scheduler.leases.worker_bound = bound
    alive = ("trainer", "functions-1/w", "functions-2/w")
    assert len(asked(desk.wait(DUE_S + 0.1, alive))) == successors
    assert asked(desk.wait(RETRY_S, alive)) == []
