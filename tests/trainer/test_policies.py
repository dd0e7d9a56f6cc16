"""Members of a group are compared policy by policy: a policy's rewards are relative to those of the same policy."""

from hypothesis import given
from hypothesis import strategies as st

from elastic.config import LossConfig
from elastic.core.steps import Group
from elastic.protocol.sampled import Sampled
from elastic.protocol.wire import TrajectoryData
from elastic.worker.trainer.advantages import group_advantages
from elastic.worker.trainer.batches import advantages_of, by_member

KEYS = LossConfig.model_validate({})
POLICIES = ("", "solver", "critic")


def row(member: int, reward: float, policy: str = "", own: float | None = None, branch: int = 0) -> TrajectoryData:
    sampled = Sampled(reward=reward, policy=policy, policy_reward=own)
    return TrajectoryData(f"0/0/{member}", bytearray(), sampled, branch)


def test_a_zero_sum_game_has_an_advantage_for_each_side():
    rows = [row(n, 0.0, policy, sign * (n - 0.5)) for n in range(2) for policy, sign in (("solver", 1), ("critic", -1))]
    first, second, third, fourth = advantages_of(rows, KEYS)
    assert (first, second) == (-third, -fourth)
    assert first == -second != 0
    group = Group("0/0", 0, 0, {one.trajectory: 0.0 for one in rows})
    assert group.compared == [[0.0, 0.0]]
    for one in rows:
        group.by_policy.setdefault(one.trajectory, {})[one.sampled.policy] = one.sampled.worth
    assert group.compared == [[-0.5, 0.5], [0.5, -0.5]]


@given(
    st.lists(
        st.tuples(
            st.floats(-5, 5),
            st.dictionaries(st.sampled_from(POLICIES[1:]), st.floats(-5, 5)),
            st.lists(st.sampled_from(POLICIES), min_size=1, max_size=5),
        ),
        min_size=2,
        max_size=6,
    )
)
def test_each_member_counts_once_for_each_policy(members):
    """However many branches it has of it, which all have the same advantage."""
    rows = [
        row(number, reward, policy, own.get(policy), branch)
        for number, (reward, own, branches) in enumerate(members)
        for branch, policy in enumerate(branches)
    ]
    advantages = advantages_of(rows, KEYS)
    for policy in POLICIES:
        worth = {one.trajectory: one.sampled.worth for one in rows if one.sampled.policy == policy}
        if not worth:
            continue
        expected = dict(zip(worth, group_advantages(list(worth.values()), KEYS), strict=True))
        found = [
            (one.trajectory, advantage)
            for one, advantage in zip(rows, advantages, strict=True)
            if one.sampled.policy == policy
        ]
        assert all(advantage == expected[trajectory] for trajectory, advantage in found)
    assert by_member(rows) == {f"0/0/{number}": reward for number, (reward, _, _) in enumerate(members)}


def test_one_policy_is_compared_as_ever():
    rewards = [0.0, 1.0, 1.0]
    rows = [row(number, reward, branch=branch) for number, reward in enumerate(rewards) for branch in range(2)]
    ofs = group_advantages(rewards, KEYS)
    assert advantages_of(rows, KEYS) == [one for one in ofs for _ in range(2)]
