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
    """One episode at a time; many instances run at once, so a method must not block the event loop.

    The same seed gives the same episode to the same actions. A turn of the policy ends at one of
    `stop_token_ids` (included) or after `max_tokens_per_turn` tokens. An environment of several kinds of task may
    have a `tag: str` after `reset`, under which it is learned what their turns cost.
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
