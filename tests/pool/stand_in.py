"""A cluster behind a pool's socket, in whose place no process need run."""

import asyncio
import threading
from pathlib import Path

import msgspec

from elastic.compose.pool_config import load_pool, save_pool
from elastic.compose.runs import claimed
from elastic.core.cluster import Cluster, ClusterError
from elastic.core.cluster import commands as c
from elastic.core.cluster import events as e
from elastic.pool.control_messages import (
    POOL_CONTROL_VERSION,
    AskJobs,
    AskPoolStatus,
    AskTurns,
    AskVersion,
    CancelJob,
    DrainNode,
    MintTicket,
    PlanJob,
    PoolAcknowledged,
    PoolAnswer,
    PoolJobs,
    PoolPlan,
    PoolRefusal,
    PoolRequest,
    PoolStatusReply,
    PoolTurns,
    PoolVersion,
    ResubmitJob,
    SetQuota,
    StopPool,
    SubmitJob,
    TicketMinted,
)
from elastic.pool.machines import NodeTicket
from elastic.pool.status import PoolStatus, plan_of, pool_status, turns_of
from elastic.protocol.run_control import SOCKET, socket_address
from policies.clusters import CLUSTER_POLICIES

TICKET = NodeTicket(
    pool="lab", node="rollout-1", join="127.0.0.1:1", fingerprint="", token="secret", gpus=2, devices="cpu"
)
POOL = """
[pool]
name = "lab"
directory = "{directory}/pools"
devices = "cpu"
[pool.rollout]
nodes = 2
usd_per_gpu_hour = 2.0
memory_gb = 2
[pool.train]
nodes = 1
usd_per_gpu_hour = 5.0
memory_gb = 4
"""


class StandIn:
    """A cluster behind a pool's socket; every job is up as soon as it is placed."""

    def __init__(self, pool_file: Path, version: str = POOL_CONTROL_VERSION) -> None:
        config = load_pool(pool_file)
        self.directory = save_pool(config)
        self.cluster = Cluster(config.spec(), CLUSTER_POLICIES["ours"], config.wait_limits(), 0)
        self.submitted: list[SubmitJob] = []
        self.commands: list[str] = []
        """The ids of all commands that came."""
        self._version = version
        self._up = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._over = asyncio.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))
        self._lock = claimed(self.directory)

    def __enter__(self) -> "StandIn":
        self._lock.__enter__()
        self._thread.start()
        assert self._up.wait(5)
        return self

    def __exit__(self, *_: object) -> None:
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join(5)
        self._lock.__exit__(None, None, None)

    async def _run(self) -> None:
        self._loop = asyncio.get_running_loop()
        with socket_address(self.directory) as address:
            server = await asyncio.start_unix_server(self._serve, address, limit=2**20)
        self._up.set()
        async with server:
            await self._over.wait()
        (self.directory / SOCKET).unlink()

    def tell(self, event: e.ClusterEvent, at_s: float = 0.0) -> None:
        for command in self.cluster.handle(event, int(at_s * 1e9)):
            if isinstance(command, c.StartJob):
                self.cluster.handle(e.JobStarted(job=command.job, placement=command.placement), int(at_s * 1e9))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = msgspec.json.decode(await reader.readline(), type=PoolRequest)
        writer.write(msgspec.json.encode(self._answer(request)) + b"\n")
        await writer.drain()
        writer.close()
        await writer.wait_closed()

    def _status(self) -> PoolStatus:
        status = pool_status(self.cluster)
        for job in status.jobs:
            job.directory = next(s.entry.directory for s in self.submitted if s.request.id == job.name)
        return status

    def _answer(self, request: PoolRequest) -> PoolAnswer:
        if isinstance(request, SubmitJob | CancelJob | ResubmitJob | DrainNode | MintTicket):
            self.commands.append(request.id)
        match request:
            case AskVersion():
                return PoolVersion(pid=7, version=self._version)
            case AskPoolStatus():
                return PoolStatusReply(pool="lab", pid=7, status=self._status())
            case AskTurns():
                return PoolTurns(turns=turns_of(self.cluster))
            case AskJobs():
                before = self.cluster.state.arrivals + 1 if request.before is None else request.before
                found = [
                    job
                    for job in reversed(self._status().jobs)
                    if (job.name in request.names if request.names else request.like in job.name)
                    and request.within in ("", str(Path(job.directory).parent))
                    and not (request.going_on and job.over)
                    and job.arrival < before
                ]
                more = len(found) > request.most
                return PoolJobs(jobs=found[: request.most], before=found[request.most - 1].arrival if more else None)
            case PlanJob():
                try:
                    return PoolPlan(plan=plan_of(self.cluster, request.request, request.quota))
                except ClusterError as error:
                    return PoolRefusal(kind="rejected", message=str(error))
            case SubmitJob():
                plan = plan_of(self.cluster, request.request, request.quota)
                self.submitted.append(request)
                self.tell(e.JobSubmitted(request=request.request, quota=request.quota))
                return PoolAcknowledged(id=request.id, placement=plan)
            case CancelJob():
                self.tell(e.CancelRequested(job=request.job))
            case ResubmitJob():
                if self.cluster.jobs[request.job].state != "failed":
                    return PoolRefusal(kind="conflict", message=f"job {request.job} has not failed")
                self.tell(e.ResubmitRequested(job=request.job, quota=request.quota))
            case SetQuota(job=job, quota=quota):
                self.tell(e.QuotaChanged(job=job, quota=quota))
            case MintTicket():
                return TicketMinted(id=request.id, ticket=TICKET)
            case DrainNode(node=node):
                if node not in self.cluster.state.nodes:
                    return PoolRefusal(kind="unknown_node", message=f"node {node!r} is no node of another machine")
                self.tell(e.NodeDrained(node=node))
            case StopPool():
                pass
        return PoolAcknowledged(id=request.id)
