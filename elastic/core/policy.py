"""What the core asks of policies, and the read-only views they decide on.

Policies are pure: no I/O, no clock, no memory of their own. The core calls them through these protocols and
imports none of them.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec

from elastic.core.demand import Demand
from elastic.core.profiles import BatchProfile
from elastic.core.rows import Curriculum, PassOrder, PassView
from elastic.core.types import Nanoseconds, Offer, TrajectoryId, TurnId, WorkerId, WorkerKind, WorkerRole


class WorkerView(Protocol):
    """A worker as a policy sees it.

    - `outstanding` turns are on it, `pending` of them not begun as far as is known; `due_tokens` is what all of them
      are expected to decode.
    - `has_place`: another turn would begin at once; without a place it would wait.
    - `reputation` is below 1 while it has recently returned turns.
    """

    @property
    def id(self) -> WorkerId: ...
    @property
    def role(self) -> WorkerRole: ...
    @property
    def provider(self) -> str: ...
    @property
    def kind(self) -> WorkerKind: ...
    @property
    def capacity(self) -> int: ...
    @property
    def outstanding(self) -> int: ...
    @property
    def pending(self) -> int: ...
    @property
    def due_tokens(self) -> int: ...
    @property
    def has_place(self) -> bool: ...
    @property
    def reputation(self) -> float: ...


class FleetView(Protocol):
    """Workers that a turn may go to: ready, with credit, with recent enough weights, and without a back-off for this
    turn."""

    def with_room(self, worker: WorkerId, oldest_version: int) -> WorkerView | None:
        """The worker, if it may take one more such turn now."""
        ...

    def least_loaded(self, role: WorkerRole, oldest_version: int) -> Sequence[WorkerView]:
        """Return the least loaded worker of each kind, among workers of a role with room for such a turn.

        The least loaded worker of all comes first: one with a free place in its batch, if any; then by turns per place
        and reputation. O(log n) in workers; kinds are few.
        """
        ...


class TurnView(Protocol):
    @property
    def id(self) -> TurnId: ...
    @property
    def trajectory(self) -> TrajectoryId: ...
    @property
    def prompt_tokens(self) -> int: ...
    @property
    def max_new_tokens(self) -> int: ...
    @property
    def accepted(self) -> int: ...
    @property
    def context_tokens(self) -> int: ...
    @property
    def oldest_version(self) -> int: ...
    @property
    def affine_worker(self) -> WorkerId | None: ...
    @property
    def affine_tokens(self) -> int: ...
    @property
    def demand(self) -> Demand: ...
    @property
    def expected_tokens(self) -> float: ...


class LoadView(Protocol):
    """A ready worker as a balancing policy sees it. `room` is how many more turns it could execute at once."""

    pending: int
    executing: int

    @property
    def room(self) -> int: ...
    @property
    def id(self) -> WorkerId: ...
    @property
    def kind(self) -> WorkerKind: ...

    def movable_pending(self) -> Sequence[TurnId]:
        """Waiting turns, the longest remaining wait first."""
        ...

    def movable_executing(self) -> Sequence[TurnId]:
        """Executing turns, the cheapest to move first."""
        ...

    def context_tokens(self) -> float:
        """Mean context of the turns on it."""
        ...


class LeavingView(Protocol):
    """A worker that must have handed over all its turns in `left_ns`.

    Speeds are those of its kind (decoding of one turn in a batch, and prefill), 0 where unknown. `receivers` is how
    many workers may take the turns that must leave.
    """

    left_ns: Nanoseconds

    @property
    def id(self) -> WorkerId: ...
    @property
    def decode_tokens_per_s(self) -> float: ...
    @property
    def prefill_tokens_per_s(self) -> float: ...
    @property
    def receivers(self) -> int: ...


class Move(msgspec.Struct, frozen=True):
    """Take a turn off its worker and send it on to another."""

    turn: TurnId
    to: WorkerId


class BatchView(msgspec.Struct, frozen=True, kw_only=True):
    """The groups in play in a step, and how many are `wanted` for it and for those it may run ahead for.

    `finished` groups are worth training on, or trained already; `rejected` ones, of this step, are not, and neither
    are `launched` ones any earlier step's.
    """

    wanted: int
    launched: int
    running: int
    finished: int
    rejected: int


class StepRecord(msgspec.Struct, frozen=True, kw_only=True):
    """How a finished step went; what policies that learn from step to step look at.

    In RLBoost's words (§4.1): `train_ns` is t_train, `train_wait_ns` t_train^wait (the trainer's device free, and
    no group to train), `rollout_ns` t_remote, `remote_wait_ns` t_remote^wait (from the last response to the step's
    end). Workers that help the trainer's device are counted as a mean over the step (n̄_prem), which is that at its end
    (n̂_prem) only if none came or went.

    Of the groups that finished `groups_of_use` were worth training on, trained or not; `groups_rejected` were not.
    """

    step: int
    duration_ns: Nanoseconds
    seeding_ns: Nanoseconds
    rollout_ns: Nanoseconds
    groups_trained: int
    groups_dropped: int
    groups_of_use: int = 0
    groups_rejected: int = 0
    train_ns: Nanoseconds = 0
    train_wait_ns: Nanoseconds = 0
    remote_wait_ns: Nanoseconds = 0
    workers_mean: float = 0.0
    workers_end: int = 0


class SeedingPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The decision of a seeding policy, and its memory; the core keeps both from step to step.

    `worker_bound` is N_prem: more workers would not shorten steps. `memory` maps a number of workers to the best window
    with them.
    """

    window_ns: Nanoseconds
    worker_bound: int | None = None
    memory: Mapping[int, Nanoseconds] = msgspec.field(default_factory=dict[int, Nanoseconds])


