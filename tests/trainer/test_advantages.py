import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elastic.config import ConfigError, LossConfig, TrainerConfig, validate
from elastic.protocol.wire import TrajectoryData
from elastic.testing.trajectories import PlainTrajectory
from elastic.worker.trainer.advantages import group_advantages, overlong_penalty
from elastic.worker.trainer.batches import advantages_of

EPSILON = 1e-6
PLAIN = LossConfig.model_validate({})
rewards = st.lists(st.floats(-10, 10), min_size=2, max_size=16)


@given(rewards)
def test_advantages_have_no_mean_and_unit_deviation(values: list[float]):
    advantages = torch.tensor(group_advantages(values, PLAIN), dtype=torch.float64)
    assert len(advantages) == len(values)
    assert abs(advantages.mean()) < 1e-6
    deviation = torch.tensor(values, dtype=torch.float64).std().item()
    assert not advantages.any() or advantages.std().item() == pytest.approx(deviation / (deviation + EPSILON))


@pytest.mark.parametrize("keys", [{}, {"norm_adv_by_std_in_grpo": False}, {"adv_estimator": "rloo"}], ids=str)
@given(values=rewards)
def test_advantages_rank_as_rewards_do(keys: dict[str, object], values: list[float]):
    advantages = group_advantages(values, LossConfig.model_validate(keys))
    order = sorted(range(len(values)), key=values.__getitem__)
    assert all(advantages[a] <= advantages[b] for a, b in itertools.pairwise(order))


@given(st.floats(-10, 10), st.floats(0, 1e-3), st.integers(2, 9))
def test_a_small_difference_is_no_large_advantage(value: float, difference: float, size: int):
    advantages = group_advantages([value] * (size - 1) + [value + difference], PLAIN)
    assert max(map(abs, advantages)) <= difference / EPSILON
    assert difference > 0.9 * EPSILON or not any(advantages)


def test_undivided_advantages_are_in_rewards():
    assert group_advantages([1.0, 0.0, 0.0, 0.0], LossConfig.model_validate({"norm_adv_by_std_in_grpo": False})) == [
        0.75, -0.25, -0.25, -0.25,
    ]  # fmt: skip


@given(rewards)
def test_leaving_one_out_compares_it_with_the_mean_of_the_others(values: list[float]):
    found = group_advantages(values, LossConfig.model_validate({"adv_estimator": "rloo"}))
    if max(values) - min(values) <= EPSILON:
        assert not any(found)
        return
    others = [sum(values[:place] + values[place + 1 :]) / (len(values) - 1) for place in range(len(values))]
    assert found == pytest.approx([own - other for own, other in zip(values, others, strict=True)], abs=1e-9)


class TestLongTrajectories:
    KEYS = TrainerConfig.model_validate({"overlong_buffer": {"len": 4, "penalty_factor": 0.5, "max_resp_len": 10}})

    @pytest.mark.parametrize(("tokens", "penalty"), [(1, 0), (6, 0), (7, -0.125), (8, -0.25), (10, -0.5), (14, -1.0)])
    def test_the_penalty_grows_over_the_buffer(self, tokens: int, penalty: float):
        assert self.KEYS.overlong_buffer is not None
        assert overlong_penalty(tokens, self.KEYS.overlong_buffer) == penalty

    def test_it_is_of_all_of_a_members_branches_and_gives_a_signal_by_itself(self):
        def row(name: str, sampled: int) -> TrajectoryData:
            return PlainTrajectory(name, [1] * (sampled + 1), [0] + [1] * sampled, [-1.0] * (sampled + 1),
                                   [0] * (sampled + 1), 1.0).packed()  # fmt: skip

        branches = [row("a", 5), row("a", 5), row("b", 5)]
        found = advantages_of(branches, self.KEYS)
        assert found[0] == found[1] < 0 < found[2]
        assert not any(advantages_of(branches, TrainerConfig.model_validate({})))

    def test_a_buffer_that_is_longer_than_the_longest_is_refused(self):
        with pytest.raises(ConfigError, match=r"len must be at most max_resp_len = 10, .*found 11"):
            validate(TrainerConfig, {"overlong_buffer": {"len": 11, "max_resp_len": 10}}, "c", "trainer")


def test_a_mode_without_its_factor_and_a_factor_without_its_mode_are_refused():
    mode = "seq-mean-token-sum-norm"
    for keys, found in (({"loss_agg_mode": mode}, "no factor"), ({"loss_scale_factor": 4096.0}, "4096")):
        with pytest.raises(ConfigError, match=f"belong together .found {found} and"):
            validate(TrainerConfig, keys, "c", "trainer")
