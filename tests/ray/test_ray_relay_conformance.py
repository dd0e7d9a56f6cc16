"""The relay `ray` on a real cluster: the conformance suite of relays, by the client and from a node."""

from collections.abc import Iterator

import pytest

from benchmarks._ray_nodes import RayNodes
from elastic.weights.relay import Relay
from providers.ray_connection import NODE_VARIABLE
from tests.ray.test_ray_relay import opened
from tests.weights.test_relay import (  # noqa: F401
    test_a_blob_does_not_change,
    test_a_blob_is_read_back_whole,
    test_a_deleted_blob_is_gone_and_its_key_free,
    test_a_key_cannot_leave_the_relay,
    test_a_range_is_a_slice,
    test_an_empty_blob_is_a_blob,
    test_keys_are_listed_by_prefix_and_sorted,
    test_of_concurrent_writers_one_wins_whole,
    test_what_is_not_a_blob_is_not_found,
)

pytestmark = [pytest.mark.ray, pytest.mark.timeout(900)]


@pytest.fixture(scope="module", params=["client", "node"])
def connected(request: pytest.FixtureRequest, shared_nodes: RayNodes) -> Iterator[RayNodes]:
    """With a connection that all relays of this process share, as long as there is one: Ray takes seconds for each."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "node":
            patch.setenv(NODE_VARIABLE, shared_nodes.cluster.address)
        first = opened(shared_nodes)
        assert first.list_keys() == []
        yield shared_nodes
        first.close()
        first.close()


@pytest.fixture
def relay(connected: RayNodes) -> Iterator[Relay]:
    relay = opened(connected)
    yield relay
    for key in relay.list_keys():
        relay.delete(key)
    relay.close()
