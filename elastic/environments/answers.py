"""What environments answer, checked and made plain where it enters: past this module there are only Python's own
integers and floats, within their ranges."""

import itertools
from collections.abc import Sequence
from typing import Any

from elastic.environments.base import StepResult
from elastic.system.plain_values import number, shown, switch, whole

TAG_CHARACTERS = 200
TOKENS_MAX = 4_000_000
"""Token ids of one answer: more than any context has."""


class BadAnswer(Exception):
    """An environment answered what its contract does not allow. The message has what was found and what is allowed."""


class Answers:
    """Takes the answers of one environment. `name` is what messages call it; its token ids are below `vocab_size`."""

    def __init__(self, name: str, vocab_size: int) -> None:
        self._name, self._vocab_size = name, vocab_size

    def prompt(self, answer: Any) -> list[int]:
        """Return the token ids of `reset`. Raises `BadAnswer`."""
        found = self._ids("reset", answer)
        if not found:
            raise BadAnswer(f"{self._name}.reset: found no token ids; allowed: at least one")
        return found

    def step(self, answer: Any) -> StepResult:
        """Return the result of `step`. Raises `BadAnswer`."""
        if not isinstance(answer, StepResult):
            raise BadAnswer(f"{self._name}.step: found {shown(answer)}; allowed: a StepResult")
        done = switch(answer.done)
        if done is None:
            raise BadAnswer(f"{self._name}.step: done: found {shown(answer.done)}; allowed: true or false")
        if done:
            return StepResult([], done, self.reward("step", answer.reward))
        return StepResult(self._ids("step", answer.token_ids), done)

    def reward(self, method: str, answer: Any) -> float:
        """Return the reward that a method gave. Raises `BadAnswer`."""
        found = number(answer)
        if found is None:
            raise BadAnswer(f"{self._name}.{method}: reward: found {shown(answer)}; allowed: a finite number")
        return found

    def tag(self, answer: Any) -> str:
        """Return the tag of the episode's kind. Raises `BadAnswer`."""
        tag = str.__str__(answer) if isinstance(answer, str) else None
        if tag is None or len(tag) > TAG_CHARACTERS or not tag.isprintable():
            allowed = f"a text of at most {TAG_CHARACTERS} printable characters"
            raise BadAnswer(f"{self._name}: tag: found {shown(answer)}; allowed: {allowed}")
        return tag

    def _ids(self, method: str, answer: Any) -> list[int]:
        listed = answer if isinstance(answer, Sequence) else _as_list(answer)
        if listed is None or isinstance(listed, str | bytes | bytearray):
            raise BadAnswer(f"{self._name}.{method}: found {shown(answer)}; allowed: a list of token ids")
        if len(listed) > TOKENS_MAX:
            raise BadAnswer(f"{self._name}.{method}: found {len(listed)} token ids; allowed: at most {TOKENS_MAX}")
        found: list[int] = []
        for position, one in enumerate(itertools.islice(listed, TOKENS_MAX)):  # It may say less than it has.
            token = whole(one)
            if token is None or not 0 <= token < self._vocab_size:
                allowed = f"integers from 0 to {self._vocab_size - 1}"
                raise BadAnswer(f"{self._name}.{method}: token id {position}: found {shown(one)}; allowed: {allowed}")
            found.append(token)
        return found


def _as_list(answer: Any) -> list[Any] | None:
    """Return the elements of an array of one dimension; None for anything else."""
    try:
        found = answer.tolist() if answer.ndim == 1 else None
    except Exception:
        return None
    return found if isinstance(found, list) else None
