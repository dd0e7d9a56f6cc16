"""A world: production processes, a clock, and what goes wrong. It lives until the run has ended, and judges it."""

import asyncio
import contextlib
import hashlib
import heapq
import itertools
import shutil
import tempfile
from collections.abc import Callable, Coroutine, Iterator, Mapping, MutableMapping
from pathlib import Path
from random import Random
from typing import Any, cast

import msgspec
import structlog

from elastic import compose, wire
from elastic.chaos.cloud import Cloud, CloudProvider
from elastic.chaos.disk import Disk, SteppedJournal
from elastic.chaos.faults import Fault, FaultKind, WorldPlan
from elastic.chaos.loops import Machine, WorldClock
from elastic.chaos.models import (
    VOCABULARY,
    Mishap,
    ModelDevice,
    ModelEngine,
    ModelEnvironment,
    ModelPool,
    ModelTrainer,
    NoSettings,
    Weights,
)
from elastic.chaos.network import Network, NetworkLoop
from elastic.chaos.process import Process
from elastic.chaos.witness import Witness
from elastic.compose.incarnations import PreviousIncarnation, journaled, previous_incarnation
from elastic.config import Config, validate
from elastic.core.scheduler import Scheduler
from elastic.core.types import NS_PER_S, Nanoseconds, WorkerId, WorkerRole
from elastic.endpoint import Endpoint
from elastic.run_secrets import RunSecrets
from elastic.runtime import states
from elastic.runtime.journal import JournalError, RunDirectory
from elastic.runtime.orchestrator import Orchestrator, Wiring
from elastic.worker.agent import run_agent
from elastic.worker.connection import Ticket
from providers.base import Provider, ProviderContext, WorkerTicket

RUN = "run"
ELASTIC = "reserved"
ORCHESTRATOR_TIMEOUT_S = 20.0
LIVENESS_S = 240.0
"""For the run to end once nothing goes wrong any more, where turns are short."""
TURNS_MAX = 4
STEPS_MAX = 3_000_000
WORK_NS = 2_000
"""What a step of a process takes at least; nothing takes no time."""
STOPPED = "somebody had it stop"
"""Why a run ends that is resumed."""
OUT_OF_STEP = "out of step with the journal"
BEGIN_AGAIN_S = 1.0
"""After which somebody resumes a run that has ended for want of its disk, or of descriptors."""


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What a world came to; `history` hashes all that its run's incarnations have journaled."""

    seed: int
    ended_s: float
    events: int
    incarnations: int
    faults: int
    history: str


def config_of(plan: WorldPlan) -> Config:
    long = plan.token_s > 1
    return validate(
        Config,
        {
            "run": {
                "name": RUN,
                "seed": plan.seed,
                "steps": plan.steps,
                "orchestrator_timeout_s": ORCHESTRATOR_TIMEOUT_S,
            },
            "model": {"checkpoint": "none"},
            "rollout": {
                "groups": plan.groups,
                "group_size": 2,
                "max_turns": 1 if long else TURNS_MAX,
                "max_tokens_per_turn": plan.max_tokens,
                "staleness_bound": plan.staleness_bound,
            },
            "trainer": {
                "updates_per_step": 1,
                "max_restarts": 1000,
                "checkpoint_every_steps": plan.checkpoint_every,
                "step_timeout_s": 30,
            },
            "engine": {"max_context_tokens": 4096, "max_batch": plan.max_batch, "max_pending": plan.max_pending},
            "seeding": {"window_s": 0.2, "reserved_engines": 2},
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
            "rewards": {"timeout_s": 2, "max_retries": 8},
            "environment": {"step_timeout_s": 3},
            "weights": {"mode": "keep", "pull_timeout_s": 10},
            "journal": {"durable_against": plan.durable_against, "pending_mb": plan.pending_mb},
            "providers": {ELASTIC: {"max_workers": plan.places}},
        },
        "chaos",
    )


