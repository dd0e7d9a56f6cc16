"""Everything that a cluster remembers, as plain records. Hashes and replays compare these records."""

from collections.abc import Mapping

import msgspec

from elastic.core.cluster.groups import JobGroup
from elastic.core.cluster.types import (
    BeyondQuota,
    DeviceAccount,
    GroupName,
    JobId,
    JobRequest,
    JobState,
    KindName,
    Nanoseconds,
    NodeId,
    Permit,
    PhaseKind,
    Seat,
)

_S = JobState

LEGAL_NEXT: Mapping[JobState, frozenset[JobState]] = {
    _S.SUBMITTED: frozenset({_S.PROFILING, _S.QUEUED, _S.PLACED, _S.REJECTED, _S.FAILED, _S.CANCELLED}),
    _S.PROFILING: frozenset({_S.QUEUED, _S.PLACED, _S.REJECTED, _S.FAILED, _S.CANCELLED}),
    _S.QUEUED: frozenset({_S.SUBMITTED, _S.PLACED, _S.REJECTED, _S.FAILED, _S.CANCELLED}),
    _S.PLACED: frozenset({_S.RUNNING, _S.SUBMITTED, _S.FAILED, _S.CANCELLED}),
    _S.RUNNING: frozenset({_S.PLACED, _S.SUBMITTED, _S.FINISHED, _S.FAILED, _S.CANCELLED}),
    _S.FAILED: frozenset({_S.SUBMITTED}),
    _S.FINISHED: frozenset(),
    _S.CANCELLED: frozenset(),
    _S.REJECTED: frozenset(),
}
STORY_LENGTH_MAX = 24
"""Entries of a job's story that are kept: the latest, enough to explain its state."""


class JobChapter(msgspec.Struct, frozen=True):
    at_ns: Nanoseconds
    state: JobState
    cause: str


class IllegalJobTransition(AssertionError):
    """The cluster has tried a job transition that does not exist: always a bug of Elastic, never bad input."""


class JobRecord(msgspec.Struct, kw_only=True):
    """The state of one job in this cluster.

    - `arrival`: how many jobs had come by then, itself included. It never changes, and no other job has it.
    - `reserved`: the place that the job moves to once it has stopped. `placement`: the number of its last start.
    - `accepted_ns`, `accepted_steps`: the time from which its SLO counts, and the steps done by then.
    - `slices`: the time slices of each phase that it has had or skipped; empty while it is not part of a cycle.
    - `asked`: the phase for which it waits. `asked_both`: it needs the nodes of both pools, in a time slice of
      training.
    - `cold`: phases whose residents have started since their last time slice. `down`: phases for which it has not
      asked since a resident of theirs was lost.
    - `measured_ns`: the latest durations of its phases, without switching. `cold_ns`: that of cold starts in its
      rollouts, 0 if none was seen. `parks`: none was seen but of residents that had started.
    - `began_cold`: a resident of the present time slice has started since its last one. `in_vain`: how many such time
      slices in a row were too short for a start. `patience_ns`: what the next one gets besides.
    - `overgrown`: how many of its residents held more host memory than declared since its last step, by node.
    - `billed`: what it owes, in nano-dollars times nanoseconds per hour.
    - `quota`: why it is queued beyond a quota, and not considered for a place.
    """

    request: JobRequest
    arrival: int = 0
    state: JobState = JobState.SUBMITTED
    reason: str = ""
    story: list[JobChapter] = []
    seat: Seat | None = None
    reserved: Seat | None = None
    placement: int = 0
    stopping: bool = False
    steps_done: int = 0
    accepted_ns: Nanoseconds = 0
    accepted_steps: int = 0
    how: str = ""
    moves: int = 0
    resubmissions: int = 0
    slices: dict[PhaseKind, int] = {}
    asked: PhaseKind | None = None
    asked_both: bool = False
    permit: int | None = None
    cold: list[PhaseKind] = []
    down: list[PhaseKind] = []
    measured_ns: dict[PhaseKind, Nanoseconds] = {}
    cold_ns: Nanoseconds = 0
    parks: bool = True
    began_cold: bool = False
    in_vain: int = 0
    patience_ns: Nanoseconds = 0
    overgrown: dict[NodeId, int] = {}
    phase_ns: Nanoseconds = 0
    billed: int = 0
    quota: BeyondQuota | None = None

    @property
    def steps_left(self) -> int:
        return max(1, self.request.steps - self.steps_done)

    def left_ns(self, now_ns: Nanoseconds) -> Nanoseconds:
        """Return what is left of the time that its SLO gives to all of its steps."""
        return self.request.limit_ns * (self.request.steps - self.accepted_steps) - (now_ns - self.accepted_ns)

    @property
    def ended(self) -> bool:
        return not LEGAL_NEXT[self.state]

    @property
    def over(self) -> bool:
        """Whether the job does nothing more unless it is submitted again."""
        return self.ended or self.state is JobState.FAILED

    def to(self, state: JobState, now_ns: Nanoseconds, cause: str) -> None:
        """Enter a transition into the job's story; raises `IllegalJobTransition` unless `state` may follow."""
        if state not in LEGAL_NEXT[self.state]:
            told = "; ".join(f"{chapter.at_ns / 1e9:.3f} s {chapter.state} ({chapter.cause})" for chapter in self.story)
            raise IllegalJobTransition(f"job {self.request.id}: {self.state} → {state} ({cause}); before: {told}")
        self.state, self.reason = state, cause
        self.story.append(JobChapter(now_ns, state, cause))
        del self.story[:-STORY_LENGTH_MAX]


