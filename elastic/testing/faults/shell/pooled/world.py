"""A world of jobs in a pool: it lives until all jobs have ended and the pool was stopped, and judges them."""

import contextlib
import hashlib
import itertools
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from elastic.core.types import NS_PER_S
from elastic.pool import keeper, live
from elastic.pool import messages as w
from elastic.pool.client import PoolMembership
from elastic.pool.control_messages import PoolAcknowledged, StopPool, SubmitJob
from elastic.pool.journal import PoolJournal
from elastic.pool.keeper import Keeper, KeeperTicket
from elastic.pool.ports import JobEntry
from elastic.protocol.endpoint import Endpoint
from elastic.protocol.run_control import ControlError, StopRun
from elastic.system.isolation import LoopFaults
from elastic.testing.faults.failure import WorldFailed
from elastic.testing.faults.shell.answers import governs
from elastic.testing.faults.shell.faults import KINDS_OF_POOLS, Fault, FaultKind, options_of
from elastic.testing.faults.shell.judge import judge, require
from elastic.testing.faults.shell.loops import Machine
from elastic.testing.faults.shell.pooled.devices import NodeDevice
from elastic.testing.faults.shell.pooled.job import JobWorld
from elastic.testing.faults.shell.pooled.plan import PooledPlan, draw_pooled
from elastic.testing.faults.shell.pooled.processes import (
    FIRST_PID,
    KILLED,
    ModelledChild,
    ModelledProcesses,
    ModelledRecord,
    PairedSocket,
    StartedProcess,
    memory_of,
)
from elastic.testing.faults.shell.process import Process
from elastic.testing.faults.shell.strikes import strike
from elastic.testing.faults.shell.world import WORK_NS
from policies.clusters import CLUSTER_POLICIES

STEPS_MAX = 4_000_000
LIVENESS_S = 900.0
"""Time for all jobs to end after the last fault."""
CALLBACKS_MAX = 60
"""Callbacks that a process still runs before it is killed."""
ASK_AGAIN_S = 2.0
NOTICED_S = 0.001, 0.02
"""Time until the end of a process is noticed."""
JOBS = "one", "two"
SECRET = b"%32d" % 7


class PooledOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a world. `history` hashes what the pool and the jobs' runs have journaled."""

    seed: int
    ended_s: float
    events: int
    incarnations: int
    faults: int
    permits: int
    followed: int
    """Versions that parked residents have put in force."""
    history: str


