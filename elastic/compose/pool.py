"""A pool's process: its journal, its gateway, its shell and the processes that it starts, wired."""

import asyncio
import contextlib
import os
import shutil
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import structlog

from elastic.compose.job_files import BASE, OUTPUTS, PHASES_FILE, ScriptOutputs, files_of, keep, lacking
from elastic.compose.job_profile import JobProfileError, plan_of_run, profile_overrides
from elastic.compose.nanoseconds import in_nanoseconds
from elastic.compose.pool_config import POOL_CONFIG, PoolConfig, load_pool, phase_plan, pool_devices
from elastic.compose.pool_host import NAME_VARIABLE, NODE_VARIABLE, RECORDS_VARIABLE
from elastic.compose.processes import run_loop
from elastic.compose.run_endings import DIED, FAILED, FINISHED, INTERRUPTED, STOPPED, ending_of, world
from elastic.compose.runs import claimed, load_run_config, private, save_run_config
from elastic.config import ConfigError
from elastic.core.cluster import Cluster
from elastic.core.cluster.events import ClusterEvent
from elastic.core.cluster.types import JobId, KindName, NodeId, PhaseKind, PhasePlan
from elastic.core.ids import tagged
from elastic.pool import messages as w
from elastic.pool.client import (
    FINGERPRINT_VARIABLE,
    JOB_VARIABLE,
    POOL_VARIABLE,
    TOKEN_VARIABLE,
    TRAINS_VARIABLE,
    PoolMembership,
)
from elastic.pool.control import STOPPING, SUBMISSION_BYTES_MAX, PoolCommandManager, invalid
from elastic.pool.devices import DeviceAllotment
from elastic.pool.gateway import PoolGateway, PoolTokens
from elastic.pool.job_files import SCRIPT_LOG, SubmittedFile
from elastic.pool.job_processes import DetachedProcesses, ProcessLaunch
from elastic.pool.journal import PoolJournal, PoolJournalError, pool_secret
from elastic.pool.live import SET_ASIDE, LivePorts
from elastic.pool.machines import kind_of_node, node_names
from elastic.pool.node_files import JOBS
from elastic.pool.node_requests import NodeRequests
from elastic.pool.node_supply import NodeSupply
from elastic.pool.node_tickets import NodeTickets
from elastic.pool.ports import HowEnded, JobEnding, JobEntry, PoolTimes
from elastic.pool.shell import PoolShell
from elastic.protocol.control_socket import LineSocket
from elastic.protocol.endpoint import Address, Endpoint, is_loopback
from elastic.protocol.run_control import RunControl
from elastic.protocol.tls import Certificate, TlsError, run_certificate
from elastic.runtime.journal import CONFIG, JournalError, RunDirectory
from elastic.runtime.loop_watch import LoopWatch
from elastic.runtime.states import CHECKPOINTS
from elastic.system.boot_clock import Began
from elastic.system.devices import DEVICES_VARIABLE, DeviceName
from elastic.system.isolation import IsolatedLoop, LoopFaults
from elastic.system.logs import log_to
from elastic.system.processes import OF_SITE, beside_usual, inherited
from elastic.system.signals import TERMINATION, act_on
from elastic.system.supervision import RecordedProcesses
from providers.ray_connection import RayUnusable
from providers.ray_nodes import RayNodes

log = structlog.get_logger(__name__)

PHASES_VARIABLE = "ELASTIC_PHASES"
ELASTIC = (sys.executable, "-P", "-m", "elastic.cli")
RUN_LOG = Path("logs") / "process.log"
BEGAN, STOPPED_NS, ADDRESS = "began", "stopped_ns", "address"
"""Notes of a journal: when the pool's time began, how far it had come when the pool was stopped, where it listens."""
NODE_AGENT_START_NS = 60_000_000_000
GIVE_BACK_S = 60.0
"""For a cluster to take back what a stopped pool had of it."""


