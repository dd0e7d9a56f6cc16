"""Messages between a run and its fronts, the processes that serve agents in its stead: frames on a Unix socket.

The run keeps trajectories: their branches, their open turns and what was delivered. A front keeps connections of HTTP
and renders. It asks for a call's turns in two steps: `LookUp` finds the turns that the call joins, or the longest
branch that the call's messages go on from; `OpenTurns` opens turns behind that branch with the tokens that are new.
Then tokens come by stream, a number that the run gives to a turn for this connection, up to `TurnOver`. The front says
with `SettleTurn` what it makes of the answer, hears `TurnSettled` once all of it is durable, and says
`AnswerDelivered` after its last write. A call that names an earlier answer instead of sending all that was said before
asks for that first (`RecallHistory`).

Calls of models elsewhere are the front's alone. It asks leave for each (`AskUpstream`), and says what it came to
(`UpstreamOver`), or that nobody waits for leave any more (`UpstreamWaived`).

An env worker dials the same socket, with a driver's key (`DriverHello`). It opens trajectories and says what became of
them, and nothing else.

Each message with a `request` is answered under the same number, or by `Declined`.
"""

from typing import Annotated, TypeAlias, dataclass_transform

import msgspec

from elastic.core.types import Count, TurnId
from elastic.protocol.connection import MessageCodec
from elastic.protocol.frames import MAX_FRAME_BYTES, RefusedFrame, WireError, framed
from elastic.protocol.metrics import Buckets

FRONT_VERSION = 6
SOCKET = "front.sock"
"""The socket's name in the run's directory."""
DIGEST_BYTES = 16
CHAIN_MAX = 16_384
"""Most messages of a call."""
CHOICES_MAX = 128
HISTORY_BYTES_MAX = 16 * 1024 * 1024
"""The most bytes that are kept of the messages up to an answer."""
ALL_IDS = 2**31 - 1
"""`LookUp.ids_before` of a front that wants all of a context."""
NAME_MAX = 512
METRICS_MAX = 64
"""Most metrics of a trajectory."""
CAUSE_MAX = 4096
"""Characters of why something has failed."""
UNREAD_BYTES = 64 * 1024 * 1024

Name: TypeAlias = Annotated[str, msgspec.Meta(max_length=NAME_MAX)]
Digest: TypeAlias = Annotated[bytes, msgspec.Meta(max_length=DIGEST_BYTES)]
"""BLAKE2b of 16 bytes; empty where there is none."""


@dataclass_transform(frozen_default=True, field_specifiers=(msgspec.field,))
class _FrontMessage(msgspec.Struct, frozen=True, tag=True, array_like=True):
    pass


class AgentCaller(msgspec.Struct, frozen=True, array_like=True):
    """In whose name a front asks.

    A trajectory's key names the `trajectory` and its `restart`. A driver's key names the `driver`; `named` is then the
    trajectory, or a session that is bound to it: the path's, else the header's, else the body's. A `viewer`'s key names
    none: its calls are chats, of which nothing is trained.
    """

    trajectory: Name = ""
    restart: Count = 0
    driver: Name = ""
    named: Name = ""
    viewer: Name = ""


class AgentCall(msgspec.Struct, frozen=True, array_like=True):
    """What makes two calls of one trajectory the same: their `route` and the `digest` of their bodies.

    `key` is an idempotency header's, and `retry` is set where the client says that it asks again. `policy` is the name
    by which the call asks for the model, of those in `[front] policies`; empty for the model's own.
    """

    route: Name
    digest: Digest
    key: Name = ""
    retry: bool = False
    policy: Name = ""


# From a front.


class FrontHello(_FrontMessage):
    version: Count
    pid: Count


class DriverHello(_FrontMessage):
    """An env worker with this driver's key, which still plays these trajectories. Others that the driver had begin
    again, with it or elsewhere."""

    version: Count
    key: Name
    holds: Annotated[list[Name], msgspec.Meta(max_length=65_536)] = []


