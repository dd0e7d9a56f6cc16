"""The ports of a live pool: a clock, a journal, a gateway, and processes on this machine."""

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec
import structlog

from elastic.core.cluster import Cluster, ClusterPolicies
from elastic.core.cluster.types import JobId, Nanoseconds, NodeId, PhaseKind, PhasePlan
from elastic.pool import messages as w
from elastic.pool.gateway import PoolGateway
from elastic.pool.job_processes import DetachedProcesses, ProcessLaunch
from elastic.pool.journal import NotedDeath, PoolJournal
from elastic.pool.node_agent import RESIDENTS
from elastic.pool.pool_files import FilePrograms
from elastic.pool.ports import DoneCommand, ForgottenJob, JobEnding, JobEntry
from elastic.pool.shell import PoolShell
from elastic.protocol.run_control import ControlError, RunControl
from elastic.system.boot_clock import CLOCK_LOOK_S, Suspensions
from elastic.system.devices import DeviceName
from elastic.system.isolation import IsolatedLoop, ItemAttempt
from elastic.system.supervision import RecordedProcesses, end_left_over

log = structlog.get_logger(__name__)

STOP_RETRY_S = 1.0
DISMISSAL_S = 30.0
"""For node agents on other machines to end their residents as the pool stops."""
DEVICES = "devices"
"""Under which a node agent's devices are kept with its process."""
SET_ASIDE = "set_aside"
"""The journal's note of devices that are set aside, with reasons."""
NODE_AGENTS, JOBS, PROFILES = "node_agents", "jobs", "profiles"


class Programs(FilePrograms, Protocol):
    """Says what the pool's processes run. Implemented above, where all rooms are known."""

    def node_agent(self, node: NodeId, ticket: int, devices: Sequence[DeviceName]) -> ProcessLaunch: ...

    def job(self, entry: JobEntry, placement: int) -> ProcessLaunch: ...

    def ended(self, entry: JobEntry, kept: Mapping[str, str], status: int | None) -> JobEnding:
        """Returns how a job's process has ended. Reads the run's journal."""
        ...

    def resident(
        self,
        entry: JobEntry,
        placement: int,
        node: NodeId,
        phase: PhaseKind,
        ticket: w.WorkerTicketFrame | None,
        ranks: w.RankPlaces | None = None,
    ) -> w.StartResidentFrame: ...

    def profile(self, entry: JobEntry) -> ProcessLaunch:
        """Returns the process that times a few steps of the job alone. Raises `ValueError` if they cannot be timed."""
        ...

    def profiled(self, entry: JobEntry, kept: Mapping[str, str], status: int | None) -> PhasePlan:
        """Returns what was timed. Raises `ValueError` if nothing was."""
        ...


