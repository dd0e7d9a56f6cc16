"""The live world: carries out what the core decides, and tells the core what happens.

Everything runs on one event loop. `feed` takes one event to the core and carries out its commands; frames to
workers are queued without waiting, and only providers need tasks of their own.
"""

import asyncio
import secrets
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import structlog

from elastic import wire
from elastic.config import Config
from elastic.core import commands as c
from elastic.core import events as e
from elastic.core.scheduler import Phase, Scheduler
from elastic.core.types import EndCause, TurnState, WeightMode, WorkerId
from elastic.envs.base import Environment
from elastic.machine import CpuSampler
from elastic.runtime.gateway import Gateway
from elastic.runtime.journal import Journal, tokens_event
from elastic.runtime.refusals import REFUSED_NOTE
from elastic.runtime.rewards import FunctionUse, MakePool, RewardDispatch
from elastic.runtime.rollout import Episode, OpenTurn, RolloutLimits, Rollouts
from elastic.runtime.status import ProviderStatus, RunStatus, run_status, success_rate, tokens_per_s, total_tokens
from elastic.weights.rights import RelayRights
from functions.base import Call
from functions.rewards import FinishedTrajectory
from providers.base import LeaseRequest, Provider, ProviderEvent, WorkerTicket

log = structlog.get_logger(__name__)

SAMPLE_INTERVAL_S = 0.5
LATE_WAKEUP_S = 0.05
"""A timer this late means the loop was held up: what lies in the sockets is older than the deadline, so it is
read first. Otherwise a busy orchestrator would fence workers for its own silence."""
LATE_WAKEUPS_MAX = 8
"""A loop that stays late this often in a row is not held up but overloaded: deadlines pass then all the same."""
THROUGHPUT_WINDOW = 10
"""Samples over which tokens per second are averaged."""