class DriverBeat(_FrontMessage):
    """The env worker is there, and not held up."""


class EnvironmentUnusable(_FrontMessage):
    """The env worker cannot play its environment: why, and what is allowed. The run closes the connection."""

    cause: Annotated[str, msgspec.Meta(max_length=CAUSE_MAX)]


class LookUp(_FrontMessage):
    """What does this call join, or go on from? `TurnsTaken` answers if it joins turns, `BranchFound` if it does not.

    `chain` has one digest for each prefix of the call's messages, as `elastic.front.rendering.messages` makes it, the
    shortest first.
    `ids_before` asks for the tokens of the answer at the branch's end, and for so many before them; None for none.
    """

    request: Count
    caller: AgentCaller
    call: AgentCall
    chain: Annotated[list[Digest], msgspec.Meta(max_length=CHAIN_MAX)] = []
    ids_before: Count | None = None


class WantedSampling(msgspec.Struct, frozen=True, array_like=True):
    """What the client wants of sampling; None where it says nothing."""

    max_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False


class OpenTurns(_FrontMessage):
    """Open a turn for each of `choices` numbers of choices from `first_choice` on. `TurnsTaken` answers.

    Their prompt is the first `tokens` tokens of `branch`, and then `ids` (packed). With `branch` None the run finds the
    branch whose tokens go furthest along `ids`, which is then the whole prompt.
    """

    request: Count
    caller: AgentCaller
    call: AgentCall
    branch: Count | None
    tokens: Count
    ids: bytes
    first_choice: Count = 0
    choices: Annotated[int, msgspec.Meta(ge=1, le=CHOICES_MAX)] = 1
    sampling: WantedSampling = WantedSampling()
    session: str = ""
    """Turns of one session go well together on one worker; empty for none."""


class CutTurn(_FrontMessage):
    """The answer ends behind its first `kept` tokens, for instance at a stop string: the turn is ended there."""

    stream: Count
    kept: Count


class SettleTurn(_FrontMessage):
    """The turn is over, and its first `kept` tokens are the answer, whose chain digest is `answer` (empty if it is no
    message). `TurnSettled` answers once both are durable.

    `history` are the messages up to the answer, where clients may go on from it by its turn's name: those behind the
    ones whose chain digest is `behind` (empty if they are all), and which the run has already. It is opaque to the run.
    """

    stream: Count
    kept: Count
    answer: Digest = b""
    history: bytes = b""
    behind: Digest = b""


class AnswerDelivered(_FrontMessage):
    """The client has been given the whole answer: the stream is forgotten."""

    stream: Count


class ClientGone(_FrontMessage):
    """The client has left, or was sent away, before it had the whole answer: the stream is forgotten."""

    stream: Count


class RecallHistory(_FrontMessage):
    """What was said up to the answer of this turn of the caller's trajectory? `HistoryFound` answers."""

    request: Count
    caller: AgentCaller
    turn: Name


class BeginTrajectory(_FrontMessage):
    """Give the driver a trajectory in its group of this name. `TrajectoryBegun` answers. `task` is JSON of the driver's
    own. An env worker names no group: it is given whichever is due, once one is."""

    request: Count
    caller: AgentCaller
    task: bytes
    group: Name
    key: Name = ""
    sessions: Annotated[list[Name], msgspec.Meta(max_length=64)] = []


class BindSession(_FrontMessage):
    """The trajectory is also meant where this session is named. `TrajectoryShown` answers."""

    request: Count
    caller: AgentCaller
    session: Name


class GiveReward(_FrontMessage):
    """The trajectory is worth so much, or its branches of one `policy` are. `TrajectoryShown` answers."""

    request: Count
    caller: AgentCaller
    reward: float
    policy: Name = ""


