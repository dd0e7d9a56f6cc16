"""What the report says of weight updates, from journals as runs leave them, and as runs of old left them."""

import pytest

from elastic.core import events as e
from elastic.protocol import wire
from elastic.report import as_json, as_markdown
from elastic.report.html import as_html
from elastic.report.tables import tables
from elastic.report.weights import PARTS, mean_split_s
from elastic.runtime.journal import event_row

FULL_BYTES = 1_190_016


def pulls(run):
    run.journal.append(event_row(e.WeightsPublished(worker="trainer", epoch=1, version=2), 5_000_000_000))
    run.pull(1.0, FULL_BYTES, 0.4, 0.1, worker="a", version=1)
    run.pull(5.5, 11_900, 0.2, 0.1, worker="a", version=2)
    run.pull(6.0, 11_900, 0.4, 0.1, worker="b", version=2)
    run.pull(6.5, 0, 9.0, 9.0, error="refused", worker="c", version=2)
    run.step(1, 5.0)


def test_a_pull_is_split_and_timed_from_its_version_on(summary_of):
    first, update, newcomer = summary_of(pulls).weights.pulls
    assert (first.first, update.first, newcomer.first) == (True, False, True)
    assert (first.current_s, update.current_s, newcomer.current_s) == (None, pytest.approx(0.5), None)
    assert first.over_full == 1.0
    assert update.over_full == pytest.approx(0.01, rel=0.01)
    assert mean_split_s([first, update]) == pytest.approx(
        {"queue": 0.075, "wire": 0.15, "decode": 0.075, "apply": 0.025, "pause": 0.1}
    )
    assert mean_split_s([]) == {}


def test_the_wait_for_the_trainer_is_part_of_a_pull(summary_of):
    def follow(run):
        run.step(1, 5.0)
        run.pull(5.4, 11_900, 0.2, 0.1, worker="a", version=1)
        run.pull(5.5, 11_900, 0.2, 0.1, worker="a", version=2, encode=0.08)

    before, followed = (mean_split_s([pull]) for pull in summary_of(follow).weights.pulls)
    assert "encode" not in before, "runs of old had encoded all of it"
    assert followed == pytest.approx(before | {"encode": 0.08})


def test_what_was_refused_is_counted_by_worker_with_its_reason(summary_of):
    def refusing(run):
        run.pull(1.0, FULL_BYTES, 0.4, 0.1, worker="a")
        run.pull(
            2.0,
            FULL_BYTES,
            0.4,
            0.1,
            worker="a",
            refused=[wire.UnverifiedWeights("weights held as version 1", "audit")],
        )
        run.pull(
            3.0,
            0,
            0.0,
            0.0,
            error="torn",
            worker="b",
            refused=[wire.UnverifiedWeights("keyframe of version 1", "torn")],
        )

    summary = summary_of(refusing)
    assert [
        (r["at_s"], r["worker"], r["version"], r["what"], r["reason"], r["replaced"])
        for r in as_json(summary)["weights"]["refused"]
    ] == [
        (2.0, "a", 1, "weights held as version 1", "audit", True),
        (3.0, "b", 1, "keyframe of version 1", "torn", False),
    ]
    by_worker = next(table for table in tables(summary) if table.title == "Weights by worker")
    assert [(row[0], row[1], row[-1]) for row in by_worker.rows] == [("a", "2", "1"), ("b", "0", "1")]
    for text in (as_html(summary), as_markdown(summary)):
        assert "Refused weights" in text
        assert "weights held as version 1" in text


def test_without_refusals_there_is_no_table_of_them(realistic):
    assert "Refused weights" not in as_html(realistic)


def test_a_version_has_its_bytes_and_its_layers_in_order(summary_of):
    weights = summary_of(pulls).weights
    (version,) = weights.versions
    assert (version.version, version.bytes) == (2, 20_100)
    assert version.over_full == pytest.approx(20_100 / FULL_BYTES)
    assert weights.layers == ["embedding", *map(str, range(12)), "head"]
    assert weights.changed_of("3") == [pytest.approx(0.016 * 1.1)]


def test_every_format_has_the_section(realistic):
    page, words, plain = as_html(realistic), as_markdown(realistic), as_json(realistic)
    for text in (page, words):
        assert all(title in text for title in ("Weights by version", "Weights by worker", "Changed elements by layer"))
    assert all(f"part-{part}" in page for part in PARTS)
    assert len(plain["weights"]["versions"]) == 60
    assert {"worker", "version", "bytes", "over_full", "split_s"} <= plain["weights"]["pulls"][0].keys()
