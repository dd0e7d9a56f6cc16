"""What workers' engines are said to have come to, from the same events and commands as the journal."""

from contextlib import closing

import pytest

from elastic.core import commands as c
from elastic.core import events as e
from elastic.core.scheduler import Scheduler
from elastic.core.types import NS_PER_S, Chunk, Chunks, EndCause, Plan, WorkerRole, WorkerState
from elastic.protocol import metrics
from elastic.protocol.front_messages import EngineFigures
from elastic.runtime.engine_meters import EngineMeters
from elastic.runtime.journal import SqliteJournal
from elastic.runtime.recorder import JournalRecorder
from elastic.testing.faults.core.incarnation import policies
from elastic.testing.faults.core.settings import SMALL_LIMITS, WorldSettings

TURN = "0/0/0/0"


class Metered:
    """A recorder with meters, of a core that has two workers and the trainer's."""

    def __init__(self, journal: SqliteJournal, groups: int = 1) -> None:
        settings = WorldSettings(plan=Plan(steps=1, groups=groups, group_size=2))
        self.scheduler = Scheduler(settings.plan, SMALL_LIMITS, policies(settings), 0)
        self.recorder = JournalRecorder(self.scheduler, journal)
        self.meters = self.recorder.meters = EngineMeters(self.scheduler)
        fleet = self.scheduler.fleet
        roles = {"spot-1": WorkerRole.ELASTIC, "spot-2": WorkerRole.ELASTIC, "trainer-1": WorkerRole.TRAINER}
        for name, role in roles.items():
            worker = fleet.add(name, name, "spot", role)
            fleet.move(worker, WorkerState.LOADING, 0, "test")
            fleet.move(worker, WorkerState.READY, 0, "test")

    def told(self, at_s: float, event: e.Event, *commands: c.Command) -> None:
        self.recorder.record(round(at_s * NS_PER_S), event, None, commands)

    def of(self, worker: str) -> EngineFigures:
        return next(one for one in self.meters.figures() if one.engine == worker)


@pytest.fixture
def metered(tmp_path):
    journal = SqliteJournal(tmp_path / "journal.sqlite")
    yield Metered(journal)
    journal.close()


def sent(worker: str, attempt: int = 1, start: int = 0) -> c.StartTurn:
    return c.StartTurn(worker=worker, epoch=1, turn=TURN, attempt=attempt, slot=0, start=start, recompute=False)


def came(worker: str, start: int, count: int) -> e.TokensReceived:
    return e.TokensReceived(worker=worker, epoch=1, chunks=Chunks.of([Chunk(0, start, count, 0)]))


ACCEPTED = c.AcceptTokens(chunks=(0,), turns=(TURN,))


def test_a_turn_is_counted_by_the_worker_that_ends_it(metered: Metered) -> None:
    metered.told(0, e.Tick(), c.StartGroup(step=0, group="0/0", index=0, trajectories=("0/0/0", "0/0/1")))
    asked = e.TurnRequested(turn=TURN, trajectory="0/0/0", prompt_tokens=70, max_new_tokens=11)
    metered.told(1, asked)
    metered.told(3, e.Tick(), sent("spot-1"))
    metered.told(4, came("spot-1", 0, 1), ACCEPTED)
    metered.told(5, e.Tick(), sent("spot-2", 2, 1))
    metered.told(9, came("spot-2", 1, 10), ACCEPTED, c.FinishTurn(turn=TURN))
    left, ended = metered.of("spot-1"), metered.of("spot-2")
    assert (left.finished, ended.finished) == ({}, {"length": 1})
    sums = {
        family.name: (buckets.sum, sum(buckets.counts))
        for family, buckets in zip(metrics.HISTOGRAMS, ended.histograms, strict=True)
    }
    assert sums == {
        "vllm:time_to_first_token_seconds": (3, 1),
        "vllm:inter_token_latency_seconds": (5, 10),
        "vllm:e2e_request_latency_seconds": (8, 1),
        "vllm:request_queue_time_seconds": (2, 1),
        "vllm:request_prefill_time_seconds": (1, 1),
        "vllm:request_decode_time_seconds": (5, 1),
        "vllm:request_inference_time_seconds": (6, 1),
        "vllm:request_prompt_tokens": (70, 1),
        "vllm:request_generation_tokens": (11, 1),
        "vllm:request_params_n": (1, 1),
        "vllm:request_params_max_tokens": (11, 1),
    }


def test_a_worker_that_ends_leaves_nothing(metered: Metered) -> None:
    report = e.WorkerReported(
        worker="spot-1",
        epoch=1,
        capacity_turns=4,
        pending=0,
        executing=1,
        progress=9,
        accounts_ns={},
        decoded_tokens=40,
        kv_used_share=0.25,
        prefix_hit_tokens=16,
        prompt_tokens=64,
    )
    metered.told(1, report)
    one = metered.of("spot-1")
    assert (one.generation_tokens, one.prompt_tokens, one.prefix_hit_tokens, one.kv_used_share) == (40, 64, 16, 0.25)
    fleet = metered.scheduler.fleet
    fleet.move(fleet.workers["spot-1"], WorkerState.GONE, 2, "test")
    assert [one.engine for one in metered.meters.figures()] == ["spot-2", "trainer-1"]
    fleet.forget("spot-1")
    metered.told(2, e.LeaseEnded(lease="spot-1", cause=EndCause.PREEMPTED))
    metered.told(3, report)
    assert [one.engine for one in metered.meters.figures()] == ["spot-2", "trainer-1"]


def test_an_importer_is_no_engine(tmp_path) -> None:
    with closing(SqliteJournal(tmp_path / "journal.sqlite")) as journal:
        assert [one.engine for one in Metered(journal, groups=0).meters.figures()] == ["spot-1", "spot-2"]
