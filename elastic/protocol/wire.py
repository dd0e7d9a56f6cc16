"""Messages between a worker and the orchestrator: typed, versioned frames on one connection the worker opens.

A frame is a 4-byte big-endian length and a msgpack array whose first element is the message's tag. Fields are
only ever appended, with defaults; anything else is a new `PROTOCOL_VERSION`, and a peer of another version is
refused by name. For that to work, `Hello` begins with its version, and `RefusedFrame` never changes, in any version.

Every field of a worker's message is bounded by its type: integers fit a database and a float, floats are finite,
texts and lists have an end. What is outside does not decode. A sender keeps to that with `clipped` and `finite`.

A connection goes: `Hello` →, ← `Welcome` or `RefusedFrame`, `Ready` →, and then any message, either way.
"""

import contextlib
import math
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Annotated, Any, Literal, TypeAlias, dataclass_transform, get_args

import msgspec
import numpy as np
from msgspec import inspect

from elastic.core.types import (
    TEXT_MAX,
    Account,
    Capabilities,
    Chunk,
    ChunkEnd,
    ChunkPrompt,
    Chunks,
    Count,
    FinishReason,
    LoadPhase,
    LogprobCheck,
    SamplingParameters,
    Text,
    WeightMode,
)
from elastic.protocol.frames import (
    MAX_FRAME_BYTES,
    SECONDS_MAX,
    FrameBuffer,
    RefusedFrame,
    Seconds,
    UnreadableFrame,
    WireError,
    framed,
)
from elastic.protocol.sampled import TOKEN_BYTES, Sampled, ids_of, logprobs_of, pack_ids, pack_logprobs

__all__ = ["MAX_FRAME_BYTES", "SECONDS_MAX", "FrameBuffer", "RefusedFrame", "Seconds", "WireError"]

PROTOCOL_VERSION = 7
MAX_WORKER_FRAME_BYTES = 4 * 1024 * 1024
"""Largest frame from a worker. Decoding it takes some ten milliseconds, in which the orchestrator does nothing else."""

FRAME_TOKENS = 1 << 17
"""A worker ends a frame at as many tokens: less than `MAX_WORKER_FRAME_BYTES`, however long its turns."""
PART_BYTES = 8 * 1024 * 1024
"""The most bytes of a group's trajectories in one frame: other messages to the worker wait for no more than that."""

MAX_HELLO_BYTES = 4096
"""Most bytes that an unknown peer can make the orchestrator hold before it has shown a ticket."""

LOGPROB_MIN = -100.0
"""A token that is sampled at all is likelier: with noise of 64 bits none below e^-50 ever comes first."""
LOGPROB_MAX = 1e-3
"""Rounding may take a certain token's log-probability above 0 by as much."""
ENTRIES_MAX = 4096
"""Most entries of one table in a message, such as a step's metrics or the layers of a model."""
REFUSALS_MAX = 256
PROOF_MAX = 1024
FLOAT32_MAX = 3.4028234663852886e38

Share: TypeAlias = Annotated[float, msgspec.Meta(ge=0.0, le=1.0)]
Finite: TypeAlias = Annotated[float, msgspec.Meta(ge=-sys.float_info.max, le=sys.float_info.max)]
PublicKey: TypeAlias = Annotated[str, msgspec.Meta(pattern="^([0-9a-f]{64})?$", max_length=64)]
"""An Ed25519 one, in hexadecimal; empty where there is none."""
LogprobChecks: TypeAlias = Annotated[list[LogprobCheck], msgspec.Meta(max_length=ENTRIES_MAX)]
Finite32: TypeAlias = Annotated[float, msgspec.Meta(ge=-FLOAT32_MAX, le=FLOAT32_MAX)]
Proof: TypeAlias = Annotated[list[Finite32], msgspec.Meta(max_length=PROOF_MAX)]
"""Log-probabilities of the text by which a version is known (`elastic.engine.base.proof_text`), or none."""
Metrics: TypeAlias = Annotated[dict[Text, Finite], msgspec.Meta(max_length=ENTRIES_MAX)]

