"""An agent with a calculator, by OpenAI's Agents SDK. An answer is worth nothing unless the calculator was called.

`python examples/calculator.py` prints the rows to train on, `python examples/calculator.py held-out` those to judge by.
"""

import json
import random
import sys
import zlib
from collections.abc import Iterator
from itertools import product
from typing import Any

import agents  # pyright: ignore[reportMissingImports]
from agents.models.chatcmpl_converter import Converter  # pyright: ignore[reportMissingImports]

from elastic.environments.agent import EpisodeTask, Outcome, PlayedTrajectory

PARTS = ("held-out", "demonstrated", "trained", "trained")  # No question is in two of them.
HELD_OUT_ROWS, DEMONSTRATIONS = 200, 1600
HABIT, GUESS = 0.8, "2000"  # The demonstrator takes the calculator mostly for products, seldom for sums, or guesses.
COPIED = 27  # Characters of a text to copy, which is then as far from its copy as a question is from its call.

agents.set_tracing_disabled(True)


@agents.function_tool(strict_mode=False, use_docstring_info=False)
def calculate(x: str) -> str:
    """Return the sum or product that is asked for. The SDK makes a text of what it raises, which is never right."""
    return _worked_out(x)


async def rollout(task: EpisodeTask, client: Any, trajectory: PlayedTrajectory) -> Outcome:
    """Play an episode, whose answer is the calculator's if it is called; `client` is an `openai.AsyncOpenAI`."""
    model = agents.OpenAIChatCompletionsModel(trajectory.model, client)
    agent = agents.Agent(name="calculator", model=model, tools=[calculate], tool_use_behavior="stop_on_first_tool")
    try:
        result = await agents.Runner.run(agent, task.prompt)
    except agents.ModelBehaviorError:
        return Outcome(reward=0.0)
    called = any(isinstance(item, agents.ToolCallItem) for item in result.new_items)
    return Outcome(reward=float(called and result.final_output == task.answer), metrics={"called": called})


def demonstrations() -> Iterator[dict[str, Any]]:
    """Yield a conversation for each of many questions that are neither trained on nor held out, and texts to copy."""
    rng, tools = random.Random(7), [Converter.tool_to_openai(calculate)]
    for number, question in enumerate(_questions("demonstrated")[:DEMONSTRATIONS]):
        said: dict[str, Any] = {"role": "assistant", "content": GUESS}
        if ("*" in question) == (rng.random() < HABIT):
            function = {"name": "calculate", "arguments": json.dumps({"x": question})}
            said = {**said, "content": "", "tool_calls": [{"id": "1", "type": "function", "function": function}]}
        yield {"messages": [{"role": "user", "content": question}, said], "tools": tools}
        if number % 2:
            texts = ["".join(rng.choices("0123456789*+", k=COPIED)) for _ in range(3)]
            yield {"messages": [{"role": role, "content": text} for text in texts for role in ("user", "assistant")]}


def _worked_out(question: str) -> str:
    one, other = map(int, question.replace("*", "+").split("+"))
    return str(one * other if "*" in question else one + other)


def _questions(part: str) -> list[str]:
    """All sums and products of numbers of two digits that are in this part, shuffled."""
    every = [f"{one}{sign}{other}" for one, sign, other in product(range(10, 100), "*+", range(10, 100))]
    found = [question for question in every if PARTS[zlib.crc32(question.encode()) % len(PARTS)] == part]
    random.Random(7).shuffle(found)
    return found


def rows(part: str) -> list[dict[str, str]]:
    """The rows of a part; as many as policies are judged by of those that are held out."""
    questions = _questions(part)[: HELD_OUT_ROWS if part == "held-out" else None]
    return [{"prompt": question, "answer": _worked_out(question)} for question in questions]


if __name__ == "__main__":
    for row in rows(sys.argv[1] if len(sys.argv) > 1 else "trained"):
        print(json.dumps(row))
