"""Episodes that an engine plays in this process, with the least code that does it: no orchestrator, no event loop."""

import queue
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from elastic.config import RolloutConfig
from elastic.core.types import FinishReason, SamplingParameters
from elastic.engine.base import GenerateRequest, RolloutEngine, TokenChunk
from elastic.environments.base import Environment
from elastic.testing.trajectories import PlainTrajectory

T = TypeVar("T")
TIMEOUT_S = 600.0
"""Longest that an engine may bring nothing."""


@dataclass(slots=True)
class PlayedEpisode:
    """One episode: what begins it, and all that it comes to, as a trainer wants it.

    `noise_seed` says a turn's by its number. The environment's methods must wait for nothing.
    """

    environment: Environment
    seed: int
    noise_seed: Callable[[int], int]
    data: PlainTrajectory
    turns: int = 0
    turn: list[int] = field(default_factory=list[int])

    def hear(self, token_ids: list[int]) -> None:
        self._add(token_ids, 0, [0.0] * len(token_ids), 0)

    def say(self, chunk: TokenChunk) -> None:
        self.turn += chunk.token_ids
        self._add(chunk.token_ids, 1, chunk.logprobs, chunk.weights_version)

    def end(self, reward: float) -> None:
        self.data.reward = reward

    def _add(self, token_ids: Sequence[int], trained: int, logprobs: Sequence[float], version: int) -> None:
        self.data.token_ids.extend(token_ids)
        self.data.trained.extend([trained] * len(token_ids))
        self.data.logprobs.extend(logprobs)
        self.data.versions.extend([version] * len(token_ids))


def episode(
    environment: Environment, seed: int, noise_seed: Callable[[int], int] = lambda turn: turn, name: str = ""
) -> PlayedEpisode:
    """One that has not begun. Those that are played at once have names that differ; by default it is the seed."""
    return PlayedEpisode(environment, seed, noise_seed, PlainTrajectory(name or str(seed)))


class EpisodePlayer:
    """Plays episodes on an engine, which it starts. Raises `RuntimeError` when the engine gives a turn up."""

    def __init__(
        self, engine: RolloutEngine, rollout: RolloutConfig, stop_token_ids: tuple[int, ...], context_tokens: int
    ) -> None:
        self._engine, self._rollout = engine, rollout
        self._stop_token_ids, self._context_tokens = stop_token_ids, context_tokens
        self._produced: queue.SimpleQueue[Sequence[TokenChunk]] = queue.SimpleQueue()
        self._playing: dict[str, PlayedEpisode] = {}
        engine.start(self._produced.put)

    def play(self, episodes: Sequence[PlayedEpisode]) -> None:
        """Until the last of them is over."""
        for one in episodes:
            one.hear(_now(one.environment.reset(one.seed)))
        self._engine.submit([self._ask(one) for one in episodes])
        while self._playing:
            chunks = self._produced.get(timeout=TIMEOUT_S)
            self._engine.submit([request for chunk in chunks for request in self._take(chunk)])

    def _ask(self, one: PlayedEpisode) -> GenerateRequest:
        name = f"{one.data.trajectory}/{one.turns}"
        self._playing[name] = one
        return GenerateRequest(
            request_id=name,
            token_ids=list(one.data.token_ids),
            start=0,
            sampling=SamplingParameters(
                max_new_tokens=self._rollout.max_tokens_per_turn,
                stop_token_ids=self._stop_token_ids,
                temperature=self._rollout.temperature,
                noise_seed=one.noise_seed(one.turns),
            ),
        )

    def _take(self, chunk: TokenChunk) -> list[GenerateRequest]:
        """Add to the turn; at its end, the next turn of the episode, if it has one."""
        one = self._playing[chunk.request_id]
        one.say(chunk)
        if chunk.finish is None:
            return []
        if chunk.finish not in (FinishReason.STOP, FinishReason.LENGTH):
            raise RuntimeError(f"the engine gave a turn up: {chunk.detail or chunk.finish}")
        del self._playing[chunk.request_id]
        result = _now(one.environment.step(one.turn))
        one.turns += 1
        one.turn = []
        if result.done:
            one.end(result.reward)
            return []
        one.hear(result.token_ids)
        room = len(one.data.token_ids) + self._rollout.max_tokens_per_turn <= self._context_tokens
        if room and one.turns < self._rollout.max_turns:
            return [self._ask(one)]
        one.end(_now(one.environment.truncate()))
        return []


def _now(answer: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine that waits for nothing."""
    try:
        answer.send(None)
    except StopIteration as end:
        return end.value
    raise RuntimeError("the environment waits for something")