PullPart: TypeAlias = Literal["encode", "queue", "wire", "decode", "apply", "pause"]
"""Parts of the time from an order to pull weights until they are served. `encode` is the wait for parts that the
trainer has not put on the relay yet; `pause` is the time in which nothing is generated."""


class VersionMismatch(WireError):
    """The peer speaks another version of the protocol."""

    def __init__(self, found: int) -> None:
        super().__init__(
            f"worker speaks protocol version {found}, the orchestrator {PROTOCOL_VERSION}; install the same"
        )
        self.found = found


@dataclass_transform(frozen_default=True, field_specifiers=(msgspec.field,))
class _Message(msgspec.Struct, frozen=True, tag=True, array_like=True):
    pass


# From the worker.


class Hello(_Message):
    """First frame: the run and the worker. A new worker presents its lease's one-time token, a resuming one its session
    key.

    A peer with a `ticket` is no worker yet, and presents the ticket's token.
    """

    protocol_version: Count
    worker: Text
    secret: Text
    resume: bool
    pid: Count
    host: Text
    run: Text
    ticket: Text = ""


class StillThere(_Message):
    """Answers `Waiting`. It may have been on its way when its sender was welcomed."""


class Ready(_Message):
    """The engine stands and may be told to load weights; `weights_version` is what it serves already, if any.

    The trainer, whose `weights_version` is what it has trained to, says more, and nobody else may: `publisher`, the
    public half of the key with which it signs weights, in hexadecimal, a new one whenever its process starts; and what
    it was given in the step in progress: `groups` to train on, and all `slots` of groups, those that it skips, too.
    `proof` is what workers of this version are to answer; `source` is as of the update that led to it.
    """

    capabilities: Capabilities
    weights_version: Count | None
    publisher: PublicKey = ""
    groups: Annotated[list[Text], msgspec.Meta(max_length=ENTRIES_MAX)] = []
    slots: Annotated[list[Count], msgspec.Meta(max_length=ENTRIES_MAX)] = []
    proof: Proof = []
    source: Text = ""


class Heartbeat(_Message):
    """Engine progress and the accounts of the worker's device, in ns: they add up to its process's age.

    The first one follows `Ready` at once and announces the worker's credit, `capacity_turns`. `load_progress`
    grows with every byte pulled and every piece of weights applied. Of `paced_iterations`, which had a modelled time,
    `late_iterations` took longer than that.
    """

    capacity_turns: Count
    pending: Count
    executing: Count
    progress: Count
    accounts_ns: dict[Account, Count]
    decoded_tokens: Count
    kv_used_share: Share
    prefix_hit_tokens: Count
    prompt_tokens: Count
    loading: LoadPhase = LoadPhase.NONE
    load_progress: Count = 0
    paced_iterations: Count = 0
    late_iterations: Count = 0


class Tokens(_Message):
    """The engine's output since the last frame; sent at most a flush interval after a token.

    `token_ids` (int32) and `logprobs` (float32) are those of all chunks, one after the other, as bytes.
    """

    chunks: Chunks
    token_ids: bytes
    logprobs: bytes

    @classmethod
    def of(cls, said: Iterable[tuple[Chunk, Sequence[int], Sequence[float]]]) -> "Tokens":
        """Chunks, each with its ids and log-probabilities."""
        chunks, ids, logprobs = list[Chunk](), list[int](), list[float]()
        for chunk, of_ids, of_logprobs in said:
            chunks.append(chunk)
            ids += of_ids
            logprobs += of_logprobs
        return cls(Chunks.of(chunks), pack_ids(ids), pack_logprobs(logprobs))

    def said(self) -> Iterator[tuple[Chunk, list[int], list[float]]]:
        """What `of` was given, rounded to float32."""
        ids, logprobs, at = ids_of(self.token_ids), logprobs_of(self.logprobs), 0
        for chunk in self.chunks:
            yield chunk, ids[at : at + chunk.count], logprobs[at : at + chunk.count]
            at += chunk.count

    def check(self) -> None:
        """Raises `WireError` where the columns do not fit each other, or a log-probability is none."""
        chunks, tokens = self.chunks, sum(self.chunks.counts)
        if not len(chunks.slots) == len(chunks.starts) == len(chunks.counts) == sum(n for _, n in chunks.versions):
            raise WireError("Tokens.chunks: columns of different lengths")
        if not len(self.token_ids) == len(self.logprobs) == TOKEN_BYTES * tokens:
            raise WireError("Tokens: as many token ids and log-probabilities are expected as are counted")
        if not (_ordered(chunks.ends, len(chunks)) and _ordered(chunks.prompts, len(chunks))):
            raise WireError("Tokens.chunks: what is told of chunks is not in their order")
        if any(version < 0 for version, _ in chunks.versions) and any(k.count and k.version < 0 for k in chunks):
            raise WireError("Tokens.chunks: tokens are of a weights version")
        if tokens:
            logprobs = np.frombuffer(self.logprobs, np.float32)
            if not np.minimum.reduce(logprobs) >= LOGPROB_MIN:
                raise WireError("log-probability that is no number, or lower than a sampled token's can be")
            if np.maximum.reduce(logprobs) > LOGPROB_MAX:
                raise WireError("log-probability above 0")


