"""What a summary says of runs whose figures can be worked out by hand."""

import pytest

from elastic.core import events as e
from elastic.core.types import SHARED_ACCOUNTS, Account, EndCause
from elastic.report import compare, tables
from elastic.runtime.journal import event_row
from elastic.runtime.status import ProviderStatus


def test_an_empty_journal_is_an_incomplete_run(summary_of):
    summary = summary_of(lambda run: None)
    assert summary.outcome == "incomplete"
    assert summary.wall_s == 0.0
    assert summary.providers == {}
    assert summary.total.gpu_s == 0.0
    assert summary.total.usd_per_million_tokens is None
    assert summary.success_last is None
    assert summary.unattributed_share is None
    assert summary.timeline.providers == {}


def test_meta_names_the_run(summary_of):
    def fill(run):
        run.meta(run="lake", seed="7", started_at="today", providers="serving,spot", status="finished")
        run.meta(config='{"engine": {"pacing": null}, "run": {"steps": 5}}')

    summary = summary_of(fill)
    assert (summary.run, summary.seed, summary.started_at) == ("lake", "7", "today")
    assert summary.requested_providers == ["serving", "spot"]
    assert summary.outcome == "finished"
    assert summary.paced is False
    assert summary.steps_planned == 5


@pytest.mark.parametrize(
    ("status", "outcome", "cause"),
    [
        ("failed: no capacity: nobody came", "failed", "no capacity: nobody came"),
        ("failed", "interrupted", ""),
        ("running", "incomplete", ""),
    ],
)
def test_why_a_run_failed(summary_of, status, outcome, cause):
    def fill(run):
        run.meta(status=status)
        run.journal.append(event_row(e.StopRequested(reason="interrupted"), 5))

    summary = summary_of(fill)
    assert (summary.outcome, summary.cause) == (outcome, cause)


def test_gpu_time_cost_and_overhead_are_the_books(summary_of):
    def fill(run):
        run.open("a", "spot", 0.0, usd_per_gpu_hour=3.6, gpus=2)
        run.report("a", {Account.DECODE: 6.0, Account.LOADING: 1.0}, 10.0)
        run.end("a", EndCause.RELEASED, 12.0)
        run.sample(20.0, {"spot": ProviderStatus(tokens=4000)})

    summary = summary_of(fill)
    spot = summary.providers["spot"]
    assert spot.gpu_s == pytest.approx(24.0)
    assert {a: s for a, s in spot.accounts_s.items() if s} == {
        "booting": 6.0,
        "loading": 2.0,
        "decode": 12.0,
        "draining": 4.0,
    }
    assert set(spot.accounts_s) == set(Account) - SHARED_ACCOUNTS
    assert spot.usd == pytest.approx(24 * 3.6 / 3600)
    assert spot.overhead_share == pytest.approx(8 / 24)
    assert spot.tokens_per_s == pytest.approx(200.0)
    assert spot.usd_per_million_tokens == pytest.approx(6.0)
    assert summary.ledger_imbalance_ns == 0
    assert summary.unattributed_share == 0.0


def test_machines_that_joined_have_their_tickets_label_and_price(summary_of):
    def fill(run):
        for number, (label, usd) in enumerate([("the lab's 4090", 0.4), ("", 0.0), ("the lab's 4090", 0.4)]):
            run.meta(**{f"joined:joined-{number}": label})
            run.open(f"joined-{number}", "joined", 0.0, usd_per_gpu_hour=usd)
            run.end(f"joined-{number}", EndCause.RELEASED, 3600.0)
        run.open("spot-1", "spot", 0.0, usd_per_gpu_hour=9.0)
        run.end("spot-1", EndCause.RELEASED, 3600.0)
        run.books()

    summary = summary_of(fill)
    (table,) = [table for table in tables.tables(summary) if table.title == "Machines that joined"]
    assert [(row[0], row[1], row[-1]) for row in table.rows] == [
        ("no label", "1", "$0.00"),
        ("the lab's 4090", "2", "$0.800"),
    ]
    assert [one.usd_per_gpu_hour for one in summary.joined] == [0.0, 0.4]
    assert sum(one.usd for one in summary.joined) == pytest.approx(summary.providers["joined"].usd)


