"""Messages of a pool of many jobs: between its process, its node agents, their residents, and its jobs.

Node agents (one on each node) and jobs dial the pool's process, over TLS unless that is on loopback. A resident talks
to the node agent that started it, through an inherited socket. Frames are as those of workers: a 4-byte big-endian
length and a msgpack array whose first element is the message's tag.

- A pool's process, a node agent or a job may die and come back at any time. A connection begins with a hello that
  states what the dialler holds; the welcome states what the pool assigns to it. Every message may be repeated, and
  takes effect once.
- The pool numbers permits upwards. Messages on an older permit are ignored.
- No clock is shared: future times are sent as seconds left, past times as durations.

Source: docs/jobs.md; Weave §4.3, §5.1.
"""

from typing import Annotated, TypeAlias, dataclass_transform

import msgspec

from elastic.core.cluster.types import Nanoseconds, Permit, PhaseKind
from elastic.core.types import NS_PER_S, Count, Text
from elastic.protocol.frames import RefusedFrame, Seconds

POOL_PROTOCOL_VERSION = 1
NODE_AGENT_VARIABLE = "ELASTIC_NODE_AGENT_FD"
"""Environment variable with the descriptor of a resident's socket to its node agent."""
BEAT_VARIABLE = "ELASTIC_BEAT_S"
"""Environment variable of a resident that says at least so often, in seconds, that it lives."""
BEATS = 3
"""So many are missed in the silence after which a resident hangs."""
OWN_PYTHON = "python"
"""First word of a resident's command on another machine, for the interpreter of its node agent."""
UNFIT_STATUS = 70
"""Exit status of a resident that sees other devices than its node has."""
SITE_FILE_VARIABLE = "ELASTIC_SITE_FILE"
"""Environment variable of a worker: the file with the `SiteRelay` that it uses now, absent while there is none."""
QUIET_VARIABLE = "ELASTIC_QUIET_START"
"""Environment variable of a resident that starts while other jobs may compute on its node."""
FILES_VARIABLE = "ELASTIC_FILES"
"""Environment variable of a resident on another machine: the directory of its job's files there."""
RANKS_VARIABLE = "ELASTIC_RANKS"
"""Environment variable of a trainer's resident: its `RankPlaces`, as JSON."""
NODES_MAX, RESIDENTS_MAX, FILES_MAX = 4096, 4096, 2000
CHUNK_BYTES = 512 * 1024
"""Of a file in one message; its last chunk may have fewer."""

Names: TypeAlias = Annotated[tuple[Text, ...], msgspec.Meta(max_length=NODES_MAX)]


@dataclass_transform(frozen_default=True, field_specifiers=(msgspec.field,))
class _PoolMessage(msgspec.Struct, frozen=True, tag=True, array_like=True):
    pass


class WorkerTicketFrame(msgspec.Struct, frozen=True, array_like=True):
    """Credentials with which a resident joins a job's run as a worker. The token is valid once, and is never logged.

    `join` and `fingerprint` are the run's `Endpoint` as the node dials it.
    """

    run: Text
    worker: Text
    token: Text
    join: Text
    fingerprint: Text = ""
    orchestrator_timeout_s: Seconds = 60.0


class RankPlaces(msgspec.Struct, frozen=True, kw_only=True):
    """Where the ranks of a job's trainer are: `counts` of them on each of its nodes, which this one is at `place`.

    The first rank listens `at` an address, which its node agent has opened as `descriptor`, for ranks on other nodes.
    They prove by `token` that they belong to it; never log it. All are reached by the network `interface`.
    """

    counts: Annotated[tuple[Annotated[int, msgspec.Meta(ge=1)], ...], msgspec.Meta(min_length=1, max_length=NODES_MAX)]
    place: Count = 0
    token: Text = ""
    interface: Text = ""
    at: Text = ""
    descriptor: int = -1

    @property
    def alone(self) -> bool:
        """Whether all ranks are on one node."""
        return len(self.counts) == 1

    @property
    def here(self) -> range:
        """The numbers of this node's ranks."""
        before = sum(self.counts[: self.place])
        return range(before, before + self.counts[self.place])