def _ordered(told: Sequence[ChunkEnd | ChunkPrompt], chunks: int) -> bool:
    """Whether these are of different chunks of so many, in order."""
    return not told or (all(a.place < b.place for a, b in pairwise(told)) and told[-1].place < chunks)


class UnverifiedWeights(msgspec.Struct, frozen=True):
    """Weights that did not verify, and why: a manifest, a bucket, or what a worker held."""

    what: Text
    reason: Text


class WeightsReport(_Message):
    """Weights were applied (`error` empty) or not. Times in seconds; `pulled_bytes` off the relay.

    `split_s` adds up to the time from the order to here; `full_bytes` is what all of the weights take. `refused` did
    not verify since the report before, and where weights were applied they are in its place. `proof` is what the
    version answers here, if its engine shows that.
    """

    version: Count
    error: Text
    pulled_bytes: Count
    pull_s: Seconds
    apply_s: Seconds
    full_bytes: Count = 0
    split_s: dict[PullPart, Seconds] = msgspec.field(default_factory=dict[PullPart, float])
    refused: Annotated[list[UnverifiedWeights], msgspec.Meta(max_length=REFUSALS_MAX)] = []
    proof: Proof = []


class Slept(_Message):
    pass


class Awoke(_Message):
    pass


class Notice(_Message):
    """The worker's machine will be taken away in `left_s`, or has become likelier to be taken away (None)."""

    left_s: Seconds | None
    reason: Text


class Goodbye(_Message):
    """Last frame of a drained worker, with its final accounts."""

    reason: Text
    accounts_ns: dict[Account, Count]
    decoded_tokens: Count


class Trained(_Message):
    """A group's gradients are accumulated. Repeated when its `TrainGroupFrame` is repeated, without training again.

    `checks` are of tokens whose log-probabilities were compared meanwhile, of this group or ones before it.
    """

    group: Text
    train_s: Seconds
    checks: LogprobChecks = []


class Stepped(_Message):
    """The optimiser has stepped, `version` is in the trainer's own engine, and the relay is being given it.

    A worker may pull it at once: it waits there for what is still encoded. `PublishedFrame` follows. `unusable` names
    the step's groups from which no usable gradient came, and why; `checks` as in `Trained`, `proof` as in `Ready`.
    """

    version: Count
    metrics: Metrics
    unusable: Annotated[dict[Text, Text], msgspec.Meta(max_length=ENTRIES_MAX)] = {}
    checks: LogprobChecks = []
    proof: Proof = []


class PublishedFrame(_Message, tag="Published"):
    """`version` is on the relay, and what that took.

    `changed` is the share of elements that differ from the version before, by layer from the input to the output.
    """

    version: Count
    metrics: Metrics
    changed: Annotated[dict[Text, Share], msgspec.Meta(max_length=ENTRIES_MAX)]


