"""Scenarios: what happens, and what the scheduler orders."""

import pytest

from elastic.core import commands as c
from elastic.core import events as e
from elastic.core.digest import digest
from elastic.core.run_state import TRAINER_PATIENCE
from elastic.core.scheduler import Phase, TrainerMode
from elastic.core.types import (
    NS_PER_S,
    Account,
    EndCause,
    FinishReason,
    GroupState,
    LeaseState,
    Progress,
    WorkerRole,
)
from elastic.sim.settings import SMALL_LIMITS

A, B = "0/0/0", "0/0/1"


def running(desk, trajectory: str = A, **worker) -> c.StartTurn:
    """A turn on an elastic worker, the trainer's device asleep."""
    desk.trainer()
    desk.worker(**worker)
    desk.end_seeding()
    desk.request(trajectory)
    return desk.one(c.StartTurn)


def tried_again(desk) -> c.StartTurn:
    """The next attempt after a back-off, on the only worker that there is."""
    assert not desk.sent(c.StartTurn)
    desk.wait(2.1 * SMALL_LIMITS.retry_base_ns / NS_PER_S, beating=tuple(desk.scheduler.fleet.workers))
    return desk.one(c.StartTurn)


class TestTurns:
    def test_preempted_workers_turn_is_dispatched_again_from_what_was_accepted(self, desk) -> None:
        start = running(desk)
        other = desk.worker("serving")
        desk.tokens(start, 5)
        desk.lease_ended("spot-1")
        again = desk.one(c.StartTurn)
        assert (again.worker, again.turn, again.attempt, again.start) == (other, start.turn, 2, 5)

    @pytest.mark.parametrize(("prefilled", "count"), [(0, 0), (10, 0), (0, 1)])
    def test_prefill_is_paid_again_where_it_had_begun(self, desk, prefilled: int, count: int) -> None:
        start = running(desk)
        desk.worker("serving")
        assert not start.recompute
        desk.tokens(start, count, prefilled=prefilled, finish=FinishReason.ABORTED)
        assert desk.one(c.StartTurn).recompute is (prefilled + count > 0)

    @pytest.mark.parametrize("version", [-1, 0, 99])
    def test_a_declined_turn_is_not_stale_and_pays_nothing_again(self, make_desk, version: int) -> None:
        desk = make_desk(steps=3)
        desk.trainer(version=1)
        for provider in ("spot", "serving"):
            lease = desk.offer(provider)[-1].lease
            desk.grant(lease)
            desk.join(f"{lease}/w", version=1)
            desk.beat(f"{lease}/w")
        desk.end_seeding()
        desk.request("1/0/0")
        start = desk.one(c.StartTurn)
        declined = Progress(start.turn, start.attempt, start.start, 0, version, FinishReason.STALLED)
        desk.tell(e.TokensReceived(worker=start.worker, epoch=start.epoch, chunks=(declined,)))
        assert not desk.sent(c.AbortTurn)
        assert not desk.one(c.StartTurn).recompute

    def test_prefill_may_have_been_paid_by_a_worker_that_is_lost(self, desk) -> None:
        running(desk)
        desk.worker("serving")
        desk.lease_ended("spot-1")
        assert desk.one(c.StartTurn).recompute

    def test_late_frame_of_a_fenced_attempt_is_not_accepted(self, desk) -> None:
        start = running(desk)
        desk.worker("serving")
        desk.tokens(start, 5)
        desk.lease_ended("spot-1")
        desk.tokens(start, 3, start=5)
        assert not desk.sent(c.AcceptTokens)

    def test_late_attempt_on_the_same_worker_is_not_accepted(self, desk) -> None:
        start = running(desk)
        desk.wait(6, beating=("trainer", start.worker))
        again = desk.sent(c.StartTurn)[-1]
        assert (again.worker, again.attempt) == (start.worker, 2)
        desk.tokens(start, 4)
        assert not desk.sent(c.AcceptTokens)
        desk.tokens(again, 4)
        assert desk.one(c.AcceptTokens).chunks == (0,)

    def test_repeated_frame_is_accepted_once(self, desk) -> None:
        start = running(desk)
        desk.tokens(start, 5)
        assert desk.sent(c.AcceptTokens)
        desk.tokens(start, 5)
        assert not desk.out

    def test_only_tokens_that_nobody_has_are_lost(self, desk) -> None:
        start = running(desk)
        desk.tokens(start, 5)
        book = desk.scheduler.ledger.books[start.worker]
        book.add(Account.DECODE, 0)
        book.credited_ns[Account.DECODE] = book.accounts_ns[Account.DECODE] = 1000
        book.opened_ns, book.cursor_ns, book.decoded_tokens = 0, sum(book.accounts_ns.values()), 10
        desk.tokens(start, 5)
        assert book.accounts_ns.get(Account.LOST, 0) == 0
        desk.tokens(start, 2, start=8)
        assert book.accounts_ns[Account.LOST] == 500

    def test_gap_ends_the_attempt_and_keeps_what_was_accepted(self, desk) -> None:
        start = running(desk)
        desk.tokens(start, 5)
        desk.tokens(start, 2, start=8)
        assert not desk.sent(c.AcceptTokens)
        assert desk.one(c.AbortTurn).attempt == 1
        assert desk.one(c.StartTurn).start == 5

    def test_only_some_chunks_of_a_frame_may_be_accepted(self, desk) -> None:
        start = running(desk)
        desk.request(B)
        other = desk.one(c.StartTurn)
        stale = c.StartTurn(worker=start.worker, epoch=1, turn=start.turn, attempt=9, start=0)
        chunks = tuple(Progress(s.turn, s.attempt, 0, 2, 0) for s in (stale, other, start))
        desk.tell(e.TokensReceived(worker=start.worker, epoch=1, chunks=chunks))
        assert desk.one(c.AcceptTokens).chunks == (1, 2)

    def test_finished_turn_is_handed_over_after_its_tokens(self, desk) -> None:
        start = running(desk)
        desk.tokens(start, 5, finish=FinishReason.STOP)
        assert [type(command) for command in desk.out] == [c.AcceptTokens, c.FinishTurn]

    def test_turn_with_all_its_tokens_is_finished_even_if_the_worker_does_not_say_so(self, desk) -> None:
        running(desk)
        desk.request(B, max_new_tokens=8)
        start = desk.one(c.StartTurn)
        desk.tokens(start, 8, finish=FinishReason.ABORTED)
        assert desk.one(c.FinishTurn).turn == start.turn

    def test_engine_that_sends_too_much_fails_the_turn_in_the_end(self, desk) -> None:
        running(desk)
        desk.request(B, max_new_tokens=8)
        (start,) = desk.sent(c.StartTurn)
        for _ in range(SMALL_LIMITS.max_engine_errors - 1):
            desk.tokens(start, 9)
            start = tried_again(desk)
            assert start.turn == f"{B}#0"
        desk.tokens(start, 9)
        assert desk.one(c.FailTurn).turn == start.turn

    def test_engine_errors_are_retried_then_named(self, desk) -> None:
        start = running(desk)
        for attempt in range(1, SMALL_LIMITS.max_engine_errors):
            desk.tokens(start, 0, finish=FinishReason.ERROR)
            start = tried_again(desk)
            assert start.attempt == attempt + 1
        desk.tokens(start, 0, finish=FinishReason.ERROR)
        assert "engine error" in desk.one(c.FailTurn).cause
        assert not desk.scheduler.turns.live
        assert not desk.scheduler.fleet.workers[start.worker].turns

    def test_asking_twice_is_asking_once_even_after_the_end(self, desk) -> None:
        start = running(desk)
        desk.request(A)
        assert not desk.out
        desk.tokens(start, 1, finish=FinishReason.STOP)
        desk.request(A)
        assert not desk.out

    def test_next_turn_goes_where_the_prefix_is(self, desk) -> None:
        start = running(desk)
        other = desk.worker("serving", capacity=50)
        desk.tokens(start, 1, finish=FinishReason.STOP)
        desk.request(A, turn=f"{A}#1")
        assert desk.one(c.StartTurn).worker == start.worker != other

    def test_worker_without_credit_gets_nothing(self, desk) -> None:
        start = running(desk)
        desk.beat(start.worker, capacity=1)
        desk.request(B)
        assert not desk.sent(c.StartTurn)
        desk.tokens(start, 1, finish=FinishReason.STOP)
        assert desk.one(c.StartTurn).turn == f"{B}#0"

    def test_at_most_theta_turns_wait_on_a_worker(self, make_desk) -> None:
        desk = make_desk(group_size=4)
        running(desk, capacity=50)
        sent = [bool(desk.request(f"0/0/{n}")) for n in range(1, 4)]
        assert sent == [True, False, False]

    def test_turn_of_an_unknown_or_ended_trajectory_is_answered(self, desk) -> None:
        running(desk)
        desk.request("no/such/one")
        assert desk.one(c.CancelTrajectory).trajectory == "no/such/one"
        desk.tell(e.TrajectoryFinished(trajectory=B, reward=1.0, tokens=1))
        desk.request(B)
        assert desk.one(c.CancelTrajectory).trajectory == B

    def test_trajectory_that_ends_takes_its_turn_along(self, desk) -> None:
        start = running(desk)
        desk.tell(e.TrajectoryFailed(trajectory=A, cause="the environment broke"))
        assert desk.one(c.AbortTurn).turn == start.turn
        assert not desk.scheduler.turns.live


