"""Which faults the server injects, seeded, so that a series of calls meets the same ones each time."""

import random
from collections.abc import Sequence

import msgspec


class Faults(msgspec.Struct, frozen=True, kw_only=True):
    """Shares of calls that are met, in [0, 1]; `rpcs` names those that `unavailable` and `torn` may meet.

    - `unavailable`: refused before anything has happened.
    - `torn`: carried out, but answered as if it had not been.
    - `internal_failure`: an input's outcome is a failure of the platform's, whatever it came to.
    - `lost_output`: a result that never arrives.
    - `slow_start_s`: so long a container takes to start.
    - `unlisted_s`: so long a new call is not listed.
    - `late_s`: so late an answer to `rpcs` is.
    """

    seed: int = 0
    rpcs: Sequence[str] = (
        "FunctionMap",
        "FunctionGetOutputs",
        "FunctionCallCancel",
        "FunctionGet",
        "FunctionBindParams",
        "QueueGet",
        "QueuePut",
        "TaskGetInfo",
    )
    unavailable: float = 0.0
    torn: float = 0.0
    internal_failure: float = 0.0
    lost_output: float = 0.0
    slow_start_s: float = 0.0
    unlisted_s: float = 0.0
    late_s: float = 0.0


class Chance:
    """Draws the faults, and counts them."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        self.set(Faults())

    def set(self, faults: Faults) -> None:
        self.faults = faults
        self._random = random.Random(faults.seed)

    def draw(self, fault: str, rpc: str = "") -> bool:
        if rpc and rpc not in self.faults.rpcs:
            return False
        met = self._random.random() < getattr(self.faults, fault)
        self.counts[fault] = self.counts.get(fault, 0) + met
        return met
