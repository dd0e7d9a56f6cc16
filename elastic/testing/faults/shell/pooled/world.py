"""A world of jobs in a pool: it lives until all jobs have ended and the pool was stopped, and checks them."""

import contextlib
import hashlib
import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import httpx
import msgspec

from elastic.compose import pool as composed
from elastic.compose.pool_config import PoolConfig, job_request
from elastic.core.cluster import Cluster
from elastic.core.cluster import events as e
from elastic.core.cluster.history import cluster_digest
from elastic.core.cluster.invariants import check
from elastic.core.cluster.types import JobState, PhaseKind
from elastic.pool import live, node_agent
from elastic.pool import messages as w
from elastic.pool.client import PoolMembership
from elastic.pool.control_messages import PoolAcknowledged, StopPool, SubmitJob
from elastic.pool.journal import PoolJournal
from elastic.pool.node_agent import NodeAgent, NodeAgentTicket
from elastic.pool.ports import JobEntry
from elastic.protocol.endpoint import Endpoint
from elastic.protocol.run_control import ControlError, StopRun
from elastic.system.isolation import LoopFaults
from elastic.testing.faults.kinds import KINDS_OF_POOLS, Fault, FaultKind
from elastic.testing.faults.outcome import Lived
from elastic.testing.faults.shell.checker import check_world, require
from elastic.testing.faults.shell.injection import inject
from elastic.testing.faults.shell.loops import Machine
from elastic.testing.faults.shell.pooled.devices import NodeDevice
from elastic.testing.faults.shell.pooled.job import JobWorld
from elastic.testing.faults.shell.pooled.plan import PooledPlan
from elastic.testing.faults.shell.pooled.processes import (
    FIRST_PID,
    KILLED,
    ModelledChild,
    ModelledProcesses,
    ModelledRecord,
    PairedSocket,
    StartedProcess,
)
from elastic.testing.faults.shell.process import Process
from elastic.testing.faults.shell.stage import Stage, Tell
from policies.clusters import CLUSTER_POLICIES

LIVENESS_S = 900.0
"""Time for all jobs to end after the last fault."""
CALLBACKS_MAX = 60
"""Callbacks that a process still runs before it is killed."""
ASK_AGAIN_S = 2.0
NOTICED_S = 0.001, 0.02
"""Time until the end of a process is noticed."""
JOBS = "one", "two"
SECRET = b"%32d" % 7


