"""Errors as LiteLLM raises them, by its providers `openai` and `hosted_vllm`, and whether it asks again."""

import importlib
from collections.abc import Mapping
from typing import Any

import pytest

from tests.clients.refusals import REFUSALS, TOLD, Refusal, answers_one_token, attempts, break_turn, refuse
from tests.front.fronted import AGENT, HELLO, Served

# Its models warn where pydantic first builds them, in the middle of a call.
pytestmark = [pytest.mark.clients, pytest.mark.filterwarnings("ignore")]

KINDS: Mapping[int, str] = {
    400: "BadRequestError",
    404: "NotFoundError",
    409: "APIError",
    410: "APIError",
    429: "RateLimitError",
    500: "InternalServerError",
    503: "ServiceUnavailableError",
}
PROVIDERS = ("openai", "hosted_vllm")


@pytest.fixture(scope="session")
def litellm() -> Any:
    module = importlib.import_module("litellm")
    module.telemetry = False
    return module


async def ask(litellm: Any, served: Served, provider: str, **more: Any) -> Any:
    settings = {"api_base": f"{served.url}/v1", "api_key": AGENT, "max_retries": 1, "messages": HELLO, **more}
    return await litellm.acompletion(model=f"{provider}/small", **settings)


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda refusal: str(refusal.status))
async def test_refusals(litellm: Any, served: Served, refusal: Refusal, provider: str) -> None:
    refuse(served, refusal)
    with pytest.raises(getattr(litellm, KINDS[refusal.status])) as refused:
        await ask(litellm, served, provider)
    assert refused.value.status_code == refusal.status
    assert TOLD in str(refused.value)
    assert attempts(served) == (refusal.attempts if provider == "openai" else 1)


@pytest.mark.parametrize("provider", PROVIDERS)
async def test_too_long_a_prompt_is_what_harnesses_look_for(litellm: Any, served: Served, provider: str) -> None:
    with pytest.raises(litellm.ContextWindowExceededError):
        await ask(litellm, served, provider, messages=[{"role": "user", "content": "x" * 5000}])


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("restarts", [True, False])
async def test_a_stream_that_is_torn_or_fails_is_no_answer(
    litellm: Any, served: Served, provider: str, restarts: bool
) -> None:
    served.run.answer = answers_one_token
    chunks = await ask(litellm, served, provider, stream=True)
    with pytest.raises(litellm.exceptions.MidStreamFallbackError):
        await read(served, chunks, restarts)


async def read(served: Served, chunks: Any, restarts: bool) -> None:
    """A stream that breaks behind its first piece."""
    async for _ in chunks:
        await break_turn(served, restarts)
