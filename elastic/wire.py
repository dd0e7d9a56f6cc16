"""Messages between a worker and the orchestrator: typed, versioned frames on one connection the worker opens.

A frame is a 4-byte big-endian length and a msgpack array whose first element is the message's tag. Fields are
only ever appended, with defaults; anything else is a new `PROTOCOL_VERSION`, and a peer of another version is
refused by name.
"""

import struct
from typing import Any, TypeAlias

import msgspec

from elastic.core.types import Account, Capabilities, FinishReason, WeightMode

PROTOCOL_VERSION = 1
MAX_FRAME_BYTES = 64 * 1024 * 1024
"""A trajectory batch for the trainer is the largest frame; weights travel through relays, never here."""


class WireError(Exception):
    """The peer broke the protocol; the connection is of no further use."""


class _Message(msgspec.Struct, frozen=True, tag=True, array_like=True):
    pass


# From the worker.


class Hello(_Message, frozen=True):
    """First frame. A new worker presents its lease's one-time token; a resuming one its session key."""

    protocol_version: int
    worker: str
    secret: str
    resume: bool
    pid: int
    host: str


class Ready(_Message, frozen=True):
    """The engine stands and weights may be sent; after a resumption, `weights_version` is what it serves."""

    capabilities: Capabilities
    weights_version: int | None


class Heartbeat(_Message, frozen=True):
    """Engine progress and the cumulative accounts of the worker's device since its process started, in ns."""

    capacity_turns: int
    pending: int
    executing: int
    progress: int
    accounts_ns: dict[Account, int]
    decoded_tokens: int
    kv_used_share: float
    prefix_hit_tokens: int
    prompt_tokens: int
    pacing_held_share: float = 1.0
    cpu_share: float = 0.0


class Chunk(msgspec.Struct, frozen=True, array_like=True):
    """Tokens of one attempt, positions `start`… of the turn's output, all of one weights version."""

    turn: str
    attempt: int
    start: int
    token_ids: list[int]
    logprobs: list[float]
    weights_version: int
    finish: FinishReason | None = None
    cached_tokens: int = 0
    prefilled_tokens: int = 0
    detail: str = ""


class Tokens(_Message, frozen=True):
    """What the engine produced since the last frame; sent at the latest `flush_interval_s` after a token."""

    chunks: list[Chunk]


class WeightsReport(_Message, frozen=True):
    """Weights were applied (`error` empty) or not. Times in seconds; `pulled_bytes` off the relay."""

    version: int
    error: str
    pulled_bytes: int
    pull_s: float
    apply_s: float


class Slept(_Message, frozen=True):
    pass


class Awoke(_Message, frozen=True):
    pass


class Goodbye(_Message, frozen=True):
    """Last frame of a drained worker, with its final accounts."""

    reason: str
    accounts_ns: dict[Account, int]
    decoded_tokens: int


class Trained(_Message, frozen=True):
    """A group's gradients are accumulated."""

    group: str
    train_s: float


class Stepped(_Message, frozen=True):
    """The optimiser has stepped and `version` is on the relay, together with its checkpoint."""

    version: int
    metrics: dict[str, float]


class TrainerFailed(_Message, frozen=True):
    error: str


# From the orchestrator.


class Welcome(_Message, frozen=True):
    """The session: its key buys the connection back under a later epoch while the lease lives."""

    session_key: str
    epoch: int
    heartbeat_interval_s: float
    flush_interval_s: float
    silence_timeout_s: float
    engine: dict[str, Any]
    """`elastic.config.EngineConfig`, as plain data."""
    model: dict[str, Any]
    """The model's `config.json`."""
    relay: str


class Refused(_Message, frozen=True):
    """No session. `retry` says whether dialling again can help."""

    reason: str
    retry: bool


class Generate(_Message, frozen=True):
    """Start an attempt; fields as in `elastic.engine.base.GenerateRequest`."""

    turn: str
    attempt: int
    token_ids: list[int]
    start: int
    max_new_tokens: int
    stop_token_ids: tuple[int, ...]
    temperature: float
    noise_seed: int


class Abort(_Message, frozen=True):
    turn: str
    attempt: int


class PullWeights(_Message, frozen=True):
    version: int
    mode: WeightMode


class Sleep(_Message, frozen=True):
    pass


class Wake(_Message, frozen=True):
    pass


class Drain(_Message, frozen=True):
    """Finish what runs, flush, say goodbye and exit."""

    reason: str


class Ping(_Message, frozen=True):
    """Sent every heartbeat interval, so that a worker behind a dead path notices and dials again."""


class TrajectoryData(msgspec.Struct, frozen=True, array_like=True):
    """A finished trajectory for the trainer.

    `token_ids` is the whole episode, prompt and observations included; `trained[i]` is 1 where token i was
    sampled by the policy, and then `logprobs[i]` and `versions[i]` are its own (0 elsewhere).
    """

    trajectory: str
    token_ids: list[int]
    trained: list[int]
    logprobs: list[float]
    versions: list[int]
    reward: float


class TrainGroup(_Message, frozen=True):
    step: int
    group: str
    index: int
    trajectories: list[TrajectoryData]


class SkipGroup(_Message, frozen=True):
    step: int
    group: str
    index: int
    reason: str


class Update(_Message, frozen=True):
    """The step is complete: apply the gradients, publish and checkpoint `version`."""

    step: int
    version: int


FromWorker: TypeAlias = (
    Hello | Ready | Heartbeat | Tokens | WeightsReport | Slept | Awoke | Goodbye | Trained | Stepped | TrainerFailed
)
FromOrchestrator: TypeAlias = (
    Welcome | Refused | Generate | Abort | PullWeights | Sleep | Wake | Drain | Ping | TrainGroup | SkipGroup | Update
)

_LENGTH = struct.Struct(">I")
_encoder = msgspec.msgpack.Encoder()
_from_worker = msgspec.msgpack.Decoder(FromWorker)
_from_orchestrator = msgspec.msgpack.Decoder(FromOrchestrator)


def encode(message: FromWorker | FromOrchestrator) -> bytes:
    """One frame, ready to be written."""
    body = _encoder.encode(message)
    return _LENGTH.pack(len(body)) + body


class FrameBuffer:
    """Cuts a byte stream into frame bodies, whatever the sizes in which it arrives."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Bodies that `data` completes. Raises `WireError` on a length beyond `MAX_FRAME_BYTES`."""
        buffer = self._bytes
        buffer += data
        bodies: list[bytes] = []
        at = 0
        while len(buffer) - at >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(buffer, at)
            if length > MAX_FRAME_BYTES:
                raise WireError(f"frame of {length} bytes; at most {MAX_FRAME_BYTES} are allowed")
            end = at + _LENGTH.size + length
            if len(buffer) < end:
                break
            bodies.append(bytes(buffer[at + _LENGTH.size : end]))
            at = end
        del buffer[:at]
        return bodies


def decode_from_worker(body: bytes) -> FromWorker:
    """Raises `WireError` on anything that is not one of a worker's messages."""
    try:
        return _from_worker.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise WireError(f"not a worker's message: {error}") from error


def decode_from_orchestrator(body: bytes) -> FromOrchestrator:
    """Raises `WireError` on anything that is not one of the orchestrator's messages."""
    try:
        return _from_orchestrator.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise WireError(f"not an orchestrator's message: {error}") from error
