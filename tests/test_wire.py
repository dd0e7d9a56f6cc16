"""The wire's contract: any stream of bytes gives the frames that were sent, or a WireError."""

import math
import struct
import sys
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import inspect

from elastic.core.types import (
    CHUNK_TOKENS_MAX,
    TEXT_MAX,
    Account,
    Capabilities,
    Chunk,
    ChunkEnd,
    ChunkPrompt,
    Chunks,
    FinishReason,
    LogprobCheck,
    SamplingParameters,
    WeightMode,
)
from elastic.protocol import wire
from elastic.protocol.sampled import Sampled, pack_ids
from tests.seeds import examples

CAPABILITIES = Capabilities(engine="test", replayable_sampling=True, max_context_tokens=8, device="cpu")

counts = st.integers(0, 2**40)
words = st.text(max_size=12)
floats = st.floats(allow_nan=False, allow_infinity=False)
shares = st.floats(0, 1)
seconds = st.floats(0, wire.SECONDS_MAX)
accounts = st.dictionaries(st.sampled_from(Account), counts)


@st.composite
def said(draw: st.DrawFn) -> tuple[Chunk, list[int], list[float]]:
    tokens = draw(st.lists(st.tuples(st.integers(0, 2**31 - 1), st.floats(-100, 0, width=32)), max_size=5))
    finish = draw(st.none() | st.sampled_from(FinishReason))
    detail = "" if finish is None else draw(words)
    few = st.integers(0, 2**31 - 1)
    chunk = Chunk(draw(counts), draw(counts), len(tokens), draw(counts), finish, detail, draw(few), draw(few))
    return chunk, [token for token, _ in tokens], [logprob for _, logprob in tokens]


from_worker = st.one_of(
    st.builds(wire.Hello, st.just(wire.PROTOCOL_VERSION), words, words, st.booleans(), counts, words),
    st.builds(wire.Ready, st.just(CAPABILITIES), st.none() | counts),
    st.builds(wire.Heartbeat, counts, counts, counts, counts, accounts, counts, shares, counts, counts),
    st.builds(wire.Tokens.of, st.lists(said(), max_size=4)),
    st.builds(wire.WeightsReport, counts, words, counts, seconds, seconds),
    st.builds(wire.Notice, st.none() | seconds, words),
    st.builds(wire.Goodbye, words, accounts, counts),
    st.builds(wire.Stepped, counts, st.dictionaries(words, floats)),
    st.builds(wire.PublishedFrame, counts, st.dictionaries(words, floats), st.dictionaries(words, shares)),
    st.just(wire.Slept()),
)

from_orchestrator = st.one_of(
    st.builds(wire.RefusedFrame, words, st.booleans()),
    st.builds(
        wire.Generate,
        words,
        counts,
        counts,
        counts,
        st.lists(st.integers(0, 2**31 - 1)).map(pack_ids).map(bytearray),
        st.builds(
            SamplingParameters,
            max_new_tokens=counts,
            noise_seed=st.integers(0, 2**64 - 1),
            stop_token_ids=st.lists(counts).map(tuple),
            temperature=floats,
            top_p=shares,
            top_k=counts,
        ),
    ),
    st.builds(wire.PullWeights, counts, st.sampled_from(WeightMode)),
    st.just(wire.Ping()),
)


@given(st.lists(from_worker, max_size=8), st.data())
def test_any_split_of_the_stream_gives_the_same_messages(messages: list[wire.FromWorker], data: st.DataObject) -> None:
    stream = b"".join(map(wire.encode, messages))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=20)))
    buffer = wire.FrameBuffer()
    received = [
        wire.decode_from_worker(body)
        for begin, end in zip([0, *cuts], [*cuts, len(stream)], strict=True)
        for body in buffer.feed(stream[begin:end])
    ]
    assert received == messages


@given(from_orchestrator)
def test_orchestrator_messages_survive_the_wire_byte_by_byte(message: wire.FromOrchestrator) -> None:
    buffer = wire.FrameBuffer()
    bodies = [body for byte in wire.encode(message) for body in buffer.feed(bytes([byte]))]
    assert list(map(wire.decode_from_orchestrator, bodies)) == [message]