class TestWorkers:
    def test_frozen_worker_is_fenced_and_its_lease_released(self, desk) -> None:
        start = running(desk)
        out = desk.wait(3.1, beating=("trainer",))
        assert c.FenceWorker(worker=start.worker, reason="fenced") in out
        assert [k.lease for k in out if isinstance(k, c.ReleaseLease)] == ["spot-1"]

    def test_fenced_workers_late_words_are_not_believed(self, desk) -> None:
        start = running(desk)
        desk.wait(3.1, beating=("trainer",))
        desk.tokens(start, 3)
        assert not desk.out
        desk.join(start.worker, epoch=2)
        assert desk.one(c.FenceWorker).worker == start.worker

    def test_hung_engine_with_a_live_heart_is_fenced(self, desk) -> None:
        start = running(desk)
        out: list[c.Command] = []
        for _ in range(12):
            out += desk.beat(start.worker, progress=7, executing=1)
            out += desk.wait(0.5, beating=("trainer",))
        assert c.FenceWorker(worker=start.worker, reason="fenced") in out

    def test_disconnected_workers_turn_goes_on_elsewhere_at_once(self, desk) -> None:
        start = running(desk)
        other = desk.worker("serving")
        desk.tokens(start, 2)
        desk.tell(e.WorkerDisconnected(worker=start.worker, epoch=1))
        assert (desk.one(c.StartTurn).worker, desk.one(c.StartTurn).start) == (other, 2)

    def test_resumed_session_counts_under_its_new_epoch_only(self, desk) -> None:
        start = running(desk)
        desk.tell(e.WorkerDisconnected(worker=start.worker, epoch=1))
        desk.join(start.worker, epoch=2)
        desk.beat(start.worker)
        again = desk.one(c.StartTurn)
        assert (again.worker, again.epoch) == (start.worker, 2)
        desk.tokens(start, 4)
        assert not desk.sent(c.AcceptTokens)
        desk.tokens(again, 4)
        assert desk.sent(c.AcceptTokens)

    def test_join_that_overtakes_the_disconnection(self, desk) -> None:
        start = running(desk)
        desk.join(start.worker, epoch=2)
        desk.beat(start.worker)
        assert desk.one(c.StartTurn).epoch == 2
        desk.tell(e.WorkerDisconnected(worker=start.worker, epoch=1))
        assert not desk.out

    def test_ready_worker_that_comes_back_without_weights_loads_them(self, desk) -> None:
        start = running(desk)
        desk.join(start.worker, version=None, epoch=2)
        assert desk.one(c.LoadWeights).epoch == 2

    def test_worker_that_does_not_resume_is_given_back(self, desk) -> None:
        start = running(desk)
        desk.tell(e.WorkerDisconnected(worker=start.worker, epoch=1))
        out = desk.wait(2.1, beating=("trainer",))
        assert [k.lease for k in out if isinstance(k, c.ReleaseLease)] == ["spot-1"]

    def test_worker_that_came_before_the_trainer_works_once_its_weights_are_known_to_fit(self, desk) -> None:
        desk.offer("spot")
        desk.grant("spot-1")
        desk.join("spot-1/w", version=0)
        desk.beat("spot-1/w")
        desk.trainer(capacity=0)
        desk.request(A)
        assert desk.one(c.StartTurn).worker == "spot-1/w"

    def test_worker_with_weights_of_another_run_loads_this_ones(self, desk) -> None:
        desk.offer("spot")
        desk.grant("spot-1")
        desk.join("spot-1/w", version=9)
        desk.beat("spot-1/w")
        orders = desk.trainer(capacity=0)
        assert c.LoadWeights(worker="spot-1/w", epoch=1, version=0) in orders
        desk.request(A)
        assert not desk.sent(c.StartTurn)

    def test_worker_works_once_it_has_loaded_the_weights(self, desk) -> None:
        desk.trainer(capacity=0)
        desk.offer("spot")
        desk.grant("spot-1")
        desk.join("spot-1/w", version=None)
        desk.beat("spot-1/w")
        desk.request(A)
        assert not desk.sent(c.StartTurn)
        desk.tell(e.WeightsApplied(worker="spot-1/w", epoch=1, version=0))
        assert desk.one(c.StartTurn).worker == "spot-1/w"

    def test_worker_that_has_not_come_yet_is_told_to_drain_when_it_does(self, desk) -> None:
        desk.trainer()
        desk.offer("spot")
        desk.grant("spot-1")
        desk.tell(e.LeaseNotice(lease="spot-1", deadline_ns=2 * NS_PER_S, reason="preemption"))
        assert not desk.sent(c.DrainWorker)
        desk.join("spot-1/w")
        assert desk.one(c.DrainWorker).worker == "spot-1/w"

    def test_failed_loads_are_repeated_then_given_up(self, desk) -> None:
        desk.trainer()
        desk.offer("spot")
        desk.grant("spot-1")
        desk.join("spot-1/w", version=None)
        loads = len(desk.sent(c.LoadWeights))
        for _ in range(3):
            desk.tell(e.WeightsFailed(worker="spot-1/w", epoch=1, version=0, reason="torn"))
            out = [*desk.out, *desk.wait(0.6, beating=("trainer", "spot-1/w"))]
            loads += sum(isinstance(command, c.LoadWeights) for command in out)
        assert loads == 3
        assert desk.scheduler.leases.leases["spot-1"].state is LeaseState.RELEASING

    def test_stranger_is_turned_away(self, desk) -> None:
        desk.join("stranger")
        assert desk.one(c.FenceWorker).worker == "stranger"

    def test_trainer_like_words_of_another_worker_change_nothing(self, desk) -> None:
        start = running(desk)
        before = desk.scheduler.trainer_mode
        desk.tell(e.WorkerAwoke(worker=start.worker, epoch=1))
        desk.tell(e.WorkerSlept(worker=start.worker, epoch=1))
        assert desk.scheduler.trainer_mode is before is TrainerMode.ASLEEP


