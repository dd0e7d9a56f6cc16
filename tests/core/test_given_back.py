"""Turns that a worker gives back: others come first, the worker after a back-off, and it draws no more of them."""

from elastic.core import commands as c
from elastic.core import events as e
from elastic.core.fleet import HOPELESS_DECLINES
from elastic.core.types import NS_PER_S, Capabilities, FinishReason
from elastic.testing.faults.core.settings import SMALL_LIMITS

BASE_S = SMALL_LIMITS.retry_base_ns / NS_PER_S
A, B = "0/0/0", "0/0/1"


def ready(core, *providers: str, capacity: int = 4) -> list[str]:
    """The trainer's device sleeps, and a worker of each provider is ready."""
    core.trainer()
    workers = [core.worker(provider, capacity) for provider in providers]
    core.end_seeding()
    return workers


def asked(core, trajectory: str) -> c.StartTurn:
    core.request(trajectory)
    return core.one(c.StartTurn)


def declines(core, start: c.StartTurn, version: int = 0) -> list[c.StartTurn]:
    """What is sent when the worker gives the turn back at once."""
    core.tokens(start, 0, finish=FinishReason.STALLED, version=version)
    return core.sent(c.StartTurn)


def wait(core, seconds: float) -> list[c.StartTurn]:
    core.wait(seconds, beating=tuple(core.scheduler.fleet.workers))
    return core.sent(c.StartTurn)


def test_a_turn_that_was_given_up_goes_to_somebody_else(core) -> None:
    first, second = ready(core, "spot", "serving")
    start = asked(core, A)
    (again,) = declines(core, start)
    assert {start.worker, again.worker} == {first, second}


def test_the_only_worker_is_tried_again_after_a_back_off_that_grows(core) -> None:
    (worker,) = ready(core, "spot")
    start = asked(core, A)
    for back_off_s in (BASE_S, 2 * BASE_S):
        assert not declines(core, start)
        assert {"retry", "rest", "place"} <= {wait.what for wait in core.scheduler.timers.waits()}
        assert not wait(core, 0.9 * back_off_s)
        (start,) = wait(core, 0.2 * back_off_s)
        assert start.worker == worker


def test_a_turn_that_stalls_goes_to_somebody_else_and_not_back(core) -> None:
    ready(core, "spot", "serving")
    start = asked(core, A)
    (again,) = wait(core, 5.5)
    assert again.worker != start.worker


def test_affinity_does_not_point_at_who_gave_the_turn_up(core) -> None:
    ready(core, "spot", "serving")
    start = asked(core, A)
    (again,) = declines(core, start)
    core.tokens(again, 5, finish=FinishReason.ABORTED)
    assert wait(core, 4 * BASE_S)[0].worker == start.worker
    assert core.scheduler.turns.trajectories[A].affine_worker is None


def test_who_declines_a_turn_gets_none_while_it_rests_and_then_one(make_core) -> None:
    core = make_core(group_size=4)
    (worker,) = ready(core, "spot")
    declines(core, asked(core, A))
    for trajectory in ("0/0/1", "0/0/2", "0/0/3"):
        core.request(trajectory)
        assert not core.sent(c.StartTurn)
    (probe,) = wait(core, 1.1 * BASE_S)
    assert probe.worker == worker
    core.tokens(probe, 1)
    assert len(core.sent(c.StartTurn)) == 2  # Θ of them


def test_what_was_on_its_way_to_who_declines_prolongs_nothing(make_core) -> None:
    core = make_core(group_size=2)
    (worker,) = ready(core, "spot")
    for start in [asked(core, A), asked(core, B)]:
        declines(core, start)
    assert core.scheduler.fleet.workers[worker].declines == 1
    assert len(wait(core, 1.1 * BASE_S)) == 1


def test_who_gives_a_begun_turn_up_goes_on_with_others(make_core) -> None:
    core = make_core(group_size=2)
    (worker,) = ready(core, "spot")
    first, second = asked(core, A), asked(core, B)
    for start in (first, second):
        core.tokens(start, 2)
    core.tokens(first, 0, start=2, finish=FinishReason.STALLED)
    record = core.scheduler.fleet.workers[worker]
    assert (record.resting, record.outstanding) == (False, 1)
    assert 0 < record.reputation < 1
    core.tokens(second, 10, start=2)
    core.tokens(second, 80, start=12)
    assert record.reputation > 0.5
    assert [start.turn for start in wait(core, 1.1 * BASE_S)] == [first.turn]


