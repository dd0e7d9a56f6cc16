"""What each of the policies has done that agents name, in trajectories that were scored."""

from collections.abc import Sequence

import msgspec

from elastic.runtime.journal import TrajectoryRow


class PolicyUsage(msgspec.Struct, frozen=True, kw_only=True):
    """`trajectories` are those in which it has sampled, and `mean_reward` is of what it was worth in each of them: its
    own reward there, else the trajectory's."""

    policy: str
    trajectories: int
    turns: int
    tokens: int
    mean_reward: float


def policies_of(scored: Sequence[TrajectoryRow], served_name: str, policies: Sequence[str]) -> list[PolicyUsage]:
    """Return the usage of the model's own name and of each of the `policies` that has sampled; none where there are no
    further names."""
    if not policies:
        return []
    rewards: dict[str, list[float]] = {}
    turns, tokens = dict[str, int](), dict[str, int]()
    for row in scored:
        worth: dict[str, float] = {}
        for sampled in row.all_sampled():
            turns[sampled.policy] = turns.get(sampled.policy, 0) + len(sampled.spans)
            tokens[sampled.policy] = tokens.get(sampled.policy, 0) + sampled.tokens
            worth[sampled.policy] = (row.reward or 0.0) if sampled.policy_reward is None else sampled.policy_reward
        for policy, reward in worth.items():
            rewards.setdefault(policy, []).append(reward)
    return [
        PolicyUsage(
            policy=policy or served_name,
            trajectories=len(rewards[policy]),
            turns=turns[policy],
            tokens=tokens[policy],
            mean_reward=sum(rewards[policy]) / len(rewards[policy]),
        )
        for policy in ("", *policies)
        if policy in rewards
    ]
