"""Lengths of what was dropped beside those of what was trained on: a reader is warned where they part."""

from random import Random

import pytest

from elastic.report import charts
from elastic.report.batches import PARTS_AT_LEAST, parted
from elastic.report.diagnoses import DiagnosisKind


def groups(rng: Random, count: int, times: float = 1.0) -> list[float]:
    """Mean lengths of groups, as different as those of tasks are."""
    return [times * rng.lognormvariate(5.0, 0.6) for _ in range(count)]


def test_a_run_without_a_preference_is_silent() -> None:
    found = 0
    for seed in range(400):
        rng = Random(seed)
        trained = groups(rng, rng.choice((20, 100, 1000)))
        found += parted(trained, groups(rng, rng.choice((PARTS_AT_LEAST, 20, 100)))) is not None
    assert found <= 4


def test_longer_groups_that_were_dropped_part() -> None:
    rng = Random(1)
    found = parted(trained := groups(rng, 400), dropped := groups(rng, 40, times=2.0))
    assert found is not None
    assert (found.trained, found.dropped) == pytest.approx((sum(trained) / 400, sum(dropped) / 40))


@pytest.mark.parametrize("times", [0.25, 0.5, 1.0])
def test_shorter_ones_tell_nothing_for_they_were_not_at_their_end(times: float) -> None:
    rng = Random(2)
    assert parted(groups(rng, 400), groups(rng, 40, times)) is None


def test_of_few_groups_nothing_is_said() -> None:
    assert parted([10.0] * 400, [100.0] * (PARTS_AT_LEAST - 1)) is None


@pytest.mark.parametrize(("reason", "warned"), [("stale: old", True), ("zero_variance", False), ("surplus: x", False)])
def test_the_report_warns_and_shows_both_by_step(summary_of, reason: str, warned: bool) -> None:
    rng = Random(3)

    def fill(run):
        for step in range(20):
            for group in range(4):
                run.fate(f"{step}/{group}", step, "", [round(rng.uniform(90, 110)) for _ in range(4)], {0: 400})
            run.fate(f"{step}/4", step, reason, [round(rng.uniform(180, 220)) for _ in range(4)])
            run.step(step, 1.0 + step)

    summary = summary_of(fill)
    assert any(one.kind == DiagnosisKind.DROPPED_LONG for one in summary.diagnoses) is warned
    assert (charts.lengths(summary) is not None) is warned
    if warned:
        assert [step.step for step in summary.batches.lengths] == [*range(20)]
        assert all(
            step.dropped is not None and step.dropped > 1.5 * (step.trained or 0) for step in summary.batches.lengths
        )
