"""Weights and rejections by hand, under verl's names; keys that cancel each other are refused."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elastic.config import ConfigError, TrainerConfig, validate
from elastic.worker.trainer.corrections import WeightBounds, importance_weights, rejected

SEQUENCES = torch.tensor([0, 0, 1, 1, 1])
LOG_RATIO = torch.tensor([0.1, 1.0, -0.2, 0.0, 0.4])
SUMS = (1.1, 1.1, 0.2, 0.2, 0.2)


@pytest.mark.parametrize(
    ("level", "threshold", "expected"),
    [
        ("token", 2.0, [math.exp(0.1), 2.0, math.exp(-0.2), 1.0, math.exp(0.4)]),
        ("token", "0.9_1.3", [math.exp(0.1), 0.0, 0.0, 1.0, 0.0]),
        ("sequence", 2.0, [2.0, 2.0, *[math.exp(0.2)] * 3]),
        ("sequence", "0.5_2", [0.0, 0.0, *[math.exp(0.2)] * 3]),
    ],
)
def test_weights_are_truncated_at_a_number_and_masked_outside_of_bounds(
    level: str, threshold: float | str, expected: list[float]
):
    found = importance_weights(LOG_RATIO, SEQUENCES, level, WeightBounds.of(threshold))
    torch.testing.assert_close(found, torch.tensor(expected))


K3 = [math.exp(one) - one - 1 for one in LOG_RATIO.tolist()]


@pytest.mark.parametrize(
    ("statistic", "threshold", "expected"),
    [
        ("token_k1", 2.0, [False, True, False, False, False]),
        ("token_k1", "0.9_2", [False, True, False, False, True]),
        ("token_k2", 0.07, [False, True, False, False, True]),
        ("token_k3", 0.5, [False, True, False, False, False]),
        ("seq_sum_k1", 2.0, [True] * 2 + [False] * 3),
        ("seq_sum_k1", 4.0, [False] * 5),
        ("seq_mean_k1", "0.6_1.1", [True] * 2 + [False] * 3),
        ("seq_mean_k3", sum(K3[:2]) / 2 - 0.01, [True] * 2 + [False] * 3),
        ("seq_sum_k3", sum(K3[2:]) - 0.01, [True] * 5),
        ("seq_sum_k2", 0.4, [True] * 2 + [False] * 3),
        ("seq_mean_k2", 0.2, [True] * 2 + [False] * 3),
        ("seq_max_k2", 0.1, [True] * 2 + [False] * 3),
        ("seq_max_k3", 0.05, [True] * 5),
    ],
)
def test_divergence_rejects_tokens_or_whole_sequences(statistic: str, threshold: float | str, expected: list[bool]):
    assert rejected(LOG_RATIO, SEQUENCES, statistic, threshold).tolist() == expected


@given(
    rows=st.lists(st.lists(st.floats(-3, 3), min_size=1, max_size=4), min_size=1, max_size=4),
    data=st.data(),
    statistic=st.sampled_from(["token_k1", "seq_sum_k1", "seq_mean_k3"]),
    level=st.sampled_from(["token", "sequence"]),
)
def test_what_becomes_of_a_sequence_is_its_own_matter(rows: list[list[float]], data, statistic: str, level: str):
    order = data.draw(st.permutations(range(len(rows))))

    def checked(places: list[int]) -> dict[int, list[tuple[float, bool]]]:
        values = torch.tensor([value for place in places for value in rows[place]])
        numbers = torch.tensor([number for number, place in enumerate(places) for _ in rows[place]])
        weights = importance_weights(values, numbers, level, WeightBounds.of("0.5_2"))
        out = rejected(values, numbers, statistic, 1.5)
        lengths = [len(rows[place]) for place in places]
        parts = zip(weights.split(lengths), out.split(lengths), strict=True)
        return {
            place: list(zip(w.tolist(), o.tolist(), strict=True)) for place, (w, o) in zip(places, parts, strict=True)
        }

    assert checked(list(range(len(rows)))) == checked(order)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"rollout_is": "token"}, "rollout_is needs bypass_mode = false"),
        ({"rollout_rs": "token_k1", "rollout_rs_threshold": 2.0}, "rollout_rs needs bypass_mode = false"),
        ({"rollout_is_threshold": "0.5_5"}, "needs rollout_is"),
        ({"bypass_mode": False, "rollout_rs": "token_k1"}, "belong together .found 'token_k1' and no threshold"),
        ({"bypass_mode": False, "rollout_rs_threshold": 2.0}, "belong together .found no statistic and 2.0"),
        (
            {"bypass_mode": False, "rollout_rs": "seq_mean_k3", "rollout_rs_threshold": "0.5_5"},
            "must be a number for seq_mean_k3",
        ),
        (
            {"bypass_mode": False, "rollout_rs": "seq_mean_k1", "rollout_rs_threshold": 0.5},
            "must be above 1 for seq_mean_k1",
        ),
        ({"rollout_is_threshold": 0.5}, "must be at least 1"),
        ({"rollout_is_threshold": "5_0.5"}, "low below 1 and high above it"),
        ({"rollout_is_threshold": "0.5-5"}, '"low_high"'),
        ({"reference": "somewhere"}, "nothing looks at it"),
        ({"reference": "", "kl_coefficient": 0.1}, "reference: must be a path"),
        ({"loss": "distillation"}, "needs reference"),
        ({"loss": "ppo"}, "must be one of grpo, gspo, cispo, distillation, or code"),
    ],
    ids=str,
)
def test_keys_that_cancel_each_other_are_refused(keys: dict[str, object], words: str):
    with pytest.raises(ConfigError, match="trainer.*" + words):
        validate(TrainerConfig, keys, "c", "trainer")