class EndTrajectory(_FrontMessage):
    """The agent is done. With a `cause` the trajectory has failed, for that. `TrajectoryShown` answers. It is
    `truncated` where a limit of its environment's has ended it."""

    request: Count
    caller: AgentCaller
    cause: Annotated[str, msgspec.Meta(max_length=CAUSE_MAX)] = ""
    truncated: bool = False
    metrics: Annotated[dict[Name, float], msgspec.Meta(max_length=METRICS_MAX)] = {}
    """Numbers of the driver's own, by name."""


class AskUpstream(_FrontMessage):
    """May a call of a model elsewhere be made? `UpstreamAllowed` answers once it may, and that is durable.

    `prompt_tokens` and `answer_tokens`, of each of `choices`, are the most that the call can come to by what its body
    says; None where that says nothing.
    """

    request: Count
    caller: AgentCaller
    route: Name
    model: Name
    prompt_tokens: Count | None = None
    answer_tokens: Count | None = None
    choices: Count = 1


class UpstreamWaived(_FrontMessage):
    """Nobody waits any more for the leave that was asked for under the number `asked`. Nothing answers."""

    asked: Count


class UpstreamOver(_FrontMessage):
    """The call is over. `status` is what its client was answered with, 0 if the call was not made.

    Tokens are those that the upstream has told, None where it has told none and may have taken some.
    """

    call: Count
    status: Count
    prompt_tokens: Count | None = None
    answer_tokens: Count | None = None
    duration_s: Annotated[float, msgspec.Meta(ge=0)] = 0.0


class ShowTrajectory(_FrontMessage):
    """How does the trajectory stand? `TrajectoryShown` answers."""

    request: Count
    caller: AgentCaller


class AskMetrics(_FrontMessage):
    """What have the run, its providers and its workers come to? `MetricsTold` answers."""

    request: Count


class OfferWeights(_FrontMessage):
    """Serve these weights: `source` and `look` are of `elastic.protocol.offers`, `label` is what their trainer calls
    them. `VersionServed` answers once every turn that is asked for has them, or later ones."""

    request: Count
    source: str
    look: str
    label: Name = ""
    abort_running: bool = False


class HoldTurns(_FrontMessage):
    """Hold turns that wait in the queue (`held`), or none any more. Those that run go on; `wait` for their ends, or
    `abort` them. `ServingTold` answers."""

    request: Count
    held: bool
    wait: bool = False
    abort: bool = False


class AbortTurns(_FrontMessage):
    """End all turns with what they have. `ServingTold` answers."""

    request: Count


class AskServing(_FrontMessage):
    """How does the run stand? `ServingTold` answers."""

    request: Count


class EpisodesHosted(_FrontMessage):
    """The first word of an env worker that plays episodes in token ids: at which tokens its environment's turns end,
    and how many `words` its vocabulary has."""

    stop_token_ids: tuple[int, ...]
    words: Count


class EpisodeAnswered(_FrontMessage):
    """The environment's answer to what the run last asked of the episode: `token_ids` (packed) to append, whether the
    episode is over, and its reward. `tag` comes with the answer to `ResetEpisode`."""

    episode: Count
    token_ids: bytes = b""
    done: bool = False
    reward: float = 0.0
    tag: Name = ""


class EpisodeFailed(_FrontMessage):
    """The environment has answered nothing that its contract allows: the episode is over."""

    episode: Count
    cause: Annotated[str, msgspec.Meta(max_length=CAUSE_MAX)]


# From the run.


class ResetEpisode(_FrontMessage):
    """Begin an episode in token ids below `vocab_size`. `EpisodeAnswered` or `EpisodeFailed` answers, as it does to
    each of what follows. An `episode` is a number that the run gives once on a connection."""

    episode: Count
    seed: int
    vocab_size: Count


class StepEpisode(_FrontMessage):
    """Take one turn of the policy, whose tokens these are (packed)."""

    episode: Count
    token_ids: bytes


