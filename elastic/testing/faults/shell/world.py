"""A run's world: its orchestrator, workers and trainer, as production code among models."""

import contextlib
import hashlib
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, TypeVar

import msgspec

from elastic.compose.agents import agent_limits
from elastic.compose.checkpoints import discard_checkpoint
from elastic.compose.incarnations import PreviousIncarnation, journaled, previous_incarnation
from elastic.compose.plan import TRAINER_PROVIDER, RunPlan, resolve
from elastic.compose.scheduling import limits, policies, run_plan
from elastic.config import OUTSIDE, Config, validate
from elastic.core.scheduler import Scheduler
from elastic.core.types import Nanoseconds, WorkerId, WorkerRole
from elastic.pool.client import PoolClient
from elastic.protocol import wire
from elastic.protocol.endpoint import Endpoint
from elastic.protocol.run_control import Acknowledged, CapProvider, SetBudget, StopRun
from elastic.protocol.run_secrets import RunSecrets
from elastic.protocol.ticket_store import TicketBook
from elastic.runtime.agents import AgentsWiring
from elastic.runtime.journal import RUNNING, JournalError, RunDirectory, SqliteJournal
from elastic.runtime.orchestrator import Orchestrator, Wiring
from elastic.system.host import here
from elastic.testing.faults.kinds import FaultKind
from elastic.testing.faults.outcome import Lived
from elastic.testing.faults.shell.agents.agents import POLICIES, Agents
from elastic.testing.faults.shell.agents.fronts import WorldFronts
from elastic.testing.faults.shell.answers import intervals
from elastic.testing.faults.shell.cloud import Cloud, CloudProvider
from elastic.testing.faults.shell.disk import Disk
from elastic.testing.faults.shell.hosts import HostProcess, WorldHosts
from elastic.testing.faults.shell.loops import Machine
from elastic.testing.faults.shell.models import (
    STOP,
    VOCABULARY,
    LoadWatch,
    ModelDevice,
    ModelEngine,
    ModelEnvironment,
    ModelFailure,
    ModelPool,
    ModelTrainer,
    NoSettings,
    TrainedGroup,
    Weights,
)
from elastic.testing.faults.shell.network import NetworkLoop
from elastic.testing.faults.shell.oracle import ALL, CANNOT_START, Oracle
from elastic.testing.faults.shell.plan import WorldPlan
from elastic.testing.faults.shell.process import Process
from elastic.testing.faults.shell.ranks import TrainerRanks, whole
from elastic.testing.faults.shell.relay import RelayStore
from elastic.testing.faults.shell.stage import Stage
from elastic.testing.faults.shell.threads import loop_here
from elastic.weights.rights import RelayRights
from elastic.weights.source import RelaySource
from elastic.worker.accounts import DeviceAccounts
from elastic.worker.agent import AgentExit, BuildEngine, run_agent
from elastic.worker.connection import Ticket
from elastic.worker.idle_engine import IdleEngine, idle_engine
from elastic.worker.trainer.base import saved
from elastic.worker.trainer_host import TrainerHost
from functions.base import Meter
from providers.base import Provider, ProviderContext, WorkerTicket
from providers.joined import JoinedProvider
from providers.markets import JoinedSettings
from providers.pending_workers import PendingWorkers
from providers.pool import JobContext

EngineT = TypeVar("EngineT", bound=ModelEngine)

RUN = "run"
ADDRESS = "10.0.0.1"
"""The orchestrator's address for other machines."""
RELAY_PORT = 50_000
MOVES = 1 / 3
"""Share of incarnations that serve the relay at another port than the one before."""
ELASTIC = "reserved"
JOINED = "joined"
ORCHESTRATOR_TIMEOUT_S = 20.0
PULL_TIMEOUT_S = 10.0
LIVENESS_S = 240.0
"""Time for the run to end after the last fault, if turns are short."""
TURNS_MAX = 4
AGENT_TURNS = 3
"""How many times as many turns agents may ask for: they fork, and call in parallel."""
STOPPED = "somebody had it stop"
"""The reason of a stop after which a user resumes the run."""
OUT_OF_STEP = "out of step with the journal"
SINCE_BEFORE_S = 12.0
"""Longest fault of a machine from before it became a worker."""
COMMANDED = 2
"""How often each command is sent; repetitions are only acknowledged."""
NEVER_S = 1e9
"""Validity of a machine's ticket: longer than any jump of the calendar."""
NO_DESCRIPTORS = "no file descriptor was left"
"""The reason of a run that cannot read its journal for lack of descriptors."""
BEGIN_AGAIN_S = 1.0
"""Time after which a user resumes a run that ended for lack of disk or descriptors, or of a trainer."""