@given(st.binary(max_size=200))
def test_garbage_is_a_wire_error(body: bytes) -> None:
    for decode in (wire.decode_from_worker, wire.decode_from_orchestrator, wire.decode_hello):
        with pytest.raises(wire.WireError):
            decode(body)


@given(from_worker, st.data())
def test_a_damaged_message_is_a_message_or_a_wire_error(message: wire.FromWorker, data: st.DataObject) -> None:
    body = bytearray(wire.encode(message)[4:])
    at = data.draw(st.integers(0, len(body) - 1))
    body[at] = data.draw(st.integers(0, 255))
    try:
        decoded = wire.decode_from_worker(bytes(body))
    except wire.WireError:
        return
    assert isinstance(decoded, msgspec.Struct)


@pytest.mark.parametrize(
    "body",
    [
        b"\x92\xa7Stepped" + b"\x91" * 100_000,
        b"\x92\xa6Tokens\xdd\xff\xff\xff\xff",
        b"\xdd\xff\xff\xff\xff\xa6Tokens",
        b"\x9c\xa7Welcome\xa1k\x01" + b"\xcb" + bytes(8) + b"\xcb" + bytes(8) + b"\xcb" + bytes(8) + b"\x81" * 99_999,
    ],
    ids=["deep", "long list", "long message", "deep map"],
)
def test_hostile_nesting_and_lengths_are_wire_errors(body: bytes) -> None:
    for decode in (wire.decode_from_worker, wire.decode_from_orchestrator, wire.decode_hello):
        with pytest.raises(wire.WireError):
            decode(body)


@pytest.mark.parametrize("column", ["slots", "starts", "counts"])
def test_negative_positions_and_counts_are_refused(column: str) -> None:
    columns = {"slots": [0], "starts": [0], "counts": [0]} | {column: [-1]}
    body = msgspec.msgpack.encode(["Tokens", [*columns.values(), [[0, 1]]], b"", b""])
    with pytest.raises(wire.WireError, match=rf"^Tokens\.chunks\.{column}: Expected int >= 0"):
        wire.decode_from_worker(body)


def test_oversize_frames_are_refused_before_they_are_held() -> None:
    buffer = wire.FrameBuffer(max_frame_bytes=10)
    assert [bytes(body) for body in buffer.feed(struct.pack(">I", 10) + b"x" * 10)] == [b"x" * 10]
    with pytest.raises(wire.WireError, match="11 bytes; at most 10"):
        buffer.feed(struct.pack(">I", 11))


def test_a_message_too_large_to_send_is_refused_at_the_sender() -> None:
    with pytest.raises(wire.WireError, match=r"TrainerFailed of \d+ bytes"):
        wire.encode(wire.TrainerFailedFrame("x" * (wire.MAX_FRAME_BYTES + 1)))


@given(st.integers(-(2**40), 2**40).filter(lambda v: v != wire.PROTOCOL_VERSION), st.lists(st.integers() | words))
def test_another_version_is_named_whatever_else_its_hello_holds(version: int, rest: list[object]) -> None:
    rest = [item for item in rest if not isinstance(item, int) or -(2**63) <= item < 2**64]
    with pytest.raises(wire.VersionMismatch, match=f"version {version}, the orchestrator {wire.PROTOCOL_VERSION}"):
        wire.decode_hello(msgspec.msgpack.encode(["Hello", version, *rest]))


def test_the_refusal_that_other_versions_read_never_changes() -> None:
    assert msgspec.msgpack.decode(wire.encode(wire.RefusedFrame("no", retry=True))[4:]) == ["Refused", "no", True]


def test_only_a_chunk_without_tokens_has_no_weights_version() -> None:
    """As a worker sends for a turn that it declines."""
    declined = wire.Tokens.of([(Chunk(1, 0, 0, -1, FinishReason.ABORTED), [], [])])
    assert wire.decode_from_worker(wire.encode(declined)[4:]) == declined
    claimed = wire.Tokens.of([(Chunk(1, 0, 1, -1), [5], [-0.5])])
    with pytest.raises(wire.WireError, match="tokens are of a weights version"):
        wire.decode_from_worker(wire.encode(claimed)[4:])


FRAME = wire.Tokens.of(
    [
        (Chunk(0, 5, 2, 3, prefilled=4), [7, 8], [-0.5, -1.0]),
        (Chunk(1, 0, 1, 4, FinishReason.STOP), [9], [-0.25]),
        (Chunk(2, 0, 0, 4, FinishReason.ABORTED, "drained"), [], []),
    ]
)


