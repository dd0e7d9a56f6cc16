"""Lengths, ages and segments as the journal has them, and runs beside each other."""

import pytest

from elastic.core import events as e
from elastic.core.types import Account, Capabilities, EndCause
from elastic.report import as_json, as_markdown, compare
from elastic.runtime.journal import event_row
from elastic.runtime.status import ProviderStatus

CAPABILITIES = Capabilities(engine="torch", replayable_sampling=True, max_context_tokens=64, device="cpu")


def group(run, name: str, dropped: str, lengths: list[int], ages: dict[int, int]) -> None:
    run.fate(name, 0, dropped, lengths, ages)


def test_lengths_of_the_dropped_stand_beside_those_of_the_trained(summary_of):
    def fill(run):
        group(run, "0/0", "", [10, 20], {0: 30})
        group(run, "0/1", "stale: tokens of version 1, the trainer is at 3", [40, 60], {2: 100})
        group(run, "0/2", "stale: tokens of version 0, the trainer is at 3", [50], {3: 50})
        group(run, "0/3", "", [30], {0: 10, 1: 20})

    batches = summary_of(fill).batches
    assert [(f.fate, f.groups, f.trajectories, f.tokens_mean) for f in batches.fates] == [
        ("trained", 2, 3, 20.0),
        ("stale", 2, 3, 50.0),
    ]
    assert batches.trained_tokens == 60
    assert batches.trained_tokens_by_age == {0: 40, 1: 20}


def test_a_lane_runs_from_grant_to_end(summary_of):
    def fill(run):
        run.open("a", "spot", 1.0)
        joined = e.WorkerJoined(worker="a", epoch=1, capabilities=CAPABILITIES, weights_version=None)
        run.journal.append(event_row(joined, 2 * 10**9))
        run.journal.append(event_row(e.WeightsApplied(worker="a", epoch=1, version=0), 3 * 10**9))
        run.journal.append(event_row(e.LeaseNotice(lease="a", deadline_ns=9, reason="preemption"), 7 * 10**9))
        run.end("a", EndCause.PREEMPTED, 8.0)
        run.books()

    (lane,) = summary_of(fill).lanes
    assert (lane.opened_s, lane.ready_s, lane.notice_s, lane.closed_s) == (1.0, 3.0, 7.0, 8.0)
    assert lane.cause == EndCause.PREEMPTED


def run_of(tokens: int, usd_per_gpu_hour: float):
    def fill(run):
        run.meta(seed="7", run=f"run-{tokens}", config='{"trainer": {"usd_per_gpu_hour": 36.0}}')
        run.open("a", "trainer", 0.0, usd_per_gpu_hour=usd_per_gpu_hour)
        run.report("a", {Account.DECODE: 10.0}, 10.0)
        run.end("a", EndCause.RELEASED, 10.0)
        group(run, "0/0", "", [tokens], {0: tokens})
        run.sample(10.0, {"trainer": ProviderStatus(tokens=tokens)})

    return fill


def test_a_run_beside_another(summary_of):
    one, other = summary_of(run_of(1000, 3.6)), summary_of(run_of(500, 7.2))
    assert one.usd_per_million_trained_tokens == pytest.approx(10.0)
    assert one.on_demand_usd == pytest.approx(0.1)
    comparison = compare(one, other)
    assert comparison.same_seed
    assert comparison.throughput_ratio == pytest.approx(2.0)
    assert comparison.cost_ratio == pytest.approx(0.25)
    assert comparison.step_time_ratio is None
    assert as_json(one, comparison)["comparison"]["other"] == "run-500"
    assert "Beside run-500" in as_markdown(one, comparison)
    assert "comparison" not in as_json(one)
