"""Nodes that a pool asks a cluster for: which are asked for, lost and given back, and what is told of them."""

from collections.abc import Collection, Mapping

from elastic.pool.node_requests import AskNode, GiveNodeBack, LoseNode, NodeRequest, NodeRequests, PoolNodesSeen

S = 1_000_000_000
NODES = ("rollout-1", "rollout-2")


def requests() -> NodeRequests:
    return NodeRequests(NODES, lambda failures: failures * S)


def seen(
    tickets: Mapping[str, int], there: Collection[str] = (), up: Collection[str] = (), drained: Collection[str] = ()
) -> PoolNodesSeen:
    return PoolNodesSeen(tickets=tickets, there=there, up=up, drained=drained)


def test_what_is_missing_is_asked_for_once_and_waits_with_a_reason() -> None:
    pool, one = requests(), NodeRequest("rollout-1", 1, waits="room")
    assert pool.decide([], seen({}), 0) == [AskNode("rollout-1"), AskNode("rollout-2")]
    tickets = {"rollout-1": 1, "rollout-2": 1}
    assert pool.decide([one, NodeRequest("rollout-2", 1)], seen(tickets), S) == []
    assert pool.told(seen(tickets), S) == {"rollout-1": "it waits for room", "rollout-2": "its node agent starts"}
    up = seen(tickets, NODES, NODES)
    assert pool.decide([NodeRequest(node, 1) for node in NODES], up, S) == []
    assert pool.told(up, S) == {}


def test_a_lost_machine_is_a_lost_node_and_another_one_is_asked_for_at_once_and_then_ever_later() -> None:
    pool, tickets = requests(), {"rollout-1": 1, "rollout-2": 1}
    other = NodeRequest("rollout-2", 1)
    pool.decide([NodeRequest("rollout-1", 1), other], seen(tickets, NODES, NODES), 0)
    dead = NodeRequest("rollout-1", 1, ended="its machine is lost")
    assert pool.decide([dead, other], seen(tickets, NODES, NODES), S) == [
        LoseNode("rollout-1", "its machine is lost"),
        GiveNodeBack(dead),
        AskNode("rollout-1"),
    ]
    dead, rest = (
        NodeRequest("rollout-1", 2, ended="no devices"),
        seen({**tickets, "rollout-1": 2}, NODES[1:], NODES[1:]),
    )
    assert pool.decide([dead, other], rest, S) == [LoseNode("rollout-1", "no devices"), GiveNodeBack(dead)]
    assert pool.told(rest, S) == {"rollout-1": "it is asked for in 1 s; the last one: no devices"}
    assert pool.decide([other], rest, S) == []
    assert pool.decide([other], rest, 2 * S) == [AskNode("rollout-1")]


def test_a_request_that_the_cluster_forgot_or_that_counts_no_more_is_no_node_s() -> None:
    pool, tickets = requests(), {"rollout-1": 2, "rollout-2": 1}
    old, unknown = NodeRequest("rollout-1", 1), NodeRequest("rollout-9", 1)
    found = [NodeRequest("rollout-1", 2), old, unknown]
    assert pool.decide(found, seen(tickets, NODES, NODES), 0) == [
        GiveNodeBack(old),
        GiveNodeBack(unknown),
        LoseNode("rollout-2", "the cluster knows no request for it any more"),
        AskNode("rollout-2"),
    ]


def test_a_drained_node_goes_back_once_the_pool_has_let_it_go_and_is_not_asked_for_again() -> None:
    pool, tickets = requests(), {"rollout-1": 1, "rollout-2": 1}
    found = [NodeRequest(node, 1) for node in NODES]
    assert pool.decide(found, seen(tickets, NODES, NODES, drained=["rollout-1"]), 0) == []
    gone = seen(tickets, NODES[1:], NODES[1:], drained=["rollout-1"])
    assert pool.decide(found, gone, 0) == [GiveNodeBack(found[0])]
    assert pool.decide(found[1:], gone, 0) == []
    assert pool.told(gone, 0) == {}
    assert pool.decide(found[1:], seen(tickets, NODES[1:], NODES[1:]), 0) == [AskNode("rollout-1")]


def test_a_pool_that_stops_asks_for_nothing() -> None:
    assert requests().decide([], seen({}), 0, asks=False) == []
