"""What happens to the core. Every event is immutable, journaled, and enough to replay the run."""

from typing import TypeAlias, dataclass_transform

import msgspec

from elastic.core.types import (
    Account,
    Capabilities,
    Chunks,
    EndCause,
    LeaseId,
    LoadPhase,
    LogprobCheck,
    Nanoseconds,
    Offer,
    TrajectoryId,
    TurnId,
    WorkerId,
)


@dataclass_transform(frozen_default=True, field_specifiers=(msgspec.field,))
class _Event(msgspec.Struct, frozen=True, tag=True, kw_only=True, gc=False):
    pass


class Tick(_Event):
    """Time has reached the core's wake-up; nothing else happened."""


class Suspended(_Event):
    """The machine was suspended for so long. Nothing could be heard meanwhile, so nobody was silent; leases went
    on, and cost what they cost."""

    for_ns: Nanoseconds


class OfferChanged(_Event):
    """A provider's capacity or price is now this."""

    offer: Offer


class LeaseGranted(_Event):
    """Billing starts. `workers` are the ids under which the lease's workers will join."""

    lease: LeaseId
    workers: tuple[WorkerId, ...]
    expires_at_ns: Nanoseconds | None = None


class LeaseRefused(_Event):
    """`withdrawn`: the run had been stopped and took its request back, which says nothing of the provider."""

    lease: LeaseId
    reason: str
    withdrawn: bool = False


class LeaseNotice(_Event):
    """The lease will be taken away at `deadline_ns`; running turns end or move before that.

    Without a deadline it is only likelier than before to be taken: nothing moves yet.
    """

    lease: LeaseId
    deadline_ns: Nanoseconds | None
    reason: str


class LeaseEnded(_Event):
    """The provider has the GPUs back. Billing stops; nothing of the lease is believed any more.

    `billed_ns` is the time of each worker that the provider charges by its own account, where it says so; else what is
    billed is the time from the grant to this end. `fault` is why its workers could not begin, in words that are the
    same for the same cause but for figures; empty where that is not known, or was an accident.
    """

    lease: LeaseId
    cause: EndCause
    detail: str = ""
    fault: str = ""
    billed_ns: Nanoseconds | msgspec.UnsetType = msgspec.UNSET


class LeaseRepriced(_Event):
    """The provider's own account of a granted lease, where its price is not the offer's for its whole life: each of its
    workers has cost `usd` so far, the provider's minimum aside, and costs `usd_per_gpu_hour` at the most from now
    on."""

    lease: LeaseId
    usd: float
    usd_per_gpu_hour: float


class StraysBilled(_Event):
    """The provider bills `usd` more for what no lease had, such as an instance whose order was given up; less than 0
    where it bills less than was told before."""

    provider: str
    usd: float


class WorkerJoined(_Event, omit_defaults=True):
    """A worker opened its session, or resumed it under a new epoch. A trainer's `proof` is as in `WeightsPublished`."""

    worker: WorkerId
    epoch: int
    capabilities: Capabilities
    weights_version: int | None
    proof: tuple[float, ...] = ()


class WorkerReported(_Event):
    """A heartbeat. `accounts_ns` is cumulative since the worker's start and sums to its uptime.

    `capacity_turns` is the worker's credit: how many turns it can hold at once right now.
    `progress` counts engine iterations; a heartbeat whose progress stands still while turns execute is
    that of a hung engine. `loading` and `load_progress`, which grows with every piece of weights that is pulled or
    applied, are those of the weights that it was told to load. `paced_iterations` of the engine had a modelled time,
    and `late_iterations` of them took longer.
    """

    worker: WorkerId
    epoch: int
    capacity_turns: int
    pending: int
    executing: int
    progress: int
    accounts_ns: dict[Account, int]
    decoded_tokens: int
    kv_used_share: float = 0.0
    prefix_hit_tokens: int = 0
    prompt_tokens: int = 0
    loading: LoadPhase = LoadPhase.NONE
    load_progress: int = 0
    paced_iterations: int = 0
    late_iterations: int = 0


class WorkerSlept(_Event):
    worker: WorkerId
    epoch: int


class WorkerAwoke(_Event):
    worker: WorkerId
    epoch: int


