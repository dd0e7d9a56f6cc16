"""Turns that a worker gives back: others come first, the worker after a back-off, and it draws no more of them."""

from elastic.core import commands as c
from elastic.core import events as e
from elastic.core.fleet import HOPELESS_DECLINES
from elastic.core.types import NS_PER_S, Capabilities, FinishReason
from elastic.sim.settings import SMALL_LIMITS

BASE_S = SMALL_LIMITS.retry_base_ns / NS_PER_S
A, B = "0/0/0", "0/0/1"


def ready(desk, *providers: str, capacity: int = 4) -> list[str]:
    """The trainer's device sleeps, and a worker of each provider is ready."""
    desk.trainer()
    workers = [desk.worker(provider, capacity) for provider in providers]
    desk.end_seeding()
    return workers


def asked(desk, trajectory: str) -> c.StartTurn:
    desk.request(trajectory)
    return desk.one(c.StartTurn)


def declines(desk, start: c.StartTurn, version: int = 0) -> list[c.StartTurn]:
    """What is sent when the worker gives the turn back at once."""
    desk.tokens(start, 0, finish=FinishReason.STALLED, version=version)
    return desk.sent(c.StartTurn)


def wait(desk, seconds: float) -> list[c.StartTurn]:
    desk.wait(seconds, beating=tuple(desk.scheduler.fleet.workers))
    return desk.sent(c.StartTurn)


def test_a_turn_that_was_given_up_goes_to_somebody_else(desk) -> None:
    first, second = ready(desk, "spot", "serving")
    start = asked(desk, A)
    (again,) = declines(desk, start)
    assert {start.worker, again.worker} == {first, second}


def test_the_only_worker_is_tried_again_after_a_back_off_that_grows(desk) -> None:
    (worker,) = ready(desk, "spot")
    start = asked(desk, A)
    for back_off_s in (BASE_S, 2 * BASE_S):
        assert not declines(desk, start)
        assert {"retry", "rest", "place"} <= {wait.what for wait in desk.scheduler.timers.waits()}
        assert not wait(desk, 0.9 * back_off_s)
        (start,) = wait(desk, 0.2 * back_off_s)
        assert start.worker == worker


def test_a_turn_that_stalls_goes_to_somebody_else_and_not_back(desk) -> None:
    ready(desk, "spot", "serving")
    start = asked(desk, A)
    (again,) = wait(desk, 5.5)
    assert again.worker != start.worker


def test_affinity_does_not_point_at_who_gave_the_turn_up(desk) -> None:
    ready(desk, "spot", "serving")
    start = asked(desk, A)
    (again,) = declines(desk, start)
    desk.tokens(again, 5, finish=FinishReason.ABORTED)
    assert wait(desk, 4 * BASE_S)[0].worker == start.worker
    assert desk.scheduler.turns.conversations[A].affine_worker is None


def test_who_declines_a_turn_gets_none_while_it_rests_and_then_one(make_desk) -> None:
    desk = make_desk(group_size=4)
    (worker,) = ready(desk, "spot")
    declines(desk, asked(desk, A))
    for trajectory in ("0/0/1", "0/0/2", "0/0/3"):
        desk.request(trajectory)
        assert not desk.sent(c.StartTurn)
    (probe,) = wait(desk, 1.1 * BASE_S)
    assert probe.worker == worker
    desk.tokens(probe, 1)
    assert len(desk.sent(c.StartTurn)) == 2  # Θ of them


def test_what_was_on_its_way_to_who_declines_prolongs_nothing(make_desk) -> None:
    desk = make_desk(group_size=2)
    (worker,) = ready(desk, "spot")
    for start in [asked(desk, A), asked(desk, B)]:
        declines(desk, start)
    assert desk.scheduler.fleet.workers[worker].declines == 1
    assert len(wait(desk, 1.1 * BASE_S)) == 1


def test_who_gives_a_begun_turn_up_goes_on_with_others(make_desk) -> None:
    desk = make_desk(group_size=2)
    (worker,) = ready(desk, "spot")
    first, second = asked(desk, A), asked(desk, B)
    for start in (first, second):
        desk.tokens(start, 2)
    desk.tokens(first, 0, start=2, finish=FinishReason.STALLED)
    record = desk.scheduler.fleet.workers[worker]
    assert (record.resting, record.outstanding) == (False, 1)
    assert 0 < record.standing < 1
    desk.tokens(second, 10, start=2)
    desk.tokens(second, 80, start=12)
    assert record.standing > 0.5
    assert [start.turn for start in wait(desk, 1.1 * BASE_S)] == [first.turn]


