"""What the parts of an iteration cost on a device that nobody has modelled: learned from the iterations before.

Only proportions matter: how an iteration that decodes and prefills is shared out among accounts. What either costs
alone is learned by size from iterations that do nothing else, for neither is proportional to its tokens: decoding one
sequence reads the weights as decoding sixteen does.
"""

from elastic.core.profiles import decode_step_s
from elastic.engine.torch.pacing import Costs, IterationLoad

FOLLOW = 0.1
"""How much of a newer measurement counts, once there are as many as make a mean of the same weight."""
LARGEST_RATIO = 2.0
"""A single hiccup of the host counts as no more than this."""


class _Curve:
    """Seconds of an iteration by its size, in buckets of powers of two."""

    def __init__(self) -> None:
        self.known_s: dict[int, float] = {}
        self._seen: dict[int, int] = {}

    def note(self, size: int, measured_s: float) -> None:
        bucket = 1 << (size - 1).bit_length()
        seen = self._seen[bucket] = self._seen.get(bucket, 0) + 1
        mean_s = self.known_s.get(bucket, measured_s)
        self.known_s[bucket] = mean_s + max(FOLLOW, 1 / seen) * (min(measured_s, LARGEST_RATIO * mean_s) - mean_s)

    def at(self, size: int) -> float:
        return decode_step_s(size, self.known_s)


class LearnedCosts:
    """Pure: the caller brings the times."""

    def __init__(self) -> None:
        self._decode, self._prefill = _Curve(), _Curve()

    def costs(self, load: IterationLoad) -> Costs:
        """Seconds where both kinds of work are known, else tokens."""
        tokens = load.prefill + load.recompute
        if not (self._decode.known_s and self._prefill.known_s):
            return Costs(*map(float, load))
        prefill_s = self._prefill.at(tokens)
        return Costs(
            decode=self._decode.at(load.decode),
            prefill=prefill_s * load.prefill / tokens if tokens else 0.0,
            recompute=prefill_s * load.recompute / tokens if tokens else 0.0,
        )

    def observe(self, load: IterationLoad, measured_s: float) -> None:
        """An iteration of this load took so long."""
        tokens = load.prefill + load.recompute
        if not load.decode:
            self._prefill.note(tokens, measured_s)
        elif not tokens:
            self._decode.note(load.decode, measured_s)
        elif self._prefill.known_s and not self._decode.known_s:
            # Decodes that have never been alone: what the iteration took beyond its prefill.
            rest_s = measured_s - self._prefill.at(tokens)
            if rest_s > 0:
                self._decode.note(load.decode, rest_s)
