"""What environment and policy do in a simulated run: the number of turns, their lengths, and the time between them."""

import math
from collections.abc import Mapping, Sequence
from random import Random
from typing import Protocol

import msgspec

from elastic.core.ids import group_of
from elastic.core.types import TrajectoryId


class EpisodeTurn(msgspec.Struct, frozen=True):
    """`latency_s` passes and `observation_tokens` are added to the context; then `tokens` are generated."""

    observation_tokens: int
    tokens: int
    latency_s: float = 0.0


class Episode(msgspec.Struct, frozen=True):
    """A trajectory's turns in order, and its reward. `tag` names its kind of task, as environments may."""

    turns: tuple[EpisodeTurn, ...]
    reward: float
    tag: str = ""


class EpisodeLimits(msgspec.Struct, frozen=True, kw_only=True):
    max_turns: int
    max_tokens_per_turn: int
    max_context_tokens: int


class Episodes(Protocol):
    def episode(self, trajectory: TrajectoryId) -> Episode: ...

    def notes(self) -> list[str]:
        """Remarks on episodes that differ from their source."""
        ...


class RecordedEpisodes:
    """Episodes of a live run, within this run's limits. A trajectory that did not finish there is replaced by
    another one's episode."""

    def __init__(self, recorded: Mapping[TrajectoryId, Episode], limits: EpisodeLimits) -> None:
        if not recorded:
            raise ValueError("no finished trajectory in the journal: there is nothing to take turn lengths from")
        self._recorded = recorded
        self._limits = limits
        self._names = sorted(recorded)
        self._taken = self._substituted = self._cut = 0

    def episode(self, trajectory: TrajectoryId) -> Episode:
        found = self._recorded.get(trajectory)
        self._taken += 1
        if found is None:
            self._substituted += 1
            found = self._recorded[Random(trajectory).choice(self._names)]
        turns = _clipped(found.turns, self._limits)
        self._cut += turns != found.turns
        return Episode(turns, found.reward)

    def notes(self) -> list[str]:
        notes = _cut_notes(self._cut, self._taken)
        if self._substituted:
            lacking = f"{self._substituted} of {self._taken} trajectories are not in the run that turns are taken from"
            notes.append(f"{lacking}: others of it stand in for them")
        return notes


def _cut_notes(cut: int, taken: int) -> list[str]:
    limits = "rollout.max_turns, rollout.max_tokens_per_turn or engine.max_context_tokens"
    return [f"{cut} of {taken} trajectories are longer than {limits} allows, and were cut"] if cut else []


PROMPT_SHARE = 1 / 16
MEDIAN_TURN_SHARE = 1 / 5
SPREAD = 0.9
"""Standard deviation of the logarithm of a turn's length: a long tail, with the 99th percentile at eight times the
median."""


DRAWN_TURNS_MAX = 64
"""Most turns of a drawn episode: where agents drive a run it has no limit of turns."""


class DrawnEpisodes:
    """Episodes from a long-tailed mixture within the run's limits, for configurations without known turns.

    With `sessions`, turns are drawn from those. Members of a group begin with the same prompt, that of one session.
    """

    def __init__(self, seed: int, limits: EpisodeLimits, sessions: Sequence[Episode] = ()) -> None:
        self._seed = seed
        self._limits = limits
        self._sessions = sessions
        self._difficulties: dict[str, float] = {}
        self._taken = self._cut = 0

    def episode(self, trajectory: TrajectoryId) -> Episode:
        """Members of a group share its difficulty: some groups all fail or all succeed, as in training."""
        group = group_of(trajectory)
        difficulty = self._difficulties.get(group)
        if difficulty is None:
            difficulty = self._difficulties[group] = Random(f"{self._seed}/{group}").random()
        chance = Random(f"{self._seed}/{trajectory}")
        turns = self._session(chance, group) if self._sessions else self._drawn(chance)
        clipped = _clipped(turns, self._limits)
        self._taken += 1
        self._cut += clipped != turns
        return Episode(clipped, float(chance.random() < difficulty))

    def notes(self) -> list[str]:
        return _cut_notes(self._cut, self._taken) if self._sessions else []

    def _session(self, chance: Random, group: str) -> tuple[EpisodeTurn, ...]:
        prompt = Random(f"{self._seed}/{group}/prompt").choice(self._sessions).turns[0]
        first, *others = chance.choice(self._sessions).turns
        return (EpisodeTurn(prompt.observation_tokens, first.tokens, first.latency_s), *others)

    def _drawn(self, chance: Random) -> tuple[EpisodeTurn, ...]:
        limits = self._limits
        count = chance.randint(1, min(limits.max_turns, DRAWN_TURNS_MAX))
        prompt = max(1, round(limits.max_context_tokens * PROMPT_SHARE))
        median = max(1.0, limits.max_tokens_per_turn * MEDIAN_TURN_SHARE)
        return tuple(
            EpisodeTurn(
                prompt if index == 0 else max(1, prompt // 4),
                max(1, round(chance.lognormvariate(math.log(median), SPREAD))),
            )
            for index in range(count)
        )


def _clipped(turns: Sequence[EpisodeTurn], limits: EpisodeLimits) -> tuple[EpisodeTurn, ...]:
    """Return the turns that fit, each within the limits, as a rollout loop cuts them. Returns at least one turn."""
    kept: list[EpisodeTurn] = []
    context = 0
    for turn in turns[: limits.max_turns]:
        room = limits.max_context_tokens - limits.max_tokens_per_turn - context
        if kept and turn.observation_tokens > room:
            break
        observation = min(turn.observation_tokens, room)
        tokens = max(1, min(turn.tokens, limits.max_tokens_per_turn))
        kept.append(EpisodeTurn(observation, tokens, turn.latency_s))
        context += observation + tokens
    return tuple(kept)
