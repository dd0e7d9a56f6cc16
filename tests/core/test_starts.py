"""A start that cannot succeed is not repeated: the same cause twice in a row ends the wait for it."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.core import commands as c
from elastic.core import events as e
from elastic.core.types import NS_PER_S, EndCause, WorkerRole
from elastic.testing.faults.core.settings import SMALL_LIMITS
from tests.core.conftest import CoreHarness

FAULT = "its process exited with status 1: RuntimeError: no locator available for file 'gap8.py'(pid {})"
PAUSE_S = SMALL_LIMITS.retry_max_ns / NS_PER_S


def asked(out: list[c.Command], provider: str = "spot") -> list[str]:
    return [x.lease for x in out if isinstance(x, c.AcquireLease) and x.provider == provider]


def fail(core: CoreHarness, lease: str, fault: str) -> None:
    """The lease is granted and ends before its worker's first word; then the provider is left alone for long enough."""
    core.grant(lease)
    core.tell(e.LeaseEnded(lease=lease, cause=EndCause.LOST, fault=fault))
    core.wait(PAUSE_S, beating=("trainer",) if core.scheduler.fleet.trainer else ())


def next_lease(core: CoreHarness) -> str:
    """The lease that is asked for at the next offer; empty for none."""
    return "".join(asked(core.offer("spot")))


def running() -> CoreHarness:
    core = CoreHarness()
    core.trainer()
    core.scheduler.leases.worker_bound = None
    return core


def test_a_provider_whose_workers_cannot_start_is_stopped_with_the_cause() -> None:
    core = running()
    for process in (17, 18):
        fail(core, next_lease(core), FAULT.format(process))
    assert core.scheduler.leases.stopped == {"spot": FAULT.format(18)}
    assert asked(core.offer("spot", available=4)) == []
    assert asked(core.offer("serving"), "serving") == ["serving-1"], "others go on"


@pytest.mark.parametrize("again", [e.CapSet(command="1", provider="spot", gpus=None), e.Resumed()])
def test_a_command_or_a_resume_offers_it_again(again: e.Event) -> None:
    core = running()
    for _ in range(2):
        fail(core, next_lease(core), FAULT)
    assert next_lease(core) == ""
    core.tell(again)
    assert not core.scheduler.leases.stopped
    assert next_lease(core) or core.scheduler.leases.asked("spot")


def test_a_trainer_that_cannot_start_ends_the_run_with_the_cause() -> None:
    core = CoreHarness()
    core.offer("trainer", role=WorkerRole.TRAINER)
    for lease in ("trainer-1", "trainer-2"):
        fail(core, lease, FAULT)
        core.offer("trainer", role=WorkerRole.TRAINER)
    assert core.scheduler.failed == f"the trainer's device cannot start: {FAULT}"


def test_leases_that_were_asked_for_together_tell_it_once() -> None:
    core = running()
    leases = asked(core.offer("spot", available=3), "spot")
    assert len(leases) == 3
    for lease in leases:
        core.grant(lease)
    for lease in leases:
        core.tell(e.LeaseEnded(lease=lease, cause=EndCause.LOST, fault=FAULT))
    assert not core.scheduler.leases.stopped


@given(st.lists(st.sampled_from(["", "a", "b", "joins"]), max_size=12))
def test_it_is_stopped_just_if_two_in_a_row_tell_the_same(told: list[str]) -> None:
    """What tells nothing is an accident, and breaks no row; a worker that joins does."""
    core, row = running(), list[str]()
    for fault in told:
        lease = next_lease(core)
        if fault == "joins":
            core.grant(lease)
            core.join(f"{lease}/w")
            core.lease_ended(lease)
            row = []
        else:
            row += [fault] if fault else []
            fail(core, lease, fault)
        if any(one == other for one, other in itertools.pairwise(row)):
            assert core.scheduler.leases.stopped == {"spot": fault}
            return
        assert not core.scheduler.leases.stopped
