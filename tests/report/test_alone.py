"""What a run would have cost on each of its providers alone."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from elastic.core.types import Account, EndCause
from elastic.report import as_html, as_json, as_markdown, closing_table
from elastic.report.alone import alone_costs
from elastic.report.usage import Usage
from elastic.runtime.status import ProviderStatus

NAMES = ("serving", "ec2", "modal")


def usage(gpu_s: float, usd: float, tokens: int, overhead_share: float = 0.0) -> Usage:
    return Usage(
        gpu_s=gpu_s,
        accounts_s={},
        overhead_share=overhead_share,
        preempted_share=0.0,
        usd=usd,
        usd_per_gpu_hour=usd / gpu_s * 3600 if gpu_s else None,
        tokens=tokens,
        tokens_per_s=0.0,
        usd_per_million_tokens=None,
        leases=1,
        lease_ends={},
        preemptions=0,
    )


usages = st.builds(
    usage,
    gpu_s=st.floats(1.0, 1e6),
    usd=st.floats(0.0, 1e5),
    tokens=st.integers(1, 10**9),
    overhead_share=st.floats(0.0, 0.99),
)


@given(st.lists(usages, min_size=2, max_size=3), st.floats(0.0, 1e4), st.floats(1.0, 1e5))
def test_the_runs_bill_is_the_mean_of_those_alone_by_tokens(found, other_usd, wall_s):
    """So it lies between the cheapest and the dearest."""
    rollouts = dict(zip(NAMES, found, strict=False))
    alone = {one.provider: one for one in alone_costs(rollouts, other_usd, wall_s)}
    assert list(alone) == list(rollouts)
    tokens = sum(one.tokens for one in found)
    bill = other_usd + sum(one.usd for one in found)
    by_tokens = sum(alone[name].usd * used.tokens / tokens for name, used in rollouts.items())
    assert by_tokens == pytest.approx(bill, rel=1e-9, abs=1e-12)
    assert min(one.usd for one in alone.values()) <= bill * (1 + 1e-9) + 1e-12
    for one in alone.values():
        working_s = one.gpu_s * (1 - one.overhead_share)
        assert working_s * one.tokens_per_gpu_s == pytest.approx(tokens)
        assert one.gpus * wall_s == pytest.approx(one.gpu_s)
        assert one.usd == pytest.approx(other_usd + one.gpu_s / 3600 * one.usd_per_gpu_hour)


@pytest.mark.parametrize("tokens", [(10, 0), (0, 0)])
def test_who_had_all_tokens_is_compared_with_nobody(tokens):
    rollouts = {name: usage(10.0, 1.0, n) for name, n in zip(NAMES, tokens, strict=False)}
    assert alone_costs(rollouts, 1.0, 10.0) == []


def test_who_had_no_token_is_not_measured():
    rollouts = {"serving": usage(10.0, 1.0, 5), "ec2": usage(5.0, 2.0, 5), "modal": usage(7.0, 3.0, 0)}
    *_, modal = alone_costs(rollouts, 1.0, 10.0)
    assert (modal.usd, modal.gpu_s, modal.tokens_per_gpu_s) == (None, None, None)
    assert modal.usd_per_gpu_hour == pytest.approx(3.0 / 7.0 * 3600)


@pytest.fixture
def three(summary_of):
    """The trainer costs $1 and the functions $2; a million tokens would cost $30 on one and $60 on the other."""

    def fill(run):
        run.open("t", "trainer", 0.0, usd_per_gpu_hour=360.0)
        run.open("a", "ec2", 0.0, usd_per_gpu_hour=3600.0)
        run.open("b", "modal", 0.0, usd_per_gpu_hour=7200.0)
        run.report("b", {Account.LOADING: 5.0, Account.DECODE: 5.0}, 10.0)
        for worker in "tab":
            run.end(worker, EndCause.RELEASED, 10.0)
        run.call(1.0, 2.0)
        tokens = {"trainer": 999, "ec2": 1_000_000, "modal": 2_000_000}
        run.sample(10.0, {name: ProviderStatus(tokens=n) for name, n in tokens.items()})

    return summary_of(fill)


def test_the_trainer_and_functions_stay_as_they_were(three):
    ec2, modal = three.alone
    assert (ec2.provider, ec2.gpu_s, ec2.gpus) == ("ec2", 30.0, 3.0)
    assert ec2.usd == pytest.approx(3.0 + 30.0)
    assert (modal.gpu_s, modal.overhead_share, modal.tokens_per_gpu_s) == (15.0, 0.5, 400_000.0)
    assert modal.usd == pytest.approx(3.0 + 30.0)
    assert three.usd == pytest.approx(3.0 + 10.0 + 20.0)


def test_it_is_in_every_format(three):
    title = "What each provider would have cost alone"
    assert [one["provider"] for one in as_json(three)["alone"]] == ["ec2", "modal"]
    assert f"## {title}" in as_markdown(three)
    assert title in as_html(three)
    console = Console(width=80, force_terminal=False)
    with console.capture() as capture:
        console.print(closing_table(three))
    lines = capture.get().splitlines()
    header = next(line for line in lines if line.lstrip().startswith("provider"))
    assert header.split()[-1] == "alone"
    assert next(line for line in lines if line.split()[:1] == ["modal"]).split()[-1] == "$33.00"
    assert max(map(len, lines)) <= 80


def test_one_provider_has_no_such_table(summary_of):
    def fill(run):
        run.open("a", "ec2", 0.0, usd_per_gpu_hour=1.0)
        run.sample(10.0, {"ec2": ProviderStatus(tokens=5)})

    summary = summary_of(fill)
    assert summary.alone == []
    assert "cost alone" not in as_markdown(summary)