class PoolPrograms:
    """The programs of a pool's processes."""

    def __init__(self, config: PoolConfig, directory: Path, endpoint: Endpoint, tokens: PoolTokens) -> None:
        self._config, self._directory, self._endpoint, self._tokens = config, directory, endpoint, tokens

    def run_command(self, entry: JobEntry) -> Sequence[str]:
        return (*ELASTIC, "run", "--resume", entry.directory, "--providers", ",".join(("pool", *entry.providers)))

    def resident_command(self, entry: JobEntry, phase: PhaseKind) -> Sequence[str]:
        if phase is PhaseKind.TRAIN:
            return (*ELASTIC, "worker", "--trainer", entry.directory, "--resume")
        return (*ELASTIC, "pool-resident", entry.directory)

    def job_environment(self, entry: JobEntry, placement: int, *, elsewhere: bool = False) -> dict[str, str]:
        job, token = entry.job, self._tokens.job(entry.job, placement)
        at = _seen(self._config, self._endpoint) if elsewhere else self._endpoint
        return PoolMembership(endpoint=at, job=job, placement=placement, token=token).variables()

    def node_agent(self, node: NodeId, ticket: int, devices: Sequence[DeviceName]) -> ProcessLaunch:
        records = self._directory / "leases"
        environment = {
            **inherited(*OF_SITE),
            POOL_VARIABLE: self._endpoint.address,
            FINGERPRINT_VARIABLE: self._endpoint.fingerprint,
            NAME_VARIABLE: self._config.pool.name,
            NODE_VARIABLE: node,
            RECORDS_VARIABLE: str(records.resolve()),
            TOKEN_VARIABLE: self._tokens.ticket(node, ticket),
            DEVICES_VARIABLE: ",".join(devices),
        }
        log_path = self._directory / "logs" / f"node_agent-{node}.log"
        return ProcessLaunch(command=(*ELASTIC, "pool-host"), environment=environment, log=log_path)

    def job(self, entry: JobEntry, placement: int) -> ProcessLaunch:
        path = Path(entry.directory)
        kept = {"world": world(), "journals": str(len(RunDirectory(path).journal_paths()))}
        environment = {**inherited(), **entry.environment, **self.job_environment(entry, placement)}
        environment |= {TRAINS_VARIABLE: "1"} if self._config.trains_elsewhere else {}
        return ProcessLaunch(command=self.run_command(entry), environment=environment, log=path / RUN_LOG, kept=kept)

    def ended(self, entry: JobEntry, kept: Mapping[str, str], status: int | None) -> JobEnding:
        journals, its_world = int(kept.get("journals", "0")), kept.get("world", world())
        ending = ending_of(Path(entry.directory), RUN_LOG, journals, its_world, status)
        how: HowEnded = "failed"
        if ending.how in (FINISHED, STOPPED, FAILED):
            how = "finished" if ending.how == FINISHED else "stopped" if ending.how == STOPPED else "failed"
        elif ending.how in (DIED, INTERRUPTED):
            how = "died"
        return JobEnding(how, ending.cause)

    def resident(
        self,
        entry: JobEntry,
        placement: int,
        node: NodeId,
        phase: PhaseKind,
        ticket: w.WorkerTicketFrame | None,
        ranks: w.RankPlaces | None = None,
    ) -> w.StartResidentFrame:
        environment = {**entry.environment, JOB_VARIABLE: entry.job}
        elsewhere = kind_of_node(node) in self._config.joins
        if entry.script:
            environment |= self.job_environment(entry, placement, elsewhere=elsewhere)
            environment |= {PHASES_VARIABLE: entry.phases} if entry.phases else {}
        elif ticket is not None and ranks is not None and ranks.place:
            environment |= {"ELASTIC_RUN": ticket.run, "ELASTIC_WORKER": ticket.worker}
        elif ticket is not None:
            environment |= {
                "ELASTIC_JOIN": ticket.join,
                "ELASTIC_JOIN_FINGERPRINT": ticket.fingerprint,
                "ELASTIC_JOIN_TOKEN": ticket.token,
                "ELASTIC_RUN": ticket.run,
                "ELASTIC_WORKER": ticket.worker,
                "ELASTIC_ORCHESTRATOR_TIMEOUT_S": str(ticket.orchestrator_timeout_s),
            }
        if ticket is not None and ranks is not None:
            token = self._tokens.ranks(entry.job, ticket.worker)
            ranks = msgspec.structs.replace(
                ranks, token=token, interface=self._config.pool.interfaces.get(kind_of_node(node), "")
            )
        if elsewhere:
            return self._resident_elsewhere(entry, placement, node, phase, environment, ranks)
        return w.StartResidentFrame(
            job=entry.job,
            placement=placement,
            phase=phase,
            command=tuple(entry.script or self.resident_command(entry, phase)),
            environment=environment,
            directory=entry.directory if entry.script else os.getcwd(),
            log=str(self.logs(entry) / ("script.log" if entry.script else f"resident-{node}.log")),
            script=bool(entry.script),
            ranks=ranks,
        )

    def _resident_elsewhere(
        self,
        entry: JobEntry,
        placement: int,
        node: NodeId,
        phase: PhaseKind,
        environment: Mapping[str, str],
        ranks: w.RankPlaces | None,
    ) -> w.StartResidentFrame:
        """A resident that reads none of the pool's files. What it needs it gets by its run's own connections, or as
        files, into a directory of its job and this start; a script finds there what it has left before in this pool."""
        run = Path(entry.directory).name
        if entry.script:
            command, directory = _script_elsewhere(entry), f"{JOBS}/{entry.job}/{self._tokens.pool()}/{run}"
            environment = beside_usual(environment) | {PHASES_VARIABLE: PHASES_FILE if entry.phases else ""}
        else:
            at_home = msgspec.structs.replace(entry, directory=".")
            _, *words = self.resident_command(at_home if phase is PhaseKind.TRAIN else entry, phase)
            command, directory = (w.OWN_PYTHON, *words), f"{JOBS}/{entry.job}/{placement}/{run}"
        trains = phase is PhaseKind.TRAIN
        first = ranks is None or not ranks.place
        needs = trains or any(one.file.path.startswith(f"{BASE}/") for one in entry.files)
        return w.StartResidentFrame(
            job=entry.job,
            placement=placement,
            phase=phase,
            command=command,
            environment=dict(environment),
            directory=directory if needs else "",
            log=f"logs/{'script' if entry.script else 'resident'}-{entry.job}.log",
            script=bool(entry.script),
            files_token=self.files_token(entry.job, placement, node) if needs else "",
            returned=entry.outputs if entry.script else (CHECKPOINTS,) if trains and first else (),
            ranks=ranks,
        )

    def files_token(self, job: JobId, placement: int, node: NodeId) -> str:
        return self._tokens.files(job, placement, node)

    def files(self, entry: JobEntry, phase: PhaseKind) -> Sequence[SubmittedFile]:
        return files_of(entry, phase)

    def lacking(self, entry: JobEntry, placement: int, files: Sequence[w.JobFile]) -> Sequence[tuple[w.JobFile, Path]]:
        return self._outputs(entry, placement).lacking(files) if entry.script else lacking(entry, files)

    def keep(self, entry: JobEntry, placement: int, files: Sequence[w.JobFile]) -> Sequence[str]:
        return self._outputs(entry, placement).keep(files) if entry.script else keep(entry, files)

    def _outputs(self, entry: JobEntry, placement: int) -> ScriptOutputs:
        place = self._directory / OUTPUTS / entry.job / str(placement)
        return ScriptOutputs(place, self.logs(entry) / SCRIPT_LOG, entry.outputs)

    def profile(self, entry: JobEntry) -> ProcessLaunch:
        if entry.script:
            raise ValueError("a script says how long its phases take (job.plan)")
        if self._config.trains_elsewhere:
            raise ValueError("steps are timed on the pool's machine, and its training nodes are others (job.plan)")
        where = (self._directory / "profiles" / entry.job).resolve()
        shutil.rmtree(where, ignore_errors=True)
        path = Path(entry.directory)
        config = load_run_config(path, profile_overrides(load_run_config(path)))
        with private():
            where.mkdir(parents=True)
            save_run_config(where, config)
        command = (*ELASTIC, "run", "--resume", str(where), "--providers", "reserved")
        return ProcessLaunch(
            command=command,
            environment={**inherited(), **entry.environment},
            log=where / RUN_LOG,
            kept={"where": str(where)},
        )

    def profiled(self, entry: JobEntry, kept: Mapping[str, str], status: int | None) -> PhasePlan:
        """Return the plan in the form of `elastic jobs profile`."""
        where = Path(kept["where"])
        ending = ending_of(where, RUN_LOG, 0, world(), status)
        try:
            return phase_plan(plan_of_run(RunDirectory(where), load_run_config(where)))
        except (JobProfileError, JournalError) as error:
            raise ValueError(f"its run {ending.how}: {ending.cause or f'see {where / RUN_LOG}'}") from error

    def logs(self, entry: JobEntry) -> Path:
        """Return where a job's logs are: a run's in its directory, a script's in the pool's."""
        return (self._directory / "logs" / entry.job if entry.script else Path(entry.directory) / "logs").resolve()

    def admit(self, entry: JobEntry) -> JobEntry:
        """Return the record of a job as it is kept. Raises `ValueError` if it cannot be started."""
        path = Path(entry.directory)
        if not path.is_absolute() or not path.is_dir():
            raise ConfigError(f"job {entry.job}: directory: found {path}; allowed: an absolute one")
        if entry.script:
            return self._with_files(entry)
        if not (path / CONFIG).exists():
            raise ConfigError(f"job {entry.job}: {path} is no run's directory: it has no {CONFIG}")
        config = load_run_config(path)
        if self._config.joins and self._endpoint.fingerprint and not config.run.beyond_loopback:
            raise ConfigError(
                f"job {entry.job}: run.host: found {config.run.host}, which the pool's rollout nodes, on other "
                'machines, cannot dial; allowed: an address that they reach, such as "0.0.0.0" with run.advertise'
            )
        if self._config.trains_elsewhere and config.doors is not None:
            problem = "weights of trainers elsewhere are read on the pool's machine, and its training nodes are others"
            raise ConfigError(f"job {entry.job}: doors: found a section; {problem}; allowed: none")
        return msgspec.structs.replace(self._with_files(entry), max_restarts=config.job.max_restarts)

    def _with_files(self, entry: JobEntry) -> JobEntry:
        if self._config.trains_elsewhere and not entry.files:
            problem = "its files are not told, which the pool's training nodes, on other machines, are sent"
            raise ConfigError(f"job {entry.job}: {problem}; `elastic jobs submit` tells them")
        return entry


