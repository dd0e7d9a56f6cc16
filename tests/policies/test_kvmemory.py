import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.core.device_sharing import Budget, MemoryPolicy
from policies.kvmemory import FineGrainedMemory, PreemptiveMemory, StaticPartition

TOTAL = 100
POLICIES: list[MemoryPolicy] = [PreemptiveMemory(), FineGrainedMemory(), StaticPartition()]
pages = st.integers(0, TOTAL)
recent = st.lists(pages, max_size=5) | st.just([0] * 20)


def test_a_step_leaves_the_headroom_above_recent_use() -> None:
    budget = PreemptiveMemory(headroom_share=0.2, recent_quantile=1).begin_step(TOTAL, [10, 30, 20])
    assert (budget.pages, budget.reserve_pages, budget.serving_pages) == (50, 20, TOTAL)
    assert PreemptiveMemory(headroom_share=0.2, recent_quantile=0.5).begin_step(TOTAL, [10, 30, 20]).pages == 60


def test_the_watermark_within_the_headroom_triggers_one_cut_and_a_freeze() -> None:
    policy = PreemptiveMemory(headroom_share=0.2, watermark_share=0.5, cut_factor=2)
    budget = policy.begin_step(TOTAL, [30])
    assert policy.observe(budget, TOTAL, 40, 0) is budget
    cut = policy.observe(budget, TOTAL, 41, 0)
    assert (cut.pages, cut.pressure, cut.cuts) == (25, True, 1)
    # The one cut is enough for what follows, and nothing grows back before the next step.
    assert policy.observe(cut, TOTAL, 60, 0) is cut
    assert policy.observe(cut, TOTAL, 5, 0) is cut
    assert policy.begin_step(TOTAL, [5]).pages == 75


def test_the_headroom_stays_however_long_serving_rests() -> None:
    """Its next burst comes without a warning, and finds the headroom free."""
    policy = PreemptiveMemory(headroom_share=0.2)
    budget = policy.begin_step(TOTAL, [0] * 600)
    assert (budget.pages, budget.reserve_pages) == (80, 20)
    assert policy.observe(budget, TOTAL, 10, 0) is budget


def test_a_burst_beyond_the_cut_is_cut_again() -> None:
    policy = PreemptiveMemory(headroom_share=0.2)
    budget = policy.observe(policy.begin_step(TOTAL, [30]), TOTAL, 41, 0)
    assert policy.observe(budget, TOTAL, 66, 0).pages == 12
    assert policy.observe(budget, TOTAL, 70, 25).pages == 5


@given(recent, st.lists(st.tuples(pages, pages), max_size=20))
def test_within_a_step_the_budget_only_shrinks(samples: list[int], uses: list[tuple[int, int]]) -> None:
    policy = PreemptiveMemory()
    budget = policy.begin_step(TOTAL, samples)
    for serving, needed in uses:
        after = policy.observe(budget, TOTAL, serving, min(needed, TOTAL - serving))
        assert 0 <= after.pages <= budget.pages
        assert after.pages < budget.pages or after is budget
        assert after.cuts == budget.cuts + (after is not budget)
        budget = after


@pytest.mark.parametrize("policy", [PreemptiveMemory(), FineGrainedMemory()], ids=lambda p: type(p).__name__)
@given(samples=recent, uses=st.lists(st.tuples(pages, pages), max_size=20))
def test_what_serving_needs_is_never_left_to_rollouts(
    policy: MemoryPolicy, samples: list[int], uses: list[tuple[int, int]]
) -> None:
    """Serving can always reach the whole memory: after an observation rollouts keep no page that it asked for."""
    budget = policy.begin_step(TOTAL, samples)
    for serving, more in uses:
        needed = min(more, TOTAL - serving)
        budget = policy.observe(budget, TOTAL, serving, needed)
        if needed:
            assert budget.pages <= TOTAL - serving - needed
        assert budget.serving_pages == TOTAL


@given(pages, pages)
def test_a_static_partition_never_moves(serving: int, needed: int) -> None:
    policy = StaticPartition(rollout_share=0.5)
    budget = policy.begin_step(TOTAL, [serving])
    assert budget == Budget(pages=50, serving_pages=50)
    assert policy.observe(budget, TOTAL, serving, needed) is budget


@given(recent, pages)
def test_fine_grained_gives_back_what_serving_no_longer_needs(samples: list[int], serving: int) -> None:
    policy = FineGrainedMemory()
    budget = policy.observe(policy.begin_step(TOTAL, samples), TOTAL, serving, TOTAL - serving)
    assert (budget.pages, budget.pressure) == (0, serving < TOTAL)
    assert policy.observe(budget, TOTAL, serving, 0).pages == TOTAL - serving


@pytest.mark.parametrize("policy", POLICIES, ids=lambda p: type(p).__name__)
@given(samples=recent)
def test_a_budget_fits_the_memory(policy: MemoryPolicy, samples: list[int]) -> None:
    budget = policy.begin_step(TOTAL, samples)
    assert 0 <= budget.pages <= TOTAL
    assert 0 <= budget.reserve_pages <= TOTAL
    assert budget.pages + budget.reserve_pages <= TOTAL or budget.pages == 0


@pytest.mark.parametrize(
    "wrong",
    [{"headroom_share": 1.0}, {"watermark_share": 1.5}, {"cut_factor": 1.0}, {"recent_quantile": 2}, {"lease_ns": -1}],
)
def test_bad_settings_are_named(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        PreemptiveMemory(**wrong)  # type: ignore[arg-type]