class UpdateRefused(_Message):
    """The weights that were offered for `version` cannot be served, for this reason: the trainer stands where it stood.
    `again`: later they may be."""

    version: Count
    reason: Text
    again: bool = False


class TrainerFailedFrame(_Message, tag="TrainerFailed"):
    """An order could not be carried out; the trainer's state is not to be relied on any more."""

    error: Text


# From the orchestrator.


class Welcome(_Message):
    """The session: its key buys the connection back under a later epoch while the lease lives.

    `engine` is `elastic.config.EngineConfig` as plain data, `model` the model's `config.json`. A worker that
    hears nothing for `silence_timeout_s` dials again, for the longer of `resume_timeout_s` and
    `orchestrator_timeout_s` at most: the orchestrator may be away, and come back as another process. With
    `whole_turns` it keeps a turn's tokens to itself until the turn ends. `relay_token` is this worker's own: what may
    be done with it is the trainer's to do, or a worker's. A relay over HTTPS has a certificate that `relay_anchor`
    (PEM) is, or has issued. `worker` is who the worker is, for one that came by a ticket.
    """

    session_key: str
    epoch: int
    heartbeat_interval_s: float
    flush_interval_s: float
    silence_timeout_s: float
    engine: dict[str, Any]
    model: dict[str, Any]
    relay: str
    relay_token: str = ""
    resume_timeout_s: float = 5.0
    pull_timeout_s: float = 30.0
    load_timeout_s: float = 60.0
    drain_timeout_s: float = 5.0
    whole_turns: bool = False
    run: str = ""
    orchestrator_timeout_s: float = 60.0
    relay_anchor: str = ""
    worker: str = ""


class Waiting(_Message):
    """The ticket counts, but no lease of its holder is wanted yet. Said again every heartbeat interval, and answered by
    `StillThere`, so that both know of each other."""


class Generate(_Message):
    """Start an attempt; fields as in `elastic.engine.base.GenerateRequest`, with the ids packed.

    What the worker says of it carries its `slot`, until the chunk that ends the attempt.
    """

    turn: str
    attempt: int
    slot: int
    start: int
    token_ids: bytearray
    sampling: SamplingParameters
    recompute: bool = False

    def __post_init__(self) -> None:
        if len(self.token_ids) % TOKEN_BYTES:
            raise ValueError(f"token ids of {TOKEN_BYTES} bytes each are expected")


class FlushEvery(_Message):
    """Send tokens so often from now on: what `Welcome.flush_interval_s` says no longer holds."""

    interval_s: float


class Abort(_Message):
    turn: str
    attempt: int


class PullWeights(_Message):
    """Load `version` from the relay. A later order supersedes one that is still under way.

    It counts as that version only if the key of `publisher` has signed it (`Ready.publisher`). The order names it,
    because workers are welcomed before the trainer has a key, and a resumed trainer has another.
    """

    version: int
    mode: WeightMode
    publisher: str = ""


class Sleep(_Message):
    pass


class Wake(_Message):
    pass


class Drain(_Message):
    """Finish what runs, flush, say goodbye and exit."""

    reason: str


class Ping(_Message):
    """Sent every heartbeat interval, so that a worker behind a dead path notices and dials again."""


class TrajectoryData(msgspec.Struct, frozen=True, array_like=True):
    """A branch of a finished trajectory for the trainer; most have only the one, of number 0.

    `token_ids` (packed) is its whole context, prompt and observations included. What branches share is sampled in the
    first that has it.
    """

    trajectory: str
    token_ids: bytearray
    sampled: Sampled
    branch: int = 0

    @property
    def size_bytes(self) -> int:
        """About what it takes in a frame."""
        return len(self.token_ids) + len(self.sampled.logprobs) + 1024


class TrajectoriesFrame(_Message, tag="Trajectories"):
    """Trajectories of the group of the `TrainGroupFrame` or `SkipGroup` that follows, before those that it has."""

    trajectories: list[TrajectoryData]


