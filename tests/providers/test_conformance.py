"""The suite that every provider passes, on all of ours that are on this machine."""

import pytest

from elastic.testing.provider_conformance import *  # noqa: F403
from elastic.testing.provider_conformance import MakeProvider
from tests.providers.conftest import provider_of

MACHINES = ["reserved", "trainer", "spot", "serving"]
"""Whose leases are of machines that can be told apart."""
KINDS = ["memory", "reserved", "trainer", "serverless", "spot", "serving", "pool"]
WITH_HOSTS = [
    "test_closing_at_once_leaves_nothing",
    "test_any_interleaving_answers_each_request_once_and_ends_each_grant_once",
]
"""What hosts show with every change."""

pytestmark = pytest.mark.usefixtures("stub_pool")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One promise alone is tried of hosts nightly: they take seconds to start."""
    often = metafunc.function.__name__ in WITH_HOSTS
    kinds = [pytest.param(kind, marks=[pytest.mark.nightly] * (kind == "serving" and not often)) for kind in KINDS]
    metafunc.parametrize("kind", kinds, indirect=True)


@pytest.fixture
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def make_provider(kind: str) -> MakeProvider:
    return lambda context: provider_of(kind, context)


@pytest.fixture
def leases_machines(kind: str) -> bool:
    return kind in MACHINES