class TestLeases:
    def test_notice_drains_and_keeps_the_tokens(self, desk) -> None:
        start = running(desk)
        other = desk.worker("serving")
        desk.tokens(start, 3)
        deadline_ns = round((desk.now_s + 2) * NS_PER_S)
        desk.tell(e.LeaseNotice(lease="spot-1", deadline_ns=deadline_ns, reason="preemption"))
        assert [type(command) for command in desk.out] == [c.AbortTurn, c.DrainWorker]
        desk.tokens(start, 2, start=3, finish=FinishReason.ABORTED)
        assert desk.sent(c.AcceptTokens)
        assert (desk.one(c.StartTurn).worker, desk.one(c.StartTurn).start) == (other, 5)

    def test_handover_that_does_not_come_is_not_awaited_for_long(self, desk) -> None:
        start = running(desk)
        other = desk.worker("serving")
        deadline_ns = round((desk.now_s + 9) * NS_PER_S)
        desk.tell(e.LeaseNotice(lease="spot-1", deadline_ns=deadline_ns, reason="preemption"))
        out = desk.wait(8.5, beating=("trainer", other, start.worker))
        assert [k.worker for k in out if isinstance(k, c.StartTurn)] == [other]

    def test_nothing_is_believed_past_the_deadline_of_a_notice(self, desk) -> None:
        start = running(desk)
        desk.tell(e.LeaseNotice(lease="spot-1", deadline_ns=round((desk.now_s + 0.5) * NS_PER_S), reason="preemption"))
        desk.wait(0.6, beating=("trainer", start.worker))
        desk.tokens(start, 3)
        assert not desk.sent(c.AcceptTokens)
        assert desk.scheduler.leases.leases["spot-1"].state is LeaseState.RELEASING

    def test_lease_is_emptied_before_it_expires_and_not_believed_after(self, desk) -> None:
        start = running(desk, expires_s=8.0)
        out = desk.wait(6.2 - desk.now_s, beating=("trainer", start.worker))
        assert any(isinstance(command, c.DrainWorker) for command in out)
        out = desk.wait(3, beating=("trainer", start.worker))
        assert [k.worker for k in out if isinstance(k, c.FenceWorker)] == [start.worker]
        assert any(isinstance(command, c.ReleaseLease) for command in out)

    def test_goodbye_gives_the_lease_back(self, desk) -> None:
        start = running(desk)
        desk.tell(e.WorkerDisconnected(worker=start.worker, epoch=1, goodbye=True))
        released = desk.one(c.ReleaseLease)
        assert (released.lease, released.reason) == ("spot-1", EndCause.RELEASED)

    def test_a_leaving_worker_that_is_cut_off_is_lost(self, desk) -> None:
        start = running(desk)
        deadline_ns = round((desk.now_s + 1.5) * NS_PER_S)
        desk.tell(e.LeaseNotice(lease="spot-1", deadline_ns=deadline_ns, reason="preemption"))
        desk.tell(e.WorkerDisconnected(worker=start.worker, epoch=1, goodbye=False))
        assert desk.one(c.ReleaseLease).reason == EndCause.LOST

    def test_release_is_repeated_until_it_is_confirmed(self, desk) -> None:
        start = running(desk)
        desk.tell(e.WorkerDisconnected(worker=start.worker, epoch=1, goodbye=True))
        for _ in range(3):
            out = desk.wait(2.1, beating=("trainer",))
            assert [k.lease for k in out if isinstance(k, c.ReleaseLease)] == ["spot-1"]
        desk.lease_ended("spot-1", EndCause.RELEASED)
        out = desk.wait(5, beating=("trainer",))
        assert not any(k.lease == "spot-1" for k in out if isinstance(k, c.ReleaseLease))

    def test_request_that_is_not_answered_is_withdrawn(self, desk) -> None:
        desk.trainer()
        desk.offer("spot")
        out = desk.wait(4.1, beating=("trainer",))
        assert [k.lease for k in out if isinstance(k, c.ReleaseLease)] == ["spot-1"]
        desk.grant("spot-1")
        assert desk.one(c.ReleaseLease).lease == "spot-1"

    def test_lease_that_comes_after_its_refusal_is_given_back(self, desk) -> None:
        desk.trainer()
        desk.offer("spot")
        desk.tell(e.LeaseRefused(lease="spot-1", reason="full"))
        desk.grant("spot-1")
        assert desk.out == [c.ReleaseLease(lease="spot-1", provider="spot", reason="no longer expected")]

    def test_back_off_doubles_up_to_its_cap_and_starts_afresh_after_success(self, desk) -> None:
        desk.trainer()
        desk.offer("spot")
        waits_s = []
        for number in range(1, 7):
            desk.tell(e.LeaseRefused(lease=f"spot-{number}", reason="full"))
            refused_s = desk.now_s
            while not any(isinstance(k, c.AcquireLease) for k in desk.wait(0.1, beating=("trainer",))):
                pass
            waits_s.append(round(desk.now_s - refused_s, 1))
        assert waits_s == [0.5, 1.0, 2.0, 4.0, 4.0, 4.0]
        desk.grant("spot-7")
        desk.join("spot-7/w")
        assert not desk.scheduler.leases.failures

    def test_workers_that_die_before_they_serve_are_not_asked_for_again_at_once(self, desk) -> None:
        desk.trainer()
        desk.offer("spot")
        desk.grant("spot-1")
        desk.tell(e.LeaseEnded(lease="spot-1", cause=EndCause.LOST, detail="exited with status 1"))
        assert not desk.sent(c.AcquireLease)
        assert desk.scheduler.leases.failures == {"spot": 1}

    def test_burst_of_refusals_is_one_failure(self, desk) -> None:
        desk.trainer()
        desk.offer("spot", available=5)
        for number in range(1, 6):
            desk.tell(e.LeaseRefused(lease=f"spot-{number}", reason="full"))
        assert desk.scheduler.leases.failures == {"spot": 1}

    def test_leases_that_never_boot_are_failures_too(self, desk) -> None:
        desk.trainer()
        desk.offer("spot")
        desk.grant("spot-1")
        desk.wait(5.1, beating=("trainer",))
        assert desk.scheduler.leases.failures == {"spot": 1}

    def test_ended_leases_books_are_closed_to_the_nanosecond(self, desk) -> None:
        start = running(desk)
        desk.now_s += 0.123456789
        desk.lease_ended("spot-1")
        book = desk.scheduler.ledger.books[start.worker]
        assert book.closed_ns is not None
        assert sum(book.accounts_ns.values()) == book.closed_ns - book.opened_ns
        assert book.accounts_ns[Account.UNATTRIBUTED] > 0