class JobFile(msgspec.Struct, frozen=True, array_like=True):
    """A file of a job. `path` is where it belongs below the job's directory on a node, with `/`; `digest` is the
    SHA-256 of its content, in hexadecimal."""

    path: Text
    digest: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]
    size_bytes: Count
    executable: bool = False


JobFiles: TypeAlias = Annotated[tuple[JobFile, ...], msgspec.Meta(max_length=FILES_MAX)]


# From a job: a run's orchestrator, or a script with phases.


class JobHello(_PoolMessage):
    """First frame of a job. `token` belongs to the job's present placement: older processes of the job are refused.

    `script`: the job computes in its own process, which parks and resumes by itself; its node's agent has started
    it. `held`: the permit under which that process computes, 0 for none; if it counts no more, the process is ended.
    """

    protocol_version: Count
    job: Text
    token: Text
    placement: Count
    script: bool = False
    held: Count = 0


class AskPhase(_PoolMessage):
    """The job can begin this phase now; a `Granted` follows. Repetitions count as one request.

    A job that wants both phases gets them one after the other, training first. With `both` one grant has the nodes of
    both pools, or there is none; it takes the place of what was wanted for training.
    """

    phase: PhaseKind
    both: bool = False


class WithdrawPhase(_PoolMessage):
    """The job does not want this phase any more. It yields a grant that was already under way."""

    phase: PhaseKind
    both: bool = False


class OfferWorker(_PoolMessage):
    """The job's resident on any of its rollout nodes may work for the run as this worker, as soon as it has the device.
    A `Granted` names the node. A new hello takes all offers back."""

    ticket: WorkerTicketFrame


class EndWorker(_PoolMessage):
    """Take the offer back, end the worker and park its resident, or end the trainer's process; answered by
    `WorkerEnded`. The permit goes on.

    `ends`: the reason to end the resident instead and to start another one, such as a worker that has lied.
    """

    worker: Text
    ends: Text = ""


class StartTrainer(_PoolMessage):
    """Start the job's trainer on its training node as this worker. It computes there by permit only."""

    ticket: WorkerTicketFrame


class YieldPhase(_PoolMessage):
    """The phase is over on all nodes of the permit. `finished`: the phase needs no further slice.

    A script has parked already; `switch_s` is how long it took to resume and to park.
    """

    permit: Count
    finished: bool
    switch_s: Seconds = 0.0


class TailLeft(_PoolMessage):
    """The job uses only those of the permit's nodes that its `tail` named."""

    permit: Count


class PhaseProgress(_PoolMessage):
    """`done` of the rollout's responses are done."""

    permit: Count
    done: Count
    of: Count


class StepsDone(_PoolMessage):
    """`steps` of the job's steps are done in all."""

    steps: Count


# To a job.


class Granted(_PoolMessage):
    """A permit as it stands: sent as the slice begins, and again whenever there is news of it. It ends in `left_s`
    seconds at the latest; then the residents are killed.

    With `both` the nodes are those of rollouts and of training, and the phase counts as training. Of a `recalled` one
    the job yields. If there is a `tail`, the phase's last responses are to move to these nodes; answered by `TailLeft`.
    """

    permit: Count
    phase: PhaseKind
    nodes: Names
    left_s: Seconds
    both: bool = False
    recalled: bool = False
    tail: Names = ()
    workers: Annotated[dict[Text, Text], msgspec.Meta(max_length=NODES_MAX)] = {}
    """By node, the worker that the node's resident works as under this permit."""

    @classmethod
    def of(cls, permit: Permit, left_s: float, workers: dict[str, str]) -> "Granted":
        number, tail = permit.number, permit.tail_nodes
        return cls(number, permit.phase, permit.nodes, left_s, permit.both, permit.recalled, tail, workers)

    def held(self, job: str, now_ns: Nanoseconds) -> Permit:
        """Return the permit on the clock of the job, on which it is `now_ns`."""
        return Permit(
            number=self.permit,
            job=job,
            phase=self.phase,
            nodes=self.nodes,
            since_ns=now_ns,
            deadline_ns=now_ns + round(self.left_s * NS_PER_S),
            recalled=self.recalled,
            both=self.both,
            tail_nodes=self.tail,
        )