def busy_now_and_then(for_s: float) -> float:
    """How long a thread has computed that is full and idle in turn, each `for_s` long, so that workers are told to
    flush rarely, and often again."""
    turns, rest_s = divmod(here().monotonic(), 2 * for_s)
    return turns * for_s + min(for_s, rest_s)


def config_of(plan: WorldPlan, checkpoint: str = "none") -> Config:
    return validate(Config, settings_of(plan, checkpoint), "chaos")


def settings_of(plan: WorldPlan, checkpoint: str = "none") -> dict[str, dict[str, Any]]:
    """The sections of the run's configuration."""
    long = plan.token_s > 1
    outside = {"name": OUTSIDE, "settings": {"deadline_s": plan.deadline_s, "idle_s": plan.idle_s}}
    return {
        "run": {
            "name": RUN,
            "seed": plan.seed,
            "steps": plan.steps,
            "orchestrator_timeout_s": ORCHESTRATOR_TIMEOUT_S,
            "host": ADDRESS if plan.far else "127.0.0.1",
        },
        "model": {"checkpoint": checkpoint},
        "rollout": {
            "groups": plan.groups,
            "group_size": 2,
            "max_turns": 1 if long else AGENT_TURNS * plan.max_turns if plan.agents else plan.max_turns,
            "max_tokens_per_turn": plan.max_tokens,
            "staleness_bound": plan.staleness_bound,
            "staleness_drop": plan.staleness_drop if plan.staleness_bound else "group",
            "refill_most": plan.refill_most,
            # Environments may be down for as long as a short run takes.
            "max_failed_share": 1,
        },
        "trainer": {
            "updates_per_step": 1,
            "max_restarts": 1000,
            "checkpoint_every_steps": plan.checkpoint_every,
            "step_timeout_s": 30,
            "gpus": plan.ranks,
        },
        "engine": {"max_context_tokens": 4096, "max_batch": plan.max_batch, "max_pending": plan.max_pending},
        "seeding": {"window_s": 0.2, "reserved_engines": 2, "policy": "auto" if plan.ranks == 1 else "none"},
        "scheduler": {
            "boot_timeout_s": 20,
            "load_timeout_s": 20,
            "retry_base_s": 0.2,
            "retry_max_s": 2,
            "heartbeat_interval_s": 5 if long else 0.5,
            "heartbeat_timeout_s": 15 if long else 3,
            "stall_timeout_s": 100 if long else 4,
            "turn_stall_timeout_s": 100 if long else 20,
        },
        # Of turns that take hours, a second tells nothing.
        **({"balancing": {"interval_s": 10}} if long else {}),
        **({"evaluation": {"every": 1, "samples": 2, "tasks": plan.evaluates}} if plan.evaluates else {}),
        "rewards": {"timeout_s": 2, "max_retries": plan.reward_retries},
        "environment": {"step_timeout_s": 3, **(outside if plan.agents else {})},
        **({"front": {"policies": POLICIES}} if plan.agents else {}),
        "weights": {
            "mode": "keep",
            "pull_timeout_s": PULL_TIMEOUT_S,
            "keyframe_every": plan.keyframe_every,
            "merge_every": plan.merge_every,
            "keep_versions": 2,
        },
        "journal": {
            "durable_against": plan.durable_against,
            "pending_mb": plan.pending_mb,
            "commit_interval_s": 5 if long else 0.1,
        },
        "providers": {ELASTIC: {"max_workers": plan.places}, JOINED: {}},
    }


