"""Providers fill in for each other: what one does not give any more, another is asked for."""

import pytest

from elastic.core import commands as c
from elastic.core import events as e
from elastic.core.types import NS_PER_S, EndCause, Offer, WorkerRole
from elastic.testing.faults.core.settings import SMALL_LIMITS
from policies.provisioning import MarginalValue

RETRY_S = SMALL_LIMITS.retry_base_ns / NS_PER_S
CHEAP, DEAR = "spot", "serving"
USD = {CHEAP: 0.0, DEAR: 1.5}


def offer(core, provider: str, available: int = 1) -> list[str]:
    """The leases that are asked for when a provider offers so many."""
    offered = Offer(
        provider=provider, role=WorkerRole.ELASTIC, available=available, usd_per_gpu_hour=USD[provider], boot_s=0.0
    )
    return asked(core.tell(e.OfferChanged(offer=offered)))


def asked(out: list[c.Command]) -> list[str]:
    return [command.lease for command in out if isinstance(command, c.AcquireLease)]


def wait(core, seconds: float) -> list[str]:
    return asked(core.wait(seconds, beating=tuple(core.scheduler.fleet.workers)))


@pytest.fixture(params=["bound", "price"])
def core(make_core, request: pytest.FixtureRequest):
    """One worker of the cheap provider; for one of the other's there is no room beside it, or it does not pay."""
    bounded = request.param == "bound"
    core = make_core(provisioning=MarginalValue(usd_per_hour_saved=100.0 if bounded else 0.0))
    core.scheduler.leases.worker_bound = 1 if bounded else None
    core.trainer()
    assert offer(core, CHEAP) == ["spot-1"]
    assert offer(core, DEAR) == []
    return core


def serve(core, lease: str) -> None:
    core.grant(lease)
    core.join(f"{lease}/w")
    core.beat(f"{lease}/w")


def test_another_provider_is_asked_when_one_says_that_it_has_nothing_left(core) -> None:
    serve(core, "spot-1")
    assert offer(core, CHEAP, 0) == []
    assert asked(core.lease_ended("spot-1")) == []
    assert offer(core, CHEAP, 0) == ["serving-1"]


def test_another_provider_is_asked_when_one_says_nothing(core) -> None:
    serve(core, "spot-1")
    core.lease_ended("spot-1")
    assert wait(core, RETRY_S - 0.1) == []
    assert wait(core, 0.2) == ["serving-1"]


def test_one_end_after_another_does_not_put_it_off(make_core) -> None:
    core = make_core(provisioning=MarginalValue())
    core.scheduler.leases.worker_bound = 2
    core.trainer()
    for lease in offer(core, CHEAP, 2):
        serve(core, lease)
    assert offer(core, DEAR) == []
    core.lease_ended("spot-1")
    assert wait(core, 0.6 * RETRY_S) == []
    core.lease_ended("spot-2")
    assert wait(core, 0.6 * RETRY_S) == ["serving-1"]


def test_the_providers_next_lease_comes_before_anothers(core) -> None:
    serve(core, "spot-1")
    core.lease_ended("spot-1", EndCause.EXPIRED)
    assert offer(core, CHEAP) == ["spot-2"]
    assert wait(core, 2 * RETRY_S) == []


def test_another_provider_is_asked_at_once_when_one_refuses(core) -> None:
    assert asked(core.tell(e.LeaseRefused(lease="spot-1", reason="full"))) == ["serving-1"]


def test_who_refused_is_asked_again_if_there_is_still_something_to_ask_for(core) -> None:
    core.tell(e.LeaseRefused(lease="spot-1", reason="full"))
    assert wait(core, RETRY_S - 0.1) == []
    core.tell(e.LeaseRefused(lease="serving-1", reason="full"))
    assert wait(core, 2 * RETRY_S) == ["spot-2"]


def test_what_was_granted_is_not_asked_for_again_at_anothers_offer(core) -> None:
    core.scheduler.leases.worker_bound = None
    serve(core, "spot-1")
    assert not [lease for lease in offer(core, DEAR, 0) if lease.startswith(CHEAP)]


def test_nobody_is_asked_once_the_run_is_over(core) -> None:
    serve(core, "spot-1")
    core.lease_ended("spot-1")
    core.tell(e.StopRequested(reason="enough"))
    assert wait(core, 2 * RETRY_S) == []


def test_a_lease_that_never_joined_counts_once_however_late_its_end_is_confirmed(core) -> None:
    failures = core.scheduler.leases.failures
    core.grant("spot-1")
    out = core.wait(SMALL_LIMITS.boot_timeout_ns / NS_PER_S + 0.1, beating=("trainer",))
    (release,) = [command for command in out if isinstance(command, c.ReleaseLease)]
    assert (release.lease, release.reason) == ("spot-1", EndCause.BOOT_TIMEOUT)
    assert failures[CHEAP] == 1
    core.wait(3 * RETRY_S, beating=("trainer",))
    assert not core.scheduler.timers.waiting("back-off", CHEAP)
    core.lease_ended("spot-1", EndCause.BOOT_TIMEOUT)
    assert failures[CHEAP] == 1