class JobWelcome(_PoolMessage):
    """`grant_within_s` bounds every wait for a time slice. `permits` are the permits that the pool believes the job to
    hold.

    `trainer` is the worker whose trainer process lives on the job's training node; empty if there is none.
    """

    rollout_nodes: Names
    train_nodes: Names
    rollout_usd_per_gpu_hour: float
    train_usd_per_gpu_hour: float
    gpus_per_rollout_node: Count
    gpus_per_train_node: Count
    grant_within_s: Seconds
    permits: Annotated[tuple[Granted, ...], msgspec.Meta(max_length=16)] = ()
    trainer: Text = ""
    silence_s: Seconds = 30.0
    """A peer that receives nothing for so long dials again."""
    trains_elsewhere: bool = False
    """Whether the training nodes are on other machines than the pool's."""


class PermitOver(_PoolMessage):
    """The permit is not valid any more: it was taken, or its nodes are gone. Not sent for a yielded permit."""

    permit: Count
    cause: Text


class WorkerEnded(_PoolMessage):
    """The worker has ended, and its resident is parked or gone; or the trainer's process is gone or could not be
    started. `cause` says why."""

    worker: Text
    cause: Text = ""


# From a node agent.


class ResidentState(msgspec.Struct, frozen=True, array_like=True):
    """A resident on a node agent's node. `permit` is the permit under which it has the device, 0 while it is parked."""

    job: Text
    placement: Count
    worker: Text = ""
    permit: Count = 0
    up: bool = False
    ranks_at: Text = ""
    """Where a trainer's first rank listens for those on other nodes."""


class ResidentUp(_PoolMessage):
    """The resident is up and parked, and may get the device."""

    job: Text
    placement: Count


class RanksAwaited(_PoolMessage):
    """The node's resident is a trainer's first rank, and is reached `at` this address by those on other nodes."""

    job: Text
    placement: Count
    at: Text


class ResidentGone(_PoolMessage):
    """All processes of the resident are gone. If it had the device, the device is free.

    `code` is its exit status, if known. `fault`: of a resident that has not come up, what the vendor's tool says is
    wrong with the node's devices.
    """

    job: Text
    placement: Count
    cause: Text
    permit: Count = 0
    code: int | None = None
    fault: Text = ""


class NodeMachine(msgspec.Struct, frozen=True, array_like=True):
    """The machine of a node that has joined from elsewhere, as it says itself: `count` devices that are `device`s, and
    memory. `boot` is the same for all nodes on it until it starts anew. `site` is the name of its site. `relay`: that
    of its site, if its people have set one up. `interfaces`: its network interfaces that have an IPv4 address."""

    host: Text
    boot: Text
    device: Text
    count: Count
    memory_bytes: Count
    site: Text = ""
    relay: Text = ""
    interfaces: Names = ()


class SiteRelay(msgspec.Struct, frozen=True, array_like=True):
    """A relay that all workers of a site reach fast. `place` is a directory, for those on its machine, or a URL, with a
    `token` and the `anchor` of its certificate (PEM). Never log it."""

    place: Text
    token: Text = ""
    anchor: Annotated[str, msgspec.Meta(max_length=1 << 14)] = ""


class NodeAgentHello(_PoolMessage):
    """First frame of a node agent. `token` is that of its ticket, or of its session if it comes back with `residents`.

    `gone`: scripts that have ended here, and how; it may have been said already. `given`: the permit under which the
    device belongs to the job `given_to`, 0 if it belongs to no job. `devices`: the only ones that its residents see; if
    there are none, they see all of the machine's. `machine`: of a node that joins by ticket.
    """

    protocol_version: Count
    node: Text
    token: Text
    pid: Count
    last_permit: Count = 0
    residents: Annotated[tuple[ResidentState, ...], msgspec.Meta(max_length=RESIDENTS_MAX)] = ()
    gone: Annotated[tuple[ResidentGone, ...], msgspec.Meta(max_length=RESIDENTS_MAX)] = ()
    given: Count = 0
    given_to: Text = ""
    devices: Names = ()
    machine: NodeMachine | None = None