class TruncateEpisode(_FrontMessage):
    """End an episode that is not done. The answer has its reward so far."""

    episode: Count


class CloseEpisode(_FrontMessage):
    """Nothing more is asked of the episode, whatever is under way. Nothing answers."""

    episode: Count


EpisodeOrder: TypeAlias = ResetEpisode | StepEpisode | TruncateEpisode | CloseEpisode


class FrontWelcome(_FrontMessage):
    version: Count
    run: Name


class BranchFound(_FrontMessage):
    """The first `matched` of the call's messages are the first `tokens` tokens of `branch`; none, where `matched` is 0.

    The last `answer_tokens` of these are an answer of the policy. `ids` (packed) are the last of them, as many as were
    wanted. The first `known` messages are in a history that the run has (`SettleTurn`).
    """

    request: Count
    trajectory: Name
    branch: Count | None = None
    tokens: Count = 0
    matched: Count = 0
    answer_tokens: Count = 0
    ids: bytes = b""
    known: Count = 0


class HistoryFound(_FrontMessage):
    """All that was said up to an answer, piece by piece as `SettleTurn` had it, the first first."""

    request: Count
    pieces: list[bytes]


class OpenedTurn(msgspec.Struct, frozen=True, array_like=True):
    stream: Count
    turn: TurnId
    choice: Count
    prompt_tokens: Count
    max_tokens: Count


class TurnsTaken(_FrontMessage):
    """The call's turns, the first choice first. Where it has `joined` them, all of their tokens come once more.

    `ids` (packed) are the last of their prompt, where a chat looked for them that wanted ids.
    """

    request: Count
    trajectory: Name
    turns: list[OpenedTurn]
    joined: bool = False
    ids: bytes = b""


class StreamTokens(_FrontMessage):
    """Tokens of some streams: of each so many, of one weights version; ids and log-probabilities packed."""

    streams: list[int]
    counts: list[int]
    versions: list[int]
    ids: bytes
    logprobs: bytes


class TurnOver(_FrontMessage):
    """All tokens of the turn have come. `finish` is `stop`, `length` or `abort`; empty where it has failed, with what
    its client is told, as in `Declined`."""

    stream: Count
    finish: str
    cause: str = ""
    status: Count = 0
    code: Name = ""
    retry: bool | None = None
    retry_after_s: float | None = None


class TurnSettled(_FrontMessage):
    stream: Count


class TrajectoryBegun(_FrontMessage):
    """`again` says that the same call, by its key, had been answered before.

    An env worker is also told its group's `number` in the whole run, of how many groups of its environment it has the
    `place`, the `row` of the data if a curriculum has chosen one, and the `key` and `base_url` for its calls.
    """

    request: Count
    trajectory: Name
    restart: Count = 0
    again: bool = False
    number: Count = 0
    key: Name = ""
    base_url: Name = ""
    place: Count = 0
    row: Count | None = None


class PolicyStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What one policy has done in a trajectory. Its `reward` is its own, None where it has the trajectory's."""

    turns: int = 0
    tokens: int = 0
    reward: float | None = None


class TrajectoryStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A trajectory that is driven from outside, as its driver sees it."""

    trajectory: str
    group: str
    state: str
    """`open`, `truncated` (no more turns, but a reward), `finished`, `failed` or `dropped`."""
    turns: int
    tokens: int
    branches: int
    reward: float | None = None
    cause: str = ""
    policies: dict[str, PolicyStatus] = {}
    """Those of `[front] policies` that were called or rewarded."""


class TrajectoryShown(_FrontMessage):
    request: Count
    status: TrajectoryStatus


class EngineFigures(msgspec.Struct, array_like=True):
    """A worker's engine: the turns that it has now, and what it has come to. Tokens are its own counts; `finished` are
    turns by the reason of their end, `histograms` those of `elastic.protocol.metrics.HISTOGRAMS`."""

    engine: Name
    running: int = 0
    waiting: int = 0
    kv_used_share: float = 0.0
    prompt_tokens: int = 0
    prefix_hit_tokens: int = 0
    generation_tokens: int = 0
    preemptions: int = 0
    finished: dict[str, int] = msgspec.field(default_factory=dict[str, int])
    histograms: list[Buckets] = msgspec.field(default_factory=list[Buckets])


class MetricsTold(_FrontMessage):
    """`run`, each of `providers` and `chats` have those fields of `RUN`, `PROVIDER` and `CHATS` in
    `elastic.protocol.metrics` that have a value. `rejections` are calls that were refused since too many turns are
    open."""

    request: Count
    run: dict[str, float]
    providers: dict[str, dict[str, float]]
    engines: list[EngineFigures]
    chats: dict[str, float] = {}
    rejections: Count = 0


class VersionServed(_FrontMessage):
    request: Count
    version: Count
    label: Name = ""


class ServingTold(_FrontMessage):
    """Turns that are asked for now have `version`; `labels` are those of the last ones. `running` turns are at workers,
    `waiting` ones are not. `ended` were ended by the request that this answers."""

    request: Count
    version: Count
    labels: dict[int, str]
    held: bool
    workers: Count
    running: Count
    waiting: Count
    ended: Count = 0


class UpstreamAllowed(_FrontMessage):
    """The call may be made, and is told of by this number once it is over."""

    request: Count
    call: Count


class Declined(_FrontMessage):
    """The request is not carried out: the status and the code of the error that its client gets.

    `retry` says what the client is told of trying again, None for nothing.
    """

    request: Count
    status: Count
    code: Name
    message: str
    param: Name = ""
    retry: bool | None = None
    retry_after_s: float | None = None


FromFront: TypeAlias = (
    FrontHello
    | DriverHello
    | DriverBeat
    | LookUp
    | OpenTurns
    | CutTurn
    | SettleTurn
    | AnswerDelivered
    | ClientGone
    | RecallHistory
    | BeginTrajectory
    | BindSession
    | GiveReward
    | EndTrajectory
    | ShowTrajectory
    | AskMetrics
    | AskUpstream
    | UpstreamWaived
    | UpstreamOver
    | EnvironmentUnusable
    | OfferWeights
    | HoldTurns
    | AbortTurns
    | AskServing
    | EpisodesHosted
    | EpisodeAnswered
    | EpisodeFailed
)
FromRun: TypeAlias = (
    FrontWelcome
    | RefusedFrame
    | BranchFound
    | HistoryFound
    | TurnsTaken
    | StreamTokens
    | TurnOver
    | TurnSettled
    | TrajectoryBegun
    | TrajectoryShown
    | MetricsTold
    | VersionServed
    | ServingTold
    | UpstreamAllowed
    | Declined
    | ResetEpisode
    | StepEpisode
    | TruncateEpisode
    | CloseEpisode
)

_encode = msgspec.msgpack.Encoder().encode
_from_front = msgspec.msgpack.Decoder(FromFront)
_from_run = msgspec.msgpack.Decoder(FromRun)


def _framed(message: FromFront | FromRun) -> bytes:
    return framed(_encode(message))


def _hear_front(body: memoryview) -> FromFront:
    try:
        return _from_front.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, MemoryError) as error:
        raise WireError(f"undecodable message of a front: {error}") from error


def _hear_run(body: memoryview) -> FromRun:
    try:
        return _from_run.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, MemoryError) as error:
        raise WireError(f"undecodable message of the run: {error}") from error


RUN_SIDE: MessageCodec[FromRun, FromFront] = MessageCodec(_framed, _hear_front, MAX_FRAME_BYTES, UNREAD_BYTES)
FRONT_SIDE: MessageCodec[FromFront, FromRun] = MessageCodec(_framed, _hear_run, MAX_FRAME_BYTES, UNREAD_BYTES)
