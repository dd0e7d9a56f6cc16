"""What the pool's shell knows of residents and jobs' processes, besides the state of the cluster."""

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import msgspec

from elastic.core.cluster import Cluster
from elastic.core.cluster import events as e
from elastic.core.cluster.types import JobId, JobState, KindName, Nanoseconds, NodeId, PhaseKind
from elastic.core.timers import Timers
from elastic.pool import messages as w
from elastic.pool.devices import DeviceAllotment, StartDeath
from elastic.pool.ports import DoneCommand, JobEntry, PoolPorts, PoolTimes
from elastic.pool.sites import SiteNode
from elastic.protocol.frames import SECONDS_MAX

NS_PER_S = 1_000_000_000
R = TypeVar("R")
HOLDING = (JobState.PLACED, JobState.RUNNING)
"""A job in one of these states has a place: processes, residents and turns."""


class Resident(msgspec.Struct, kw_only=True):
    """A job's process on a node, as the node agent was told to start it or reports it.

    `worker` is the worker as which it computes, or for a trainer, was started. `ranks_at`: where a trainer's first rank
    listens for those on other nodes.
    """

    placement: int
    up: bool = False
    ending: bool = False
    permit: int = 0
    worker: str = ""
    ranks_at: str = ""


class PoolNode(msgspec.Struct, kw_only=True):
    """A node's agent. `given` is the last permit under which it was told to give out its devices, which take turns
    together. `hello` and `site`: what it said of itself that is on another machine, and of its site's relay."""

    phase: PhaseKind
    connected: bool = False
    given: int = 0
    pid: int = 0
    hello: w.NodeAgentHello | None = None
    site: SiteNode | None = None
    residents: dict[JobId, Resident] = {}
    start_deaths: list[StartDeath] = []
    """The deaths of its last residents as they started, since the last one that came up."""


class LiveJob(msgspec.Struct, kw_only=True):
    """A job's process as the shell sees it.

    `process` is the placement of its living process. `told_stop`, `told_kill`: whether that process was told so.
    `restarts`: its restarts in this placement.
    """

    process: int | None = None
    connected: bool = False
    told_stop: bool = False
    told_kill: bool = False
    restarts: int = 0

    def process_ended(self) -> None:
        """Note that the job has no process."""
        self.process, self.connected, self.told_stop, self.told_kill = None, False, False, False


class PoolHoldings:
    """What all rooms of the shell share: the cluster, the ports, and what there is of node agents, residents and jobs.

    `joining` has the nodes whose node agents were started and that are not the cluster's yet. `news` are the events
    that have not gone through the cluster, each with what is made durable beside it.
    """

    def __init__(
        self,
        cluster: Cluster,
        ports: PoolPorts,
        times: PoolTimes,
        entries: Iterable[JobEntry],
        devices: DeviceAllotment,
    ) -> None:
        self.devices = devices
        self.cluster, self.ports, self.times = cluster, ports, times
        self.entries: dict[JobId, JobEntry] = {entry.job: entry for entry in entries}
        self.nodes: dict[NodeId, PoolNode] = {}
        self.joining: dict[NodeId, KindName] = {}
        self._records: list[dict[JobId, Any]] = []
        self.jobs = self.records(LiveJob)
        self.timers = Timers()
        self.stopping = False
        self.news: deque[tuple[e.ClusterEvent, JobEntry | None, DoneCommand | None]] = deque()

    def feed(self, event: e.ClusterEvent, entry: JobEntry | None = None, command: DoneCommand | None = None) -> None:
        self.news.append((event, entry, command))

    def wait(self, what: str, key: str, for_ns: Nanoseconds) -> None:
        """Wait under this name, from now on, instead of what was waited for under it before."""
        self.timers.set(what, key, self.ports.now_ns(), for_ns)

    def records(self, kind: type[R]) -> dict[JobId, R]:
        """Return a collaborator's own records of jobs, each made when it is asked for. A job that leaves the cluster
        leaves them, too."""
        found = defaultdict[JobId, R](kind)
        self._records.append(found)
        return found

    def forget(self, job: JobId) -> None:
        for records in (self.entries, *self._records):
            records.pop(job, None)

    def is_script(self, job: JobId) -> bool:
        entry = self.entries.get(job)
        return entry is not None and bool(entry.script)

    def trainer_nodes(self, job: JobId) -> Mapping[NodeId, int]:
        """Return the nodes of a job that has a place on which its trainer's ranks are, the first one's first, with how
        many are on each. A script is on the first node of its group."""
        record = self.cluster.jobs[job]
        train = () if record.seat is None else self.cluster.groups[record.seat.group].train
        if not train or self.is_script(job):
            return dict.fromkeys(train[:1], 1)
        counts = record.request.ranks_on(len(train), self.cluster.kind(train[0]))
        return dict(zip(train, counts, strict=False))

    def is_connected(self, name: NodeId) -> bool:
        node = self.nodes.get(name)
        return node is not None and node.connected

    def ends_s(self, deadline_ns: Nanoseconds) -> float:
        """Return the seconds until a permit is invalid. It is recalled at its deadline, and may be yielded for a
        while after that."""
        return self.left_s(deadline_ns + self.cluster.limits.notice_ns)

    def left_s(self, at_ns: Nanoseconds) -> float:
        return min(SECONDS_MAX, max(0, at_ns - self.ports.now_ns()) / NS_PER_S)


class PoolRoom:
    """A part of the shell, with what it shares with the others."""

    def __init__(self, pool: PoolHoldings) -> None:
        self._pool, self._cluster, self._ports, self._times = pool, pool.cluster, pool.ports, pool.times
        self._nodes, self._entries, self._timers = pool.nodes, pool.entries, pool.timers


def nanoseconds(seconds: float) -> Nanoseconds:
    return round(seconds * NS_PER_S)
