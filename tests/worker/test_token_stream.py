"""How long tokens wait in a worker: not at all at their turn's end, for the interval otherwise, nothing overtaken."""

import asyncio
from collections import Counter
from itertools import pairwise
from zlib import crc32

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic.core.types import CHUNK_TOKENS_MAX, Chunk, FinishReason, SamplingParameters
from elastic.engine.base import NO_VERSION, TokenChunk
from elastic.protocol import wire
from elastic.protocol.sampled import pack_ids
from elastic.worker.token_stream import TokenStream
from tests.seeds import examples
from tests.standing_clock import StandingClock

TURNS = ("a", "b", "c", *(f"t{number}" for number in range(64)), *map(str, range(8)))
"""By slot."""


def order(turn: str) -> wire.Generate:
    sampling = SamplingParameters(max_new_tokens=8, noise_seed=0)
    return wire.Generate(turn, 1, TURNS.index(turn), 0, bytearray(pack_ids([1, 2])), sampling)


def chunk(turn: str, start: int, count: int, finish: FinishReason | None = None) -> TokenChunk:
    return TokenChunk(f"{turn}#1.0", start, list(range(count)), [0.0] * count, 0, finish)


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
    assert list(frame.chunks) == [Chunk(0, 0, 5, 0, FinishReason.STOP)]
    assert [ids for _, ids, _ in frame.said()] == [[0, 1, 0, 1, 2]]
    stream.abandon()
    stream.sink([chunk("b", 1, 1, FinishReason.ABORTED)])
    stream.flush()
    assert len(sent) == 1
    await asyncio.sleep(0)


async def test_a_declined_turn_has_no_tokens_and_no_version() -> None:
    sent: list[wire.Tokens] = []
    stream = TokenStream(0.05, sent.append)
    stream.decline([order("a")], FinishReason.STALLED, "held back")
    assert [list(frame.said()) for frame in sent] == [
        [(Chunk(0, 0, 0, NO_VERSION, FinishReason.STALLED, "held back"), [], [])]
    ]


async def test_a_turn_that_begins_or_ends_leaves_alone_and_at_once() -> None:
    sent: asyncio.Queue[wire.Tokens] = asyncio.Queue()
    stream = TokenStream(0.5, sent.put_nowait)
    for turn in ("a", "b"):
        stream.open(order(turn))
    async with asyncio.timeout(30):
        stream.sink([chunk("a", 0, 2)])
        assert list((await sent.get()).chunks) == [Chunk(0, 0, 2, 0)]
        stream.sink([chunk("a", 2, 1), chunk("b", 0, 1)])
        assert list((await sent.get()).chunks) == [Chunk(1, 0, 1, 0)]
        stream.sink([chunk("a", 3, 1, FinishReason.STOP), chunk("b", 1, 1)])
        assert list((await sent.get()).chunks) == [Chunk(0, 2, 2, 0, FinishReason.STOP)]
        stream.sink([chunk("b", 2, 1)])
        assert list((await sent.get()).chunks) == [Chunk(1, 1, 2, 0)]


produced = st.lists(st.tuples(st.sampled_from(TURNS[:3]), st.integers(0, 3), st.booleans()), max_size=4)
"""Of an iteration: tokens by turn, and whether the turn ends with them."""


@given(iterations=st.lists(st.tuples(produced, st.booleans()), max_size=20), whole_turns=st.booleans())
def test_every_turns_tokens_leave_once_and_in_order(iterations, whole_turns) -> None:
    async def stream_all() -> list[Chunk]:
        sent: list[wire.Tokens] = []
        stream = TokenStream(60.0, sent.append, whole_turns=whole_turns)
        for turn in TURNS[:3]:
            stream.open(order(turn))
        said = dict.fromkeys(TURNS[:3], 0)
        living = set(said)
        for iteration, flushed in iterations:
            chunks = []
            for turn, count, ends in iteration:
                if turn in living:
                    chunks.append(chunk(turn, said[turn], count, FinishReason.STOP if ends else None))
                    said[turn] += count
                    living -= {turn} if ends else set()
            stream.sink(chunks)
            if flushed:
                stream.flush()
            await asyncio.sleep(0)
        stream.sink([chunk(turn, said[turn], 0, FinishReason.ABORTED) for turn in sorted(living)])
        stream.flush()
        await asyncio.wait_for(stream.idle(), 1.0)
        chunks = [c for frame in sent for c in frame.chunks]
        assert [sum(c.count for c in chunks if c.slot == slot) for slot in range(3)] == [*said.values()]
        return chunks

    for slot in range(3):
        chunks = [c for c in asyncio.run(stream_all()) if c.slot == slot]
        starts = [c.start for c in chunks]
        assert starts == [sum(c.count for c in chunks[:n]) for n in range(len(chunks))]
        assert [c.finish is not None for c in chunks] == [False] * (len(chunks) - 1) + [True]


