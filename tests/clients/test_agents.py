"""Errors as OpenAI's Agents SDK raises them, by both of its model classes, and whether it asks again."""

import importlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.clients.refusals import (
    OPENAI_KINDS,
    REFUSALS,
    TOLD,
    Refusal,
    answers_one_token,
    attempts,
    break_turn,
    refuse,
)
from tests.front.fronted import AGENT, Served

pytestmark = pytest.mark.clients


@pytest.fixture(scope="session")
def agents() -> Any:
    module = importlib.import_module("agents")
    module.set_tracing_disabled(True)
    return module


@pytest.fixture(scope="session")
def openai() -> Any:
    return importlib.import_module("openai")


@pytest.fixture(params=["OpenAIResponsesModel", "OpenAIChatCompletionsModel"])
async def agent(agents: Any, openai: Any, served: Served, request: pytest.FixtureRequest) -> AsyncIterator[Any]:
    async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key=AGENT, timeout=30, max_retries=1) as client:
        yield agents.Agent(name="agent", model=getattr(agents, request.param)("small", client))


@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda refusal: str(refusal.status))
async def test_refusals(agents: Any, openai: Any, served: Served, agent: Any, refusal: Refusal) -> None:
    refuse(served, refusal)
    with pytest.raises(getattr(openai, OPENAI_KINDS[refusal.status])) as refused:
        await agents.Runner.run(agent, "hello")
    assert (refused.value.status_code, refused.value.code) == (refusal.status, f"code_{refusal.status}")
    assert TOLD in str(refused.value)
    assert attempts(served) == refusal.attempts


@pytest.mark.parametrize("restarts", [True, False])
async def test_a_stream_that_is_torn_or_fails_is_no_answer(
    agents: Any, openai: Any, served: Served, agent: Any, restarts: bool
) -> None:
    served.run.answer = answers_one_token
    streamed = agents.Runner.run_streamed(agent, "hello")
    # A response that failed is the model's doing to it.
    with pytest.raises((openai.APIError, agents.ModelBehaviorError)):
        await read(served, streamed, restarts)
    assert not streamed.final_output


async def read(served: Served, streamed: Any, restarts: bool) -> None:
    """A stream that breaks behind its first events."""
    async for event in streamed.stream_events():
        if event.type == "raw_response_event" and served.run.turns:
            await break_turn(served, restarts)
