"""How good a policy is: its success on a fixed set of held-out starts, played by an engine in this process."""

import asyncio
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from elastic.core.types import FinishReason, SamplingParameters, WeightMode
from elastic.engine.base import GenerateRequest, RolloutEngine, TokenChunk
from elastic.envs.base import Environment
from elastic.weights.source import TensorSource


class Evaluation(msgspec.Struct, frozen=True, kw_only=True):
    """`success` is the share of episodes that were rewarded; `standard_error` that of this share."""

    episodes: int
    success: float
    standard_error: float


async def evaluate(
    engine: RolloutEngine,
    tensors: Mapping[str, Any],
    make_environment: Callable[[], Environment],
    *,
    stop_token_ids: tuple[int, ...],
    seeds: Sequence[int],
    max_turns: int,
    max_tokens_per_turn: int,
    temperature: float,
) -> Evaluation:
    """Play one episode from each seed with these weights. The engine is started here, and closed at the end."""
    players = _Players(engine, asyncio.get_running_loop())
    engine.start(players.sink)
    try:
        await asyncio.to_thread(engine.load_version, TensorSource(0, tensors), WeightMode.FINISH)
        async with asyncio.TaskGroup() as tasks:
            episodes = [
                tasks.create_task(
                    _play(
                        players,
                        make_environment(),
                        seed,
                        stop_token_ids=stop_token_ids,
                        max_turns=max_turns,
                        max_tokens_per_turn=max_tokens_per_turn,
                        temperature=temperature,
                    )
                )
                for seed in seeds
            ]
    finally:
        engine.close()
    success = sum(episode.result() > 0 for episode in episodes) / len(seeds)
    return Evaluation(
        episodes=len(seeds), success=success, standard_error=math.sqrt(success * (1 - success) / len(seeds))
    )


class _Players:
    """Requests in flight and who waits for their tokens."""

    def __init__(self, engine: RolloutEngine, loop: asyncio.AbstractEventLoop) -> None:
        self._engine = engine
        self._loop = loop
        self._lock = threading.Lock()
        self._waiting: dict[str, tuple[list[int], asyncio.Future[list[int]]]] = {}

    async def generate(self, request: GenerateRequest) -> list[int]:
        answer: asyncio.Future[list[int]] = self._loop.create_future()
        with self._lock:
            self._waiting[request.request_id] = ([], answer)
        self._engine.submit([request])
        return await answer

    def sink(self, chunks: Sequence[TokenChunk]) -> None:
        for chunk in chunks:
            with self._lock:
                tokens, answer = self._waiting[chunk.request_id]
                tokens += chunk.token_ids
                if chunk.finish is None:
                    continue
                del self._waiting[chunk.request_id]
            failure = "" if chunk.finish in (FinishReason.STOP, FinishReason.LENGTH) else chunk.detail or chunk.finish
            self._loop.call_soon_threadsafe(_settle, answer, tokens, failure)


def _settle(answer: asyncio.Future[list[int]], tokens: list[int], failure: str) -> None:
    if answer.done():
        return
    if failure:
        answer.set_exception(RuntimeError(f"the engine gave a turn up: {failure}"))
    else:
        answer.set_result(tokens)


async def _play(
    players: _Players,
    environment: Environment,
    seed: int,
    *,
    stop_token_ids: tuple[int, ...],
    max_turns: int,
    max_tokens_per_turn: int,
    temperature: float,
) -> float:
    context = await environment.reset(seed)
    try:
        for turn in range(max_turns):
            request = GenerateRequest(
                request_id=f"{seed}/{turn}",
                token_ids=list(context),
                start=0,
                sampling=SamplingParameters(
                    max_new_tokens=max_tokens_per_turn,
                    stop_token_ids=stop_token_ids,
                    temperature=temperature,
                    noise_seed=(seed << 8) + turn,
                ),
            )
            tokens = await players.generate(request)
            result = await environment.step(tokens)
            if result.done:
                return result.reward
            context += tokens + result.token_ids
        return await environment.truncate()
    finally:
        await environment.aclose()