def test_a_killed_orchestrator_leaves_time_unattributed(summary_of):
    def fill(run):
        run.open("a", "spot", 0.0, usd_per_gpu_hour=3600.0)
        run.report("a", {Account.DECODE: 4.0}, 5.0)
        run.sample(8.0, {"spot": ProviderStatus(ready=1)})

    summary = summary_of(fill)
    assert summary.outcome == "incomplete"
    assert summary.providers["spot"].accounts_s["unattributed"] == pytest.approx(3.0)
    assert summary.providers["spot"].usd == pytest.approx(8.0)
    assert summary.unattributed_share is None


def test_the_papers_overhead_is_the_start_of_what_replaces_preempted_gpus(summary_of):
    def fill(run):
        for worker, start_s, end_s in (("a", 0.0, 10.0), ("b", 11.0, 20.0), ("c", 25.0, 40.0)):
            run.open(worker, "spot", start_s)
            run.report(worker, {Account.DECODE: 1.0, Account.LOADING: 0.5}, start_s + 3.5)
            run.end(worker, EndCause.PREEMPTED if worker == "a" else EndCause.RELEASED, end_s)
        run.books()

    spot = summary_of(fill).providers["spot"]
    assert spot.preemptions == 1
    assert spot.lease_ends == {"released": 2, "preempted": 1}
    assert spot.preempted_share == pytest.approx(2.5 / 34.0)


def serverless(run, cause=EndCause.RELEASED, lead_s=9.0, ends_s=43.0):
    """Two calls of 45 s, whose workers leave 2 s before that, and the calls that take over, which last."""
    run.meta(config='{"scheduler": {"drain_timeout_s": 2.0}}')
    for worker, at_s in (("a", 0.0), ("b", 0.25), ("c", 43.0 - lead_s), ("d", 43.25 - lead_s)):
        run.grant(worker, "serverless", at_s, life_s=45.0)
        run.report(worker, {Account.LOADING: 0.5, Account.DECODE: 1.0}, at_s + 3.5)
        run.ready(worker, at_s + 2.5)
    for worker, at_s in (("a", ends_s), ("b", ends_s + 0.25)):
        run.end(worker, cause, at_s, clean=True)
    for worker in ("c", "d"):
        run.end(worker, EndCause.RELEASED, 53.0)
    run.books()


@pytest.mark.parametrize(
    ("cause", "lead_s", "ends_s"),
    [
        (EndCause.RELEASED, 9.0, 43.0),  # its worker left in time, its replacement was warm
        (EndCause.RELEASED, 0.0, 43.0),  # nobody came before its end
        (EndCause.EXPIRED, 9.0, 45.0),  # it was killed
        (EndCause.RELEASED, 38.0, 43.0),  # of so short a lifetime, a replacement comes early
    ],
)
def test_a_lease_that_ends_by_time_is_preempted_to_the_papers(summary_of, cause, lead_s, ends_s):
    usage = summary_of(lambda run: serverless(run, cause, lead_s, ends_s)).providers["serverless"]
    assert usage.preempted_share == pytest.approx(2 * 2.5 / usage.gpu_s)
    assert usage.preemptions == 0


def test_a_lease_given_back_before_its_time_is_not(summary_of):
    usage = summary_of(lambda run: serverless(run, ends_s=42.0)).providers["serverless"]
    assert usage.preempted_share == 0.0


def test_a_loss_is_made_good_once_and_by_another_of_its_provider(summary_of):
    def fill(run):
        run.open("a", "spot", 0.0)
        run.end("a", EndCause.PREEMPTED, 0.0)
        for worker, provider in (("b", "serving"), ("c", "spot"), ("d", "spot")):
            run.open(worker, provider, 1.0)
            run.end(worker, EndCause.RELEASED, 3.0)
        run.books()

    summary = summary_of(fill)
    assert summary.providers["serving"].preempted_share == 0.0
    assert summary.providers["spot"].preempted_share == pytest.approx(0.5)


