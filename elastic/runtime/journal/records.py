"""What a journal keeps, one record type a table. A change of these is a new `SCHEMA_VERSION`, but for tables that come
with their first record (`LATER`): a journal without one is as one that has it, and empty. Journals of former versions
lack an `INDEX`: tables are read whole there."""

import math
from typing import ClassVar, Literal, NamedTuple

import msgspec

from elastic.core.evaluation import EvaluationRecord
from elastic.core.ids import EVALUATED
from elastic.core.ledger import DeviceBook
from elastic.core.policy import StepRecord
from elastic.core.steps import CUT_OFF
from elastic.core.types import Nanoseconds, TrajectoryId, TurnId, WorkerId
from elastic.protocol import wire
from elastic.protocol.sampled import Sampled, SampledBranch
from elastic.runtime.journal.tables import FLOAT_MAX, JournalRecord, JournalTable
from elastic.runtime.status import EnvironmentStep, RunStatus
from functions.base import Call, CallOutcome

CONTINUES = "continues"
"""The key under which a journal names the journal that it continues."""
JOIN, RELAY, PUBLISHER = "join", "relay", "publisher"
"""Keys of a journal's notes: where workers dial and pull weights, and whose weights they believe."""
AGENTS = "agents"
"""The key of a journal's note of where fronts serve agents."""
RUNNING, UNEXPECTED = "running", "failed: it ended unexpectedly"
"""What the note of a run's status says until its end, and of an end that nobody foresaw."""
INTERRUPTED = "interrupted"
"""The cause of a run that ended as failed because a person or a signal ended it."""
TRACEBACK = "traceback"
"""The key of a journal's note of where an environment raised first."""
FRAME = "frame"
"""Kind of an event that is kept with the tokens that came in it."""
FREQUENT = (
    FRAME,
    "TurnRequested",
    "WorkerReported",
    "TokensReceived",
    "Tick",
    "TrajectoryFinished",
    "RewardRequested",
    "RewardScored",
    "GroupTrained",
    "TurnCut",
    "AgentNoted",
    "FunctionsBilled",
    "TurnsHeld",
    "PermitGranted",
    "PermitEnded",
    "PermitRecalled",
)
"""Kinds of events of which there are as many as turns, groups, permits or moments; those that come most often first."""
RARE = " AND ".join(f"kind != '{kind}'" for kind in FREQUENT)
"""The condition, in SQL, of all other kinds, which the index has whole. A query says it word for word to use that."""


class NoteRow(JournalRecord, gc=False):
    """A text under a key: what the run is, how it ended, what a provider has to say. The last one stands."""

    TABLE: ClassVar[str] = "meta"
    KEY: ClassVar[str] = "key"

    key: str
    value: str


class EventRow(JournalRecord, gc=False):
    """An event as the core took it: its type's name and the event itself, or `FRAME` and the frame that it was in."""

    TABLE: ClassVar[str] = "events"
    INDEX: ClassVar[str] = f"(seq, kind, t_ns, body) WHERE {RARE}"

    t_ns: Nanoseconds
    kind: str
    body: bytes


class TurnRow(JournalRecord, gc=False):
    """A turn that came to its end. `worker` is the last that it was on, `attempts` how many times it was begun."""

    TABLE: ClassVar[str] = "turns"
    KEY: ClassVar[str] = "turn"

    turn: TurnId
    trajectory: TrajectoryId
    requested_ns: Nanoseconds
    first_token_ns: Nanoseconds | None
    finished_ns: Nanoseconds
    prompt_tokens: int
    tokens: int
    attempts: int
    cached_tokens: int
    worker: WorkerId


class MoveRow(JournalRecord, gc=False):
    """A turn that left a worker unfinished at `left_ns` and began on the next, with what was accepted until then."""

    TABLE: ClassVar[str] = "moves"

    turn: TurnId
    attempt: int
    from_worker: WorkerId
    to_worker: WorkerId
    left_ns: Nanoseconds
    started_ns: Nanoseconds
    accepted_tokens: int


NOT_SCORED = "not scored"
"""The cause of a trajectory that has no reward yet."""


