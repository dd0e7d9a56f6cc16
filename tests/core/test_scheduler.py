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
    Chunk,
    Chunks,
    EndCause,
    FinishReason,
    GroupState,
    LeaseState,
    WorkerRole,
)
from elastic.testing.faults.core.settings import SMALL_LIMITS

A, B = "0/0/0", "0/0/1"


def running(core, trajectory: str = A, **worker) -> c.StartTurn:
    """A turn on an elastic worker, the trainer's device asleep."""
    core.trainer()
    core.worker(**worker)
    core.end_seeding()
    core.request(trajectory)
    return core.one(c.StartTurn)


def tried_again(core) -> c.StartTurn:
    """The next attempt after a back-off, on the only worker that there is."""
    assert not core.sent(c.StartTurn)
    core.wait(2.1 * SMALL_LIMITS.retry_base_ns / NS_PER_S, beating=tuple(core.scheduler.fleet.workers))
    return core.one(c.StartTurn)


class TestTurns:
    def test_preempted_workers_turn_is_dispatched_again_from_what_was_accepted(self, core) -> None:
        start = running(core)
        other = core.worker("serving")
        core.tokens(start, 5)
        core.lease_ended("spot-1")
        again = core.one(c.StartTurn)
        assert (again.worker, again.turn, again.attempt, again.start) == (other, start.turn, 2, 5)

    @pytest.mark.parametrize(("prefilled", "count"), [(0, 0), (10, 0), (0, 1)])
    def test_prefill_is_paid_again_where_it_had_begun(self, core, prefilled: int, count: int) -> None:
        start = running(core)
        core.worker("serving")
        assert not start.recompute
        core.tokens(start, count, prefilled=prefilled, finish=FinishReason.ABORTED)
        assert core.one(c.StartTurn).recompute is (prefilled + count > 0)

    @pytest.mark.parametrize("version", [-1, 0, 99])
    def test_a_declined_turn_is_not_stale_and_pays_nothing_again(self, make_core, version: int) -> None:
        core = make_core(steps=3)
        core.trainer(version=1)
        for provider in ("spot", "serving"):
            lease = core.offer(provider)[-1].lease
            core.grant(lease)
            core.join(f"{lease}/w", version=1)
            core.beat(f"{lease}/w")
        core.end_seeding()
        core.request("1/0/0")
        start = core.one(c.StartTurn)
        declined = Chunk(start.slot, start.start, 0, version, FinishReason.STALLED)
        core.tell(e.TokensReceived(worker=start.worker, epoch=start.epoch, chunks=Chunks.of([declined])))
        assert not core.sent(c.AbortTurn)
        assert not core.one(c.StartTurn).recompute

    def test_prefill_may_have_been_paid_by_a_worker_that_is_lost(self, core) -> None:
        running(core)
        core.worker("serving")
        core.lease_ended("spot-1")
        assert core.one(c.StartTurn).recompute

    def test_late_frame_of_a_fenced_attempt_is_not_accepted(self, core) -> None:
        start = running(core)
        core.worker("serving")
        core.tokens(start, 5)
        core.lease_ended("spot-1")
        core.tokens(start, 3, start=5)
        assert not core.sent(c.AcceptTokens)

    def test_late_attempt_on_the_same_worker_is_not_accepted(self, core) -> None:
        start = running(core)
        core.wait(6, beating=("trainer", start.worker))
        again = core.sent(c.StartTurn)[-1]
        assert (again.worker, again.attempt) == (start.worker, 2)
        core.tokens(start, 4)
        assert not core.sent(c.AcceptTokens)
        core.tokens(again, 4)
        assert core.one(c.AcceptTokens).chunks == (0,)

    def test_repeated_frame_is_accepted_once(self, core) -> None:
        start = running(core)
        core.tokens(start, 5)
        assert core.sent(c.AcceptTokens)
        core.tokens(start, 5)
        assert not core.out

    def test_only_tokens_that_nobody_has_are_lost(self, core) -> None:
        start = running(core)
        core.tokens(start, 5)
        book = core.scheduler.ledger.books[start.worker]
        book.add(Account.DECODE, 0)
        book.credited_ns[Account.DECODE] = book.accounts_ns[Account.DECODE] = 1000
        book.opened_ns, book.cursor_ns, book.decoded_tokens = 0, sum(book.accounts_ns.values()), 10
        core.tokens(start, 5)
        assert book.accounts_ns.get(Account.LOST, 0) == 0
        core.tokens(start, 2, start=8)
        assert book.accounts_ns[Account.LOST] == 500

    def test_gap_ends_the_attempt_and_keeps_what_was_accepted(self, core) -> None:
        start = running(core)
        core.tokens(start, 5)
        core.tokens(start, 2, start=8)
        assert not core.sent(c.AcceptTokens)
        assert core.one(c.AbortTurn).attempt == 1
        assert tried_again(core).start == 5

    def test_only_some_chunks_of_a_frame_may_be_accepted(self, core) -> None:
        start = running(core)
        core.request(B)
        other = core.one(c.StartTurn)
        stale = c.StartTurn(worker=start.worker, epoch=1, turn=start.turn, attempt=9, slot=9, start=0)
        chunks = Chunks.of(Chunk(s.slot, 0, 2, 0) for s in (stale, other, start))
        core.tell(e.TokensReceived(worker=start.worker, epoch=1, chunks=chunks))
        assert core.one(c.AcceptTokens) == c.AcceptTokens(chunks=(1, 2), turns=(other.turn, start.turn))

    def test_finished_turn_is_handed_over_after_its_tokens(self, core) -> None:
        start = running(core)
        core.tokens(start, 5, finish=FinishReason.STOP)
        assert [type(command) for command in core.out] == [c.AcceptTokens, c.FinishTurn]

    def test_turn_with_all_its_tokens_is_finished_even_if_the_worker_does_not_say_so(self, core) -> None:
        running(core)
        core.request(B, max_new_tokens=8)
        start = core.one(c.StartTurn)
        core.tokens(start, 8, finish=FinishReason.ABORTED)
        assert core.one(c.FinishTurn).turn == start.turn

    def test_no_attempt_is_believed_to_have_computed_more_than_its_context(self, core) -> None:
        start = running(core)
        for _ in range(3):
            core.tokens(start, 0, prefilled=2**31 - 1)
        core.tokens(start, 5, finish=FinishReason.STOP)
        assert core.scheduler.turns.demands[""].prefill_tokens == 10

    def test_engine_that_sends_too_much_fails_the_turn_in_the_end(self, core) -> None:
        core.tokens(running(core), 5, finish=FinishReason.STOP)
        core.request(B, max_new_tokens=8)
        (start,) = core.sent(c.StartTurn)
        for _ in range(SMALL_LIMITS.max_engine_errors - 1):
            core.tokens(start, 9)
            start = tried_again(core)
            assert start.turn == f"{B}#0"
        core.tokens(start, 9)
        assert core.one(c.FailTurn).turn == start.turn

    def test_engine_errors_are_retried_then_named(self, core) -> None:
        start = running(core)
        for attempt in range(1, SMALL_LIMITS.max_engine_errors):
            core.tokens(start, 0, finish=FinishReason.ERROR)
            start = tried_again(core)
            assert start.attempt == attempt + 1
        core.tokens(start, 0, finish=FinishReason.ERROR)
        assert "engine error" in core.one(c.FailTurn).cause
        assert not core.scheduler.turns.live
        assert not core.scheduler.fleet.workers[start.worker].turns

    def test_asking_twice_is_asking_once_even_after_the_end(self, core) -> None:
        start = running(core)
        core.request(A)
        assert not core.out
        core.tokens(start, 1, finish=FinishReason.STOP)
        core.request(A)
        assert not core.out

    def test_next_turn_goes_where_the_prefix_is(self, core) -> None:
        start = running(core)
        other = core.worker("serving", capacity=50)
        core.tokens(start, 1, finish=FinishReason.STOP)
        core.request(A, turn=f"{A}#1")
        assert core.one(c.StartTurn).worker == start.worker != other

    def test_worker_without_credit_gets_nothing(self, core) -> None:
        start = running(core)
        core.beat(start.worker, capacity=1)
        core.request(B)
        assert not core.sent(c.StartTurn)
        core.tokens(start, 1, finish=FinishReason.STOP)
        assert core.one(c.StartTurn).turn == f"{B}#0"

    def test_at_most_theta_turns_wait_on_a_worker(self, make_core) -> None:
        core = make_core(group_size=4)
        running(core, capacity=50)
        sent = [bool(core.request(f"0/0/{n}")) for n in range(1, 4)]
        assert sent == [True, False, False]

    def test_turn_of_an_unknown_or_ended_trajectory_is_answered(self, core) -> None:
        running(core)
        core.request("no/such/one")
        assert core.one(c.CancelTrajectory).trajectory == "no/such/one"
        core.tell(e.TrajectoryFinished(trajectory=B, reward=1.0, tokens=1))
        core.request(B)
        assert core.one(c.CancelTrajectory).trajectory == B

    def test_trajectory_that_ends_takes_its_turn_along(self, core) -> None:
        start = running(core)
        core.tell(e.TrajectoryFailed(trajectory=A, cause="the environment broke"))
        assert core.one(c.AbortTurn).turn == start.turn
        assert not core.scheduler.turns.live


