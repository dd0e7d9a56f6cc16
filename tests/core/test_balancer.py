"""Balancing in the core: moves keep accepted tokens, go where they are meant to, and turns then have their peace."""

from random import Random

import msgspec
import pytest

from elastic.core import commands as c
from elastic.core import events as e
from elastic.core.balancer import CONSIDERED, Balancer, WorkerLoad
from elastic.core.profiles import BatchProfile
from elastic.core.turn_manager import TurnManager
from elastic.core.types import Account, Chunk, Chunks, FinishReason, WorkerRole, WorkerState
from tests.core.conftest import part

BATCH = 2
ELASTIC = WorkerRole.ELASTIC
PROVIDERS = ("spot", "serving")


def crowded(make_core):
    """Four turns on one worker that executes two at once; a second worker comes, and the first reports its queue."""
    core = make_core(group_size=4, balancing=True)
    core.trainer(capacity=0)
    first = core.worker("spot", capacity=BATCH + 2)
    starts: list[c.StartTurn] = []
    for member in range(4):
        starts += _request(core, f"0/0/{member}")
        if member < BATCH:
            core.tokens(starts[-1], 3)
    assert [start.worker for start in starts] == 4 * [first]
    second = core.worker("serving", capacity=BATCH + 2)
    for worker in (first, second):
        introduce(core, worker)
    report(core, first, pending=2, executing=BATCH)
    return core, starts, second


def interval(core) -> list[str]:
    """The turns that are called back when the loads are looked at again."""
    core.now_s += 0.3
    return [command.turn for command in core.tell(e.Tick()) if isinstance(command, c.AbortTurn)]


def _request(core, trajectory: str) -> list[c.StartTurn]:
    core.request(trajectory)
    return core.sent(c.StartTurn)


def load_of(core, worker: str) -> WorkerLoad:
    return next(load for load in part(core.scheduler, Balancer).loads() if load.id == worker)


def introduce(core, worker: str) -> None:
    record = core.scheduler.fleet.workers[worker]
    record.introduce(msgspec.structs.replace(record.capabilities, max_batch=BATCH))
    core.scheduler.fleet.reindex(record)


def report(
    core, worker: str, pending: int, executing: int, progress: int | None = None, decode_ns: int = 1, decoded: int = 0
) -> None:
    core.tell(
        e.WorkerReported(
            worker=worker,
            epoch=1,
            capacity_turns=BATCH + 2,
            pending=pending,
            executing=executing,
            progress=round(core.now_s * 1000) + 1 if progress is None else progress,
            accounts_ns={Account.DECODE: decode_ns},
            decoded_tokens=decoded,
        )
    )


def give_back(core, start: c.StartTurn, accepted: int, more: int) -> None:
    chunk = Chunk(start.slot, accepted, more, 0, FinishReason.ABORTED)
    core.tell(e.TokensReceived(worker=start.worker, epoch=1, chunks=Chunks.of([chunk])))


def test_pending_turns_are_called_back_and_go_to_the_worker_with_room(make_core) -> None:
    core, starts, second = crowded(make_core)
    core.now_s += 0.3
    aborted = [k.turn for k in core.tell(e.Tick()) if isinstance(k, c.AbortTurn)]
    assert sorted(aborted) == sorted(start.turn for start in starts[BATCH:])
    for start in starts[BATCH:]:
        give_back(core, start, 0, 0)
        again = core.one(c.StartTurn)
        assert (again.worker, again.attempt, again.start) == (second, 2, 0)


def test_what_the_source_still_has_comes_along(make_core) -> None:
    core, starts, second = crowded(make_core)
    core.now_s += 0.3
    core.tell(e.Tick())
    give_back(core, starts[-1], 0, 5)
    assert (core.one(c.StartTurn).worker, core.one(c.StartTurn).start) == (second, 5)


