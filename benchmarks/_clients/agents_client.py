"""OpenAI's Agents SDK: an agent with a function as a tool, by both model classes, run and streamed."""

import asyncio
import importlib
from typing import Any

from _told import MODEL, QUESTION, made

agents: Any = importlib.import_module("agents")


def add(a: int, b: int) -> str:
    """Adds two numbers."""
    return str(a + b)


def note(what: str, result: Any) -> None:
    """The answers of one run: a call of the tool, and then what came of it."""
    first, last = result.raw_responses
    (call,) = (item for item in first.output if item.type == "function_call")
    made(f"{what}: tool", first.response_id, tool=(call.name, call.arguments))
    (said,) = (item for item in last.output if item.type == "message")
    text = "".join(part.text for part in said.content)
    made(
        f"{what}: answer",
        last.response_id,
        text=text,
        final=result.final_output == text,
        usage=last.usage.output_tokens > 0 and last.usage.requests == 1,
    )


async def play() -> None:
    client = importlib.import_module("openai").AsyncOpenAI()
    agents.set_tracing_disabled(True)
    models = {
        "responses": agents.OpenAIResponsesModel(MODEL, client),
        "chat": agents.OpenAIChatCompletionsModel(MODEL, client),
    }
    for name, model in models.items():
        agent = agents.Agent(
            name="adder",
            instructions="Add.",
            model=model,
            model_settings=agents.ModelSettings(include_usage=True),
            tools=[agents.function_tool(add)],
        )
        note(f"{name}, run", await agents.Runner.run(agent, QUESTION))
        streamed = agents.Runner.run_streamed(agent, QUESTION)
        events = [event async for event in streamed.stream_events()]
        note(f"{name}, streamed", streamed)
        assert any(event.type == "raw_response_event" for event in events)


def main() -> None:
    asyncio.run(play())


if __name__ == "__main__":
    main()