class TrainGroupFrame(_Message, tag="TrainGroup"):
    """An order that the trainer has carried out already, this one or another, it only answers again.

    `bounds` as in `elastic.core.commands.TrainGroup`, of the workers that have sampled its tokens; `oldest_version` as
    there.
    """

    step: int
    group: str
    index: int
    trajectories: list[TrajectoryData]
    bounds: dict[str, float | None] = {}
    oldest_version: int = 0


class SkipGroup(_Message):
    """The group is not trained on; `tokens` that the policy sampled for it count in the mean over its mini-batch.

    The log-probabilities of its `trajectories` are compared all the same: garbage earns no rewards that differ.
    """

    step: int
    group: str
    index: int
    reason: str
    tokens: int = 0
    trajectories: list[TrajectoryData] = []


def in_parts(order: TrainGroupFrame | SkipGroup) -> "list[TrajectoriesFrame | TrainGroupFrame | SkipGroup]":
    """The frames of an order: the last one is the order, with the trajectories that those before it do not have."""
    frames: list[TrajectoriesFrame | TrainGroupFrame | SkipGroup] = []
    part, size_bytes = list[TrajectoryData](), 0
    for trajectory in order.trajectories:
        if part and size_bytes + trajectory.size_bytes > PART_BYTES:
            frames.append(TrajectoriesFrame(part))
            part, size_bytes = [], 0
        part.append(trajectory)
        size_bytes += trajectory.size_bytes
    return [*frames, msgspec.structs.replace(order, trajectories=part)]


class UpdateFrame(_Message, tag="Update"):
    """The step is complete: apply the gradients, checkpoint and publish `version`; others are still `pulled`.

    `source` says where the weights are that somebody else has trained, as `elastic.protocol.offers` has it; empty where
    the trainer trains.
    """

    step: int
    version: int
    pulled: list[int] = []
    source: str = ""


FromWorker: TypeAlias = (
    Hello
    | StillThere
    | Ready
    | Heartbeat
    | Tokens
    | WeightsReport
    | Slept
    | Awoke
    | Notice
    | Goodbye
    | Trained
    | Stepped
    | PublishedFrame
    | TrainerFailedFrame
    | UpdateRefused
)
FromOrchestrator: TypeAlias = (
    Welcome
    | Waiting
    | RefusedFrame
    | Generate
    | FlushEvery
    | Abort
    | PullWeights
    | Sleep
    | Wake
    | Drain
    | Ping
    | TrajectoriesFrame
    | TrainGroupFrame
    | SkipGroup
    | UpdateFrame
)

_encoder = msgspec.msgpack.Encoder()
_from_worker = msgspec.msgpack.Decoder(FromWorker)
_from_orchestrator = msgspec.msgpack.Decoder(FromOrchestrator)


class _Greeting(msgspec.Struct, array_like=True, tag="Hello"):
    """The part of `Hello` that is the same in every version."""

    protocol_version: int


_greeting = msgspec.msgpack.Decoder(_Greeting)

_UNDECODABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError, MemoryError)
"""Errors of msgspec for hostile bytes: the last two for excessive nesting and lengths."""


def kind_of(message: type[FromWorker | FromOrchestrator] | FromWorker | FromOrchestrator) -> str:
    """Return the tag of a frame."""
    return str(message.__struct_config__.tag)


def clipped(text: str) -> str:
    """A text as a message may hold it."""
    return text if len(text) <= TEXT_MAX else f"{text[: TEXT_MAX - 1]}…"


