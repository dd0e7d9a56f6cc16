"""The scheduler: every event of a run goes in, commands come out, and `next_wakeup_ns` says when to ask again.

It composes the lease table, the fleet, the turns, the step and the ledger, and owns every decision that depends
on time or failure. It reads no clock and does no I/O; the same events at the same times always lead to the same
state. Sources: DESIGN §1, §4; ROSE §4.3; RLBoost §4.1–4.3.
"""

import math
from collections.abc import Callable
from enum import StrEnum
from typing import Any

from elastic.core import commands as c
from elastic.core import events as e
from elastic.core.fleet import Fleet, Worker
from elastic.core.leases import Lease, LeaseTable
from elastic.core.ledger import Ledger
from elastic.core.policy import Policies, StepRecord
from elastic.core.steps import Group, Step
from elastic.core.timers import Timers
from elastic.core.turns import Turn, Turns
from elastic.core.types import (
    EndCause,
    FinishReason,
    GroupState,
    LeaseState,
    Limits,
    Nanoseconds,
    Plan,
    Progress,
    TrajectoryId,
    TurnState,
    WorkerId,
    WorkerRole,
    WorkerState,
)

MAX_LOAD_FAILURES = 3
"""A worker that cannot load weights this often in a row is given back; a fresh one may have better luck."""
_SPEAKING = (WorkerState.READY, WorkerState.ASLEEP, WorkerState.DRAINING, WorkerState.LOADING)


class Phase(StrEnum):
    STARTING = "starting"
    RUNNING = "running"
    STOPPING = "stopping"
    ENDED = "ended"


class TrainerMode(StrEnum):
    """What the trainer's device is doing: it generates awake and trains asleep, never both."""

    ABSENT = "absent"
    AWAKE = "awake"
    RESTING = "resting"
    ASLEEP = "asleep"
    WAKING = "waking"


