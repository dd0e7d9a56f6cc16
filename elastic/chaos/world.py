"""A world: production processes, a clock, and what goes wrong. It lives until the run has ended, and judges it."""

import asyncio
import contextlib
import hashlib
import heapq
import itertools
import shutil
import tempfile
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextvars import copy_context
from pathlib import Path
from random import Random
from typing import Any, cast

import msgspec
import structlog

from elastic import compose, wire
from elastic.chaos.cloud import Cloud, CloudProvider
from elastic.chaos.faults import Fault, FaultKind, Plan, draw_plan
from elastic.chaos.journal import SteppedJournal
from elastic.chaos.judge import judge
from elastic.chaos.loops import Clock
from elastic.chaos.models import (
    VOCABULARY,
    ModelEngine,
    ModelEnvironment,
    ModelTrainer,
    NoSettings,
    Weights,
)
from elastic.chaos.network import Network, NetworkLoop
from elastic.compose.incarnations import PreviousIncarnation, former_of, journaled
from elastic.config import Config, validate
from elastic.core.scheduler import Scheduler
from elastic.core.types import NS_PER_S, Nanoseconds, WorkerId, WorkerRole
from elastic.endpoint import Endpoint
from elastic.offload import Lane, lanes
from elastic.run_secrets import RunSecrets
from elastic.runtime import states
from elastic.runtime.journal import RunDirectory
from elastic.runtime.orchestrator import Orchestrator, Wiring
from elastic.worker.agent import run_agent
from elastic.worker.connection import Ticket
from providers.base import Provider, ProviderContext, WorkerTicket

RUN = "run"
ELASTIC = "reserved"
ORCHESTRATOR_TIMEOUT_S = 20.0
LIVENESS_S = 240.0
"""For the run to end once nothing goes wrong any more."""
STEPS_MAX = 3_000_000
WORK_NS = 2_000
"""What a step of a process takes at least; nothing takes no time."""


class WorldFailed(AssertionError):
    """A world went wrong; `seed` is all that is needed to see it again."""

    def __init__(self, seed: int, found: str) -> None:
        self.seed = seed
        super().__init__(f"seed {seed}: {found}")


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What a world came to; `history` hashes all that its run's incarnations have journaled."""

    seed: int
    failed: str
    ended_s: float
    events: int
    incarnations: int
    faults: int
    history: str


class Process:
    """A simulated process: a loop, and what runs on it."""

    def __init__(self, world: "World", name: str, work: Callable[[], Coroutine[Any, Any, Any]]) -> None:
        self.name = name
        self.frozen_until_ns: Nanoseconds = 0
        self.loop = NetworkLoop(world.clock, world.network)
        context = copy_context()
        context.run(lanes.set, lambda _: LoopLane(self.loop))
        self.main = self.loop.create_task(work(), context=context)

    @property
    def alive(self) -> bool:
        return self.loop.alive


class LoopLane(Lane):
    """`elastic.offload.Lane`: each call takes a drawn time, and is made at its end."""

    def __init__(self, loop: NetworkLoop) -> None:
        self._loop = loop
        self._free_s = 0.0

    def submit(self, call: Callable[[], None]) -> None:
        self._free_s = max(self._free_s, self._loop.time()) + self._loop.offload_s()
        self._loop.call_at(self._free_s, call)

    def stop(self) -> None:
        pass


def config_of(plan: Plan) -> Config:
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
                "max_turns": 4,
                "max_tokens_per_turn": 24,
                "staleness_bound": plan.staleness_bound,
            },
            "trainer": {
                "updates_per_step": 1,
                "max_restarts": 1000,
                "checkpoint_every_steps": plan.checkpoint_every,
                "step_timeout_s": 30,
            },
            "engine": {"max_context_tokens": 4096, "max_batch": 8, "max_pending": 4},
            "seeding": {"window_s": 0.2, "reserved_engines": 2},
            "scheduler": {"boot_timeout_s": 20, "load_timeout_s": 20, "retry_base_s": 0.2, "retry_max_s": 2},
            "weights": {"mode": "keep", "pull_timeout_s": 10},
            "providers": {ELASTIC: {"max_workers": plan.places}},
        },
        "chaos",
    )


