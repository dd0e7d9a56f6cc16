import pytest

from elastic.config import PacingConfig
from elastic.engine.torch.pacing import IterationLoad, costs, decode_step_s


@pytest.mark.parametrize(
    ("batch", "expected"), [(0, 0.0), (1, 0.02), (2, 0.02), (3, 0.03), (4, 0.04), (6, 0.05), (8, 0.06), (16, 0.10)]
)
def test_decode_time_is_interpolated(batch, expected):
    assert decode_step_s(batch, {8: 0.06, 2: 0.02, 4: 0.04}) == pytest.approx(expected)


def test_one_profiled_batch_holds_for_all():
    assert decode_step_s(64, {8: 0.06}) == 0.06


def test_a_falling_profile_never_gives_negative_time():
    assert decode_step_s(100, {1: 0.05, 2: 0.01}) == 0.0


def test_modelled_costs_are_seconds():
    pacing = PacingConfig(prefill_tokens_per_s=1000, decode_step_s={4: 0.01})
    assert costs(IterationLoad(decode=4, prefill=20, recompute=50), pacing) == pytest.approx((0.01, 0.02, 0.05))
