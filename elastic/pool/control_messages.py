"""Commands to a pool of many jobs, through the socket in its directory: as `elastic.protocol.run_control` for runs.

- The socket (`control.sock`) belongs to the pool's process and to its user: nobody else can connect.
- A command is acknowledged once it is durable in the pool's journal. Repeated under its id it is done once.
- One connection carries one request and one answer, each a line of JSON.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, TypeAlias, TypeVar

import msgspec

from elastic.core.cluster.types import BeyondQuota, JobRequest
from elastic.pool.machines import NodeTicket
from elastic.pool.ports import JobEntry
from elastic.pool.status import JobStatus, PlacementPlan, PoolStatus, TurnStatus
from elastic.protocol.run_control import CommandRefused, ControlError, ControlLine, new_command_id

POOL_CONTROL_VERSION = "8"
"""Version of these messages. A pool's process names its own in `PoolVersion`."""

CommandId: TypeAlias = Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
JOB_NAME = "^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$"
"""A job's name: short enough for a run's name and the time at which it began."""
JOBS_PAGE = 200
"""Jobs in one answer at most."""
JobName: TypeAlias = Annotated[str, msgspec.Meta(pattern=JOB_NAME)]


class _PoolRequest(msgspec.Struct, frozen=True, kw_only=True, tag_field="command", forbid_unknown_fields=True):
    pass


class SubmitJob(_PoolRequest, frozen=True, tag="submit"):
    """Submit a job, with its record besides the request. How many deaths a run survives its configuration says. One
    that is beyond its `quota` waits until `SetQuota` lets it."""

    id: CommandId
    request: JobRequest
    entry: JobEntry
    quota: BeyondQuota | None = None


class SetQuota(_PoolRequest, frozen=True, tag="quota"):
    """Say that a job which waits for its quota is within it now, or beyond it for another reason."""

    id: CommandId
    job: JobName
    quota: BeyondQuota | None


class PlanJob(_PoolRequest, frozen=True, tag="plan"):
    """Ask where a job would go now, at what marginal cost and planned slowdown, and why it cannot join each other
    group. `quota` as in `SubmitJob`."""

    request: JobRequest
    quota: BeyondQuota | None = None


class CancelJob(_PoolRequest, frozen=True, tag="cancel"):
    id: CommandId
    job: JobName


class ResubmitJob(_PoolRequest, frozen=True, tag="resubmit"):
    """Continue a failed job from its last checkpoint, as a new arrival. `quota` as in `SubmitJob`."""

    id: CommandId
    job: JobName
    quota: BeyondQuota | None = None


class StopPool(_PoolRequest, frozen=True, tag="stop"):
    """Stop the pool. Jobs stop at their step's end and keep their checkpoints; then node agents and the pool's process
    end. With `now` everything ends at once."""

    id: CommandId
    now: bool = False


class PutBackDevice(_PoolRequest, frozen=True, tag="put_back"):
    """Let the pool's nodes have a device again that was set aside."""

    id: CommandId
    device: str


class MintTicket(_PoolRequest, frozen=True, tag="ticket"):
    """Mint a ticket with which a machine joins as so many `nodes` of this `kind`, or of the only one that may join,
    within `valid_s`; answered by `TicketMinted`."""

    id: CommandId
    label: str = ""
    kind: str = ""
    nodes: Annotated[int, msgspec.Meta(ge=1)] = 1
    valid_s: Annotated[float, msgspec.Meta(gt=0)] = 3600.0


class DrainNode(_PoolRequest, frozen=True, tag="drain"):
    """Have the jobs on a node of another machine go on elsewhere from their step's end, and let the node go. A ticket
    for it that nobody has used is void."""

    id: CommandId
    node: str


class AskVersion(_PoolRequest, frozen=True, tag="version"):
    """The only request whose answer is the same in every version."""


class AskPoolStatus(_PoolRequest, frozen=True, tag="status"):
    pass


class AskTurns(_PoolRequest, frozen=True, tag="turns"):
    """Ask for the last turns that are over."""


class AskJobs(_PoolRequest, frozen=True, tag="jobs"):
    """Ask for jobs, also for those that were over long ago: the latest arrivals first, a page at a time.

    - `names`: these jobs. Otherwise all jobs with `like` in their names, with a directory that lies directly in
      `within` and, with `going_on`, that are not over.
    - `before`: where the next page begins, as the page before has said.
    """

    names: tuple[JobName, ...] = ()
    like: str = ""
    within: str = ""
    going_on: bool = False
    before: int | None = None
    most: Annotated[int, msgspec.Meta(ge=1, le=JOBS_PAGE)] = JOBS_PAGE


PoolRequest: TypeAlias = (
    SubmitJob
    | PlanJob
    | CancelJob
    | ResubmitJob
    | SetQuota
    | StopPool
    | PutBackDevice
    | MintTicket
    | DrainNode
    | AskVersion
    | AskPoolStatus
    | AskTurns
    | AskJobs
)


class _PoolReply(msgspec.Struct, frozen=True, kw_only=True, tag_field="answer"):
    pass


class PoolAcknowledged(_PoolReply, frozen=True, tag="acknowledged"):
    """The command is durable. `repeated`: it was durable before, and nothing was done now. For a submission,
    `placement` is where the job went."""

    id: str
    repeated: bool = False
    placement: PlacementPlan | None = None


class TicketMinted(_PoolReply, frozen=True, tag="minted"):
    """The only answer that has the ticket. Never log it."""

    id: str
    ticket: NodeTicket


