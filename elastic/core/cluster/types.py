"""The parts of a cluster: nodes, jobs and their requests, permits, and the limits of waiting.

Times are nanoseconds, prices nano-dollars per hour, so that sums are exact.
"""

from collections.abc import Callable, Iterable, Mapping
from enum import StrEnum
from functools import cached_property
from typing import TypeAlias

import msgspec

JobId: TypeAlias = str
GroupName: TypeAlias = str
NodeId: TypeAlias = str
KindName: TypeAlias = str
Nanoseconds: TypeAlias = int

NS_PER_HOUR = 3_600_000_000_000


class ClusterError(ValueError):
    """A pool, a job or a request is invalid. The message names it, what was found and what is allowed."""


class PhaseKind(StrEnum):
    """The two phases of a step that hold devices. Between them, weights are synchronised."""

    ROLLOUT = "rollout"
    TRAIN = "train"


class JobState(StrEnum):
    SUBMITTED = "submitted"
    PROFILING = "profiling"
    QUEUED = "queued"
    PLACED = "placed"
    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"
    REJECTED = "rejected"


class DeviceAccount(StrEnum):
    """The accounts of a node's time. Every nanosecond is in exactly one."""

    SLICE = "slice"
    SWITCHING = "switching"
    IDLE = "idle"
    DOWN = "down"


WHOLE_MAX = 2**60
"""The largest whole number of a request: a journal and the messages to nodes hold it, and sums of a few."""


def _range(value: int, least: int) -> str:
    return f"at least {least}" if value < least else f"at most {WHOLE_MAX}"


class PhasePlan(msgspec.Struct, frozen=True, kw_only=True):
    """How long a job's phases last on the nodes that it asks for, as planned: at its token limit, or at a quantile.

    `sync_ns` holds no node. The two `switch_ns` are what resuming and parking take, before and after every phase.
    `rollout_cold_ns` is what starting the rollouts' engine on its device takes: in the first rollout of a placement,
    and in every one unless the engine parks (`rollout_parks`).
    """

    rollout_ns: Nanoseconds
    train_ns: Nanoseconds
    sync_ns: Nanoseconds = 0
    rollout_switch_ns: Nanoseconds = 0
    train_switch_ns: Nanoseconds = 0
    rollout_cold_ns: Nanoseconds = 0
    rollout_parks: bool = True

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            least = 1 if name in ("rollout_ns", "train_ns") else 0
            if not least <= value <= WHOLE_MAX:
                raise ClusterError(f"a phase plan's {name}: found {value}; allowed: {_range(value, least)}")

    @property
    def solo_ns(self) -> Nanoseconds:
        """The length of the job's step if it runs alone on its requested nodes and never parks."""
        return self.rollout_ns + self.train_ns + self.sync_ns

    def switching_ns(self, phase: PhaseKind) -> Nanoseconds:
        """Return what every phase takes on its nodes besides its own time."""
        if phase is PhaseKind.TRAIN:
            return self.train_switch_ns
        return self.rollout_switch_ns + (0 if self.rollout_parks else self.rollout_cold_ns)

    @property
    def first_ns(self) -> Nanoseconds:
        """What the first rollout of a placement takes besides that."""
        return self.rollout_cold_ns if self.rollout_parks else 0


class JobRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The request of a job: nodes, the GPUs of each that its worker there uses (`rollout_gpus`), ranks of its trainer
    (`train_gpus`), each with a GPU, host memory on each node, and the largest slowdown that the job accepts.

    `plan` is None until a step of the job has been timed. `steps` says how long the job runs. `train_efficiency` is the
    share of each additional training node that speeds the job up. `restart_ns` is the cost of moving the job, besides
    a cold start of its rollouts.
    """

    id: JobId
    slo: float
    plan: PhasePlan | None = None
    steps: int = 1
    rollout_nodes: int = 1
    rollout_gpus: int = 1
    train_nodes: int = 1
    train_gpus: int = 1
    rollout_bytes: int = 0
    train_bytes: int = 0
    train_efficiency: float = 1.0
    restart_ns: Nanoseconds = 0
    max_resubmissions: int = 0

    def __post_init__(self) -> None:
        if not self.slo >= 1.0:
            raise ClusterError(
                f"job {self.id}: slo: found {self.slo}; allowed: at least 1, a step's time over that alone"
            )
        for name in ("steps", "rollout_nodes", "rollout_gpus", "train_nodes", "train_gpus"):
            self._check(name, 1)
        for name in ("rollout_bytes", "train_bytes", "restart_ns", "max_resubmissions"):
            self._check(name, 0)
        if not 0.0 <= self.train_efficiency <= 1.0:
            raise ClusterError(f"job {self.id}: train_efficiency: found {self.train_efficiency}; allowed: from 0 to 1")

    def _check(self, name: str, least: int) -> None:
        value = getattr(self, name)
        if not least <= value <= WHOLE_MAX:
            raise ClusterError(f"job {self.id}: {name}: found {value}; allowed: {_range(value, least)}")

    def train_nodes_of(self, kind: "NodeKind") -> int:
        """Return how many training nodes of this kind the job asks for: the fewest with a GPU for each of its ranks,
        unless it names more."""
        return max(self.train_nodes, -(-self.train_gpus // kind.gpus))

    def ranks_on(self, nodes: int, kind: "NodeKind") -> tuple[int, ...]:
        """Return how many of its trainer's ranks are on each node that has any, of so many training nodes of this kind:
        as many as it asks for, or as there are GPUs, on no more nodes than it asks for, and evenly."""
        used = min(nodes, self.train_nodes_of(kind), self.train_gpus)
        ranks = min(self.train_gpus, used * kind.gpus)
        return tuple(ranks // used + (place < ranks % used) for place in range(used))

    def train_ns(self, nodes: int, kind: "NodeKind") -> Nanoseconds:
        """Return the length of a training phase on `nodes` nodes of this kind. Fewer ranks or nodes than requested
        lengthen it in proportion. There are never more ranks; without ranks more nodes shorten it by the declared
        efficiency."""
        assert self.plan is not None
        if self.train_gpus > 1:
            return -(-self.plan.train_ns * self.train_gpus // sum(self.ranks_on(nodes, kind)))
        if nodes <= self.train_nodes:
            return -(-self.plan.train_ns * self.train_nodes // nodes)
        return round(self.plan.train_ns / (1.0 + (nodes / self.train_nodes - 1.0) * self.train_efficiency))

    def train_bytes_on(self, nodes: int, kind: "NodeKind") -> int:
        """Return what each of so many nodes holds of the job's training state: of fewer ranks each holds more."""
        return -(-self.train_bytes * self.train_gpus // sum(self.ranks_on(nodes, kind)))

    def fits(self, kind: "NodeKind", phase: PhaseKind) -> bool:
        """Return whether nodes of this kind, as many as it asks for, hold the job's state of a phase, and a worker of
        its rollouts."""
        if phase is PhaseKind.TRAIN:
            return self.train_bytes <= kind.memory_bytes
        return self.rollout_bytes <= kind.memory_bytes and self.rollout_gpus <= kind.gpus

    @property
    def limit_ns(self) -> Nanoseconds:
        """The longest step that the job accepts."""
        assert self.plan is not None
        return int(self.slo * self.plan.solo_ns)

    @property
    def alone_ns(self) -> Nanoseconds:
        """The length of the job's step if it is alone in a group, with switching."""
        assert self.plan is not None
        return self.plan.solo_ns + sum(map(self.plan.switching_ns, PhaseKind))

    @property
    def first_ns(self) -> Nanoseconds:
        """What the cold start in a placement's first rollout takes, as far as it is known."""
        return 0 if self.plan is None else self.plan.first_ns

    @property
    def cycle_limit_ns(self) -> Nanoseconds:
        """The longest cycle that the job accepts with the cold start in its first rollout, which is spread over its
        steps; no shorter than its own step."""
        return max(self.alone_ns, self.limit_ns - -(-self.first_ns // self.steps))

    @property
    def moving_ns(self) -> Nanoseconds:
        """What the job loses if it moves."""
        return self.restart_ns + self.first_ns


class BeyondQuota(msgspec.Struct, frozen=True):
    """Why a job may have no place yet: it is beyond the quota of `whose`, for this reason."""

    whose: str
    reason: str


class NodeKind(msgspec.Struct, frozen=True, kw_only=True):
    """Nodes of one phase that are alike: devices, host memory and price of each, where they are, and how many there are
    at first. A node's name is its kind's `name` and a number."""

    gpus: int
    memory_bytes: int
    nano_usd_per_hour: int
    nodes: int = 1
    name: KindName = ""
    site: str = ""

    def __post_init__(self) -> None:
        for name in ("gpus", "nodes"):
            if getattr(self, name) < 1:
                raise ClusterError(f"a node's {name}: found {getattr(self, name)}; allowed: at least 1")
        for name in ("memory_bytes", "nano_usd_per_hour"):
            if getattr(self, name) < 0:
                raise ClusterError(f"a node's {name}: found {getattr(self, name)}; allowed: at least 0")


class PoolSpec(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """The kinds of a pool's nodes, at least one for each phase. Names are unique."""

    rollout: tuple[NodeKind, ...]
    train: tuple[NodeKind, ...]

    def __post_init__(self) -> None:
        for phase in PhaseKind:
            if not self.of(phase):
                raise ClusterError(f"a pool's {phase} nodes: found none; allowed: at least one kind")
        names = [kind.name for kind in (*self.rollout, *self.train)]
        for name in names:
            if names.count(name) > 1:
                raise ClusterError(f"{names.count(name)} kinds of nodes are called {name!r}; allowed: a name for each")

    @classmethod
    def uniform(cls, *, rollout: NodeKind, train: NodeKind, rollout_nodes: int, train_nodes: int) -> "PoolSpec":
        """Return a pool with so many nodes of one kind for each phase, which are called as the phases are."""
        replace = msgspec.structs.replace
        return cls(
            rollout=(replace(rollout, nodes=rollout_nodes, name=PhaseKind.ROLLOUT.value),),
            train=(replace(train, nodes=train_nodes, name=PhaseKind.TRAIN.value),),
        )

    @cached_property
    def kinds(self) -> Mapping[KindName, NodeKind]:
        return {kind.name: kind for kind in (*self.rollout, *self.train)}

    @cached_property
    def phases(self) -> Mapping[KindName, PhaseKind]:
        """The phase of each kind."""
        return {kind.name: phase for phase in PhaseKind for kind in self.of(phase)}

    def of(self, phase: PhaseKind) -> tuple[NodeKind, ...]:
        return self.rollout if phase is PhaseKind.ROLLOUT else self.train

    def alone(
        self, request: JobRequest, free: Callable[[KindName], int]
    ) -> tuple[tuple[NodeKind, ...], tuple[NodeKind, ...]] | None:
        """Return the kinds of the cheapest free nodes for a job of its own: those for rollouts may be of any kinds,
        those for training are of one. None if too few are free."""
        trains = [kind for kind in self.train if request.fits(kind, PhaseKind.TRAIN)]
        with_room = (kind for kind in trains if free(kind.name) >= request.train_nodes_of(kind))
        train = min(with_room, key=lambda kind: kind.nano_usd_per_hour * request.train_nodes_of(kind), default=None)
        rollout = self.new_rollout(request, request.rollout_nodes, free, "" if train is None else train.site)
        if train is None or rollout is None:
            return None
        return rollout, (train,) * request.train_nodes_of(train)

    def new_rollout(
        self, request: JobRequest, count: int, free: Callable[[KindName], int], site: str
    ) -> tuple[NodeKind, ...] | None:
        """Return the kinds of so many of the cheapest free rollout nodes for the job, among equals those at `site`
        first; None if fewer are free."""
        kinds = [kind for kind in self.rollout if request.fits(kind, PhaseKind.ROLLOUT)]
        kinds.sort(key=lambda kind: (kind.nano_usd_per_hour, kind.site != site))
        found: tuple[NodeKind, ...] = ()
        for kind in kinds:
            found += (kind,) * min(count - len(found), free(kind.name))
        return found if len(found) == count else None

    def price_alone(self, request: JobRequest) -> int:
        """Return the price of an hour of the nodes that a job asks for, of the cheapest kinds that fit, in
        nano-dollars; 0 if none fits."""
        price = 0
        for phase in PhaseKind:
            prices = [
                kind.nano_usd_per_hour
                * (request.train_nodes_of(kind) if phase is PhaseKind.TRAIN else request.rollout_nodes)
                for kind in self.of(phase)
                if request.fits(kind, phase)
            ]
            if not prices:
                return 0
            price += min(prices)
        return price


def price_of(kinds: Iterable[NodeKind]) -> int:
    """Return the price of an hour of a node of each of these kinds, in nano-dollars."""
    return sum(kind.nano_usd_per_hour for kind in kinds)


class NodeTurn(msgspec.Struct, frozen=True):
    """A job's turn on a node, which is over."""

    node: NodeId
    job: JobId
    since_ns: Nanoseconds
    until_ns: Nanoseconds


class WaitLimits(msgspec.Struct, frozen=True, kw_only=True):
    """How long the cluster waits, and how much time a phase gets beyond its plan.

    - A phase is recalled `overrun_share` of its planned time after that time; `notice_ns` later its residents are
      killed.
    - Jobs wait for a late job for `late_share` of its planned step, and then skip it once.
    """

    profile_ns: Nanoseconds = 1_800_000_000_000
    queue_ns: Nanoseconds = 7 * 24 * NS_PER_HOUR
    start_ns: Nanoseconds = 1_800_000_000_000
    stop_ns: Nanoseconds = 300_000_000_000
    notice_ns: Nanoseconds = 10_000_000_000
    overrun_share: float = 0.1
    late_share: float = 0.1


class Seat(msgspec.Struct, frozen=True):
    """The place to which a job is pinned: a group and rollout nodes in it. All of a group's training nodes are its
    own too."""

    group: GroupName
    rollout: tuple[NodeId, ...]


class Permit(msgspec.Struct, frozen=True, kw_only=True):
    """The right of one job to compute on some nodes in one phase, as it stands: the cluster and the job replace it as
    it changes.

    `number` only grows within a cluster; messages under an older number are ignored. At `deadline_ns` the cluster
    recalls the permit; for the job, whose clock is another one, it is when its residents are killed. With `both` the
    permit is a time slice of training that includes the job's rollout nodes.
    """

    number: int
    job: JobId
    phase: PhaseKind
    nodes: tuple[NodeId, ...]
    since_ns: Nanoseconds
    deadline_ns: Nanoseconds
    recalled: bool = False
    both: bool = False
    tail_nodes: tuple[NodeId, ...] = ()
    """The nodes that the phase's tail was told to move to; empty before that."""

    @property
    def usable(self) -> tuple[NodeId, ...]:
        """The nodes on which new work may begin."""
        return () if self.recalled else self.tail_nodes or self.nodes

    @property
    def tail_moved(self) -> bool:
        """Whether the phase has left all nodes but those of its tail."""
        return self.nodes == self.tail_nodes
