"""Errors as Anthropic's client raises them: which class, what is in it, and whether it asks again."""

import importlib
from collections.abc import AsyncIterator, Mapping
from typing import Any

import pytest

from tests.clients.refusals import REFUSALS, TOLD, Refusal, answers_one_token, attempts, break_turn, refuse
from tests.front.fronted import AGENT, HELLO, Served

pytestmark = pytest.mark.clients

KINDS: Mapping[int, str] = {
    400: "BadRequestError",
    404: "NotFoundError",
    409: "ConflictError",
    410: "APIStatusError",
    429: "RateLimitError",
    500: "InternalServerError",
    503: "InternalServerError",
}
OVERLOADED = 529


@pytest.fixture(scope="session")
def anthropic() -> Any:
    return importlib.import_module("anthropic")


@pytest.fixture
async def agent(anthropic: Any, served: Served) -> AsyncIterator[Any]:
    async with anthropic.AsyncAnthropic(base_url=served.url, api_key=AGENT, timeout=30, max_retries=1) as client:
        yield client


@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda refusal: str(refusal.status))
async def test_refusals(anthropic: Any, served: Served, agent: Any, refusal: Refusal) -> None:
    refuse(served, refusal)
    with pytest.raises(getattr(anthropic, KINDS[refusal.status])) as refused:
        await agent.messages.create(model="small", messages=HELLO, max_tokens=20)
    assert refused.value.status_code == (OVERLOADED if refusal.status == 503 else refusal.status)
    assert TOLD in str(refused.value)
    assert refused.value.request_id
    assert attempts(served) == refusal.attempts


async def test_too_long_a_prompt_begins_as_its_own_do(anthropic: Any, agent: Any) -> None:
    with pytest.raises(anthropic.BadRequestError) as refused:
        await agent.messages.create(model="small", messages=[{"role": "user", "content": "x" * 5000}], max_tokens=20)
    assert refused.value.body["error"]["message"].startswith("prompt is too long")


async def test_a_stream_whose_turn_fails_is_an_error(anthropic: Any, served: Served, agent: Any) -> None:
    served.run.answer = answers_one_token
    with pytest.raises(anthropic.APIError, match="the engine broke"):
        await read(served, agent, restarts=False)


async def test_a_torn_stream_is_an_error_of_the_transport(served: Served, agent: Any) -> None:
    served.run.answer = answers_one_token
    with pytest.raises(importlib.import_module("httpx2").TransportError):
        await read(served, agent, restarts=True)


async def read(served: Served, agent: Any, restarts: bool) -> None:
    """A stream that breaks behind its first text."""
    async with agent.messages.stream(model="small", messages=HELLO, max_tokens=20) as stream:
        async for text in stream.text_stream:
            assert text == "."
            await break_turn(served, restarts)
