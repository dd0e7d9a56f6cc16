"""What passes between a worker and vLLM's process, over a pair of connected sockets that only these two have."""

import contextlib
import os
import socket
from multiprocessing.connection import Connection
from threading import Lock
from typing import Any, TypeAlias, dataclass_transform

import msgspec

from elastic.core.types import Account, WeightMode
from elastic.engine.base import GenerateRequest, TokenChunk
from elastic.engine.torch.pacing import NO_LOAD, IterationLoad
from elastic.weights.source import PullReport, RelaySource


@dataclass_transform(frozen_default=True, field_specifiers=(msgspec.field,))
class _PipeMessage(msgspec.Struct, frozen=True, tag=True, array_like=True):
    pass


# To vLLM's process.


class Begin(_PipeMessage):
    """The first message: which model, and `arguments` of vLLM's engine."""

    model_config: dict[str, Any]
    arguments: dict[str, Any]
    sleep_level: int


class Submit(_PipeMessage):
    requests: list[GenerateRequest]


class AbortRequests(_PipeMessage):
    request_ids: list[str]


class Prefetch(_PipeMessage):
    call: int
    source: RelaySource
    timeout_s: float


class LoadVersion(_PipeMessage):
    """Put in force what was prefetched from `source`, or, as `version`, the tensors in the file `path`.

    The answer has the log-probabilities of the text `proof` with them, from its second token on.
    """

    call: int
    version: int
    mode: WeightMode
    source: RelaySource | None = None
    path: str = ""
    proof: list[int] = []


class SleepNow(_PipeMessage):
    call: int


class WakeUp(_PipeMessage):
    call: int


class Audit(_PipeMessage):
    call: int


class ReadBack(_PipeMessage):
    """Write the live parameters to the file `path`, by vLLM's names."""

    call: int
    path: str


ToVllm: TypeAlias = Begin | Submit | AbortRequests | Prefetch | LoadVersion | SleepNow | WakeUp | Audit | ReadBack


# From vLLM's process.


class Up(_PipeMessage):
    """vLLM is up. `device` is the name of the device that it computes on."""

    device: str
    max_context_tokens: int
    kv_blocks: int


class Failed(_PipeMessage):
    """The engine cannot be had; the process ends."""

    reason: str


class Queue(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """vLLM's own counts, after an iteration."""

    pending: int
    executing: int
    kv_blocks_used: int
    prefix_hit_tokens: int
    prompt_tokens: int


class Iterated(_PipeMessage):
    """What came of an iteration, or of aborts alone (no `ns` then): what it computed, and its time."""

    chunks: list[TokenChunk]
    queue: Queue
    ns: int = 0
    load: IterationLoad = NO_LOAD


class Spends(_PipeMessage):
    """From here on nothing is generated: the process does this. Ends with the reply to what it was ordered."""

    account: Account


class PrefetchProgress(_PipeMessage):
    """A prefetch's progress: the bytes that have come off relays so far."""

    received_bytes: int


class Reply(_PipeMessage):
    """The answer to a call; `error` is the name of what was raised, empty where nothing was."""

    call: int
    error: str = ""
    detail: str = ""
    report: PullReport | None = None
    sound: bool = True
    proof: list[float] = []
    state_bytes: int = 0
    """The weights that all ranks have, in an answer to `SleepNow` and `WakeUp`."""


FromVllm: TypeAlias = Up | Failed | Iterated | Spends | PrefetchProgress | Reply

_encoder = msgspec.msgpack.Encoder()
_to_vllm = msgspec.msgpack.Decoder(ToVllm)
_from_vllm = msgspec.msgpack.Decoder(FromVllm)


class Line:
    """One end of the connection. Any thread may send; one receives. Both raise `OSError` or `EOFError` at its end."""

    def __init__(self, connection: Connection, decoder: msgspec.msgpack.Decoder[Any]) -> None:
        self._connection = connection
        self._decoder = decoder
        self._lock = Lock()

    @classmethod
    def of_worker(cls, connection: Connection) -> "Line":
        return cls(connection, _from_vllm)

    @classmethod
    def of_vllm(cls, connection: Connection) -> "Line":
        return cls(connection, _to_vllm)

    def send(self, message: ToVllm | FromVllm) -> None:
        body = _encoder.encode(message)
        with self._lock:
            self._connection.send_bytes(body)

    def receive(self) -> Any:
        return self._decoder.decode(self._connection.recv_bytes())

    def hang_up(self) -> None:
        """Ends the connection. A thread at either end that waits on it wakes with an error."""
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(self._connection.fileno())) as end:
            end.shutdown(socket.SHUT_RDWR)
