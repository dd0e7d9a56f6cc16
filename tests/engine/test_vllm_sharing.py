"""Which rollouts make room for serving in one vLLM, and which do not begin."""

from hypothesis import given
from hypothesis import strategies as st

from elastic.engine.vllm.sharing import SharingRequest, decide

REQUESTS = st.lists(st.tuples(st.booleans(), st.integers(1, 12)), max_size=12)


@given(
    running=REQUESTS, waiting=REQUESTS, total=st.integers(12, 80), share=st.integers(1, 80), places=st.integers(1, 12)
)
def test_serving_lacks_nothing_that_rollouts_hold(running, waiting, total, share, places):
    running = [SharingRequest(f"r{i}", *each) for i, each in enumerate(running[:places])]
    waiting = [SharingRequest(f"w{i}", *each) for i, each in enumerate(waiting)]
    by_name = {request.name: request for request in (*running, *waiting)}
    free = max(0, total - sum(request.blocks for request in running))
    found = decide(running, waiting, free_blocks=free, rollout_blocks=min(share, total), places=places)

    assert all(by_name[name].rollout for name in (*found.preempted, *found.withheld))
    assert set(found.preempted) <= {request.name for request in running}
    assert set(found.withheld) <= set(found.preempted) | {request.name for request in waiting}

    left = [request for request in running if request.name not in found.preempted]
    rollouts_left = [request for request in left if request.rollout]
    served = [request for request in waiting if not request.rollout]
    free += sum(by_name[name].blocks for name in found.preempted)
    if rollouts_left:
        # Whatever serving still lacks is held by serving itself.
        assert free >= sum(request.blocks for request in served)
        assert places - len(left) >= len(served) or not served

    beginning = [request for request in waiting if request.rollout and request.name not in found.withheld]
    held = sum(request.blocks for request in (*rollouts_left, *beginning))
    assert held <= min(share, total) or len(rollouts_left) + len(beginning) == 1
    if served:
        assert not beginning


@given(waiting=st.lists(st.integers(1, 40), min_size=1, max_size=5))
def test_a_rollout_always_runs_where_nothing_else_does(waiting):
    requests = [SharingRequest(f"w{i}", True, blocks) for i, blocks in enumerate(waiting)]
    found = decide([], requests, free_blocks=40, rollout_blocks=10, places=4)
    assert requests[0].name not in found.withheld
    assert not found.preempted


def test_the_newest_rollout_goes_first():
    running = [SharingRequest("old", True, 4), SharingRequest("user", False, 4), SharingRequest("new", True, 4)]
    waiting = [SharingRequest("second user", False, 3), SharingRequest("third rollout", True, 1)]
    found = decide(running, waiting, free_blocks=0, rollout_blocks=20, places=8)
    assert found.preempted == ["new"]
    assert found.withheld == ["new", "third rollout"]
