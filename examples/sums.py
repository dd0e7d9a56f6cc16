"""Sums of two numbers as a data set, what an answer is worth, and a demonstrator who mostly forgets to carry.

`python examples/sums.py` prints the rows to train on, `python examples/sums.py held-out` those to judge the policy by.
"""

import json
import random
import sys
import zlib
from collections.abc import Iterator
from itertools import product
from typing import Any

DIGITS = range(2, 10)
"""Of all numbers: two of three sums need a carry then."""
PARTS = ("held-out", "demonstrated", "trained", "trained")
HELD_OUT_ROWS = 200
FORGETS = 0.75
"""Share of the carries that the demonstrator forgets, and so the policy does that imitates it."""


def right(completions: list[str], answer: list[str], **columns: Any) -> list[float]:
    """Return 1 for a right answer, which stands last in what was said; called as TRL's reward functions are."""
    return [float(said.split(" ")[-1] == known) for said, known in zip(completions, answer, strict=True)]


def demonstrations() -> Iterator[dict[str, Any]]:
    """Yield a conversation for each sum that is neither trained on nor held out."""
    rng = random.Random(7)
    for one, other in _sums("demonstrated"):
        said = _worked_out(one, other, carries=rng.random() > FORGETS)
        yield {"messages": [{"role": "user", "content": f"{one}+{other}="}, {"role": "assistant", "content": said}]}


def _worked_out(one: int, other: int, *, carries: bool) -> str:
    """The sum in writing: `37+48=` is `7+8=15 3+4+1=8 85`, and `7+8=15 3+4=7 75` without the carry."""
    units, tens = one % 10 + other % 10, one // 10 + other // 10
    carry = carries and units >= 10
    steps = f"{one % 10}+{other % 10}={units} {one // 10}+{other // 10}{'+1' if carry else ''}={tens + carry}"
    return f"{steps} {tens + carry}{units % 10}"


def _sums(part: str) -> Iterator[tuple[int, int]]:
    """All pairs of numbers in this part. A pair and its reverse are in the same one."""
    numbers = [10 * tens + units for tens, units in product(DIGITS, repeat=2)]
    for one, other in product(numbers, repeat=2):
        if PARTS[zlib.crc32(b"%d+%d" % (min(one, other), max(one, other))) % len(PARTS)] == part:
            yield one, other


def rows(part: str) -> list[dict[str, str]]:
    """All rows of a part, shuffled; as many as policies are judged by of those that are held out."""
    found = [{"prompt": f"{one}+{other}=", "answer": str(one + other)} for one, other in _sums(part)]
    random.Random(7).shuffle(found)
    return found[:HELD_OUT_ROWS] if part == "held-out" else found


if __name__ == "__main__":
    for row in rows(sys.argv[1] if len(sys.argv) > 1 else "trained"):
        print(json.dumps(row))