def test_a_turn_that_others_may_take_does_not_wait_behind_one_that_they_gave_up(core) -> None:
    (worker,) = ready(core, "spot")
    first = asked(core, A)
    core.tokens(first, 1)
    core.tokens(first, 0, start=1, finish=FinishReason.STALLED)
    assert not core.sent(c.StartTurn)
    assert asked(core, B).worker == worker


def test_a_declined_turn_has_no_version(make_core) -> None:
    """Whoever gives it back without a token has not looked at its weights."""
    core = make_core(steps=2)
    core.trainer(version=1)
    lease = core.offer("spot")[-1]
    core.grant(lease.lease)
    core.join(f"{lease.lease}/w", version=1)
    core.beat(f"{lease.lease}/w")
    core.end_seeding()
    start = asked(core, "1/0/0")
    assert not declines(core, start, version=0)
    assert not core.sent(c.AbortTurn)
    assert core.scheduler.fleet.workers[start.worker].resting


def test_a_turn_that_was_called_back_is_no_fault_of_the_worker(core) -> None:
    first, second = ready(core, "spot", "serving")
    start = asked(core, A)
    deadline_ns = round((core.now_s + 1.5) * NS_PER_S)
    core.tell(e.LeaseNotice(lease=start.worker.partition("/")[0], deadline_ns=deadline_ns, reason="preemption"))
    core.tokens(start, 0, finish=FinishReason.ABORTED)
    assert core.one(c.StartTurn).worker in {first, second} - {start.worker}
    assert core.scheduler.fleet.workers[start.worker].reputation == 1


def test_when_the_only_help_declines_for_long_the_trainers_device_takes_over(core) -> None:
    ready(core, "spot")
    start = asked(core, A)
    for _ in range(HOPELESS_DECLINES - 1):
        declines(core, start)
        (start,) = wait(core, 1.1 * SMALL_LIMITS.retry_max_ns / NS_PER_S)
    declines(core, start)
    core.wait(1.0, beating=("trainer", start.worker))
    assert core.sent(c.WakeWorker)


BATCH = 2


def batched(core, worker: str) -> None:
    record = core.scheduler.fleet.workers[worker]
    declared = Capabilities(
        engine="test", replayable_sampling=True, max_context_tokens=4096, device="none", max_batch=BATCH
    )
    core.tell(e.WorkerJoined(worker=worker, epoch=record.epoch + 1, capabilities=declared, weights_version=0))


def reported(core, worker: str, pending: int, executing: int, capacity: int = 50) -> None:
    core.tell(
        e.WorkerReported(
            worker=worker,
            epoch=core.scheduler.fleet.workers[worker].epoch,
            capacity_turns=capacity,
            pending=pending,
            executing=executing,
            progress=round(1000 * core.now_s),
            accounts_ns={},
            decoded_tokens=0,
        )
    )


def sent_at_once(core, number: int) -> int:
    return sum(len(core.request(f"0/0/{n}")) for n in range(number))


def test_theta_counts_turns_that_have_no_place_and_not_those_on_their_way(make_core) -> None:
    core = make_core(group_size=12)
    (worker,) = ready(core, "spot")
    batched(core, worker)
    reported(core, worker, pending=0, executing=0)
    assert sent_at_once(core, 12) == BATCH + SMALL_LIMITS.max_pending


def test_turns_that_the_engine_says_are_waiting_have_no_place(make_core) -> None:
    """Its batch has room, its memory has none; what it begins from its queue makes room for more."""
    core = make_core(group_size=12)
    (worker,) = ready(core, "spot")
    batched(core, worker)
    core.scheduler.fleet.workers[worker].max_batch = 50
    reported(core, worker, pending=0, executing=0)
    starts = [core.request(f"0/0/{n}")[0] for n in range(6)]
    reported(core, worker, pending=4, executing=2)
    assert not core.request("0/0/6")
    for start in starts[:4]:
        core.tokens(start, 1)
        assert not core.sent(c.StartTurn)
    assert [k.turn for k in core.tokens(starts[4], 1) if isinstance(k, c.StartTurn)] == ["0/0/6#0"]
    assert not core.request("0/0/7")
    reported(core, worker, pending=0, executing=6)
    assert [start.turn for start in core.sent(c.StartTurn)] == ["0/0/7#0"]