class Orchestrator:
    """One run. `run` returns the cause of failure, empty when the run reached its end.

    `engines` has the engine settings of those providers whose workers do not get the welcome's, and `relay_rights`
    whom the weights' relay lets do what, where it can tell them apart.
    """

    def __init__(
        self,
        config: Config,
        scheduler: Scheduler,
        journal: Journal,
        make_providers: Callable[[str, Callable[[], int]], Mapping[str, Provider]],
        make_environment: Callable[[], Environment],
        stop_token_ids: tuple[int, ...],
        welcome: wire.Welcome,
        clock_ns: Callable[[], int] = time.monotonic_ns,
        observe: Callable[[RunStatus], None] = lambda _: None,
        make_reward_pool: MakePool | None = None,
        engines: Mapping[str, dict[str, Any]] | None = None,
        relay_rights: RelayRights | None = None,
    ) -> None:
        self.scheduler = scheduler
        self._config = config
        self._journal = journal
        self._make_providers = make_providers
        self._stop_token_ids = stop_token_ids
        self._clock_ns = clock_ns
        self._start_ns = clock_ns()
        self._observe = observe
        self._engines = engines or {}
        self._relay_rights = relay_rights
        self._publisher = ""
        """The public key of the trainer that is there now."""
        self._gateway = Gateway(self, welcome)
        self._providers: Mapping[str, Provider] = {}
        self._inbox: deque[tuple[e.Event, list[wire.Chunk]]] = deque()
        self._draining = False
        self._closing = False
        self._timer: asyncio.TimerHandle | None = None
        self._armed_ns: int | None = None
        self._late_wakeups = 0
        self._ended = asyncio.Event()
        self._failed = ""
        self._counts: dict[str, ProviderStatus] = {}
        self._rewards: list[float] = []
        self._last_success: float | None = None
        self._cpu = CpuSampler()
        self._unpublished: dict[int, tuple[int, int, dict[str, Any]]] = {}
        """By version: the step that is done but for putting that on the relay, as it was journaled."""
        self._token_marks: deque[tuple[int, int]] = deque(maxlen=THROUGHPUT_WINDOW)
        self._tasks: asyncio.TaskGroup | None = None
        self._rollouts = Rollouts(
            config.run.seed,
            RolloutLimits(
                config.rollout.max_turns,
                config.rollout.max_tokens_per_turn,
                config.engine.max_context_tokens,
                config.environment.step_timeout_s,
            ),
            make_environment,
            self.feed,
            self.now_ns,
            self._trajectory_ended,
            scored_by_function=make_reward_pool is not None,
        )
        self._function_use = FunctionUse()
        self._scoring: RewardDispatch | None = None
        if make_reward_pool is not None:
            self._scoring = RewardDispatch(make_reward_pool(self._metered), config.rewards.timeout_s, self.feed)
        self._executors: dict[type[Any], Callable[[Any], None]] = {
            c.AcquireLease: self._acquire_lease,
            c.ReleaseLease: self._release_lease,
            c.StartTurn: self._start_turn,
            c.AbortTurn: lambda k: self._gateway.send(k.worker, k.epoch, wire.Abort(k.turn, k.attempt)),
            c.FinishTurn: self._finish_turn,
            c.FailTurn: lambda k: self._rollouts.fail_turn(k.turn, k.cause),
            c.LoadWeights: self._load_weights,
            c.SleepWorker: lambda k: self._gateway.send(k.worker, k.epoch, wire.Sleep()),
            c.WakeWorker: lambda k: self._gateway.send(k.worker, k.epoch, wire.Wake()),
            c.DrainWorker: lambda k: self._gateway.send(k.worker, k.epoch, wire.Drain(k.reason)),
            c.FenceWorker: self._fence_worker,
            c.BarLease: lambda k: self._providers[k.provider].bar(k.lease),
            c.StartGroup: self._start_group,
            c.CancelTrajectory: lambda k: self._rollouts.cancel(k.trajectory),
            c.ScoreTrajectory: self._score_trajectory,
            c.RecordReward: lambda k: self._rollouts.record_reward(k.trajectory, k.reward, k.cause),
            c.TrainGroup: self._train_group,
            c.DropGroup: self._drop_group,
            c.UpdateWeights: self._update_weights,
            c.EndRun: self._end_run,
        }
        self._hearers: dict[type[Any], Callable[[WorkerId, int, Any], None]] = {
            wire.Heartbeat: self._heard_heartbeat,
            wire.Tokens: lambda w, n, m: self._feed_with(tokens_event(w, n, m.chunks), m.chunks),
            wire.WeightsReport: self._heard_weights,
            wire.Slept: lambda w, n, _: self.feed(e.WorkerSlept(worker=w, epoch=n)),
            wire.Awoke: lambda w, n, _: self.feed(e.WorkerAwoke(worker=w, epoch=n)),
            wire.Goodbye: self._heard_goodbye,
            wire.Trained: lambda w, n, m: self.feed(e.GroupTrained(worker=w, epoch=n, group=m.group)),
            wire.Stepped: self._heard_stepped,
            wire.Published: self._heard_published,
            wire.TrainerFailed: lambda w, n, m: self.feed(e.TrainerFailed(worker=w, epoch=n, error=m.error)),
        }

    def now_ns(self) -> int:
        """Nanoseconds since the run began: the core's time."""
        return self._clock_ns() - self._start_ns

    async def run(self, host: str = "127.0.0.1", port: int = 0) -> str:
        """Run to the end, give everything back, and return the cause of failure ("" if there is none).

        Raises `GatewayError`, `ProviderUnavailable` or `FunctionError` when the run cannot even begin.
        """
        join = await self._gateway.start(host, port)
        self._providers = self._make_providers(join, self.now_ns)
        try:
            async with asyncio.TaskGroup() as tasks:
                self._tasks = tasks
                if self._scoring is not None:
                    await self._scoring.start()
                for provider in self._providers.values():
                    for line in await provider.reconcile():
                        log.warning("left over from an earlier process", what=line)
                    await provider.start(self._from_provider)
                sampler = tasks.create_task(self._sample_forever(), name="sampler")
                try:
                    await self._ended.wait()
                finally:
                    self._closing = True
                sampler.cancel()
                self._rollouts.cancel_all()
                await self._close_scoring()
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        finally:
            self._closing = True
            if self._timer is not None:
                self._timer.cancel()
            await self._close()
        self._sample()
        return self._failed

    async def _close_scoring(self) -> None:
        """End the calls that still run; what they would have come to is of no use any more."""
        if self._scoring is not None:
            async with asyncio.timeout(self._config.scheduler.release_timeout_s):
                await self._scoring.aclose()

    async def _close(self) -> None:
        """Give back what is left, whatever happened before."""
        timeout_s = self._config.scheduler.release_timeout_s
        closing = {name: asyncio.wait_for(p.aclose(), timeout_s) for name, p in self._providers.items()}
        closing["functions"] = self._close_scoring()
        results = await asyncio.gather(*closing.values(), return_exceptions=True)
        for name, result in zip(closing, results, strict=True):
            if isinstance(result, BaseException):
                log.error("did not close", what=name, error=repr(result))
        await self._gateway.aclose()

    def stop(self, reason: str) -> None:
        """Give everything back and end; the run then counts as failed for this reason."""
        self.feed(e.StopRequested(reason=reason))

    def kill(self, reason: str) -> None:
        """End at once: what still runs is killed, and nobody is waited for."""
        self._failed = self._failed or self.scheduler.failed or reason
        self._closing = True
        self._ended.set()

    # Events in

    def feed(self, event: e.Event) -> None:
        """Take one event to the core and carry out what it answers. May be called from a command's execution."""
        self._feed_with(event, [])

    def _feed_with(self, event: e.Event, chunks: list[wire.Chunk]) -> None:
        self._inbox.append((event, chunks))
        if self._draining:
            return
        self._draining = True
        try:
            while self._inbox:
                self._handle(*self._inbox.popleft())
            self._arm()
        except Exception as error:
            # Whoever brought the event cannot help; a core that broke off halfway must not go on.
            log.exception("internal error", event_kind=type(event).__name__)
            self._inbox.clear()
            self.kill(f"internal error: {type(error).__name__}: {error}")
        finally:
            self._draining = False

    def _handle(self, event: e.Event, chunks: list[wire.Chunk]) -> None:
        now_ns = self._event_ns(event)
        if isinstance(event, e.TokensReceived):
            self._journal.frame(event.worker, event.epoch, chunks, now_ns)
        else:
            self._journal.event(event, now_ns)
            self._note(event)
        for command in self.scheduler.handle(event, now_ns):
            if self._closing:
                continue
            if isinstance(command, c.AcceptTokens):
                self._accept(event, [chunks[i] for i in command.chunks], now_ns)
            else:
                self._executors[type(command)](command)

    def _event_ns(self, event: e.Event) -> int:
        """When an event counts as having happened: before any deadline that no Tick has let pass yet."""
        now_ns = self.now_ns()
        if self._armed_ns is None or isinstance(event, e.Tick):
            return now_ns
        return min(now_ns, self._armed_ns - 1)

    def _arm(self) -> None:
        """Have the core woken when it asked to be."""
        at_ns = None if self._closing else self.scheduler.next_wakeup_ns()
        if at_ns == self._armed_ns or self._late_wakeups:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._armed_ns = at_ns
        self._timer = None
        if at_ns is not None:
            loop = asyncio.get_running_loop()
            delay_s = max(0.0, (at_ns - self.now_ns()) / 1e9)
            self._timer = loop.call_later(delay_s, self._wake, loop.time() + delay_s)

    def _wake(self, due_s: float) -> None:
        loop = asyncio.get_running_loop()
        if loop.time() - due_s > LATE_WAKEUP_S and self._late_wakeups < LATE_WAKEUPS_MAX:
            self._late_wakeups += 1
            self._timer = loop.call_later(LATE_WAKEUP_S / 2, self._wake, loop.time() + LATE_WAKEUP_S / 2)
            return
        self._late_wakeups = 0
        self._armed_ns = None
        self.feed(e.Tick())

    def _from_provider(self, event: ProviderEvent) -> None:
        self.feed(event)

    def on_ready(self, worker: WorkerId, epoch: int, ready: wire.Ready) -> None:
        trainer = self.scheduler.trainer()
        if trainer is not None and trainer.id == worker:
            self._publisher = ready.publisher
            self._journal.meta("publisher", ready.publisher)
        self.feed(
            e.WorkerJoined(
                worker=worker, epoch=epoch, capabilities=ready.capabilities, weights_version=ready.weights_version
            )
        )

    def on_message(self, worker: WorkerId, epoch: int, message: wire.FromWorker) -> None:
        hear = self._hearers.get(type(message))
        if hear is not None:
            hear(worker, epoch, message)

    def on_disconnected(self, worker: WorkerId, epoch: int, goodbye: bool) -> None:
        self.feed(e.WorkerDisconnected(worker=worker, epoch=epoch, goodbye=goodbye))

    def on_barred(self, worker: WorkerId, epoch: int, cause: str) -> None:
        self.feed(e.WorkerBarred(worker=worker, epoch=epoch, cause=cause))

    def _heard_heartbeat(self, worker: WorkerId, epoch: int, beat: wire.Heartbeat) -> None:
        self.feed(
            e.WorkerReported(
                worker=worker,
                epoch=epoch,
                capacity_turns=beat.capacity_turns,
                pending=beat.pending,
                executing=beat.executing,
                progress=beat.progress,
                accounts_ns=beat.accounts_ns,
                decoded_tokens=beat.decoded_tokens,
                kv_used_share=beat.kv_used_share,
                prefix_hit_tokens=beat.prefix_hit_tokens,
                prompt_tokens=beat.prompt_tokens,
                loading=beat.loading,
                load_progress=beat.load_progress,
            )
        )

    def _heard_goodbye(self, worker: WorkerId, epoch: int, goodbye: wire.Goodbye) -> None:
        self.feed(
            e.WorkerReported(
                worker=worker,
                epoch=epoch,
                capacity_turns=0,
                pending=0,
                executing=0,
                progress=0,
                accounts_ns=goodbye.accounts_ns,
                decoded_tokens=goodbye.decoded_tokens,
            )
        )

    def _heard_weights(self, worker: WorkerId, epoch: int, report: wire.WeightsReport) -> None:
        self._journal.pull(
            self.now_ns(),
            worker,
            report.version,
            report.pulled_bytes,
            report.pull_s,
            report.apply_s,
            report.error,
            full_bytes=report.full_bytes,
            split_s=report.split_s,
            refused=report.refused,
        )
        if report.error:
            self.feed(e.WeightsFailed(worker=worker, epoch=epoch, version=report.version, reason=report.error))
        else:
            self.feed(e.WeightsApplied(worker=worker, epoch=epoch, version=report.version))

    def _heard_stepped(self, worker: WorkerId, epoch: int, stepped: wire.Stepped) -> None:
        step, concluded = self.scheduler.step, len(self.scheduler.history)
        self.feed(e.WeightsPublished(worker=worker, epoch=epoch, version=stepped.version))
        if step is not None and len(self.scheduler.history) > concluded:
            self._last_success = success_rate(self._rewards)
            record = msgspec.to_builtins(self.scheduler.history[-1])
            body = record | {"success_rate": self._last_success, "trainer": stepped.metrics}
            self._unpublished[stepped.version] = step.number, self.now_ns(), body
            self._journal.step(*self._unpublished[stepped.version])
            self._rewards = []
        for group, reason in stepped.unusable.items():
            self._journal.unusable(group, reason)

    def _heard_published(self, worker: WorkerId, epoch: int, published: wire.Published) -> None:
        """Complete the journal's account of the step that the version is of."""
        if (step := self._unpublished.pop(published.version, None)) is not None:
            number, t_ns, body = step
            weights = {"version": published.version, "changed": published.changed}
            trainer = body["trainer"] | published.metrics
            self._journal.step(number, t_ns, body | {"trainer": trainer, "weights": weights})

    # Commands out

    def _acquire_lease(self, command: c.AcquireLease) -> None:
        offer = self.scheduler.leases.offers[command.provider]
        tickets = tuple(
            WorkerTicket(f"{command.lease}.{n}" if n else command.lease, secrets.token_urlsafe(32))
            for n in range(offer.workers_per_lease)
        )
        trains = command.provider == self.scheduler.plan.trainer_provider
        for ticket in tickets:
            engine, relay_token = self._engines.get(command.provider), self._relay_token(ticket.worker, trains)
            self._gateway.expect(ticket.worker, ticket.token, engine, relay_token, trains=trains)
        self._spawn(
            self._acquire(command, LeaseRequest(lease=command.lease, tickets=tickets)), f"acquire {command.lease}"
        )

    def _relay_token(self, worker: WorkerId, trains: bool) -> str | None:
        """What a worker may do on the relay; the trainer's is the relay's owner."""
        if self._relay_rights is None:
            return None
        return self._relay_rights.owner if trains else self._relay_rights.issue(worker)

    async def _acquire(self, command: c.AcquireLease, request: LeaseRequest) -> None:
        try:
            async with asyncio.timeout(self._config.scheduler.acquire_timeout_s):
                await self._providers[command.provider].acquire(request)
        except Exception as error:
            self.feed(e.LeaseRefused(lease=command.lease, reason=f"{type(error).__name__}: {error}"))

    def _release_lease(self, command: c.ReleaseLease) -> None:
        self._spawn(self._release(command), f"release {command.lease}")

    async def _release(self, command: c.ReleaseLease) -> None:
        try:
            async with asyncio.timeout(self._config.scheduler.release_timeout_s):
                await self._providers[command.provider].release(command.lease)
        except Exception as error:
            log.warning("release failed; it will be repeated", lease=command.lease, error=repr(error))

    def _spawn(self, work: Any, name: str) -> None:
        assert self._tasks is not None
        self._tasks.create_task(work, name=name)

    def _start_turn(self, command: c.StartTurn) -> None:
        turn = self._rollouts.open_turns.get(command.turn)
        if turn is None:
            return
        if (left_ns := self._left_ns(turn)) is not None:
            self._journal.move(
                turn.id, command.attempt, turn.worker, command.worker, left_ns, self.now_ns(), command.start
            )
        turn.attempts = command.attempt
        turn.worker = command.worker
        self._gateway.send(
            command.worker,
            command.epoch,
            wire.Generate(
                turn=turn.id,
                attempt=command.attempt,
                token_ids=turn.prompt + turn.token_ids,
                start=command.start,
                max_new_tokens=self._config.rollout.max_tokens_per_turn,
                stop_token_ids=self._stop_token_ids,
                temperature=self._config.rollout.temperature,
                noise_seed=turn.noise_seed,
                recompute=command.recompute,
            ),
        )

    def _accept(self, event: e.Event, chunks: list[wire.Chunk], now_ns: int) -> None:
        assert isinstance(event, e.TokensReceived)
        tokens = 0
        for chunk in chunks:
            turn = self._rollouts.open_turns.get(chunk.turn)
            if turn is None:
                continue
            turn.accept(chunk, now_ns)
            tokens += len(chunk.token_ids)
        worker = self.scheduler.fleet.workers.get(event.worker)
        if worker is not None:
            self._count(worker.provider).tokens += tokens

    def _finish_turn(self, command: c.FinishTurn) -> None:
        turn = self._rollouts.finish_turn(command.turn)
        if turn is not None:
            self._journal.turn(
                turn.id,
                turn.trajectory,
                turn.requested_ns,
                turn.first_token_ns,
                self.now_ns(),
                len(turn.prompt),
                len(turn.token_ids),
                turn.attempts,
                turn.cached_tokens,
                turn.worker,
            )

    def _load_weights(self, command: c.LoadWeights) -> None:
        mode = WeightMode(self._config.weights.mode)
        self._gateway.send(command.worker, command.epoch, wire.PullWeights(command.version, mode, self._publisher))

    def _fence_worker(self, command: c.FenceWorker) -> None:
        self._gateway.fence(command.worker, command.reason)
        if self._relay_rights is not None:
            self._relay_rights.revoke(command.worker)

    def _start_group(self, command: c.StartGroup) -> None:
        assert self._tasks is not None
        for trajectory in command.trajectories:
            self._rollouts.start(trajectory, self._tasks)

    def _score_trajectory(self, command: c.ScoreTrajectory) -> None:
        assert self._scoring is not None
        assert self._tasks is not None
        episode = self._rollouts.finished[command.trajectory]
        finished = FinishedTrajectory(
            trajectory=episode.trajectory,
            token_ids=episode.token_ids,
            trained=episode.trained,
            seed=episode.seed,
            environment_settings=self._config.environment.settings,
            environment_reward=episode.reward,
            settings=self._config.rewards.settings,
            truncated=episode.truncated,
        )
        self._scoring.score(command, finished, self._tasks)

    def _metered(self, call: Call) -> None:
        self._function_use.count(call)
        self._journal.call(self.now_ns(), *msgspec.structs.astuple(call))

    def _train_group(self, command: c.TrainGroup) -> None:
        episodes = [self._rollouts.finished.pop(t) for t in command.trajectories]
        self._journal_group(command, episodes, "")
        trajectories = [episode.data() for episode in episodes]
        self._to_trainer(wire.TrainGroup(command.step, command.group, command.slot, trajectories))

    def _drop_group(self, command: c.DropGroup) -> None:
        self._journal_group(command, self._rollouts.episodes_of(command.trajectories), command.reason)
        finished = [self._rollouts.finished.pop(trajectory, None) for trajectory in command.trajectories]
        tokens = sum(episode.policy_tokens for episode in finished if episode is not None)
        if command.slot is not None:
            self._to_trainer(wire.SkipGroup(command.step, command.group, command.slot, command.reason, tokens))

    def _journal_group(self, command: c.TrainGroup | c.DropGroup, episodes: Sequence[Episode], dropped: str) -> None:
        """What became of a group, with the length of each member so far and the age of its tokens."""
        version = self.scheduler.version or 0
        ages = Counter(version - token for episode in episodes for token in episode.policy_versions())
        lengths = [episode.policy_tokens for episode in episodes]
        self._journal.group(
            self.now_ns(), command.group, command.step, version, dropped, {"lengths": lengths, "tokens_by_age": ages}
        )

    def _update_weights(self, command: c.UpdateWeights) -> None:
        for slot in command.empty_slots:
            self._to_trainer(wire.SkipGroup(command.step, "", slot, "no group of use was left for it"))
        self._to_trainer(wire.Update(command.step, command.version, list(command.pulled)))

    def _to_trainer(self, message: wire.FromOrchestrator) -> None:
        trainer = self.scheduler.trainer()
        if trainer is not None:
            self._gateway.send(trainer.id, trainer.epoch, message)

    def _end_run(self, command: c.EndRun) -> None:
        self._failed = command.failed
        self._ended.set()

    # Watching

    def _note(self, event: e.Event) -> None:
        """Count the leases that end."""
        if isinstance(event, e.LeaseEnded):
            lease = self.scheduler.leases.leases.get(event.lease)
            if lease is not None:
                count = self._count(lease.provider)
                count.leases_ended += 1
                count.preemptions += event.cause is EndCause.PREEMPTED

    def _left_ns(self, turn: OpenTurn) -> int | None:
        """When a turn that starts again was last taken off a worker, as the core knows it."""
        record = self.scheduler.turns.live.get(turn.id)
        chapters = record.story.chapters if record is not None and turn.attempts else ()
        return next((at_ns for at_ns, _, state, *_ in reversed(chapters) if state is TurnState.QUEUED), None)

    def _trajectory_ended(self, episode: Episode, cause: str) -> None:
        step, group, _ = episode.trajectory.split("/")
        if not cause:
            self._rewards.append(episode.reward)
        self._journal.trajectory(
            episode.trajectory,
            int(step),
            f"{step}/{group}",
            episode.started_ns,
            self.now_ns(),
            None if cause else episode.reward,
            cause,
            episode.turns,
            episode.policy_tokens,
            msgspec.msgpack.encode(episode.token_ids),
            truncated=episode.truncated,
        )

    def _count(self, provider: str) -> ProviderStatus:
        return self._counts.setdefault(provider, ProviderStatus())

    def status(self) -> RunStatus:
        """The run as it is now."""
        now_ns = self.now_ns()
        self._token_marks.append((now_ns, total_tokens(self._counts)))
        return run_status(
            self._config.run.name,
            self.scheduler,
            now_ns,
            self._counts,
            rewards=self._rewards,
            last_success_rate=self._last_success,
            tokens_per_s=tokens_per_s(self._token_marks),
            function_usd=self._function_use.usd,
            cpu_share=self._cpu.share(),
        )

    async def _sample_forever(self) -> None:
        while True:
            await asyncio.sleep(SAMPLE_INTERVAL_S)
            self._sample()
            if self._journal.failed is not None and self.scheduler.phase is not Phase.STOPPING:
                self.stop(f"the journal cannot be written: {self._journal.failed}")

    def _sample(self) -> None:
        """Journal how the run stands, with the books as they are, and show it."""
        status = self.status()
        self._journal.sample(self.now_ns(), msgspec.to_builtins(status))
        self._journal.books(self.scheduler.ledger)
        if refused := self._gateway.refusals.counts():
            self._journal.meta(REFUSED_NOTE, msgspec.json.encode(refused).decode())
        self._observe(status)