def _seen(config: PoolConfig, endpoint: Endpoint) -> Endpoint:
    """Return where other machines reach what listens there."""
    address = str(Address.parse(endpoint.address).seen_as(config.pool.advertise))
    return Endpoint(address, fingerprint=endpoint.fingerprint)


def _script_elsewhere(entry: JobEntry) -> tuple[str, ...]:
    """Return a script's command line on another machine: with its node agent's interpreter, if it has one."""
    first, *words = (PHASES_FILE if entry.phases and word == entry.phases else word for word in entry.script)
    return (w.OWN_PYTHON if Path(first).name.startswith("python") else first, *words)


@dataclass(frozen=True, kw_only=True)
class PoolWiring:
    """What a pool's process is put together from besides its configuration, as `LivePorts` has it. `after` is told what
    an event has made of the cluster."""

    programs: type[PoolPrograms] = PoolPrograms
    detached: Callable[..., DetachedProcesses] = DetachedProcesses
    recorded: Callable[[Path, str, str], Sequence[RecordedProcesses]] = RecordedProcesses.found
    control: Callable[[Path], RunControl] = RunControl
    line_socket: Callable[..., LineSocket] = LineSocket
    after: Callable[[Cluster, ClusterEvent], None] = lambda cluster, event: None
    faults: LoopFaults = field(default_factory=LoopFaults)


