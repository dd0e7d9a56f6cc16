"""What a run's journal keeps of agents and their drivers, so that another process knows all that was said.

Notes travel in the core's events and are opaque there: `TurnAsked` in `TurnRequested`, the others in `AgentNoted`.
"""

from typing import TypeAlias, dataclass_transform

import msgspec

from elastic.core.types import Nanoseconds, TrajectoryId, TurnId
from elastic.protocol.front_messages import AgentCall


@dataclass_transform(frozen_default=True, field_specifiers=(msgspec.field,))
class _Note(msgspec.Struct, frozen=True, tag=True, array_like=True):
    pass


class TurnAsked(_Note):
    """A call asks for a turn: as in `OpenTurns`, with the settings that its sampling has besides the run's."""

    call: AgentCall
    choice: int
    branch: int | None
    tokens: int
    ids: bytes
    seed: int
    temperature: float
    stop_token_ids: tuple[int, ...] = ()
    top_p: float = 1.0
    top_k: int = 0


class Begun(_Note):
    """A driver was given a trajectory in the group that it calls `name`."""

    trajectory: TrajectoryId
    driver: str
    name: str
    task: bytes
    key: str
    at_ns: Nanoseconds


class Bound(_Note):
    trajectory: TrajectoryId
    session: str


class AnswerSettled(_Note):
    """The turn's first `kept` tokens are its answer; `history` and `behind` as in `SettleTurn`."""

    turn: TurnId
    kept: int
    answer: bytes
    history: bytes = b""
    behind: bytes = b""


class AnswerGiven(_Note):
    """A client has the whole answer."""

    turn: TurnId


class Abandoned(_Note):
    """Nobody waits for the turn any more: it has come to nothing."""

    turn: TurnId


class Rewarded(_Note):
    """The trajectory is worth so much, or its branches of `policy` are."""

    trajectory: TrajectoryId
    reward: float
    policy: str = ""


class MetricsTaken(_Note):
    """Numbers that its driver tells of the trajectory, by name."""

    trajectory: TrajectoryId
    metrics: dict[str, float]


class Truncated(_Note):
    """The trajectory has had all of its turns."""

    trajectory: TrajectoryId


class BegunAgain(_Note):
    """The trajectory's env worker is gone: the trajectory begins again, and its sampled `tokens` are lost. `ran` is
    whether the trajectory's own code may have been to blame."""

    trajectory: TrajectoryId
    cause: str
    tokens: int
    ran: bool = False


class UpstreamAsked(_Note):
    """A front may make a call of a model elsewhere, which is open from now on.

    Tokens and money are the most that it can come to. `trajectory` is empty for a driver's own call.
    """

    call: int
    model: str
    route: str
    trajectory: TrajectoryId
    driver: str
    prompt_tokens: int
    answer_tokens: int
    nano_usd: int
    at_ns: Nanoseconds


class UpstreamTold(_Note):
    """The call is over. Its client was answered with `status`, 0 if the call was never made.

    Tokens are None where nobody knows them: then the call has cost the most that it could.
    """

    call: int
    status: int
    prompt_tokens: int | None
    answer_tokens: int | None
    nano_usd: int
    duration_s: float


class UpstreamCarried(_Note):
    """What calls of models elsewhere have come to in incarnations of the run that this one does not go on from."""

    granted: int
    returned: int
    nano_usd: int


AgentNote: TypeAlias = (
    TurnAsked
    | Begun
    | Bound
    | AnswerSettled
    | AnswerGiven
    | Abandoned
    | Rewarded
    | MetricsTaken
    | Truncated
    | BegunAgain
    | UpstreamAsked
    | UpstreamTold
    | UpstreamCarried
)

encode_note = msgspec.msgpack.Encoder().encode
decode_note = msgspec.msgpack.Decoder(AgentNote).decode
_BEGUN_AGAIN = encode_note(BegunAgain("", "", 0)).removesuffix(
    encode_note("") * 2 + encode_note(0) + encode_note(False)
)
"""How such a note begins: of the many others none is decoded to see that it is another."""


def begun_again(note: bytes) -> TrajectoryId | None:
    """The trajectory of which an encoded note says that it begins again; None if it says anything else."""
    if not note.startswith(_BEGUN_AGAIN):
        return None
    said = decode_note(note)
    return said.trajectory if isinstance(said, BegunAgain) else None
