"""What the journal's recorder counts for the status."""

from types import SimpleNamespace

import pytest

from elastic.core import commands as c
from elastic.core import events as e
from elastic.core.scheduler import Scheduler
from elastic.core.steps import CUT_OFF
from elastic.core.types import Chunk, Chunks, EndCause, InfrastructureCause, Plan, WorkerId
from elastic.runtime.agents import notes
from elastic.runtime.journal import NOT_SCORED, GroupRow, JournalRecord, NullJournal, TrajectoryRow, TurnRow
from elastic.runtime.recorder import JournalRecorder
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


def recording(journal: NullJournal) -> JournalRecorder:
    settings = WorldSettings(plan=Plan(steps=1, groups=1, group_size=2))
    return JournalRecorder(Scheduler(settings.plan, SMALL_LIMITS, policies(settings), 0), journal)


@pytest.fixture
def recorder() -> JournalRecorder:
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


def test_late_iterations_add_up_over_the_workers_that_come_and_go(recorder: JournalRecorder) -> None:
    assert late_share(recorder.counts.values()) is None
    gone = e.LeaseEnded(lease="spot-1", cause=EndCause.PREEMPTED)
    told = [reported("spot-1.0", 10, 1), reported("spot-2.0", 4, 0), reported("spot-1.0", 30, 5), gone]
    for now_ns, event in enumerate([*told, reported("spot-2.0", 10, 0)]):
        recorder.record(now_ns, event, None, [])
    count = recorder.counts["spot"]
    assert (count.paced_iterations, count.late_iterations) == (40, 5)
    assert late_share(recorder.counts.values()) == 5 / 40


def test_a_dropped_group_has_the_lengths_of_as_many_members_as_it_was_launched_with() -> None:
    pages = Pages()
    recorder = recording(pages)
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
        recorder.record(0, e.Tick(), None, [command])
    (row,) = (record for record in pages.records if isinstance(record, GroupRow))
    assert row.lengths == [0, 0]


def sampled(recorder: JournalRecorder, trajectory: str, turn: str, tokens: int, *commands: c.Command) -> None:
    """A turn of the trajectory gets so many tokens, and then the commands come."""
    recorder.record(0, e.TurnRequested(turn=turn, trajectory=trajectory, prompt_tokens=1, max_new_tokens=64), None, [])
    chunks = Chunks.of([Chunk(slot=0, start=0, count=tokens, version=0)])
    accepted = c.AcceptTokens(chunks=(0,), turns=(turn,))
    recorder.record(0, e.TokensReceived(worker="spot-1.0", epoch=1, chunks=chunks), None, [accepted, *commands])


def test_no_prompt_was_found_in_a_cache_more_often_than_it_was_sent() -> None:
    pages = Pages()
    recorder = recording(pages)
    recorder.record(0, e.Tick(), None, [c.StartGroup(step=0, group="0/0", index=0, trajectories=("0/0/0",))])
    recorder.record(0, e.TurnRequested(turn="t", trajectory="0/0/0", prompt_tokens=10, max_new_tokens=64), None, [])
    start = c.StartTurn(worker="spot-1.0", epoch=1, turn="t", attempt=1, slot=0, start=0, recompute=False)
    recorder.record(0, e.Tick(), None, [start])
    lies = Chunks.of([Chunk(slot=0, start=0, count=0, version=-1, cached=2**31 - 1)] * 2)
    accepted = c.AcceptTokens(chunks=(0, 1), turns=("t", "t"))
    recorder.record(0, e.TokensReceived(worker="spot-1.0", epoch=1, chunks=lies), None, [accepted])
    recorder.record(0, e.Tick(), None, [c.FinishTurn(turn="t")])
    (row,) = (record for record in pages.records if isinstance(record, TurnRow))
    assert row.cached_tokens == 10


def test_what_was_cut_off_has_not_failed_and_its_tokens_are_lost_once() -> None:
    pages = Pages()
    recorder = recording(pages)
    members = ("0/0/0", "0/0/1", "0/0/2")
    start = c.StartGroup(step=0, group="0/0", index=0, trajectories=members, environment="lake")
    recorder.record(0, e.Tick(), None, [start])
    sampled(recorder, "0/0/0", "0/0/0/0", 7)
    again = e.AgentNoted(note=notes.encode_note(notes.BegunAgain("0/0/0", "its env worker has ended", 7)))
    recorder.record(0, again, None, [])
    sampled(recorder, "0/0/0", "0/0/0/1", 5)
    sampled(recorder, "0/0/1", "0/0/1/0", 3, c.FinishTurn(turn="0/0/1/0"))
    waiting = SimpleNamespace(
        started_ns=0,
        turns=1,
        policy_tokens=3,
        token_ids=b"",
        truncated=False,
        sampled=None,
        branches=[],
        task=b"",
        metrics={},
    )
    recorder.record(0, e.RewardRequested(trajectory="0/0/1", tokens=3), waiting, [])
    ends = [c.CancelTrajectory(trajectory=one, cause=CUT_OFF) for one in members[:2]]
    recorder.record(9, e.Tick(), None, ends)
    assert recorder.cut_tokens == {"lake": 8}
    rows = [record for record in pages.records if isinstance(record, TrajectoryRow)]
    assert [(row.cause, row.is_cut_off) for row in rows] == [(NOT_SCORED, False), (CUT_OFF, True)]
    assert rows[-1].ended_ns == 9
    recorder.record(9, e.Tick(), None, [c.TrainGroup(group="0/0", trajectories=members[:1], step=0, slot=0)])
    (group,) = (record for record in pages.records if isinstance(record, GroupRow))
    assert group.lengths == [5], "what a dead env worker had sampled is none of the group's"