def run_pool(directory: Path, wiring: PoolWiring | None = None) -> int:
    """Be the process of the pool in this directory until it is stopped; returns the exit code.

    Raises `ConfigError` for a directory that is no pool's, or is another process's.
    """
    config = load_pool(directory / POOL_CONFIG)
    with private(), claimed(directory, what="pool"):
        logs = directory / "logs"
        logs.mkdir(mode=0o700, exist_ok=True)
        with (logs / "pool.log").open("ab") as file:
            log_to(file.fileno())
            try:
                run_loop(_watched(config, serve_pool(config, directory, wiring or PoolWiring())))
            except PoolJournalError as error:
                raise ConfigError(str(error)) from error
    return 0


async def _watched(config: PoolConfig, work: Coroutine[None, None, None]) -> None:
    """Serve a pool whose policies, where they are another package's, compute only so long."""
    with LoopWatch(lambda _: None, config.limits.plug_in_s).watching():
        await work


async def serve_pool(config: PoolConfig, directory: Path, wiring: PoolWiring) -> None:
    """Be the pool of this directory, which nobody else is, until it is stopped."""
    journal = PoolJournal(directory)
    cluster, last_ns = journal.open_pool(config.spec(), config.wait_limits(), config.policies(), config.policy_names)
    tokens = PoolTokens(pool_secret(directory))
    clusters = await _ray_nodes(config, tokens, anew=not _goes_on(journal))
    began, anew = _began(journal, last_ns)
    limits = config.limits
    set_aside = msgspec.json.decode(journal.note(SET_ASIDE) or "{}", type=dict[DeviceName, str])
    devices = DeviceAllotment(pool_devices(config), set_aside)
    isolated = IsolatedLoop("pool", wiring.faults, clock=asyncio.get_running_loop().time)
    welcome = w.NodeAgentWelcome(
        "", limits.silence_s, limits.orphan_s, limits.measure_s, limits.stall_s, limits.still_s
    )
    gateway = PoolGateway(tokens, journal, welcome, isolated)
    certificate = _certificate(config, directory)
    address = await _listen(gateway, config, journal, certificate)
    fingerprint = "" if certificate is None else certificate.fingerprint
    # Node agents and jobs that are this process's children dial the machine that they are on.
    endpoint = Endpoint(str(Address.parse(address).here()), fingerprint=fingerprint)
    node_tickets = _node_tickets(config, journal, tokens, address, fingerprint)
    made = wiring.programs(config, directory, endpoint, tokens)
    ports = LivePorts(
        directory,
        config.pool.name,
        journal,
        gateway,
        made,
        lambda: max(last_ns, began.since_ns()),
        isolated,
        wiring.detached,
        wiring.recorded,
        wiring.control,
    )
    times = in_nanoseconds(PoolTimes, limits, node_agent_start_ns=NODE_AGENT_START_NS)

    def after(event: ClusterEvent) -> None:
        wiring.after(shell.cluster, event)

    markets, joins = config.markets, config.joins
    shell = PoolShell(cluster, ports, times, journal.entries(), after, markets, devices=devices, joins=joins)
    supplies: list[NodeSupply] = []
    for name, ray in clusters.items():
        requests = NodeRequests(node_names(name, joins[name].kind.nodes), times.retry_ns)
        supplies.append(NodeSupply(ray, requests, shell, node_tickets, isolated))

    def asked_for() -> dict[NodeId, str]:
        return {node: words for supply in supplies for node, words in supply.told().items()}

    command_manager = PoolCommandManager(
        config.pool.name, shell, journal, made.admit, ports.jobs.pid, made.logs, node_tickets, asked_for
    )
    socket = wiring.line_socket(directory, command_manager.answer, invalid, SUBMISSION_BYTES_MAX)
    heed_no_more = _stops_by_signal(shell, journal)
    log.info("pool's process begins", pool=config.pool.name, events=journal.events, address=address, anew=anew)
    try:
        running = asyncio.create_task(ports.run(shell, anew=anew, stop=journal.note(STOPPING)), name="pool's shell")
        await asyncio.sleep(0)
        await socket.start()
        async with _kept(supplies):
            await running
        await ports.end_node_agents()
        for supply in supplies:
            await supply.give_all_back(GIVE_BACK_S)
        journal.set_note(STOPPING, "")
        journal.set_note(STOPPED_NS, str(ports.now_ns()))
        journal.note_state(cluster, at_once=True)
    finally:
        heed_no_more()
        await socket.aclose()
        await gateway.aclose()
        await ports.aclose()
        for ray in clusters.values():
            await ray.aclose()
        journal.close()


