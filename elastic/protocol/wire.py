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
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeAlias, get_args

import msgspec
from msgspec import inspect

from elastic.core.types import (
    INTEGER_MAX,
    TEXT_MAX,
    Account,
    Capabilities,
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

__all__ = ["MAX_FRAME_BYTES", "SECONDS_MAX", "FrameBuffer", "RefusedFrame", "Seconds", "WireError"]

PROTOCOL_VERSION = 5
MAX_WORKER_FRAME_BYTES = 4 * 1024 * 1024
"""Largest frame from a worker. Decoding it takes some ten milliseconds, in which the orchestrator does nothing else."""

CHUNK_TOKENS_MAX = 1 << 16
CHUNKS_MAX = 1 << 14
FRAME_TOKENS = 1 << 17
"""A worker ends a frame at as many tokens: less than `MAX_WORKER_FRAME_BYTES`, however long its turns."""

MAX_HELLO_BYTES = 4096
"""Most bytes that an unknown peer can make the orchestrator hold before it has shown a ticket."""

LOGPROB_MIN = -100.0
"""A token that is sampled at all is likelier: with noise of 64 bits none below e^-50 ever comes first."""
LOGPROB_MAX = 1e-3
"""Rounding may take a certain token's log-probability above 0 by as much."""
ENTRIES_MAX = 4096
"""Most entries of one table in a message, such as a step's metrics or the layers of a model."""
REFUSALS_MAX = 256
PROMPT_TOKENS_MAX = 2**31 - 1
"""More than any context holds."""

LogProbability: TypeAlias = Annotated[float, msgspec.Meta(ge=LOGPROB_MIN, le=LOGPROB_MAX)]
Share: TypeAlias = Annotated[float, msgspec.Meta(ge=0.0, le=1.0)]
Finite: TypeAlias = Annotated[float, msgspec.Meta(ge=-sys.float_info.max, le=sys.float_info.max)]
PublicKey: TypeAlias = Annotated[str, msgspec.Meta(pattern="^([0-9a-f]{64})?$", max_length=64)]
"""An Ed25519 one, in hexadecimal; empty where there is none."""
PromptTokens: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=PROMPT_TOKENS_MAX)]
LogprobChecks: TypeAlias = Annotated[list[LogprobCheck], msgspec.Meta(max_length=ENTRIES_MAX)]
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


class _Message(msgspec.Struct, frozen=True, tag=True, array_like=True):
    pass


# From the worker.


class Hello(_Message, frozen=True):
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


class StillThere(_Message, frozen=True):
    """Answers `Waiting`. It may have been on its way when its sender was welcomed."""


class Ready(_Message, frozen=True):
    """The engine stands and may be told to load weights; `weights_version` is what it serves already, if any.

    The trainer, whose `weights_version` is what it has trained to, says more, and nobody else may: `publisher`, the
    public half of the key with which it signs weights, in hexadecimal, a new one whenever its process starts; and what
    it was given in the step in progress: `groups` to train on, and all `slots` of groups, those that it skips, too.
    """

    capabilities: Capabilities
    weights_version: Count | None
    publisher: PublicKey = ""
    groups: Annotated[list[Text], msgspec.Meta(max_length=ENTRIES_MAX)] = []
    slots: Annotated[list[Count], msgspec.Meta(max_length=ENTRIES_MAX)] = []


class Heartbeat(_Message, frozen=True):
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