class DeviceFreed(_PoolMessage):
    """The resident has parked. `switch_s` is how long it took to start an engine, to resume and to park; `cold_s` is
    what of it went into starting."""

    permit: Count
    job: Text
    switch_s: Seconds = 0.0
    cold_s: Seconds = 0.0


class WorkerLeft(_PoolMessage):
    """The resident's worker has ended; the resident is parked, and its node still belongs to the job."""

    job: Text
    worker: Text
    cause: Text = ""


class HostMemory(_PoolMessage):
    """The host memory that the resident's processes use, as measured."""

    job: Text
    host_bytes: Count


class SiteServed(_PoolMessage):
    """The node has a relay for its site: `near` for workers on its machine, `far` for those on others, if that was
    asked for. Without `near` it has none, and `cause` says why."""

    near: SiteRelay | None = None
    far: SiteRelay | None = None
    cause: Text = ""


class AskFiles(_PoolMessage):
    """Which files does this start of the job need here? Answered by `FilesNeeded`. `token` is that of the start."""

    job: Text
    placement: Count
    token: Text


class FilesThere(_PoolMessage):
    """The files that this start of the job keeps here, all of them; those that the pool has not are asked for, and
    `FilesKept` follows. `token` is that of the start."""

    job: Text
    placement: Count
    token: Text
    files: JobFiles


# Either way between a node agent on another machine and the pool's process.


class AskChunk(_PoolMessage):
    """Send the chunk of the file with this digest that begins there; answered by `FileChunk`."""

    digest: Text
    offset: Count


class FileChunk(_PoolMessage):
    """A part of a file. With a `cause` there is none, and it says why."""

    digest: Text
    offset: Count
    data: Annotated[bytes, msgspec.Meta(max_length=CHUNK_BYTES)] = b""
    cause: Text = ""


# To a node agent.


class FilesNeeded(_PoolMessage):
    """The files of this start of the job. With a `cause` it cannot have them, and the job has failed."""

    job: Text
    placement: Count
    files: JobFiles = ()
    cause: Text = ""


class FilesKept(_PoolMessage):
    """The pool has all files that were there, with these digests."""

    job: Text
    placement: Count
    digests: Annotated[tuple[Text, ...], msgspec.Meta(max_length=FILES_MAX)] = ()


class NodeAgentWelcome(_PoolMessage):
    """`session` is the token for a reconnection. A node agent that receives nothing for `silence_s` dials again; after
    `orphan_s` it ends with its residents."""

    session: Text
    silence_s: Seconds
    orphan_s: Seconds
    measure_s: Seconds
    stall_s: Seconds = 0.0
    """After which a resident that says nothing is ended, at the least; 0 for never."""
    still_s: Seconds = 0.0
    """The same of a resident that neither uses a processor nor waits for one, at the least."""


class StartResidentFrame(_PoolMessage, tag="StartResident"):
    """Start the job's resident on this node: `command`, with `environment` added to what is inherited.

    `phase` is what the resident is for. A `script` parks and resumes by itself, and reports that to the pool. Does
    nothing but say `ResidentUp` again if the resident already runs under this placement and is up. `directory` and
    `log` may be relative to the directory of a node agent on another machine, which has an interpreter of its own
    (`OWN_PYTHON`). With a `files_token` it first asks for the job's files, and puts them into `directory`; what is then
    below the `returned` directories there goes back to the pool. `ranks`: of a trainer whose ranks are not just those
    of its configuration, on this node.
    """

    job: Text
    placement: Count
    phase: PhaseKind
    command: tuple[str, ...]
    environment: dict[str, str]
    directory: str
    log: str
    script: bool = False
    files_token: str = ""
    returned: Names = ()
    ranks: RankPlaces | None = None


