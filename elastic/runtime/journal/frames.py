"""Token frames in a journal: as they came off the wire, and what the core sees of them."""

from collections.abc import Collection, Mapping, Sequence

import msgspec

from elastic.core import events as e
from elastic.core.types import Nanoseconds, Progress, WorkerId
from elastic.protocol import wire
from elastic.runtime.journal.records import EventRow

NAME_MAX = 256
"""Characters that are kept of the name of a turn of which nothing was accepted; those of real turns have fewer."""
FRAME = "frame"
"""Kind of an event that is kept with the frame that it came in."""


class TokenFrame(msgspec.Struct, frozen=True):
    """A token frame of a worker: its chunks, and its body as it came off the wire."""

    chunks: Sequence[wire.Chunk] | Mapping[int, wire.Chunk]
    body: bytes | memoryview


class _Frame(msgspec.Struct, frozen=True, array_like=True):
    """A frame of which all chunks were accepted."""

    worker: WorkerId
    epoch: int
    message: msgspec.Raw


class _PartialFrame(msgspec.Struct, frozen=True, array_like=True):
    """`message` has the chunks at the `accepted` positions; `seen` is what the core saw of all."""

    worker: WorkerId
    epoch: int
    message: wire.Tokens
    seen: tuple[Progress, ...] = ()
    accepted: tuple[int, ...] = ()


_encode = msgspec.msgpack.Encoder().encode
_decode_message = msgspec.msgpack.Decoder(wire.Tokens).decode
_decode = msgspec.msgpack.Decoder(_PartialFrame).decode


def tokens_event(worker: WorkerId, epoch: int, chunks: Sequence[wire.Chunk]) -> e.TokensReceived:
    """A token frame as the core sees it: positions and counts, no ids."""
    return e.TokensReceived(
        worker=worker,
        epoch=epoch,
        chunks=tuple(
            Progress(
                k.turn,
                k.attempt,
                k.start,
                len(k.token_ids),
                k.weights_version,
                k.finish,
                k.detail,
                k.prefilled_tokens,
                k.cached_tokens,
            )
            for k in chunks
        ),
    )


def event_row(event: e.Event, t_ns: Nanoseconds) -> EventRow:
    """Return the row of an event fed to the core."""
    return EventRow(t_ns=t_ns, kind=type(event).__name__, body=_encode(event))


def frame_row(
    event: e.TokensReceived, body: bytes | memoryview, accepted: Collection[int], t_ns: Nanoseconds
) -> EventRow:
    """The journal's row of a token frame: its event, and the accepted chunks of `body`.

    `body` is the frame as it came off the wire. A frame accepted as a whole is stored unchanged; of rejected chunks
    only the counts are stored, for the core looked at no more.
    """
    if not accepted:
        return event_row(msgspec.structs.replace(event, chunks=tuple(map(_refused, event.chunks))), t_ns)
    if len(accepted) == len(event.chunks):
        kept = _encode(_Frame(event.worker, event.epoch, msgspec.Raw(body)))
    else:
        chunks = _decode_message(body).chunks
        message = wire.Tokens([chunks[position] for position in accepted])
        seen = tuple(k if at in accepted else _refused(k) for at, k in enumerate(event.chunks))
        kept = _encode(_PartialFrame(event.worker, event.epoch, message, seen, tuple(accepted)))
    return EventRow(t_ns=t_ns, kind=FRAME, body=kept)


def _refused(chunk: Progress) -> Progress:
    """What the core looks at of a chunk that it does not accept: a turn by this name there never was."""
    turn = chunk.turn if len(chunk.turn) <= NAME_MAX else f"{chunk.turn[:NAME_MAX]}…"
    return msgspec.structs.replace(chunk, turn=turn, detail="")


def read_frame(body: bytes) -> tuple[e.TokensReceived, Mapping[int, wire.Chunk]]:
    """The event of a frame, and its accepted chunks by their position."""
    frame = _decode(body)
    chunks = frame.message.chunks
    if frame.seen:
        event = e.TokensReceived(worker=frame.worker, epoch=frame.epoch, chunks=frame.seen)
        return event, dict(zip(frame.accepted, chunks, strict=True))
    return tokens_event(frame.worker, frame.epoch, chunks), dict(enumerate(chunks))
