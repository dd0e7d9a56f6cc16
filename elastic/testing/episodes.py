"""What the conformance suite of environments in token ids needs: an environment under test, and its episodes."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from elastic.environments.answers import Answers
from elastic.environments.base import Environment
from elastic.environments.hosting import load_kind

TURN_TOKENS_MAX = 12


@dataclass(frozen=True)
class EpisodesUnderTest:
    """An environment that is installed as `kind`, with settings of its own.

    `won` are turns of the policy that end the episode of `seed`, whose reward is then `reward`; none where no turns do.
    """

    kind: str
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])
    seed: int = 0
    won: Sequence[Sequence[int]] = ()
    reward: float = 1.0

    def __str__(self) -> str:
        return self.kind

    @property
    def loaded(self) -> type[Environment]:
        """Its class. Raises `CodeUnusable`."""
        return load_kind(self.kind)

    def make(self) -> Environment:
        return self.loaded(self.loaded.Settings.model_validate(self.settings))

    def turns(self, seed: int, count: int) -> list[list[int]]:
        """Turns of any tokens of its vocabulary, of which most end in a token that ends turns; one is empty."""
        chance, words = random.Random(seed), len(self.loaded.vocabulary)
        ends = self.loaded.stop_token_ids or range(words)
        drawn = [
            [*(chance.randrange(words) for _ in range(chance.randrange(TURN_TOKENS_MAX))), chance.choice(ends)]
            for _ in range(count)
        ]
        return [[], *drawn]


async def play(
    under_test: EpisodesUnderTest, environment: Environment, seed: int, turns: Sequence[Sequence[int]]
) -> list[Any]:
    """Play an episode: its prompt, then the answer to each turn until one ends it, else its reward as it is cut off.

    Raises `BadAnswer` for what its contract does not allow.
    """
    answers = Answers(under_test.kind, len(under_test.loaded.vocabulary))
    history: list[Any] = [answers.prompt(await environment.reset(seed))]
    answers.tag(getattr(environment, "tag", ""))
    for turn in turns:
        history.append(result := answers.step(await environment.step(list(turn))))
        if result.done:
            return history
    history.append(answers.reward("truncate", await environment.truncate()))
    return history
