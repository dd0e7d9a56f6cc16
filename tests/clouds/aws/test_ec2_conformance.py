"""The provider `ec2` passes the suite that every provider passes, over HTTP and on a bad day."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from elastic.testing.provider_conformance import *  # noqa: F403
from elastic.testing.providers import *  # noqa: F403
from elastic.testing.providers import CAPACITY
from providers.base import ProviderContext
from providers.ec2 import Ec2Provider
from providers.ec2_market import Ec2Settings
from tests.clouds.aws_server.cloud import Cloud
from tests.clouds.aws_server.proxy import Faults

pytestmark = pytest.mark.clouds


@pytest.fixture(params=["ec2", "ec2 on a bad day"])
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def make_provider(
    kind: str, aws: Cloud | None, real: dict[str, Any] | None
) -> Iterator[Callable[[ProviderContext], Any]]:
    made: list[Ec2Provider] = []
    if aws is not None and kind == "ec2 on a bad day":
        aws.proxy.faults = Faults(error=0.05, throttled=0.03, torn_before=0.03, torn_after=0.03, late=0.05)

    def make(context: ProviderContext) -> Ec2Provider:
        given = {**(real or {}), "max_workers": CAPACITY} if aws is None else aws.settings(max_workers=CAPACITY)
        made.append(Ec2Provider("provider", Ec2Settings.model_validate(given), context))
        return made[-1]

    yield make
    if aws is None:
        left = [one for provider in made for one in provider.api.instances() if one.lives]
    else:
        left = [one for one in aws.living() if one.tags.get("elastic:provider") == "provider"]
    assert left == [], "an orphan, by the cloud's own record"