class NodeRecord(msgspec.Struct, kw_only=True):
    """A node: its group, the job that computes on it, and where its time went.

    - `accounts_ns` sum to the time from `opened_ns` to `settled_ns`. `account` has the time since then.
    - `used_ns`: each member's use since the group's bill was last settled.
    - `own_since_ns`: since when the node has been in no group. `own_ns`: how long it was in none before that.
    - `residents`: host memory by job: the declared or the measured size, whichever is larger.
    - `draining`: it is let go once no job has a place on it.
    """

    id: NodeId
    phase: PhaseKind
    kind: KindName
    opened_ns: Nanoseconds
    settled_ns: Nanoseconds
    account: DeviceAccount = DeviceAccount.IDLE
    accounts_ns: dict[DeviceAccount, Nanoseconds] = {}
    used_ns: dict[JobId, Nanoseconds] = {}
    group: GroupName | None = None
    own_since_ns: Nanoseconds = 0
    own_ns: Nanoseconds = 0
    permit: int | None = None
    user: JobId | None = None
    residents: dict[JobId, int] = {}
    draining: bool = False

    def charge(self, account: DeviceAccount, length_ns: Nanoseconds) -> None:
        self.accounts_ns[account] = self.accounts_ns.get(account, 0) + length_ns


class ClusterState(msgspec.Struct, kw_only=True):
    """`now_ns` is the time of the last event. `free` holds the nodes of no group, by kind, in the order in which they
    became free. `over` holds the jobs that are over and not forgotten, in the order in which they ended. `changed`:
    groups that have changed since moves were last looked for."""

    now_ns: Nanoseconds = 0
    jobs: dict[JobId, JobRecord] = {}
    over: dict[JobId, None] = {}
    groups: dict[GroupName, JobGroup] = {}
    nodes: dict[NodeId, NodeRecord] = {}
    free: dict[KindName, dict[NodeId, None]] = {}
    permits: dict[int, Permit] = {}
    billed_ns: dict[GroupName, Nanoseconds] = {}
    """The time until which each group's bills are settled."""
    permit_numbers: int = 0
    placements: int = 0
    arrivals: int = 0
    group_numbers: int = 0
    pool_billed: int = 0
    """The cost of groups beyond what their members owe, and of nodes in no group, in nano-dollars times nanoseconds
    per hour."""
    forgotten_billed: int = 0
    """What forgotten jobs owe, in the same unit."""
    changed: list[GroupName] = []
    lost_cost: int = 0
    """The cost of nodes that are gone, in the same unit."""
