"""Whole turns only: nothing of a turn leaves before its end, and then all of it."""

import asyncio

from elastic import wire
from elastic.core.types import FinishReason
from elastic.engine.base import TokenChunk
from elastic.worker.token_stream import TokenStream


def order(turn: str) -> wire.Generate:
    return wire.Generate(turn, 1, [1, 2], 0, 8, (), 1.0, 0)


def chunk(turn: str, start: int, count: int, finish: FinishReason | None = None) -> TokenChunk:
    return TokenChunk(f"{turn}#1", start, list(range(count)), [0.0] * count, 0, finish)


async def test_turns_leave_whole() -> None:
    sent: list[wire.Tokens] = []
    stream = TokenStream(0.001, sent.append, whole_turns=True)
    for turn in ("a", "b"):
        stream.open(order(turn))
    stream.sink([chunk("a", 0, 2), chunk("b", 0, 1)])
    stream.flush()
    assert not sent
    stream.sink([chunk("a", 2, 3, FinishReason.STOP)])
    stream.flush()
    (frame,) = sent
    assert [(c.turn, c.start, len(c.token_ids), c.finish) for c in frame.chunks] == [("a", 0, 5, FinishReason.STOP)]
    stream.abandon()
    stream.sink([chunk("b", 1, 1, FinishReason.ABORTED)])
    stream.flush()
    assert len(sent) == 1
    await asyncio.sleep(0)