class WorkerDisconnected(_Event):
    """The connection of this epoch is gone. `goodbye` when the worker said so itself after draining."""

    worker: WorkerId
    epoch: int
    goodbye: bool = False


class WorkerBarred(_Event):
    """The worker has sent something impossible or forbidden in this epoch; `cause` names it. Its connection is cut,
    and all of its later messages are ignored."""

    worker: WorkerId
    epoch: int
    cause: str


class WeightsApplied(_Event, omit_defaults=True):
    """The worker serves `version`; `proof` is what it answers to the text by which versions are known."""

    worker: WorkerId
    epoch: int
    version: int
    proof: tuple[float, ...] = ()


class WeightsFailed(_Event):
    worker: WorkerId
    epoch: int
    version: int
    reason: str


class TokensReceived(_Event):
    """A frame of token chunks from one worker; most events of a run are these."""

    worker: WorkerId
    epoch: int
    chunks: Chunks


class TurnRequested(_Event, omit_defaults=True):
    """An environment loop, or an agent, asks for a turn of `prompt_tokens` tokens of context.

    Turns with the same `tag` are thought to be alike in what they cost. `note` is what the shell keeps of an agent's
    call, opaque here. Turns with one of their `marks` in common are thought to have work in common, those with
    the first of them the most.
    """

    turn: TurnId
    trajectory: TrajectoryId
    prompt_tokens: int
    max_new_tokens: int
    tag: str = ""
    note: bytes = b""
    marks: tuple[str, ...] = ()


class TurnCut(_Event):
    """The answer ends behind the turn's first `kept` tokens, for the caller: nothing behind them is trained.

    The turn is over, if it was not. `lost` are accepted tokens that are cut off, by the worker that sampled them. It
    was `aborted` where somebody else than its client has ended it.
    """

    turn: TurnId
    kept: int
    lost: tuple[tuple[WorkerId, int], ...] = ()
    aborted: bool | msgspec.UnsetType = msgspec.UNSET


class AgentNoted(_Event):
    """The shell keeps this of what agents and their drivers have said, in the order of all that happens; it decides
    nothing here."""

    note: bytes


class TrajectoryFinished(_Event, omit_defaults=True):
    """An episode is over and scored. `tokens` counts the policy's own.

    `by_policy` says what each of the policies is trained by that agents name in it, where they may name several.
    """

    trajectory: TrajectoryId
    reward: float
    tokens: int
    by_policy: dict[str, float] = {}


class TrajectoryFailed(_Event):
    """An episode ended for a cause that is not the policy's; it is never scored (invariant 11)."""

    trajectory: TrajectoryId
    cause: str


class RewardRequested(_Event):
    """An episode is over, and a function is to score it. `tokens` counts the policy's own."""

    trajectory: TrajectoryId
    tokens: int


class RewardScored(_Event):
    """The function's answer to this attempt."""

    trajectory: TrajectoryId
    attempt: int
    reward: float


class RewardFailed(_Event):
    """This attempt has brought no reward: the function is unavailable, raised, or returned what is no score."""

    trajectory: TrajectoryId
    attempt: int
    cause: str
    retry_helps: bool


class GroupTrained(_Event, omit_defaults=True):
    """`worker` says that the group's gradients are accumulated; it counts if `worker` is the trainer's.

    `checks` are of tokens that were compared meanwhile, in this group and others.
    """

    worker: WorkerId
    epoch: int
    group: str
    checks: tuple[LogprobCheck, ...] = ()


class WeightsPublished(_Event, omit_defaults=True):
    """The trainer has stepped, and workers may pull `version`: a relay holds what they need, or is being given it.

    It counts if `worker` is the trainer's. `checks` as in `GroupTrained`. A `proof` is what workers that serve this
    version are to answer; empty where they need not. From `unusable` groups of the step no gradient came, for this
    `reason` among others.
    """

    worker: WorkerId
    epoch: int
    version: int
    checks: tuple[LogprobCheck, ...] = ()
    proof: tuple[float, ...] = ()
    unusable: int = 0
    reason: str = ""


class VersionOffered(_Event):
    """Somebody else has trained the next version: it ends the step of a run without groups.

    `source` says where it is, opaque here; two offers of the same `look` are one. `label` is what its trainer calls it.
    """

    source: str
    look: str
    label: str = ""


