"""How long an iteration takes on a modelled device, and each of its parts, so that its time can be shared out."""

from typing import NamedTuple

from elastic.config import PacingConfig
from elastic.core.profiles import decode_step_s


class IterationLoad(NamedTuple):
    """Tokens that one iteration computes. A decoding sequence feeds one; recompute is prefill paid for again."""

    decode: int
    prefill: int
    recompute: int


class Costs(NamedTuple):
    """The cost of each part of an iteration, in seconds where they are known; only proportions count where not."""

    decode: float
    prefill: float
    recompute: float


def costs(load: IterationLoad, pacing: PacingConfig) -> Costs:
    return Costs(
        decode=decode_step_s(load.decode, pacing.decode_step_s),
        prefill=load.prefill / pacing.prefill_tokens_per_s,
        recompute=load.recompute / pacing.prefill_tokens_per_s,
    )