@given(
    iterations=st.lists(
        st.tuples(st.integers(1, 40), st.lists(st.tuples(st.integers(0, 3), st.booleans()))), max_size=30
    ),
    interval_ms=st.integers(1, 50),
)
def test_no_token_is_late_and_frames_are_few(iterations: list, interval_ms: int) -> None:
    """`iterations`: milliseconds to the next, and by turn its tokens and whether it ends."""
    sent: list[tuple[float, wire.Tokens]] = []
    produced_s: dict[tuple[str, int], float] = {}
    firsts_s: set[float] = set()
    ends_s: set[float] = set()

    async def stream_all() -> None:
        loop = asyncio.get_running_loop()
        stream = TokenStream(interval_ms / 1000, lambda frame: sent.append((loop.time(), frame)))
        said: dict[str, int] = {}
        ended: set[str] = set()
        for pause_ms, chunks in iterations:
            iteration = []
            for number, (count, ends) in enumerate(chunks):
                turn = f"t{number}"
                if turn in ended:
                    continue
                if turn not in said:
                    stream.open(order(turn))
                    said[turn] = 0
                if count and not said[turn]:
                    firsts_s.add(loop.time())
                produced_s.update({(turn, said[turn] + i): loop.time() for i in range(count)})
                iteration.append(chunk(turn, said[turn], count, FinishReason.STOP if ends else None))
                said[turn] += count
                if ends:
                    ended.add(turn)
                    ends_s.add(loop.time())
            stream.sink(iteration)
            await asyncio.sleep(pause_ms / 1000)
        await asyncio.sleep(1.0)

    with asyncio.Runner(loop_factory=StandingClock) as runner:
        runner.run(stream_all())
    waits_s = {
        (c.slot, c.start + i): at_s - produced_s.pop((TURNS[c.slot], c.start + i))
        for at_s, frame in sent
        for c in frame.chunks
        for i in range(c.count)
    }
    assert produced_s == {}
    assert all(0 <= wait_s <= interval_ms / 1000 + 1e-9 for wait_s in waits_s.values())
    lasted_s = sum(pause_ms for pause_ms, _ in iterations) / 1000
    assert len(sent) <= len(firsts_s) + len(ends_s) + lasted_s / (interval_ms / 1000) + 1
    first_s = {}
    for (slot, place), wait_s in waits_s.items():
        if place == min(p for s, p in waits_s if s == slot):
            first_s[slot] = wait_s
    assert all(wait_s <= 1e-9 for wait_s in first_s.values()), "a first token does not wait"


@settings(max_examples=examples(5, 12), deadline=None)
@given(st.lists(st.integers(1, 3 * CHUNK_TOKENS_MAX // 2), min_size=1, max_size=6))
def test_long_turns_leave_in_frames_that_the_orchestrator_reads(lengths: list[int]) -> None:
    """Each turn's tokens come in pieces of at most a thousand, all before the next flush."""

    async def send() -> list[wire.Tokens]:
        sent: list[wire.Tokens] = []
        stream = TokenStream(3600.0, sent.append, whole_turns=True)
        for n, length in enumerate(lengths):
            stream.open(order(str(n)))
            for start in range(0, length, 1000):
                end = min(start + 1000, length)
                stream.sink([chunk(str(n), start, end - start, FinishReason.STOP if end == length else None)])
        stream.flush()
        return sent

    heard = [wire.decode_from_worker(wire.encode(frame)[4:]) for frame in asyncio.run(send())]
    found = {str(n): 0 for n in range(len(lengths))}
    for frame in heard:
        assert isinstance(frame, wire.Tokens)
        for part in frame.chunks:
            turn = TURNS[part.slot]
            assert part.start == found[turn]
            found[turn] += part.count
            assert (part.finish is not None) == (found[turn] == lengths[int(turn)])
    assert found == {str(n): length for n, length in enumerate(lengths)}


def flushes(phase: float, began_s: float, intervals_s: list[float]) -> list[float]:
    """When a stream of one turn sends that begins then and brings a token a millisecond; every second it is told to
    flush as often as the next of these."""
    sent_s: list[float] = []

    async def stream() -> None:
        loop = asyncio.get_running_loop()
        await asyncio.sleep(began_s)
        stream = TokenStream(intervals_s[0], lambda _: sent_s.append(loop.time()), phase=phase)
        stream.open(order("a"))
        for at in range(1000 * len(intervals_s)):
            if at and at % 1000 == 0:
                stream.flush_every(intervals_s[at // 1000])
            stream.sink([chunk("a", at, 1)])
            await asyncio.sleep(0.001)

    with asyncio.Runner(loop_factory=StandingClock) as runner:
        runner.run(stream())
    return sent_s


def test_a_stream_flushes_as_often_as_it_is_told() -> None:
    sent_s = flushes(0.3, 0.0, [0.05, 0.25, 0.01])
    by_second = [sum(second <= at_s < second + 1 for at_s in sent_s) for second in range(3)]
    assert by_second == [pytest.approx(21, abs=1), pytest.approx(4, abs=1), pytest.approx(100, abs=1)]
    told = [b - a for a, b in pairwise(sent_s)]
    assert max(told) <= 0.25 + 2e-3


def test_workers_whose_turns_begin_together_do_not_flush_together() -> None:
    """Many workers' streams over many intervals: chance must not explain what is seen."""
    phases = [crc32(f"spot-{number}".encode()) / 2**32 for number in range(64)]
    at_ms = Counter(round(1000 * at_s) % 50 for phase in phases for at_s in flushes(phase, 0.2, [0.05])[1:])
    assert max(at_ms.values()) < 0.15 * at_ms.total()
