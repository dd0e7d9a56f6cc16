import numpy as np
import pytest


@pytest.fixture(scope="session")
def rl_update():
    """(old, new, tile ends): float32 masters that AdamW moves by about the learning rate, rounded to bf16."""
    rng = np.random.default_rng(0)
    ends = np.array([300_000, 300_007, 400_000])
    masters = rng.normal(0, 0.02, ends[-1]).astype(np.float32)
    step = (2e-6 * rng.normal(0, 1, ends[-1])).astype(np.float32)
    return _bf16(masters), _bf16(masters + step), ends


def _bf16(values):
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
