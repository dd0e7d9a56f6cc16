"""What workers' log-probabilities come to beside the trainer's at the same weights version, and who is found wrong.

Source: docs/design.md, invariant 10.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TypeAlias

import msgspec

from elastic.core.types import LogprobCheck, WorkerId

LAST_TOKENS = 1000
"""Tokens of a version that are looked at of each worker: the first so many, and then the mean runs on over as many."""
LEAST_TOKENS = 100
"""Fewer tokens say nothing of a worker."""
DISBELIEVED = "none of them was trained on"
"""How the cause ends for which a run fails that cannot be believed."""
OUTCOME_STEPS = 10
"""Steps over which a run is judged."""
REMEMBERED_VERSIONS = 8
"""Versions whose proofs are remembered, to say which of them a worker serves: the first one, and the last ones."""
TOLD_APART = 10.0
"""Two versions' proofs are told apart where their distance is so many standard deviations of a worker's noise: then an
honest one is half as many from the middle between them."""
DEVIATION_OF_MEAN = 1.25
"""The standard deviation of normal noise, over the mean of its absolute values."""


Bounds: TypeAlias = tuple[tuple[WorkerId, float | None], ...]


class Mismatch(msgspec.Struct, frozen=True, kw_only=True):
    """A worker whose tokens are not of the weights that it names: over `tokens` of `version` the mean |log-ratio| was
    `mean` nats, where `bound` are allowed.

    Its proof of a version may have shown it as well: it `serves` another one by that, or (no `tokens`) gave none.
    """

    worker: WorkerId
    version: int
    tokens: int
    mean: float
    bound: float
    serves: int | None = None

    def __str__(self) -> str:
        if not self.tokens:
            return f"{self.worker} does not prove that it serves version {self.version}"
        if self.serves is not None:
            return (
                f"{self.worker} does not serve version {self.version}: its log-probabilities of the text by which "
                f"versions are known are those of version {self.serves}"
            )
        return (
            f"{self.worker} does not generate with the weights of version {self.version}: its log-probabilities are "
            f"{self.mean:.2g} nats from the trainer's in the mean of {self.tokens} tokens, allowed are {self.bound:.2g}"
        )


@dataclass(slots=True)
class Compared:
    """Tokens of a step that were compared, and those of them whose log-probabilities were beyond their bound."""

    tokens: int = 0
    disagreed: int = 0


@dataclass(slots=True)
class Evidence:
    """The last tokens of a worker under `version`; of former ones, too, as long as they were too few to judge."""

    version: int
    tokens: int = 0
    log_ratio: float = 0.0


@dataclass(slots=True)
class Agreement:
    """Whether each worker generates with the weights that it names, as far as the trainer has told.

    `bounds` has the workers to which another bound than the run's applies, and None for those that were found wrong.
    `terms` is the same as a tuple, which the orders to the trainer hold.
    """

    bounds: dict[WorkerId, float | None] = field(default_factory=dict[WorkerId, float | None])
    terms: Bounds = ()
    evidence: dict[WorkerId, Evidence] = field(default_factory=dict[WorkerId, Evidence])
    mismatches: list[Mismatch] = field(default_factory=list[Mismatch])
    steps: list[Compared] = field(default_factory=list[Compared])
    """The comparisons of the last steps, at most `OUTCOME_STEPS`; the last entry is the step under way."""
    proofs: dict[int, tuple[float, ...]] = field(default_factory=dict[int, tuple[float, ...]])
    """By version, the log-probabilities that it gives to the text by which versions are known."""

    def __bool__(self) -> bool:
        return self != Agreement()

    def declare(self, worker: WorkerId, bound: float) -> None:
        """Give a worker whose engine declares noise a bound of its own, unless it was found wrong."""
        if self.bounds.get(worker, 0.0) not in (None, bound):
            self._set(worker, bound)

    def _set(self, worker: WorkerId, bound: float | None) -> None:
        self.bounds[worker] = bound
        self.terms = tuple(self.bounds.items())

    def expect(self, version: int, proof: tuple[float, ...]) -> None:
        """Have workers prove that they serve `version`, for which the trainer has this `proof`, if it is any."""
        if proof:
            known = [*(self.proofs | {version: proof}).items()]
            self.proofs = dict([known[0], *known[1:][1 - REMEMBERED_VERSIONS :]])

    def prove(self, worker: WorkerId, version: int, answer: tuple[float, ...], bound: float) -> Mismatch | None:
        """Take a worker's proof of a version that it says it serves, where `bound` is the run's; returns how it
        is found wrong by it.

        It may be as far from the trainer's as its tokens may, and is to be nearer to that than to another version's
        as far as its noise lets the two be told apart.
        """
        expected, allowed = self.proofs.get(version), self.bounds.get(worker, bound)
        if expected is None or allowed is None:
            return None
        tokens = len(answer) if len(answer) == len(expected) else 0
        off = [ours - theirs for ours, theirs in zip(answer, expected, strict=False)]
        mean = sum(map(abs, off)) / max(1, tokens)
        serves = self._served_instead(version, off, allowed - bound) if tokens else None
        if tokens and mean <= allowed and serves is None:
            return None
        found = Mismatch(worker=worker, version=version, tokens=tokens, mean=mean, bound=allowed, serves=serves)
        self._set(worker, None)
        self.evidence.pop(worker, None)
        self.mismatches.append(found)
        return found

    def _served_instead(self, version: int, off: list[float], noise: float) -> int | None:
        """The version to whose proof an answer is nearest, and nearer than to this one's, from which it is `off`.

        Its noise is what its engine declares, or what is left of `off` beside the line between the two if that is more.
        """
        nearest, least = None, math.inf
        for other, proof in self.proofs.items():
            between = [theirs - ours for theirs, ours in zip(proof, self.proofs[version], strict=True)]
            distance = sum(part * part for part in between)
            if not distance:
                continue
            share = sum(part * moved for part, moved in zip(between, off, strict=True)) / distance
            left = [moved - share * part for part, moved in zip(between, off, strict=True)]
            beside = sum(one * one for one in left)  # Of whatever a worker says: a power would raise `OverflowError`.
            deviation = max(DEVIATION_OF_MEAN * noise, math.sqrt(beside / len(off)))
            if share > 0.5 and math.sqrt(distance) > TOLD_APART * deviation:
                apart = distance - 2 * share * distance
                if nearest is None or apart < least:
                    nearest, least = other, apart
        return nearest

    def begin_step(self, oldest_version: int) -> None:
        """No tokens of versions before `oldest_version` are compared any more."""
        self.evidence = {w: known for w, known in self.evidence.items() if known.version >= oldest_version}
        if self.steps and self.steps[-1].tokens:
            self.steps = [*self.steps, Compared()][-OUTCOME_STEPS:]

    def note(self, checks: Iterable[LogprobCheck], bound: float) -> list[Mismatch]:
        """Take what was compared, where `bound` is the run's; returns who is found wrong by it."""
        found: list[Mismatch] = []
        for check in checks:
            allowed = self.bounds.get(check.worker, bound)
            if allowed is None or not check.tokens:
                continue
            if not self.steps:
                self.steps.append(Compared())
            self.steps[-1].tokens += check.tokens
            self.steps[-1].disagreed += check.tokens if check.mean > allowed else 0
            if (mismatch := self._weigh(check, allowed)) is not None:
                self._set(check.worker, None)
                del self.evidence[check.worker]
                found.append(mismatch)
        self.mismatches += found
        return found

    def _weigh(self, check: LogprobCheck, bound: float) -> Mismatch | None:
        known = self.evidence.get(check.worker)
        if known is None or (known.version != check.version and known.tokens >= LEAST_TOKENS):
            known = self.evidence[check.worker] = Evidence(check.version)
        known.version = check.version
        known.tokens += check.tokens
        known.log_ratio += check.log_ratio
        tokens, mean = known.tokens, known.log_ratio / known.tokens
        if tokens > LAST_TOKENS:
            known.tokens, known.log_ratio = LAST_TOKENS, mean * LAST_TOKENS
        if tokens < LEAST_TOKENS or mean <= bound:
            return None
        return Mismatch(worker=check.worker, version=check.version, tokens=tokens, mean=mean, bound=bound)

    def failing(self) -> str:
        """Why the run cannot be believed: half of the tokens of the last steps disagree. Empty where they do not."""
        tokens = sum(step.tokens for step in self.steps)
        disagreed = sum(step.disagreed for step in self.steps)
        if tokens < LEAST_TOKENS or 2 * disagreed < tokens:
            return ""
        return (
            f"{disagreed} of {tokens} tokens that were compared in the last steps have other log-probabilities than "
            f"the trainer's with the same weights (trainer.mismatch_max); {DISBELIEVED}"
        )