@pytest.mark.parametrize("brought", [0, 1])
def test_who_has_brought_nothing_is_not_waited_for_and_loses_its_reputation(make_core, brought: int) -> None:
    core = make_core(group_size=8, balancing=True)
    core.trainer(capacity=0)
    idle = core.worker("spot", capacity=BATCH + 2)
    held = [start for member in range(BATCH) for start in _request(core, f"0/0/{member}")]
    second = core.worker("serving", capacity=BATCH + 2)
    for worker in (idle, second):
        introduce(core, worker)
    if brought:
        core.tokens(held[0], brought)
    report(core, idle, pending=BATCH - brought, executing=brought)
    for member in range(BATCH, BATCH + 4):
        (start,) = _request(core, f"0/0/{member}")
        assert start.worker == second
        core.tokens(start, 3, finish=FinishReason.STOP)
    core.now_s += 0.3
    out = core.tell(e.Tick())
    taken = [command.turn for command in out if isinstance(command, c.AbortTurn)]
    again = [(command.turn, command.worker) for command in out if isinstance(command, c.StartTurn)]
    assert taken
    assert again == ([] if brought else [(turn, second) for turn in sorted(taken)])
    assert {command.worker for command in out if isinstance(command, c.BlameWorker)} == (set() if brought else {idle})


@pytest.mark.parametrize("handed_over", [0, 5])
def test_moved_turn_is_left_alone_until_it_has_a_token(make_core, handed_over: int) -> None:
    """Tokens that its former worker still had are none."""
    core, starts, second = crowded(make_core)
    core.now_s += 0.3
    core.tell(e.Tick())
    for start in starts[BATCH:]:
        give_back(core, start, 0, handed_over)
    third = core.worker("serving", capacity=BATCH + 2)
    introduce(core, third)
    report(core, second, pending=2, executing=0)
    core.now_s += 0.3
    assert not [k for k in core.tell(e.Tick()) if isinstance(k, c.AbortTurn)]


def test_receiver_that_is_gone_when_the_turn_comes_is_not_waited_for(make_core) -> None:
    core, starts, second = crowded(make_core)
    core.now_s += 0.3
    core.tell(e.Tick())
    core.lease_ended(second.partition("/")[0])
    give_back(core, starts[-1], 0, 0)
    assert core.one(c.StartTurn).worker == starts[0].worker


def test_profile_is_captured_from_reports(make_core) -> None:
    core = make_core(group_size=4, balancing=True)
    core.trainer(capacity=0)
    worker = core.worker("spot", capacity=4)
    for member in range(2):
        for start in _request(core, f"0/0/{member}"):
            core.tokens(start, 1)
    for beat in range(1, 4):
        report(
            core, worker, pending=0, executing=2, progress=10_000 + 10 * beat, decode_ns=1000 * beat, decoded=20 * beat
        )
    (profile,) = core.scheduler.profiles.values()
    sample = profile.samples[2]
    assert round(sample.tokens_per_ns, 6) == 0.02
    assert sample.context_tokens == 11.0


def test_what_executes_is_what_is_not_pending(make_core) -> None:
    core, starts, second = crowded(make_core)
    full, empty = load_of(core, starts[0].worker), load_of(core, second)
    assert (full.executing, full.pending, full.room) == (BATCH, 2, 0)
    assert (empty.executing, empty.pending, empty.room) == (0, 0, BATCH)
    assert (full.context_tokens(), empty.context_tokens()) == ((2 * 13 + 2 * 10) / 4, 0.0)
    assert full.movable_pending() == [starts[3].turn, starts[2].turn]
    assert full.movable_executing() == [starts[0].turn, starts[1].turn]


def test_of_a_large_fleet_those_of_each_kind_with_the_most_and_the_least_to_do_are_looked_at(make_core) -> None:
    core, rng = make_core(balancing=True), Random(1)
    fleet = core.scheduler.fleet
    for number in range(5 * CONSIDERED):
        worker = fleet.add(f"w{number}", f"l{number}", rng.choice(["spot", "spot", "spot", "serving"]), ELASTIC)
        worker.turns = {f"{number}#{turn}": turn < BATCH for turn in range(rng.randint(0, 4 * BATCH))}
        worker.pending = list(worker.turns.values()).count(False)
        worker.state = WorkerState.READY
        fleet.reindex(worker)
    of_kind = {provider: [w for w in fleet.workers.values() if w.provider == provider] for provider in PROVIDERS}
    ends = [
        worker.id
        for alike in of_kind.values()
        for reverse in (False, True)
        for worker in sorted(alike, key=lambda w: (w.pending, w.outstanding), reverse=reverse)[:CONSIDERED]
    ]
    loads = part(core.scheduler, Balancer).loads()
    assert [load.id for load in loads] == [worker for worker in fleet.workers if worker in ends]
    assert all(load.pending + load.executing == fleet.workers[load.id].outstanding for load in loads)