class GiveDevice(_PoolMessage):
    """Give the device to the job under this permit for at most `left_s`; after that the resident is killed.

    With a `ticket` the resident works as this worker; a ticket may also come later, under the same permit.
    """

    permit: Count
    job: Text
    left_s: Seconds
    ticket: WorkerTicketFrame | None = None


class LeaveWorker(_PoolMessage):
    """End the worker of the job's resident and park the resident; answered by `WorkerLeft`."""

    job: Text
    worker: Text


class TakeDevice(_PoolMessage):
    """Park the resident; answered by `DeviceFreed`. A resident that takes longer than `left_s` is killed
    (`ResidentGone`)."""

    permit: Count
    job: Text
    left_s: Seconds


class EndResident(_PoolMessage):
    """Kill the job's resident with all that it has started; answered by `ResidentGone`.

    With `grace_s` it is asked to end (SIGTERM) so long before.
    """

    job: Text
    reason: Text
    grace_s: Seconds = 0.0


class ServeSite(_PoolMessage):
    """Have a relay for the workers of the node's site, with `beyond` also for those on other machines; answered by
    `SiteServed`. It ends once another one is used."""

    beyond: bool


class UseSite(_PoolMessage):
    """From now on workers of this node use this relay of their site, if they reach it, or none."""

    relay: SiteRelay | None


# Between a node agent and its resident. A resident resumes and parks one after the other, in the order it is told.


class Resume(_PoolMessage):
    """Bring the state to the device: from here on it may compute."""

    permit: Count


class Park(_PoolMessage):
    """Stop computing, take the state off the device: answered by `Parked`."""

    permit: Count


class WorkAs(_PoolMessage):
    """Join the run as this worker; answered by `Left` once it has ended."""

    ticket: WorkerTicketFrame


class Leave(_PoolMessage):
    """Drain the worker at once; answered by `Left`."""

    worker: Text


class Warm(_PoolMessage):
    """The process is warm: everything is imported, and it waits, parked."""


class DeviceResumed(_PoolMessage):
    permit: Count
    resume_s: Seconds
    state_bytes: Count = 0


class Parked(_PoolMessage):
    """`cold_s`: how long the resident was starting its engine under this permit."""

    permit: Count
    park_s: Seconds
    state_bytes: Count = 0
    rest_bytes: Count = 0
    cold_s: Seconds = 0.0


class Left(_PoolMessage):
    worker: Text
    cause: Text = ""


class StillHere(_PoolMessage):
    """Sent by both ends of a connection every third of its silence limit."""


FromJob: TypeAlias = (
    JobHello
    | AskPhase
    | WithdrawPhase
    | OfferWorker
    | EndWorker
    | StartTrainer
    | YieldPhase
    | TailLeft
    | PhaseProgress
    | StepsDone
    | StillHere
)
ToJob: TypeAlias = JobWelcome | RefusedFrame | Granted | PermitOver | WorkerEnded | StillHere


class NodeNotice(_PoolMessage):
    """The node's machine is taken in `left_s`, as whoever lends it says. It is said again to each process of the
    pool."""

    left_s: Seconds
    reason: Text


FromNodeAgent: TypeAlias = (
    NodeAgentHello
    | ResidentUp
    | RanksAwaited
    | ResidentGone
    | DeviceFreed
    | WorkerLeft
    | HostMemory
    | NodeNotice
    | SiteServed
    | AskFiles
    | FilesThere
    | AskChunk
    | FileChunk
    | StillHere
)
ToNodeAgent: TypeAlias = (
    NodeAgentWelcome
    | RefusedFrame
    | StartResidentFrame
    | GiveDevice
    | LeaveWorker
    | TakeDevice
    | EndResident
    | ServeSite
    | UseSite
    | FilesNeeded
    | FilesKept
    | AskChunk
    | FileChunk
    | StillHere
)
OfFiles: TypeAlias = AskFiles | FilesThere | AskChunk | FileChunk | FilesNeeded | FilesKept
ToResident: TypeAlias = Resume | Park | WorkAs | Leave | StillHere
FromResident: TypeAlias = Warm | DeviceResumed | Parked | Left | StillHere
