"""How many groups are launched, whatever a step has come to."""

import math

from hypothesis import given
from hypothesis import strategies as st

from elastic.core.policy import BatchView, StepRecord
from policies.sampling import DynamicSampling, FixedBatch

counts = st.integers(0, 200)


def record(of_use: int, rejected: int) -> StepRecord:
    return StepRecord(
        step=0,
        duration_ns=1,
        seeding_ns=0,
        rollout_ns=1,
        groups_trained=of_use,
        groups_dropped=rejected,
        groups_of_use=of_use,
        groups_rejected=rejected,
    )


batches = st.builds(
    lambda wanted, running, finished, rejected: BatchView(
        wanted=wanted,
        launched=running + finished + rejected,
        running=running,
        finished=finished,
        rejected=rejected,
    ),
    st.integers(1, 200),
    counts,
    counts,
    counts,
)
histories = st.lists(st.builds(record, counts, counts), max_size=3)
bounds = st.floats(1.0, 8.0)


@given(batches, histories)
def test_a_fixed_batch_is_launched_once_whatever_it_comes_to(batch, history) -> None:
    launches = FixedBatch().launches(batch, history)
    assert launches == max(0, batch.wanted - batch.launched)


@given(batches, histories, bounds)
def test_no_more_than_the_bound_is_launched(batch, history, most) -> None:
    launches = DynamicSampling(most).launches(batch, history)
    assert launches >= 0
    assert launches == 0 or batch.launched + launches <= math.ceil(most * batch.wanted)


@given(batches, histories, bounds)
def test_nothing_more_is_launched_once_enough_are_of_use(batch, history, most) -> None:
    if batch.finished >= batch.wanted:
        assert DynamicSampling(most).launches(batch, history) == 0


@given(batches, histories)
def test_what_is_missing_runs_or_is_launched_while_the_bound_allows(batch, history) -> None:
    most = 10_000.0
    launches = DynamicSampling(most).launches(batch, history)
    assert batch.running + launches >= batch.wanted - batch.finished


@given(st.integers(1, 50), st.lists(st.booleans(), min_size=1, max_size=600), st.builds(record, counts, counts))
def test_a_step_gets_its_groups_where_there_are_enough_of_use(wanted, useful, last) -> None:
    """Launched as the policy says and ended one by one, until it wants no more."""
    most = 6.0
    launched = running = finished = rejected = 0
    outcomes = iter(useful)
    while True:
        view = BatchView(wanted=wanted, launched=launched, running=running, finished=finished, rejected=rejected)
        more = DynamicSampling(most).launches(view, [last])
        launched, running = launched + more, running + more
        if not running:
            break
        running -= 1
        if next(outcomes, False):
            finished += 1
        else:
            rejected += 1
    assert launched <= math.ceil(most * wanted)
    assert finished >= wanted or launched == math.ceil(most * wanted)


def test_concurrency_follows_the_previous_steps_share_of_use() -> None:
    batch = BatchView(wanted=12, launched=0, running=0, finished=0, rejected=0)
    policy = DynamicSampling(6.0)
    assert policy.launches(batch, []) == 12
    assert policy.launches(batch, [record(12, 12)]) == 24
    assert policy.launches(batch, [record(12, 12), record(12, 4)]) == 16
    assert policy.launches(batch, [record(0, 72)]) == 72