class TrajectoryRow(JournalRecord, gc=False):
    """A trajectory that is over: with its reward, or with the cause of its failure and none.

    `truncated` says that a limit of turns or tokens ended it. `token_ids` are packed, and `sampled` is a msgpack
    `elastic.protocol.sampled.Sampled`; both are empty where tokens were only counted. `branches` is a msgpack list of
    `SampledBranch`, of the branches that an agent has made besides the first; empty where there is only that.
    `task` is JSON that its driver gave, if any; `metrics` are msgpack, too: numbers by name.
    """

    TABLE: ClassVar[str] = "trajectories"
    KEY: ClassVar[str] = "trajectory"
    INDEX: ClassVar[str] = "(step, cause, reward, truncated, policy_tokens)"

    trajectory: TrajectoryId
    step: int
    group: str
    started_ns: Nanoseconds
    ended_ns: Nanoseconds
    reward: float | None
    cause: str
    turns: int
    policy_tokens: int
    token_ids: bytes
    truncated: bool = False
    sampled: bytes = b""
    branches: bytes = b""
    task: bytes = b""
    environment: str = ""
    metrics: bytes = b""

    def further_branches(self) -> list[SampledBranch]:
        """The branches that an agent has made besides the first."""
        return msgspec.msgpack.decode(self.branches, type=list[SampledBranch]) if self.branches else []

    def all_sampled(self) -> list[Sampled]:
        """What was sampled in each branch, the first included; nothing where tokens were only counted."""
        if not self.sampled:
            return []
        first = msgspec.msgpack.decode(self.sampled, type=Sampled)
        return [first, *(branch.sampled for branch in self.further_branches())]

    @property
    def is_cut_off(self) -> bool:
        """Whether its group had as many members as are wanted before it was scored: it has neither failed nor
        counts."""
        return self.cause == CUT_OFF

    @property
    def waits_for_score(self) -> bool:
        """Whether its reward is still to come: it has not failed."""
        return self.cause == NOT_SCORED

    @property
    def metrics_by_name(self) -> dict[str, float]:
        return msgspec.msgpack.decode(self.metrics, type=dict[str, float]) if self.metrics else {}


class EvaluatedRow(TrajectoryRow, frozen=True, gc=False):
    """An episode of an evaluation that is over, as in `TrajectoryRow`: `step` is the version that was evaluated."""

    TABLE: ClassVar[str] = "evaluated"
    LATER: ClassVar[bool] = True
    INDEX: ClassVar[str] = ""


class EvaluationRow(JournalRecord):
    """An evaluation that is over. `best`: no version before was as good, by the metric that the run is told to keep.
    `ends` is why the run ended with it before its last step; empty where it did not."""

    TABLE: ClassVar[str] = "evaluations"
    KEY: ClassVar[str] = "version"
    LATER: ClassVar[bool] = True

    version: int
    t_ns: Nanoseconds
    record: EvaluationRecord
    best: bool = False
    ends: str = ""


class TrajectoryPlace(NamedTuple):
    """The place of a trajectory in an order within a journal: highest rank first, among equal ranks the newest."""

    rank: float
    row: int


class TrajectoryFilter(msgspec.Struct, frozen=True, kw_only=True):
    """Which trajectories are wanted: the newest first, or by reward, `best` or `worst` first. Then unrewarded ones are
    last.

    Only those of `step`, of steps before `step_end`, of `group`, of `environment`, and with a reward within the bounds
    that are set;
    `truncated` ones, `failed` ones, to which those that were cut off do not belong. With `evaluation` they are episodes
    of evaluations, whose step is the version that was evaluated; else they are none.
    """

    evaluation: bool = False
    step: int | None = None
    step_end: float = math.inf
    group: str | None = None
    environment: str | None = None
    reward_min: float | None = None
    reward_max: float | None = None
    truncated: bool = False
    failed: bool = False
    order: Literal["newest", "best", "worst"] = "newest"

    @property
    def kind(self) -> type[TrajectoryRow]:
        return EvaluatedRow if self.evaluation else TrajectoryRow

    @property
    def rank(self) -> str:
        return {
            "newest": "0.0",
            "best": f"ifnull(reward, -{FLOAT_MAX})",
            "worst": f"ifnull(-reward, -{FLOAT_MAX})",
        }[self.order]

    def clauses(self, behind: TrajectoryPlace | None) -> tuple[str, list[float | str]]:
        """The condition, in SQL, and its values."""
        # Names begin with their step, and are in order: nothing else is read for a step, by no other index.
        begins = f"{EVALUATED if self.evaluation else ''}{self.step}"
        first, beyond = (None, None) if self.step is None else (f"{begins}/", f"{begins}0")
        asked: list[tuple[str, float | str | None]] = [
            ("trajectory >= ?", first),
            ("trajectory < ?", beyond),
            ("+step = ?", self.step),
            ("step < ?", None if self.step_end == math.inf else self.step_end),
            ('"group" = ?', self.group),
            ("environment = ?", self.environment),
            ("reward >= ?", self.reward_min),
            ("reward <= ?", self.reward_max),
            ("truncated = ?", 1 if self.truncated else None),
            ("(cause NOT IN ('', ?) OR (cause = '' AND reward IS NULL))", CUT_OFF if self.failed else None),
        ]
        found = [(clause, value) for clause, value in asked if value is not None]
        clauses, values = [clause for clause, _ in found], [value for _, value in found]
        if behind is not None:
            ranked = self.order != "newest"
            clauses.append(f"({self.rank}, rowid) < (?, ?)" if ranked else "rowid < ?")
            values += [*([behind.rank] if ranked else []), behind.row]
        return " AND ".join(clauses) or "1", values