class PoolRefusal(_PoolReply, frozen=True, tag="refused"):
    """Nothing was done. `kind` is one of `invalid`, `unknown_job`, `unknown_node`, `conflict`, `rejected`,
    `version` and `ending`."""

    kind: str
    message: str


class PoolPlan(_PoolReply, frozen=True, tag="plan"):
    plan: PlacementPlan


class PoolJobs(_PoolReply, frozen=True, tag="jobs"):
    """`before`: where the next page begins; None after the last one."""

    jobs: list[JobStatus]
    before: int | None = None


class PoolTurns(_PoolReply, frozen=True, tag="turns"):
    turns: list[TurnStatus]


class PoolVersion(_PoolReply, frozen=True, tag="version"):
    pid: int
    version: str


class PoolStatusReply(_PoolReply, frozen=True, tag="status"):
    """The pool's status. It has at most `JOBS_PAGE` jobs, first those that go on; `AskJobs` returns all."""

    pool: str
    pid: int
    status: PoolStatus


PoolAnswer: TypeAlias = (
    PoolAcknowledged | PoolRefusal | PoolPlan | PoolVersion | PoolStatusReply | PoolTurns | PoolJobs | TicketMinted
)
R = TypeVar("R", bound=_PoolReply)


class OtherPoolVersion(ControlError):
    """The pool's process speaks another version than its caller."""


class PoolControl:
    """Sends requests to the process of the pool in `directory`. Every call raises `ControlError`, and takes at most
    `timeout_s`.

    Before the first request it asks for the process's version. It sends nothing else to a process of another version.
    """

    def __init__(self, directory: Path, timeout_s: float = 10.0) -> None:
        self.directory = directory
        self._line = ControlLine("pool", directory, timeout_s)
        self._understood = False

    async def submit(self, command: SubmitJob) -> PoolAcknowledged:
        return await self._ask(command, PoolAcknowledged)

    async def plan(self, request: JobRequest, quota: BeyondQuota | None = None) -> PlacementPlan:
        return (await self._ask(PlanJob(request=request, quota=quota), PoolPlan)).plan

    async def cancel(self, job: str, command: str = "") -> PoolAcknowledged:
        return await self._ask(CancelJob(id=command or new_command_id(), job=job), PoolAcknowledged)

    async def resubmit(self, job: str, command: str = "", quota: BeyondQuota | None = None) -> PoolAcknowledged:
        return await self._ask(ResubmitJob(id=command or new_command_id(), job=job, quota=quota), PoolAcknowledged)

    async def set_quota(self, job: str, quota: BeyondQuota | None, command: str = "") -> PoolAcknowledged:
        return await self._ask(SetQuota(id=command or new_command_id(), job=job, quota=quota), PoolAcknowledged)

    async def stop(self, *, now: bool = False, command: str = "") -> PoolAcknowledged:
        """Stop the pool. Returns once the stop is durable, before the pool has ended."""
        return await self._ask(StopPool(id=command or new_command_id(), now=now), PoolAcknowledged)

    async def put_back(self, device: str, command: str = "") -> PoolAcknowledged:
        return await self._ask(PutBackDevice(id=command or new_command_id(), device=device), PoolAcknowledged)

    async def ticket(self, label: str, valid_s: float, command: str = "", kind: str = "", nodes: int = 1) -> NodeTicket:
        """Mint a ticket for a machine. One that was minted under this command's id already is refused."""
        asked = MintTicket(id=command or new_command_id(), label=label, valid_s=valid_s, kind=kind, nodes=nodes)
        return (await self._ask(asked, TicketMinted)).ticket

    async def drain(self, node: str, command: str = "") -> PoolAcknowledged:
        """Drain a node. Returns once that is durable, before the node has gone."""
        return await self._ask(DrainNode(id=command or new_command_id(), node=node), PoolAcknowledged)

    async def status(self) -> PoolStatusReply:
        return await self._ask(AskPoolStatus(), PoolStatusReply)

    async def turns(self) -> list[TurnStatus]:
        """Return the last turns that are over. A process of an older program refuses to tell of them."""
        return (await self._ask(AskTurns(), PoolTurns)).turns

    async def jobs(
        self,
        *,
        names: Sequence[str] = (),
        like: str = "",
        within: str = "",
        going_on: bool = False,
        before: int | None = None,
        most: int = JOBS_PAGE,
    ) -> PoolJobs:
        """Return a page of jobs; see `AskJobs`."""
        request = AskJobs(names=tuple(names), like=like, within=within, going_on=going_on, before=before, most=most)
        return await self._ask(request, PoolJobs)

    async def all_jobs(self, *, within: str = "", going_on: bool = False) -> list[JobStatus]:
        """Return all jobs, page by page, in the order in which they came."""
        found: list[JobStatus] = []
        before: int | None = None
        while True:
            page = await self.jobs(within=within, going_on=going_on, before=before)
            found += page.jobs
            before = page.before
            if before is None:
                return found[::-1]

    async def _ask(self, request: PoolRequest, kind: type[R]) -> R:
        if not self._understood:
            found = await self._told(AskVersion(), PoolVersion)
            if found.version != POOL_CONTROL_VERSION:
                raise OtherPoolVersion(
                    f"pool {self.directory}: its process {found.pid} is of another version: found "
                    f"{found.version or 'none'}; allowed: {POOL_CONTROL_VERSION} (stop it with the program that has "
                    "started it, and start it anew)"
                )
            self._understood = True
        return await self._told(request, kind)

    async def _told(self, request: PoolRequest, kind: type[R]) -> R:
        answer = await self._line.ask(request, PoolAnswer)
        if isinstance(answer, PoolRefusal):
            raise CommandRefused(answer.kind, answer.message)
        return self._line.expected(answer, kind)