class World:
    """`tell` hears what its processes log, and what befalls them."""

    def __init__(self, plan: WorldPlan, tell: Callable[[str], None] | None = None) -> None:
        self.plan = plan
        self._tell = tell
        self.clock = WorldClock()
        self.chance = Random(f"{plan.seed}/world")
        self.network = Network(Random(f"{plan.seed}/network"))
        self.witness = Witness(lambda: self.clock.now_ns, Random(f"{plan.seed}/witness"))
        self.network.dialled = self._dialled
        self.disk = Disk(
            Random(f"{plan.seed}/disk"),
            loses_power=any(fault.kind is FaultKind.POWER for fault in plan.faults),
            lies=plan.lying_disk,
        )
        self.machine = Machine(self.clock)
        """The orchestrator's."""
        self.processes: list[Process] = []
        self.weights = Weights()
        self.incarnations = 0
        self.result: str | None = None
        self.orchestrator: Process | None = None
        self.shell: Orchestrator | None = None
        """What runs in the orchestrator's process, or did last."""
        self.address = ""
        self.relay_down_until_ns = self.environments_down_until_ns = self.functions_down_until_ns = 0
        self._alive: list[Process] = []
        self._struck = 0
        self._saved = Weights()
        self._numbers = itertools.count()
        self._published: set[int] = set()
        self._later: list[tuple[Nanoseconds, int, Callable[[], None]]] = []
        self._workers: dict[WorkerId, Process] = {}
        self._directory = Path(tempfile.mkdtemp(prefix="elastic-chaos-", dir=_memory()))
        self.run = RunDirectory(self._directory / RUN)
        self.run.path.mkdir()
        self.config = config_of(plan)
        make = lambda name, role, places: Cloud(  # noqa: E731
            name, role, places, Random(f"{plan.seed}/{name}"), self.after, self._boot, self._end_worker
        )
        self.clouds = {
            compose.TRAINER_PROVIDER: make(compose.TRAINER_PROVIDER, WorkerRole.TRAINER, 1),
            ELASTIC: make(ELASTIC, WorkerRole.ELASTIC, plan.places),
        }

    # Time

    def after(self, delay_s: float, action: Callable[[], None]) -> None:
        """Something of the world's own, in no process."""
        when_ns = self.clock.now_ns + round(delay_s * NS_PER_S)
        heapq.heappush(self._later, (when_ns, next(self._numbers), action))

    def until_ns(self, duration_s: float) -> Nanoseconds:
        return self.clock.now_ns + round(duration_s * NS_PER_S)

    @contextlib.contextmanager
    def begins(self) -> Iterator[None]:
        """Govern what production code asks of this process, and take everything apart in the end."""
        longest_turn_s = self.plan.max_tokens * self.plan.token_s
        governed = self.clock.governs(f"{self.plan.seed}/code", longest_turn_s)
        with governed, self.witness.watches(), self._logged():
            try:
                self.begin_orchestrator()
                yield
            finally:
                self._bury()
                shutil.rmtree(self._directory, ignore_errors=True)

    def befalls(self, fault: Fault, done: bool) -> None:
        """A fault has come, and was `done` to somebody if there was anybody."""
        self._struck += done
        if done and self._tell is not None:
            self._tell(f"{self.clock.now_ns / NS_PER_S:9.3f} *** {fault}")

    @contextlib.contextmanager
    def _logged(self) -> Iterator[None]:
        def process(_: Any, level: str, event: MutableMapping[str, Any]) -> Any:
            if self._tell is not None:
                what = event.pop("event")
                told = " ".join(f"{key}={value}" for key, value in event.items())
                self._tell(f"{self.clock.now_ns / NS_PER_S:9.3f} {level} {what} {told}")
            raise structlog.DropEvent

        former = structlog.get_config()
        structlog.configure(processors=[process])
        try:
            yield
        finally:
            structlog.configure(**former)

    def go_on(self) -> None:
        """Until the run has ended and nothing is left. Raises `AssertionError` after much too long."""
        plan = self.plan
        turns = plan.steps * plan.groups * TURNS_MAX
        until_s = plan.end_s + LIVENESS_S + 4 * turns * plan.max_tokens * plan.token_s
        for _ in range(STEPS_MAX):
            if self.result is not None and not self._alive:
                return
            if not self._step(until_s * NS_PER_S):
                break
        alive = [process.name for process in self._alive]
        raise AssertionError(f"no end: result {self.result!r}, alive {alive}")

    def _step(self, until_ns: float) -> bool:
        """Do what comes next, wherever that is."""
        now_ns = self.clock.now_ns
        due_ns: float = self._later[0][0] if self._later else until_ns + 1
        chosen: Process | None = None
        for process in self._alive:
            next_ns = process.loop.next_ns()
            if next_ns is not None:
                if next_ns < process.frozen_until_ns:
                    next_ns = process.frozen_until_ns
                if next_ns < due_ns:
                    due_ns, chosen = next_ns, process
                    if next_ns <= now_ns:
                        break
        if due_ns > until_ns:
            return False
        self.clock.now_ns = max(now_ns, int(due_ns))
        if chosen is None:
            heapq.heappop(self._later)[2]()
        else:
            chosen.step()
            self.clock.now_ns += WORK_NS
            self._look_at(chosen)
        return True

    def _look_at(self, process: Process) -> None:
        if self.witness.found:
            raise self.witness.found[0]
        if process.loop.failures:
            raise AssertionError(f"{process.name}: {process.loop.failures[0]}")
        if process.alive and process.main.done():
            self._ended(process)

    # Processes

    def _dialled(self, loop: NetworkLoop) -> None:
        if any(worker.loop is loop for worker in self.workers()):
            self.witness.dialled(loop)

    def workers(self) -> list[Process]:
        """The run's, the trainer's among them."""
        return [process for process in self._alive if process.name in self._workers]

    def begin(
        self,
        name: str,
        machine: Machine,
        work: Callable[[], Coroutine[Any, Any, Any]],
        device: ModelDevice | None = None,
    ) -> Process:
        process = Process(
            name, NetworkLoop(self.clock, machine, self.network), work, device or ModelDevice(lambda: self.clock.now_ns)
        )
        self.processes.append(process)
        self._alive.append(process)
        return process

    def kill(self, process: Process, *, noticed: bool) -> None:
        """It is gone. Its peers are told if that is `noticed`, and its provider is, sooner or later."""
        if not process.alive:
            return
        process.loop.kill(noticed)
        self._alive.remove(process)
        for cloud in self.clouds.values():
            cloud.exited(process.name)

    def begin_orchestrator(self) -> None:
        self.incarnations += 1
        self.orchestrator = self.begin(f"orchestrator {self.incarnations}", self.machine, self._orchestrate)

    def crash_orchestrator(self, down_s: float) -> None:
        """Kill it; after a while there is another one."""
        if self.orchestrator is None:
            return
        self.kill(self.orchestrator, noticed=True)
        self._begin_again(down_s)

    def _begin_again(self, down_s: float) -> None:
        self.witness.all_ail(down_s)
        self.orchestrator = None
        for cloud in self.clouds.values():
            cloud.listener = None
        self.after(down_s, self.begin_orchestrator)

    async def _orchestrate(self) -> str:
        """As `elastic.compose.execute`, around models."""
        config, run, plan = self.config, self.run, self.plan
        former = previous_incarnation(run, config) if self.incarnations > 1 else PreviousIncarnation()
        resolved = compose.resolve(config, [ELASTIC], "chaos")
        scheduler = Scheduler(compose.run_plan(resolved), compose.limits(config), compose.policies(config), 0)
        secrets = RunSecrets(b"%32d" % plan.seed)
        notes = {
            "run": RUN,
            "status": compose.RUNNING,
            "config": config.model_dump_json(),
            "providers": ELASTIC,
            "seed": str(config.run.seed),
        } | former.notes_to_keep()
        journal = SteppedJournal(
            run.next_journal_path(),
            config.journal.commit_interval_s,
            config.journal.durable_against,
            round(config.journal.pending_mb * 2**20),
            notes,
            self.disk,
        )
        self.witness.follow(scheduler)
        with journaled(journal, scheduler) as ending:
            wiring = Wiring(
                make_providers=self._providers,
                make_environment=lambda: ModelEnvironment(NoSettings(), self._environment_mishap),
                stop_token_ids=ModelEnvironment.stop_token_ids,
                welcome=self._welcome(),
                secrets=secrets,
                kept=run,
                make_reward_pool=(lambda meter: ModelPool(meter, self._function_mishap)) if plan.scored else None,
                control_socket=False,
            )
            orchestrator = Orchestrator(
                config, scheduler, journal, wiring, former.taken_up(), clock_ns=self.machine.monotonic_ns
            )
            self.shell = orchestrator
            failed = await orchestrator.run()
            ending.conclude(failed)
        return failed

    def _environment_mishap(self) -> Mishap | None:
        return self._mishap(self.environments_down_until_ns)

    def _function_mishap(self) -> Mishap | None:
        return self._mishap(self.functions_down_until_ns)

    def _mishap(self, until_ns: Nanoseconds) -> Mishap | None:
        if self.clock.now_ns >= until_ns or self.chance.random() < 2 / 3:
            return None
        return self.chance.choice((Mishap.RAISES, Mishap.HANGS))

    def _providers(self, endpoint: Endpoint, now_ns: Callable[[], Nanoseconds]) -> Mapping[str, Provider]:
        self.address = endpoint.address
        context = self._context(endpoint, now_ns)
        found = {name: CloudProvider(cloud, context) for name, cloud in self.clouds.items()}
        return cast("Mapping[str, Provider]", found)

    def _context(self, endpoint: Endpoint, now_ns: Callable[[], Nanoseconds]) -> ProviderContext:
        return ProviderContext(
            run=RUN,
            run_dir=self.run.path,
            endpoint=endpoint,
            worker_command=(),
            now_ns=now_ns,
            acquire_timeout_s=self.config.scheduler.acquire_timeout_s,
            release_timeout_s=self.config.scheduler.release_timeout_s,
        )

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
            relay="",
            resume_timeout_s=s.resume_timeout_s,
            pull_timeout_s=self.config.weights.pull_timeout_s,
            load_timeout_s=s.load_timeout_s,
            drain_timeout_s=4.0,
            run=RUN,
            orchestrator_timeout_s=ORCHESTRATOR_TIMEOUT_S,
        )

    def _boot(self, endpoint: Endpoint, ticket: WorkerTicket, trains: bool) -> None:
        plan, device = self.plan, ModelDevice(lambda: self.clock.now_ns)
        machine = Machine(self.clock, 1 + self.chance.uniform(-plan.drift, plan.drift))
        there = self._to_be_had

        def engine(_: wire.Welcome) -> ModelEngine:
            return ModelEngine(machine.monotonic_ns, device, plan.max_batch, plan.max_pending, plan.token_s, there)

        def work() -> Coroutine[Any, Any, Any]:
            return run_agent(
                Ticket(
                    endpoint=endpoint, run=RUN, worker=ticket.worker, token=ticket.token, wait_s=ORCHESTRATOR_TIMEOUT_S
                ),
                engine,
                share=None if trains else device,
                trainer=ModelTrainer(self._saved.copy, self._save, self._published.add) if trains else None,
                born_ns=machine.monotonic_ns(),
            )

        self._workers[ticket.worker] = self.begin(ticket.worker, machine, work, device)

    def _to_be_had(self, version: int) -> bool:
        return version in self._published and self.clock.now_ns >= self.relay_down_until_ns

    def _save(self, weights: Weights) -> None:
        self.weights = weights
        if weights.version % self.plan.checkpoint_every == 0 or weights.version == self.plan.steps:
            self._saved = weights.copy()
            (self.run.path / states.CHECKPOINTS).mkdir(exist_ok=True)
            (self.run.path / states.CHECKPOINTS / f"{weights.version:08d}.safetensors").touch()

    def _end_worker(self, worker: WorkerId) -> None:
        process = self._workers.get(worker)
        if process is not None and process.alive:
            self.witness.ails(worker)
            process.loop.kill(noticed=True)
            self._alive.remove(process)

    def _ended(self, process: Process) -> None:
        """It has come to its end by itself."""
        self.kill(process, noticed=True)
        if process.name in self._workers:
            self.witness.left(process.name, process.main.result())
        if process is not self.orchestrator:
            return
        error = process.main.exception()
        # Where the disk has forgotten orders, the trainer that has carried them out is refused, and the run ends.
        refused = error is None and self.disk.forgot and OUT_OF_STEP in process.main.result()
        if isinstance(error, JournalError | OSError) or refused or process.main.result() == STOPPED:
            self._begin_again(BEGIN_AGAIN_S)
        else:
            self.result = process.main.result()

    # The end

    def outcome(self) -> Outcome:
        history, events = hashlib.blake2b(digest_size=16), 0
        with self.run.journals() as journals:
            for journal in journals:
                for t_ns, event in journal.events():
                    history.update(msgspec.msgpack.encode((t_ns, event)))
                    events += 1
        return Outcome(
            seed=self.plan.seed,
            ended_s=self.clock.now_ns / NS_PER_S,
            events=events,
            incarnations=self.incarnations,
            faults=self._struck,
            history=history.hexdigest(),
        )

    def _bury(self) -> None:
        """What was killed is taken apart only now, when nothing that its `finally` does can matter."""
        for process in self.processes:
            process.loop.alive = False
            for task in asyncio.all_tasks(process.loop):
                task.cancel()
            process.loop.bury()


def _memory() -> str | None:
    return "/dev/shm" if Path("/dev/shm").is_dir() else None
