"""The trainer hears of each row whether a limit has ended its trajectory."""

import pytest

from elastic.protocol.sampled import Sampled, SampledBranch
from elastic.runtime.episodes import RolloutTrajectory


@pytest.mark.parametrize("truncated", [True, False])
def test_every_branch_of_a_trajectory_is_as_truncated_as_that_is(truncated: bool) -> None:
    branches = [SampledBranch(1, bytearray(8), Sampled())]
    episode = RolloutTrajectory("0/0/0", 0, 0, truncated=truncated, branches=branches)
    assert [row.sampled.truncated for row in episode.data()] == [truncated] * 2