class TestWorkers:
    def test_frozen_worker_is_fenced_and_its_lease_released(self, core) -> None:
        start = running(core)
        out = core.wait(3.1, beating=("trainer",))
        assert c.FenceWorker(worker=start.worker, reason="fenced") in out
        assert [k.lease for k in out if isinstance(k, c.ReleaseLease)] == ["spot-1"]

    def test_fenced_workers_late_words_are_not_believed(self, core) -> None:
        start = running(core)
        core.wait(3.1, beating=("trainer",))
        core.tokens(start, 3)
        assert not core.out
        core.join(start.worker, epoch=2)
        assert core.one(c.FenceWorker).worker == start.worker

    def test_hung_engine_with_a_live_heart_is_fenced(self, core) -> None:
        start = running(core)
        out: list[c.Command] = []
        for _ in range(12):
            out += core.beat(start.worker, progress=7, executing=1)
            out += core.wait(0.5, beating=("trainer",))
        assert c.FenceWorker(worker=start.worker, reason="fenced") in out

    def test_disconnected_workers_turn_goes_on_elsewhere_at_once(self, core) -> None:
        start = running(core)
        other = core.worker("serving")
        core.tokens(start, 2)
        core.tell(e.WorkerDisconnected(worker=start.worker, epoch=1))
        assert (core.one(c.StartTurn).worker, core.one(c.StartTurn).start) == (other, 2)

    def test_resumed_session_counts_under_its_new_epoch_only(self, core) -> None:
        start = running(core)
        core.tell(e.WorkerDisconnected(worker=start.worker, epoch=1))
        core.join(start.worker, epoch=2)
        core.beat(start.worker)
        again = core.one(c.StartTurn)
        assert (again.worker, again.epoch) == (start.worker, 2)
        core.tokens(start, 4)
        assert not core.sent(c.AcceptTokens)
        core.tokens(again, 4)
        assert core.sent(c.AcceptTokens)

    def test_join_that_overtakes_the_disconnection(self, core) -> None:
        start = running(core)
        core.join(start.worker, epoch=2)
        core.beat(start.worker)
        assert core.one(c.StartTurn).epoch == 2
        core.tell(e.WorkerDisconnected(worker=start.worker, epoch=1))
        assert not core.out

    def test_join_that_overtakes_the_grant_of_its_lease(self, core) -> None:
        core.trainer(capacity=0)
        core.offer("spot", available=2)
        for worker in ("spot-1", "spot-2"):
            core.join(worker, version=None)
            assert not core.sent(c.FenceWorker)
        core.grant("spot-1", workers=("spot-1",))
        assert core.one(c.LoadWeights).worker == "spot-1"
        core.tell(e.LeaseRefused(lease="spot-2", reason="its turn did not come"))
        assert core.one(c.FenceWorker).worker == "spot-2"

    def test_ready_worker_that_comes_back_without_weights_loads_them(self, core) -> None:
        start = running(core)
        core.join(start.worker, version=None, epoch=2)
        assert core.one(c.LoadWeights).epoch == 2

    def test_worker_that_does_not_resume_is_given_back(self, core) -> None:
        start = running(core)
        core.tell(e.WorkerDisconnected(worker=start.worker, epoch=1))
        out = core.wait(2.1, beating=("trainer",))
        assert [k.lease for k in out if isinstance(k, c.ReleaseLease)] == ["spot-1"]

    def test_worker_that_came_before_the_trainer_works_once_its_weights_are_known_to_fit(self, core) -> None:
        core.offer("spot")
        core.grant("spot-1")
        core.join("spot-1/w", version=0)
        core.beat("spot-1/w")
        core.trainer(capacity=0)
        core.request(A)
        assert core.one(c.StartTurn).worker == "spot-1/w"

    def test_worker_with_weights_of_another_run_loads_this_ones(self, core) -> None:
        core.offer("spot")
        core.grant("spot-1")
        core.join("spot-1/w", version=9)
        core.beat("spot-1/w")
        orders = core.trainer(capacity=0)
        assert c.LoadWeights(worker="spot-1/w", epoch=1, version=0) in orders
        core.request(A)
        assert not core.sent(c.StartTurn)

    def test_worker_works_once_it_has_loaded_the_weights(self, core) -> None:
        core.trainer(capacity=0)
        core.offer("spot")
        core.grant("spot-1")
        core.join("spot-1/w", version=None)
        core.beat("spot-1/w")
        core.request(A)
        assert not core.sent(c.StartTurn)
        core.tell(e.WeightsApplied(worker="spot-1/w", epoch=1, version=0))
        assert core.one(c.StartTurn).worker == "spot-1/w"

    def test_worker_that_has_not_come_yet_is_told_to_drain_when_it_does(self, core) -> None:
        core.trainer()
        core.offer("spot")
        core.grant("spot-1")
        core.tell(e.LeaseNotice(lease="spot-1", deadline_ns=2 * NS_PER_S, reason="preemption"))
        assert not core.sent(c.DrainWorker)
        core.join("spot-1/w")
        assert core.one(c.DrainWorker).worker == "spot-1/w"

    def test_failed_loads_are_repeated_then_given_up(self, core) -> None:
        core.trainer()
        core.offer("spot")
        core.grant("spot-1")
        core.join("spot-1/w", version=None)
        loads = len(core.sent(c.LoadWeights))
        for _ in range(3):
            core.tell(e.WeightsFailed(worker="spot-1/w", epoch=1, version=0, reason="torn"))
            out = [*core.out, *core.wait(0.6, beating=("trainer", "spot-1/w"))]
            loads += sum(isinstance(command, c.LoadWeights) for command in out)
        assert loads == 3
        assert core.scheduler.leases.leases["spot-1"].state is LeaseState.RELEASING

    def test_loads_that_fail_while_the_trainer_is_away_are_no_fault_of_the_worker(self, core) -> None:
        core.trainer()
        core.offer("spot")
        core.grant("spot-1")
        core.join("spot-1/w", version=None)
        core.tell(e.WorkerDisconnected(worker="trainer", epoch=1, goodbye=False))
        for _ in range(3):
            core.tell(e.WeightsFailed(worker="spot-1/w", epoch=1, version=0, reason="another trainer's"))
            core.wait(0.6, beating=("spot-1/w",))
        assert core.scheduler.fleet.workers["spot-1/w"].loading_version == 0
        assert core.scheduler.leases.leases["spot-1"].state is LeaseState.GRANTED

    def test_an_unknown_worker_is_turned_away(self, core) -> None:
        core.join("unknown")
        assert core.one(c.FenceWorker).worker == "unknown"

    def test_trainer_like_words_of_another_worker_change_nothing(self, core) -> None:
        start = running(core)
        before = core.scheduler.trainer_mode
        core.tell(e.WorkerAwoke(worker=start.worker, epoch=1))
        core.tell(e.WorkerSlept(worker=start.worker, epoch=1))
        assert core.scheduler.trainer_mode is before is TrainerMode.ASLEEP


