"""What a run came to in each of its environments."""

from collections.abc import Sequence

import msgspec

from elastic.runtime.journal import GroupRow, TrajectoryRow
from elastic.runtime.status import EnvironmentStatus, mean_reward, success_rate


class EnvironmentUsage(msgspec.Struct, frozen=True, kw_only=True):
    """`groups` were begun. `finished` trajectories have a reward. Members that were `cut_off` ran still as their groups
    had enough. Trajectories were `begun_again` whose env workers had died. What these and those that were cut off had
    sampled, `lost_tokens`, was generated for nothing. None where that is not known.
    """

    environment: str
    groups: int | None
    groups_trained: int
    groups_dropped: int
    finished: int
    truncated: int
    failed: int
    cut_off: int | None
    begun_again: int | None
    lost_tokens: int | None
    success_rate: float | None
    mean_reward: float | None
    policy_tokens: int
    trained_tokens: int


def environments_of(
    trajectories: Sequence[TrajectoryRow], groups: Sequence[GroupRow], status: dict[str, EnvironmentStatus]
) -> list[EnvironmentUsage]:
    """Return the usage of each of the run's environments, in their order."""
    names = [*status, *(row.environment for row in trajectories), *(row.environment for row in groups)]
    return [_usage(name, trajectories, groups, status.get(name)) for name in dict.fromkeys(names) if name]


def _usage(
    name: str,
    trajectories: Sequence[TrajectoryRow],
    groups: Sequence[GroupRow],
    status: EnvironmentStatus | None,
) -> EnvironmentUsage:
    own = [row for row in trajectories if row.environment == name]
    of = [row for row in groups if row.environment == name]
    scored = [row for row in own if row.reward is not None and not row.cause]
    rewards = [row.reward or 0.0 for row in scored]
    return EnvironmentUsage(
        environment=name,
        groups=None if status is None else status.groups,
        groups_trained=sum(not row.dropped for row in of),
        groups_dropped=sum(bool(row.dropped) for row in of),
        finished=len(scored),
        truncated=sum(row.truncated for row in scored),
        failed=len(own) - len(scored) - sum(row.is_cut_off for row in own),
        cut_off=None if status is None else status.cut_off,
        begun_again=None if status is None else status.begun_again,
        lost_tokens=None if status is None else status.lost_tokens,
        success_rate=success_rate(rewards),
        mean_reward=mean_reward(rewards),
        policy_tokens=sum(row.policy_tokens for row in own),
        trained_tokens=sum(sum(row.tokens_by_age.values()) for row in of if not row.dropped),
    )