class LivePorts:
    """`PoolPorts` of a live pool. `run` is called with the shell, and returns when the pool is over.

    Processes that outlive this one are `detached`; `recorded` finds what node agents have left; by its `control` a run
    is told to stop.
    """

    def __init__(
        self,
        directory: Path,
        pool: str,
        journal: PoolJournal,
        gateway: PoolGateway,
        programs: Programs,
        now_ns: Callable[[], Nanoseconds],
        isolated: IsolatedLoop,
        detached: Callable[..., DetachedProcesses] = DetachedProcesses,
        recorded: Callable[[Path, str, str], Sequence[RecordedProcesses]] = RecordedProcesses.found,
        control: Callable[[Path], RunControl] = RunControl,
    ) -> None:
        self._records = directory / "leases"
        self._pool, self._journal, self._gateway, self._programs = pool, journal, gateway, programs
        self._now_ns = now_ns
        self._isolated = isolated
        self._suspensions = Suspensions()
        self._recorded, self._control = recorded, control
        self._shell: PoolShell | None = None
        self._stirred = asyncio.Event()
        self._failed: BaseException | None = None
        self._stops: dict[JobId, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._endings: set[asyncio.Task[None]] = set()
        """The tasks that end the residents of node agents that are gone."""
        self.node_agents = detached(self._records, pool, NODE_AGENTS, self._node_agent_over)
        self.jobs = detached(self._records, pool, JOBS, self._job_over)
        self.profiles = detached(self._records, pool, PROFILES, self._profile_over)

    @property
    def shell(self) -> PoolShell:
        assert self._shell is not None
        return self._shell

    # What the shell wants.

    def now_ns(self) -> Nanoseconds:
        return self._now_ns()

    def slept_ns(self) -> Nanoseconds:
        return self._suspensions.news_ns()

    def append(
        self,
        record: bytes,
        entry: JobEntry | None = None,
        command: DoneCommand | None = None,
        forgotten: Sequence[ForgottenJob] = (),
    ) -> None:
        with self._durably():
            self._journal.append(record, entry, command, forgotten)

    def replayed(self, policies: ClusterPolicies) -> Cluster:
        with self._durably():
            cluster, _ = self._journal.replayed(policies)
            self._journal.note_state(cluster, at_once=True)  # So that the next time costs little.
        return cluster

    def died(self, node: NodeId, job: JobId, what: str) -> None:
        with self._durably():
            self._journal.note_death(NotedDeath(self._now_ns(), node, job, what))

    def note_set_aside(self, devices: Mapping[DeviceName, str]) -> None:
        with self._durably():
            self._journal.set_note(SET_ASIDE, msgspec.json.encode(devices).decode())

    @contextlib.contextmanager
    def _durably(self) -> Iterator[None]:
        """A context in which any failure, as of the journal, ends the pool's process."""
        try:
            yield
        except BaseException as error:
            self.fail(error)
            raise

    @contextlib.contextmanager
    def attempting(self, item: str) -> Iterator[ItemAttempt]:
        with self._isolated.attempt(item) as attempt:
            yield attempt
        if self._failed is not None:
            raise self._failed

    def settled(self) -> None:
        with self._durably():
            self._journal.note_state(self.shell.cluster)
        self._stirred.set()

    def start_node_agent(self, node: NodeId, phase: PhaseKind, devices: Sequence[DeviceName]) -> None:
        starting = self._start_node_agent(node, devices)
        self._spawn(f"start of node agent {node}", starting, lambda cause: self.shell.node_agent_gone(node))

    async def _start_node_agent(self, node: NodeId, devices: Sequence[DeviceName]) -> None:
        await self.node_agents.settle(node)
        await asyncio.gather(*self._endings, return_exceptions=True)  # They may be at its devices.
        try:
            launch = self._programs.node_agent(node, self._journal.mint_ticket(node), devices)
            self.node_agents.start(node, msgspec.structs.replace(launch, kept={DEVICES: ",".join(devices)}))
        except OSError as error:
            log.error("node agent not started", node=node, cause=str(error))
            self.shell.node_agent_gone(node)

    def end_node_agent(self, node: NodeId) -> None:
        self._gateway.cut_node_agent(node)
        if self.node_agents.pid(node) is not None:
            self.node_agents.kill(node)
        self._end_soon(node)

    def _end_soon(self, node: NodeId) -> None:
        ending = self._spawn(f"residents of {node}", self._end_residents(node))
        self._endings.add(ending)
        ending.add_done_callback(self._endings.discard)

    async def _end_residents(self, node: NodeId) -> None:
        """End the residents of a node agent that is gone."""
        found = self._recorded(self._records, self._pool, f"{RESIDENTS} {node}")
        try:
            await end_left_over(found, 30.0)
        except TimeoutError:
            log.error("residents do not die", node=node)

    def send_to_node_agent(self, node: NodeId, message: w.ToNodeAgent) -> None:
        self._gateway.send_to_node_agent(node, message)

    def send_to_job(self, job: JobId, message: msgspec.Struct) -> None:
        self._gateway.send_to_job(job, message)

    def cut_job(self, job: JobId) -> None:
        self._gateway.cut_job(job)

    def resident(
        self,
        entry: JobEntry,
        placement: int,
        node: NodeId,
        phase: PhaseKind,
        ticket: w.WorkerTicketFrame | None,
        ranks: w.RankPlaces | None = None,
    ) -> w.StartResidentFrame:
        return self._programs.resident(entry, placement, node, phase, ticket, ranks)

    def start_job(self, entry: JobEntry, placement: int, restarts: int) -> None:
        ending: JobEnding | None = None
        with self._isolated.attempt(f"start of {entry.job}") as attempt:
            try:
                launch = self._programs.job(entry, placement)
                kept = {**launch.kept, "placement": str(placement), "restarts": str(restarts)}
                self.jobs.start(entry.job, msgspec.structs.replace(launch, kept=kept))
            except (OSError, ValueError) as error:
                ending = JobEnding("failed", f"its process could not be started: {error}")
        if attempt.fault:
            ending = JobEnding("died", f"its process could not be started: {attempt.fault}")
        if ending is not None:
            asyncio.get_running_loop().call_soon(self.shell.job_ended, entry.job, placement, ending)

    def stop_job(self, job: JobId, reason: str) -> None:
        if job not in self._stops:
            self._stops[job] = self._spawn(f"stop of {job}", self._stop(job, reason))

    async def _stop(self, job: JobId, reason: str) -> None:
        entry, kept = self.shell.entries[job], self.jobs.kept(job)
        control = self._control(Path(entry.directory))
        while job in self.jobs.names():
            with self._isolated.attempt(f"stop of {job}"):
                try:
                    await control.stop(f"pool: {reason}", f"{self._pool}-{kept.get('placement', '')}")
                    return
                except ControlError as error:
                    log.info("job not told to stop yet", job=job, cause=str(error))
            await asyncio.sleep(max(STOP_RETRY_S, self._isolated.wait_s(f"stop of {job}")))

    def kill_job(self, job: JobId) -> None:
        self.jobs.kill(job)

    def profile(self, entry: JobEntry) -> None:
        self._spawn(
            f"timing of {entry.job}",
            self._profile(entry),
            lambda cause: self.shell.not_profiled(entry.job, f"its steps cannot be timed: {cause}"),
        )

    async def _profile(self, entry: JobEntry) -> None:
        await self.profiles.settle(entry.job)
        try:
            self.profiles.start(entry.job, self._programs.profile(entry))
        except (OSError, ValueError) as error:
            self.shell.not_profiled(entry.job, f"its steps cannot be timed: {error}")

    def end_profile(self, job: JobId) -> None:
        self.profiles.kill(job)

    # What becomes of it.

    def _node_agent_over(self, node: str, _: Mapping[str, str], status: int | None) -> None:
        log.warning("node agent ended", node=node, status=status)
        self._end_soon(node)
        self.shell.node_agent_gone(node)

    def _job_over(self, job: str, kept: Mapping[str, str], status: int | None) -> None:
        stopping = self._stops.pop(job, None)
        if stopping is not None:
            stopping.cancel()
        with self._isolated.attempt(f"end of {job}") as attempt:
            ending = self._programs.ended(self.shell.entries[job], kept, status)
        if attempt.fault:
            ending = JobEnding("died", f"how its process ended cannot be read: {attempt.fault}")
        log.info("job's process ended", job=job, how=ending.how, cause=ending.cause)
        self.shell.job_ended(job, int(kept.get("placement", "0")), ending)

    def _profile_over(self, job: str, kept: Mapping[str, str], status: int | None) -> None:
        entry = self.shell.entries.get(job)
        if entry is None:
            return  # The job was over meanwhile.
        plan, cause = None, ""
        with self._isolated.attempt(f"timing of {job}") as attempt:
            try:
                plan = self._programs.profiled(entry, kept, status)
            except ValueError as error:
                cause = str(error)
        if plan is None:
            self.shell.not_profiled(job, f"its steps could not be timed: {cause or attempt.fault}")
        else:
            self.shell.profiled(job, plan)

    def fail(self, error: BaseException) -> None:
        """End the pool's process with this error."""
        self._failed = self._failed or error
        self._stirred.set()

    # The process's life.

    async def run(self, shell: PoolShell, *, anew: bool, stop: str) -> None:
        """Drive the shell until the pool was stopped. `stop` continues an earlier stop: "", "stop" or "now"."""
        self._shell = shell
        for job in self.profiles.found()[0]:
            self.profiles.kill(job)
        living, dead = self.node_agents.found()
        for node in dead:
            await self.node_agents.settle(node)
            await self._end_residents(node)
        running, ended = self.jobs.found()
        # Those that have ended are judged once the shell has taken them up.
        processes = {job: (int(kept["placement"]), int(kept["restarts"])) for job, kept in {**running, **ended}.items()}
        joined = self._journal.joined()
        gone = [node for node in self._journal.node_agents() if node not in living and node not in joined]
        known = dict.fromkeys(living, True) | dict.fromkeys((*gone, *dead), False)
        elsewhere = [node for node in joined if self._journal.ticket(node)[1]]
        devices = {node: filter(None, kept.get(DEVICES, "").split(",")) for node, kept in living.items()}
        theirs = {node: tuple(names) for node, names in devices.items()}
        shell.begin(known, processes, anew=anew, devices=theirs, elsewhere=elsewhere)
        for job, kept in ended.items():
            await self.jobs.settle(job)
            self._job_over(job, kept, None)
        self._gateway.serve(shell, self._programs)
        if stop:
            shell.stop(now=stop == "now")
        await self._drive(shell)

    async def _drive(self, shell: PoolShell) -> None:
        while not shell.over:
            self._stirred.clear()
            wakeup_ns = shell.next_wakeup_ns()
            wait_s = None if wakeup_ns is None else min(CLOCK_LOOK_S, max(0.0, (wakeup_ns - self.now_ns()) / 1e9))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._stirred.wait()
            if self._failed is not None:
                raise self._failed
            with self.attempting("time"):
                shell.pass_time()
            await asyncio.sleep(self._isolated.wait_s("time"))

    async def end_node_agents(self) -> None:
        """End node agents and their residents, and what times jobs, once the pool has been stopped."""
        for job in self.profiles.names():
            self.profiles.kill(job)
            await self.profiles.settle(job)
        await self._gateway.dismiss(self._journal.joined(), "the pool has been stopped", DISMISSAL_S)
        for node in self.node_agents.names():
            self._gateway.cut_node_agent(node)
            self.node_agents.kill(node)
            await self.node_agents.settle(node)
            await self._end_residents(node)
            self._journal.forget_node_agent(node)

    async def aclose(self) -> None:
        """Stop watching. Processes live on."""
        for processes in (self.node_agents, self.jobs, self.profiles):
            processes.close()
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _spawn(
        self, item: str, work: Coroutine[Any, Any, None], failed: Callable[[str], None] = lambda cause: None
    ) -> asyncio.Task[None]:
        """Work beside the shell, which is told by `failed` of what nobody expected."""

        async def attempt() -> None:
            with self._isolated.attempt(item) as attempt:
                await work
            if attempt.fault:
                failed(attempt.fault)

        task = asyncio.create_task(attempt(), name=item)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.fail(error)