class MarketView(Protocol):
    """Everything that providers offer, and what is held of it, in leases."""

    @property
    def worker_bound(self) -> int | None: ...
    @property
    def offers(self) -> Mapping[str, Offer]: ...

    def available(self, provider: str) -> int:
        """Leases on offer that are not asked for yet; none while the provider is left alone after a failure."""
        ...

    def held(self, provider: str) -> int:
        """Leases that are asked for, granted or on their way back."""
        ...

    def ready_s(self, provider: str) -> float | None:
        """Mean time from grant to readiness of the provider's last workers; None before the first."""
        ...


class RoutingPolicy(Protocol):
    def route(self, turn: TurnView, fleet: FleetView) -> WorkerId | None:
        """Returns the worker for the turn, or None to leave it queued (no worker has room).

        Asked for the oldest turns of their kinds, and not again before a worker has got room or others are the oldest.
        """
        ...


class BalancingPolicy(Protocol):
    def moves(self, loads: Sequence[LoadView], profiles: Mapping[WorkerKind, BatchProfile]) -> Sequence[Move]:
        """Returns the moves to make now. A moved turn cannot move again before it has got a token.

        In a large fleet, `loads` has the workers with the most and with the least work of each kind.
        """
        ...


class SeedingPolicy(Protocol):
    def first(self) -> SeedingPlan:
        """The plan of a run's first step."""
        ...

    def following(self, plan: SeedingPlan, record: StepRecord) -> SeedingPlan:
        """The next step's plan, after a step under `plan` went as `record` says."""
        ...


class ProvisioningPolicy(Protocol):
    def leases_wanted(self, offer: Offer, market: MarketView) -> int:
        """How many more leases to ask this provider for now.

        Also asked of a market in which a lease is over that will end by time: whether it is to have a replacement.
        """
        ...


class HoldingPolicy(Protocol):
    def pause_ns(
        self, offer: Offer, foreseen_ns: Nanoseconds | None, ready_ns: Nanoseconds | None
    ) -> Nanoseconds | None:
        """No rollouts are left to do in this step, or no requests: for how long leases of this offer are given back.

        0: not at all; None: until there are rollouts again. `foreseen_ns` is how long that took the last time, None
        before, and of requests how much longer it takes than it has by now; `ready_ns` the longest that this provider's
        last workers took to get ready. Not asked in the last step.
        """
        ...


class DeparturePolicy(Protocol):
    def takes(self, turn: TurnView, leaving: LeavingView, cached_tokens: int) -> bool:
        """Whether the turn, of whose context the worker has `cached_tokens`, may still begin there. Asked again when
        the worker has reported, or where turns have changed."""
        ...

    def stays_ns(self, turns: Sequence[TurnView], leaving: LeavingView) -> Mapping[TurnId, Nanoseconds]:
        """How much longer each of the turns that run there stays, at most `left_ns`. Asked again as time goes on."""
        ...


class ReplacementPolicy(Protocol):
    def lead_ns(self, offer: Offer, ready_ns: Nanoseconds | None) -> Nanoseconds:
        """How long before a lease's workers must drain its replacement is asked for.

        `ready_ns` is the longest that this provider's last workers took from their grant to being ready.
        """
        ...


class SelectionPolicy(Protocol):
    def drop_reason(self, rewards: Sequence[float]) -> str | None:
        """Why a finished group is not worth training on, or None to train on it."""
        ...


class SamplingPolicy(Protocol):
    @property
    def replaces_rejected(self) -> bool:
        """Whether a step goes on until enough groups are worth training on, taken in launch order."""
        ...

    def launches(self, batch: BatchView, history: Sequence[StepRecord]) -> int:
        """How many more groups to launch now."""
        ...


class CurriculumPolicy(Protocol):
    def order(self, view: PassView, /) -> PassOrder:
        """Which rows of an environment's data come first in a pass, and which last. Asked as the pass begins."""
        ...


class Policies(msgspec.Struct, frozen=True, kw_only=True):
    routing: RoutingPolicy
    balancing: BalancingPolicy | None = None
    seeding: SeedingPolicy
    provisioning: ProvisioningPolicy
    selection: SelectionPolicy
    sampling: SamplingPolicy
    holding: HoldingPolicy | None = None
    """None: leases are held for the whole run."""
    replacement: ReplacementPolicy | None = None
    """None: no lease is replaced before its end."""
    curricula: Mapping[str, Curriculum] = {}
    """By environment, where the rows of its groups do not follow from the groups' places."""
    departure: DeparturePolicy | None = None
    """None: the workers of a lease drain as soon as the lease's end is known."""
