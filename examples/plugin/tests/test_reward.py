"""The reward is a plain function of a finished trajectory."""

import pytest
from elastic_office.reward import few_tokens

TRAJECTORY = {
    "trajectory": "0/0/0",
    "token_ids": [10, 9, 3, 11, 2],
    "trained": [0, 0, 1, 0, 1],
    "seed": 1,
    "environment_settings": {},
    "environment_reward": 0.5,
    "settings": {},
}


def test_each_sampled_token_costs_a_little() -> None:
    assert few_tokens(TRAJECTORY) == pytest.approx(0.5 - 2 * 0.001)
    assert few_tokens({**TRAJECTORY, "settings": {"per_token": 0.1}}) == pytest.approx(0.3)
