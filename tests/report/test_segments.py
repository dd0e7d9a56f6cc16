"""A run that was resumed has several journals, and one report."""

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from elastic.core import events as e
from elastic.core.types import Account, EndCause
from elastic.report import as_markdown, summarise, tables
from elastic.report.html import as_html
from elastic.runtime.journal import JournalError, event_row
from elastic.runtime.status import ProviderStatus
from tests.seeds import examples


def killed(run):
    """Ten seconds, with a lease of a dollar a second that nobody ended; its second step is not in a checkpoint."""
    run.meta(run="lake", status="running", started_at="2026-11-20", providers="spot", seed="7")
    run.open("spot-1", "spot", 0.0, usd_per_gpu_hour=3600.0)
    run.ready("spot-1", 1.0)
    run.report("spot-1", {Account.DECODE: 4.0}, 8.0)
    run.group(0, 0, [1.0, 0.0], trained=True)
    run.step(0, 4.0, groups_trained=1)
    run.group(1, 0, [1.0, 1.0], trained=False)
    run.group(1, 1, [1.0, 0.0], trained=True)
    run.step(1, 8.0)
    run.turn("1/1/0/0", 6.0, 6.5, 7.0)
    run.call(3.0, 2.0)
    run.pull(2.0, 1000, 0.1, 0.1, worker="spot-1")
    run.journal.append(event_row(e.WeightsPublished(worker="trainer", epoch=1, version=1), 4 * 10**9))
    run.sample(10.0, {"spot": ProviderStatus(tokens=1000, usd=10.0, ready=1)})


def resumed(run):
    """Five seconds on another provider too, from the second step on."""
    run.meta(run="lake", status="finished", started_at="2026-11-21", providers="serving,spot", seed="7")
    run.open("spot-1", "spot", 0.0, usd_per_gpu_hour=3600.0)
    run.ready("spot-1", 1.0)
    run.end("spot-1", EndCause.PREEMPTED, 4.0)
    run.open("serving-1", "serving", 1.0)
    run.end("serving-1", EndCause.RELEASED, 5.0)
    run.group(1, 0, [1.0, 0.0], trained=True)
    run.step(1, 4.5)
    run.turn("1/0/0/0", 1.0, 1.5, 2.0)
    run.move("1/0/0/0", "spot-1", 4.0, 4.25, kept=3)
    run.call(3.0, 1.0)
    run.journal.append(event_row(e.WeightsPublished(worker="trainer", epoch=1, version=1), 1 * 10**9))
    run.pull(1.5, 1000, 0.1, 0.1, worker="serving-1")
    run.pull(2.0, 500, 0.1, 0.1, worker="serving-1")
    run.sample(5.0, {"spot": ProviderStatus(tokens=300, usd=4.0), "serving": ProviderStatus(tokens=100)})


def test_segments_add_up(summary_of):
    summary = summary_of(killed, resumed)
    assert (summary.segments, summary.outcome, summary.started_at) == (2, "finished", "2026-11-20")
    assert summary.requested_providers == ["spot", "serving"]
    assert summary.wall_s == 15.0
    spot = summary.providers["spot"]
    assert (spot.leases, spot.gpu_s, spot.usd, spot.tokens) == (2, 14.0, 14.0, 1300)
    assert spot.accounts_s["unattributed"] == pytest.approx(2.0)
    assert (summary.total.tokens, summary.usd) == (1400, 17.0)
    assert summary.total.tokens_per_s == pytest.approx(1400 / 15)
    assert (summary.turns, summary.moves.turns, summary.preempted_moves.turns) == (2, 1, 1)
    assert summary.ledger_imbalance_ns == 0
    assert "2 segments" in tables.subtitle(summary)


def test_one_segment_follows_the_other(summary_of):
    summary = summary_of(killed, resumed)
    assert [(lane.worker, lane.segment, lane.opened_s, lane.ready_s, lane.closed_s) for lane in summary.lanes] == [
        ("segment 1: spot-1", 1, 0.0, 1.0, 10.0),
        ("spot-1", 2, 10.0, 11.0, 14.0),
        ("serving-1", 2, 11.0, None, 15.0),
    ]
    assert [(end.lease, end.at_s) for end in summary.lease_ends] == [("spot-1", 14.0), ("serving-1", 15.0)]
    assert [step.at_s for step in summary.steps] == [4.0, 14.5]
    history = summary.timeline
    assert history.step_edges_s == [0.0, 4.0, 14.5, 15.0]
    assert history.providers["spot"].usd[-1] == 14.0
    tokens = [
        rate * (end - start)
        for rate, start, end in zip(
            history.providers["spot"].tokens_per_s, history.step_edges_s, history.step_edges_s[1:], strict=False
        )
    ]
    assert sum(tokens) == pytest.approx(1300)
    assert min(tokens) >= 0.0


