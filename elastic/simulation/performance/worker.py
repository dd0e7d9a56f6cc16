"""A worker as the core meets it: it boots, joins, sends heartbeats, pulls weights, obeys, and says goodbye or dies."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from elastic.core import commands as c
from elastic.core import events as e
from elastic.core.types import (
    NS_PER_S,
    Account,
    Capabilities,
    Chunk,
    Chunks,
    FinishReason,
    LeaseId,
    LoadPhase,
    Nanoseconds,
    TurnId,
    WorkerId,
    WorkerRole,
)
from elastic.protocol.wire import WeightsReport
from elastic.simulation.performance.engine import EngineModel
from elastic.simulation.performance.lending import LentShareModel
from elastic.simulation.performance.profile import Device

if TYPE_CHECKING:
    from elastic.simulation.performance.run import SimulatedRun

NO_VERSION = -1
"""The version of a chunk without tokens, as in live runs."""


class WorkerModel:
    """`share` is the share of a borrowed device. `version` is the version of weights that the trainer's worker
    begins with."""

    def __init__(
        self,
        world: "SimulatedRun",
        worker: WorkerId,
        lease: LeaseId,
        role: WorkerRole,
        device: Device,
        share: LentShareModel | None = None,
    ) -> None:
        self.id = worker
        self.lease = lease
        self.role = role
        self.alive = True
        self.share = share
        self._profile = device.profile
        self._rates = device.rates
        self._world = world
        self.epoch = 0
        self._draining = False
        self._declining = False
        self._born_ns = world.loop.now_ns
        self._booting_ns = 0
        self._trained_ns = 0
        self._training_since_ns: Nanoseconds | None = None
        self._announced = -1
        self._wanted = -1
        self._pulls = False
        self.engine: EngineModel | None = None
        self._operations_free_ns: Nanoseconds = 0
        self._execute: dict[type[c.Command], Callable[[Any], None]] = {
            c.StartTurn: self._start_turn,
            c.AbortTurn: lambda k: self._running.abort(k.turn, k.attempt),
            c.LoadWeights: self._load_weights,
            c.SleepWorker: self._sleep,
            c.WakeWorker: self._wake,
            c.DrainWorker: self._drain,
        }

    @property
    def _running(self) -> EngineModel:
        assert self.engine is not None
        return self.engine

    # What only the world knows

    @property
    def held_turns(self) -> int:
        return 0 if self.engine is None else self.engine.executing + self.engine.pending

    @property
    def decode_s(self) -> float:
        return 0.0 if self.engine is None else self.engine.decode_s

    @property
    def waiting(self) -> int:
        return 0 if self.engine is None else self.engine.pending

    def holds(self, turn: TurnId, attempt: int) -> bool:
        return self.engine is not None and self.engine.holds(turn, attempt)

    def decline(self, duration_ns: Nanoseconds) -> None:
        """Give the device to its owner for `duration_ns`.

        Until then the worker returns every turn, running or arriving, even if it has announced credit. A co-serving
        executor does the same until its credit has followed.
        """

        def end() -> None:
            self._declining = False

        self._declining = True
        self._world.loop.after(duration_ns, end)
        if self.alive and self.engine is not None:
            self.engine.abort_all(FinishReason.STALLED)

    # Its life

    def join(self, version: int | None = None) -> None:
        """Start the process: the worker dials and accepts orders."""
        world = self._world
        epoch = world.next_epoch(self.id) if self.alive else None
        if epoch is None:
            self.alive = False
            return
        self._booting_ns = world.loop.now_ns - self._born_ns
        self.engine = EngineModel(world.loop, self._rates, self._say_tokens, world.flush_ns, self.share)
        if version is not None:
            self.engine.use_version(version)
            self.engine.set_idle_account(Account.IDLE)
        self.epoch = epoch
        capabilities = Capabilities(
            engine="simulated",
            replayable_sampling=True,
            max_context_tokens=self._rates.max_context_tokens,
            device="none",
            tflops=self._rates.tflops,
            memory_gb_per_s=self._rates.memory_gb_per_s,
            max_batch=self._rates.max_batch,
        )
        world.tell(e.WorkerJoined(worker=self.id, epoch=epoch, capabilities=capabilities, weights_version=version))
        self._report()
        world.loop.after(world.heartbeat_ns, self._beat)
        if self.share is not None:
            self.share.watch(self._share_changed)

    def die(self) -> None:
        """Kill the worker. Messages that it has sent still arrive; unsent tokens are lost."""
        if not self.alive:
            return
        self.alive = False
        if self.engine is not None:
            self.engine.flush(unsent_ns=self._world.flush_ns // 2)
            self.engine.close()
        if self.share is not None:
            self.share.end()
        if self.epoch:
            self._world.tell(e.WorkerDisconnected(worker=self.id, epoch=self.epoch))

    def hear(self, command: c.Command) -> None:
        self._world.loop.after(self._world.message_ns, partial(self._obey, command))

    def _obey(self, command: Any) -> None:
        if self.alive and command.epoch == self.epoch:
            self._execute[type(command)](command)

    # What it says

    def _say_tokens(self, chunks: Sequence[Chunk]) -> None:
        self._world.tell(e.TokensReceived(worker=self.id, epoch=self.epoch, chunks=Chunks.of(chunks)))
        if self._draining and not self._running.executing and not self._running.pending:
            self._world.loop.after(0, self._say_goodbye)

    def _beat(self) -> None:
        if self.alive:
            self._running.flush()
            self._report()
            self._world.loop.after(self._world.heartbeat_ns, self._beat)

    def _credit(self) -> int:
        engine, rates = self._running, self._rates
        if self._draining or engine.asleep:
            return 0
        most = rates.max_batch + rates.max_pending
        return self.share.capacity_turns(most) if self.share is not None else most

    def _report(self) -> None:
        engine = self._running
        engine.sync()
        self._announced = self._credit()
        self._world.tell(
            e.WorkerReported(
                worker=self.id,
                epoch=self.epoch,
                capacity_turns=self._announced,
                pending=engine.pending,
                executing=engine.executing,
                progress=engine.iterations,
                accounts_ns=self._accounts_ns(),
                decoded_tokens=engine.decoded_tokens,
                kv_used_share=engine.kv_used_share,
                prefix_hit_tokens=engine.prefix_hit_tokens,
                prompt_tokens=engine.prompt_tokens,
                loading=self._load_phase(),
                # Its bytes come all the time.
                load_progress=self._world.loop.now_ns if self._pulls else 0,
            )
        )

    def _load_phase(self) -> LoadPhase:
        if self._pulls:
            return LoadPhase.PULLING
        if not self._running.holds_admissions:
            return LoadPhase.NONE
        return LoadPhase.WAITING if self._running.executing else LoadPhase.APPLYING

    def _accounts_ns(self) -> dict[Account, int]:
        """Return the engine's accounts, with the boot time before them and training taken out of sleep."""
        total = dict(self._running.accounts_ns)
        total[Account.BOOTING] = self._booting_ns
        trained_ns = self._trained_ns
        if self._training_since_ns is not None:
            trained_ns += self._world.loop.now_ns - self._training_since_ns
        if trained_ns:
            total[Account.TRAINING] = trained_ns
            total[Account.ASLEEP] = total.get(Account.ASLEEP, 0) - trained_ns
        return total

    def _share_changed(self) -> None:
        """Follow a change of the share that the device's owner lends."""
        if not self.alive or self.share is None:
            return
        if self.share.hold_back():
            self._running.abort_all(FinishReason.STALLED)
        else:
            self._running.retry()
        if self._credit() != self._announced:
            self._report()

    # What it is told

    def _start_turn(self, command: c.StartTurn) -> None:
        declined = FinishReason.ABORTED if self._draining or self._running.asleep else None
        if self._declining or (self.share is not None and self.share.hold_back()):
            declined = FinishReason.STALLED
        job = self._world.job(command)
        if declined is not None:
            self._say_tokens([Chunk(command.slot, command.start, 0, NO_VERSION, declined)])
        elif job is not None:
            self._running.submit(job)

    def _load_weights(self, command: c.LoadWeights) -> None:
        world, began_ns = self._world, self._world.loop.now_ns
        self._wanted = command.version
        have = self._running.version
        if have == command.version:
            world.tell(e.WeightsApplied(worker=self.id, epoch=self.epoch, version=command.version))
            return
        self._pulls = True
        size_bytes, pulled_ns = world.relay.pull(have, command.version, self._profile)
        world.loop.at(pulled_ns, lambda: self._pulled(command, size_bytes, began_ns))

    def _pulled(self, command: c.LoadWeights, size_bytes: int, began_ns: Nanoseconds) -> None:
        if not self.alive or self._wanted != command.version:
            return
        self._pulls = False
        world, pulled_ns = self._world, self._world.loop.now_ns
        apply_ns = round(self._profile.apply_s * 1e9)

        def applied() -> None:
            if not self.alive:
                return
            self._running.use_version(command.version, world.weight_mode)
            self._running.set_idle_account(Account.DRAINING if self._draining else Account.IDLE)
            event = e.WeightsApplied(worker=self.id, epoch=self.epoch, version=command.version)
            pull_s, apply_s = (pulled_ns - began_ns) / NS_PER_S, (world.loop.now_ns - pulled_ns) / NS_PER_S
            world.tell(event, WeightsReport(command.version, "", size_bytes, pull_s, apply_s))

        self._running.hold_admissions(lambda: world.loop.after(apply_ns, applied), world.weight_mode)

    def _sleep(self, _: c.SleepWorker) -> None:
        self._running.sleep()
        self._world.tell(e.WorkerSlept(worker=self.id, epoch=self.epoch))

    def _wake(self, _: c.WakeWorker) -> None:
        self._running.wake()
        self._report()
        self._world.tell(e.WorkerAwoke(worker=self.id, epoch=self.epoch))

    def _drain(self, _: c.DrainWorker) -> None:
        if self._draining:
            return
        self._draining = True
        engine = self._running
        engine.set_idle_account(Account.DRAINING)
        if not engine.executing and not engine.pending:
            self._say_goodbye()

    def _say_goodbye(self) -> None:
        if not self.alive:
            return
        self._report()
        self._world.tell(e.WorkerDisconnected(worker=self.id, epoch=self.epoch, goodbye=True))
        self.alive = False
        self._running.close()
        if self.share is not None:
            self.share.end()
        self._world.loop.after(round(self._profile.exit_s * 1e9), lambda: self._world.worker_left(self.id))

    # The trainer's

    def train(self, duration_ns: Nanoseconds, then: Callable[[], None]) -> None:
        """Train on the device while the engine sleeps. Orders are carried out one after the other."""
        loop = self._world.loop
        begin_ns = max(loop.now_ns + self._world.message_ns, self._operations_free_ns)
        self._operations_free_ns = begin_ns + duration_ns

        def begin() -> None:
            self._training_since_ns = loop.now_ns

        def end() -> None:
            if not self.alive:
                return
            if self._training_since_ns is not None:
                self._trained_ns += loop.now_ns - self._training_since_ns
                self._training_since_ns = None
            then()

        loop.at(begin_ns, begin)
        loop.at(self._operations_free_ns, end)
