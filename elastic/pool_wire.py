"""Messages of a pool of many jobs: between its process, its keepers, their residents, and its jobs.

Who dials whom: keepers (one on each node) and jobs dial the pool's process, over TLS where that is not loopback; a
resident talks to the keeper that has started it, through a socket that it inherits. Frames are as in `elastic.wire`: a
4-byte big-endian length and a msgpack array whose first element is the message's tag.

- A pool's process, a keeper or a job may die and come back at any time. A connection begins with a hello that says what
  the dialler holds; the welcome says what the pool takes it to hold. Everything may be said twice, and is done once.
- Permits are numbered upwards by the pool: what is said of an older one counts no more.
- No clock is shared: times to come are sent as seconds left, and times past as durations.

Source: docs/jobs.md; Weave §4.3, §5.1.
"""

from typing import Annotated, TypeAlias

import msgspec

from elastic.cluster.types import PhaseKind
from elastic.core.types import Count, Text
from elastic.frames import Seconds

POOL_PROTOCOL_VERSION = 1
KEEPER_VARIABLE = "ELASTIC_KEEPER_FD"
"""Names the descriptor of the socket to its keeper that a resident inherits."""
NODES_MAX, RESIDENTS_MAX = 4096, 4096

Names: TypeAlias = Annotated[tuple[Text, ...], msgspec.Meta(max_length=NODES_MAX)]


class _PoolMessage(msgspec.Struct, frozen=True, tag=True, array_like=True):
    pass


class WorkerTicketFrame(msgspec.Struct, frozen=True, array_like=True):
    """What a resident needs to join a job's run as a worker. The token is spent by its first use; it is never logged.

    `join` and `fingerprint` are the run's `Endpoint` as the node dials it.
    """

    run: Text
    worker: Text
    token: Text
    join: Text
    fingerprint: Text = ""
    orchestrator_timeout_s: Seconds = 60.0


class HeldPermit(msgspec.Struct, frozen=True, array_like=True):
    """A permit as the pool takes somebody to have it, or as somebody takes himself to have it."""

    permit: Count
    job: Text
    phase: PhaseKind
    nodes: Names
    left_s: Seconds
    recalled: bool = False


# From a job: a run's orchestrator, or a script with phases.


class JobHello(_PoolMessage, frozen=True):
    """First frame of a job. `token` is that of the job's present placement: an older process of it is not let in.

    `script`: it computes in its own process, which parks and resumes by itself; its node's keeper has started it.
    """

    protocol_version: Count
    job: Text
    token: Text
    placement: Count
    script: bool = False


class AskPhase(_PoolMessage, frozen=True):
    """The job could begin this phase now; a `Granted` follows. Asked twice is asked once.

    Who wants both phases gets them one after the other, training first. With `both` one grant has the nodes of both.
    """

    phase: PhaseKind
    both: bool = False


class WithdrawPhase(_PoolMessage, frozen=True):
    """The job does not want this phase any more. A grant that was on its way is yielded by whoever gets it."""

    phase: PhaseKind


class LendSlice(_PoolMessage, frozen=True):
    """Have the job's resident on this node work for the run as this worker until the slice ends."""

    permit: Count
    node: Text
    ticket: WorkerTicketFrame


class ReturnSlice(_PoolMessage, frozen=True):
    """The worker on this node is to end, and the resident to park: answered by `SliceParked`. The permit goes on.

    `ends`: why the resident is to be ended instead, and another one started: its worker has lied, for example.
    """

    permit: Count
    node: Text
    ends: Text = ""


class StartTrainer(_PoolMessage, frozen=True):
    """Start the job's trainer on its training node as this worker. It computes there by permit only."""

    ticket: WorkerTicketFrame


class EndTrainer(_PoolMessage, frozen=True):
    """End the trainer's process of this worker; answered by `TrainerEnded`."""

    worker: Text


class YieldPhase(_PoolMessage, frozen=True):
    """The phase is over on all nodes of the permit. `finished`: it need not go on in a further slice.

    A script has parked already, and says how long it took to resume and to park (`switch_s`).
    """

    permit: Count
    finished: bool
    switch_s: Seconds = 0.0


class TailLeft(_PoolMessage, frozen=True):
    """Of the permit's nodes only those that `MoveTail` named are still used."""

    permit: Count