def test_what_is_done_again_counts_once(summary_of):
    summary = summary_of(killed, resumed)
    assert [(step.step, step.trajectories) for step in summary.steps] == [(0, 2), (1, 2)]
    assert (summary.groups_trained, summary.groups_dropped) == (2, {})
    assert summary.trajectories_finished == 4
    assert summary.batches.trained_tokens == 100
    assert summary.usd_per_million_trained_tokens == pytest.approx(170_000.0)


def test_weights_are_as_current_as_in_their_own_segment(summary_of):
    weights = summary_of(killed, resumed).weights
    assert [version.version for version in weights.versions] == [1, 2]
    assert [(pull.worker, pull.first, pull.current_s) for pull in weights.pulls] == [
        ("segment 1: spot-1", True, None),
        ("serving-1", True, None),
        ("serving-1", False, pytest.approx(1.0)),
    ]


def test_a_loss_is_not_made_good_by_the_next_segment(summary_of):
    def lost(run):
        run.open("spot-1", "spot", 0.0)
        run.end("spot-1", EndCause.PREEMPTED, 4.0)
        run.books()

    assert summary_of(lost, resumed).providers["spot"].preempted_share == 0.0


def test_every_format_has_all_segments(summary_of):
    summary = summary_of(killed, killed, resumed)
    assert summary.segments == 3
    for text in (as_html(summary), as_markdown(summary)):
        assert "3 segments" in text
        assert "$29.00" in text


def test_an_earlier_segment_that_cannot_be_read_is_named(run_of):
    run = run_of(killed, killed, resumed)
    (run.path / "journal.2.sqlite").write_bytes(b"no database" * 1000)
    with pytest.raises(JournalError, match=r"journal\.2\.sqlite"):
        summarise(run)


@settings(max_examples=examples(5, 10), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(fills=st.lists(st.sampled_from((killed, resumed)), min_size=1, max_size=4))
def test_any_segments_add_up(summary_of, fills):
    whole = summary_of(*fills)
    parts = [summary_of(fill) for fill in fills]
    assert whole.segments == len(parts)
    for figure in ("usd", "wall_s", "turns", "ledger_imbalance_ns"):
        assert getattr(whole, figure) == pytest.approx(sum(getattr(part, figure) for part in parts))
    for figure in ("gpu_s", "tokens", "leases", "preemptions"):
        assert getattr(whole.total, figure) == pytest.approx(sum(getattr(part.total, figure) for part in parts))
    assert whole.batches.trained_tokens <= sum(part.batches.trained_tokens for part in parts)


def test_refusals_of_all_segments_are_shown_under_their_own_workers(summary_of):
    def refusing(count):
        def write(run):
            run.meta(run="lake", status="failed: no", started_at="2026-11-20", providers="spot", seed="7")
            refused = [("spot-1", "log-probability above 0", count), ("", "no Hello within 5.0 s", 3)]
            notes = [{"worker": w, "reason": why, "count": n} for w, why, n in refused]
            run.meta(refused=msgspec.json.encode(notes).decode())

        return write

    summary = summary_of(refusing(12), refusing(1))
    warnings = tables.warnings(summary)
    assert "refused: 12 frames of worker segment 1: spot-1: log-probability above 0." in warnings
    assert [r.count for r in summary.refused if not r.worker] == [6]
    assert len([line for line in warnings if line.startswith("refused: ")]) == 2
    text = as_markdown(summary)
    assert "Refused at the door" in text
    assert "clean image" in text
    assert "Refused at the door" in as_html(summary)


def test_workers_that_were_slow_are_told_apart_from_those_that_were_refused(summary_of):
    def write(run):
        run.meta(run="lake", status="finished", started_at="2026-11-20", providers="spot", seed="7")
        slow = {"worker": "spot-1", "reason": "it took long", "count": 1, "what": "turn"}
        run.meta(refused=msgspec.json.encode([slow]).decode())

    summary = summary_of(write)
    said = " ".join(tables.warnings(summary))
    assert "1 turn went badly at worker spot-1: it took long." in said
    text = as_markdown(summary)
    assert "Turns that went badly" in text
    assert "efused" not in said
    assert "Refused at the door" not in text
