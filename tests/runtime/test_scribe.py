"""What the journal's recorder counts for the status."""

import pytest

from elastic.core import events as e
from elastic.core.scheduler import Scheduler
from elastic.core.types import EndCause, Plan, WorkerId
from elastic.runtime.journal import NullJournal
from elastic.runtime.scribe import Scribe
from elastic.runtime.status import late_share
from elastic.testing.faults.core.incarnation import policies
from elastic.testing.faults.core.settings import SMALL_LIMITS, WorldSettings


@pytest.fixture
def scribe() -> Scribe:
    settings = WorldSettings(plan=Plan(steps=1, groups=1, group_size=2))
    return Scribe(Scheduler(settings.plan, SMALL_LIMITS, policies(settings), 0), NullJournal())


def reported(worker: WorkerId, paced: int, late: int) -> e.WorkerReported:
    return e.WorkerReported(
        worker=worker,
        epoch=1,
        capacity_turns=1,
        pending=0,
        executing=0,
        progress=paced,
        accounts_ns={},
        decoded_tokens=0,
        paced_iterations=paced,
        late_iterations=late,
    )


def test_late_iterations_add_up_over_the_workers_that_come_and_go(scribe: Scribe) -> None:
    assert late_share(scribe.counts.values()) is None
    gone = e.LeaseEnded(lease="spot-1", cause=EndCause.PREEMPTED)
    told = [reported("spot-1.0", 10, 1), reported("spot-2.0", 4, 0), reported("spot-1.0", 30, 5), gone]
    for now_ns, event in enumerate([*told, reported("spot-2.0", 10, 0)]):
        scribe.record(now_ns, event, None, [])
    count = scribe.counts["spot"]
    assert (count.paced_iterations, count.late_iterations) == (40, 5)
    assert late_share(scribe.counts.values()) == 5 / 40
