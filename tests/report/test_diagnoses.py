"""What the report's first lines say of runs in which one thing went wrong, and of runs in which nothing did."""

import xml.etree.ElementTree as ElementTree

import msgspec
import pytest
from rich.console import Console

from elastic.report import as_json, as_markdown, closing_table, summarise
from elastic.report.batches import Parted
from elastic.report.diagnoses import Course, DiagnosisKind, diagnoses_of
from elastic.report.html import as_html
from elastic.report.learning import StepLearning
from elastic.report.usage import Usage
from elastic.runtime.journal import NOT_SCORED
from tests.report.planted import GOOD, PLANTED, Script, named, simulated, written

COURSE = Course(
    learning=[],
    members=1000,
    failed={},
    refilled={},
    parted=None,
    rollouts={},
    usd=10.0,
    on_demand_usd_per_gpu_hour=10.0,
)
USAGE = Usage(
    gpu_s=3600.0,
    accounts_s={},
    overhead_share=0.1,
    preempted_share=0.0,
    usd=4.0,
    usd_per_gpu_hour=4.0,
    tokens=1_000_000,
    tokens_per_s=277.0,
    usd_per_million_tokens=4.0,
    leases=1,
    lease_ends={},
    preemptions=0,
)


def kinds(**changes: object) -> list[DiagnosisKind]:
    return [one.kind for one in diagnoses_of(msgspec.structs.replace(COURSE, **changes))]


def steps(count: int, **figures: tuple[float, float]) -> list[StepLearning]:
    """Steps whose figures go evenly from their first to their last value."""
    return [
        msgspec.structs.replace(
            StepLearning(step=step),
            **{name: first + (last - first) * step / (count - 1) for name, (first, last) in figures.items()},
        )
        for step in range(count)
    ]


@pytest.mark.parametrize("kind", DiagnosisKind)
def test_what_was_planted_is_named_and_nothing_else_in_every_format(tmp_path, kind: DiagnosisKind) -> None:
    summary = summarise(written(PLANTED[kind], tmp_path / "run", 1))
    assert [one.kind for one in summary.diagnoses] == [kind]
    (found,) = summary.diagnoses
    page = ElementTree.fromstring(as_html(summary).removeprefix("<!DOCTYPE html>"))
    (link,) = page.iter("a")
    (place,) = (element for element in page.iter() if element.get("id") == (link.get("href") or "").removeprefix("#"))
    assert link.text == found.place == place.findtext("h2")
    console = Console(width=10_000)
    with console.capture() as capture:
        console.print(closing_table(summary))
    assert f"! {found.says}" in " ".join(capture.get().split())
    assert "## What went wrong" in as_markdown(summary)
    (told,) = as_json(summary)["diagnoses"]
    assert (told["kind"], told["says"]) == (kind.value, found.says)
    assert told["figures"]


@pytest.mark.parametrize("name", GOOD)
def test_of_good_runs_nothing_is_said(tmp_path, name: str) -> None:
    summary = summarise(written(GOOD[name], tmp_path / "run", 2))
    assert summary.diagnoses == []
    assert "What went wrong" not in as_html(summary)


def test_of_a_simulated_run_rewards_say_nothing(tmp_path) -> None:
    run = simulated("asynchronous", tmp_path / "run", 1)
    assert named(run) == set()
    assert summarise(run).learning == []


def test_of_few_steps_no_trend_is_told(tmp_path) -> None:
    short = Script(steps=8, entropy=(0.9, 0.001), success=(0.4, 0.4), mismatch_mean=(0.001, 0.5), hopeless=0.9)
    assert named(written(short, tmp_path / "run", 1)) == set()