class TestLeases:
    def test_notice_drains_and_keeps_the_tokens(self, core) -> None:
        start = running(core)
        other = core.worker("serving")
        core.tokens(start, 3)
        deadline_ns = round((core.now_s + 2) * NS_PER_S)
        core.tell(e.LeaseNotice(lease="spot-1", deadline_ns=deadline_ns, reason="preemption"))
        assert [type(command) for command in core.out] == [c.AbortTurn, c.DrainWorker]
        core.tokens(start, 2, start=3, finish=FinishReason.ABORTED)
        assert core.sent(c.AcceptTokens)
        assert (core.one(c.StartTurn).worker, core.one(c.StartTurn).start) == (other, 5)

    def test_handover_that_does_not_come_is_not_awaited_for_long(self, core) -> None:
        start = running(core)
        other = core.worker("serving")
        deadline_ns = round((core.now_s + 9) * NS_PER_S)
        core.tell(e.LeaseNotice(lease="spot-1", deadline_ns=deadline_ns, reason="preemption"))
        out = core.wait(8.5, beating=("trainer", other, start.worker))
        assert [k.worker for k in out if isinstance(k, c.StartTurn)] == [other]

    def test_nothing_is_believed_past_the_deadline_of_a_notice(self, core) -> None:
        start = running(core)
        core.tell(e.LeaseNotice(lease="spot-1", deadline_ns=round((core.now_s + 0.5) * NS_PER_S), reason="preemption"))
        core.wait(0.6, beating=("trainer", start.worker))
        core.tokens(start, 3)
        assert not core.sent(c.AcceptTokens)
        assert core.scheduler.leases.leases["spot-1"].state is LeaseState.RELEASING

    def test_lease_is_emptied_before_it_expires_and_not_believed_after(self, core) -> None:
        start = running(core, expires_s=8.0)
        out = core.wait(6.2 - core.now_s, beating=("trainer", start.worker))
        assert any(isinstance(command, c.DrainWorker) for command in out)
        out = core.wait(3, beating=("trainer", start.worker))
        assert [k.worker for k in out if isinstance(k, c.FenceWorker)] == [start.worker]
        assert any(isinstance(command, c.ReleaseLease) for command in out)

    def test_goodbye_gives_the_lease_back(self, core) -> None:
        start = running(core)
        core.tell(e.WorkerDisconnected(worker=start.worker, epoch=1, goodbye=True))
        released = core.one(c.ReleaseLease)
        assert (released.lease, released.reason) == ("spot-1", EndCause.RELEASED)

    def test_a_leaving_worker_that_is_cut_off_is_lost(self, core) -> None:
        start = running(core)
        deadline_ns = round((core.now_s + 1.5) * NS_PER_S)
        core.tell(e.LeaseNotice(lease="spot-1", deadline_ns=deadline_ns, reason="preemption"))
        core.tell(e.WorkerDisconnected(worker=start.worker, epoch=1, goodbye=False))
        assert core.one(c.ReleaseLease).reason == EndCause.LOST

    def test_release_is_repeated_until_it_is_confirmed(self, core) -> None:
        start = running(core)
        core.tell(e.WorkerDisconnected(worker=start.worker, epoch=1, goodbye=True))
        for _ in range(3):
            out = core.wait(2.1, beating=("trainer",))
            assert [k.lease for k in out if isinstance(k, c.ReleaseLease)] == ["spot-1"]
        core.lease_ended("spot-1", EndCause.RELEASED)
        out = core.wait(5, beating=("trainer",))
        assert not any(k.lease == "spot-1" for k in out if isinstance(k, c.ReleaseLease))

    def test_request_that_is_not_answered_is_withdrawn(self, core) -> None:
        core.trainer()
        core.offer("spot")
        out = core.wait(4.1, beating=("trainer",))
        assert [k.lease for k in out if isinstance(k, c.ReleaseLease)] == ["spot-1"]
        core.grant("spot-1")
        assert core.one(c.ReleaseLease).lease == "spot-1"

    def test_lease_that_comes_after_its_refusal_is_given_back(self, core) -> None:
        core.trainer()
        core.offer("spot")
        core.tell(e.LeaseRefused(lease="spot-1", reason="full"))
        core.grant("spot-1")
        assert core.out == [c.ReleaseLease(lease="spot-1", provider="spot", reason="no longer expected")]

    def test_back_off_doubles_up_to_its_cap_and_starts_afresh_after_success(self, core) -> None:
        core.trainer()
        core.offer("spot")
        waits_s = []
        for number in range(1, 7):
            core.tell(e.LeaseRefused(lease=f"spot-{number}", reason="full"))
            refused_s = core.now_s
            while not any(isinstance(k, c.AcquireLease) for k in core.wait(0.1, beating=("trainer",))):
                pass
            waits_s.append(round(core.now_s - refused_s, 1))
        assert waits_s == [0.5, 1.0, 2.0, 4.0, 4.0, 4.0]
        core.grant("spot-7")
        core.join("spot-7/w")
        assert not core.scheduler.leases.failures

    def test_workers_that_die_before_they_serve_are_not_asked_for_again_at_once(self, core) -> None:
        core.trainer()
        core.offer("spot")
        core.grant("spot-1")
        core.tell(e.LeaseEnded(lease="spot-1", cause=EndCause.LOST, detail="exited with status 1"))
        assert not core.sent(c.AcquireLease)
        assert core.scheduler.leases.failures == {"spot": 1}

    def test_burst_of_refusals_is_one_failure(self, core) -> None:
        core.trainer()
        core.offer("spot", available=5)
        for number in range(1, 6):
            core.tell(e.LeaseRefused(lease=f"spot-{number}", reason="full"))
        assert core.scheduler.leases.failures == {"spot": 1}

    def test_leases_that_never_boot_are_failures_too(self, core) -> None:
        core.trainer()
        core.offer("spot")
        core.grant("spot-1")
        core.wait(5.1, beating=("trainer",))
        assert core.scheduler.leases.failures == {"spot": 1}

    def test_ended_leases_books_are_closed_to_the_nanosecond(self, core) -> None:
        start = running(core)
        core.now_s += 0.123456789
        core.lease_ended("spot-1")
        book = core.scheduler.ledger.books[start.worker]
        assert book.closed_ns is not None
        assert sum(book.accounts_ns.values()) == book.closed_ns - book.opened_ns
        assert book.accounts_ns[Account.UNATTRIBUTED] > 0


