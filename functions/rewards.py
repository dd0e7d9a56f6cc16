"""The contract of a reward: a stateless function of a finished trajectory. Source: docs/design.md, `Reward`.

A reward is installed under the entry point group `elastic.rewards`. It is called with a `FinishedTrajectory` as a
mapping and returns a finite number; anything else it may return is no score.
"""

from collections.abc import Awaitable, Mapping
from functools import cache
from importlib import import_module
from itertools import groupby
from pathlib import Path
from typing import Any, Protocol

import msgspec

from elastic.system.plain_values import number, shown
from functions.base import BadResult

ENTRY_POINTS = "elastic.rewards"


class FinishedBranch(msgspec.Struct, frozen=True, kw_only=True):
    """A further context in which an agent let the policy sample. `policy` is one of `front.policies`, empty for the
    model's own name."""

    token_ids: list[int]
    trained: list[int]
    policy: str = ""


class FinishedTrajectory(msgspec.Struct, frozen=True, kw_only=True):
    """What a reward is a function of.

    `trained[i]` says whether the policy sampled `token_ids[i]`. `seed` and `environment_settings` are those that
    the episode began with, `environment_reward` is what the environment gave; `settings` are the reward's own.
    `truncated`: a limit of turns or tokens ended the episode, not its environment (gymnasium's word). `task` is what an
    agent's driver opened the trajectory with. `checkpoint` is the directory of the base policy on the run's machine.
    """

    trajectory: str
    token_ids: list[int]
    trained: list[int]
    seed: int
    environment_settings: dict[str, Any]
    environment_reward: float
    settings: dict[str, Any]
    truncated: bool = False
    task: Any = None
    branches: list[FinishedBranch] = []
    checkpoint: str = ""

    @property
    def messages(self) -> list[dict[str, str]]:
        """What the policy said, as `assistant`, and as `user` all that stands between, the template's words included.

        Raises `FileNotFoundError` where the checkpoint, or its tokenizer, is not on this machine.
        """
        to_text, spoken = _tokenizer(self.checkpoint).decode, list[dict[str, str]]()
        for by_policy, tokens in groupby(zip(self.trained, self.token_ids, strict=True), key=lambda one: bool(one[0])):
            text = to_text([token for _, token in tokens], skip_special_tokens=False)
            spoken.append({"role": "assistant" if by_policy else "user", "content": text})
        return spoken


class Reward(Protocol):
    """It may be async."""

    def __call__(self, trajectory: Mapping[str, Any]) -> float | Awaitable[float]: ...


def finished_trajectory(trajectory: Mapping[str, Any]) -> FinishedTrajectory:
    """The typed form, for a reward's first line. Raises `msgspec.ValidationError`."""
    return msgspec.convert(trajectory, FinishedTrajectory)


@cache
def _tokenizer(checkpoint: str) -> Any:
    path = Path(checkpoint) / "tokenizer.json"
    if not path.is_file():
        raise FileNotFoundError(f"{path} is not here, by which tokens would become messages")
    return import_module("tokenizers").Tokenizer.from_file(str(path))


def score(result: Any) -> float:
    """A reward's result as a score. Raises `BadResult` for what is not a finite number."""
    found = number(result)
    if found is None:
        raise BadResult(f"a reward must be a finite number; found {shown(result)}")
    return found