class GroupRow(JournalRecord):
    """The end of a group in `step`, with the trainer at `version`: why it was `dropped`, or "" if it was trained.

    `lengths` has the policy tokens of each member so far, and not those of members that were replaced; ages are in
    versions. Of a group that was trained, `masked_tokens` are those that were left out since they were too old; none
    of these is in `tokens_by_age`.
    """

    TABLE: ClassVar[str] = "groups"
    KEY: ClassVar[str] = "group"
    INDEX: ClassVar[str] = "(step)"

    group: str
    t_ns: Nanoseconds
    step: int
    version: int
    dropped: str
    lengths: list[int]
    tokens_by_age: dict[int, int]
    masked_tokens: int = 0
    environment: str = ""


class StepWeights(msgspec.Struct, frozen=True, kw_only=True):
    """The version that a step published; `changed` as in `elastic.protocol.wire.PublishedFrame`."""

    version: int
    changed: dict[str, float]


class StepRow(JournalRecord):
    """A finished training step: `record` is the core's account of it, `trainer` has the trainer's own figures.

    `weights` is None until the version is on the relay, which is when the row is written once more.
    """

    TABLE: ClassVar[str] = "steps"
    KEY: ClassVar[str] = "step"

    step: int
    t_ns: Nanoseconds
    record: StepRecord
    success_rate: float | None
    trainer: dict[str, float | None]
    weights: StepWeights | None = None
    environments: dict[str, EnvironmentStep] = msgspec.field(default_factory=dict[str, EnvironmentStep])
    """By name, where there are several."""


class SampleRow(JournalRecord):
    """How the run stood at one moment."""

    TABLE: ClassVar[str] = "samples"
    KEY: ClassVar[str] = "t_ns"

    t_ns: Nanoseconds
    status: RunStatus


class PullRow(JournalRecord):
    """A worker's report of weights that it pulled, or could not; fields as in `elastic.protocol.wire.WeightsReport`."""

    TABLE: ClassVar[str] = "pulls"

    t_ns: Nanoseconds
    worker: WorkerId
    version: int
    bytes: int
    pull_s: float
    apply_s: float
    error: str
    full_bytes: int = 0
    split_s: dict[wire.PullPart, float] = msgspec.field(default_factory=dict[wire.PullPart, float])
    refused: list[wire.UnverifiedWeights] = msgspec.field(default_factory=list[wire.UnverifiedWeights])


class CallRow(JournalRecord, gc=False):
    """One metered call of a function; fields as in `functions.base.Call`, with the billed idle time in `duration_s`."""

    TABLE: ClassVar[str] = "calls"

    t_ns: Nanoseconds
    function: str
    key: str
    outcome: CallOutcome
    queued_s: float
    cold_start_s: float
    duration_s: float
    usd: float

    @property
    def failed(self) -> bool:
        return self.outcome is not CallOutcome.OK

    @classmethod
    def of(cls, call: Call, t_ns: Nanoseconds) -> "CallRow":
        fields = msgspec.structs.asdict(call)
        fields["duration_s"] += fields.pop("idle_s")
        return cls(t_ns=t_ns, **fields)


class StateRow(JournalRecord, gc=False):
    """The run after the journal's first `events` events, `saved` as in `elastic.runtime.states`: the process that
    takes the run up begins there, for what led there is not kept. There is one such row, the last."""

    TABLE: ClassVar[str] = "states"
    KEY: ClassVar[str] = "place"
    LATER: ClassVar[bool] = True

    events: int
    saved: bytes
    place: int = 0


class BookRow(JournalRecord):
    """A worker's book in the ledger, as it was written last; the final one once it is closed."""

    TABLE: ClassVar[str] = "books"
    KEY: ClassVar[str] = "worker"

    worker: WorkerId
    book: DeviceBook


KINDS: tuple[type[JournalRecord], ...] = (
    NoteRow,
    EventRow,
    TurnRow,
    MoveRow,
    TrajectoryRow,
    GroupRow,
    StepRow,
    SampleRow,
    PullRow,
    CallRow,
    BookRow,
    EvaluatedRow,
    EvaluationRow,
    StateRow,
)
TABLES: dict[type[JournalRecord], JournalTable] = {kind: JournalTable(kind) for kind in KINDS}
