"""What evaluations came to, in the report, in loggers' rows, on the command line and in the server's series."""

import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from elastic.core.types import NS_PER_S
from elastic.report import as_json, evaluation_words, evaluations, inspect_logs, tables, write_html
from elastic.report.evaluation_charts import charts_of
from elastic.report.html import as_html
from elastic.report.tracking.rows import StepSource
from elastic.report.tracking.samples import SampleBounds
from elastic.runtime.journal import EvaluationRow, RunDirectory, SampleRow, StepRow
from elastic.server.history.journals import Wanted, figures_of, metrics_of
from tests.journal_rows import run_status, step_record
from tests.report.evaluated_run import evaluated_run, evaluation

GOOD, FAIR, BAD = [[1.0, 1.0], [1.0, 0.0]], [[1.0, 0.0], [0.0, 0.0]], [[0.0, 0.0], [0.0, 0.0]]


def step(number: int, at_s: float) -> StepRow:
    record = step_record(number, duration_ns=NS_PER_S, groups_trained=1)
    return StepRow(step=number, t_ns=round(at_s * NS_PER_S), record=record, success_rate=None, trainer={})


def test_every_version_is_told_with_its_errors_and_the_best_one(summary_of) -> None:
    def fill(run):
        run.meta(config='{"evaluation": {"keep_best": "pass@1"}}')
        for number, rewards in enumerate((BAD, GOOD, FAIR)):
            run.journal.append(evaluation(10 * number, 60.0 * number + 5, {"sums": rewards}, timed_out=number == 2))

    summary = summary_of(fill)
    assert [one.version for one in summary.evaluations.versions] == [0, 10, 20]
    assert (summary.evaluations.best, summary.evaluations.metric) == (10, "pass@1")
    assert [one.duration_s for one in summary.evaluations.versions] == [4.0] * 3
    (table,) = [one for one in tables.tables(summary) if one.title == "Evaluations"]
    assert table.header[:5] == ["version", "of", "avg@2", "pass@1", "pass@2"]
    assert table.rows[1][:3] == ["10", "sums", "0.750 ± 0.250"]
    assert [row[-1] for row in table.rows] == ["", "best", "timed out"]
    assert table.rows[0][-4:-1] == ["1", "0", "4 s"]
    (headline,) = [one for one in tables.headline(summary) if one.name == "pass@1"]
    assert headline.value == "0.250"
    assert headline.detail == "± 0.250 at version 20, timed out; from 0.000 at 0; best 0.750 at 10"
    assert evaluation_words(summary.evaluations).startswith(
        "evaluation of version 20: avg@2 0.250 ± 0.250, pass@1 0.250 ± 0.250, pass@2 0.500 ± 0.500 (timed out); best"
    )
    told = as_json(summary)["evaluations"]
    assert told["versions"][1]["metrics"]["avg@2"] == {"mean": 0.75, "error": 0.25, "tasks": 2}


def test_versions_that_a_later_process_did_not_go_on_from_are_left_out(summary_of) -> None:
    def died(run):
        run.step(0, 4.0)
        for version, rewards in enumerate((BAD, FAIR, GOOD)):
            run.journal.append(evaluation(version, 5.0 + version, {"sums": rewards}))

    def began_again(run):
        run.step(1, 4.0)

    found = summary_of(died, began_again).evaluations
    assert [one.version for one in found.versions] == [0, 1], "version 1 is the checkpoint, version 2 is another by now"
    assert found.best == 1


def test_why_a_run_ended_early_is_said_before_all_figures(summary_of) -> None:
    why = "pass@1 is 0.75 at version 1, of which at least 0.7 was wanted"

    def fill(run):
        run.meta(status="finished", config='{"evaluation": {"stop_when": {"metric": "pass@1"}}}')
        run.journal.append(evaluation(0, 5.0, {"sums": BAD}))
        run.journal.append(msgspec.structs.replace(evaluation(1, 9.0, {"sums": GOOD}), ends=why))

    summary = summary_of(fill)
    assert (summary.evaluations.metric, summary.evaluations.best) == ("pass@1", 1)
    assert tables.warnings(summary) == [f"The run ended before its last step, as evaluation.stop_when says: {why}."]


