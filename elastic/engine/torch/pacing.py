"""How long an iteration takes on a modelled device, and each of its parts, so that its time can be shared out."""

from typing import NamedTuple

from elastic.config import PacingConfig
from elastic.core.profiles import decode_step_s
from elastic.core.types import Account

SMALLEST_COST = 1e-9
"""A curve that falls, as noise makes it, would have some work cost nothing, and an iteration be in no account."""


class IterationLoad(NamedTuple):
    """Tokens that one iteration computes. A decoding sequence feeds one; recompute is prefill paid for again."""

    decode: int
    prefill: int
    recompute: int


NO_LOAD = IterationLoad(0, 0, 0)


class Costs(NamedTuple):
    """The cost of each part of an iteration, in seconds where they are known; only proportions count where not."""

    decode: float
    prefill: float
    recompute: float


def by_account(load: IterationLoad, costs: Costs) -> dict[Account, float]:
    """What each kind of work of this load costs; no kind that there is costs nothing."""
    accounts = zip((Account.DECODE, Account.PREFILL, Account.RECOMPUTE), load, costs, strict=True)
    return {account: max(cost, SMALLEST_COST) for account, tokens, cost in accounts if tokens}


def costs(load: IterationLoad, pacing: PacingConfig) -> Costs:
    return Costs(
        decode=decode_step_s(load.decode, pacing.decode_step_s),
        prefill=load.prefill / pacing.prefill_tokens_per_s,
        recompute=load.recompute / pacing.prefill_tokens_per_s,
    )