def test_the_bill_has_functions_in_it_everywhere(summary_of):
    def fill(run):
        run.meta(config='{"trainer": {"usd_per_gpu_hour": 7200.0}}')
        run.open("a", "trainer", 0.0, usd_per_gpu_hour=3600.0)
        run.end("a", EndCause.RELEASED, 10.0)
        run.call(1.0, 4.0)
        run.call(2.0, 6.0)
        run.group(0, 0, [1.0, 0.0], trained=True)
        run.sample(10.0, {"trainer": ProviderStatus(tokens=1000)})

    summary = summary_of(fill)
    assert (summary.total.usd, summary.usd, summary.on_demand_usd) == (10.0, 20.0, 30.0)
    assert summary.usd_per_million_tokens == pytest.approx(20_000.0)
    assert summary.usd_per_million_trained_tokens == pytest.approx(20.0 / summary.batches.trained_tokens * 1e6)
    assert compare(summary, summary).other_usd == 20.0
    assert next(figure.value for figure in tables.headline(summary) if figure.name == "cost") == "$20.00"
    found = {table.title: table.rows for table in tables.tables(summary)}
    assert found["Cost of training"][0] == ["cost", "$20.00"]
    assert [(row[0], row[-2]) for row in found["Providers"]] == [
        ("trainer", "$10.00"),
        ("functions", "$10.00"),
        ("all", "$20.00"),
    ]
    assert found["Providers"][-1][-1] == "$20,000.00"


def test_unattributed_counts_orderly_ends_only(summary_of):
    def fill(run):
        for worker, cause in (("a", EndCause.RELEASED), ("b", EndCause.PREEMPTED)):
            run.open(worker, "spot", 0.0)
            run.report(worker, {Account.DECODE: 8.0}, 8.0)
            run.end(worker, cause, 10.0, clean=False)
        run.books()

    summary = summary_of(fill)
    assert summary.unattributed_share == pytest.approx(0.2)
    assert summary.total.accounts_s["unattributed"] == pytest.approx(4.0)


def test_an_end_reported_twice_counts_once(summary_of):
    def fill(run):
        run.open("a", "spot", 0.0)
        run.end("a", EndCause.PREEMPTED, 10.0)
        run.end("a", EndCause.RELEASED, 11.0)
        run.journal.append(event_row(e.LeaseEnded(lease="never billed", cause=EndCause.PREEMPTED), 5))
        run.books()

    assert [(x.lease, x.cause) for x in summary_of(fill).lease_ends] == [("a", "preempted")]


def test_success_counts_rewarded_trajectories_of_those_scored(summary_of):
    def fill(run):
        run.group(0, 0, [1.0, 0.0, 0.0, 0.0], trained=True)
        run.group(1, 0, [1.0, 1.0, 0.0, None], trained=True, cause="reset")
        run.group(2, 0, [1.0, 1.0], trained=False)
        run.step(0, 1.0)
        run.step(1, 2.0)

    summary = summary_of(fill)
    assert [step.success_rate for step in summary.steps] == [0.25, pytest.approx(2 / 3)]
    assert summary.steps[0].standard_error == pytest.approx((0.25 * 0.75 / 4) ** 0.5)
    assert (summary.success_first, summary.success_last) == (0.25, pytest.approx(2 / 3))
    assert summary.trajectories_finished == 9
    assert [step.mean_reward for step in summary.steps] == [0.25, pytest.approx(2 / 3)]
    assert summary.trajectories_failed == {"reset": 1}


def test_shaped_rewards_are_no_success(summary_of):
    def fill(run):
        run.group(0, 0, [-5.0, -3.0, 0.5, 0.0], trained=True)
        run.step(0, 1.0)

    (step,) = summary_of(fill).steps
    assert (step.success_rate, step.mean_reward) == (0.25, -1.875)
    figures = {figure.name: figure.value for figure in tables.headline(summary_of(fill))}
    assert (figures["success"], figures["mean reward"]) == ("25 %", "-1.875")


