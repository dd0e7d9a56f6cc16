"""How long the trainer's device generates at the start of a step. Source: RLBoost §4.1."""

from collections.abc import Sequence

import msgspec

from elastic.core.policy import StepRecord
from elastic.core.types import Nanoseconds


class FixedWindow(msgspec.Struct, frozen=True):
    """The same window in every step."""

    duration_ns: Nanoseconds

    def window_ns(self, history: Sequence[StepRecord]) -> Nanoseconds:
        return self.duration_ns