@given(st.lists(said(), max_size=6))
def test_a_frame_says_what_its_columns_are_of(chunks: list[tuple[Chunk, list[int], list[float]]]) -> None:
    assert list(wire.Tokens.of(chunks).said()) == chunks


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"slots": [0, 1]}, "different lengths"),
        ({"starts": [0, 1, 2, 3]}, "different lengths"),
        ({"versions": [(3, 1), (4, 1)]}, "different lengths"),
        ({"counts": [2, 1, 1]}, "as many token ids"),
        ({"counts": [1, 1, 0]}, "as many token ids"),
        ({"ends": FRAME.chunks.ends[::-1]}, "not in their order"),
        ({"ends": [FRAME.chunks.ends[0]] * 2}, "not in their order"),
        ({"ends": [ChunkEnd(3, FinishReason.STOP)]}, "not in their order"),
        ({"prompts": [ChunkPrompt(3, 1, 1)]}, "not in their order"),
        ({"token_ids": FRAME.token_ids[:-4]}, "as many token ids"),
        ({"token_ids": FRAME.token_ids[:-1]}, "as many token ids"),
        ({"logprobs": FRAME.logprobs + b"\0\0\0\0"}, "as many token ids"),
        *(
            ({"logprobs": FRAME.logprobs[:8] + struct.pack("<f", odd)}, "^log-probability")
            for odd in (math.nan, math.inf, -math.inf, 0.5, -101.0)
        ),
    ],
)
def test_columns_that_do_not_fit_each_other_are_refused(changed: dict[str, Any], named: str) -> None:
    of_chunks = {name: value for name, value in changed.items() if name in Chunks.__struct_fields__}
    chunks = msgspec.structs.replace(FRAME.chunks, **of_chunks)
    frame = msgspec.structs.replace(FRAME, **({"chunks": chunks} if of_chunks else changed))
    assert wire.decode_from_worker(wire.encode(FRAME)[4:]) == FRAME
    with pytest.raises(wire.WireError, match=named):
        wire.decode_from_worker(wire.encode(frame)[4:])


def test_fields_that_a_later_release_appends_are_ignored() -> None:
    body = msgspec.msgpack.encode(["Abort", "turn", 3, "later"])
    assert wire.decode_from_orchestrator(body) == wire.Abort("turn", 3)


def _bounded(at: inspect.Type, where: str) -> list[str]:
    """Fields below `at` that have no end."""
    match at:
        case inspect.IntType():
            held = at.ge is not None and at.ge >= -1 and at.le is not None and at.le < 2**53
            return [] if held else [where]
        case inspect.FloatType():
            lowest = at.ge if at.ge is not None else at.gt
            held = lowest is not None and at.le is not None and math.isfinite(lowest) and math.isfinite(at.le)
            return [] if held else [where]
        case inspect.StrType():
            return [] if at.max_length is not None else [where]
        case inspect.TupleType(item_types=types):
            return [name for one in types for name in _bounded(one, where)]
        case inspect.ListType(item_type=item):
            return ([] if at.max_length is not None else [where]) + _bounded(item, f"{where}[]")
        case inspect.DictType(key_type=key, value_type=value):
            finite_keys = isinstance(key, inspect.EnumType | inspect.LiteralType)
            held = finite_keys or at.max_length is not None
            keys = [] if finite_keys else _bounded(key, f"{where} key")
            return ([] if held else [where]) + keys + _bounded(value, f"{where}{{}}")
        case inspect.StructType(fields=fields):
            return [name for field in fields for name in _bounded(field.type, f"{where}.{field.encode_name}")]
        case inspect.UnionType(types=types):
            return [name for one in types for name in _bounded(one, where)]
        case inspect.BoolType() | inspect.NoneType() | inspect.EnumType() | inspect.LiteralType():
            return []
        case inspect.BytesType() if where in ("Tokens.token_ids", "Tokens.logprobs"):
            return []  # As many as are counted.
        case _:
            return [f"{where}: {type(at).__name__}"]


@pytest.mark.parametrize("kind", get_args(wire.FromWorker), ids=lambda kind: kind.__name__)
def test_every_field_that_a_worker_fills_has_bounds(kind: type) -> None:
    assert _bounded(inspect.type_info(kind), kind.__name__) == []


