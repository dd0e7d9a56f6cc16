"""A live run's process: a `Run` with asyncio, sockets and processes behind its ports, from its begin to its end."""

import asyncio
import contextlib
import math
import sqlite3
import traceback
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias, cast

import msgspec
import structlog

from elastic.config import Config, EnvironmentConfig
from elastic.core import events as e
from elastic.core.digest import digest
from elastic.core.ledger import NANO_USD_PER_USD
from elastic.core.scheduler import Phase, Scheduler
from elastic.core.spare import SpareCredit
from elastic.core.types import INTEGER_MAX, NS_PER_S, Nanoseconds, PolicyFault, SamplingParameters, TrajectoryId
from elastic.environments.base import Environment
from elastic.pool.client import PoolClient
from elastic.protocol import wire
from elastic.protocol.best_checkpoint import keep_best
from elastic.protocol.endpoint import Address, Endpoint
from elastic.protocol.run_secrets import RunSecrets
from elastic.protocol.tls import Certificate
from elastic.runtime import states
from elastic.runtime.agents import (
    CHATS_NOTE,
    AgentRollouts,
    AgentService,
    AgentsWiring,
    Chats,
    ChattingWorkers,
    ChatTotals,
    Doorkeeper,
    HostProcesses,
    RequestRollouts,
    RunMetrics,
)
from elastic.runtime.control import CommandManager, ControlSocket
from elastic.runtime.engine_meters import EngineMeters
from elastic.runtime.episodes import RolloutLimits, ScoringSettings
from elastic.runtime.flushing import SATURATED_SHARE, CoreLoad, FlushControl, follow_load, thread_busy_s
from elastic.runtime.gateway import Gateway, GatewayError
from elastic.runtime.hosted import EpisodeHosts, FailRun
from elastic.runtime.journal import (
    AGENTS,
    JOIN,
    PUBLISHER,
    TRACEBACK,
    RunDirectory,
    SqliteJournal,
    StateRow,
    TrajectoryRow,
    forget_former,
)
from elastic.runtime.left_behind import write_down
from elastic.runtime.listener import Listener
from elastic.runtime.live import GatewayWorkers, LoopClock, ProviderLeases
from elastic.runtime.mixture import played_by
from elastic.runtime.pool_permits import PoolPermits
from elastic.runtime.ports import NoOffers, Ports, UnsharedDevice
from elastic.runtime.recorder import JournalRecorder
from elastic.runtime.refusals import REFUSED_NOTE
from elastic.runtime.rewards import MakePool, RewardDispatch
from elastic.runtime.rollout import Rollouts
from elastic.runtime.run import Decided, Run
from elastic.runtime.sampler import Sampler
from elastic.runtime.snapshot import saturated
from elastic.runtime.status import LostPlays, RunStatus, UpstreamStatus
from elastic.runtime.trainer import GatewayTrainer, kept_steps
from elastic.runtime.validation import vocabulary
from elastic.system.boot_clock import boottime_ns, suspended_ns
from elastic.system.machine import CpuSampler
from elastic.weights.rights import RelayRights
from functions.base import Call
from providers.base import REMARK, KnownLease, Provider
from providers.pending_workers import PendingWorkers

log = structlog.get_logger(__name__)

CLOSING_SHOWN_S = 5.0
"""How often the end of a run says what it waits for."""
CLOSING_SLACK_S = 5.0
STALL_SHARE = 1 / 4
"""The largest share of a token's time limit for which the token may stay in its worker."""
TRACEBACK_MAX = 8000
"""Characters of a traceback that are kept; the last ones say most."""