class TestStep:
    def test_seeding_does_not_end_while_nobody_else_can_go_on(self, core) -> None:
        core.trainer()
        core.request(A)
        assert not any(isinstance(k, c.SleepWorker) for k in core.wait(10, beating=("trainer",)))
        assert core.scheduler.trainer_mode is TrainerMode.AWAKE
        core.worker()
        assert core.sent(c.SleepWorker)

    def test_seeding_window_is_kept_while_others_are_there(self, core) -> None:
        core.trainer()
        worker = core.worker()
        assert not any(isinstance(k, c.SleepWorker) for k in core.wait(0.9, beating=("trainer", worker)))
        assert any(isinstance(k, c.SleepWorker) for k in core.wait(0.2, beating=("trainer", worker)))

    def test_seeds_are_handed_over(self, core) -> None:
        core.trainer()
        core.request(A)
        seed = core.one(c.StartTurn)
        assert seed.worker == "trainer"
        core.tokens(seed, 4)
        worker = core.worker()
        core.wait(1.1, beating=("trainer", worker))
        core.tokens(seed, 2, start=4, finish=FinishReason.ABORTED)
        assert (core.one(c.StartTurn).worker, core.one(c.StartTurn).start) == (worker, 6)

    def test_trainers_device_wakes_when_all_providers_are_gone(self, core) -> None:
        start = running(core)
        core.tokens(start, 3)
        core.lease_ended("spot-1")
        assert core.scheduler.trainer_mode is TrainerMode.ASLEEP
        out = core.wait(0.3, beating=("trainer",))
        assert any(isinstance(command, c.WakeWorker) for command in out)
        core.tell(e.WorkerAwoke(worker="trainer", epoch=1))
        assert (core.one(c.StartTurn).worker, core.one(c.StartTurn).start) == ("trainer", 3)

    def test_nan_reward_is_never_scored(self, core) -> None:
        core.trainer()
        core.tell(e.TrajectoryFinished(trajectory=A, reward=float("nan"), tokens=1))
        core.tell(e.TrajectoryFinished(trajectory=B, reward=1.0, tokens=1))
        assert "reward was nan" in core.one(c.DropGroup).reason

    def test_failed_trajectory_is_left_out_of_its_group(self, make_core) -> None:
        core = make_core(group_size=3)
        core.trainer()
        core.tell(e.TrajectoryFailed(trajectory="0/0/2", cause="the environment broke"))
        core.tell(e.TrajectoryFinished(trajectory=A, reward=0.0, tokens=1))
        core.tell(e.TrajectoryFinished(trajectory=B, reward=1.0, tokens=1))
        core.tell(e.WorkerSlept(worker="trainer", epoch=1))
        assert core.one(c.TrainGroup).trajectories == (A, B)

    def test_repeated_answers_train_and_publish_once(self, make_core) -> None:
        core = make_core(steps=2)
        _finish_rollouts(core)
        trained = e.GroupTrained(worker="trainer", epoch=1, group=core.one(c.TrainGroup).group)
        core.tell(trained)
        assert core.one(c.UpdateWeights).version == 1
        core.tell(trained)
        assert not core.out
        core.tell(e.WeightsPublished(worker="trainer", epoch=1, version=1))
        assert core.one(c.StartGroup).step == 1
        core.tell(e.WeightsPublished(worker="trainer", epoch=1, version=1))
        assert not core.out

    def test_publication_that_was_not_asked_for_changes_nothing(self, make_core) -> None:
        core = make_core(steps=2)
        _finish_rollouts(core)
        core.tell(e.WeightsPublished(worker="trainer", epoch=1, version=1))
        assert core.scheduler.version == 0
        core.tell(e.GroupTrained(worker="trainer", epoch=1, group="0/0"))
        for version in (0, 2):
            core.tell(e.WeightsPublished(worker="trainer", epoch=1, version=version))
            assert core.scheduler.version == 0
        core.tell(e.WeightsPublished(worker="trainer", epoch=1, version=1))
        assert core.scheduler.version == 1

    def test_a_worker_slower_than_the_steps_ends_what_it_loads_and_goes_on_from_there(self, make_core) -> None:
        core = make_core(steps=3)
        core.trainer()
        slow = core.worker()
        _finish_rollouts(core, trainer=False)
        core.tell(e.GroupTrained(worker="trainer", epoch=1, group="0/0"))
        assert core.one(c.UpdateWeights).pulled == ()
        core.tell(e.WeightsPublished(worker="trainer", epoch=1, version=1))
        assert core.one(c.LoadWeights).version == 1
        core.tell(e.WorkerAwoke(worker="trainer", epoch=1))
        _finish_rollouts(core, trainer=False, step=1)
        core.tell(e.GroupTrained(worker="trainer", epoch=1, group="1/0"))
        assert core.one(c.UpdateWeights).pulled == (1,), "it is to stay on the relay"
        core.tell(e.WeightsPublished(worker="trainer", epoch=1, version=2))
        assert not core.sent(c.LoadWeights)
        core.tell(e.WeightsApplied(worker=slow, epoch=1, version=1))
        assert core.one(c.LoadWeights).version == 2

    def test_workers_load_the_published_version_before_they_work_again(self, make_core) -> None:
        core = make_core(steps=2)
        core.trainer()
        worker = core.worker()
        _finish_rollouts(core, trainer=False)
        core.tell(e.GroupTrained(worker="trainer", epoch=1, group="0/0"))
        core.tell(e.WeightsPublished(worker="trainer", epoch=1, version=1))
        assert core.one(c.LoadWeights).version == 1
        core.request("1/0/0")
        assert not core.sent(c.StartTurn)
        core.tell(e.WeightsApplied(worker=worker, epoch=1, version=1))
        assert core.one(c.StartTurn).worker == worker

    def test_load_that_failed_and_came_good_by_itself_is_not_waited_for(self, core) -> None:
        """An order that came twice is done twice, and only the second time well."""
        core.trainer()
        core.offer("spot")
        core.grant("spot-1")
        core.join("spot-1/w", version=None)
        core.tell(e.WeightsFailed(worker="spot-1/w", epoch=1, version=0, reason="torn"))
        core.tell(e.WeightsApplied(worker="spot-1/w", epoch=1, version=0))
        assert not core.scheduler.timers.waiting("reload", "spot-1/w")

    @pytest.mark.parametrize("version", [0, 2])
    def test_worker_is_not_thought_to_serve_what_came_late_or_is_not_there(self, make_core, version: int) -> None:
        core = make_core(steps=2)
        core.trainer()
        worker = core.worker()
        _finish_rollouts(core, trainer=False)
        core.tell(e.GroupTrained(worker="trainer", epoch=1, group="0/0"))
        core.tell(e.WeightsPublished(worker="trainer", epoch=1, version=1))
        core.tell(e.WeightsApplied(worker=worker, epoch=1, version=1))
        core.tell(e.WeightsApplied(worker=worker, epoch=1, version=version))
        assert core.scheduler.fleet.workers[worker].version == 1

    def test_resumed_run_goes_on_with_the_step_that_the_trainers_version_says(self, make_core) -> None:
        core = make_core(steps=7)
        assert {k.step for k in core.trainer(version=5) if isinstance(k, c.StartGroup)} == {5}
        assert core.scheduler.version == 5

    def test_resumed_run_with_nothing_left_to_do_ends(self, make_core) -> None:
        core = make_core(steps=2)
        core.trainer(version=2)
        assert core.scheduler.phase is Phase.STOPPING
        assert not core.scheduler.failed