class TestStep:
    def test_seeding_does_not_end_while_nobody_else_can_go_on(self, desk) -> None:
        desk.trainer()
        desk.request(A)
        assert not any(isinstance(k, c.SleepWorker) for k in desk.wait(10, beating=("trainer",)))
        assert desk.scheduler.trainer_mode is TrainerMode.AWAKE
        desk.worker()
        assert desk.sent(c.SleepWorker)

    def test_seeding_window_is_kept_while_others_are_there(self, desk) -> None:
        desk.trainer()
        worker = desk.worker()
        assert not any(isinstance(k, c.SleepWorker) for k in desk.wait(0.9, beating=("trainer", worker)))
        assert any(isinstance(k, c.SleepWorker) for k in desk.wait(0.2, beating=("trainer", worker)))

    def test_seeds_are_handed_over(self, desk) -> None:
        desk.trainer()
        desk.request(A)
        seed = desk.one(c.StartTurn)
        assert seed.worker == "trainer"
        desk.tokens(seed, 4)
        worker = desk.worker()
        desk.wait(1.1, beating=("trainer", worker))
        desk.tokens(seed, 2, start=4, finish=FinishReason.ABORTED)
        assert (desk.one(c.StartTurn).worker, desk.one(c.StartTurn).start) == (worker, 6)

    def test_trainers_device_wakes_when_all_providers_are_gone(self, desk) -> None:
        start = running(desk)
        desk.tokens(start, 3)
        desk.lease_ended("spot-1")
        assert desk.scheduler.trainer_mode is TrainerMode.ASLEEP
        out = desk.wait(0.3, beating=("trainer",))
        assert any(isinstance(command, c.WakeWorker) for command in out)
        desk.tell(e.WorkerAwoke(worker="trainer", epoch=1))
        assert (desk.one(c.StartTurn).worker, desk.one(c.StartTurn).start) == ("trainer", 3)

    def test_nan_reward_is_never_scored(self, desk) -> None:
        desk.trainer()
        desk.tell(e.TrajectoryFinished(trajectory=A, reward=float("nan"), tokens=1))
        desk.tell(e.TrajectoryFinished(trajectory=B, reward=1.0, tokens=1))
        assert "reward was nan" in desk.one(c.DropGroup).reason

    def test_failed_trajectory_is_left_out_of_its_group(self, make_desk) -> None:
        desk = make_desk(group_size=3)
        desk.trainer()
        desk.tell(e.TrajectoryFailed(trajectory="0/0/2", cause="the environment broke"))
        desk.tell(e.TrajectoryFinished(trajectory=A, reward=0.0, tokens=1))
        desk.tell(e.TrajectoryFinished(trajectory=B, reward=1.0, tokens=1))
        desk.tell(e.WorkerSlept(worker="trainer", epoch=1))
        assert desk.one(c.TrainGroup).trajectories == (A, B)

    def test_repeated_answers_train_and_publish_once(self, make_desk) -> None:
        desk = make_desk(steps=2)
        _finish_rollouts(desk)
        trained = e.GroupTrained(worker="trainer", epoch=1, group=desk.one(c.TrainGroup).group)
        desk.tell(trained)
        assert desk.one(c.UpdateWeights).version == 1
        desk.tell(trained)
        assert not desk.out
        desk.tell(e.WeightsPublished(worker="trainer", epoch=1, version=1))
        assert desk.one(c.StartGroup).step == 1
        desk.tell(e.WeightsPublished(worker="trainer", epoch=1, version=1))
        assert not desk.out

    def test_publication_that_was_not_asked_for_changes_nothing(self, make_desk) -> None:
        desk = make_desk(steps=2)
        _finish_rollouts(desk)
        desk.tell(e.WeightsPublished(worker="trainer", epoch=1, version=1))
        assert desk.scheduler.version == 0
        desk.tell(e.GroupTrained(worker="trainer", epoch=1, group="0/0"))
        for version in (0, 2):
            desk.tell(e.WeightsPublished(worker="trainer", epoch=1, version=version))
            assert desk.scheduler.version == 0
        desk.tell(e.WeightsPublished(worker="trainer", epoch=1, version=1))
        assert desk.scheduler.version == 1

    def test_a_worker_slower_than_the_steps_ends_what_it_loads_and_goes_on_from_there(self, make_desk) -> None:
        desk = make_desk(steps=3)
        desk.trainer()
        slow = desk.worker()
        _finish_rollouts(desk, trainer=False)
        desk.tell(e.GroupTrained(worker="trainer", epoch=1, group="0/0"))
        assert desk.one(c.UpdateWeights).pulled == ()
        desk.tell(e.WeightsPublished(worker="trainer", epoch=1, version=1))
        assert desk.one(c.LoadWeights).version == 1
        desk.tell(e.WorkerAwoke(worker="trainer", epoch=1))
        _finish_rollouts(desk, trainer=False, step=1)
        desk.tell(e.GroupTrained(worker="trainer", epoch=1, group="1/0"))
        assert desk.one(c.UpdateWeights).pulled == (1,), "it is to stay on the relay"
        desk.tell(e.WeightsPublished(worker="trainer", epoch=1, version=2))
        assert not desk.sent(c.LoadWeights)
        desk.tell(e.WeightsApplied(worker=slow, epoch=1, version=1))
        assert desk.one(c.LoadWeights).version == 2

    def test_workers_load_the_published_version_before_they_work_again(self, make_desk) -> None:
        desk = make_desk(steps=2)
        desk.trainer()
        worker = desk.worker()
        _finish_rollouts(desk, trainer=False)
        desk.tell(e.GroupTrained(worker="trainer", epoch=1, group="0/0"))
        desk.tell(e.WeightsPublished(worker="trainer", epoch=1, version=1))
        assert desk.one(c.LoadWeights).version == 1
        desk.request("1/0/0")
        assert not desk.sent(c.StartTurn)
        desk.tell(e.WeightsApplied(worker=worker, epoch=1, version=1))
        assert desk.one(c.StartTurn).worker == worker

    def test_load_that_failed_and_came_good_by_itself_is_not_waited_for(self, desk) -> None:
        """An order that came twice is done twice, and only the second time well."""
        desk.trainer()
        desk.offer("spot")
        desk.grant("spot-1")
        desk.join("spot-1/w", version=None)
        desk.tell(e.WeightsFailed(worker="spot-1/w", epoch=1, version=0, reason="torn"))
        desk.tell(e.WeightsApplied(worker="spot-1/w", epoch=1, version=0))
        assert not desk.scheduler.timers.waiting("reload", "spot-1/w")

    @pytest.mark.parametrize("version", [0, 2])
    def test_worker_is_not_thought_to_serve_what_came_late_or_is_not_there(self, make_desk, version: int) -> None:
        desk = make_desk(steps=2)
        desk.trainer()
        worker = desk.worker()
        _finish_rollouts(desk, trainer=False)
        desk.tell(e.GroupTrained(worker="trainer", epoch=1, group="0/0"))
        desk.tell(e.WeightsPublished(worker="trainer", epoch=1, version=1))
        desk.tell(e.WeightsApplied(worker=worker, epoch=1, version=1))
        desk.tell(e.WeightsApplied(worker=worker, epoch=1, version=version))
        assert desk.scheduler.fleet.workers[worker].version == 1

    def test_resumed_run_goes_on_with_the_step_that_the_trainers_version_says(self, make_desk) -> None:
        desk = make_desk(steps=7)
        assert {k.step for k in desk.trainer(version=5) if isinstance(k, c.StartGroup)} == {5}
        assert desk.scheduler.version == 5

    def test_resumed_run_with_nothing_left_to_do_ends(self, make_desk) -> None:
        desk = make_desk(steps=2)
        desk.trainer(version=2)
        assert desk.scheduler.phase is Phase.STOPPING
        assert not desk.scheduler.failed


