"""The wire's contract: any stream of bytes gives the frames that were sent, or a WireError."""

import struct

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic import wire
from elastic.core.types import Account, Capabilities, FinishReason, WeightMode

CAPABILITIES = Capabilities(engine="test", replayable_sampling=True, max_context_tokens=8, device="cpu")

counts = st.integers(0, 2**40)
words = st.text(max_size=12)
floats = st.floats(allow_nan=False, allow_infinity=False)
shares = st.floats(0, 1)
seconds = st.floats(0, wire.SECONDS_MAX)
accounts = st.dictionaries(st.sampled_from(Account), counts)


@st.composite
def chunk(draw: st.DrawFn) -> wire.Chunk:
    tokens = draw(st.lists(st.tuples(st.integers(0, 2**31), st.floats(-100, 0)), max_size=5))
    return wire.Chunk(
        turn=draw(words),
        attempt=draw(counts),
        start=draw(counts),
        token_ids=[token for token, _ in tokens],
        logprobs=[logprob for _, logprob in tokens],
        weights_version=draw(counts),
        finish=draw(st.none() | st.sampled_from(FinishReason)),
        detail=draw(words),
    )


from_worker = st.one_of(
    st.builds(wire.Hello, st.just(wire.PROTOCOL_VERSION), words, words, st.booleans(), counts, words),
    st.builds(wire.Ready, st.just(CAPABILITIES), st.none() | counts),
    st.builds(wire.Heartbeat, counts, counts, counts, counts, accounts, counts, shares, counts, counts),
    st.builds(wire.Tokens, st.lists(chunk(), max_size=4)),
    st.builds(wire.WeightsReport, counts, words, counts, seconds, seconds),
    st.builds(wire.Goodbye, words, accounts, counts),
    st.builds(wire.Stepped, counts, st.dictionaries(words, floats)),
    st.builds(wire.Published, counts, st.dictionaries(words, floats), st.dictionaries(words, shares)),
    st.just(wire.Slept()),
)

from_orchestrator = st.one_of(
    st.builds(wire.Refused, words, st.booleans()),
    st.builds(
        wire.Generate,
        words,
        counts,
        st.lists(counts),
        counts,
        counts,
        st.lists(counts).map(tuple),
        floats,
        st.integers(0, 2**64 - 1),
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


def test_unequal_tokens_and_logprobs_are_refused() -> None:
    body = msgspec.msgpack.encode(["Tokens", [["turn", 1, 0, [5, 6], [-0.5], 0]]])
    with pytest.raises(wire.WireError, match="as many tokens as log-probabilities"):
        wire.decode_from_worker(body)


@pytest.mark.parametrize("field", [{"attempt": -1}, {"start": -1}, {"token_ids": [-1]}])
def test_negative_positions_and_tokens_are_refused(field: dict[str, object]) -> None:
    good: dict[str, object] = {"turn": "t", "attempt": 1, "start": 0, "token_ids": [1], "logprobs": [0.0]}
    body = msgspec.msgpack.encode(["Tokens", [[*(good | field).values(), 0]]])
    with pytest.raises(wire.WireError, match=">= 0"):
        wire.decode_from_worker(body)


def test_oversize_frames_are_refused_before_they_are_held() -> None:
    buffer = wire.FrameBuffer(max_frame_bytes=10)
    assert [bytes(body) for body in buffer.feed(struct.pack(">I", 10) + b"x" * 10)] == [b"x" * 10]
    with pytest.raises(wire.WireError, match="11 bytes; at most 10"):
        buffer.feed(struct.pack(">I", 11))


def test_a_message_too_large_to_send_is_refused_at_the_sender() -> None:
    with pytest.raises(wire.WireError, match=r"TrainerFailed of \d+ bytes"):
        wire.encode(wire.TrainerFailed("x" * (wire.MAX_FRAME_BYTES + 1)))


@given(st.integers(-(2**40), 2**40).filter(lambda v: v != wire.PROTOCOL_VERSION), st.lists(st.integers() | words))
def test_another_version_is_named_whatever_else_its_hello_holds(version: int, rest: list[object]) -> None:
    rest = [item for item in rest if not isinstance(item, int) or -(2**63) <= item < 2**64]
    with pytest.raises(wire.VersionMismatch, match=f"version {version}, the orchestrator {wire.PROTOCOL_VERSION}"):
        wire.decode_hello(msgspec.msgpack.encode(["Hello", version, *rest]))


def test_the_refusal_that_other_versions_read_never_changes() -> None:
    assert msgspec.msgpack.decode(wire.encode(wire.Refused("no", retry=True))[4:]) == ["Refused", "no", True]


def test_fields_that_a_later_release_appends_are_ignored() -> None:
    body = msgspec.msgpack.encode(["Abort", "turn", 3, "later"])
    assert wire.decode_from_orchestrator(body) == wire.Abort("turn", 3)