def finite(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics that are finite numbers, as a message may hold them."""
    return {name: value for name, value in metrics.items() if math.isfinite(value)}


def sound_proof(logprobs: Sequence[float]) -> list[float]:
    """A proof as a message may hold it: none where a log-probability is no number."""
    return list(logprobs) if all(map(math.isfinite, logprobs)) else []


def encode(message: FromWorker | FromOrchestrator) -> bytes:
    """One frame, ready to be written. Raises `WireError` when it is larger than its receiver reads."""
    body = _encoder.encode(message)
    if len(body) > MAX_WORKER_FRAME_BYTES:
        most = MAX_WORKER_FRAME_BYTES if isinstance(message, FromWorker) else MAX_FRAME_BYTES
        if len(body) > most:
            raise WireError(f"{kind_of(message)} of {len(body)} bytes; at most {most} are allowed")
    return framed(body)


def decode_hello(body: bytes | memoryview) -> Hello:
    """A worker's first frame. Raises `VersionMismatch` before it looks at anything else in it."""
    try:
        version = _greeting.decode(body).protocol_version
    except _UNDECODABLE as error:
        raise WireError(f"not a worker's first message: {error}") from error
    if version != PROTOCOL_VERSION:
        raise VersionMismatch(version)
    hello = decode_from_worker(body)
    assert isinstance(hello, Hello)
    return hello


def decode_from_worker(body: bytes | memoryview) -> FromWorker:
    """Raises `WireError` on anything that is not one of a worker's messages, and names the field that is not."""
    try:
        message = _from_worker.decode(body)
    except msgspec.ValidationError as error:
        raise WireError(_named(body, str(error))) from error
    except _UNDECODABLE as error:
        raise WireError(f"not a worker's message: {error}") from error
    if type(message) is Tokens:
        message.check()
    return message


class UnreadableOrder(UnreadableFrame):
    """An order to generate that cannot be read and names its attempt. `answer` gives the attempt back."""

    def __init__(self, named: "_NamedAttempt", cause: str) -> None:
        super().__init__(f"not an orchestrator's message: {cause}")
        self._named = named

    def answer(self) -> Tokens:
        order, detail = self._named, clipped(f"its worker cannot read the order: {self}")
        return Tokens.of([(Chunk(order.slot, order.start, 0, -1, FinishReason.ERROR, detail), (), ())])


def decode_from_orchestrator(body: bytes | memoryview) -> FromOrchestrator:
    """Raises `WireError` on anything that is not one of the orchestrator's messages, `UnreadableOrder` where only that
    order is of no use."""
    try:
        return _from_orchestrator.decode(body)
    except _UNDECODABLE as error:
        with contextlib.suppress(*_UNDECODABLE):
            order = _order.decode(body)
            if order.kind == kind_of(Generate):
                raise UnreadableOrder(order, str(error)) from error
        raise WireError(f"not an orchestrator's message: {error}") from error


class _Tagged(msgspec.Struct, array_like=True):
    kind: str


class _NamedAttempt(msgspec.Struct, array_like=True):
    """What of an order to generate tells which attempt it is of."""

    kind: str
    turn: Text
    attempt: Count
    slot: Count
    start: Count


_tag = msgspec.msgpack.Decoder(_Tagged)
_order = msgspec.msgpack.Decoder(_NamedAttempt)
_STEP = re.compile(r"\[(\d+|\.\.\.)\]|\.(\w+)")


def _named(body: bytes | memoryview, problem: str) -> str:
    """Describe a fault of a worker's message by field names instead of positions."""
    found, _, path = problem.partition(" - at ")
    try:
        kind = _tag.decode(body).kind
    except _UNDECODABLE:
        kind = ""
    if kind not in _KINDS:
        return f"not a worker's message: {found}"
    names = [kind, *_fields(_KINDS[kind], path.removeprefix("`$"))]
    return f"{'.'.join(names)}: {found.replace('`', '')}"


def _fields(at: inspect.Type, path: str) -> list[str]:
    names: list[str] = []
    for position, name in _STEP.findall(path):
        if isinstance(at, inspect.UnionType):
            at = next((t for t in at.types if not isinstance(t, inspect.NoneType)), at)
        match at:
            case inspect.StructType(fields=fields):
                number = int(position) - (at.tag is not None) if position else [f.name for f in fields].index(name)
                names.append(fields[number].name)
                at = fields[number].type
            case inspect.ListType(item_type=inner) | inspect.DictType(value_type=inner):
                at = inner
            case inspect.TupleType(item_types=inner) if position.isdigit():
                at = inner[int(position)]
            case _:
                break
    return names


_KINDS = {kind_of(kind): inspect.type_info(kind) for kind in get_args(FromWorker)}