def test_a_run_that_others_train_is_told_by_its_versions(summary_of):
    def fill(run):
        run.step(0, 1.0)
        run.step(1, 2.0)

    figures = {figure.name: figure.value for figure in tables.headline(summary_of(fill))}
    assert figures["versions"] == "2"
    assert not figures.keys() & {"success", "mean reward"}


def test_what_was_truncated_and_what_was_of_no_use_is_counted(summary_of):
    def fill(run):
        run.group(0, 0, [1.0, 0.0, None], trained=True, cause="reset")
        run.group(0, 1, [1.0, 0.0], trained=True)
        run.trajectory(0, 0, 3, 0.25, truncated=True)
        run.fate("0/1", 0, "unusable: gradient 3: magnitude nan")
        run.step(0, 1.0, groups_trained=2, groups_dropped=0, groups_unusable=1)

    summary = summary_of(fill)
    assert (summary.trajectories_finished, summary.trajectories_truncated) == (5, 1)
    assert (summary.groups_trained, summary.groups_dropped) == (1, {"unusable": 1})
    assert [(step.groups_trained, step.groups_dropped) for step in summary.steps] == [(1, 1)]


def test_groups_are_dropped_for_the_reason_in_the_journal(summary_of):
    def fill(run):
        run.group(0, 0, [1.0, 0.0], trained=True)
        run.group(0, 1, [1.0, 1.0], trained=False)
        run.group(0, 2, [0.0, 0.0], trained=False)
        run.group(0, 3, [1.0, None], trained=False, cause="reset")
        for group, reason in (
            ("0/4", "stale: tokens of version 1, the trainer is at 3"),
            ("0/5", "stale: tokens of version 0, the trainer is at 3"),
            ("0/6", "surplus: the step has its groups"),
        ):
            run.fate(group, 0, reason)
        run.step(0, 1.0)

    summary = summary_of(fill)
    assert summary.groups_trained == 1
    assert summary.groups_dropped == {"zero variance": 2, "stale": 2, "infrastructure": 1, "surplus": 1}


def test_trained_groups_count_in_a_journal_without_groups(summary_of):
    assert (
        summary_of(
            lambda run: run.journal.append(event_row(e.GroupTrained(worker="trainer", epoch=1, group="0/0"), 1))
        ).groups_trained
        == 1
    )


def test_moves_tell_preemptions_from_hand_overs(summary_of):
    def fill(run):
        run.open("a", "spot", 0.0)
        run.end("a", EndCause.PREEMPTED, 10.0)
        run.books()
        run.move("t1", "a", 10.0, 10.25, kept=7)
        run.move("t2", "a", 10.0, 10.75, kept=0)
        run.move("t3", "trainer", 2.0, 2.0, kept=5)

    summary = summary_of(fill)
    assert (summary.moves.turns, summary.moves.tokens_kept) == (3, 12)
    assert (summary.preempted_moves.turns, summary.preempted_moves.tokens_kept) == (2, 7)
    assert summary.preempted_moves.redispatch_s.p50 == pytest.approx(0.5)
    assert summary.preempted_moves.redispatch_s.max == pytest.approx(0.75)


def test_latencies_and_pulls(summary_of):
    def fill(run):
        run.turn("t1", 1.0, 1.1, 2.0)
        run.turn("t2", 1.0, None, 4.0)
        run.pull(1.0, 1000, 0.2, 0.1)
        run.pull(2.0, 500, 9.0, 9.0, error="checksum")

    summary = summary_of(fill)
    assert summary.turns == 2
    assert summary.turn_latency_s.p50 == pytest.approx(2.0)
    assert summary.first_token_s.count == 1
    assert sum(summary.turn_latency.counts) == 2
    assert summary.turn_latency.edges_s[0] <= 1.0
    assert summary.turn_latency.edges_s[-1] >= 3.0
    assert (summary.pulls.count, summary.pulls.failed, summary.pulls.bytes) == (2, 1, 1500)
    assert summary.pulls.pull_s.max == pytest.approx(0.2)