def _parts(
    at: inspect.Type, good: Any, rebuild: Callable[[object], object]
) -> Iterator[tuple[inspect.Type, Callable[[object], object]]]:
    """Every value inside `good`, a plain message of type `at`, with the whole message in which something is in its
    place: (type, whole message by what is put there)."""
    match at:
        case inspect.UnionType(types=types):
            at = next(one for one in types if not isinstance(one, inspect.NoneType))
        case _:
            pass
    yield at, rebuild
    match at:
        case inspect.StructType(fields=fields, array_like=True):
            assert isinstance(good, list)
            tagged = at.tag is not None
            for n, field in enumerate(fields, tagged):
                yield from _parts(field.type, good[n], lambda v, n=n: rebuild([*good[:n], v, *good[n + 1 :]]))
        case inspect.StructType(fields=fields):
            assert isinstance(good, dict)
            for field in fields:
                name = field.encode_name
                yield from _parts(field.type, good[name], lambda v, name=name: rebuild(good | {name: v}))
        case inspect.TupleType(item_types=types):
            assert isinstance(good, list)
            for n, item in enumerate(types):
                yield from _parts(item, good[n], lambda v, n=n: rebuild([*good[:n], v, *good[n + 1 :]]))
        case inspect.ListType(item_type=item):
            assert isinstance(good, list)
            yield from _parts(item, good[0], lambda v: rebuild([v, *good[1:]]))
        case inspect.DictType(value_type=value):
            assert isinstance(good, dict)
            key = next(iter(good))
            yield from _parts(value, good[key], lambda v: rebuild(good | {key: v}))
        case _:
            pass


def _beyond(at: inspect.Type) -> list[Any]:
    """What a field of this type must not hold."""
    match at:
        case inspect.IntType(ge=int() as least, le=int() as most):
            return [least - 1, most + 1, 2**53, 2**63, 2**64 - 1, -(2**63), 1.5, math.nan, "1", [], {}]
        case inspect.FloatType(le=int() | float() as most):
            over = [] if most == sys.float_info.max else [math.nextafter(most, math.inf)]
            return [math.nan, math.inf, -math.inf, *over, "1", [], {}]
        case inspect.StrType(max_length=int() as most):
            return ["x" * (most + 1), 1, [], {}]
        case inspect.EnumType() | inspect.LiteralType():
            return ["no such thing", "", 1, []]
        case inspect.ListType(max_length=int() as most):
            return [[None] * (most + 1), 1, "x", {}]
        case inspect.DictType():
            return [{"no such key": None}, 1, "x", []]
        case inspect.BoolType():
            return [1, "yes", []]
        case _:
            return [1, "x"]


GOOD = {
    wire.Hello: wire.Hello(wire.PROTOCOL_VERSION, "w", "s", False, 1, "h", "r"),
    wire.Ready: wire.Ready(
        Capabilities(
            engine="e",
            replayable_sampling=True,
            max_context_tokens=8,
            device="d",
            tflops=1.0,
            memory_gb_per_s=1.0,
            max_batch=1,
            logprob_noise=0.1,
        ),
        1,
        "",
        ["0/0"],
        [0],
        [-0.5],
    ),
    wire.Heartbeat: wire.Heartbeat(1, 1, 1, 1, {Account.IDLE: 1}, 1, 0.5, 1, 1),
    wire.Tokens: wire.Tokens.of([(Chunk(1, 0, 1, 0, FinishReason.STOP, "d", 1, 1), [1], [-0.5])]),
    wire.WeightsReport: wire.WeightsReport(
        1, "", 1, 0.5, 0.5, 1, {"wire": 0.5}, [wire.UnverifiedWeights("a", "b")], [-0.5]
    ),
    wire.Slept: wire.Slept(),
    wire.StillThere: wire.StillThere(),
    wire.Awoke: wire.Awoke(),
    wire.Notice: wire.Notice(0.5, "why"),
    wire.Goodbye: wire.Goodbye("", {Account.IDLE: 1}, 1),
    wire.Trained: wire.Trained("0/0", 0.5, [LogprobCheck("w", 1, 1, 0.5)]),
    wire.Stepped: wire.Stepped(1, {"loss": 0.5}, {"0/0": "why"}, [LogprobCheck("w", 1, 1, 0.5)], [-0.5]),
    wire.PublishedFrame: wire.PublishedFrame(1, {"loss": 0.5}, {"layer": 0.5}),
    wire.TrainerFailedFrame: wire.TrainerFailedFrame("why"),
    wire.UpdateRefused: wire.UpdateRefused(1, "why", True),
}