@pytest.mark.parametrize(
    ("figures", "found"),
    [
        ({"entropy": (0.4, 0.0), "score": (0.5, 0.5)}, True),
        ({"entropy": (0.4, 0.0), "score": (0.96, 0.96)}, False),  # nearly all there is to get
        ({"entropy": (0.4, 0.0), "score": (0.2, 0.8)}, False),  # it still gets better
        ({"entropy": (0.06, 0.04), "score": (0.5, 0.5)}, False),  # it began so
        ({"entropy": (5.0, 0.5), "score": (0.5, 0.5)}, False),  # enough is left
    ],
)
def test_entropy_has_collapsed_where_it_is_gone_too_early(figures, found: bool) -> None:
    assert (kinds(learning=steps(30, **figures)) == [DiagnosisKind.ENTROPY_COLLAPSE]) is found


@pytest.mark.parametrize(
    ("figures", "found"),
    [
        ({"score": (0.3, 0.6), "length_correlation": (0.1, 0.9)}, True),
        ({"score": (0.3, 0.6), "length_correlation": (-0.2, 0.1)}, False),  # longer ones are not paid for it
        ({"score": (0.4, 0.4), "length_correlation": (0.0, 0.0)}, True),  # longer for nothing
    ],
)
def test_length_counts_where_it_is_paid_for_or_comes_to_nothing(figures, found: bool) -> None:
    learning = steps(12, tokens_a_turn=(100.0, 400.0), **figures)
    assert (kinds(learning=learning) == [DiagnosisKind.LENGTH_AGAINST_REWARD]) is found


def test_tasks_that_are_easy_from_the_beginning_are_told_from_tasks_that_become_so() -> None:
    def learning(solved: list[int]) -> list[StepLearning]:
        return [StepLearning(step=step, groups=8, solved=count) for step, count in enumerate(solved)]

    assert kinds(learning=learning([6] * 9)) == [DiagnosisKind.GROUPS_WITHOUT_SIGNAL]
    assert kinds(learning=learning([1, 1, 2, 3, 4, 5, 7, 8, 8])) == []


def test_members_that_wait_for_their_score_have_not_failed(summary_of) -> None:
    def goes_on(run):
        run.group(0, 0, [1.0, 0.0], trained=True)
        run.group(0, 1, [None] * 8, trained=False, cause=NOT_SCORED)

    summary = summary_of(goes_on)
    assert (summary.trajectories_failed, summary.diagnoses) == ({}, [])


def test_failed_members_that_were_replaced_are_counted_once() -> None:
    engine = {"engine error: three workers have failed with it": 80}
    assert kinds(failed=engine, refilled={"engine error": 80}) == [DiagnosisKind.REFILLED_MEMBERS]
    assert kinds(failed=engine) == [DiagnosisKind.FAILED_MEMBERS]
    assert kinds(failed={"the environment raised ValueError": 4}, members=20) == []


@pytest.mark.parametrize(
    ("usage", "others", "found"),
    [
        ({}, [USAGE], False),
        ({"usd_per_million_tokens": 13.0}, [USAGE], True),
        ({"usd_per_million_tokens": None, "tokens": 0}, [USAGE], True),
        ({"usd_per_million_tokens": 13.0}, [], False),  # nothing to compare with
        ({"usd_per_million_tokens": 1300.0, "usd": 0.9, "tokens": 692}, [USAGE], False),  # no matter of money
        ({"overhead_share": 0.7}, [], True),  # 4 / 0.3 is more than 10 on demand
        ({"overhead_share": 0.7, "gpu_s": 500.0}, [], False),  # too short to tell
        ({"overhead_share": 0.5}, [], False),
        ({"overhead_share": 1.0, "usd_per_million_tokens": None, "tokens": 0}, [], True),
        ({"overhead_share": 0.1, "usd_per_gpu_hour": 12.0}, [], False),  # dear by its price
    ],
)
def test_a_provider_gave_little_for_its_money(usage, others: list[Usage], found: bool) -> None:
    rollouts = {"spot": msgspec.structs.replace(USAGE, **usage), **{f"other-{n}": one for n, one in enumerate(others)}}
    assert (kinds(rollouts=rollouts) == [DiagnosisKind.POOR_PROVIDER]) is found


def test_lengths_that_part_are_told() -> None:
    assert kinds(parted=Parted(trained=100.0, dropped=200.0)) == [DiagnosisKind.DROPPED_LONG]
