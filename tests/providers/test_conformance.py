"""The suite that every provider passes, on all of ours that are on this machine."""

import pytest

from elastic.testing.provider_conformance import *  # noqa: F403
from elastic.testing.provider_conformance import MakeProvider
from tests.providers.conftest import provider_of

MACHINES = ["reserved", "trainer", "spot", "serving"]
"""Whose leases are of machines that can be told apart."""
KINDS = ["memory", "reserved", "trainer", "serverless", "spot", "serving", "pool"]

pytestmark = pytest.mark.usefixtures("stub_pool")


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def make_provider(kind: str) -> MakeProvider:
    return lambda context: provider_of(kind, context)


@pytest.fixture
def leases_machines(kind: str) -> bool:
    return kind in MACHINES
