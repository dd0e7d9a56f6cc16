"""Small worlds of many jobs full of faults: every invariant after every event, replays, and the same seed again."""

import pytest

from elastic.cluster.history import cluster_digest, replay
from elastic.sim.jobs import worlds_of_jobs
from policies.clusters import CLUSTER_POLICIES


@pytest.mark.parametrize("first", range(0, 16, 4))
def test_worlds_of_jobs_end_with_all_invariants_kept(first: int) -> None:
    for seed in range(first, first + 4):
        worlds_of_jobs(CLUSTER_POLICIES, seed).run()


def test_the_same_seed_gives_the_same_history_and_a_replay_the_same_state() -> None:
    one, other = worlds_of_jobs(CLUSTER_POLICIES, 3), worlds_of_jobs(CLUSTER_POLICIES, 3)
    one.run()
    other.run()
    assert list(one.journal) == list(other.journal)
    assert cluster_digest(one.cluster) == cluster_digest(other.cluster)
    assert cluster_digest(replay(one.journal, one.cluster.policies)) == cluster_digest(one.cluster)