class Chunk(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Tokens of one attempt, at positions `start`… of the turn's output, all of one weights version.

    Plain lists: packed bytes are 10 % smaller, but slower to turn into the integers that every receiver needs.
    """

    turn: Text
    attempt: Count
    start: Count
    token_ids: Annotated[list[Count], msgspec.Meta(max_length=CHUNK_TOKENS_MAX)]
    logprobs: Annotated[list[LogProbability], msgspec.Meta(max_length=CHUNK_TOKENS_MAX)]
    weights_version: Annotated[int, msgspec.Meta(ge=-1, le=INTEGER_MAX)]
    """-1 where there are no tokens that it could be of."""
    finish: FinishReason | None = None
    cached_tokens: PromptTokens = 0
    prefilled_tokens: PromptTokens = 0
    detail: Text = ""

    def __post_init__(self) -> None:
        if len(self.token_ids) != len(self.logprobs):
            raise ValueError("as many tokens as log-probabilities are expected")
        if self.token_ids and self.weights_version < 0:
            raise ValueError("tokens are of a weights version")


class Tokens(_Message, frozen=True):
    """The engine's output since the last frame; sent at most `flush_interval_s` after a token."""

    chunks: Annotated[list[Chunk], msgspec.Meta(max_length=CHUNKS_MAX)]


class UnverifiedWeights(msgspec.Struct, frozen=True):
    """Weights that did not verify, and why: a manifest, a bucket, or what a worker held."""

    what: Text
    reason: Text


class WeightsReport(_Message, frozen=True):
    """Weights were applied (`error` empty) or not. Times in seconds; `pulled_bytes` off the relay.

    `split_s` adds up to the time from the order to here; `full_bytes` is what all of the weights take. `refused` did
    not verify since the report before, and where weights were applied they are in its place.
    """

    version: Count
    error: Text
    pulled_bytes: Count
    pull_s: Seconds
    apply_s: Seconds
    full_bytes: Count = 0
    split_s: dict[PullPart, Seconds] = msgspec.field(default_factory=dict[PullPart, float])
    refused: Annotated[list[UnverifiedWeights], msgspec.Meta(max_length=REFUSALS_MAX)] = []


class Slept(_Message, frozen=True):
    pass


class Awoke(_Message, frozen=True):
    pass


class Notice(_Message, frozen=True):
    """The worker's machine will be taken away in `left_s`, or has become likelier to be taken away (None)."""

    left_s: Seconds | None
    reason: Text


class Goodbye(_Message, frozen=True):
    """Last frame of a drained worker, with its final accounts."""

    reason: Text
    accounts_ns: dict[Account, Count]
    decoded_tokens: Count


class Trained(_Message, frozen=True):
    """A group's gradients are accumulated. Repeated when its `TrainGroupFrame` is repeated, without training again.

    `checks` are of tokens whose log-probabilities were compared meanwhile, of this group or ones before it.
    """

    group: Text
    train_s: Seconds
    checks: LogprobChecks = []


class Stepped(_Message, frozen=True):
    """The optimiser has stepped, `version` is in the trainer's own engine, and the relay is being given it.

    A worker may pull it at once: it waits there for what is still encoded. `PublishedFrame` follows. `unusable` names
    the step's groups from which no usable gradient came, and why; `checks` as in `Trained`.
    """

    version: Count
    metrics: Metrics
    unusable: Annotated[dict[Text, Text], msgspec.Meta(max_length=ENTRIES_MAX)] = {}
    checks: LogprobChecks = []


class PublishedFrame(_Message, frozen=True, tag="Published"):
    """`version` is on the relay, and what that took.

    `changed` is the share of elements that differ from the version before, by layer from the input to the output.
    """

    version: Count
    metrics: Metrics
    changed: Annotated[dict[Text, Share], msgspec.Meta(max_length=ENTRIES_MAX)]


class TrainerFailedFrame(_Message, frozen=True, tag="TrainerFailed"):
    """An order could not be carried out; the trainer's state is not to be relied on any more."""

    error: Text


# From the orchestrator.


class Welcome(_Message, frozen=True):
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


class Waiting(_Message, frozen=True):
    """The ticket counts, but no lease of its holder is wanted yet. Said again every heartbeat interval, and answered by
    `StillThere`, so that both know of each other."""


class Generate(_Message, frozen=True):
    """Start an attempt; fields as in `elastic.engine.base.GenerateRequest`."""

    turn: str
    attempt: int
    token_ids: list[int]
    start: int
    sampling: SamplingParameters
    recompute: bool = False


class Abort(_Message, frozen=True):
    turn: str
    attempt: int


class PullWeights(_Message, frozen=True):
    """Load `version` from the relay. A later order supersedes one that is still under way.

    It counts as that version only if the key of `publisher` has signed it (`Ready.publisher`). The order names it,
    because workers are welcomed before the trainer has a key, and a resumed trainer has another.
    """

    version: int
    mode: WeightMode
    publisher: str = ""


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
    sampled by the policy, and then `logprobs[i]` and `versions[i]` are its own (0 elsewhere). `origins` says which
    workers sampled these, and how many each, in their order; empty where that is not known.
    """

    trajectory: str
    token_ids: list[int]
    trained: list[int]
    logprobs: list[float]
    versions: list[int]
    reward: float
    origins: list[tuple[str, int]] = []


class TrainGroupFrame(_Message, frozen=True, tag="TrainGroup"):
    """An order that the trainer has carried out already, this one or another, it only answers again.

    `bounds` as in `elastic.core.commands.TrainGroup`, of the workers that have sampled its tokens.
    """

    step: int
    group: str
    index: int
    trajectories: list[TrajectoryData]
    bounds: dict[str, float | None] = {}


class SkipGroup(_Message, frozen=True):
    """The group is not trained on; `tokens` that the policy sampled for it count in the mean over its mini-batch.

    The log-probabilities of its `trajectories` are compared all the same: garbage earns no rewards that differ.
    """

    step: int
    group: str
    index: int
    reason: str
    tokens: int = 0
    trajectories: list[TrajectoryData] = []


class UpdateFrame(_Message, frozen=True, tag="Update"):
    """The step is complete: apply the gradients, checkpoint and publish `version`; others are still `pulled`."""

    step: int
    version: int
    pulled: list[int] = []


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
)
FromOrchestrator: TypeAlias = (
    Welcome
    | Waiting
    | RefusedFrame
    | Generate
    | Abort
    | PullWeights
    | Sleep
    | Wake
    | Drain
    | Ping
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
        return _from_worker.decode(body)
    except msgspec.ValidationError as error:
        raise WireError(_named(body, str(error))) from error
    except _UNDECODABLE as error:
        raise WireError(f"not a worker's message: {error}") from error


class UnreadableOrder(UnreadableFrame):
    """An order to generate that cannot be read and names its attempt. `answer` gives the attempt back."""

    def __init__(self, named: "_NamedAttempt", cause: str) -> None:
        super().__init__(f"not an orchestrator's message: {cause}")
        self._named = named

    def answer(self) -> Tokens:
        order, detail = self._named, clipped(f"its worker cannot read the order: {self}")
        end = Chunk(order.turn, order.attempt, order.start, [], [], -1, FinishReason.ERROR, detail=detail)
        return Tokens([end])


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
    token_ids: Any
    start: Count


_tag = msgspec.msgpack.Decoder(_Tagged)
_order = msgspec.msgpack.Decoder(_NamedAttempt)
_PLAIN = {
    ("logprobs", "Expected `float` <="): "log-probability above 0",
    ("logprobs", "Expected `float` >="): "log-probability that is no number, or lower than a sampled token's can be",
}
"""Plain words for a decoder's expectation, by field name."""
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
    plain = _PLAIN.get((names[-1], found.rpartition(" ")[0]))
    return plain or f"{'.'.join(names)}: {found.replace('`', '')}"


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
            case _:
                break
    return names


_KINDS = {kind_of(kind): inspect.type_info(kind) for kind in get_args(FromWorker)}
