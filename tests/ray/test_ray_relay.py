"""The relay `ray` on a real cluster: what it leaves, what ends it, and what it says of a cluster that is not there."""

import contextlib
import itertools
import os
import time

import pytest

from benchmarks._ray_nodes import RayNodes
from elastic.weights.errors import RelayError
from elastic.weights.relay import Relay, open_relay
from providers.ray_connection import NAMESPACE, NODE_VARIABLE, ray
from providers.ray_relay import RayRelay

pytestmark = [pytest.mark.ray, pytest.mark.timeout(900)]

PATIENCE_S = 240.0
_numbers = itertools.count()


def unused(nodes: RayNodes) -> str:
    """The URL of a relay that nobody has used yet."""
    return f"{nodes.address}/test-{os.getpid()}-{next(_numbers)}?answer_timeout_s={PATIENCE_S:g}"


def opened(nodes: RayNodes) -> Relay:
    return open_relay(unused(nodes))


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