@pytest.mark.parametrize("kind", get_args(wire.FromWorker), ids=lambda kind: kind.__name__)
def test_no_field_of_any_frame_holds_what_it_must_not(kind: type) -> None:
    plain = msgspec.msgpack.decode(msgspec.msgpack.encode(GOOD[kind]))
    assert wire.decode_from_worker(msgspec.msgpack.encode(plain)) == GOOD[kind]
    for at, whole in _parts(inspect.type_info(kind), plain, lambda v: v):
        for value in _beyond(at):
            body = msgspec.msgpack.encode(whole(value))
            with pytest.raises(wire.WireError) as refused:
                wire.decode_from_worker(body)
            assert "`" not in str(refused.value) or "not a worker's message" in str(refused.value)


def test_a_refusal_names_the_field() -> None:
    body = msgspec.msgpack.encode(["Ready", {**msgspec.to_builtins(CAPABILITIES), "tflops": 0.0}, None])
    with pytest.raises(wire.WireError, match=r"^Ready\.capabilities\.tflops: Expected float > 0"):
        wire.decode_from_worker(body)


def test_texts_and_metrics_are_made_to_fit_by_their_sender() -> None:
    failed = wire.TrainerFailedFrame(wire.clipped("x" * 100_000))
    assert wire.decode_from_worker(wire.encode(failed)[4:]) == failed
    stepped = wire.Stepped(1, wire.finite({"loss": math.nan, "kl": math.inf, "reward": 0.5}))
    assert wire.decode_from_worker(wire.encode(stepped)[4:]) == wire.Stepped(1, {"reward": 0.5})


def test_a_frame_full_of_tokens_is_no_larger_than_what_is_read() -> None:
    tokens = [2**31 - 1] * CHUNK_TOKENS_MAX
    chunk = Chunk(2**53 - 1, 2**53 - 1, len(tokens), 2**53 - 1, FinishReason.ERROR, "x" * TEXT_MAX)
    said = (chunk, tokens, [-99.5] * len(tokens))
    assert len(wire.encode(wire.Tokens.of([said] * (wire.FRAME_TOKENS // CHUNK_TOKENS_MAX)))) > 0


@given(st.lists(st.integers(0, 3 * wire.PART_BYTES // 4 // 8), max_size=12))
@settings(max_examples=examples(8, 20), deadline=None)
def test_a_group_goes_to_the_trainer_in_frames_that_it_reads(lengths: list[int]) -> None:
    data = [
        wire.TrajectoryData(str(n), bytearray(4 * tokens), Sampled([(0, tokens)], bytearray(4 * tokens)))
        for n, tokens in enumerate(lengths)
    ]
    order = wire.TrainGroupFrame(1, "g", 0, data, {"w": 0.5})
    *parts, last = wire.in_parts(order)
    assert [one for part in (*parts, last) for one in part.trajectories] == data
    assert last == msgspec.structs.replace(order, trajectories=last.trajectories)
    for part in (*parts, last):
        sizes = [one.size_bytes for one in part.trajectories]
        assert len(wire.encode(part)) <= max(wire.PART_BYTES, *sizes, 0) + 4096
    merged = (sum(one.size_bytes for part in pair for one in part.trajectories) for pair in pairwise([*parts, last]))
    assert all(size_bytes > wire.PART_BYTES for size_bytes in merged), "as few frames as there can be"


def test_sixty_four_trajectories_of_a_whole_context_fit_the_frames_that_there_are() -> None:
    tokens = 131_072
    one = wire.TrajectoryData("0/0/0", bytearray(4 * tokens), Sampled([(1, tokens - 1)], bytearray(4 * (tokens - 1))))
    frames = wire.in_parts(wire.SkipGroup(1, "g", 0, "", 7, [one] * 64))
    assert sum(len(frame.trajectories) for frame in frames) == 64
    assert all(len(wire.encode(frame)) < wire.MAX_FRAME_BYTES // 4 for frame in frames)