def test_a_turn_that_others_may_take_does_not_wait_behind_one_that_they_gave_up(desk) -> None:
    (worker,) = ready(desk, "spot")
    first = asked(desk, A)
    desk.tokens(first, 1)
    desk.tokens(first, 0, start=1, finish=FinishReason.STALLED)
    assert not desk.sent(c.StartTurn)
    assert asked(desk, B).worker == worker


def test_a_declined_turn_has_no_version(make_desk) -> None:
    """Whoever gives it back without a token has not looked at its weights."""
    desk = make_desk(steps=2)
    desk.trainer(version=1)
    lease = desk.offer("spot")[-1]
    desk.grant(lease.lease)
    desk.join(f"{lease.lease}/w", version=1)
    desk.beat(f"{lease.lease}/w")
    desk.end_seeding()
    start = asked(desk, "1/0/0")
    assert not declines(desk, start, version=0)
    assert not desk.sent(c.AbortTurn)
    assert desk.scheduler.fleet.workers[start.worker].resting


def test_a_turn_that_was_called_back_is_no_fault_of_the_worker(desk) -> None:
    first, second = ready(desk, "spot", "serving")
    start = asked(desk, A)
    deadline_ns = round((desk.now_s + 1.5) * NS_PER_S)
    desk.tell(e.LeaseNotice(lease=start.worker.partition("/")[0], deadline_ns=deadline_ns, reason="preemption"))
    desk.tokens(start, 0, finish=FinishReason.ABORTED)
    assert desk.one(c.StartTurn).worker in {first, second} - {start.worker}
    assert desk.scheduler.fleet.workers[start.worker].standing == 1


def test_when_the_only_help_declines_for_long_the_trainers_device_takes_over(desk) -> None:
    ready(desk, "spot")
    start = asked(desk, A)
    for _ in range(HOPELESS_DECLINES - 1):
        declines(desk, start)
        (start,) = wait(desk, 1.1 * SMALL_LIMITS.retry_max_ns / NS_PER_S)
    declines(desk, start)
    desk.wait(1.0, beating=("trainer", start.worker))
    assert desk.sent(c.WakeWorker)


BATCH = 2


def batched(desk, worker: str) -> None:
    record = desk.scheduler.fleet.workers[worker]
    declared = Capabilities(
        engine="test", replayable_sampling=True, max_context_tokens=4096, device="none", max_batch=BATCH
    )
    desk.tell(e.WorkerJoined(worker=worker, epoch=record.epoch + 1, capabilities=declared, weights_version=0))


def reported(desk, worker: str, pending: int, executing: int, capacity: int = 50) -> None:
    desk.tell(
        e.WorkerReported(
            worker=worker,
            epoch=desk.scheduler.fleet.workers[worker].epoch,
            capacity_turns=capacity,
            pending=pending,
            executing=executing,
            progress=round(1000 * desk.now_s),
            accounts_ns={},
            decoded_tokens=0,
        )
    )


def sent_at_once(desk, number: int) -> int:
    return sum(len(desk.request(f"0/0/{n}")) for n in range(number))


def test_theta_counts_turns_that_have_no_place_and_not_those_on_their_way(make_desk) -> None:
    desk = make_desk(group_size=12)
    (worker,) = ready(desk, "spot")
    batched(desk, worker)
    reported(desk, worker, pending=0, executing=0)
    assert sent_at_once(desk, 12) == BATCH + SMALL_LIMITS.max_pending


def test_turns_that_the_engine_says_are_waiting_have_no_place(make_desk) -> None:
    """Its batch has room, its memory has none; what it begins from its queue makes room for more."""
    desk = make_desk(group_size=12)
    (worker,) = ready(desk, "spot")
    batched(desk, worker)
    desk.scheduler.fleet.workers[worker].max_batch = 50
    reported(desk, worker, pending=0, executing=0)
    starts = [desk.request(f"0/0/{n}")[0] for n in range(6)]
    reported(desk, worker, pending=4, executing=2)
    assert not desk.request("0/0/6")
    for start in starts[:4]:
        desk.tokens(start, 1)
        assert not desk.sent(c.StartTurn)
    assert [k.turn for k in desk.tokens(starts[4], 1) if isinstance(k, c.StartTurn)] == ["0/0/6#0"]
    assert not desk.request("0/0/7")
    reported(desk, worker, pending=0, executing=6)
    assert [start.turn for start in desk.sent(c.StartTurn)] == ["0/0/7#0"]