MakeHosts: TypeAlias = Callable[[EpisodeHosts, Doorkeeper, FailRun], HostProcesses]
"""Makes what starts env workers, which dial these hosts; it may end the run for a cause."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wiring:
    """What a live run is put together from besides its configuration.

    `make_providers` gets the workers' endpoint and the run's clock. `token_level` are the environments that speak token
    ids, by name, with what makes one for an episode; those with None are in env workers, which `make_hosts` brings.
    Agents play all others. `engines` and `relays` have the engine settings and
    the relay of those providers whose workers do not get the welcome's, `relay_rights` whom the weights' relay lets do
    what, where it can tell them apart. Workers of `resident` providers are processes that outlive their leases. With a
    `certificate` workers speak TLS; those that come by tickets wait in the `pending_workers`. Without
    `make_reward_pool` the environments score. `kept` is where the run is kept, and `discard` removes the trainer's
    checkpoint of a version from there. The `pool` is open, of which the run is a job.
    """

    make_providers: Callable[[Endpoint, Callable[[], int]], Mapping[str, Provider]]
    token_level: Mapping[str, Callable[[], Environment] | None]
    welcome: wire.Welcome
    secrets: RunSecrets
    kept: RunDirectory
    discard: Callable[[int], None]
    make_reward_pool: MakePool | None = None
    engines: Mapping[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])
    relays: Mapping[str, str] = field(default_factory=dict[str, str])
    relay_rights: RelayRights | None = None
    resident: Collection[str] = ()
    certificate: Certificate | None = None
    pending_workers: PendingWorkers | None = None
    pool: PoolClient | None = None
    agents: AgentsWiring | None = None
    """Set where agents drive the trajectories."""
    make_hosts: MakeHosts | None = None
    control_socket: bool = True
    """Whether commands come through a socket in the run's directory."""
    sample_interval_s: float = 0.5
    """Between two samples of the machine and the run."""