class VersionRefused(_Event):
    """The trainer cannot serve what was offered to be `version`. It counts if `worker` is the trainer's. `again`: the
    same offer may be served later."""

    worker: WorkerId
    epoch: int
    version: int
    reason: str
    again: bool = False


class TurnsHeld(_Event):
    """Turns that wait are held in the queue from now on, or (`held` false) are not any more."""

    held: bool


class TrainerFailed(_Event):
    """The trainer could not carry out an order. It counts if `worker` is the trainer's."""

    worker: WorkerId
    epoch: int
    error: str


class PermitGranted(_Event):
    """The trainer may compute on its device, which other jobs share, until `deadline_ns` at the latest.

    Permits are numbered upwards: what is said of an older one counts no more.
    """

    permit: int
    deadline_ns: Nanoseconds


class PermitRecalled(_Event):
    """Give way: what is under way on the trainer's device may end until `until_ns`, nothing new begins."""

    permit: int
    until_ns: Nanoseconds


class PermitEnded(_Event):
    """The permit was taken: others compute on the trainer's device."""

    permit: int
    cause: str


class StopRequested(_Event):
    reason: str


class StopCommanded(_Event):
    """A user has told the run to end as `stopped`. `undone`: the run was resumed since; only the command's id still
    matters."""

    command: str
    reason: str
    undone: bool = False

    @property
    def words(self) -> str:
        return f"stop: {self.reason}"


class CapSet(_Event):
    """At most `gpus` GPUs of the provider may be held from now on; None for no limit."""

    command: str
    provider: str
    gpus: int | None

    @property
    def words(self) -> str:
        return f"cap {self.provider}={'none' if self.gpus is None else self.gpus}"


class BudgetSet(_Event):
    """The run may cost `usd` in all, from its beginning to its end; None for any amount."""

    command: str
    usd: float | None

    @property
    def words(self) -> str:
        return f"budget {'none' if self.usd is None else self.usd}"


class BudgetExhausted(_Event):
    """The budget's end has come: the core has asked to be told so, for what comes of it is to stand in the journal."""

    cause: str


class CostCarried(_Event):
    """Incarnations that this one does not go on from have cost so much; `of_providers` is each provider's part."""

    nano_usd: int
    of_providers: dict[str, int] = msgspec.field(default_factory=dict[str, int])


class EvaluationsCarried(_Event):
    """What evaluations came to in incarnations that this one does not go on from: by version, the metrics that decide
    something."""

    values: dict[int, dict[str, float]]


class FunctionsBilled(_Event):
    """Calls of functions have cost `nano_usd` in all; one more costs `call_nano_usd` at the most. Told to runs that
    have a budget."""

    nano_usd: int
    call_nano_usd: int


class Resumed(_Event):
    """A new process continues the run from its journal. No worker was heard since the event before this one.

    What it finds (closed connections, ended leases) comes as events of their own. The trainer gets all of its restarts
    again. `budget_usd` is set if the user who resumed the run has changed or removed its budget.
    """

    budget_usd: float | msgspec.UnsetType | None = msgspec.UNSET


Event: TypeAlias = (
    Tick
    | Suspended
    | OfferChanged
    | LeaseGranted
    | LeaseRefused
    | LeaseNotice
    | LeaseEnded
    | LeaseRepriced
    | StraysBilled
    | WorkerJoined
    | WorkerReported
    | WorkerSlept
    | WorkerAwoke
    | WorkerDisconnected
    | WorkerBarred
    | WeightsApplied
    | WeightsFailed
    | TokensReceived
    | TurnRequested
    | TurnCut
    | AgentNoted
    | TrajectoryFinished
    | TrajectoryFailed
    | RewardRequested
    | RewardScored
    | RewardFailed
    | GroupTrained
    | WeightsPublished
    | VersionOffered
    | VersionRefused
    | TurnsHeld
    | TrainerFailed
    | PermitGranted
    | PermitRecalled
    | PermitEnded
    | StopRequested
    | StopCommanded
    | CapSet
    | BudgetSet
    | BudgetExhausted
    | CostCarried
    | EvaluationsCarried
    | FunctionsBilled
    | Resumed
)

ControlEvent: TypeAlias = StopCommanded | CapSet | BudgetSet
"""Commands from outside, each with an id under which it is done once."""