def test_environments_stand_beside_each_other_and_all_is_drawn_on_the_drawing(summary_of) -> None:
    def fill(run):
        for version, worth in enumerate((-3.0, 0.5, 2.5)):
            sets = {"sums": [[worth, worth - 1], [worth, worth + 1]], "words": GOOD}
            run.journal.append(evaluation(version, 5.0 + version, sets))

    summary = summary_of(fill)
    (table,) = [one for one in tables.tables(summary) if one.title == "Evaluations"]
    assert [row[:2] for row in table.rows[:4]] == [["0", "all"], ["0", "sums"], ["0", "words"], ["1", "all"]]
    assert [chart.title for chart in charts_of(summary.evaluations)] == [
        "Evaluation",
        "Evaluation: sums",
        "Evaluation: words",
    ]
    page = ElementTree.fromstring(as_html(summary).removeprefix("<!DOCTYPE html>"))
    (drawn,) = [one for one in page.iter("svg") if one.get("aria-label") == "Evaluation: sums"]
    heights = [float(dot.get("cy", "nan")) for dot in drawn.iter("circle")][:3]
    assert heights == sorted(heights, reverse=True)
    assert all(38 <= height <= 134 for height in heights)


def test_rewards_of_any_size_are_drawn_and_told_in_few_digits(summary_of) -> None:
    def fill(run):
        for version, worth in enumerate((-1.7e308, 1.7e308)):
            run.journal.append(evaluation(version, 5.0 + version, {"sums": [[worth], [-worth], [worth]]}))

    summary = summary_of(fill)
    assert ElementTree.fromstring(as_html(summary).removeprefix("<!DOCTYPE html>")) is not None
    assert "avg@2 5.67e+307 ± 1.13e+308" in evaluation_words(summary.evaluations)


def test_inspects_logs_in_the_runs_directory_are_linked(summary_of, tmp_path: Path) -> None:
    summary = summary_of(lambda run: run.journal.append(evaluation(0, 5.0, {"sums": GOOD})))
    (tmp_path / "run" / "inspect").mkdir(parents=True)
    for name in ("2026-01-01T00-00-00_sums é_a.eval", "2026-02-01T00-00-00_sums_b.json", "notes.txt"):
        (tmp_path / "run" / "inspect" / name).write_text("{}")
    logs = inspect_logs(tmp_path / "run")
    write_html(summary, tmp_path / "run.html", logs=logs)
    page = ElementTree.fromstring((tmp_path / "run.html").read_text().removeprefix("<!DOCTYPE html>"))
    links = {link.text: link.get("href", "") for link in page.iter("a")}
    assert [links[log.name] for log in logs] == [
        "run/inspect/2026-01-01T00-00-00_sums%20%C3%A9_a.eval",
        "run/inspect/2026-02-01T00-00-00_sums_b.json",
    ]
    assert "Evaluated by Inspect" not in as_html(summary)


def test_a_simulations_rewards_are_not_told(summary_of) -> None:
    def fill(run):
        run.meta(simulated="{}")
        run.journal.append(evaluation(0, 5.0, {"sums": GOOD}))

    summary = summary_of(fill)
    (table,) = [one for one in tables.tables(summary) if one.title == "Evaluations"]
    assert table.header == ["version", "of", "tasks", "finished", "failed", "cut off", "took", ""]
    assert table.rows == [["0", "sums", "2", "4", "1", "0", "4 s", ""]]
    assert charts_of(summary.evaluations) == []


def test_what_was_not_evaluated_is_not_told(realistic) -> None:
    assert realistic.evaluations == evaluations.Evaluations()
    assert evaluation_words(realistic.evaluations) == ""
    assert "Evaluation" not in as_html(realistic)


def test_an_evaluation_of_which_no_episode_finished_is_told(summary_of) -> None:
    summary = summary_of(lambda run: run.journal.append(evaluation(0, 5.0, {"sums": [[], []]}, timed_out=True)))
    assert evaluation_words(summary.evaluations) == "evaluation of version 0: 0 episodes finished (timed out)"
    assert "Evaluations" in as_html(summary)


