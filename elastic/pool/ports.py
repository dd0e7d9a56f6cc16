"""What the pool's shell needs of its surroundings. Live pools, worlds of faults and simulations use the same shell."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Literal, Protocol

import msgspec

from elastic.core.cluster import Cluster, ClusterPolicies
from elastic.core.cluster.state import JobRecord
from elastic.core.cluster.types import JobId, Nanoseconds, NodeId, PhaseKind
from elastic.pool import messages as w
from elastic.pool.job_files import SubmittedFile
from elastic.system.devices import DeviceName
from elastic.system.isolation import ItemAttempt
from elastic.system.outages import backoff

HowEnded = Literal["finished", "stopped", "failed", "died"]


class JobEnding(msgspec.Struct, frozen=True):
    """How a job's process ended. `died`: it may be restarted. `failed`: the job itself has failed."""

    how: HowEnded
    cause: str = ""


class JobEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The record of a submission besides its request, the same on the wire, in memory and in the journal.

    `directory` is the run's directory (with its configuration), or where a script is to run. `providers` are the job's
    own besides the pool. A job with a `script`, its command line, is no run: it parks by itself; `phases` is the file
    that names its phases, if any. `environment` is added to what it inherits. `max_restarts` deaths of its process in
    one placement are survived. `files` are those that nodes on other machines are sent; what a script writes below its
    `outputs` there comes back.
    """

    job: JobId
    directory: str
    providers: tuple[str, ...] = ()
    script: tuple[str, ...] = ()
    phases: str = ""
    environment: dict[str, str] = {}
    max_restarts: int = 3
    files: tuple[SubmittedFile, ...] = ()
    outputs: tuple[str, ...] = ()


class ForgottenJob(msgspec.Struct, frozen=True, kw_only=True):
    """The last state of a job that is over and has left the cluster, as the journal keeps it.

    `restarts`: restarts of its process in its last placement. `host_bytes`: the host memory of its residents, by node.
    """

    entry: JobEntry | None
    record: JobRecord
    restarts: int = 0
    host_bytes: dict[NodeId, int] = {}

    @property
    def place(self) -> str:
        """The directory in which the job's own lies."""
        return "" if self.entry is None else self.entry.directory.rpartition("/")[0]


class DoneCommand(msgspec.Struct, frozen=True):
    """A command by its id, so that it is carried out once. `words` tell apart two commands with the same id."""

    id: str
    words: str


class PoolTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of the shell's own waits, besides the cluster's."""

    silence_ns: Nanoseconds
    park_ns: Nanoseconds
    node_agent_start_ns: Nanoseconds
    retry_base_ns: Nanoseconds = 1_000_000_000
    retry_max_ns: Nanoseconds = 30_000_000_000

    def retry_ns(self, failures: int) -> Nanoseconds:
        """How long to wait after so many failures in a row, the first of which is not counted."""
        return backoff(failures, self.retry_base_ns, self.retry_max_ns)


class PoolPorts(Protocol):
    """The shell calls these without waiting; results arrive through the shell's own methods.

    `send_to_node_agent` and `send_to_job` drop messages for absent peers: a peer that comes back reports what it holds.
    """

    def now_ns(self) -> Nanoseconds:
        """Returns the time since the pool began. Never decreases."""
        ...

    def slept_ns(self) -> Nanoseconds:
        """Returns for how long the machine was suspended since this was last asked."""
        ...

    def append(
        self,
        record: bytes,
        entry: JobEntry | None = None,
        command: DoneCommand | None = None,
        forgotten: Sequence[ForgottenJob] = (),
    ) -> None:
        """Makes an entry of the journal durable before it returns: with its submission or command, or with the jobs
        that leave the cluster by it."""
        ...

    def replayed(self, policies: ClusterPolicies) -> Cluster:
        """Returns a new cluster as it was after the journal's last entry."""
        ...

    def died(self, node: NodeId, job: JobId, what: str) -> None:
        """Notes for the report that a node agent, a job's process or, without either, the pool's own process has
        died."""
        ...

    def attempting(self, item: str) -> AbstractContextManager[ItemAttempt]:
        """Returns a context for work on one job, node or wait: an unexpected exception may end only this work."""
        ...

    def settled(self) -> None:
        """Called when all events have gone through the cluster. The next wake-up may have changed."""
        ...

    def start_node_agent(self, node: NodeId, phase: PhaseKind, devices: Sequence[DeviceName]) -> None:
        """Starts the node's agent, whose residents see these devices alone, or all if there are none."""
        ...

    def note_set_aside(self, devices: Mapping[DeviceName, str]) -> None:
        """Makes durable which devices are set aside, and why."""
        ...

    def end_node_agent(self, node: NodeId) -> None:
        """Kills the node's agent and everything that it has started."""
        ...

    def send_to_node_agent(self, node: NodeId, message: w.ToNodeAgent) -> None: ...

    def send_to_job(self, job: JobId, message: w.ToJob) -> None: ...

    def cut_job(self, job: JobId) -> None:
        """Ends the job's session and ignores its process from here on."""
        ...

    def resident(
        self,
        entry: JobEntry,
        placement: int,
        node: NodeId,
        phase: PhaseKind,
        ticket: w.WorkerTicketFrame | None,
        ranks: w.RankPlaces | None = None,
    ) -> w.StartResidentFrame:
        """Returns how to start the job's resident: for rollouts, for the trainer of `ticket`, or the script itself.

        `ranks`: of a trainer whose ranks are on several nodes, or fewer than it asks for.
        """
        ...

    def start_job(self, entry: JobEntry, placement: int, restarts: int) -> None:
        """Starts the job's process. `PoolShell.job_ended` follows at some time."""
        ...

    def stop_job(self, job: JobId, reason: str) -> None:
        """Asks the job's process to stop at its step's end, repeatedly until it has ended."""
        ...

    def kill_job(self, job: JobId) -> None: ...

    def profile(self, entry: JobEntry) -> None:
        """Times a few steps of the job alone. `PoolShell.profiled` or `not_profiled` follows."""
        ...

    def end_profile(self, job: JobId) -> None: ...