class Scheduler:
    """One run's state machine. `handle` is its only way in; everything else may be read."""

    def __init__(self, plan: Plan, limits: Limits, policies: Policies, now_ns: Nanoseconds) -> None:
        self.plan = plan
        self.limits = limits
        self.policies = policies
        self.now_ns = now_ns
        self.phase = Phase.STARTING
        self.failed = ""
        self.leases = LeaseTable()
        self.fleet = Fleet(limits.max_pending)
        self.turns = Turns()
        self.ledger = Ledger()
        self.timers = Timers()
        self.step: Step | None = None
        self.version: int | None = None
        self.history: list[StepRecord] = []
        self.trainer_mode = TrainerMode.ABSENT
        self.training: str | None = None
        self._reseed = False
        self._unsettled = False
        self._affinity: dict[TrajectoryId, WorkerId] = {}
        self._turn_of: dict[TrajectoryId, str] = {}
        self._out: list[c.Command] = []
        self._handlers: dict[type[Any], Callable[[Any], None]] = {
            e.Tick: lambda _: None,
            e.OfferChanged: self._on_offer,
            e.LeaseGranted: self._on_granted,
            e.LeaseRefused: self._on_refused,
            e.LeaseNotice: self._on_notice,
            e.LeaseEnded: self._on_lease_ended,
            e.WorkerJoined: self._on_joined,
            e.WorkerReported: self._on_reported,
            e.WorkerSlept: self._on_slept,
            e.WorkerAwoke: self._on_awoke,
            e.WorkerDisconnected: self._on_disconnected,
            e.WeightsApplied: self._on_weights_applied,
            e.WeightsFailed: self._on_weights_failed,
            e.TokensReceived: self._on_tokens,
            e.TurnRequested: self._on_turn_requested,
            e.TrajectoryFinished: self._on_trajectory_finished,
            e.TrajectoryFailed: self._on_trajectory_failed,
            e.GroupTrained: self._on_group_trained,
            e.WeightsPublished: self._on_published,
            e.StopRequested: self._on_stop,
        }
        self._due: dict[str, Callable[[str], None]] = {
            "grant": self._grant_due,
            "boot": lambda w: self._give_up_worker(w, EndCause.BOOT_TIMEOUT),
            "load": lambda w: self._give_up_worker(w, EndCause.FENCED),
            "reload": self._reload_due,
            "heartbeat": lambda w: self._give_up_worker(w, EndCause.FENCED),
            "stall": lambda w: self._give_up_worker(w, EndCause.FENCED),
            "resume": lambda w: self._give_up_worker(w, EndCause.LOST),
            "drain": lambda w: self._give_up_worker(w, EndCause.RELEASED),
            "release": self._release_due,
            "expiry": self._expiry_due,
            "back-off": self._provision,
            "token": self._token_due,
            "handover": self._handover_due,
            "capacity": lambda _: self._fail("no capacity: no worker could take a queued turn in time"),
            "training": lambda _: self._fail("the trainer did not finish in time"),
            "waking": lambda _: self._fail("the trainer's device did not change between training and generating"),
            "seeding": lambda _: self._look_at_step(),
            "reseed": self._reseed_due,
            "stop": self._stop_due,
        }

    def handle(self, event: e.Event, now_ns: Nanoseconds) -> list[c.Command]:
        """Take one event at a time (never earlier than the last); returns what the shell is to do, in order."""
        if self.phase is Phase.ENDED:
            return []
        self.now_ns = max(self.now_ns, now_ns)
        self._handlers[type(event)](event)
        for what, key in self.timers.pop_due(self.now_ns):
            self._due[what](key)
        self._pump()
        if self._unsettled:
            self._advance_step()
        out, self._out = self._out, []
        return out

    def next_wakeup_ns(self) -> Nanoseconds | None:
        """When to call `handle` with a Tick if nothing else happens before."""
        return None if self.phase is Phase.ENDED else self.timers.next_ns()

    @property
    def oldest_version(self) -> int:
        """The oldest weights version that new tokens may come from (invariant 4)."""
        return (self.version or 0) - self.plan.staleness_bound

    def trainer(self) -> Worker | None:
        return next((w for w in self.fleet.workers.values() if w.role is WorkerRole.TRAINER), None)

    # Leases

    def _on_offer(self, event: e.OfferChanged) -> None:
        self.leases.offers[event.offer.provider] = event.offer
        self._provision(event.offer.provider)

    def _provision(self, provider: str) -> None:
        offer = self.leases.offers.get(provider)
        if offer is None or self.phase not in (Phase.STARTING, Phase.RUNNING):
            return
        if self.timers.waiting("back-off", provider):
            return
        if offer.role is WorkerRole.TRAINER:
            wanted = 1 - self.leases.held(provider)
        else:
            asked = sum(
                lease.provider == provider and lease.state is LeaseState.REQUESTED
                for lease in self.leases.leases.values()
            )
            wanted = self.policies.provisioning.leases_wanted(offer, self.leases.held(provider)) - asked
        for _ in range(wanted):
            lease = self.leases.request(provider)
            self._out.append(c.AcquireLease(lease=lease.id, provider=provider))
            self._wait("grant", lease.id, self.limits.acquire_timeout_ns)

    def _grant_due(self, lease_id: str) -> None:
        lease = self.leases.leases[lease_id]
        lease.release_reason = "not granted in time"
        self._out.append(c.ReleaseLease(lease=lease_id, provider=lease.provider, reason=lease.release_reason))
        self._wait("grant", lease_id, self.limits.release_timeout_ns)

    def _on_granted(self, event: e.LeaseGranted) -> None:
        lease = self.leases.leases.get(event.lease)
        if lease is None or lease.state is not LeaseState.REQUESTED:
            return
        self.timers.clear("grant", lease.id)
        self.leases.move(lease, LeaseState.GRANTED, self.now_ns, "granted")
        self.leases.refusals.pop(lease.provider, None)
        lease.workers, lease.expires_at_ns = event.workers, event.expires_at_ns
        offer = lease.offer
        for worker in event.workers:
            self.fleet.add(worker, lease.id, lease.provider, offer.role)
            self.ledger.open(
                lease.id, worker, lease.provider, offer.gpus_per_worker, offer.usd_per_gpu_hour, self.now_ns
            )
            self._wait("boot", worker, self.limits.boot_timeout_ns)
        if lease.expires_at_ns is not None:
            margin_ns = lease.expires_at_ns - self.now_ns - self.limits.drain_timeout_ns
            self._wait("expiry", lease.id, max(0, margin_ns))
        if lease.release_reason or self.phase is Phase.STOPPING:
            self._release(lease, lease.release_reason or "the run is over")

    def _on_refused(self, event: e.LeaseRefused) -> None:
        lease = self.leases.leases.get(event.lease)
        if lease is None or lease.state is not LeaseState.REQUESTED:
            return
        self.timers.clear("grant", lease.id)
        self.leases.move(lease, LeaseState.REFUSED, self.now_ns, event.reason)
        if lease.offer.role is WorkerRole.TRAINER and self.phase is not Phase.STOPPING:
            self._fail(f"the trainer's device is not to be had: {event.reason}")
        refusals = self.leases.refusals[lease.provider] = self.leases.refusals.get(lease.provider, 0) + 1
        delay_ns = min(self.limits.retry_base_ns << min(refusals - 1, 16), self.limits.retry_max_ns)
        self._wait("back-off", lease.provider, delay_ns)
        self._end_if_stopped()

    def _on_notice(self, event: e.LeaseNotice) -> None:
        lease = self.leases.leases.get(event.lease)
        if lease is None or lease.state is not LeaseState.GRANTED:
            return
        lease.under_notice = True
        for worker in self.fleet.of_lease(lease.id):
            self._drain(worker, event.reason)

    def _expiry_due(self, lease_id: str) -> None:
        lease = self.leases.leases[lease_id]
        lease.under_notice = True
        for worker in self.fleet.of_lease(lease_id):
            self._drain(worker, "the lease expires")

    def _release(self, lease: Lease, reason: str) -> None:
        if lease.state is not LeaseState.GRANTED:
            return
        lease.release_reason = reason
        self.leases.move(lease, LeaseState.RELEASING, self.now_ns, reason)
        self.timers.clear("expiry", lease.id)
        self._release_due(lease.id)

    def _release_due(self, lease_id: str) -> None:
        """Ask for the lease's end, again and again until the provider confirms it: nothing is left behind."""
        lease = self.leases.leases[lease_id]
        self._out.append(c.ReleaseLease(lease=lease_id, provider=lease.provider, reason=lease.release_reason))
        self._wait("release", lease_id, self.limits.release_timeout_ns)

    def _on_lease_ended(self, event: e.LeaseEnded) -> None:
        lease = self.leases.leases.get(event.lease)
        if lease is None or not lease.live:
            return
        for worker in self.fleet.of_lease(lease.id):
            if worker.state is not WorkerState.GONE:
                self._lose_worker(worker, event.cause)
            self.ledger.close(worker.id, self.now_ns, clean=worker.said_goodbye)
            self._out.append(c.FenceWorker(worker=worker.id, reason=f"its lease ended ({event.cause})"))
            self.fleet.forget(worker.id)
        for what in ("release", "expiry"):
            self.timers.clear(what, lease.id)
        lease.cause = event.cause
        self.leases.move(lease, LeaseState.ENDED, self.now_ns, f"{event.cause} {event.detail}")
        if lease.offer.role is WorkerRole.TRAINER:
            self.trainer_mode = TrainerMode.ABSENT
            if self.phase is not Phase.STOPPING:
                self._fail(f"the trainer's device was lost: {event.detail or event.cause}")
        self._provision(lease.provider)
        self._look_at_step()
        self._end_if_stopped()

    # Workers

    def _on_joined(self, event: e.WorkerJoined) -> None:
        worker = self.fleet.workers.get(event.worker)
        lease = self.leases.leases.get(worker.lease) if worker else None
        if worker is None or lease is None or not lease.live or worker.state is WorkerState.GONE:
            self._out.append(c.FenceWorker(worker=event.worker, reason="it has no live lease"))
            return
        if event.epoch <= worker.epoch:
            return
        self._requeue_all(worker, "the worker's session moved to a new connection")
        worker.epoch = event.epoch
        worker.capabilities = event.capabilities
        worker.version = event.weights_version
        worker.loading_version = None
        worker.capacity = 0
        for what in ("boot", "resume", "load", "reload", "stall"):
            self.timers.clear(what, worker.id)
        self._heard(worker)
        if worker.state is WorkerState.DRAINING or self.phase is Phase.STOPPING:
            self._drain(worker, "its lease is ending")
            return
        if worker.role is WorkerRole.TRAINER:
            self._trainer_joined(worker)
            return
        current = worker.version is not None and worker.version == self.version
        state = WorkerState.READY if current else WorkerState.LOADING
        if worker.state is not state:
            self.fleet.move(worker, state, self.now_ns, f"joined under epoch {event.epoch}")
        self._ensure_weights(worker)
        self._look_at_step()

    def _trainer_joined(self, worker: Worker) -> None:
        if self.trainer_mode is not TrainerMode.ABSENT or worker.version is None:
            self._fail("the trainer's device lost its connection or came without weights")
            return
        self.fleet.move(worker, WorkerState.READY, self.now_ns, "the trainer joined")
        self.trainer_mode = TrainerMode.AWAKE
        self._set_version(worker.version)
        self.phase = Phase.RUNNING
        self._start_step(self.plan.first_step)

    def _on_reported(self, event: e.WorkerReported) -> None:
        worker = self._speaking(event.worker, event.epoch)
        if worker is None:
            return
        self._heard(worker)
        self.ledger.report(worker.id, event.accounts_ns, event.decoded_tokens, self.now_ns)
        if event.capacity_turns != worker.capacity:
            worker.capacity = event.capacity_turns
            self.fleet.reindex(worker)
            self._look_at_step()
        if event.progress != worker.progress or event.executing == 0:
            worker.progress = event.progress
            self.timers.clear("stall", worker.id)
        elif not self.timers.waiting("stall", worker.id):
            self._wait("stall", worker.id, self.limits.stall_timeout_ns)

    def _on_disconnected(self, event: e.WorkerDisconnected) -> None:
        worker = self.fleet.workers.get(event.worker)
        if worker is None or worker.epoch != event.epoch or not worker.connected:
            return
        worker.said_goodbye = event.goodbye
        if event.goodbye or worker.state is WorkerState.DRAINING:
            self._lose_worker(worker, EndCause.RELEASED)
            self._release_if_empty(worker.lease, "its workers left")
        elif worker.role is WorkerRole.TRAINER:
            self._lose_worker(worker, EndCause.LOST)
            self._fail("the trainer's connection was lost")
        else:
            self._requeue_all(worker, "connection lost")
            self.fleet.move(worker, WorkerState.DETACHED, self.now_ns, "connection lost")
            for what in ("heartbeat", "stall", "load", "reload"):
                self.timers.clear(what, worker.id)
            self._wait("resume", worker.id, self.limits.resume_timeout_ns)
        self._look_at_step()

    def _give_up_worker(self, worker_id: WorkerId, cause: EndCause) -> None:
        """Stop believing a worker, whatever it may still say, and give its lease back."""
        worker = self.fleet.workers[worker_id]
        trainer = worker.role is WorkerRole.TRAINER
        self._lose_worker(worker, cause)
        self._out.append(c.FenceWorker(worker=worker_id, reason=cause))
        self._release_if_empty(worker.lease, cause)
        if trainer and self.phase is not Phase.STOPPING:
            self._fail(f"the trainer's device stopped answering ({cause})")
        self._look_at_step()

    def _lose_worker(self, worker: Worker, cause: EndCause) -> None:
        self._requeue_all(worker, f"worker {cause}")
        for what in ("boot", "load", "reload", "heartbeat", "stall", "resume", "drain"):
            self.timers.clear(what, worker.id)
        self.fleet.move(worker, WorkerState.GONE, self.now_ns, cause)

    def _release_if_empty(self, lease_id: str, reason: str) -> None:
        if all(w.state is WorkerState.GONE for w in self.fleet.of_lease(lease_id)):
            self._release(self.leases.leases[lease_id], reason)

    def _drain(self, worker: Worker, reason: str) -> None:
        """Give the worker nothing more, take its turns back with all they have, and let it say goodbye."""
        if worker.state is WorkerState.GONE:
            return
        if worker.state is not WorkerState.DRAINING:
            self.fleet.move(worker, WorkerState.DRAINING, self.now_ns, reason)
            for what in ("boot", "load", "reload", "resume"):
                self.timers.clear(what, worker.id)
            self._wait("drain", worker.id, self.limits.drain_timeout_ns)
        for turn_id in list(worker.turns):
            self._call_back(self.turns.live[turn_id], reason)
        if worker.epoch > 0:
            self._out.append(c.DrainWorker(worker=worker.id, epoch=worker.epoch, reason=reason))

    def _speaking(self, worker_id: WorkerId, epoch: int) -> Worker | None:
        """The worker, if it may be believed: its epoch is current and its lease is live."""
        worker = self.fleet.workers.get(worker_id)
        if worker is None or worker.epoch != epoch or worker.state not in _SPEAKING:
            return None
        return worker

    def _heard(self, worker: Worker) -> None:
        self._wait("heartbeat", worker.id, self.limits.heartbeat_timeout_ns)

    # Weights

    def _set_version(self, version: int) -> None:
        self.version = version
        for worker in self.fleet.workers.values():
            self._ensure_weights(worker)

    def _ensure_weights(self, worker: Worker) -> None:
        if self.version is None or worker.role is WorkerRole.TRAINER:
            return
        if worker.state not in (WorkerState.READY, WorkerState.LOADING) or worker.loading_version == self.version:
            return
        if worker.version == self.version:
            return
        worker.loading_version = self.version
        self._out.append(c.LoadWeights(worker=worker.id, epoch=worker.epoch, version=self.version))
        self._wait("load", worker.id, self.limits.load_timeout_ns)

    def _on_weights_applied(self, event: e.WeightsApplied) -> None:
        worker = self._speaking(event.worker, event.epoch)
        if worker is None:
            return
        self._heard(worker)
        worker.version = event.version
        worker.load_failures = 0
        if worker.loading_version is not None and event.version >= worker.loading_version:
            worker.loading_version = None
            self.timers.clear("load", worker.id)
        if worker.state is WorkerState.LOADING:
            self.fleet.move(worker, WorkerState.READY, self.now_ns, f"serves version {event.version}")
        else:
            self.fleet.reindex(worker)
        self._ensure_weights(worker)
        self._look_at_step()

    def _on_weights_failed(self, event: e.WeightsFailed) -> None:
        worker = self._speaking(event.worker, event.epoch)
        if worker is None:
            return
        self._heard(worker)
        self.timers.clear("load", worker.id)
        worker.loading_version = None
        worker.load_failures += 1
        if worker.load_failures >= MAX_LOAD_FAILURES:
            self._give_up_worker(worker.id, EndCause.FENCED)
        else:
            self._wait("reload", worker.id, self.limits.retry_base_ns)

    def _reload_due(self, worker_id: WorkerId) -> None:
        self._ensure_weights(self.fleet.workers[worker_id])

    # Turns

    def _on_turn_requested(self, event: e.TurnRequested) -> None:
        group = self.step.group_of(event.trajectory) if self.step else None
        if self.phase is not Phase.RUNNING or group is None or group.state is not GroupState.RUNNING:
            self._out.append(c.CancelTrajectory(trajectory=event.trajectory, cause="its group is not running"))
            return
        if event.turn in self.turns.live:
            return
        turn = self.turns.request(
            event.turn, event.trajectory, event.prompt_tokens, event.max_new_tokens, self.oldest_version
        )
        turn.affine_worker = self._affinity.get(event.trajectory)
        self._turn_of[event.trajectory] = event.turn

    def _pump(self) -> None:
        """Dispatch queued turns while anybody has room (invariant 9)."""
        if self.phase is not Phase.RUNNING:
            return
        while (turn := self.turns.head()) is not None:
            chosen = self.policies.routing.route(turn, self.fleet)
            if chosen is None:
                self._nobody_has_room()
                return
            self._start_turn(turn, self.fleet.workers[chosen])
        self.timers.clear("capacity", "queue")
        self.timers.clear("reseed", "queue")

    def _nobody_has_room(self) -> None:
        if not self.timers.waiting("capacity", "queue"):
            self._wait("capacity", "queue", self.limits.queue_timeout_ns)
        self._look_at_step()

    def _start_turn(self, turn: Turn, worker: Worker) -> None:
        self.turns.move(turn, TurnState.RUNNING, self.now_ns, worker.id)
        turn.attempt += 1
        turn.worker = worker.id
        self.fleet.assign(worker, turn.id)
        self.timers.clear("capacity", "queue")
        self._wait("token", turn.id, self.limits.turn_stall_timeout_ns)
        self._out.append(
            c.StartTurn(worker=worker.id, epoch=worker.epoch, turn=turn.id, attempt=turn.attempt, start=turn.accepted)
        )

    def _on_tokens(self, event: e.TokensReceived) -> None:
        worker = self._speaking(event.worker, event.epoch)
        accepted: list[int] = []
        lost = 0
        if worker is not None:
            self._heard(worker)
            for position, chunk in enumerate(event.chunks):
                turn = self.turns.live.get(chunk.turn)
                if turn is None or turn.attempt != chunk.attempt or turn.worker != worker.id:
                    lost += chunk.count
                elif chunk.start != turn.accepted or chunk.version < turn.oldest_version:
                    lost += chunk.count
                    self._out_of_order(turn, chunk)
                else:
                    accepted.append(position)
                    self._accept(turn, worker, chunk)
        else:
            lost = sum(chunk.count for chunk in event.chunks)
        if accepted:
            self._out.insert(0, c.AcceptTokens(chunks=tuple(accepted)))
        if lost:
            self.ledger.lose(event.worker, lost)

    def _accept(self, turn: Turn, worker: Worker, chunk: Progress) -> None:
        turn.accepted += chunk.count
        if not worker.turns[turn.id]:
            self.fleet.begin(worker, turn.id)
        if chunk.finish is None:
            if turn.state is TurnState.RUNNING:
                self._wait("token", turn.id, self.limits.turn_stall_timeout_ns)
        elif chunk.finish in (FinishReason.STOP, FinishReason.LENGTH):
            self._affinity[turn.trajectory] = worker.id
            self._close_turn(turn, TurnState.FINISHED, chunk.finish)
            self._out.append(c.FinishTurn(turn=turn.id))
        else:
            self._take_back(turn, chunk)

    def _take_back(self, turn: Turn, chunk: Progress) -> None:
        """The worker gave the turn up; its accepted tokens stay."""
        if chunk.finish is FinishReason.ERROR:
            turn.engine_errors += 1
        if turn.engine_errors >= self.limits.max_engine_errors:
            self._close_turn(turn, TurnState.FAILED, chunk.detail)
            self._out.append(c.FailTurn(turn=turn.id, cause=f"engine error: {chunk.detail}"))
        else:
            self._requeue(turn, f"{chunk.finish} {chunk.detail}".rstrip())

    def _out_of_order(self, turn: Turn, chunk: Progress) -> None:
        """A repeated chunk is ignored; a gap (or a stale version) means this attempt can never be completed."""
        if chunk.start > turn.accepted or chunk.version < turn.oldest_version:
            self._abort(turn)
            self._requeue(turn, f"chunk at {chunk.start} of version {chunk.version} after {turn.accepted} tokens")

    def _call_back(self, turn: Turn, reason: str) -> None:
        """Ask the worker for the turn and whatever it still has of it."""
        if turn.state is TurnState.RUNNING:
            self._abort(turn)
            self._expect_handover(turn, reason)

    def _expect_handover(self, turn: Turn, reason: str) -> None:
        self.turns.move(turn, TurnState.MOVING, self.now_ns, reason)
        self.timers.clear("token", turn.id)
        self._wait("handover", turn.id, self.limits.handover_timeout_ns)

    def _abort(self, turn: Turn) -> None:
        worker = self.fleet.workers[turn.worker] if turn.worker else None
        if worker is not None and worker.connected:
            self._out.append(c.AbortTurn(worker=worker.id, epoch=worker.epoch, turn=turn.id, attempt=turn.attempt))

    def _requeue(self, turn: Turn, cause: str) -> None:
        self._leave_worker(turn)
        self.turns.move(turn, TurnState.QUEUED, self.now_ns, cause)

    def _requeue_all(self, worker: Worker, cause: str) -> None:
        for turn_id in list(worker.turns):
            self._requeue(self.turns.live[turn_id], cause)

    def _close_turn(self, turn: Turn, state: TurnState, cause: str) -> None:
        self._leave_worker(turn)
        self._turn_of.pop(turn.trajectory, None)
        self.turns.move(turn, state, self.now_ns, cause)

    def _leave_worker(self, turn: Turn) -> None:
        self.timers.clear("token", turn.id)
        self.timers.clear("handover", turn.id)
        if turn.worker is not None:
            self.fleet.unassign(self.fleet.workers[turn.worker], turn.id)

    def _token_due(self, turn_id: str) -> None:
        turn = self.turns.live[turn_id]
        self._abort(turn)
        self._requeue(turn, "no token in time")

    def _handover_due(self, turn_id: str) -> None:
        self._requeue(self.turns.live[turn_id], "hand-over took too long")

    # Trajectories and groups

    def _on_trajectory_finished(self, event: e.TrajectoryFinished) -> None:
        reward = float(event.reward)
        self._end_trajectory(event.trajectory, reward if math.isfinite(reward) else f"reward was {reward}")

    def _on_trajectory_failed(self, event: e.TrajectoryFailed) -> None:
        self._end_trajectory(event.trajectory, event.cause or "unknown cause")

    def _end_trajectory(self, trajectory: TrajectoryId, outcome: float | str) -> None:
        self._affinity.pop(trajectory, None)
        turn = self.turns.live.get(self._turn_of.get(trajectory, ""))
        if turn is not None:
            self._abort(turn)
            self._close_turn(turn, TurnState.CANCELLED, "the trajectory ended")
        group = self.step.group_of(trajectory) if self.step else None
        if group is None or group.members[trajectory] is not None:
            return
        group.members[trajectory] = outcome
        if group.complete:
            self._group_complete(group)

    def _group_complete(self, group: Group) -> None:
        assert self.step is not None
        rewards = list(group.finished.values())
        if len(rewards) < 2:
            causes = sorted({str(o) for o in group.members.values() if not isinstance(o, float)})
            reason: str | None = f"infrastructure: {'; '.join(causes)}"
        else:
            reason = self.policies.selection.drop_reason(rewards)
        if reason is None:
            self.step.move(group, GroupState.READY, self.now_ns, "all members finished")
        else:
            group.drop_reason = reason
            self.step.move(group, GroupState.DROPPED, self.now_ns, reason)
            self._out.append(c.DropGroup(group=group.id, reason=reason))
        self._look_at_step()

    def _on_group_trained(self, event: e.GroupTrained) -> None:
        if self.step is None or event.group != self.training:
            return
        self.training = None
        self.timers.clear("training", "trainer")
        self.step.move(self.step.groups[event.group], GroupState.TRAINED, self.now_ns, "trained")
        self._look_at_step()

    # The step

    def _start_step(self, number: int) -> None:
        assert self.version is not None
        self.step = Step(number, self.version, self.plan.groups, self.plan.group_size, self.now_ns)
        self._reseed = False
        self._wait("seeding", "trainer", self.policies.seeding.window_ns(self.history))
        if self.trainer_mode is TrainerMode.ASLEEP:
            self._wake_trainer()
        for group in self.step.groups.values():
            self._out.append(
                c.StartGroup(step=number, group=group.id, index=group.index, trajectories=tuple(group.members))
            )
        self._look_at_step()

    def _look_at_step(self) -> None:
        self._unsettled = True

    def _advance_step(self) -> None:
        """Move the trainer's device between generating and training, and the step towards its end."""
        self._unsettled = False
        step = self.step
        if step is None or self.phase is not Phase.RUNNING:
            return
        if step.rollouts_done and step.rollout_ended_ns is None:
            step.rollout_ended_ns = self.now_ns
        helped = next(self.fleet.ready_others(self.oldest_version), None) is not None
        if self.trainer_mode is TrainerMode.AWAKE:
            window_over = not self.timers.waiting("seeding", "trainer")
            if step.rollouts_done or (window_over and helped):
                self._rest_trainer()
        elif self.trainer_mode is TrainerMode.ASLEEP and self.training is None and not step.updating:
            self._use_sleeping_trainer(step, helped)

    def _use_sleeping_trainer(self, step: Step, helped: bool) -> None:
        ready = step.in_state(GroupState.READY)
        if self._needs_reseeding(helped):
            self._wake_trainer()
        elif ready:
            group = ready[0]
            step.move(group, GroupState.TRAINING, self.now_ns, "sent to the trainer")
            self.training = group.id
            self._wait("training", "trainer", self.limits.train_timeout_ns)
            self._out.append(c.TrainGroup(group=group.id, trajectories=tuple(group.finished)))
        elif step.settled:
            step.updating = True
            self._wait("training", "trainer", self.limits.train_timeout_ns)
            self._out.append(c.UpdateWeights(step=step.number, version=step.version + 1))

    def _needs_reseeding(self, helped: bool) -> bool:
        """Turns wait and nobody else can take them: the trainer's device takes them back after a short delay."""
        if helped or self.turns.head() is None:
            self._reseed = False
            self.timers.clear("reseed", "queue")
        elif not self._reseed and not self.timers.waiting("reseed", "queue"):
            self._wait("reseed", "queue", self.limits.reseed_delay_ns)
        return self._reseed

    def _reseed_due(self, _: str) -> None:
        self._reseed = True
        self._look_at_step()

    def _rest_trainer(self) -> None:
        """End the seeding window: partial responses are handed over, then the device is the trainer's."""
        trainer = self.trainer()
        assert trainer is not None
        assert self.step is not None
        if self.step.seeding_ended_ns is None:
            self.step.seeding_ended_ns = self.now_ns
        self.trainer_mode = TrainerMode.RESTING
        self.fleet.move(trainer, WorkerState.ASLEEP, self.now_ns, "seeding ends")
        for turn_id in list(trainer.turns):
            turn = self.turns.live[turn_id]
            if turn.state is TurnState.RUNNING:
                self._expect_handover(turn, "seeding ends")
        self._wait("waking", "trainer", self.limits.train_timeout_ns)
        self._out.append(c.SleepWorker(worker=trainer.id, epoch=trainer.epoch))

    def _on_slept(self, event: e.WorkerSlept) -> None:
        worker = self._speaking(event.worker, event.epoch)
        if worker is None or self.trainer_mode is not TrainerMode.RESTING:
            return
        self._heard(worker)
        self._requeue_all(worker, "seeding ended")
        self.timers.clear("waking", "trainer")
        self.trainer_mode = TrainerMode.ASLEEP
        self._look_at_step()

    def _wake_trainer(self) -> None:
        trainer = self.trainer()
        assert trainer is not None
        self._reseed = False
        self.trainer_mode = TrainerMode.WAKING
        self._wait("waking", "trainer", self.limits.train_timeout_ns)
        self._out.append(c.WakeWorker(worker=trainer.id, epoch=trainer.epoch))

    def _on_awoke(self, event: e.WorkerAwoke) -> None:
        worker = self._speaking(event.worker, event.epoch)
        if worker is None or self.trainer_mode is not TrainerMode.WAKING:
            return
        self._heard(worker)
        self.timers.clear("waking", "trainer")
        self.trainer_mode = TrainerMode.AWAKE
        self.fleet.move(worker, WorkerState.READY, self.now_ns, "seeding")
        self._look_at_step()

    def _on_published(self, event: e.WeightsPublished) -> None:
        step, trainer = self.step, self.trainer()
        if step is None or trainer is None or not step.updating or event.version != step.version + 1:
            return
        self.timers.clear("training", "trainer")
        trainer.version = event.version
        self._record(step)
        self.step = None
        self._set_version(event.version)
        if step.number + 1 < self.plan.steps:
            self._start_step(step.number + 1)
        else:
            self._stop()

    def _record(self, step: Step) -> None:
        rollout_ended_ns = step.rollout_ended_ns or self.now_ns
        self.history.append(
            StepRecord(
                step=step.number,
                duration_ns=self.now_ns - step.started_ns,
                seeding_ns=(step.seeding_ended_ns or rollout_ended_ns) - step.started_ns,
                rollout_ns=rollout_ended_ns - step.started_ns,
                groups_trained=len(step.in_state(GroupState.TRAINED)),
                groups_dropped=len(step.in_state(GroupState.DROPPED)),
            )
        )

    # The end

    def _on_stop(self, event: e.StopRequested) -> None:
        self._fail(event.reason)

    def _fail(self, cause: str) -> None:
        if self.phase in (Phase.STARTING, Phase.RUNNING):
            self.failed = cause
            self._stop()

    def _stop(self) -> None:
        """Give everything back: workers say goodbye where they can, leases are released, requests withdrawn."""
        self.phase = Phase.STOPPING
        self.training = None
        for turn in list(self.turns.live.values()):
            self._abort(turn)
            self._close_turn(turn, TurnState.CANCELLED, "the run is over")
        for what, key in (
            ("capacity", "queue"),
            ("reseed", "queue"),
            ("training", "trainer"),
            ("waking", "trainer"),
            ("seeding", "trainer"),
        ):
            self.timers.clear(what, key)
        for provider in self.leases.offers:
            self.timers.clear("back-off", provider)
        for lease in list(self.leases.leases.values()):
            if lease.state is LeaseState.REQUESTED:
                self._grant_due(lease.id)
            elif any(w.connected for w in self.fleet.of_lease(lease.id)):
                for worker in self.fleet.of_lease(lease.id):
                    self._drain(worker, "the run is over")
            else:
                self._release(lease, "the run is over")
        self._wait("stop", "run", self.limits.drain_timeout_ns + 3 * self.limits.release_timeout_ns)
        self._end_if_stopped()

    def _stop_due(self, _: str) -> None:
        names = ", ".join(sorted(self.leases.leases))
        self.failed = self.failed or f"leases not confirmed as ended: {names}"
        self._end()

    def _end_if_stopped(self) -> None:
        if self.phase is Phase.STOPPING and not self.leases.leases:
            self._end()

    def _end(self) -> None:
        self.phase = Phase.ENDED
        self._out.append(c.EndRun(failed=self.failed))

    def _wait(self, what: str, key: str, after_ns: Nanoseconds) -> None:
        self.timers.set(what, key, self.now_ns, after_ns)