class TestEnd:
    def test_stop_gives_everything_back(self, desk) -> None:
        start = running(desk)
        desk.offer("serving")
        desk.tell(e.StopRequested(reason="asked to"))
        assert {k.worker for k in desk.sent(c.DrainWorker)} == {"trainer", start.worker}
        assert [k.lease for k in desk.sent(c.ReleaseLease)] == ["serving-1"]
        assert {k.trajectory for k in desk.sent(c.CancelTrajectory)} == {A, B}
        desk.tell(e.LeaseRefused(lease="serving-1", reason="withdrawn"))
        for worker, lease in (("trainer", "trainer-1"), (start.worker, "spot-1")):
            desk.tell(e.WorkerDisconnected(worker=worker, epoch=1, goodbye=True))
            assert desk.one(c.ReleaseLease).lease == lease
            desk.lease_ended(lease, EndCause.RELEASED)
        assert desk.one(c.EndRun).failed == "asked to"
        assert desk.scheduler.next_wakeup_ns() is None

    def test_last_publication_ends_the_run_in_peace(self, desk) -> None:
        _finish_rollouts(desk)
        desk.tell(e.GroupTrained(worker="trainer", epoch=1, group="0/0"))
        desk.tell(e.WeightsPublished(worker="trainer", epoch=1, version=1))
        desk.tell(e.WorkerDisconnected(worker="trainer", epoch=1, goodbye=True))
        desk.lease_ended("trainer-1", EndCause.RELEASED)
        assert desk.one(c.EndRun).failed == ""

    def test_nothing_is_ordered_after_the_end(self, desk) -> None:
        """Not even when the end is due in the same breath in which a lease is left."""
        start = running(desk)
        desk.tell(e.StopRequested(reason="asked to"))
        desk.now_s += 30
        desk.tell(e.WorkerDisconnected(worker=start.worker, epoch=1, goodbye=True))
        assert isinstance(desk.out[-1], c.EndRun)

    def test_publication_while_stopping_starts_nothing(self, make_desk) -> None:
        desk = make_desk(steps=2)
        _finish_rollouts(desk)
        desk.tell(e.GroupTrained(worker="trainer", epoch=1, group="0/0"))
        desk.tell(e.StopRequested(reason="asked to"))
        desk.tell(e.WeightsPublished(worker="trainer", epoch=1, version=1))
        assert not desk.out

    def test_awakening_while_stopping_is_harmless(self, desk) -> None:
        running(desk)
        desk.lease_ended("spot-1")
        desk.wait(0.3, beating=("trainer",))
        assert desk.scheduler.trainer_mode is TrainerMode.WAKING
        desk.tell(e.StopRequested(reason="asked to"))
        desk.tell(e.WorkerAwoke(worker="trainer", epoch=1))
        assert desk.scheduler.phase is Phase.STOPPING

    def test_lease_that_is_never_confirmed_fails_the_end_by_name(self, desk) -> None:
        _finish_rollouts(desk)
        desk.tell(e.GroupTrained(worker="trainer", epoch=1, group="0/0"))
        desk.tell(e.WeightsPublished(worker="trainer", epoch=1, version=1))
        out = desk.wait(20)
        (end,) = [command for command in out if isinstance(command, c.EndRun)]
        assert "trainer-1" in end.failed

    def test_trainer_may_be_silent_for_longer_than_others(self, desk) -> None:
        desk.trainer()
        worker = desk.worker()
        assert any(isinstance(k, c.FenceWorker) and k.worker == worker for k in desk.wait(3.1))
        desk.wait(TRAINER_PATIENCE * 3.0 - 3.2)
        assert not desk.scheduler.failed

    @pytest.mark.parametrize(("who", "patience"), [("spot", 1), ("trainer", TRAINER_PATIENCE)])
    def test_an_engine_that_stands_still_is_fenced_the_trainers_later(self, desk, who: str, patience: int) -> None:
        desk.trainer()
        name = desk.worker() if who == "spot" else who
        still_s = 0
        while not any(isinstance(command, c.FenceWorker) and command.worker == name for command in desk.out):
            desk.beat(name, executing=1, progress=5)
            desk.wait(1)
            still_s += 1
            assert still_s <= 4 * patience + 1
        assert still_s >= 4 * patience

    def test_trainer_that_never_comes_fails_the_run_in_bounded_time(self, desk) -> None:
        desk.wait(20)
        assert "did not come in time" in desk.scheduler.failed
        assert desk.scheduler.phase is Phase.ENDED

    def test_run_without_capacity_fails_by_name(self, desk) -> None:
        desk.trainer(capacity=0)
        desk.request(A)
        for _ in range(61):
            desk.wait(1)
            desk.beat("trainer", capacity=0)
        assert "no capacity" in desk.scheduler.failed


def test_digest_tells_states_apart(make_desk) -> None:
    one, two = make_desk(), make_desk()
    assert digest(one.scheduler) == digest(two.scheduler)
    one.trainer()
    assert digest(one.scheduler) != digest(two.scheduler)
    two.trainer()
    assert digest(one.scheduler) == digest(two.scheduler)
    one.request(A)
    two.request(B)
    assert digest(one.scheduler) != digest(two.scheduler)


def _finish_rollouts(desk, *, trainer: bool = True, step: int = 0) -> None:
    """All of a step's trajectories end, with different rewards, and the device sleeps."""
    if trainer:
        desk.trainer()
    for member in range(2):
        desk.tell(e.TrajectoryFinished(trajectory=f"{step}/0/{member}", reward=float(member), tokens=1))
    desk.tell(e.WorkerSlept(worker="trainer", epoch=1))
    assert desk.scheduler.step.count(GroupState.TRAINING) == 1
    assert desk.scheduler.trainer().role is WorkerRole.TRAINER
