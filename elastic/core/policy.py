"""What the core asks of policies, and the read-only views they decide on.

Policies are pure: no I/O, no clock, no memory of their own. The core calls them through these protocols and
imports none of them.
"""

from collections.abc import Sequence
from typing import Protocol

import msgspec

from elastic.core.types import Nanoseconds, Offer, TrajectoryId, WorkerId, WorkerRole


class WorkerView(Protocol):
    """A worker as a policy sees it. `outstanding` turns are on it, `pending` of them not begun."""

    @property
    def id(self) -> WorkerId: ...
    @property
    def role(self) -> WorkerRole: ...
    @property
    def provider(self) -> str: ...
    @property
    def capacity(self) -> int: ...
    @property
    def outstanding(self) -> int: ...
    @property
    def pending(self) -> int: ...


class FleetView(Protocol):
    """The workers a turn may go to: ready, current enough, and with credit left."""

    def with_room(self, worker: WorkerId, oldest_version: int) -> WorkerView | None:
        """The worker, if it may take one more such turn now."""
        ...

    def least_loaded(self, role: WorkerRole, oldest_version: int) -> WorkerView | None:
        """Of the workers of a role that may take one more such turn, the least loaded: O(log n)."""
        ...


class TurnView(Protocol):
    @property
    def trajectory(self) -> TrajectoryId: ...
    @property
    def prompt_tokens(self) -> int: ...
    @property
    def accepted(self) -> int: ...
    @property
    def oldest_version(self) -> int: ...
    @property
    def affine_worker(self) -> WorkerId | None: ...


class StepRecord(msgspec.Struct, frozen=True, kw_only=True):
    """How a finished step went; what policies that learn from step to step look at."""

    step: int
    duration_ns: Nanoseconds
    seeding_ns: Nanoseconds
    rollout_ns: Nanoseconds
    groups_trained: int
    groups_dropped: int


class RoutingPolicy(Protocol):
    def route(self, turn: TurnView, fleet: FleetView) -> WorkerId | None:
        """The worker to take the turn, or None to leave it queued (nobody has room)."""
        ...


class SeedingPolicy(Protocol):
    def window_ns(self, history: Sequence[StepRecord]) -> Nanoseconds:
        """How long the trainer's device generates at the start of the next step."""
        ...


class ProvisioningPolicy(Protocol):
    def leases_wanted(self, offer: Offer, held: int) -> int:
        """How many more leases to ask this provider for now, given `held` (granted or requested)."""
        ...


class SelectionPolicy(Protocol):
    def drop_reason(self, rewards: Sequence[float]) -> str | None:
        """Why a finished group is not worth training on, or None to train on it."""
        ...


class Policies(msgspec.Struct, frozen=True, kw_only=True):
    routing: RoutingPolicy
    seeding: SeedingPolicy
    provisioning: ProvisioningPolicy
    selection: SelectionPolicy