def test_idle_reports_leave_no_trace_in_the_profile(make_core) -> None:
    core = make_core(group_size=4, balancing=True)
    core.trainer(capacity=0)
    worker = core.worker("spot", capacity=4)
    for start in _request(core, "0/0/0"):
        core.tokens(start, 1)
    for progress, decoded in ((10, 10), (20, 10), (30, 10), (40, 20)):
        report(
            core, worker, pending=0, executing=1, progress=10_000 + progress, decode_ns=100 * decoded, decoded=decoded
        )
    record = core.scheduler.fleet.workers[worker]
    assert (record.decoded_tokens, record.decode_ns) == (20, 2000)
    (profile,) = core.scheduler.profiles.values()
    assert [sample.tokens_per_ns for sample in profile.samples.values()] == [0.01]


def test_engine_that_has_not_begun_yet_is_known_all_the_same(make_core) -> None:
    core = make_core(group_size=4, balancing=True)
    core.trainer(capacity=0)
    worker = core.worker("spot", capacity=4)
    core.beat(worker, progress=0)
    for start in _request(core, "0/0/0"):
        core.tokens(start, 1)
    report(core, worker, pending=0, executing=1, progress=1, decode_ns=11, decoded=1)
    assert [list(profile.samples) for profile in core.scheduler.profiles.values()] == [[1]]


def test_room_is_kept_for_what_is_on_its_way(make_core) -> None:
    """The second worker has room for one; the hand-over of that one takes several intervals."""
    core, starts, second = crowded(make_core)
    core.beat(second, capacity=1)
    assert interval(core) == [starts[3].turn]
    assert interval(core) == []
    give_back(core, starts[3], 0, 0)
    assert core.one(c.StartTurn).worker == second


def test_what_is_called_back_is_not_called_back_again_as_another(make_core) -> None:
    """Two of four turns are too many, and a third worker with room comes while they are under way to the second."""
    core = make_core(group_size=4, balancing=True)
    core.trainer(capacity=0)
    first = core.worker("spot", capacity=4)
    starts: list[c.StartTurn] = []
    for member in range(4):
        starts += _request(core, f"0/0/{member}")
        core.tokens(starts[-1], 3 + member)
    profile = core.scheduler.profiles[core.scheduler.fleet.workers[first].kind] = BatchProfile()
    profile.note(1, 10, 10, 15.0)
    profile.note(2, 20, 10, 15.0)
    profile.note(4, 21, 10, 15.0)
    second = core.worker("spot", capacity=4)
    assert interval(core) == [starts[0].turn, starts[1].turn]
    core.worker("spot", capacity=4)
    assert interval(core) == []
    give_back(core, starts[0], 3, 0)
    assert core.one(c.StartTurn).worker == second


def test_no_more_turns_are_sent_than_a_worker_has_places(make_core) -> None:
    core, starts, second = crowded(make_core)
    record = core.scheduler.fleet.workers[second]
    record.declines = 1
    assert load_of(core, record.id).room == 1
    record.declines = 0
    assert load_of(core, record.id).room == BATCH < record.capacity
    part(core.scheduler, TurnManager).transfer(core.scheduler.turns.live[starts[3].turn], record.id)
    assert load_of(core, record.id).room == BATCH - 1
    assert load_of(core, record.id).executing == 1
    assert load_of(core, starts[0].worker).room == 0
    assert load_of(core, starts[0].worker).pending == 1


def test_turn_is_not_called_back_for_a_worker_whose_weights_are_too_old_for_it(make_core) -> None:
    """Groups that run ahead may only have tokens of the newest version, which the second worker still loads."""
    core = make_core(steps=3, staleness_bound=1, group_size=4, balancing=True)
    core.trainer(capacity=0, version=1)
    first = core.worker("spot", capacity=BATCH + 2)
    core.tell(e.WeightsApplied(worker=first, epoch=1, version=1))
    second = core.worker("serving", capacity=BATCH + 2)
    for worker in (first, second):
        introduce(core, worker)
    floors = core.scheduler.step.groups["1/0"].version_floor, core.scheduler.step.groups["1/1"].version_floor
    assert floors == (0, 1)
    for member in range(4):
        (start,) = _request(core, f"1/1/{member}")
        assert start.worker == first
        if member < BATCH:
            core.tokens(start, 3, version=1)
    report(core, first, pending=2, executing=BATCH)
    assert interval(core) == []
    core.tell(e.WeightsApplied(worker=second, epoch=1, version=1))
    assert len(interval(core)) == BATCH