class World:
    """A run of the production shell, among the processes of a stage."""

    name = ""

    def __init__(self, plan: WorldPlan, stage: Stage) -> None:
        self.plan, self.stage = plan, stage
        self.clock, self.network = stage.clock, stage.network
        self.after, self.until_ns, self.begin_process = stage.after, stage.until_ns, stage.begin_process
        self.chance = Random(f"{plan.seed}/world")
        self.oracle = Oracle(lambda: self.clock.now_ns, Random(f"{plan.seed}/oracle"), stage.found)
        self.network.dialled = self._dialled
        self.disk = Disk(
            Random(f"{plan.seed}/disk"),
            loses_power=any(fault.kind is FaultKind.POWER for fault in plan.faults),
            lies=plan.lying_disk,
        )
        self.machine = Machine(self.clock)
        """The orchestrator's."""
        self.machine.connect = self.disk.connect
        self.weights = Weights()
        self.seen: dict[str, TrainedGroup] = {}
        """What the trainer has made of each group, as it was last given that."""
        self.incarnations = 0
        self.result: str | None = None
        self.orchestrator: Process | None = None
        self.shell: Orchestrator | None = None
        """What runs in the orchestrator's process."""
        self.acknowledged: list[str] = []
        """Commands that were said to be durable, by their ids."""
        self.began_anew = False
        """Whether a user has resumed a run that had failed. It goes on from the trainer's checkpoint."""
        self.address = ""
        longest_turn_s = plan.max_tokens * plan.token_s
        self.rare_s = longest_turn_s / 100
        """Pause between two looks that would take most of a world's time in runs of hours."""
        self.intervals = intervals(longest_turn_s)
        self.relay = RelayStore(Random(f"{plan.seed}/relay"), lambda: self.clock.now_ns)
        self.relay.asked = lambda url: self.oracle.asks(loop_here(), url)
        self.network.serve_http = self.relay.transport
        self.down_until_ns: dict[FaultKind, Nanoseconds] = {}
        """The times until which environments and functions are down."""
        self._relay_port = RELAY_PORT
        self._weights_of: dict[tuple[str, int], bytes] = {}
        """The bits that a trainer's process, known by its key, has as a version."""
        self._workers: dict[WorkerId, Process] = {}
        self._hosts: dict[WorkerId, TrainerHost] = {}
        """The trainers' that have weights, by their workers."""
        self._ranks: dict[WorkerId, TrainerRanks] = {}
        """The ranks of trainers that have several, by their workers."""
        self._building: dict[WorkerId, None] = {}
        """Trainers that have been told of a relay, and hear of no other one before their engine is built."""
        self._machines: dict[str, Process] = {}
        """Those that come by themselves, by their tickets."""
        self.run = RunDirectory(stage.directory / self.name / RUN)
        self.run.path.mkdir(parents=True)
        self._tickets = _Tickets(self.run.path, self._spent)
        self.config = self._configured()
        self.providers = [ELASTIC, JOINED] if plan.machines else [ELASTIC]
        make = lambda name, role, places, life_s=None: Cloud(  # noqa: E731
            name, role, places, Random(f"{plan.seed}/{name}"), self.after, self._boot, self._end_worker, life_s
        )
        self.agents: Agents | None = None
        if plan.agents:
            found = lambda what: stage.found.append(AssertionError(what))  # noqa: E731
            self.agents = Agents(Random(f"{plan.seed}/agents"), plan.groups, plan.scored, found)
        self._agents: Process | None = None
        self.hosts: dict[str, HostProcess] = {}
        """Env workers, by name."""
        self.clouds = {
            TRAINER_PROVIDER: make(TRAINER_PROVIDER, WorkerRole.TRAINER, 1),
            ELASTIC: make(ELASTIC, WorkerRole.ELASTIC, plan.places, plan.life_s),
        }

    def _configured(self) -> Config:
        if not self.plan.agents:
            return config_of(self.plan)
        checkpoint = self.stage.directory / "model"
        checkpoint.mkdir()
        (checkpoint / "config.json").write_text(json.dumps({"vocab_size": VOCABULARY, "eos_token_id": STOP}))
        return config_of(self.plan, str(checkpoint))

    def _pool(self) -> contextlib.AbstractAsyncContextManager[PoolClient | None]:
        """A context: the connection to the pool of which the run is a job."""
        return contextlib.nullcontext()

    # The world's life

    def begin(self) -> None:
        self.begin_orchestrator()
        for _ in range(self.plan.machines):
            self.after(self.chance.uniform(0, 5), self._join)
        if self.agents is not None:
            self._agents = self.begin_process("agents", Machine(self.clock), self.agents.live)

    @property
    def limit_s(self) -> float:
        plan = self.plan
        turns = plan.steps * plan.groups * TURNS_MAX
        waits_s = 2 * plan.steps * (plan.deadline_s + plan.idle_s) if plan.agents else 0.0
        return plan.end_s + LIVENESS_S + waits_s + 4 * turns * plan.max_tokens * plan.token_s

    def is_over(self) -> bool:
        return self.result is not None

    def status(self) -> str:
        return f"result {self.result!r}"

    # Processes

    def _dialled(self, loop: NetworkLoop) -> None:
        if any(worker.loop is loop for worker in self.workers()):
            self.oracle.dialled(loop)

    def workers(self) -> list[Process]:
        """Return the run's workers, with the trainer's, and machines that are about to join."""
        machines = self._machines.values()
        return [process for process in self.stage.alive if process.name in self._workers or process in machines]

    def kill(self, process: Process, *, noticed: bool) -> None:
        """Kill a process. If `noticed`, its peers are told; its provider learns of it sooner or later."""
        if not process.alive:
            return
        self.stage.kill(process, noticed=noticed)
        for cloud in self.clouds.values():
            cloud.exited(process.name)
        if process in self._machines.values():
            self.after(self.chance.uniform(0.1, 10), self._join)

    def command(self, make: Callable[[str], CapProvider | SetBudget | StopRun]) -> bool:
        """Send the run a command under a new id; returns whether a process hears it."""
        orchestrator, shell = self.orchestrator, self.shell
        if orchestrator is None or shell is None or not self.address:
            return False
        request = make(f"command-{next(self.stage.numbers)}")

        async def ask() -> None:
            for _ in range(COMMANDED):
                if isinstance(await shell.command_manager.answer(request), Acknowledged):
                    self.acknowledged.append(request.id)

        orchestrator.loop.create_task(ask(), context=orchestrator.loop.context)
        return True

    def begin_orchestrator(self) -> None:
        self.incarnations += 1
        self.orchestrator = self.begin_process(f"orchestrator {self.incarnations}", self.machine, self._orchestrate)

    def crash_orchestrator(self, down_s: float) -> None:
        """Kill the orchestrator and start another one after a while."""
        if self.orchestrator is None:
            return
        self.kill(self.orchestrator, noticed=True)
        self._begin_again(down_s)

    def _begin_again(self, down_s: float) -> None:
        self.oracle.ails(ALL, down_s)
        self.began_anew |= self.shell is not None and CANNOT_START in self.shell.scheduler.failed
        self.orchestrator = self.shell = None
        self.address = self.relay.url = ""
        for cloud in self.clouds.values():
            cloud.listener = None
        self.after(down_s, self.begin_orchestrator)

    async def _orchestrate(self) -> str:
        """Run an orchestrator as `elastic.compose.execute` does, around models."""
        run, plan = self.run, self.plan
        resolved = resolve(self.config, self.providers, "chaos")
        config = resolved.config
        former = previous_incarnation(run, config) if self.incarnations > 1 else PreviousIncarnation()
        pending_workers = PendingWorkers(self._tickets)
        scheduler = Scheduler(run_plan(resolved), limits(config), policies(config), 0)
        secrets = RunSecrets(b"%32d" % plan.seed)
        notes = {
            "run": RUN,
            "status": RUNNING,
            "config": config.model_dump_json(),
            "providers": self.providers[0],
            "seed": str(config.run.seed),
        } | former.notes_to_keep()
        journal = SqliteJournal(
            run.next_journal_path(),
            config.journal.commit_interval_s,
            durable_against=config.journal.durable_against,
            pending_bytes=round(config.journal.pending_mb * 2**20),
            notes=notes,
        )
        self.oracle.follow(scheduler)
        self._serve_relay(RelayRights(secrets.relay_owner()))
        async with self._pool() as pool:
            with journaled(journal, scheduler) as ending:
                wiring = Wiring(
                    make_providers=partial(self._make_providers, pending_workers, pool),
                    token_level=dict.fromkeys(resolved.token_level, None if plan.hosts else self.make_environment),
                    make_hosts=partial(WorldHosts, self, resolved.token_level[0]) if plan.hosts else None,
                    welcome=self._welcome(),
                    secrets=secrets,
                    kept=run,
                    discard=partial(discard_checkpoint, run.path),
                    make_reward_pool=self._functions if plan.scored else None,
                    engines={name: config.engine.model_dump(mode="json") for name in (*self.clouds, *self.providers)},
                    relays={TRAINER_PROVIDER: self.relay.url},
                    relay_rights=self.relay.rights,
                    resident=resolved.in_turns.keys(),
                    pending_workers=pending_workers if plan.machines else None,
                    pool=pool,
                    agents=self._agents_wiring(resolved),
                    control_socket=False,
                    sample_interval_s=max(0.5, self.rare_s),
                )
                orchestrator = Orchestrator(
                    config,
                    scheduler,
                    journal,
                    wiring,
                    former.taken_up(),
                    told=former.told,
                    decided=partial(self.oracle.hear, scheduler),
                    clock_ns=self.machine.boottime_ns,
                    suspended_ns=self.machine.suspended_ns,
                    busy_s=partial(busy_now_and_then, self.plan.busy_s),
                )
                self.shell = orchestrator
                if pool is not None:
                    pool.turned_away = orchestrator.kill
                failed = await orchestrator.run()
                ending.conclude(failed, scheduler.stopped)
        return failed or scheduler.stopped

    def make_environment(self) -> ModelEnvironment:
        return ModelEnvironment(NoSettings(), partial(self._failure, FaultKind.ENVIRONMENT))

    def _agents_wiring(self, plan: RunPlan) -> AgentsWiring | None:
        limits = agent_limits(plan)
        return None if limits is None else AgentsWiring(limits=limits, make_fronts=WorldFronts)

    def _serve_relay(self, rights: RelayRights) -> None:
        """Serve the relay at its last port, unless that port is taken."""
        elsewhere = self.incarnations > 1 and self.chance.random() < MOVES
        for trainer in self._building if elsewhere else ():
            self.oracle.doomed(trainer)
        self._relay_port += elsewhere
        self.relay.url, self.relay.rights = f"http://{ADDRESS}:{self._relay_port}", rights

    def _failure(self, of: FaultKind) -> ModelFailure | None:
        """Return what goes wrong with an environment, or a function, if anything does."""
        if self.clock.now_ns >= self.down_until_ns.get(of, 0) or self.chance.random() < 2 / 3:
            return None
        return self.chance.choice((ModelFailure.RAISES, ModelFailure.HANGS))

    def _functions(self, meter: Meter) -> ModelPool:
        return ModelPool(meter, partial(self._failure, FaultKind.FUNCTIONS))

    def _make_providers(
        self,
        pending_workers: PendingWorkers,
        pool: PoolClient | None,
        endpoint: Endpoint,
        now_ns: Callable[[], Nanoseconds],
    ) -> dict[str, Provider]:
        self.address = endpoint.address
        make_context = ProviderContext if pool is None else partial(JobContext, pool=pool)
        context = make_context(
            run=RUN,
            run_dir=self.run.path,
            endpoint=endpoint,
            worker_command=(),
            pending_workers=pending_workers,
            now_ns=now_ns,
            acquire_timeout_s=self.config.scheduler.acquire_timeout_s,
            release_timeout_s=self.config.scheduler.release_timeout_s,
            orchestrator_timeout_s=self.config.run.orchestrator_timeout_s,
        )
        return self._providers(context)

    def _providers(self, context: ProviderContext) -> dict[str, Any]:
        found: dict[str, Any] = {name: CloudProvider(cloud, context) for name, cloud in self.clouds.items()}
        if self.plan.machines:
            found[JOINED] = JoinedProvider(JOINED, JoinedSettings.model_validate({}), context)
        return found

    def _welcome(self) -> wire.Welcome:
        s = self.config.scheduler
        return wire.Welcome(
            session_key="",
            epoch=0,
            heartbeat_interval_s=s.heartbeat_interval_s,
            flush_interval_s=s.flush_interval_s,
            silence_timeout_s=s.heartbeat_timeout_s * 2 / 3,
            engine=self.config.engine.model_dump(mode="json"),
            model={"vocab_size": VOCABULARY},
            relay=self.relay.url,
            resume_timeout_s=self.config.resume_timeout_s,
            pull_timeout_s=self.config.weights.pull_timeout_s,
            load_timeout_s=s.load_timeout_s,
            drain_timeout_s=4.0,
            run=RUN,
            orchestrator_timeout_s=ORCHESTRATOR_TIMEOUT_S,
        )

    def _boot(self, endpoint: Endpoint, ticket: WorkerTicket, trains: bool) -> None:
        bought = Ticket(
            endpoint=endpoint, run=RUN, worker=ticket.worker, token=ticket.token, wait_s=ORCHESTRATOR_TIMEOUT_S
        )
        self._workers[ticket.worker] = self._begin_worker(ticket.worker, bought, trains)

    def _join(self) -> None:
        """Start a worker on a machine with a ticket. Its name in the run is not known yet."""
        if self.result is not None:
            return
        if not self.address:
            self.after(BEGIN_AGAIN_S, self._join)
            return
        terms, token = self._tickets.mint("", None, NEVER_S)
        bought = Ticket(
            endpoint=Endpoint(self.address),
            run=RUN,
            worker="",
            token=token,
            wait_s=ORCHESTRATOR_TIMEOUT_S,
            ticket=terms.ticket,
        )
        self._machines[terms.ticket] = self._begin_worker(terms.ticket, bought, False)

    def _spent(self, ticket: str, worker: WorkerId) -> None:
        process = self._machines[ticket]
        process.name, self._workers[worker] = worker, process
        self.oracle.ails(worker, SINCE_BEFORE_S)
        if self.oracle.has_lied(ticket):
            self.oracle.lies(worker)
        if ticket in self.oracle.lasting:
            self.oracle.lies_on(worker)
        if ticket in self.oracle.impostors:
            self.oracle.impostor(worker)

    def _begin_worker(self, name: str, bought: Ticket, trains: bool) -> Process:
        """Start a worker of a provider. Its device is shared with the owner if the provider lends it."""
        machine = Machine(self.clock, 1 + self.chance.uniform(-self.plan.drift, self.plan.drift))
        device = ModelDevice(lambda: self.clock.now_ns)

        def engine(_: wire.Welcome) -> ModelEngine:
            return self._engine(process, ModelEngine)

        async def work() -> AgentExit:
            accounts = DeviceAccounts(machine.monotonic_ns())
            if not trains:
                share = None if bought.ticket else device
                return await run_agent(bought, engine, share=share, accounts=accounts, intervals=self.intervals)
            host = self._trainer_host(name, engine)
            return await run_agent(bought, host.build_engine, trainer=host, accounts=accounts, intervals=self.intervals)

        if self.network.is_taken(bought.endpoint.address):
            self.oracle.doomed(name)
        process = self.begin_process(name, machine, work, device)
        return process

    def _engine(self, process: Process, make: Callable[..., EngineT]) -> EngineT:
        """Make the engine of a process, which knows its orchestrator's relay from now on."""
        self._building.pop(process.name, None)
        sizes = self.plan.max_batch, self.plan.max_pending, self.plan.token_s
        return make(process.loop.machine.monotonic_ns, process.device, *sizes, WorkerWatch(self, process))

    def _trainer_host(
        self,
        worker: WorkerId,
        engine: BuildEngine,
        make: Callable[..., ModelTrainer] = ModelTrainer,
        shares_device: bool = False,
    ) -> TrainerHost:
        def has(version: int, bits: bytes) -> None:
            self._hosts[worker] = host
            self._weights_of[host.publisher, version] = bits

        ranks = TrainerRanks(self.plan.ranks, lambda: self.clock.now_ns)

        def trainer(config: Config) -> ModelTrainer:
            self._building[worker] = None
            self._ranks |= {worker: ranks} if ranks.size > 1 else {}
            known = self._learnt, has, self.seen.__setitem__, self.config.trainer.mismatch_max, self.plan.proves
            return make(*known, ranks)

        poll_s = max(1.0, self.rare_s)
        build = engine if ranks.size == 1 else partial(self._no_engine, worker)
        host = TrainerHost(self.config, self.run.path, True, trainer, build, shares_device, poll_s)
        return host

    def _no_engine(self, worker: WorkerId, welcome: wire.Welcome) -> IdleEngine:
        """Return the engine of a trainer whose device does not generate."""
        self._building.pop(worker, None)
        return idle_engine(welcome)

    def ranks_of(self, worker: WorkerId) -> TrainerRanks | None:
        """Those of a trainer with several, once it is made."""
        return self._ranks.get(worker)

    def half_checkpoints(self) -> list[str]:
        """Those of a trainer of several ranks that lack a part of any."""
        found = saved(self.run.path / "checkpoints") if self.plan.ranks > 1 else []
        return [path.name for path in found if not whole(path, self.plan.ranks)]

    def _learnt(self, weights: Weights) -> None:
        self.weights = weights

    def applied(self, source: RelaySource, bits: bytes) -> None:
        """Note that a worker serves with `bits` as the version that it was told to pull."""
        if bits != self._weights_of.get((source.publisher, source.version)):
            self.oracle.found.append(AssertionError(f"weights served that are not those of version {source.version}"))

    def _end_worker(self, worker: WorkerId) -> None:
        process = self._workers.get(worker)
        if process is not None and process.alive:
            self.oracle.ails(worker)
            self.stage.kill(process, noticed=True)

    def ended(self, process: Process) -> None:
        """Note that a process has ended by itself."""
        self.kill(process, noticed=True)
        if process.name in self._workers:
            end = process.main.result()
            self.oracle.left(process.name, end)
            if OUT_OF_STEP in end.reason and not self.disk.forgot:
                self.oracle.found.append(AssertionError(f"{process.name} has left: {end.reason}"))
            if not end.code and process.name in self._hosts:
                self._kept(process.name, self._hosts[process.name])
        if process is self._agents or process.name in self.hosts:
            process.main.result()
        if process is not self.orchestrator:
            return
        error = process.main.exception()
        result = "" if error else process.main.result()
        # Where the disk has forgotten orders, the trainer that has carried them out is refused, and the run ends.
        refused = self.disk.forgot and OUT_OF_STEP in result
        wants = isinstance(error, JournalError | OSError) or NO_DESCRIPTORS in result
        # A user mends what kept the trainer from starting, and resumes the run.
        unable = CANNOT_START in result and self.oracle.cannot_start(TRAINER_PROVIDER)
        if wants or refused or unable or result == STOPPED:
            self._begin_again(BEGIN_AGAIN_S)
        else:
            self.result = process.main.result()
            if self._agents is not None and self._agents.alive:
                self.stage.kill(self._agents, noticed=False)

    def _kept(self, trainer: WorkerId, host: TrainerHost) -> None:
        """Check that a trainer that leaves in good order between two steps has kept what it has trained."""
        stands = host.status()
        kept = {int(path.stem) for path in saved(self.run.path / "checkpoints")}
        if stands.version and not stands.groups and not stands.slots and stands.version not in kept:
            self.oracle.left_behind(trainer, f"no checkpoint of version {stands.version}")

    # The end

    def outcome(self) -> Lived:
        history, events = hashlib.blake2b(digest_size=16), 0
        with self.run.journals() as journals:
            for journal in journals:
                for t_ns, event in journal.events():
                    history.update(msgspec.msgpack.encode((t_ns, event)))
                    events += 1
        return Lived(
            events=events, faults=self.stage.struck, history=history.hexdigest(), incarnations=self.incarnations
        )


class WorkerWatch(LoadWatch):
    """Tells the world of one worker's process."""

    def __init__(self, world: World, process: Process) -> None:
        self._world = world
        self._process = process

    def applied(self, source: RelaySource, bits: bytes) -> None:
        self._world.applied(source, bits)

    def pulls(self, source: RelaySource) -> contextlib.AbstractContextManager[None]:
        return self._world.oracle.pulls(self._process.loop, source.relay)

    def unsound(self) -> None:
        self._world.oracle.ails(self._process.name)

    def failed(self, began_ns: Nanoseconds) -> None:
        self._world.oracle.load_failed(self._process.name, began_ns)


class _Tickets(TicketBook):
    """The ticket book. `spent` is told which machine joins as which worker."""

    def __init__(self, run_dir: Path, spent: Callable[[str, WorkerId], None]) -> None:
        super().__init__(run_dir)
        self._spent = spent

    def spend(self, ticket: str, worker: WorkerId) -> None:
        super().spend(ticket, worker)
        self._spent(ticket, worker)
