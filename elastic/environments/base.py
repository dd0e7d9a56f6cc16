"""The contract of an environment: an episode in token ids. Source: docs/design.md, `Environment`."""

from typing import ClassVar, Protocol

import msgspec
from pydantic import BaseModel


class StepResult(msgspec.Struct, frozen=True):
    """What the environment answers: observation tokens to append, whether the episode is over, its reward.

    `reward` is the episode's and counts only when `done`.
    """

    token_ids: list[int]
    done: bool
    reward: float = 0.0


class Environment(Protocol):
    """One episode at a time. Many instances run at once in an env worker, on one event loop: while a method computes,
    the others wait, and one that takes longer than `environment.step_timeout_s` costs its episode or its env worker.

    The same seed gives the same episode to the same actions: an episode whose env worker is gone goes through its turns
    once more. A turn of the policy ends at one of `stop_token_ids` (included) or after `max_tokens_per_turn` tokens. An
    environment of several kinds of task may have a `tag: str` after `reset`, under which it is learned what their turns
    cost. One of ours that says `in_process = True` is played on the run's own event loop.
    """

    Settings: ClassVar[type[BaseModel]]
    vocabulary: ClassVar[tuple[str, ...]]
    stop_token_ids: ClassVar[tuple[int, ...]]

    def __init__(self, settings: BaseModel) -> None: ...

    async def reset(self, seed: int) -> list[int]:
        """Start an episode; returns the prompt's token ids."""
        ...

    async def step(self, token_ids: list[int]) -> StepResult:
        """Take one turn of the policy. An invalid action is answered, never raised."""
        ...

    async def truncate(self) -> float:
        """End an episode that is not done, at the caller's limit of turns or tokens; returns its reward so far.

        Called at most once, after at least one turn; the words are gymnasium's.
        """
        ...

    async def aclose(self) -> None: ...
