"""The kind `chat`: a row's prompt, what the policy says to it, and functions that say what that is worth.

Without tools the policy answers once. With tools its calls are answered, and it is asked again until it calls none.
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, cast

import httpx
from pydantic import BaseModel, Field, model_validator

from elastic.environments.agent import BadOutcome, DemonstratedSettings, EpisodeTask, Outcome, PlayedTrajectory, Rollout
from elastic.environments.asking import ask_in_turn
from elastic.environments.outside import Outside
from elastic.environments.rows import is_prompt
from elastic.environments.scoring import PlayedChat, load_reward
from elastic.environments.tools import Toolbox
from elastic.system.named_code import GivenCode, parsed
from elastic.system.plain_values import shown


class RowChatSettings(DemonstratedSettings):
    rewards: tuple[GivenCode, ...] = Field(
        min_length=1, description="functions that score an answer: FILE.py:NAME or MODULE:NAME"
    )
    weights: tuple[float, ...] = Field((), description="weights of the rewards, in the same order; by default 1 each")
    reward_timeout_s: float = Field(300.0, gt=0, description="a reward function that takes longer has failed")
    system: str = Field("", description="system prompt, before a prompt that is a text")
    tools: tuple[GivenCode, ...] = Field(
        (), description="functions that the policy may call as tools: FILE.py:NAME or MODULE:NAME"
    )
    turns_most: int = Field(
        8, ge=1, description="with tools: answers of the policy after which an episode is truncated"
    )
    tool_timeout_s: float = Field(
        30.0, gt=0, description="a tool that takes longer is an error, which the policy reads"
    )
    tool_characters: int = Field(16_384, ge=1, description="most of a tool's answer that the policy reads")
    concurrency: int = Field(32, ge=1, le=4096, description="episodes at once in each of the environment's processes")

    @property
    def offers_tools(self) -> bool:
        return bool(self.tools)

    @model_validator(mode="after")
    def _one_weight_each(self) -> "RowChatSettings":
        if self.weights and len(self.weights) != len(self.rewards):
            raise ValueError(f"weights must be one for each of {len(self.rewards)} rewards (found {len(self.weights)})")
        return self

    @model_validator(mode="after")
    def _tools_of_different_names(self) -> "RowChatSettings":
        names = [parsed(tool).name for tool in self.tools]
        if twice := [name for name in dict.fromkeys(names) if names.count(name) > 1]:
            raise ValueError(f"tools must have different names (found {twice[0]!r} twice)")
        return self


class RowChat(Outside):
    """Stands for the episodes, which env workers play."""

    Settings: ClassVar[type[BaseModel]] = RowChatSettings
    in_workers: ClassVar[bool] = True


def load_chat(settings: RowChatSettings, http: httpx.AsyncClient) -> Rollout:
    """What plays an episode; `http` makes its calls. Raises `CodeUnusable` for what cannot be loaded."""
    rewards = [load_reward(named) for named in settings.rewards]
    weights = settings.weights or (1.0,) * len(rewards)
    names = metric_names(settings.rewards)
    tools = Toolbox(settings.tools, settings.tool_timeout_s, settings.tool_characters)

    async def play(task: EpisodeTask, client: Any, trajectory: PlayedTrajectory) -> Outcome:
        messages = opening(task.prompt, settings.system)
        prompt = len(messages)
        truncated = await _converse(http, trajectory, messages, tools, settings.turns_most)
        said = PlayedChat(task=task, trajectory=trajectory, messages=messages, prompt=prompt)
        scores = [await reward.score(said, settings.reward_timeout_s) for reward in rewards]
        known = [weight * score for weight, score in zip(weights, scores, strict=True) if score is not None]
        if not known:
            return Outcome(failed="no reward function has judged the answer")
        metrics = {name: score for name, score in zip(names, scores, strict=True) if score is not None}
        return Outcome(reward=sum(known), truncated=truncated, metrics=metrics)

    return play


def metric_names(rewards: Sequence[str]) -> list[str]:
    """What the scores of reward functions are called among metrics: as the functions are, numbered where two are
    called the same."""
    names = [parsed(named).name for named in rewards]
    return [
        f"rewards/{name}" if names.count(name) == 1 else f"rewards/{name}-{names[: place + 1].count(name)}"
        for place, name in enumerate(names)
    ]


def opening(prompt: Any, system: str) -> list[dict[str, Any]]:
    """The messages of a prompt. Raises `BadOutcome` for what is none."""
    if isinstance(prompt, str):
        before = [{"role": "system", "content": system}] if system else []
        return [*before, {"role": "user", "content": prompt}]
    if is_prompt(prompt):
        return [dict(one) for one in cast("Sequence[Mapping[str, Any]]", prompt)]
    raise BadOutcome(f"prompt: found {shown(prompt)}; allowed: a text, or a list of messages")


async def _converse(
    http: httpx.AsyncClient,
    trajectory: PlayedTrajectory,
    messages: list[dict[str, Any]],
    tools: Toolbox,
    turns_most: int,
) -> bool:
    """Add what is said to the messages; returns whether a limit has ended it."""
    for turn in range(turns_most):
        said = await ask_in_turn(turn, http, trajectory, messages, tools.told)
        if said is None:
            return True
        messages.append(said.message)
        calls = said.message.get("tool_calls")
        if said.cut or not calls:
            return said.cut
        if turn + 1 < turns_most:
            messages += [await tools.answer(call) for call in calls]
    return True
