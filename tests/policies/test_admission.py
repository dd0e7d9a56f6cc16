import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.core.device_sharing import ArrivingPrefill, QueuedPrefill, ServingView, Slo
from policies.admission import (
    UNBOUNDED_NS,
    ExclusiveAdmission,
    NoAdmission,
    Role,
    SloAdmission,
    tpot_slack_ns,
    ttft_slack_ns,
)

SLO = Slo(ttft_ns=500, tpot_ns=150)
times = st.integers(0, 10_000)
prefills = st.lists(st.builds(QueuedPrefill, arrival_ns=times, cost_ns=st.integers(1, 1_000)), max_size=8)


arriving = st.builds(ArrivingPrefill, cost_ns=st.integers(0, 600), next_ns=st.integers(0, 200))


@st.composite
def views(draw: st.DrawFn) -> ServingView:
    return ServingView(
        now_ns=draw(st.integers(10_000, 20_000)),
        queued=draw(prefills),
        last_tokens_ns=draw(st.lists(times, max_size=8)),
        decode_ns=draw(st.integers(1, 1_000)),
    )


def test_equation_1_takes_the_request_with_the_least_time_left() -> None:
    view = ServingView(now_ns=100, queued=[QueuedPrefill(90, 50), QueuedPrefill(40, 60)])
    assert ttft_slack_ns(view, 500, subtract_ahead=False) == 40 + 500 - 100 - 60
    assert ttft_slack_ns(view, 500) == 40 + 500 - 100 - (50 + 60)


def test_equation_2_takes_the_stalest_decode() -> None:
    assert tpot_slack_ns(ServingView(now_ns=100, last_tokens_ns=[95, 60, 80], decode_ns=7), 150) == 60 + 150 - 100 - 7
    assert tpot_slack_ns(ServingView(now_ns=100, last_tokens_ns=[95]), 150) == 95 + 150 - 100


@given(views(), st.integers(0, 5_000))
def test_a_prefill_first_served_meets_its_target_if_the_rollout_takes_no_more_than_the_slack(
    view: ServingView, budget_ns: int
) -> None:
    """What Eq. 1 as printed does not give: run for the slack, then the queue in order, and nobody is late."""
    slack_ns = ttft_slack_ns(view, budget_ns)
    done_ns = view.now_ns + slack_ns
    late = []
    for request in view.queued:
        done_ns += request.cost_ns
        late.append(done_ns - (request.arrival_ns + budget_ns))
    assert max(late, default=0) == 0


@given(views(), arriving, st.sampled_from([0.0, 0.3, 1.0]), st.data())
def test_a_request_that_comes_during_the_iteration_makes_nobody_late(
    view: ServingView, arriving: ArrivingPrefill, share: float, data: st.DataObject
) -> None:
    """Run for as long as is allowed; meanwhile a request comes. All that was in time still is, and so is the new one,
    if it is no larger than what is kept for it."""
    slo = Slo(ttft_ns=15_000, tpot_ns=12_000)
    view = msgspec.structs.replace(view, arriving=arriving)
    admission = SloAdmission(slo=slo, longest_ns=UNBOUNDED_NS, arriving_share=share)
    allowed_ns = admission.allowance_ns(view)
    if allowed_ns <= 0 or allowed_ns == UNBOUNDED_NS:
        return
    arrival_ns = view.now_ns + data.draw(st.integers(0, allowed_ns))
    done_ns = serving_ns = view.now_ns + allowed_ns
    for request in view.queued:
        done_ns += request.cost_ns
        assert done_ns <= request.arrival_ns + slo.ttft_ns
    if arriving.cost_ns <= share * slo.ttft_ns:
        assert done_ns + arriving.cost_ns <= arrival_ns + slo.ttft_ns
    if arriving.next_ns <= share * slo.tpot_ns:
        assert all(
            serving_ns + view.decode_ns + arriving.next_ns <= last_ns + slo.tpot_ns for last_ns in view.last_tokens_ns
        )


@given(views(), arriving)
def test_what_is_kept_for_arrivals_is_bounded_by_its_share(view: ServingView, arriving: ArrivingPrefill) -> None:
    expecting = msgspec.structs.replace(view, arriving=arriving)

    def allowance(share: float, view: ServingView = expecting) -> int:
        return SloAdmission(slo=SLO, longest_ns=UNBOUNDED_NS, arriving_share=share).allowance_ns(view)

    assert allowance(0) == allowance(1, view)
    assert allowance(1) <= allowance(0.5) <= allowance(0)
    if not view.busy:
        assert allowance(0.5) >= 0.5 * SLO.ttft_ns


@pytest.mark.parametrize("share", [-0.1, 1.1])
def test_a_share_is_a_share(share: float) -> None:
    with pytest.raises(ValueError, match="arriving_share"):
        SloAdmission(slo=SLO, longest_ns=1, arriving_share=share)


@given(views(), st.integers(0, 5_000))
def test_the_printed_equation_never_leaves_less_slack(view: ServingView, budget_ns: int) -> None:
    assert ttft_slack_ns(view, budget_ns) <= ttft_slack_ns(view, budget_ns, subtract_ahead=False)


@given(views())
def test_colocated_takes_the_smaller_slack_and_the_roles_their_own(view: ServingView) -> None:
    def allowance(role: Role) -> int:
        return SloAdmission(slo=SLO, longest_ns=UNBOUNDED_NS, role=role).allowance_ns(view)

    assert allowance(Role.PREFILLER) == ttft_slack_ns(view, SLO.ttft_ns)
    assert allowance(Role.DECODER) == tpot_slack_ns(view, SLO.tpot_ns)
    assert allowance(Role.COLOCATED) == min(allowance(Role.PREFILLER), allowance(Role.DECODER))


@given(views(), st.integers(0, 1_000))
def test_enforcing_one_target_ignores_the_other(view: ServingView, longest_ns: int) -> None:
    def allowance(**kept: bool) -> int:
        return SloAdmission(slo=SLO, longest_ns=longest_ns, **kept).allowance_ns(view)

    assert allowance(tpot=False) == min(ttft_slack_ns(view, SLO.ttft_ns), longest_ns)
    assert allowance(ttft=False) == min(tpot_slack_ns(view, SLO.tpot_ns), longest_ns)
    assert allowance() == min(allowance(tpot=False), allowance(ttft=False)) <= longest_ns


@given(views(), st.integers(1, 1_000))
def test_time_only_takes_slack_away(view: ServingView, later_ns: int) -> None:
    admission = SloAdmission(slo=SLO, longest_ns=UNBOUNDED_NS)
    later = ServingView(
        now_ns=view.now_ns + later_ns,
        queued=view.queued,
        last_tokens_ns=view.last_tokens_ns,
        decode_ns=view.decode_ns,
    )
    assert admission.allowance_ns(later) <= admission.allowance_ns(view)


@pytest.mark.parametrize("role", Role)
def test_an_idle_device_is_bounded_by_the_longest_iteration_alone(role: Role) -> None:
    assert SloAdmission(slo=SLO, longest_ns=70, role=role).allowance_ns(ServingView(now_ns=5)) == 70


@given(views())
def test_baselines(view: ServingView) -> None:
    assert NoAdmission().allowance_ns(view) == UNBOUNDED_NS
    assert (ExclusiveAdmission().allowance_ns(view) > 0) == (not view.busy)
