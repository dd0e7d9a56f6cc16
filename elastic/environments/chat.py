"""The kind `chat`: a row's prompt, one answer of the policy, and functions that say what it is worth.

A reward function is called as TRL's are, with one answer in each list (`prompts`, `completions`, and a list for each
column of the row), or, where it takes a `solution_str`, as verl's (`data_source`, `solution_str`, `ground_truth`,
`extra_info`). It may be async. It returns None for an answer that it cannot judge.
"""

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, cast

import httpx
from pydantic import BaseModel, Field, model_validator

from elastic.environments.agent import BadOutcome, EpisodeTask, Outcome, PlayedTrajectory, Rollout
from elastic.environments.outside import Outside, OutsideSettings
from elastic.system.named_code import CodeUnusable, GivenCode, load
from elastic.system.plain_values import number, shown

AGAIN = (408, 409, 429, 500, 502, 503, 504)
"""Statuses after which a call is made again, as OpenAI's client does."""
AGAIN_S = 0.5


class RowChatSettings(OutsideSettings):
    rewards: tuple[GivenCode, ...] = Field(
        min_length=1, description="functions that score an answer: FILE.py:NAME or MODULE:NAME"
    )
    weights: tuple[float, ...] = Field((), description="of the rewards, in the same order; 1 each unless said")
    system: str = Field("", description="system prompt, before a prompt that is a text")
    concurrency: int = Field(32, ge=1, le=4096, description="episodes at once in each of the environment's processes")

    @model_validator(mode="after")
    def _one_weight_each(self) -> "RowChatSettings":
        if self.weights and len(self.weights) != len(self.rewards):
            raise ValueError(f"weights must be one for each of {len(self.rewards)} rewards (found {len(self.weights)})")
        return self


class RowChat(Outside):
    """Stands for the episodes, which env workers play."""

    Settings: ClassVar[type[BaseModel]] = RowChatSettings
    in_workers: ClassVar[bool] = True


def load_chat(settings: RowChatSettings, http: httpx.AsyncClient) -> Rollout:
    """What plays an episode; `http` makes its calls. Raises `CodeUnusable` for rewards that cannot be loaded."""
    rewards = [_loaded(named) for named in settings.rewards]
    weights = settings.weights or (1.0,) * len(rewards)

    async def play(task: EpisodeTask, client: Any, trajectory: PlayedTrajectory) -> Outcome:
        messages = _messages(task.prompt, settings.system)
        choice = await _answered(http, trajectory, messages)
        text: str = choice["message"]["content"] or ""
        scores = [await _score(reward, task, text) for reward in rewards]
        known = [weight * score for weight, score in zip(weights, scores, strict=True) if score is not None]
        if not known:
            return Outcome(failed="no reward function has judged the answer")
        return Outcome(reward=sum(known), truncated=choice["finish_reason"] == "length")

    return play


def _loaded(named: str) -> Callable[..., Any]:
    found = load(named)
    if not callable(found):
        raise CodeUnusable(f"{named}: found {type(found).__name__}; allowed: a function")
    return cast("Callable[..., Any]", found)


def _messages(prompt: Any, system: str) -> list[dict[str, Any]]:
    if isinstance(prompt, str):
        before = [{"role": "system", "content": system}] if system else []
        return [*before, {"role": "user", "content": prompt}]
    if isinstance(prompt, Sequence) and prompt and all(isinstance(one, Mapping) for one in cast("list[Any]", prompt)):
        return [dict(one) for one in cast("Sequence[Mapping[str, Any]]", prompt)]
    raise BadOutcome(f"prompt: found {shown(prompt)}; allowed: a text, or a list of messages")


async def _answered(
    http: httpx.AsyncClient, trajectory: PlayedTrajectory, messages: list[dict[str, Any]]
) -> Mapping[str, Any]:
    """The choice that answers; a call that breaks is made again, which joins it. Raises `httpx.HTTPStatusError`."""
    headers = {"authorization": f"Bearer {trajectory.key}"}
    body = {"model": trajectory.model, "messages": messages}
    while True:
        try:
            answer = await http.post(f"{trajectory.base_url}/chat/completions", json=body, headers=headers)
            if answer.status_code not in AGAIN or answer.headers.get("x-should-retry") == "false":
                answer.raise_for_status()
                return answer.json()["choices"][0]
        except httpx.TransportError:
            pass
        await asyncio.sleep(AGAIN_S)


async def _score(reward: Callable[..., Any], task: EpisodeTask, text: str) -> float | None:
    """What one function says. Raises `BadOutcome`, and whatever it raises."""
    if "solution_str" in inspect.signature(reward).parameters:
        given: dict[str, Any] = {
            "data_source": task.row.get("data_source", ""),
            "solution_str": text,
            "ground_truth": task.answer,
            "extra_info": task.row.get("extra_info", {}),
        }
        said = await _called(reward, given)
        said = cast("Mapping[str, Any]", said)["score"] if isinstance(said, Mapping) else said
    else:
        completion = text if isinstance(task.prompt, str) else [{"role": "assistant", "content": text}]
        columns = {name: [value] for name, value in task.row.items() if name not in ("prompt", "prompts")}
        said = await _called(reward, {**columns, "prompts": [task.prompt], "completions": [completion]})
        if not isinstance(said, Sequence) or isinstance(said, str) or len(cast("Sequence[Any]", said)) != 1:
            raise BadOutcome(f"a reward function has returned {shown(said)}; allowed: a list with one reward")
        said = cast("Sequence[Any]", said)[0]
    if said is None:
        return None
    if (found := number(said)) is None:
        raise BadOutcome(f"a reward function has returned {shown(said)}; allowed: a finite number")
    return found


async def _called(function: Callable[..., Any], given: Mapping[str, Any]) -> Any:
    """A function that is not async runs beside the event loop, which it may hold up otherwise."""
    if inspect.iscoroutinefunction(function):
        return await function(**given)
    return await asyncio.to_thread(function, **given)