async def _ray_nodes(config: PoolConfig, tokens: PoolTokens, *, anew: bool) -> Mapping[KindName, RayNodes]:
    """Return the Ray clusters that the pool asks for nodes, by the kinds of those. Raises `ConfigError` if the pool
    cannot begin with one; a pool that goes on waits for it."""
    clusters: dict[KindName, RayNodes] = {}
    arenas = 0
    for name, settings in config.clusters.items():
        kind, tag = config.joins[name].kind, tagged(config.pool.name, tokens.ticket(f"ray {name}", 0))
        clusters[name] = RayNodes(settings, tag, kind, config.pool.devices, arenas)
        arenas += kind.nodes * kind.gpus
        try:
            await clusters[name].open()
        except RayUnusable as error:
            if anew:
                raise ConfigError(f"pool.{name}.ray: {error}") from error
            log.warning("the pool goes on without its cluster", cause=str(error))
    return clusters


@contextlib.asynccontextmanager
async def _kept(supplies: Sequence[NodeSupply]) -> AsyncIterator[None]:
    """A context in which nodes are asked for and given back."""
    running = [asyncio.create_task(supply.run(), name="nodes that are asked for") for supply in supplies]
    try:
        yield
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


def _node_tickets(
    config: PoolConfig, journal: PoolJournal, tokens: PoolTokens, address: str, fingerprint: str
) -> NodeTickets:
    """Return the tickets of a pool that listens at this address."""
    seen = _seen(config, Endpoint(address, fingerprint=fingerprint))
    return NodeTickets(journal, tokens, config.pool.name, seen, config.joins, asked=config.clusters)