def test_saturation_is_a_share_of_samples(summary_of):
    def fill(run):
        for second, cpu_share in enumerate((0.2, 0.86, 0.85, 0.99)):
            run.sample(second + 1, {}, cpu_share)

    assert summary_of(fill).cpu_saturated_share == 0.5


def test_the_report_says_how_full_the_core_was_and_what_a_kill_would_have_lost(summary_of):
    def fill(run):
        run.sample(1.0, {}, core_share=0.2, flush_interval_s=0.05, tokens_per_s=1000.0)
        run.sample(2.0, {}, core_share=0.9, flush_interval_s=0.25, tokens_per_s=100.0)

    summary = summary_of(fill)
    assert (summary.core_share_max, summary.flush_interval_s_max, summary.kill_loses_tokens_max) == (0.9, 0.25, 50)


def test_a_simulation_says_nothing_of_an_orchestrators_core(summary_of):
    summary = summary_of(lambda run: run.sample(1.0, {}, tokens_per_s=1000.0))
    assert (summary.core_share_max, summary.flush_interval_s_max, summary.kill_loses_tokens_max) == (None, None, None)


def test_throughput_is_that_of_whole_steps(summary_of):
    def fill(run):
        for second in range(1, 11):
            tokens = 100 * min(second, 4) + 100 * max(0, min(second - 5, 4))
            run.sample(second, {"spot": ProviderStatus(tokens=tokens, ready=second % 2, other=1 - second % 2)})
        run.step(0, 5.0)
        run.step(1, 9.0)

    history = summary_of(fill).timeline
    assert history.step_edges_s == [0.0, 5.0, 9.0, 10.0]
    assert history.providers["spot"].tokens_per_s == pytest.approx([80.0, 100.0, 0.0])
    assert history.providers["spot"].up_workers == pytest.approx([1.0] * 10)


def test_a_realistic_run_adds_up(realistic):
    assert list(realistic.providers) == ["trainer", "serving", "spot"]
    assert realistic.total.preemptions > 5
    assert realistic.ledger_imbalance_ns == 0
    assert realistic.success_last > realistic.success_first
    assert realistic.total.usd == pytest.approx(sum(p.usd for p in realistic.providers.values()), abs=1e-8)
    assert realistic.trajectories_finished + sum(realistic.trajectories_failed.values()) == 60 * 4 * 4
    assert realistic.groups_trained + sum(realistic.groups_dropped.values()) == 60 * 4


def test_a_death_is_told_with_what_followed(summary_of):
    def fill(run):
        for lease, provider, opened_s in (("t0", "trainer", 0.0), ("s0", "spot", 0.0), ("t1", "trainer", 14.0)):
            run.open(lease, provider, opened_s)
        run.end("t0", EndCause.LOST, 10.0)
        run.end("s0", EndCause.FENCED, 12.0)
        run.end("t1", EndCause.RELEASED, 20.0)
        run.books()

    summary = summary_of(fill)
    assert {end.lease: end.replaced_s for end in summary.lease_ends} == {"t0": 4.0, "s0": None, "t1": None}
    (told,) = [figure for figure in tables.headline(summary) if figure.name == "deaths"]
    assert (told.value, told.detail) == ("2", "trainer 1, replaced after 4 s; spot 1, not replaced")


def test_what_spare_credit_has_answered_is_told_over_all_processes(summary_of) -> None:
    first = '{"turns": 2, "tokens": 40, "prompt_tokens": 9, "gpu_s": 1.25}'
    second = '{"turns": 1, "tokens": 1000, "prompt_tokens": 9, "gpu_s": 2.0}'
    told = summary_of(lambda run: run.meta(chats=first), lambda run: run.meta(chats=second), lambda run: None)
    assert (told.chats.turns, told.chats.tokens, told.chats.gpu_s) == (3, 1040, 3.25)
    assert any("3 chats: 1,040 tokens in 3.2 GPU-seconds" in words for words in tables.warnings(told))
