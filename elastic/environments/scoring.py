"""Reward functions of the kind `chat`, and how they are called.

- As TRL's, where one takes `prompts` or `completions`: with lists of one, a list for each column of the row besides. It
  returns a list with one reward.
- As verl's, where it takes a `solution_str`: with `data_source`, `solution_str`, `ground_truth` and `extra_info`.
- Else with what it names of `task`, `messages` and `trajectory`.

Those of the first two kinds get these three, too, if they name them; of TRL's kind in lists. A function may be async.
It returns None for an answer that it cannot judge.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

from elastic.environments.agent import BadOutcome, EpisodeTask, PlayedTrajectory, finite
from elastic.environments.calling import TooSlow, called
from elastic.system.named_code import CodeUnusable, load, parsed
from elastic.system.plain_values import shown

OWN = ("task", "messages", "trajectory")


@dataclass(frozen=True, kw_only=True)
class PlayedChat:
    """What is to be scored. The first `prompt` of the `messages` are the prompt. `trajectory` is where calls go: with
    its key those of other models, as judges are."""

    task: EpisodeTask
    trajectory: PlayedTrajectory
    messages: Sequence[Mapping[str, Any]]
    prompt: int

    @property
    def text(self) -> str:
        """What the policy has said last."""
        return next((str(m.get("content") or "") for m in reversed(self.messages) if m["role"] == "assistant"), "")

    @property
    def completion(self) -> Any:
        """A text where the prompt is one, else the messages behind the prompt."""
        return self.text if isinstance(self.task.prompt, str) else list(self.messages[self.prompt :])


@dataclass(frozen=True)
class RewardFunction:
    """`named` is what of a conversation it takes, None for all that there is."""

    name: str
    function: Callable[..., Any]
    style: Literal["trl", "verl", "own"]
    named: frozenset[str] | None

    async def score(self, said: PlayedChat, limit_s: float) -> float | None:
        """What the conversation is worth. Raises `BadOutcome`, and whatever the function raises."""
        given = _GIVEN[self.style](said)
        if self.named is not None:
            given = {name: value for name, value in given.items() if name in self.named}
        try:
            answer = await called(self.function, given, limit_s)
        except TooSlow as slow:
            raise BadOutcome(f"reward function {self.name!r}: {slow}") from slow
        if self.style == "trl":
            if not isinstance(answer, Sequence) or isinstance(answer, str) or len(cast("Sequence[Any]", answer)) != 1:
                raise BadOutcome(f"reward function {self.name!r}: found {shown(answer)}; allowed: a list of one reward")
            answer = cast("Sequence[Any]", answer)[0]
        elif self.style == "verl" and isinstance(answer, Mapping):
            answer = cast("Mapping[str, Any]", answer).get("score")
        if answer is None:
            return None
        return finite(f"reward function {self.name!r}", answer)


def load_reward(named: str) -> RewardFunction:
    """Raises `CodeUnusable`."""
    function = load(named)
    if not callable(function):
        raise CodeUnusable(f"{named}: found {type(function).__name__}; allowed: a function")
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError) as error:
        raise CodeUnusable(f"{named}: its parameters cannot be seen: {error}") from error
    takes_all = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
    style: Literal["trl", "verl", "own"] = "own"
    if "solution_str" in parameters:
        style = "verl"
    elif (
        "completions" in parameters or "prompts" in parameters or (takes_all and not any(n in parameters for n in OWN))
    ):
        style = "trl"
    else:
        needed = [n for n, one in parameters.items() if one.default is one.empty and n not in OWN and not takes_all]
        if needed:
            allowed = "TRL's `completions`, verl's `solution_str`, or " + ", ".join(OWN)
            raise CodeUnusable(f"{named}: found a parameter {needed[0]!r}; allowed: {allowed}")
    return RewardFunction(parsed(named).name, function, style, None if takes_all else frozenset(parameters))


def _trl(said: PlayedChat) -> dict[str, Any]:
    columns = {name: [value] for name, value in said.task.row.items() if name not in ("prompt", "prompts")}
    own = {name: [value] for name, value in _own(said).items()}
    return {**own, **columns, "prompts": [said.task.prompt], "completions": [said.completion]}


def _verl(said: PlayedChat) -> dict[str, Any]:
    return {
        **_own(said),
        "data_source": said.task.row.get("data_source", ""),
        "solution_str": said.text,
        "ground_truth": said.task.answer,
        "extra_info": said.task.row.get("extra_info", {}),
    }


def _own(said: PlayedChat) -> dict[str, Any]:
    return {"task": said.task, "messages": list(said.messages), "trajectory": said.trajectory}


_GIVEN: Mapping[str, Callable[[PlayedChat], dict[str, Any]]] = {"trl": _trl, "verl": _verl, "own": _own}