def _began(journal: PoolJournal, last_ns: int) -> tuple[Began, bool]:
    """When the pool's time began, and whether nothing of it was left running: time stood still meanwhile."""
    if _goes_on(journal):
        return msgspec.json.decode(journal.note(BEGAN), type=Began), False
    now, past_ns = Began.now(), max(int(journal.note(STOPPED_NS) or "0"), last_ns)
    began = Began(now.boot, now.boottime_ns - past_ns, now.unix_ns - past_ns)
    journal.set_note(BEGAN, msgspec.json.encode(began).decode())
    journal.set_note(STOPPED_NS, "")
    return began, True


def _goes_on(journal: PoolJournal) -> bool:
    """Whether an earlier process of the pool has not stopped it."""
    return bool(journal.note(BEGAN)) and not journal.note(STOPPED_NS)


def _certificate(config: PoolConfig, directory: Path) -> Certificate | None:
    """Raises `ConfigError`."""
    if is_loopback(config.pool.host):
        return None
    try:
        return run_certificate(directory, [config.pool.host])
    except (OSError, TlsError) as error:
        raise ConfigError(f"pool.host {config.pool.host}: no certificate can be made for TLS: {error}") from error


async def _listen(
    gateway: PoolGateway, config: PoolConfig, journal: PoolJournal, certificate: Certificate | None
) -> str:
    """Listen at the address of an earlier process, so that node agents and jobs find this one."""
    noted = journal.note(ADDRESS)
    port = Address.parse(noted).port if noted else config.pool.port
    try:
        address = await gateway.start(config.pool.host, port, certificate)
    except OSError as error:
        raise ConfigError(f"pool.port: cannot listen on {Address(config.pool.host, port)}: {error.strerror}") from error
    journal.set_note(ADDRESS, address)
    return address


def _stops_by_signal(shell: PoolShell, journal: PoolJournal) -> Callable[[], None]:
    """The first signal stops the pool at its jobs' step ends, a second one at once; returns what ends that."""

    def stop() -> None:
        now = shell.stopping
        journal.set_note(STOPPING, "now" if now else "stop")
        shell.stop(now=now)

    return act_on(TERMINATION, stop)
