"""Markets without time of their own: whoever drives them, a place is leased once, and the past can be told again."""

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic.core.types import NS_PER_S, EndCause, LeaseId
from providers.base import ProviderSettings
from providers.markets import (
    CapacityUnavailable,
    Market,
    ReservedMarket,
    ServerlessMarket,
    ServerlessSettings,
    ServingMarket,
    SpotMarket,
    SpotSettings,
)
from providers.serving_messages import ServingSettings
from tests.seeds import examples

MOST = 3
TRACE = "0,add,a\n0,add,b\n1000,remove,a\n1500,add,c\n2000,add,a\n2500,remove,b\n3000,remove,c\n3500,add,b\n"


class Host:
    def __init__(self, kv_used_share: float) -> None:
        self.kv_used_share = kv_used_share
        self.lendable = True


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("market") / "market.csv"
    path.write_text(TRACE)
    return str(path)


def spot(trace: str) -> SpotMarket:
    return SpotMarket("m", SpotSettings.model_validate({"trace": trace, "max_workers": MOST, "repeat": True}))


def serverless(_: str) -> ServerlessMarket:
    return ServerlessMarket("m", ServerlessSettings.model_validate({"max_workers": MOST, "overlap": 1}))


def reserved(_: str) -> ReservedMarket:
    return ReservedMarket("m", ProviderSettings.model_validate({"max_workers": MOST}))


def serving(_: str) -> ServingMarket:
    hosts = {f"host-{n}": Host(n / 10) for n in range(MOST + 1)}
    return ServingMarket("m", ServingSettings.model_validate({"max_workers": MOST}), hosts)


MARKETS: dict[str, Callable[[str], Market]] = {
    "spot": spot,
    "serverless": serverless,
    "reserved": reserved,
    "serving": serving,
}
acts = st.lists(st.sampled_from(["take", "forget", "bar", "advance"]), max_size=60)


@pytest.mark.parametrize("kind", MARKETS)
@given(acts=acts)
def test_what_is_offered_is_had_and_no_place_is_had_twice(kind: str, trace: str, acts: list[str]) -> None:
    market = MARKETS[kind](trace)
    places: dict[LeaseId, str] = {}
    barred = 0
    now_ns = 0
    for number, act in enumerate(acts):
        offer = market.news(again=True)
        assert offer is not None
        assert 0 <= offer.available <= MOST
        assert market.news() is None
        if act == "take":
            if offer.available + offer.replacements == 0:
                with pytest.raises(CapacityUnavailable, match="m"):
                    market.take(f"lease-{number}")
            else:
                places[f"lease-{number}"] = market.take(f"lease-{number}")
            assert len(places) <= MOST + market.overlap()
            named = [place for place in places.values() if place]
            assert len(set(named)) == len(named)
        elif act == "advance":
            now_ns += NS_PER_S // 2
            for taken in market.advance(now_ns):
                assert taken.ending.cause is EndCause.PREEMPTED
                market.forget(taken.lease)
                del places[taken.lease]
            assert market.next_ns is None or market.next_ns > now_ns
        elif places:
            lease, _ = places.popitem()
            market.forget(lease, barred=act == "bar")
            barred += act == "bar"
    if kind == "reserved":
        assert market.free() == MOST - len(places) - barred
    if kind == "serving":
        assert market.free() == MOST + 1 - len(places) - barred


@settings(max_examples=examples(30, 200))
@given(acts=st.lists(st.sampled_from(["take", "forget", "advance"]), max_size=60), unheard=st.integers(0, 12))
def test_a_market_that_is_told_what_is_leased_takes_it_back_as_it_would_have(
    trace: str, acts: list[str], unheard: int
) -> None:
    """The heir of a process that died hears in one go what the market has done since, and goes on with the same."""
    market, heir = spot(trace), spot(trace)
    leases: dict[LeaseId, tuple[int, str]] = {}
    now_ns = 0
    for number, act in enumerate(acts):
        if act == "take" and market.free():
            lease = f"lease-{number}"
            leases[lease] = (market.at_ns, market.take(lease))
        elif act == "forget" and leases:
            lease, _ = leases.popitem()
            market.forget(lease)
        elif act == "advance":
            now_ns += NS_PER_S // 2
            for taken in market.advance(now_ns):
                market.forget(taken.lease)
                del leases[taken.lease]
    now_ns += unheard * NS_PER_S // 2
    missed = []
    for lease, (at_ns, place) in sorted(leases.items(), key=lambda item: item[1][0]):
        missed += heir.advance(at_ns)
        heir.restore(lease, place)
    missed += heir.advance(now_ns)
    assert missed == list(market.advance(now_ns))
    assert heir.news() == market.news(again=True)
    assert heir.next_ns == market.next_ns
    later_ns = now_ns + 20 * NS_PER_S
    assert list(heir.advance(later_ns)) == list(market.advance(later_ns))
