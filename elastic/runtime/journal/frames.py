"""Events in a journal; token frames with the tokens that were accepted."""

from collections.abc import Sequence
from itertools import accumulate

import msgspec

from elastic.core import commands as c
from elastic.core import events as e
from elastic.core.types import Chunks, Nanoseconds, TurnId, WorkerId
from elastic.protocol import wire
from elastic.protocol.sampled import TOKEN_BYTES
from elastic.runtime.journal.records import FRAME, EventRow


class JournaledFrame(msgspec.Struct, frozen=True, array_like=True):
    """A token frame, as it came but for the tokens of chunks that were not accepted. `turns` names the turn of each
    accepted chunk, and is empty for others."""

    worker: WorkerId
    epoch: int
    chunks: Chunks
    token_ids: bytes
    logprobs: bytes
    turns: Sequence[TurnId]

    @property
    def event(self) -> e.TokensReceived:
        return e.TokensReceived(worker=self.worker, epoch=self.epoch, chunks=self.chunks)

    @property
    def tokens(self) -> wire.Tokens:
        """The frame; tokens that were not accepted are zero."""
        return wire.Tokens(self.chunks, self._spread(self.token_ids), self._spread(self.logprobs))

    def _spread(self, kept: bytes) -> bytes:
        if all(self.turns):
            return kept
        places, at = _places(self.chunks), 0
        column = bytearray(places[-1])
        for place in (place for place, turn in enumerate(self.turns) if turn):
            length = places[place + 1] - places[place]
            column[places[place] : places[place + 1]] = kept[at : at + length]
            at += length
        return bytes(column)


_encode = msgspec.msgpack.Encoder().encode
read_frame = msgspec.msgpack.Decoder(JournaledFrame).decode


def event_row(event: e.Event, t_ns: Nanoseconds) -> EventRow:
    """Return the row of an event fed to the core."""
    return EventRow(t_ns=t_ns, kind=type(event).__name__, body=_encode(event))


def frame_row(
    event: e.TokensReceived, tokens: wire.Tokens, accepted: c.AcceptTokens | None, t_ns: Nanoseconds
) -> EventRow:
    """The journal's row of a token frame of which this was accepted.

    Of other chunks only the counts are kept, for the core looked at no more.
    """
    chunks, ids, logprobs = event.chunks, tokens.token_ids, tokens.logprobs
    turns: Sequence[TurnId] = [""] * len(chunks) if accepted is None else accepted.names(len(chunks))
    if accepted is None or len(accepted.turns) < len(turns):
        ends = [end if turns[end.place] else msgspec.structs.replace(end, detail="") for end in chunks.ends]
        chunks = msgspec.structs.replace(chunks, ends=ends)
        if accepted is None:
            return event_row(msgspec.structs.replace(event, chunks=chunks), t_ns)
        places = _places(chunks)
        kept = [slice(places[at], places[at + 1]) for at in accepted.chunks]
        ids, logprobs = (b"".join([column[part] for part in kept]) for column in (ids, logprobs))
    body = _encode(JournaledFrame(event.worker, event.epoch, chunks, ids, logprobs, turns))
    return EventRow(t_ns=t_ns, kind=FRAME, body=body)


def _places(chunks: Chunks) -> list[int]:
    """Where in its frame's bytes each chunk begins, and the last one ends."""
    return [TOKEN_BYTES * tokens for tokens in accumulate(chunks.counts, initial=0)]
