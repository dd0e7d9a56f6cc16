"""What the journal's recorder counts for the status."""

import pytest

from elastic.core import commands as c
from elastic.core import events as e
from elastic.core.scheduler import Scheduler
from elastic.core.types import EndCause, InfrastructureCause, Plan, WorkerId
from elastic.runtime.journal import GroupRow, JournalRecord, NullJournal
from elastic.runtime.scribe import Scribe
from elastic.runtime.status import late_share
from elastic.testing.faults.core.incarnation import policies
from elastic.testing.faults.core.settings import SMALL_LIMITS, WorldSettings


class Pages(NullJournal):
    """Keeps records in a list."""

    keeps = True

    def __init__(self) -> None:
        self.records: list[JournalRecord] = []

    def append(self, *records: JournalRecord) -> None:
        self.records += records


def recording(journal: NullJournal) -> Scribe:
    settings = WorldSettings(plan=Plan(steps=1, groups=1, group_size=2))
    return Scribe(Scheduler(settings.plan, SMALL_LIMITS, policies(settings), 0), journal)


@pytest.fixture
def scribe() -> Scribe:
    return recording(NullJournal())


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


def test_a_dropped_group_has_the_lengths_of_as_many_members_as_it_was_launched_with() -> None:
    pages = Pages()
    scribe = recording(pages)
    cause = InfrastructureCause.CAPACITY
    for command in (
        c.StartGroup(step=0, group="0/0", index=0, trajectories=("0/0/0", "0/0/1")),
        c.RefillMember(trajectory="0/0/2", replaces="0/0/0", cause=cause),
        c.RefillMember(trajectory="0/0/3", replaces="0/0/2", cause=cause),
        c.DropGroup(
            group="0/0",
            trajectories=("0/0/0", "0/0/1", "0/0/2", "0/0/3"),
            step=0,
            slot=None,
            reason="zero_variance",
        ),
    ):
        scribe.record(0, e.Tick(), None, [command])
    (row,) = (record for record in pages.records if isinstance(record, GroupRow))
    assert row.lengths == [0, 0]