class World:
    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.clock = Clock()
        self.chance = Random(f"{plan.seed}/world")
        self.network = Network(Random(f"{plan.seed}/network"))
        self.processes: list[Process] = []
        self.weights = Weights()
        self.struck = 0
        self.incarnations = 0
        self.result: str | None = None
        self._saved = Weights()
        self._numbers = itertools.count()
        self._published: set[int] = set()
        self._later: list[tuple[Nanoseconds, int, Callable[[], None]]] = []
        self._orchestrator: Process | None = None
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

    def live(self) -> Outcome:
        """Until the run has ended and nothing is left, or much too long. Raises `WorldFailed`."""
        with self.clock.governs(f"{self.plan.seed}/code"), _silence():
            try:
                self._begin_orchestrator()
                for fault in self.plan.faults:
                    self.after(fault.at_s, lambda fault=fault: self._strike(fault))
                self._go_on(self.plan.end_s + LIVENESS_S)
                judge(self)
                return self._outcome()
            except Exception as error:
                raise WorldFailed(
                    self.plan.seed, f"at {self.clock.now_ns / NS_PER_S:.3f} s: {type(error).__name__}: {error}"
                ) from error
            finally:
                self._bury()
                shutil.rmtree(self._directory, ignore_errors=True)

    def _go_on(self, until_s: float) -> None:
        for _ in range(STEPS_MAX):
            if self.result is not None and not self._alive():
                return
            if not self._step(until_s):
                break
        alive = [process.name for process in self._alive()]
        raise AssertionError(f"no end: result {self.result!r}, alive {alive}")

    def _alive(self) -> list[Process]:
        return [process for process in self.processes if process.alive]

    def _step(self, until_s: float) -> bool:
        """Do what comes next, wherever that is."""
        due: tuple[Nanoseconds, int] | None = None
        chosen: Process | None = None
        if self._later:
            due = (self._later[0][0], -1)
        for number, process in enumerate(self._alive()):
            next_ns = process.loop.next_ns()
            if next_ns is not None:
                at = (max(next_ns, process.frozen_until_ns), number)
                if due is None or at < due:
                    due, chosen = at, process
        if due is None or due[0] > until_s * NS_PER_S:
            return False
        self.clock.now_ns = max(self.clock.now_ns, due[0])
        if chosen is None:
            heapq.heappop(self._later)[2]()
            return True
        chosen.loop.step()
        self.clock.now_ns += WORK_NS
        if chosen.loop.failures:
            raise AssertionError(f"{chosen.name}: {chosen.loop.failures[0]}")
        if chosen.main.done():
            self._ended(chosen)
        return True

    # Processes

    def _process(self, name: str, work: Callable[[], Coroutine[Any, Any, Any]]) -> Process:
        process = Process(self, name, work)
        self.processes.append(process)
        return process

    def _begin_orchestrator(self) -> None:
        self.incarnations += 1
        self._orchestrator = self._process(f"orchestrator {self.incarnations}", self._orchestrate)

    async def _orchestrate(self) -> str:
        """As `elastic.compose.execute`, around models."""
        config, run = self.config, self.run
        former = former_of(run, config) if self.incarnations > 1 else PreviousIncarnation()
        plan = compose.resolve(config, [ELASTIC], "chaos")
        scheduler = Scheduler(compose.run_plan(plan), compose.limits(config), compose.policies(config), 0)
        secrets = RunSecrets(b"%32d" % self.plan.seed)
        notes = {
            "run": RUN,
            "status": compose.RUNNING,
            "config": config.model_dump_json(),
            "providers": ELASTIC,
            "seed": str(config.run.seed),
        } | former.notes_to_keep()
        journal = SteppedJournal(run.next_journal_path(), config.journal.commit_interval_s, notes)
        with journaled(journal, scheduler) as ending:
            wiring = Wiring(
                make_providers=self._providers,
                make_environment=lambda: ModelEnvironment(NoSettings()),
                stop_token_ids=ModelEnvironment.stop_token_ids,
                welcome=self._welcome(),
                secrets=secrets,
                kept=run,
            )
            orchestrator = Orchestrator(
                config, scheduler, journal, wiring, former.taken_up(), clock_ns=lambda: self.clock.now_ns
            )
            failed = await orchestrator.run()
            ending.conclude(failed)
        return failed

    def _providers(self, endpoint: Endpoint, now_ns: Callable[[], Nanoseconds]) -> Mapping[str, Provider]:
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
            silence_timeout_s=2.0,
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
        def work() -> Coroutine[Any, Any, Any]:
            trainer = ModelTrainer(self._saved.copy, self._save, self._published.add) if trains else None
            return run_agent(
                Ticket(
                    endpoint=endpoint, run=RUN, worker=ticket.worker, token=ticket.token, wait_s=ORCHESTRATOR_TIMEOUT_S
                ),
                lambda _: ModelEngine(lambda: self.clock.now_ns, self._published.__contains__),
                trainer=trainer,
                born_ns=self.clock.now_ns,
            )

        self._workers[ticket.worker] = self._process(ticket.worker, work)

    def _save(self, weights: Weights) -> None:
        self.weights = weights
        if weights.version % self.plan.checkpoint_every == 0 or weights.version == self.plan.steps:
            self._saved = weights.copy()
            (self.run.path / states.CHECKPOINTS).mkdir(exist_ok=True)
            (self.run.path / states.CHECKPOINTS / f"{weights.version:08d}.safetensors").touch()

    def _end_worker(self, worker: WorkerId) -> None:
        process = self._workers.get(worker)
        if process is not None and process.alive:
            process.loop.kill(noticed=True)

    def _ended(self, process: Process) -> None:
        """It has come to its end by itself."""
        process.loop.kill(noticed=True)
        if process is self._orchestrator:
            self.result = process.main.result()
        else:
            for cloud in self.clouds.values():
                cloud.exited(process.name)

    # Faults

    def _strike(self, fault: Fault) -> None:
        workers = [p for p in self._alive() if p is not self._orchestrator]
        trainers = [p for p in workers if p.name.startswith(compose.TRAINER_PROVIDER)]
        others = [p for p in workers if p not in trainers]
        picked = others[int(fault.target * len(others))] if others else None
        match fault.kind:
            case FaultKind.KILL_WORKER if picked is not None:
                self._kill(picked, noticed=fault.chance < 1 / 2)
            case FaultKind.KILL_TRAINER if trainers:
                self._kill(trainers[0], noticed=True)
            case FaultKind.KILL_ORCHESTRATOR if self._orchestrator is not None and self.result is None:
                self._crash(fault)
            case FaultKind.KILL_BOTH if self._orchestrator is not None and trainers and self.result is None:
                self._kill(trainers[0], noticed=True)
                self._crash(fault)
            case FaultKind.FREEZE if picked is not None:
                picked.frozen_until_ns = self.clock.now_ns + round(fault.duration_s * NS_PER_S)
            case FaultKind.HOLD_UP if self._orchestrator is not None:
                self._orchestrator.frozen_until_ns = self.clock.now_ns + round(fault.duration_s * NS_PER_S)
            case FaultKind.CUT if picked is not None:
                for transport in list(picked.loop.transports):
                    transport.abort()
            case FaultKind.PREEMPT if picked is not None:
                self.clouds[ELASTIC].warn(picked.name, self.clock.now_ns, fault.duration_s)
            case FaultKind.WEATHER:
                self.network.weather = fault.weather(self.network.weather)
            case _:
                return
        self.struck += 1

    def _kill(self, process: Process, *, noticed: bool) -> None:
        process.loop.kill(noticed)
        for cloud in self.clouds.values():
            cloud.exited(process.name)

    def _crash(self, fault: Fault) -> None:
        assert self._orchestrator is not None
        self._orchestrator.loop.kill(noticed=True)
        self._orchestrator = None
        for cloud in self.clouds.values():
            cloud.listener = None
        self.after(fault.duration_s, self._begin_orchestrator)

    # The end

    def _outcome(self) -> Outcome:
        history, events = hashlib.blake2b(digest_size=16), 0
        with self.run.journals() as journals:
            for journal in journals:
                for t_ns, event in journal.events():
                    history.update(msgspec.msgpack.encode((t_ns, event)))
                    events += 1
        return Outcome(
            seed=self.plan.seed,
            failed=self.result or "",
            ended_s=self.clock.now_ns / NS_PER_S,
            events=events,
            incarnations=self.incarnations,
            faults=self.struck,
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


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """What the processes log is nobody's to read."""
    former = structlog.get_config()
    structlog.configure(processors=[_drop])
    try:
        yield
    finally:
        structlog.configure(**former)


def _drop(*_: Any) -> Any:
    raise structlog.DropEvent


def simulate(seed: int, plan: Plan | None = None) -> Outcome:
    """Live through one world. What is not given is drawn from the seed. Raises `WorldFailed`."""
    return World(plan or draw_plan(seed)).live()
