"""What a function pool on Modal sends to a container and hears of it. Both are msgpack."""

import msgspec

from functions.process import Answer


class RemoteCall(msgspec.Struct, frozen=True, kw_only=True):
    """`function` is to be called with `payload`, which is msgpack; where `load_only` it is loaded and not called."""

    function: str
    payload: msgspec.Raw = msgspec.Raw(b"\xc0")
    load_only: bool = False
    pacing_s: float = 0.0


class RemoteAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """What came of a call, in which container, which began at `born_s`; all times are the container's Unix times."""

    answer: Answer
    container: str
    born_s: float
    begun_s: float
    ended_s: float
