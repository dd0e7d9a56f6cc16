"""The spot market of EC2: which pools are asked for, what waits, and what is billed. Nothing of AWS is needed here."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from elastic.core.types import NS_PER_S
from providers.ec2_market import NEVER_JOINED, Ec2Market, Ec2Settings, PricePoint, Running, SpotPool, bill_usd
from providers.ec2_user_data import LIMIT_BYTES, UserDataTooLarge, user_data
from providers.markets import CapacityUnavailable

A, B, DEAR = (
    SpotPool("g5.xlarge", "us-east-1a"),
    SpotPool("g5.xlarge", "us-east-1b"),
    SpotPool("g6.xlarge", "us-east-1a"),
)
USD = {A: 0.4, B: 0.5, DEAR: 3.0}
IMAGE = "ami-0123456789abcdef0"


def market(**settings: Any) -> Ec2Market:
    given = {"image": IMAGE, "instance_types": ["g5.xlarge", "g6.xlarge"], "max_workers": 4, "retry_s": 10.0}
    made = Ec2Market("ec2", Ec2Settings.model_validate(given | settings))
    made.priced({pool: [PricePoint(0.0, usd)] for pool, usd in USD.items()})
    return made


def later(made: Ec2Market, seconds: float) -> None:
    assert list(made.advance(made.at_ns + round(seconds * NS_PER_S))) == []


def test_the_cheapest_pool_is_asked_first_and_none_above_the_limit() -> None:
    assert market().usable() == [A, B, DEAR]
    limited = market(usd_per_gpu_hour_max=1.0)
    assert limited.usable() == [A, B]
    assert limited.usd_per_gpu_hour() == 0.4
    closed = market(usd_per_gpu_hour_max=0.1)
    assert closed.free() == 0
    with pytest.raises(CapacityUnavailable, match="above usd_per_gpu_hour_max"):
        closed.take("ec2-1")


def test_a_pool_that_fails_waits_twice_as_long_each_time_and_a_launch_ends_that() -> None:
    made = market(retry_max_s=40.0)
    for pause_s in (10, 20, 40, 40):
        made.failed(A, "InsufficientInstanceCapacity", "none")
        later(made, pause_s - 0.1)
        assert A not in made.usable()
        later(made, 0.2)
        assert A in made.usable()
    made.launched(A)
    made.failed(A, "InsufficientInstanceCapacity", "none")
    later(made, 10.1)
    assert A in made.usable()


def test_a_pool_where_no_worker_joined_waits_longer_each_time_until_one_does() -> None:
    made = market()
    for pause_s in (10, 20):
        made.launched(A)
        made.failed(A, NEVER_JOINED, "booted, and no worker came of it")
        assert A not in made.usable()
        assert any("NeverJoined" in words for words in made.waits())
        later(made, pause_s + 0.1)
        assert A in made.usable()
    made.joined(A)
    assert made.failures == {}
    made.failed(B, "InsufficientInstanceCapacity", "none")
    made.joined(B)
    assert B not in made.usable()


def test_a_quota_holds_for_all_pools_of_the_type() -> None:
    made = market()
    made.failed(A, "MaxSpotInstanceCountExceeded", "64 are running")
    assert made.usable() == [DEAR]
    made.failed(DEAR, "InsufficientInstanceCapacity", "none")
    assert made.free() == 0
    assert "MaxSpotInstanceCountExceeded (64 are running)" in made.why_nothing()
    assert "the next is tried in 10 s" in made.why_nothing()


def test_a_pool_that_is_advised_against_is_used_where_there_is_no_other() -> None:
    made = market(instance_types=["g5.xlarge"])
    made.advised_against(A)
    assert made.usable() == [B]
    made.failed(B, "InsufficientInstanceCapacity", "none")
    assert made.usable() == [A]


def test_pools_whose_instances_are_taken_back_soon_are_dearer() -> None:
    made = market(boot_s=90.0)
    for _ in range(4):
        made.held(A, 120.0, interrupted=True)
        made.held(B, 7200.0, interrupted=True)
    assert made.usable()[0] == B
    assert made.expected_life_s() == 7200.0


def test_nothing_is_offered_that_the_cap_does_not_pay_for() -> None:
    made = market(usd_max=1.0, usd_per_gpu_hour_max=1.0, boot_s=0.0)
    assert made.free() == 4
    made.spent_usd = lambda: 0.999
    assert made.free() == 0
    assert "usd_max = $1 pays for no other instance: $1.00 are spent" in made.why_nothing()
    made.spent_usd = lambda: 0.98
    assert made.free() == 2
    made.take("asked")
    assert made.free() == 1
    made.capped = True
    assert made.free() == 0


@given(
    usd_max=st.floats(0.05, 3.0),
    spent=st.floats(0.0, 1.0),
    began=st.lists(st.tuples(st.sampled_from([A, B, DEAR]), st.floats(0.0, 20_000.0)), max_size=4),
    risen=st.floats(0.5, 3.0),
    risen_at_s=st.floats(0.0, 20_000.0),
)
def test_whoever_gets_notice_when_the_market_says_so_costs_no_more_than_the_cap(
    usd_max: float, spent: float, began: list[tuple[SpotPool, float]], risen: float, risen_at_s: float
) -> None:
    """Whatever runs for whatever time when the cap comes near, hours at other prices included; new ones, too."""
    now_s = 20_000.0
    made = market(usd_max=usd_max, poll_s=5.0, boot_s=0.0, max_workers=10)
    made.priced({pool: [PricePoint(risen_at_s, usd * risen)] for pool, usd in USD.items()})
    made.now_s, made.spent_usd = (lambda: now_s), (lambda: spent)
    made.running = {f"{n}": Running(pool, at_s) for n, (pool, at_s) in enumerate(began)}
    left_s = made.cap_left_s()
    if left_s is None:
        assert made.committed_usd(made.notice_s + 5.0) <= usd_max
    elif made.committed_usd(0.0) <= usd_max:
        assert made.committed_usd(left_s) <= usd_max
    for number in range(made.free()):
        made.running[f"new {number}"] = Running(max(USD, key=made.usd_now), now_s)
        assert made.committed_usd(made.notice_s) <= usd_max


def test_an_hour_costs_what_it_cost_at_its_beginning_or_costs_now() -> None:
    made = market()
    made.priced({A: [PricePoint(5000.0, 0.9)]})
    for now_s, usd in ((4000.0, 0.4), (5100.0, 0.9), (9000.0, 0.9)):
        made.now_s = lambda now_s=now_s: now_s
        assert made.usd_per_hour_most(Running(A, 1000.0)) == usd
    made.now_s = lambda: 8200.0
    assert made.bill_usd(Running(A, 1000.0), 3600.0) == pytest.approx(0.4 + 0.4 + 0.9)
    assert made.offer().usd_per_gpu_hour_most == 3.0


@given(
    st.floats(0, 1e6), st.floats(0, 50_000), st.lists(st.tuples(st.floats(0, 1e6), st.floats(0.01, 100)), max_size=6)
)
def test_a_bill_lies_between_the_lowest_and_the_highest_price(
    began_s: float, life_s: float, points: list[tuple[float, float]]
) -> None:
    prices = [PricePoint(0.0, 1.0), *(PricePoint(*one) for one in points)]
    usd = bill_usd(began_s, began_s + life_s, prices, interrupted=False)
    hours = max(60.0, life_s) / 3600
    low, high = min(p.usd_per_hour for p in prices), max(p.usd_per_hour for p in prices)
    assert low * hours * (1 - 1e-9) <= usd <= high * hours * (1 + 1e-9)


def test_what_ec2_takes_back_in_its_first_hour_costs_nothing() -> None:
    prices = [PricePoint(0.0, 2.0), PricePoint(3600.0, 4.0)]
    assert bill_usd(0, 3599, prices, interrupted=True) == 0
    assert bill_usd(0, 30, prices, interrupted=False) == pytest.approx(2 / 60)
    assert math.isclose(bill_usd(0, 5400, prices, interrupted=True), 2.0 + 2.0)
    assert math.isclose(bill_usd(1800, 1800 + 5400, prices, interrupted=False), 2.0 + 2.0)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, "image or launch_template"),
        ({"image": IMAGE, "launch_template": "lt-0123456789abcdef0"}, "found both"),
        ({"image": "ami-x"}, "image"),
        ({"image": IMAGE, "region": "mars"}, "region"),
        ({"image": IMAGE, "secret_prefix": "elastic/"}, "instance_profile"),
        ({"launch_template": "lt-0123456789abcdef0", "instance_profile": "p"}, "launch template's"),
    ],
)
def test_bad_settings_are_named(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        Ec2Settings.model_validate(settings)


def test_user_data_ends_the_instance_whatever_happens_and_quotes_what_it_is_given() -> None:
    script = user_data({"ELASTIC_RUN": "a'b $(x)", "ELASTIC_JOIN_TOKEN": "secret"}, ["pip install x"], 3600)
    lines = script.splitlines()
    assert lines[2] == "trap 'shutdown -h now' EXIT"
    assert lines.index("shutdown -h +30") < lines.index("pip install x || exit 1") < lines.index("shutdown -c")
    assert lines.index("shutdown -c") < lines.index("shutdown -h +60") < lines.index("elastic worker")
    assert "export ELASTIC_RUN='a'\"'\"'b $(x)'" in lines
    hidden = user_data({"ELASTIC_JOIN_TOKEN": "secret"}, [], 3600, secret="elastic/run/ec2-1", region="us-east-1")
    assert "=secret" not in hidden
    assert "--secret-id elastic/run/ec2-1" in hidden
    with pytest.raises(UserDataTooLarge, match=str(LIMIT_BYTES)):
        user_data({}, ["x" * LIMIT_BYTES], 3600)
