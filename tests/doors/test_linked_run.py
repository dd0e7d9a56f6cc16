"""A run behind doors that does not answer: its clients are told when to ask again."""

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from elastic.front.doors.base import DoorRefused, PauseMode, ServedModelFacts, TokenRequest, WeightsOffer
from elastic.front.doors.served import LinkedRun
from elastic.front.link import RunLink
from elastic.front.rendering.reading import Decoding

FACTS = ServedModelFacts(
    name="policy", max_model_len=64, vocab_size=8, dtype="bfloat16", created_s=0, turns_max=8, world_size=1
)


async def nobody() -> Any:
    raise ConnectionRefusedError


def no_decoder() -> Decoding:
    raise AssertionError("nothing is to be decoded")


@pytest.mark.parametrize(
    "ask",
    [
        lambda run: run.generate(TokenRequest(prompt_ids=[1]), ExitStack()),
        lambda run: run.offer(WeightsOffer(directory=Path("/"))),
        lambda run: run.pause(PauseMode.KEEP),
        lambda run: run.status(),
    ],
)
async def test_who_has_waited_for_as_long_as_calls_are_held_is_told_to_ask_again(
    ask: Callable[[LinkedRun], Coroutine[Any, Any, Any]],
) -> None:
    link = RunLink(nobody)
    linking = asyncio.create_task(link.run())
    with pytest.raises(DoorRefused, match=r"nothing came from the run for 0\.05 s") as refused:
        async with asyncio.timeout(10):
            await ask(LinkedRun(link, no_decoder, FACTS, frozenset(), 0.05))
    assert refused.value.again
    assert refused.value.retry_after_s == 1
    linking.cancel()