@pytest.mark.parametrize(
    ("status", "last"),
    [
        ("finished", True),
        ("stopped: by a person", False),
        ("running", False),
    ],
)
def test_loggers_get_an_evaluation_in_the_row_of_its_version(tmp_path, status: str, last: bool) -> None:
    directory = evaluated_run(
        tmp_path,
        evaluation(0, 5.0, {"sums": BAD, "words": GOOD}),
        step(0, 10.0),
        step(1, 20.0),
        evaluation(2, 25.0, {"sums": FAIR, "words": GOOD}),
        status=status,
    )
    source = StepSource(RunDirectory(directory), SampleBounds(trajectories=0, bytes=0), list)
    source.poll(over=True)
    source.poll(over=True)
    assert source.finished == ([0, 1, 2] if last else [0, 1])
    first = {name: value for name, value in source.row(0).figures.items() if name.startswith("eval/")}
    assert first["eval/sums/avg@2"] == 0.0
    assert first["eval/words/avg@2"] == 0.75
    assert first["eval/words/avg@2/stderr"] == 0.25
    assert first["eval/avg@2"] == 0.375
    assert first["eval/sums/failed"] == 1.0
    assert not any(name.startswith("eval/") for name in source.row(1).figures)
    if last:
        row = source.row(2)
        assert row.figures["eval/sums/pass@2"] == 0.5
        assert row.at_s == 25.0
    source.close()


def test_the_servers_series_have_evaluations(tmp_path) -> None:
    rows = [evaluation(0, 5.0, {"sums": BAD}), step(0, 10.0), evaluation(1, 15.0, {"sums": GOOD})]
    found = metrics_of(evaluated_run(tmp_path, *rows), "run_1", Wanted(10))
    assert [(one.version, one.best) for one in found.evaluations] == [(0, False), (1, True)]
    assert found.evaluations[1].environments["sums"].metrics["avg@2"].mean == 0.75


def test_a_runs_figures_on_a_server_have_its_last_evaluation_and_the_best_version(tmp_path) -> None:
    sample = SampleRow(t_ns=NS_PER_S, status=run_status())
    best = msgspec.structs.replace(evaluation(0, 5.0, {"sums": GOOD}), best=True)
    evaluated_run(tmp_path, best, step(0, 10.0), sample, status="failed: interrupted")
    evaluated_run(tmp_path, evaluation(1, 15.0, {"sums": FAIR}), sample)
    figures = figures_of(tmp_path)
    assert figures is not None
    assert figures.evaluation is not None
    assert (figures.evaluation.version, figures.evaluation.best_version) == (1, 0)
    assert figures.evaluation.metrics["avg@2"].mean == 0.25


def test_on_a_server_versions_that_a_later_process_did_not_go_on_from_count_for_nothing(tmp_path) -> None:
    sample = SampleRow(t_ns=NS_PER_S, status=run_status())

    def evaluated(version: int, rewards: Sequence[Sequence[float]], *, best: bool = False) -> EvaluationRow:
        return msgspec.structs.replace(evaluation(version, 5.0 + version, {"sums": rewards}), best=best)

    steps = [step(0, 4.0), step(1, 5.0)]
    undone = [evaluated(0, BAD, best=True), evaluated(1, FAIR, best=True), evaluated(2, GOOD, best=True)]
    evaluated_run(tmp_path, *undone, *steps, sample, status="failed: interrupted")
    evaluated_run(tmp_path, step(1, 5.0), sample)
    figures = figures_of(tmp_path)
    assert figures is not None
    assert figures.evaluation is not None
    assert (figures.evaluation.version, figures.evaluation.best_version) == (1, 1), "version 2 is another one by now"
    evaluated_run(tmp_path, step(2, 6.0), evaluated(2, BAD), sample)
    figures = figures_of(tmp_path)
    assert figures is not None
    assert figures.evaluation is not None
    assert (figures.evaluation.version, figures.evaluation.best_version) == (2, 1)
    assert figures.evaluation.metrics["avg@2"].mean == 0.0
