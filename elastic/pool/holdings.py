"""What the pool's shell knows of residents and jobs' processes, besides the state of the cluster."""

from collections import deque
from collections.abc import Iterable

import msgspec

from elastic.core.cluster import Cluster
from elastic.core.cluster import events as e
from elastic.core.cluster.types import JobId, JobState, Nanoseconds, NodeId, PhaseKind
from elastic.core.timers import Timers
from elastic.pool import messages as w
from elastic.pool.ports import DoneCommand, ForgottenJob, JobEntry, PoolPorts, PoolTimes
from elastic.protocol.frames import SECONDS_MAX

NS_PER_S = 1_000_000_000
HOLDING = (JobState.PLACED, JobState.RUNNING)
"""A job in one of these states has a place: processes, residents and turns."""


class Resident(msgspec.Struct, kw_only=True):
    """A job's process on a node, as the keeper was told to start it or reports it.

    `worker` is the worker that it was lent as, or for a trainer, started as.
    """

    placement: int
    up: bool = False
    ending: bool = False
    permit: int = 0
    worker: str = ""


class PoolNode(msgspec.Struct, kw_only=True):
    """A node's keeper. `given` is the last permit under which it was told to give out its device."""

    phase: PhaseKind
    connected: bool = False
    given: int = 0
    pid: int = 0
    residents: dict[JobId, Resident] = {}


class Yielding(msgspec.Struct, kw_only=True):
    """A permit whose devices are being taken back; `waiting` has the nodes that have not freed theirs."""

    permit: int
    finished: bool = False
    switch_ns: int = 0
    waiting: set[NodeId] = set()


class LiveJob(msgspec.Struct, kw_only=True):
    """A job as the shell sees it.

    - `process`: the placement of its living process. `told_stop`, `told_kill`: whether that process was told so.
    - `wants`: the phases that it has asked for and was not granted since; for each, whether with both pools' nodes.
    - `uses`: for a script, the nodes that it was given and has not left. `told`: the permit and nodes last told to it.
    - `presumed`: the node on which a script's process is believed to be until its keeper has joined. `ends`: why the
      process is to end then.
    - `lent`: by node, the worker that the resident works as, or will work as. `tickets`: tickets not yet delivered.
      `returning`: nodes where the worker is to end.
    - `trainer`: the ticket of the trainer that it wants or has. `trainer_died`: the last one died, and there is no
      other yet.
    - `overdue`: it has waited too long for a resident to come up, and takes its next turn without one.
    - `deaths`: deaths of its resident on a node in a row. `restarts`: restarts of its process in this placement.
    """

    process: int | None = None
    connected: bool = False
    told_stop: bool = False
    told_kill: bool = False
    restarts: int = 0
    wants: dict[PhaseKind, bool] = {}
    uses: set[NodeId] = set()
    presumed: NodeId = ""
    ends: str = ""
    told: tuple[int, tuple[NodeId, ...]] = (0, ())
    yielding: Yielding | None = None
    leaving: Yielding | None = None
    lent: dict[NodeId, str] = {}
    tickets: dict[NodeId, w.WorkerTicketFrame] = {}
    returning: set[NodeId] = set()
    trainer: w.WorkerTicketFrame | None = None
    trainer_died: bool = False
    overdue: bool = False
    deaths: dict[NodeId, int] = {}
    known: set[int] = set()
    """Permits that the job was told of and has not yielded."""
    memory: dict[NodeId, int] = {}
    """The largest host memory measured of its residents."""
    progress: tuple[int, int, int] = (0, 0, 0)

    def process_ended(self) -> None:
        """Note that the job has no process."""
        self.process, self.connected, self.told_stop, self.told_kill = None, False, False, False


class PoolHoldings:
    """What all rooms of the shell share: the cluster, the ports, and what there is of keepers, residents and jobs.

    `joining` has the nodes whose keepers were started and that are not the cluster's yet. `news` are the events that
    have not gone through the cluster, each with what is made durable beside it.
    """

    def __init__(self, cluster: Cluster, ports: PoolPorts, times: PoolTimes, entries: Iterable[JobEntry]) -> None:
        self.cluster, self.ports, self.times = cluster, ports, times
        self.entries: dict[JobId, JobEntry] = {entry.job: entry for entry in entries}
        self.nodes: dict[NodeId, PoolNode] = {}
        self.joining: dict[NodeId, PhaseKind] = {}
        self.jobs: dict[JobId, LiveJob] = {}
        self.timers = Timers()
        self.stopping = False
        self.news: deque[tuple[e.ClusterEvent, JobEntry | None, DoneCommand | None]] = deque()

    def feed(self, event: e.ClusterEvent, entry: JobEntry | None = None, command: DoneCommand | None = None) -> None:
        self.news.append((event, entry, command))

    def job(self, job: JobId) -> LiveJob:
        live = self.jobs.get(job)
        if live is None:
            live = self.jobs[job] = LiveJob()
        return live

    def last_of(self, job: JobId) -> ForgottenJob:
        """Return the last state of a job that is about to leave the cluster."""
        live = self.job(job)
        return ForgottenJob(
            entry=self.entries.get(job),
            record=self.cluster.jobs[job],
            restarts=live.restarts,
            host_bytes=live.memory,
        )

    def forget(self, job: JobId) -> None:
        self.entries.pop(job, None)
        self.jobs.pop(job, None)

    def is_script(self, job: JobId) -> bool:
        entry = self.entries.get(job)
        return entry is not None and bool(entry.script)

    def is_connected(self, name: NodeId) -> bool:
        node = self.nodes.get(name)
        return node is not None and node.connected

    def ends_s(self, deadline_ns: Nanoseconds) -> float:
        """Return the seconds until a permit is invalid. It is recalled at its deadline, and may be yielded for a
        while after that."""
        return self.left_s(deadline_ns + self.cluster.limits.notice_ns)

    def left_s(self, at_ns: Nanoseconds) -> float:
        return min(SECONDS_MAX, max(0, at_ns - self.ports.now_ns()) / NS_PER_S)


def nanoseconds(seconds: float) -> Nanoseconds:
    return round(seconds * NS_PER_S)
