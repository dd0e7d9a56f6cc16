"""The suite of providers, and what is special about offices: their mornings."""

import pytest
from elastic_office.provider import OfficeMarket, OfficeProvider, OfficeSettings

from elastic.core.types import NS_PER_S
from elastic.testing.provider_conformance import *  # noqa: F403
from elastic.testing.providers import *  # noqa: F403
from elastic.testing.providers import CAPACITY


def settings(**own: float) -> OfficeSettings:
    return OfficeSettings.model_validate({"max_workers": CAPACITY, **own})


@pytest.fixture
def make_provider():
    return lambda context: OfficeProvider("provider", settings(), context)


def test_all_is_taken_back_in_the_morning_and_free_in_the_evening() -> None:
    market = OfficeMarket("office", settings(night_s=10.0, day_s=20.0, notice_s=2.0))
    market.take("lease-1")
    assert market.offer().available == 1
    (taken,) = market.advance(10 * NS_PER_S)
    assert (taken.lease, taken.deadline_ns) == ("lease-1", 12 * NS_PER_S)
    market.forget("lease-1")
    assert (market.offer().available, market.next_ns) == (0, 30 * NS_PER_S)
    assert list(market.advance(30 * NS_PER_S)) == []
    assert (market.offer().available, market.next_ns) == (2, 40 * NS_PER_S)