class PhaseProgress(_PoolMessage, frozen=True):
    """So many of the rollout's responses are done."""

    permit: Count
    done: Count
    of: Count


class StepsDone(_PoolMessage, frozen=True):
    """So many of the job's steps are done in all."""

    steps: Count


# To a job.


class JobWelcome(_PoolMessage, frozen=True):
    """`grant_within_s` bounds every wait for a turn. `permits` are those that the pool takes the job to hold.

    `trainer` is the worker whose trainer process lives on the job's training node; empty where there is none.
    """

    rollout_nodes: Names
    train_nodes: Names
    rollout_usd_per_gpu_hour: float
    train_usd_per_gpu_hour: float
    gpus_per_rollout_node: Count
    gpus_per_train_node: Count
    grant_within_s: Seconds
    permits: Annotated[tuple[HeldPermit, ...], msgspec.Meta(max_length=16)] = ()
    trainer: Text = ""
    slices: Annotated[dict[Text, Text], msgspec.Meta(max_length=NODES_MAX)] = {}
    """By node, the worker that its resident works as."""
    silence_s: Seconds = 30.0
    """Who hears nothing for so long dials again."""


class PoolRefused(_PoolMessage, frozen=True):
    """No session, for a job or a keeper. `retry` says whether dialling again can help."""

    reason: Text
    retry: bool


class Granted(_PoolMessage, frozen=True):
    """The slice begins, or has further nodes (the same number again). It ends `left_s` from now at the latest."""

    permit: Count
    phase: PhaseKind
    nodes: Names
    left_s: Seconds


class Recalled(_PoolMessage, frozen=True):
    """Give way within `left_s`; then the residents are killed."""

    permit: Count
    left_s: Seconds


class TailMove(_PoolMessage, frozen=True):
    """Move the phase's last responses to these of its nodes and leave the others; answered by `TailLeft`."""

    permit: Count
    nodes: Names


class PermitOver(_PoolMessage, frozen=True):
    """The permit counts no more: it was taken, or its nodes are gone. Not sent for one that was yielded."""

    permit: Count
    cause: Text


class SliceParked(_PoolMessage, frozen=True):
    """The worker on this node has ended and its resident is parked, or gone (`cause` says why)."""

    permit: Count
    node: Text
    worker: Text
    switch_s: Seconds = 0.0
    cause: Text = ""


class TrainerEnded(_PoolMessage, frozen=True):
    """The trainer's process of this worker is gone, or could not be started; `cause` says why."""

    worker: Text
    cause: Text


# From a keeper.


class ResidentState(msgspec.Struct, frozen=True, array_like=True):
    """A resident on a keeper's node. `permit` is the one under which it has the device, 0 while it is parked."""

    job: Text
    placement: Count
    worker: Text = ""
    permit: Count = 0
    up: bool = False


class KeeperHello(_PoolMessage, frozen=True):
    """First frame of a keeper. `token` is its ticket's, or its session's where it comes back with `residents`."""

    protocol_version: Count
    node: Text
    token: Text
    pid: Count
    host: Text
    last_permit: Count = 0
    residents: Annotated[tuple[ResidentState, ...], msgspec.Meta(max_length=RESIDENTS_MAX)] = ()


class ResidentUp(_PoolMessage, frozen=True):
    """The resident stands, parked, and may be given the device."""

    job: Text
    placement: Count


class ResidentGone(_PoolMessage, frozen=True):
    """The resident's processes are gone, all of them. Where it had the device, that is free.

    `code` is a script's exit status, where that is known.
    """

    job: Text
    placement: Count
    cause: Text
    permit: Count = 0
    worker: Text = ""
    code: int | None = None


class DeviceFreed(_PoolMessage, frozen=True):
    """The resident has parked. Seconds that resuming and parking took, bytes that each way were copied, and what of
    the device it keeps while it is parked."""

    permit: Count
    job: Text
    resume_s: Seconds
    park_s: Seconds
    state_bytes: Count
    rest_bytes: Count
    worker: Text = ""


class WorkerLeft(_PoolMessage, frozen=True):
    """The worker that the resident was has ended; the resident is parked, and its node is still the job's."""

    permit: Count
    job: Text
    worker: Text
    switch_s: Seconds
    cause: Text = ""