STATE_SHARE = 4
"""A journal that forgets does so after its state's size so many times, at least."""
FIGURES_KEPT_S = 3600
"""How far back samples and pulls are kept in a journal that forgets."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumePoint:
    """The point from which a new incarnation continues the run: its `state` and time, the address at which workers dial
    (`join`), and the `publisher` key that they trust.

    Functions have cost `functions_usd`. `budget_usd` is set if the run gets another budget.
    """

    state: bytes
    now_ns: Nanoseconds
    join: str
    publisher: str
    functions_usd: float = 0.0
    budget_usd: float | msgspec.UnsetType | None = msgspec.UNSET


class Orchestrator:
    """One incarnation of a run. `run` returns the cause of failure, empty when the run reached its end.

    With a `former` one it goes on where that was, else it is `told` these events first. `observe` is told the run's
    status from time to time, `decided` every event with what the core makes of it. `busy_s` says how long its thread
    has computed.
    """

    def __init__(
        self,
        config: Config,
        scheduler: Scheduler,
        journal: SqliteJournal,
        wiring: Wiring,
        former: ResumePoint | None = None,
        *,
        told: Sequence[e.Event] = (),
        observe: Callable[[RunStatus], None] = lambda _: None,
        decided: Decided = lambda event, commands: None,
        clock_ns: Callable[[], int] = boottime_ns,
        suspended_ns: Callable[[], int] = suspended_ns,
        busy_s: Callable[[], float] = thread_busy_s,
    ) -> None:
        self.scheduler = scheduler
        self.bad_input = False
        """Whether the run has failed for what it was given."""
        self._busy_s = busy_s
        self._config = config
        self._journal = journal
        self._wiring = wiring
        self._former = former
        self._told = told
        self._forgets_at_bytes, self._forgot = config.journal.forget_mb * 2**20, False
        self._warned = self._traced = self._saturated = False
        self._stopped = dict[str, str]()
        self._chatted = ChatTotals()
        """What chats had come to as that was journaled last."""
        self._clock = LoopClock(clock_ns, suspended_ns, former.now_ns if former else 0)
        self._ended = asyncio.Event()
        self._tasks: asyncio.TaskGroup | None = None
        self._recorder = JournalRecorder(scheduler, journal, self._when, self._stored)
        least_s, stall_s = config.scheduler.flush_interval_s, config.scheduler.turn_stall_timeout_s
        self._flushes = FlushControl(least_s, min(config.scheduler.flush_interval_max_s, STALL_SHARE * stall_s))
        self._sampler = Sampler(
            config.run.name,
            scheduler,
            self._recorder,
            journal,
            observe,
            CpuSampler().share,
            self._load,
            upstream=self._upstream,
            lost=self._lost,
        )
        self._run = Run(scheduler, self._connect, decided)
        self.command_manager = CommandManager(
            scheduler,
            self._command,
            self._recorder.durable,
            self._names,
            lambda: self._sampler.status(self.now_ns()),
        )
        self._control = ControlSocket(wiring.kept.path, self.command_manager)
        if former is not None:
            self._run.restore(former.state)
            self._sampler.warned = scheduler.warned
            self._workers.publisher = former.publisher
            self._recorder.function_usd = max(self._recorder.function_usd, former.functions_usd)

    def _load(self) -> CoreLoad:
        return CoreLoad(self._flushes.share, self._flushes.interval_s)

    def _upstream(self) -> UpstreamStatus | None:
        return None if self._driven is None else self._driven.upstream_status()

    def _lost(self) -> Mapping[str, LostPlays]:
        """What was played in vain, by environment."""
        played = {name: loops.lost for name, loops in self._loops.items()}
        return played if self._driven is None else {**played, **self._driven.lost}

    def now_ns(self) -> int:
        """Nanoseconds since the run began: the core's time."""
        return self._clock.now_ns()

    def stop(self, reason: str) -> None:
        """Give everything back and end; the run then counts as failed for this reason."""
        self._run.stop(reason)

    def _fail(self, cause: str, *, bad_input: bool = False) -> None:
        self.bad_input = self.bad_input or bad_input
        self.stop(cause)

    def kill(self, reason: str) -> None:
        """End at once: kill what runs, and wait for no peer."""
        self._run.kill(reason)

    def faulted(self, words: str) -> PolicyFault:
        """End at once for what code of another package did, and return the error that says so."""
        self.bad_input = True
        self.kill(words)
        return PolicyFault(words)

    def _connect(self, run: Run) -> Ports:
        config, wiring = self._config, self._wiring
        make_pool, scoring = wiring.make_reward_pool, None
        if make_pool:
            settings = {one.name: one.settings for one in config.mixture}
            checkpoint = str(config.model.checkpoint.absolute())
            scoring = ScoringSettings(settings, config.rewards.settings, checkpoint)
        listener = Listener(run, self._recorder, self.now_ns, self._trust, self._stepped)
        self._gateway = Gateway()
        self._door = self._gateway.open(
            wiring.welcome.run, listener, wiring.welcome, cuts_silent=config.run.beyond_loopback
        )
        self._door.pending_workers = wiring.pending_workers
        listener.trainer = GatewayTrainer(
            self._door, self.scheduler, wiring.kept.trajectories, run.stop, kept_steps(config), wiring.discard
        )
        agents = wiring.agents
        doorkeeper = Doorkeeper(wiring.welcome.run, wiring.secrets, self._is_stopped)
        self._hosts, self._host_processes = self._make_hosts(doorkeeper)
        rollouts = self._driven = self._make_driven(run, scoring)
        self._loops = {
            one.name: self._make_loops(run, scoring, one)
            for one in config.mixture
            if rollouts is None or one.name in wiring.token_level
        }
        self._rollouts = played_by(
            {one.name: self._loops.get(one.name, cast("AgentRollouts", rollouts)) for one in config.mixture}
        )
        self._workers = GatewayWorkers(self._door, config, wiring.relay_rights)
        self._agents = self._chats = None
        if rollouts is not None and agents is not None:
            self._chats = listener.chats = self._make_chats(agents)
            meters = self._recorder.meters = EngineMeters(self.scheduler)
            self._agents = AgentService(
                doorkeeper,
                rollouts,
                self._recorder.durable,
                self._is_stopped,
                agents,
                RunMetrics(lambda: self._sampler.status(self.now_ns()), meters, self._chats),
                self._chats,
                wiring.secrets,
                self._fail,
            )
        self._permits = None if wiring.pool is None else PoolPermits(wiring.pool, run.feed, self.now_ns)
        pool = self._pool = make_pool(self._called) if make_pool else None
        self._rewards = RewardDispatch(pool, config.rewards.timeout_s, run.feed, self._spawn)
        self._leases = ProviderLeases(
            self._door,
            config,
            self.scheduler,
            wiring.secrets,
            wiring.engines,
            wiring.relays,
            wiring.relay_rights,
            wiring.resident,
            run.feed,
            self._spawn,
        )
        return Ports(
            clock=self._clock,
            journal=self._recorder,
            workers=self._workers if self._chats is None else ChattingWorkers(self._workers, self._chats),
            leases=self._leases,
            trajectories=self._rollouts,
            rewards=self._rewards,
            trainer=listener.trainer,
            owner=self,
            pool=self._permits or UnsharedDevice(),
            offers=rollouts if isinstance(rollouts, RequestRollouts) else NoOffers(),
        )

    def _make_chats(self, agents: AgentsWiring) -> Chats | None:
        if agents.chats is None:
            return None
        credit = SpareCredit(self.scheduler, round(agents.chat_wait_s * NS_PER_S))
        return Chats(agents.limits, agents.chats, credit, self._workers, self.now_ns)

    def _make_hosts(self, doorkeeper: Doorkeeper) -> tuple[EpisodeHosts | None, HostProcesses | None]:
        """The env workers of environments that speak token ids, if there are any."""
        wiring, make_hosts = self._wiring, self._wiring.make_hosts
        if make_hosts is None:
            return None, None
        remote = [name for name, make in wiring.token_level.items() if make is None]
        words = vocabulary(wiring.welcome.model, INTEGER_MAX)
        hosts = EpisodeHosts(remote, words, self._fail)
        doorkeeper.counterparts.append(hosts)
        return hosts, make_hosts(hosts, doorkeeper, self._fail)

    def _make_driven(self, run: Run, scoring: ScoringSettings | None) -> AgentRollouts | None:
        """The trajectories that agents play, if they play any."""
        if self._wiring.agents is None:
            return None
        if self.scheduler.plan.serves_requests:
            limits, clock_ns = self._wiring.agents.limits, self.now_ns
            return RequestRollouts(self._config.run.seed, limits, self.scheduler, run.feed, clock_ns, run.prompted)
        return AgentRollouts(
            self._config.run.seed,
            self._wiring.agents.limits,
            run.feed,
            self.now_ns,
            scoring,
            self._stored,
            run.prompted,
            lambda call: self._recorder.called(self.now_ns(), call),
            self._bill_functions,
        )

    def _make_loops(self, run: Run, scoring: ScoringSettings | None, environment: EnvironmentConfig) -> Rollouts:
        """The trajectories of an environment that speaks token ids."""
        config, wiring = self._config, self._wiring
        make, limit_s = wiring.token_level[environment.name], environment.step_timeout_s
        sampling = SamplingParameters(
            max_new_tokens=config.rollout.max_tokens_per_turn,
            noise_seed=0,
            temperature=config.rollout.temperature,
        )
        return Rollouts(
            config.run.seed,
            RolloutLimits(
                config.rollout.max_turns,
                config.engine.max_context_tokens,
                limit_s if make is not None else None,
                sampling,
                vocabulary(wiring.welcome.model, INTEGER_MAX),
                _evaluated(config, sampling),
            ),
            make or self._remote(environment.name),
            run.feed,
            self.now_ns,
            self._spawn_apart,
            scoring,
            self._stored,
            run.prompted,
            self._raised,
            environment.name,
        )

    def _remote(self, environment: str) -> Callable[[], Environment]:
        """What makes the environment of an episode that an env worker plays."""
        assert self._hosts is not None, "nobody brings env workers"
        return cast("Callable[[], Environment]", partial(self._hosts.make, environment))

    def _is_stopped(self) -> bool:
        return bool(self.scheduler.failed or self.scheduler.stopped)

    def _command(self, event: e.Event) -> None:
        """Carry out a command. With a new budget, the core must also know the cost of functions."""
        self._run.feed(event)
        self._bill_functions()

    def _called(self, call: Call) -> None:
        self._recorder.called(self.now_ns(), call)
        self._bill_functions()

    def _bill_functions(self) -> None:
        if self.scheduler.controls.budget_usd is None or self._run.closed:
            return
        call_usd = self._pool.most_usd(self.scheduler.limits.score_timeout_ns / NS_PER_S) if self._pool else 0.0
        upstream = self._upstream()
        usd = self._recorder.function_usd + (upstream.held_usd if upstream else 0.0)
        if call_usd or usd:
            self._run.feed(
                e.FunctionsBilled(
                    nano_usd=math.ceil(usd * NANO_USD_PER_USD),
                    call_nano_usd=math.ceil(call_usd * NANO_USD_PER_USD),
                )
            )

    def _raised(self, error: BaseException) -> None:
        """Keep the traceback of the first environment that raised."""
        if not self._traced:
            self._traced = True
            trace = "".join(traceback.format_exception(error))[-TRACEBACK_MAX:]
            self._journal.meta(TRACEBACK, trace.encode(errors="backslashreplace").decode())

    def _names(self) -> list[str]:
        """Return the names of the run's providers, without the trainer's device."""
        return [name for name in self._leases.providers if name != self.scheduler.plan.trainer_provider]

    def _trust(self, publisher: str) -> None:
        self._workers.publisher = publisher
        self._journal.meta(PUBLISHER, publisher)

    def _stored(self, trajectory: TrajectoryId) -> TrajectoryRow:
        return self._wiring.kept.trajectories([trajectory])[trajectory]

    def _stepped(self, version: int) -> None:
        """Save the run's state beside the trainer's checkpoint, once all events before it are durable.

        A run that is stopping does not take the step, and its state cannot be continued.
        """
        taken = self.scheduler.version == version
        if taken and version % self._config.trainer.checkpoint_every_steps == 0 and not self._run.closed:
            saved = self._saved()
            self._recorder.durable(lambda: self._save(version, saved))

    def _saved(self) -> states.SavedRun:
        return states.SavedRun(
            journal=self._journal.path.name,
            events=self._journal.events,
            t_ns=self.scheduler.now_ns,
            digest=digest(self.scheduler),
            state=self._run.saved(),
        )

    def _forget_if_due(self) -> None:
        """Have the journal of a run that serves requests keep its state in place of what led there, whenever so much
        has come that the state is little beside it."""
        journal, core = self._journal, self.scheduler
        if core.serving is None or core.phase is not Phase.RUNNING or self._run.closed or journal.behind:
            return
        if journal.appended_bytes < self._forgets_at_bytes:
            return
        content = states.encoded(saved := self._saved())
        journal.forget(StateRow(events=saved.events, saved=content), self.now_ns() - FIGURES_KEPT_S * NS_PER_S)
        least_bytes = self._config.journal.forget_mb * 2**20
        self._forgets_at_bytes = journal.appended_bytes + max(least_bytes, STATE_SHARE * len(content))
        if not self._forgot:
            self._forgot = True
            self._recorder.durable(self._forget_former)

    def _forget_former(self) -> None:
        async def forget() -> None:
            former = [path for path in self._wiring.kept.journal_paths() if path != self._journal.path]
            try:
                await asyncio.to_thread(forget_former, former)
            except sqlite3.Error as error:
                log.warning("former journals are kept whole", error=repr(error))

        if not self._run.closed:
            self._spawn(forget(), "forget what former processes wrote")

    def _save(self, version: int, saved: states.SavedRun) -> None:
        async def write() -> None:
            try:
                await asyncio.to_thread(states.write, self._wiring.kept.path / states.CHECKPOINTS, version, saved)
            except OSError as error:
                log.warning("state not saved; resuming reads more of the journal", version=version, error=repr(error))

        if not self._run.closed:
            self._spawn(write(), f"save state {version}")

    def ended(self) -> None:
        self._ended.set()

    def keep(self, version: int) -> None:
        """A checkpoint that cannot be kept is not worth the run."""
        try:
            keep_best(self._wiring.kept.path / states.CHECKPOINTS, version)
        except OSError as error:
            log.warning("the best checkpoint may not be kept", version=version, error=repr(error))

    def _when(self, done: "Future[None]", then: Callable[[], None]) -> None:
        """Call `then` on the loop's thread once `done` is, never if it fails; calls keep their order."""
        soon = _on_this_loop(then)
        done.add_done_callback(lambda _: soon() if done.exception() is None else None)

    def broken(self, event: e.Event | None, error: Exception) -> None:
        self.bad_input = self.bad_input or isinstance(error, PolicyFault)
        log.error("internal error", event_kind=type(event).__name__, exc_info=error)

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        assert self._tasks is not None
        task = self._tasks.create_task(work, name=name)
        task.add_done_callback(self._ends_with)
        return task

    def _spawn_apart(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Start a loop in which users' code runs. The run does not wait for its end: `Rollouts.ending` does."""

        def ended(task: asyncio.Task[None]) -> None:
            if not task.cancelled() and (error := task.exception()) is not None:
                self._spawn(fail(error), f"end of {name}")

        async def fail(error: BaseException) -> None:
            raise error

        task = asyncio.get_running_loop().create_task(work, name=name)
        task.add_done_callback(ended)
        return task

    def _ends_with(self, task: asyncio.Task[None]) -> None:
        """A task that fails ends the run: no environment is to blame for what is cancelled then."""
        if not task.cancelled() and task.exception() is not None:
            self._rollouts.cancel_all()

    async def run(self) -> str:
        """Run to the end, give everything back, and return the cause of failure ("" if there is none).

        Raises `GatewayError`, `ProviderUnavailable` or `FunctionError` when the run cannot even begin.
        """
        self._journal.on_change = _on_this_loop(self._journal_changed)
        try:
            async with asyncio.TaskGroup() as tasks, self._rollouts.ending():
                self._tasks = tasks
                known: Mapping[str, list[KnownLease]] = {}
                if self._former is not None:
                    known = self._leases.known()
                    self._run.resume(self._former.budget_usd)
                elif self._permits is not None:
                    self._permits.take_up(None, asked=False, last=0)
                for event in self._told if self._former is None else ():
                    self._rollouts.recalled(event, None)
                    self._run.feed(event)
                if (best := self.scheduler.best_version) is not None:  # The former process may not have come to it.
                    self.keep(best)
                self._bill_functions()
                listening = await self._listen()
                endpoint = self._endpoint(listening)
                self._journal.meta(JOIN, listening)
                self._journal.meta("endpoint", msgspec.json.encode(endpoint).decode())
                providers = self._wiring.make_providers(endpoint, self.now_ns)
                self._leases.providers = providers
                if self._wiring.control_socket:
                    await self._control.start()
                await self._rewards.start()
                for name, provider in providers.items():
                    for lease in await provider.adopt(known.get(name, []), self._leases.hear):
                        self._run.ask_again(lease)
                    await provider.start(self._leases.hear)
                    self._leases.ready(name)
                self._leases.forsake()
                watches = [
                    tasks.create_task(self._sample_forever(), name="sampler"),
                    tasks.create_task(follow_load(self._flushes, self._door.flush_every, self._busy_s), name="load"),
                ]
                if self._agents is not None:
                    self._journal.meta(AGENTS, await self._agents.start())
                    watches.append(tasks.create_task(self._agents.look_after(), name="agents"))
                if self._host_processes is not None:
                    await self._host_processes.start()
                try:
                    await self._ended.wait()
                finally:
                    self._run.close()
                for watch in watches:
                    watch.cancel()
                self._rollouts.cancel_all()
                await self._close_rewards()
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        finally:
            self._run.close()
            await self._close()
        self._sample()
        return self._run.failed

    async def _listen(self) -> str:
        """Listen at the address of the former incarnation, where its workers dial, if it is free."""
        host, port, certificate = self._config.run.host, self._config.run.port, self._wiring.certificate
        former = Address.parse(self._former.join).port if self._former and self._former.join else 0
        if former and port in (0, former):
            try:
                return await self._gateway.start(host, former, certificate)
            except GatewayError as error:
                log.warning("workers of the former process cannot come back", reason=str(error))
        return await self._gateway.start(host, port, certificate)

    def _endpoint(self, listening: str) -> Endpoint:
        """Return where workers dial this listener."""
        certificate, advertised = self._wiring.certificate, self._config.run.advertise
        fingerprint = certificate.fingerprint if certificate else ""
        at = Address.parse(listening)
        return Endpoint(str(at.seen_as(advertised)), str(at.here()), fingerprint)

    async def _close_rewards(self) -> None:
        """End the calls that still run; what they would have come to is of no use any more."""
        async with asyncio.timeout(self._config.scheduler.release_timeout_s):
            await self._rewards.aclose()

    async def _close(self) -> None:
        """Give back what is left, whatever happened before."""
        await self._control.aclose()
        if self._host_processes is not None:
            await self._host_processes.aclose()
        if self._agents is not None:
            await self._agents.aclose()
        providers = self._leases.providers
        left, functions = await asyncio.gather(
            asyncio.gather(*(_closed(provider) for provider in providers.values())),
            self._close_rewards(),
            return_exceptions=True,
        )
        if isinstance(functions, BaseException):
            log.error("did not close", what="functions", error=repr(functions))
        if isinstance(left, BaseException):
            raise left
        try:
            write_down(self._wiring.kept.path, dict(zip(providers, left, strict=True)))
        except OSError as error:
            log.error("what is left is not written down", left=left, error=str(error))
        await self._gateway.aclose()

    async def _sample_forever(self) -> None:
        while True:
            await asyncio.sleep(self._wiring.sample_interval_s)
            self._sample()

    def _journal_changed(self) -> None:
        """No worker is read from while the journal is behind. A run without a journal ends at once: nothing that it
        still did could be known to the process that takes it up."""
        self._door.hold(self._journal.behind)
        self._run.hold(self._journal.behind)
        if self._journal.failed is not None:
            self.kill(f"the journal cannot be written: {self._journal.failed}")

    def _sample(self) -> None:
        if refused := self._door.refusals():
            self._journal.meta(REFUSED_NOTE, msgspec.json.encode(refused).decode())
        if self._chats is not None and self._chats.totals != self._chatted:
            self._chatted = msgspec.structs.replace(self._chats.totals)
            self._journal.meta(CHATS_NOTE, msgspec.json.encode(self._chatted).decode())
        self._sampler.sample(self.now_ns())
        self._forget_if_due()
        self._warn()

    def _warn(self) -> None:
        """Warn once of a core that is full, for each budget that is nearly used up, and for each provider that is
        stopped."""
        if self._flushes.share > SATURATED_SHARE and not self._saturated:
            self._saturated = True
            log.warning(saturated(self._load()))
            self._journal.meta(f"{REMARK}{self.scheduler.plan.trainer_provider}: core", saturated(self._load()))
        budget = self.scheduler.budget
        warned = budget is not None and budget.warned
        if budget is not None and warned and not self._warned:
            log.warning(
                "the budget is nearly used",
                budget_usd=budget.budget_usd,
                committed_usd=budget.committed_usd,
                ends_in_s=budget.ends_in_s,
            )
        self._warned = warned
        stopped = dict(self.scheduler.leases.stopped)
        for provider, fault in stopped.items():
            if self._stopped.get(provider) != fault:
                log.warning("a provider is asked for nothing more", provider=provider, cause=fault)
                self._journal.meta(f"{REMARK}{provider}: start", f"its workers could not start: {fault}")
        self._stopped = stopped


def _evaluated(config: Config, sampling: SamplingParameters) -> SamplingParameters | None:
    """How turns of evaluations are drawn, where the policy is evaluated."""
    own = config.evaluation
    if own is None:
        return None
    return msgspec.structs.replace(
        sampling,
        max_new_tokens=own.max_tokens or sampling.max_new_tokens,
        temperature=sampling.temperature if own.temperature is None else own.temperature,
        top_p=sampling.top_p if own.top_p is None else own.top_p,
    )


async def _closed(provider: Provider) -> str:
    """Close a provider in the time that it asks for, and return what is not proven to be gone. A long wait is shown."""
    closing = asyncio.create_task(provider.aclose(), name=f"close {provider.name}")
    try:
        async with asyncio.timeout(provider.closing_s + CLOSING_SLACK_S):
            while not (await asyncio.wait({closing}, timeout=CLOSING_SHOWN_S))[0]:
                log.info("the run's end waits", provider=provider.name, waits_for=provider.waits_for)
            return closing.result()
    except Exception as error:
        log.error("did not close", what=provider.name, error=repr(error))
        return f"it did not close ({error!r}) while it waited for {provider.waits_for}"
    finally:
        closing.cancel()
        await asyncio.gather(closing, return_exceptions=True)


def _on_this_loop(call: Callable[[], None]) -> Callable[[], None]:
    """Any thread may call what is returned: it has this loop make the `call`, unless that is closed."""
    loop = asyncio.get_running_loop()

    def soon() -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(call)

    return soon
