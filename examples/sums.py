"""Sums as a data set, and what an answer to one is worth: `python examples/sums.py > .cache/sums.jsonl`."""

import json
import random
from typing import Any

ROWS, LARGEST = 2000, 99


def digits(prompts: list[str], completions: list[str], answer: list[str], **columns: Any) -> list[float]:
    """Reward for a right answer, and some for one that is a number at all; called as TRL's reward functions are."""
    return [_worth(said.strip(), right) for said, right in zip(completions, answer, strict=True)]


def _worth(said: str, right: str) -> float:
    if said == right:
        return 1.0
    return 0.2 * sum(letter in "0123456789" for letter in said) / max(1, len(said))


def main() -> None:
    rng = random.Random(7)
    for _ in range(ROWS):
        one, other = rng.randint(0, LARGEST), rng.randint(0, LARGEST)
        print(json.dumps({"prompt": f"{one}+{other}=", "answer": str(one + other)}))


if __name__ == "__main__":
    main()
