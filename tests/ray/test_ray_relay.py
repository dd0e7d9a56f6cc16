"""The relay `ray` on a real cluster: the conformance suite of relays, by the client and from a node."""

import contextlib
import itertools
import os
import time
from collections.abc import Iterator

import pytest

from benchmarks._ray_nodes import RayNodes
from elastic.weights.errors import RelayError
from elastic.weights.relay import Relay, open_relay
from providers.ray_connection import NAMESPACE, ray
from providers.ray_relay import NODE_VARIABLE, RayRelay
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

PATIENCE_S = 120.0
_numbers = itertools.count()


def unused(nodes: RayNodes) -> str:
    """The URL of a relay that nobody has used yet."""
    return f"{nodes.address}/test-{os.getpid()}-{next(_numbers)}"


def opened(nodes: RayNodes) -> Relay:
    return open_relay(unused(nodes))


@pytest.fixture(params=["client", "node"])
def relay(request: pytest.FixtureRequest, nodes: RayNodes, monkeypatch: pytest.MonkeyPatch) -> Iterator[Relay]:
    if request.param == "node":
        monkeypatch.setenv(NODE_VARIABLE, nodes.cluster.address)
    relay = opened(nodes)
    yield relay
    for key in relay.list_keys():
        relay.delete(key)
    relay.close()
    relay.close()


def test_what_the_client_puts_a_node_reads(nodes: RayNodes, monkeypatch: pytest.MonkeyPatch) -> None:
    content, url = os.urandom(3 << 20), unused(nodes)
    with contextlib.closing(open_relay(url)) as far:
        far.put("versions/1/blob", content[:100], content[100:])
    assert isinstance(far, RayRelay)
    monkeypatch.setenv(NODE_VARIABLE, nodes.cluster.address)
    with contextlib.closing(open_relay(url)) as near:
        assert near.get("versions/1/blob") == content
        assert near.get("versions/1/blob", 5000, 70) == content[5000:5070]
        near.delete("versions/1/blob")


def until_no_actor_stands(relay: Relay) -> None:
    assert isinstance(relay, RayRelay)
    deadline_s = time.monotonic() + PATIENCE_S
    while stands(relay):
        assert time.monotonic() < deadline_s
        time.sleep(0.2)


def stands(relay: RayRelay) -> bool:
    return {"name": relay.name, "namespace": NAMESPACE} in ray().util.list_named_actors(all_namespaces=True)


def test_a_relay_without_blobs_leaves_no_actor(nodes: RayNodes) -> None:
    with contextlib.closing(opened(nodes)) as relay:
        assert relay.list_keys() == []
        relay.put("k", b"one")
        assert isinstance(relay, RayRelay)
        assert stands(relay)
        relay.delete("k")
        until_no_actor_stands(relay)
        assert relay.list_keys() == []
        relay.put("k", b"two")
        assert relay.get("k") == b"two"
        relay.delete("k")


def test_blobs_of_a_run_that_never_comes_back_do_not_stay(nodes: RayNodes) -> None:
    with contextlib.closing(RayRelay(unused(nodes), unused_s=2.0)) as relay:
        relay.put("k", b"one")
        until_no_actor_stands(relay)
        assert relay.list_keys() == []


def test_a_cluster_that_is_not_there_is_named() -> None:
    with (
        contextlib.closing(open_relay("ray://127.0.0.1:9/x")) as relay,
        pytest.raises(RelayError, match=r"ray://127.0.0.1:9/x: the Ray cluster at .* does not answer .*is its head up"),
    ):
        relay.list_keys()


@pytest.mark.parametrize("query", ["answer_timeout_s=", "answer_timeout_s=0", "answer_timeout_s=inf", "patience=9"])
def test_what_a_url_may_say_is_told(query: str) -> None:
    with pytest.raises(RelayError, match=r"expected ray://HOST:PORT/NAME, and of \?name=value only answer_timeout_s"):
        open_relay(f"ray://127.0.0.1:9/x?{query}")