class PooledWorld:
    """A pool and its jobs, on one stage."""

    def __init__(self, plan: PooledPlan, tell: Tell | None = None) -> None:
        self.plan = plan
        self.stage = Stage(plan.jobs[0].run.seed, tell)
        self.clock = self.stage.clock
        self._directory = self.stage.directory / "pool"
        self._directory.mkdir()
        (self._directory / "secret").write_bytes(SECRET)
        self.jobs = [
            JobWorld(shape, name, number, self, self.stage)
            for number, (shape, name) in enumerate(zip(plan.jobs, JOBS, strict=False))
        ]
        network = self.stage.network
        network.dialled = lambda loop: None
        network.serve_http = self._serve_http
        network.socketpair = PairedSocket.pair
        self.chance = Random(f"{plan.seed}/pool")
        self.faults = LoopFaults()
        self.cluster: Cluster | None = None
        """As the last process of the pool had it."""
        self.pool: Process | None = None
        self.node_agents: dict[str, Process] = {}
        """By node."""
        self.over = self._stopping = False
        """Whether the pool has ended as it was told, and whether it is told to."""
        self.incarnations = 0
        self._answer: Callable[[bytes], Any] | None = None
        self._records: dict[str, dict[str, StartedProcess]] = {}
        self._devices: dict[str, NodeDevice] = {}
        self._ends: dict[Process, list[Callable[[int], None]]] = {}
        self._residents_of: dict[str, list[Process]] = {}
        """By node."""
        self._pids = itertools.count(FIRST_PID)
        self._asked: dict[str, None] = {}
        """Commands that the pool has acknowledged."""
        self._config = PoolConfig.model_validate(
            {
                "pool": {
                    "directory": str(self._directory),
                    "rollout": {"nodes": plan.rollout_nodes, "usd_per_gpu_hour": 1.85, "memory_gb": 8},
                    "train": {"nodes": 1, "usd_per_gpu_hour": 5.28, "memory_gb": 8},
                },
                "limits": {
                    "notice_s": plan.notice_s,
                    "silence_s": plan.silence_s,
                    "still_s": 0,
                    "park_s": plan.park_s,
                    "overrun_share": 0.5,
                    "late_share": 0.5,
                    "stop_s": 60.0,
                    "start_s": 300.0,
                },
            }
        )

    # The pool's processes.

    def begin_pool(self) -> None:
        self.incarnations += 1
        wiring = composed.PoolWiring(
            programs=_Programs,
            detached=self._detached,
            recorded=self._recorded,
            control=self._run_control,
            line_socket=self._line_socket,
            after=self._happened,
            faults=self.faults,
        )
        work = partial(composed.serve_pool, self._config, self._directory, wiring)
        self.pool = self.stage.begin_process(f"pool {self.incarnations}", Machine(self.clock), work)

    def start(self, owner: str, name: str, environment: Mapping[str, str]) -> Process:
        """Start what the pool's process has asked for: a node agent, or a job's orchestrator."""
        if owner == live.NODE_AGENTS:
            process = self.stage.begin_process(
                f"node agent {name}", Machine(self.clock), partial(self._keep, environment)
            )
            process.loop.launch = partial(self._launch, name, process)
            self.node_agents[name] = process
            return process
        job = self.jobs[JOBS.index(name)]
        membership = PoolMembership.of(environment)
        assert membership is not None
        return job.begin_as(membership)

    async def _keep(self, environment: Mapping[str, str]) -> str:
        ticket = NodeAgentTicket(
            endpoint=Endpoint(environment[composed.POOL_VARIABLE]),
            pool=environment[composed.NAME_VARIABLE],
            node=environment[composed.NODE_VARIABLE],
            token=environment[composed.TOKEN_VARIABLE],
        )
        return (await NodeAgent(ticket, lambda _: 0, self.faults, ModelledRecord).run()).reason

    def _launch(
        self,
        node: str,
        node_agent_process: Process,
        factory: Callable[[], Any],
        command: Sequence[str],
        options: Mapping[str, Any],
    ) -> tuple[ModelledChild, Any]:
        """Start a resident as a node agent's child."""
        environment = options["env"]
        ends: list[PairedSocket] = []
        job = self.jobs[JOBS.index(environment[composed.JOB_VARIABLE])]
        process = job.resident(node, environment, lambda: ends[0])
        ends.append(
            PairedSocket.inherited(int(environment[w.NODE_AGENT_VARIABLE]), node_agent_process.loop, process.loop)
        )
        self._residents_of.setdefault(node, []).append(process)
        protocol = factory()
        child = ModelledChild(self, node_agent_process.loop, process, next(self._pids))
        protocol.connection_made(child)
        return child, protocol

    def end(self, process: Process, status: int) -> None:
        """End a process, and tell who watches it."""
        if not process.alive:
            return
        self.stage.kill(process, noticed=True)
        for job in self.jobs:
            if job.orchestrator is process:
                job.gone()
        for tell in self._ends.pop(process, []):
            self.stage.after(self.chance.uniform(*NOTICED_S), partial(tell, status))

    def at_end(self, process: Process, tell: Callable[[int], None]) -> None:
        self._ends.setdefault(process, []).append(tell)

    def _detached(self, *arguments: Any) -> Any:
        return ModelledProcesses(self, self._records, *arguments)

    def _recorded(self, directory: Path, pool: str, owner: str) -> list[ModelledRecord]:
        """What a node agent has left."""

        def end() -> None:
            for process in self._residents_of.pop(owner.removeprefix(f"{node_agent.RESIDENTS} "), []):
                self.end(process, KILLED)

        return [ModelledRecord(directory, pool, owner, "", end)]

    def device(self, node: str) -> NodeDevice:
        if node not in self._devices:
            self._devices[node] = NodeDevice(node, lambda: self.cluster, self.stage.found)
        return self._devices[node]

    def _happened(self, cluster: Cluster, event: e.ClusterEvent) -> None:
        """Check the cluster after every event."""
        self.cluster = cluster
        try:
            check(cluster, slos=False)
        except AssertionError as error:
            self.stage.found.append(AssertionError(f"after {event}: {error}"))

    # Commands.

    def _submit(self, job: JobWorld) -> None:
        request = job_request(job.name, job.config.job, job.plan.steps, job.config.job.plan)
        entry = JobEntry(job=job.name, directory=str(job.run.path))
        self._command(SubmitJob(id=f"submit-{job.name}", request=request, entry=entry))

    def _command(self, request: SubmitJob | StopPool) -> None:
        """Send a command until it is acknowledged, also to later processes of the pool."""

        async def ask() -> None:
            assert answer is not None
            answered = await answer(msgspec.json.encode(request))
            require(isinstance(answered, PoolAcknowledged), f"{request.id}: {answered}")
            self._asked[request.id] = None

        if request.id in self._asked:
            return
        answer, pool = self._answer, self.pool
        if answer is not None and pool is not None:
            pool.loop.create_task(ask(), context=pool.loop.context)
        self.stage.after(ASK_AGAIN_S, partial(self._command, request))

    def _line_socket(self, directory: Path, answer: Callable[[bytes], Any], *_: Any) -> Any:
        """`elastic.protocol.control_socket.LineSocket` of the pool's process."""

        async def start() -> None:
            self._answer = answer

        async def aclose() -> None:
            self._answer = None

        return SimpleNamespace(start=start, aclose=aclose)

    def _run_control(self, directory: Path) -> Any:
        """`elastic.protocol.run_control.RunControl` of one of the jobs."""
        (job,) = [job for job in self.jobs if job.run.path == directory]

        async def stop(reason: str, name: str) -> None:
            if not job.command(lambda _: StopRun(id=name, reason=reason)):
                raise ControlError("no process of the run is there")

        return SimpleNamespace(stop=stop)

    # The world's life.

    def begin(self) -> None:
        self.begin_pool()
        for job in self.jobs:
            self.stage.after(job.shape.at_s, partial(self._submit, job))

    def _serve_http(self, url: str) -> httpx.BaseTransport:
        port = urlsplit(url).port or 0
        job = next(job for job in reversed(self.jobs) if port >= job.relays_from)
        return job.relay.transport(url)

    @property
    def limit_s(self) -> float:
        return self.plan.end_s + LIVENESS_S

    def is_over(self) -> bool:
        """Whether all jobs have ended, and then the pool."""
        if self.faults.counts():
            raise AssertionError(f"unexpected: {self.faults.last}")
        if not self._stopping and self._jobs_are_over():
            self._stopping = True
            self._command(StopPool(id="stop"))
        return self.over

    def status(self) -> str:
        cluster = self.cluster
        states = {} if cluster is None else {job: record.state.value for job, record in cluster.jobs.items()}
        permits = {} if cluster is None else {p.number: (p.job, p.phase.value) for p in cluster.permits.values()}
        return f"jobs {states}, permits {permits}"

    def _jobs_are_over(self) -> bool:
        cluster = self.cluster
        if cluster is None or len(cluster.jobs) < len(self.jobs):
            return False
        return all(record.ended or record.state is JobState.FAILED for record in cluster.jobs.values())

    def ended(self, process: Process) -> None:
        """Note that a process has ended by itself."""
        error = process.main.exception()
        for job in self.jobs:
            if process is job.orchestrator or process in job.residents:
                job.process_over(process, error)
        self.end(process, 0 if error is None else 1)
        if process is self.pool:
            if error is not None:
                raise AssertionError(f"the pool's process has failed: {error!r}") from error
            self.pool, self.over = None, True

    # Faults.

    def inject(self, fault: Fault) -> bool:
        if fault.kind not in KINDS_OF_POOLS:
            return inject(self.jobs[fault.job], fault)
        callbacks = int(fault.chance * CALLBACKS_MAX)
        node_agents = [process for process in self.node_agents.values() if process.alive]
        residents = [process for job in self.jobs for process in job.workers()]
        others = [*node_agents, *(job.orchestrator for job in self.jobs if job.orchestrator is not None)]
        of = {
            FaultKind.KILL_NODE_AGENT: node_agents,
            FaultKind.HOLD_NODE_AGENT: node_agents,
            FaultKind.KILL_RESIDENT: residents,
            FaultKind.HOLD_RESIDENT: residents,
            FaultKind.CUT_POOL: others,
        }.get(fault.kind, [] if self.pool is None else [self.pool])
        if not of:
            return False
        picked = of[int(fault.target * len(of))]
        match fault.kind:
            case FaultKind.KILL_POOL:
                picked.end_after(callbacks, partial(self._kill_pool, picked, fault.duration_s))
            case FaultKind.KILL_NODE_AGENT | FaultKind.KILL_RESIDENT:
                picked.end_after(callbacks, partial(self.end, picked, KILLED))
            case FaultKind.HOLD_POOL | FaultKind.HOLD_NODE_AGENT | FaultKind.HOLD_RESIDENT:
                picked.freeze(self.stage.until_ns(fault.duration_s))
            case FaultKind.CUT_POOL:
                self._cut_from_pool(picked)
            case FaultKind.STALL_POOL:
                picked.loop.stall(self.stage.until_ns(fault.duration_s))
            case FaultKind.REPEAT_POOL:
                picked.loop.repeats_until_ns = self.stage.until_ns(fault.duration_s)
        return True

    def _cut_from_pool(self, process: Process) -> None:
        for transport in list(process.loop.transports):
            if transport.peer is not None and self.pool is not None and transport.peer.loop is self.pool.loop:
                transport.abort()

    def _kill_pool(self, pool: Process, down_s: float) -> None:
        self.end(pool, KILLED)
        if self.pool is pool:
            self.pool = self._answer = None
            self.stage.after(down_s, self.begin_pool)

    # The end.

    def check(self) -> None:
        """Raise `AssertionError` with what is wrong."""
        cluster = self.cluster
        assert cluster is not None
        for job in self.jobs:
            record = cluster.jobs[job.name]
            require(record.state is JobState.FINISHED, f"{job.name} is {record.state}: {record.reason}")
            check_world(job)
            require(record.steps_done == job.plan.steps, f"the pool knows of {record.steps_done} steps of {job.name}")
        require(not cluster.permits and not cluster.groups, "all jobs have ended, and not everything was given back")
        with contextlib.closing(PoolJournal(self._directory)) as journal:
            again, _ = journal.open_pool(
                self._config.spec(),
                self._config.wait_limits(),
                CLUSTER_POLICIES[self._config.pool.policy],
                self._config.pool.policy,
            )
        require(cluster_digest(again) == cluster_digest(cluster), "the journal leads to another state")

    def outcome(self) -> Lived:
        outcomes = [job.outcome() for job in self.jobs]
        assert self.cluster is not None
        told = "/".join((cluster_digest(self.cluster), *(one.history for one in outcomes)))
        return Lived(
            events=sum(one.events for one in outcomes),
            faults=self.stage.struck,
            history=hashlib.blake2b(told.encode(), digest_size=16).hexdigest(),
            incarnations=self.incarnations + sum(one.incarnations for one in outcomes),
            followed=sum(engine.followed for job in self.jobs for engine in job.engines),
        )


class _Programs(composed.PoolPrograms):
    """The production programs. Nothing in their messages depends on the machine."""

    def resident_command(self, entry: JobEntry, phase: PhaseKind) -> Sequence[str]:
        return ("resident", phase.value)

    def resident(
        self,
        entry: JobEntry,
        placement: int,
        node: str,
        phase: PhaseKind,
        ticket: w.WorkerTicketFrame | None,
        ranks: w.RankPlaces | None = None,
    ) -> w.StartResidentFrame:
        frame = super().resident(entry, placement, node, phase, ticket, ranks)
        return msgspec.structs.replace(frame, directory="", log="/dev/null")
