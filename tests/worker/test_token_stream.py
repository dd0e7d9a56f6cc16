"""How long tokens wait in a worker: not at all at their turn's end, for the interval otherwise, nothing overtaken."""

import asyncio

from hypothesis import given, settings
from hypothesis import strategies as st

from elastic.core.types import FinishReason, SamplingParameters
from elastic.engine.base import NO_VERSION, TokenChunk
from elastic.protocol import wire
from elastic.worker.token_stream import TokenStream
from tests.standing_clock import StandingClock


def order(turn: str) -> wire.Generate:
    return wire.Generate(turn, 1, [1, 2], 0, SamplingParameters(max_new_tokens=8, noise_seed=0))


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
    assert [(c.turn, c.start, len(c.token_ids), c.finish) for c in frame.chunks] == [("a", 0, 5, FinishReason.STOP)]
    stream.abandon()
    stream.sink([chunk("b", 1, 1, FinishReason.ABORTED)])
    stream.flush()
    assert len(sent) == 1
    await asyncio.sleep(0)


async def test_a_declined_turn_has_no_tokens_and_no_version() -> None:
    sent: list[wire.Tokens] = []
    stream = TokenStream(0.05, sent.append)
    stream.decline([order("a")], FinishReason.STALLED, "held back")
    ((declined,),) = [frame.chunks for frame in sent]
    assert (declined.token_ids, declined.weights_version) == ([], NO_VERSION)


async def test_a_turn_that_ends_leaves_alone_and_at_once() -> None:
    sent: asyncio.Queue[wire.Tokens] = asyncio.Queue()
    stream = TokenStream(0.05, sent.put_nowait)
    for turn in ("a", "b"):
        stream.open(order(turn))
    async with asyncio.timeout(5.0):
        stream.sink([chunk("a", 0, 2), chunk("b", 0, 1)])
        stream.sink([chunk("a", 2, 1, FinishReason.STOP), chunk("b", 1, 1)])
        ended = await sent.get()
        stream.sink([chunk("b", 2, 1)])
        waited = await sent.get()
    assert [(c.turn, c.start, len(c.token_ids)) for c in ended.chunks] == [("a", 0, 3)]
    assert [(c.turn, c.start, len(c.token_ids), c.finish) for c in waited.chunks] == [("b", 0, 3, None)]


TURNS = ("a", "b", "c")
produced = st.lists(st.tuples(st.sampled_from(TURNS), st.integers(0, 3), st.booleans()), max_size=4)
"""Of an iteration: tokens by turn, and whether the turn ends with them."""


@given(iterations=st.lists(st.tuples(produced, st.booleans()), max_size=20), whole_turns=st.booleans())
def test_every_turns_tokens_leave_once_and_in_order(iterations, whole_turns) -> None:
    async def stream_all() -> list[wire.Chunk]:
        sent: list[wire.Tokens] = []
        stream = TokenStream(60.0, sent.append, whole_turns=whole_turns)
        for turn in TURNS:
            stream.open(order(turn))
        said = dict.fromkeys(TURNS, 0)
        living = set(TURNS)
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
        assert {turn: sum(len(c.token_ids) for f in sent for c in f.chunks if c.turn == turn) for turn in TURNS} == said
        return [c for frame in sent for c in frame.chunks]

    for turn in TURNS:
        chunks = [c for c in asyncio.run(stream_all()) if c.turn == turn]
        starts = [c.start for c in chunks]
        assert starts == [sum(len(c.token_ids) for c in chunks[:n]) for n in range(len(chunks))]
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
        (c.turn, c.start + i): at_s - produced_s.pop((c.turn, c.start + i))
        for at_s, frame in sent
        for c in frame.chunks
        for i in range(len(c.token_ids))
    }
    assert produced_s == {}
    assert all(0 <= wait_s <= interval_ms / 1000 + 1e-9 for wait_s in waits_s.values())
    lasted_s = sum(pause_ms for pause_ms, _ in iterations) / 1000
    assert len(sent) <= len(ends_s) + lasted_s / (interval_ms / 1000) + 1


@settings(max_examples=12, deadline=None)
@given(st.lists(st.integers(1, 3 * wire.CHUNK_TOKENS_MAX // 2), min_size=1, max_size=6))
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
            assert part.start == found[part.turn]
            found[part.turn] += len(part.token_ids)
            assert (part.finish is not None) == (found[part.turn] == lengths[int(part.turn)])
    assert found == {str(n): length for n, length in enumerate(lengths)}
