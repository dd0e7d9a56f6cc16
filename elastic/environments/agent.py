"""The kind `agent`: an episode is a function of one's own, which asks the policy by OpenAI's API.

    async def rollout(task: EpisodeTask, client: AsyncOpenAI, trajectory: PlayedTrajectory) -> float | Outcome: ...

It runs in env workers, processes of the run (`elastic.environments.env_worker`), and never in the orchestrator.
"""

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, ClassVar, Literal, TypeAlias

import msgspec
from pydantic import BaseModel, Field

from elastic.environments.outside import Outside, OutsideSettings
from elastic.protocol.front_messages import METRICS_MAX
from elastic.system.named_code import GivenCode
from elastic.system.plain_values import number, shown

METRIC_CHARACTERS, POLICY_CHARACTERS = 64, 256
"""The most characters of a metric's name, and of a policy's name."""


class DemonstratedSettings(OutsideSettings):
    """The settings of an environment whose policy may be warmed up."""

    demonstrations: GivenCode | None = Field(
        None, description="function that returns conversations, which `elastic prepare` makes a small policy imitate"
    )
    demonstration_steps: int = Field(300, ge=1, description="steps of that")
    demonstration_batch: int = Field(32, ge=1, le=4096, description="conversations a step")


class AgentSettings(DemonstratedSettings):
    rollout: GivenCode = Field(description="the function that plays an episode: FILE.py:NAME or MODULE:NAME")
    concurrency: int = Field(32, ge=1, le=4096, description="episodes at once in each of the environment's processes")
    client: Literal["openai", "none"] = Field(
        "openai", description="what the function gets as its client: OpenAI's of the trajectory, or none (it has a URL)"
    )


class FunctionAgent(Outside):
    """Stands for the episodes, which env workers play. The run opens their trajectories as it does for agents
    elsewhere."""

    Settings: ClassVar[type[BaseModel]] = AgentSettings
    in_workers: ClassVar[bool] = True


class EpisodeTask(msgspec.Struct, frozen=True, kw_only=True):
    """What an episode is about. All members of a group have the same `number`, the group's in the whole run, and the
    same `seed`."""

    number: int
    seed: int
    place: int = 0
    """The place of its group among the groups of its environment."""
    row: Mapping[str, Any] = {}
    """The row of the data set, where there is one; `prompt` and `answer` are its columns of these names."""
    prompt: Any = None
    answer: Any = None


class PlayedTrajectory(msgspec.Struct, frozen=True, kw_only=True):
    """Where the episode's calls go. `base_url` is OpenAI's, with its `/v1`; the `key` is good for this trajectory, and
    for this time that it is played."""

    id: str
    base_url: str
    key: str
    model: str
    member: int
    """Its number in its group."""
    chat_key: str = ""
    """For calls of the policy that are no turns of the trajectory, and not trained: chats, on spare credit."""


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What an episode has come to: a reward, or why it has `failed`, which is never a reward of 0."""

    reward: float | None = None
    failed: str = ""
    truncated: bool = False
    """Whether a limit of the environment's own has ended it."""
    rewards: Mapping[str, float] = {}
    """By policy, where several have rewards of their own (`front.policies`)."""
    metrics: Mapping[str, float] = {}
    """Numbers by name that are shown beside the reward, and not trained on."""


Rollout: TypeAlias = Callable[[EpisodeTask, Any, PlayedTrajectory], Awaitable[float | Outcome]]


class BadOutcome(Exception):
    """A function has returned what is no outcome. The message has what was found and what is allowed."""


def finite(what: str, value: Any) -> float:
    """A reward, or another number that a message calls `what`, as a float. Raises `BadOutcome`."""
    if (found := number(value)) is None:
        raise BadOutcome(f"{what}: found {shown(value)}; allowed: a finite number")
    return found


def outcome_of(answer: Any) -> Outcome:
    """Return what a function's answer means. Raises `BadOutcome`."""
    if isinstance(answer, Outcome):
        rewards = {_policy(policy): _reward(reward) for policy, reward in answer.rewards.items()}
        may_lack = bool(answer.failed or rewards)
        return Outcome(
            reward=None if may_lack and answer.reward is None else _reward(answer.reward),
            failed=str(answer.failed),
            truncated=bool(answer.truncated),
            rewards=rewards,
            metrics=_metrics(answer.metrics),
        )
    return Outcome(reward=_reward(answer))


def _policy(name: Any) -> str:
    if not _is_name(name, POLICY_CHARACTERS):
        raise BadOutcome(f"found a reward of the policy {shown(name)}; allowed: a name of `front.policies`")
    return name


def _is_name(found: Any, characters: int) -> bool:
    return isinstance(found, str) and 0 < len(found) <= characters and found.isprintable()


def _metrics(given: Mapping[str, Any]) -> dict[str, float]:
    if len(given) > METRICS_MAX:
        raise BadOutcome(f"found {len(given)} metrics; allowed: at most {METRICS_MAX}")
    metrics: dict[str, float] = {}
    for name, value in given.items():
        if not _is_name(name, METRIC_CHARACTERS):
            raise BadOutcome(f"found a metric {shown(name)}; allowed: a name of 1 to {METRIC_CHARACTERS} characters")
        metrics[name] = finite(f"metric {name!r}", value)
    return metrics


def _reward(answer: Any) -> float:
    if (found := number(answer)) is None:
        raise BadOutcome(f"found {shown(answer)}; allowed: a finite number, or an Outcome")
    return found