class PooledWorld:
    """`tell` gets what the world's processes log, and its faults."""

    def __init__(self, plan: PooledPlan, tell: Callable[[str], None] | None = None) -> None:
        self.plan = plan
        self._tell = tell
        self._directory = Path(tempfile.mkdtemp(prefix="elastic-chaos-", dir=_memory()))
        (self._directory / "secret").write_bytes(SECRET)
        self.jobs: list[JobWorld] = []
        for number, shape in enumerate(plan.jobs):
            self.jobs.append(JobWorld(shape, JOBS[number], number, self, tell, self.jobs[0] if self.jobs else None))
        self.world = self.jobs[0]
        """Its clock, network and processes are everybody's."""
        self.clock, self.network = self.world.clock, self.world.network
        self.network.dialled = lambda loop: None
        self.network.serve_http = self._serve_http
        self.network.socketpair = PairedSocket.pair
        self.chance = Random(f"{plan.seed}/pool")
        self.found: list[AssertionError] = []
        self.faults = LoopFaults()
        self.cluster: Cluster | None = None
        """As the last process of the pool had it."""
        self.pool: Process | None = None
        self.keepers: dict[str, Process] = {}
        """By node."""
        self.over = False
        """Whether the pool has ended as it was told."""
        self.struck = self.incarnations = self.permits = 0
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
        self.pool = self.world.begin(f"pool {self.incarnations}", Machine(self.clock), work)

    def start(self, owner: str, name: str, environment: Mapping[str, str]) -> Process:
        """Start what the pool's process has asked for: a keeper, or a job's orchestrator."""
        if owner == live.KEEPERS:
            process = self.world.begin(f"keeper {name}", Machine(self.clock), partial(self._keep, environment))
            process.loop.launch = partial(self._launch, name, process)
            self.keepers[name] = process
            return process
        job = self.jobs[JOBS.index(name)]
        membership = PoolMembership.of(environment)
        assert membership is not None
        return job.begin_as(membership)

    async def _keep(self, environment: Mapping[str, str]) -> str:
        ticket = KeeperTicket(
            endpoint=Endpoint(environment[composed.POOL_VARIABLE]),
            pool=environment[composed.NAME_VARIABLE],
            node=environment[composed.NODE_VARIABLE],
            token=environment[composed.TOKEN_VARIABLE],
        )
        return await Keeper(ticket, memory_of, self.faults, ModelledRecord).run()

    def _launch(
        self,
        node: str,
        keeper_process: Process,
        factory: Callable[[], Any],
        command: Sequence[str],
        options: Mapping[str, Any],
    ) -> tuple[ModelledChild, Any]:
        """Start a resident as a keeper's child."""
        environment = options["env"]
        ends: list[PairedSocket] = []
        job = self.jobs[JOBS.index(environment[composed.JOB_VARIABLE])]
        process = job.resident(node, environment, lambda: ends[0])
        ends.append(PairedSocket.inherited(int(environment[w.KEEPER_VARIABLE]), keeper_process.loop, process.loop))
        self._residents_of.setdefault(node, []).append(process)
        protocol = factory()
        child = ModelledChild(self, keeper_process.loop, process, next(self._pids))
        protocol.connection_made(child)
        return child, protocol

    def end(self, process: Process, status: int) -> None:
        """End a process, and tell who watches it."""
        if not process.alive:
            return
        process.loop.kill(noticed=True)
        self.world.alive.remove(process)
        for job in self.jobs:
            if job.orchestrator is process:
                job.gone()
        for tell in self._ends.pop(process, []):
            self.world.after(self.chance.uniform(*NOTICED_S), partial(tell, status))

    def at_end(self, process: Process, tell: Callable[[int], None]) -> None:
        self._ends.setdefault(process, []).append(tell)

    def _detached(self, *arguments: Any) -> Any:
        return ModelledProcesses(self, self._records, *arguments)

    def _recorded(self, directory: Path, pool: str, owner: str) -> list[ModelledRecord]:
        """What a keeper has left."""

        def end() -> None:
            for process in self._residents_of.pop(owner.removeprefix(f"{keeper.RESIDENTS} "), []):
                self.end(process, KILLED)

        return [ModelledRecord(directory, pool, owner, "", end)]

    def device(self, node: str) -> NodeDevice:
        if node not in self._devices:
            self._devices[node] = NodeDevice(node, lambda: self.cluster, self.found)
        return self._devices[node]

    def job_over(self, job: JobWorld, result: str) -> None:
        require(not result, f"the run of {job.name} failed: {result}")

    def _happened(self, cluster: Cluster, event: e.ClusterEvent) -> None:
        """Check the cluster after every event."""
        self.cluster = cluster
        self.permits = max((self.permits, *cluster.permits))
        try:
            check(cluster, slos=False)
        except AssertionError as error:
            self.found.append(AssertionError(f"after {event}: {error}"))

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
        self.world.after(ASK_AGAIN_S, partial(self._command, request))

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

    @contextlib.contextmanager
    def begins(self) -> Iterator[None]:
        """A context: production code gets this world's answers, and everything is taken apart at its end."""
        with contextlib.ExitStack() as answers:
            answers.enter_context(governs(self.clock, self.network, f"{self.plan.seed}/code"))
            answers.enter_context(self.world.logged())
            try:
                self.begin_pool()
                for job in self.jobs:
                    self.world.after(job.shape.at_s, partial(self._submit, job))
                yield
            finally:
                self.world.bury()
                for job in self.jobs:
                    shutil.rmtree(job.directory, ignore_errors=True)
                shutil.rmtree(self._directory, ignore_errors=True)
                PairedSocket.open_ends.clear()

    def _serve_http(self, url: str) -> httpx.BaseTransport:
        port = urlsplit(url).port or 0
        job = next(job for job in reversed(self.jobs) if port >= job.relays_from)
        return job.relay.transport(url)

    def go_on(self) -> None:
        """Run until all jobs have ended, and then the pool. Raises `AssertionError` if that takes much too long."""
        until_ns = round((self.plan.end_s + LIVENESS_S) * NS_PER_S)
        stopping = False
        for _ in range(STEPS_MAX):
            if self.over and not self.world.alive:
                return
            if not stopping and self._jobs_are_over():
                stopping = True
                self._command(StopPool(id="stop"))
            if not self._step(until_ns):
                break
        alive = [process.name for process in self.world.alive]
        cluster = self.cluster
        states = {} if cluster is None else {job: record.state.value for job, record in cluster.jobs.items()}
        permits = {} if cluster is None else {p.number: (p.job, p.phase.value) for p in cluster.permits.values()}
        raise AssertionError(f"no end: jobs {states}, permits {permits}, alive {alive}")

    def _jobs_are_over(self) -> bool:
        cluster = self.cluster
        if cluster is None or len(cluster.jobs) < len(self.jobs):
            return False
        return all(record.ended or record.state is JobState.FAILED for record in cluster.jobs.values())

    def _step(self, until_ns: int) -> bool:
        process, goes_on = self.world.next_process(until_ns)
        if not goes_on:
            return False
        if process is not None:
            process.step()
            self.clock.now_ns += WORK_NS
            self._look_at(process)
        elif self.found:
            raise self.found[0]
        return True

    def _look_at(self, process: Process) -> None:
        for found in (self.found, *(job.witness.found for job in self.jobs)):
            if found:
                raise found[0]
        if self.faults.counts():
            raise AssertionError(f"{process.name}: unexpected: {self.faults.last}")
        if process.loop.failures:
            raise AssertionError(f"{process.name}: {process.loop.failures[0]}")
        if process.alive and process.main.done():
            self._ended(process)

    def _ended(self, process: Process) -> None:
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

    def befall(self, fault: Fault) -> None:
        done = self._strike(fault) if fault.kind in KINDS_OF_POOLS else strike(self.jobs[fault.job], fault)
        self.struck += done
        if done and self._tell is not None:
            self._tell(f"{self.clock.now_ns / NS_PER_S:9.3f} *** {fault}")

    def _strike(self, fault: Fault) -> bool:
        callbacks = int(fault.chance * CALLBACKS_MAX)
        keepers = [process for process in self.keepers.values() if process.alive]
        residents = [process for job in self.jobs for process in job.workers()]
        others = [*keepers, *(job.orchestrator for job in self.jobs if job.orchestrator is not None)]
        of = {
            FaultKind.KILL_KEEPER: keepers,
            FaultKind.HOLD_KEEPER: keepers,
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
            case FaultKind.KILL_KEEPER | FaultKind.KILL_RESIDENT:
                picked.end_after(callbacks, partial(self.end, picked, KILLED))
            case FaultKind.HOLD_POOL | FaultKind.HOLD_KEEPER | FaultKind.HOLD_RESIDENT:
                picked.frozen_until_ns = max(picked.frozen_until_ns, self.world.until_ns(fault.duration_s))
            case FaultKind.CUT_POOL:
                self._cut_from_pool(picked)
            case FaultKind.STALL_POOL:
                picked.loop.stall(self.world.until_ns(fault.duration_s))
            case FaultKind.REPEAT_POOL:
                picked.loop.repeats_until_ns = self.world.until_ns(fault.duration_s)
        return True

    def _cut_from_pool(self, process: Process) -> None:
        for transport in list(process.loop.transports):
            if transport.peer is not None and self.pool is not None and transport.peer.loop is self.pool.loop:
                transport.abort()

    def _kill_pool(self, pool: Process, down_s: float) -> None:
        self.end(pool, KILLED)
        if self.pool is pool:
            self.pool = self._answer = None
            self.world.after(down_s, self.begin_pool)

    # The end.

    def judge(self) -> None:
        """Raise `AssertionError` with what is wrong."""
        cluster = self.cluster
        assert cluster is not None
        for job in self.jobs:
            record = cluster.jobs[job.name]
            require(record.state is JobState.FINISHED, f"{job.name} is {record.state}: {record.reason}")
            judge(job)
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

    def outcome(self) -> PooledOutcome:
        outcomes = [job.outcome() for job in self.jobs]
        assert self.cluster is not None
        told = "/".join((cluster_digest(self.cluster), *(one.history for one in outcomes)))
        return PooledOutcome(
            seed=self.plan.seed,
            ended_s=self.clock.now_ns / NS_PER_S,
            events=sum(one.events for one in outcomes),
            incarnations=self.incarnations + sum(one.incarnations for one in outcomes),
            faults=self.struck,
            permits=self.permits,
            followed=sum(engine.followed for job in self.jobs for engine in job.engines),
            history=hashlib.blake2b(told.encode(), digest_size=16).hexdigest(),
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
    ) -> w.StartResidentFrame:
        frame = super().resident(entry, placement, node, phase, ticket)
        return msgspec.structs.replace(frame, directory="", log="/dev/null")


def live_pooled(plan: PooledPlan, tell: Callable[[str], None] | None = None) -> PooledOutcome:
    """Run a world to its end. Raises `WorldFailed`, also if that takes much too long."""
    world = PooledWorld(plan, tell)
    with world.begins():
        try:
            for fault in plan.faults:
                world.world.after(fault.at_s, partial(world.befall, fault))
            world.go_on()
            world.judge()
            return world.outcome()
        except Exception as error:
            found = f"at {world.clock.now_ns / NS_PER_S:.3f} s: {type(error).__name__}: {error}"
            options = options_of(plan.only, plan.faults, draw_pooled(plan.seed, plan.only).faults)
            raise WorldFailed("pool", plan.seed, found, options) from error


def simulate_pooled(seed: int, tell: Callable[[str], None] | None = None) -> PooledOutcome:
    """Run the world that a seed draws. Raises `WorldFailed`."""
    return live_pooled(draw_pooled(seed), tell)


def _memory() -> str | None:
    return "/dev/shm" if Path("/dev/shm").is_dir() else None