class TestEnd:
    def test_stop_gives_everything_back(self, core) -> None:
        start = running(core)
        core.offer("serving")
        core.tell(e.StopRequested(reason="asked to"))
        assert {k.worker for k in core.sent(c.DrainWorker)} == {"trainer", start.worker}
        assert [k.lease for k in core.sent(c.ReleaseLease)] == ["serving-1"]
        assert {k.trajectory for k in core.sent(c.CancelTrajectory)} == {A, B}
        core.tell(e.LeaseRefused(lease="serving-1", reason="withdrawn"))
        for worker, lease in (("trainer", "trainer-1"), (start.worker, "spot-1")):
            core.tell(e.WorkerDisconnected(worker=worker, epoch=1, goodbye=True))
            assert core.one(c.ReleaseLease).lease == lease
            core.lease_ended(lease, EndCause.RELEASED)
        assert core.one(c.EndRun).failed == "asked to"
        assert core.scheduler.next_wakeup_ns() is None

    def test_last_publication_ends_the_run_in_peace(self, core) -> None:
        _finish_rollouts(core)
        core.tell(e.GroupTrained(worker="trainer", epoch=1, group="0/0"))
        core.tell(e.WeightsPublished(worker="trainer", epoch=1, version=1))
        core.tell(e.WorkerDisconnected(worker="trainer", epoch=1, goodbye=True))
        core.lease_ended("trainer-1", EndCause.RELEASED)
        assert core.one(c.EndRun).failed == ""

    def test_nothing_is_ordered_after_the_end(self, core) -> None:
        """Not even when the end is due in the same breath in which a lease is left."""
        start = running(core)
        core.tell(e.StopRequested(reason="asked to"))
        core.now_s += 30
        core.tell(e.WorkerDisconnected(worker=start.worker, epoch=1, goodbye=True))
        assert isinstance(core.out[-1], c.EndRun)

    def test_publication_while_stopping_starts_nothing(self, make_core) -> None:
        core = make_core(steps=2)
        _finish_rollouts(core)
        core.tell(e.GroupTrained(worker="trainer", epoch=1, group="0/0"))
        core.tell(e.StopRequested(reason="asked to"))
        core.tell(e.WeightsPublished(worker="trainer", epoch=1, version=1))
        assert not core.out

    def test_awakening_while_stopping_is_harmless(self, core) -> None:
        running(core)
        core.lease_ended("spot-1")
        core.wait(0.3, beating=("trainer",))
        assert core.scheduler.trainer_mode is TrainerMode.WAKING
        core.tell(e.StopRequested(reason="asked to"))
        core.tell(e.WorkerAwoke(worker="trainer", epoch=1))
        assert core.scheduler.phase is Phase.STOPPING

    def test_lease_that_is_never_confirmed_fails_the_end_by_name(self, core) -> None:
        _finish_rollouts(core)
        core.tell(e.GroupTrained(worker="trainer", epoch=1, group="0/0"))
        core.tell(e.WeightsPublished(worker="trainer", epoch=1, version=1))
        out = core.wait(20)
        (end,) = [command for command in out if isinstance(command, c.EndRun)]
        assert "trainer-1" in end.failed

    def test_trainer_may_be_silent_for_longer_than_others(self, core) -> None:
        core.trainer()
        worker = core.worker()
        assert any(isinstance(k, c.FenceWorker) and k.worker == worker for k in core.wait(3.1))
        core.wait(TRAINER_PATIENCE * 3.0 - 3.2)
        assert not core.scheduler.failed

    @pytest.mark.parametrize(("who", "patience"), [("spot", 1), ("trainer", TRAINER_PATIENCE)])
    def test_an_engine_that_stands_still_is_fenced_the_trainers_later(self, core, who: str, patience: int) -> None:
        core.trainer()
        name = core.worker() if who == "spot" else who
        still_s = 0
        while not any(isinstance(command, c.FenceWorker) and command.worker == name for command in core.out):
            core.beat(name, executing=1, progress=5)
            core.wait(1)
            still_s += 1
            assert still_s <= 4 * patience + 1
        assert still_s >= 4 * patience

    def test_trainer_that_never_comes_fails_the_run_in_bounded_time(self, core) -> None:
        core.wait(20)
        assert "did not come in time" in core.scheduler.failed
        assert core.scheduler.phase is Phase.ENDED

    def test_run_without_capacity_fails_by_name(self, core) -> None:
        core.trainer(capacity=0)
        core.request(A)
        for _ in range(61):
            core.wait(1)
            core.beat("trainer", capacity=0)
        assert "no capacity" in core.scheduler.failed


def test_digest_tells_states_apart(make_core) -> None:
    one, two = make_core(), make_core()
    assert digest(one.scheduler) == digest(two.scheduler)
    one.trainer()
    assert digest(one.scheduler) != digest(two.scheduler)
    two.trainer()
    assert digest(one.scheduler) == digest(two.scheduler)
    one.request(A)
    two.request(B)
    assert digest(one.scheduler) != digest(two.scheduler)


def _finish_rollouts(core, *, trainer: bool = True, step: int = 0) -> None:
    """All of a step's trajectories end, with different rewards, and the device sleeps."""
    if trainer:
        core.trainer()
    for member in range(2):
        core.tell(e.TrajectoryFinished(trajectory=f"{step}/0/{member}", reward=float(member), tokens=1))
    core.tell(e.WorkerSlept(worker="trainer", epoch=1))
    assert core.scheduler.step.count(GroupState.TRAINING) == 1
    assert core.scheduler.trainer().role is WorkerRole.TRAINER