class HostMemory(_PoolMessage, frozen=True):
    """What the resident's processes hold of the node's host memory, as measured."""

    job: Text
    host_bytes: Count


# To a keeper.


class KeeperWelcome(_PoolMessage, frozen=True):
    """`session` buys the connection back. A keeper that hears nothing for `silence_s` dials again; after `orphan_s` it
    ends, and its residents with it."""

    session: Text
    silence_s: Seconds
    orphan_s: Seconds
    measure_s: Seconds


class StartResidentFrame(_PoolMessage, frozen=True, tag="StartResident"):
    """Start the job's resident on this node: `command` with `environment` on top of what is inherited.

    `phase` says what it is for. A `script` is no resident of ours: it parks and resumes by itself, and says so to the
    pool. Nothing is done where it runs already under this placement.
    """

    job: Text
    placement: Count
    phase: PhaseKind
    command: tuple[str, ...]
    environment: dict[str, str]
    directory: str
    log: str
    script: bool = False


class GiveDevice(_PoolMessage, frozen=True):
    """The device is the job's under this permit for `left_s` at most; then the resident is killed."""

    permit: Count
    job: Text
    left_s: Seconds


class LendWorker(_PoolMessage, frozen=True):
    """Have the job's resident, which has the device under this permit, work as this worker."""

    permit: Count
    job: Text
    ticket: WorkerTicketFrame


class EndWorker(_PoolMessage, frozen=True):
    """End the worker that the resident is, and park; answered by `WorkerLeft`."""

    permit: Count
    job: Text
    worker: Text


class TakeDevice(_PoolMessage, frozen=True):
    """Have the resident park; answered by `DeviceFreed`. Who has not within `left_s` is killed (`ResidentGone`)."""

    permit: Count
    job: Text
    left_s: Seconds


class EndResident(_PoolMessage, frozen=True):
    """Kill the job's resident with all that it has started; answered by `ResidentGone`.

    With `grace_s` it is asked to end (SIGTERM) so long before.
    """

    job: Text
    reason: Text
    grace_s: Seconds = 0.0


# Between a keeper and its resident. A resident resumes and parks one after the other, in the order it is told.


class Resume(_PoolMessage, frozen=True):
    """Bring the state to the device: from here on it may compute."""

    permit: Count


class Park(_PoolMessage, frozen=True):
    """Stop computing, take the state off the device: answered by `Parked`."""

    permit: Count


class WorkAs(_PoolMessage, frozen=True):
    """Join the run as this worker; answered by `Left` once it has ended."""

    permit: Count
    ticket: WorkerTicketFrame


class Leave(_PoolMessage, frozen=True):
    """Drain the worker at once; answered by `Left`."""

    worker: Text


class Warm(_PoolMessage, frozen=True):
    """The process is warm: everything is imported, and it waits, parked."""


class DeviceResumed(_PoolMessage, frozen=True):
    permit: Count
    resume_s: Seconds
    state_bytes: Count


class Parked(_PoolMessage, frozen=True):
    permit: Count
    park_s: Seconds
    state_bytes: Count
    rest_bytes: Count


class Left(_PoolMessage, frozen=True):
    permit: Count
    worker: Text
    cause: Text = ""


class StillHere(_PoolMessage, frozen=True):
    """Sent by both ends of a connection to the pool every third of its silence limit."""


FromJob: TypeAlias = (
    JobHello
    | AskPhase
    | WithdrawPhase
    | LendSlice
    | ReturnSlice
    | StartTrainer
    | EndTrainer
    | YieldPhase
    | TailLeft
    | PhaseProgress
    | StepsDone
    | StillHere
)
ToJob: TypeAlias = (
    JobWelcome | PoolRefused | Granted | Recalled | TailMove | PermitOver | SliceParked | TrainerEnded | StillHere
)
FromKeeper: TypeAlias = KeeperHello | ResidentUp | ResidentGone | DeviceFreed | WorkerLeft | HostMemory | StillHere
ToKeeper: TypeAlias = (
    KeeperWelcome
    | PoolRefused
    | StartResidentFrame
    | GiveDevice
    | LendWorker
    | EndWorker
    | TakeDevice
    | EndResident
    | StillHere
)
ToResident: TypeAlias = Resume | Park | WorkAs | Leave
FromResident: TypeAlias = Warm | DeviceResumed | Parked | Left
