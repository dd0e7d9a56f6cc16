"""Workers: from their first words to their last, when they are believed, and which weights they serve.

Source: docs/design.md, "A lease" and "A weights version".
"""

from elastic.core import commands as c
from elastic.core import events as e
from elastic.core.fleet import Worker
from elastic.core.ids import lease_of
from elastic.core.profiles import BatchProfile
from elastic.core.run_state import TRAINER_AT_HAND, Changed, Deadlines, Handlers, RunState
from elastic.core.turn_manager import TurnManager
from elastic.core.types import Account, EndCause, LeaseState, LoadPhase, WorkerId, WorkerRole, WorkerState

_PREFILLS = (Account.PREFILL, Account.RECOMPUTE)
MAX_LOAD_FAILURES = 3
"""A worker that cannot load weights this often in a row is given back; a fresh one may have better luck.

What fails while the trainer is away does not count: what the relay has then may be of another trainer, or half of it.
"""

_WAITS = ("boot", "load", "reload", "heartbeat", "stall", "resume", "drain", "rest", "departure")


class WorkerManager:
    def __init__(self, run: RunState, turns: TurnManager) -> None:
        self._run = run
        self._turns = turns
        self.handlers: Handlers = {
            e.WorkerJoined: self._on_joined,
            e.WorkerReported: self._on_reported,
            e.WorkerDisconnected: self._on_disconnected,
            e.WorkerBarred: self._on_barred,
            e.WeightsApplied: self._on_weights_applied,
            e.WeightsFailed: self._on_weights_failed,
        }
        self.due: Deadlines = {
            "boot": lambda worker: self.give_up(worker, EndCause.BOOT_TIMEOUT),
            "load": lambda worker: self.give_up(worker, EndCause.FENCED),
            "heartbeat": lambda worker: self.give_up(worker, EndCause.FENCED),
            "stall": lambda worker: self.give_up(worker, EndCause.FENCED),
            "resume": self._resume_due,
            "drain": lambda worker: self.give_up(worker, EndCause.RELEASED),
            "reload": lambda worker: self._ensure_weights(self._run.fleet.workers[worker]),
        }

    # Coming

    def _on_joined(self, event: e.WorkerJoined) -> None:
        run = self._run
        worker = run.fleet.workers.get(event.worker)
        lease = run.leases.leases.get(lease_of(event.worker))
        if worker is None and lease is not None and lease.state is LeaseState.REQUESTED:
            run.leases.early[event.worker] = event
            return
        if worker is None or worker.state is WorkerState.GONE:
            run.out.append(c.FenceWorker(worker=event.worker, reason="it has no live lease"))
            return
        if event.epoch <= worker.epoch:
            return
        self._turns.cut_off(worker, "the worker's session moved to a new connection")
        self._turns.come_back(worker)
        worker.begin_epoch(event.epoch)
        worker.introduce(event.capabilities)
        if noise := event.capabilities.logprob_noise or 0.0:
            run.agreement.declare(worker.id, run.plan.mismatch_max + noise)
        self._note_boot(worker)
        if run.leases.offer_again(worker.provider) and run.active:
            run.wait("provision", "market", run.limits.retry_base_ns)
        self._clear(worker, "boot", "resume", "load", "reload", "stall")
        run.expect_heartbeat(worker)
        if worker.state is WorkerState.DRAINING:
            self._tell_to_drain(worker, "its lease is ending")
        elif worker.role is WorkerRole.TRAINER:
            if event.weights_version is not None:
                run.agreement.expect(event.weights_version, event.proof)
            self._enter_trainer(worker, event.weights_version)
        else:
            self._enter(worker, event.weights_version)

    def let_in(self, worker: WorkerId) -> None:
        """Have a worker whose lease is granted join, if it has come before that."""
        event = self._run.leases.early.pop(worker, None)
        if event is not None:
            self._on_joined(event)

    def _enter_trainer(self, worker: Worker, version: int | None) -> None:
        """The run's first trainer brings the run's weights. A later one must be at the run's version, or one update
        ahead of it: the update whose answer was lost.

        What a later one was doing is unknown, so it counts as asleep.
        """
        run, publishing = self._run, self._run.step.next_version if self._run.step else None
        if version is None or (run.version is not None and version not in (run.version, publishing)):
            run.fail(f"the trainer's device came with weights of version {version}, the run is at {run.version}")
        elif run.version is None:
            self._enter(worker, version)
        else:
            worker.version, worker.capacity = run.version, 0
            if worker.state is not WorkerState.ASLEEP:
                self._move(worker, WorkerState.ASLEEP, f"joined under epoch {worker.epoch}")

    def _note_boot(self, worker: Worker) -> None:
        """Remember what booting took beyond what its provider had declared."""
        run, since_ns = self._run, self._run.timers.since_ns("boot", worker.id)
        if since_ns is not None:
            declared_ns = run.leases.leases[worker.lease].offer.boot_ns
            run.patience.note("boot", run.now_ns - since_ns - declared_ns, run.now_ns)

    def _enter(self, worker: Worker, version: int | None) -> None:
        """Ready for turns once the worker announces credit, if the run knows its weights version; else it loads
        weights."""
        newest = self._run.version
        worker.version = version if newest is None or version is None or version <= newest else None
        worker.loading_version = None
        worker.capacity = 0
        state = WorkerState.LOADING if worker.version is None else WorkerState.READY
        if worker.state is state:
            self._run.fleet.reindex(worker)
        else:
            self._move(worker, state, f"joined under epoch {worker.epoch}")
        self._ensure_weights(worker)

    def _on_reported(self, event: e.WorkerReported) -> Changed:
        run = self._run
        worker = run.heard_from(event.worker, event.epoch)
        if worker is None:
            return Changed.PROGRESS
        run.ledger.report(worker.id, event.accounts_ns, event.decoded_tokens, run.now_ns)
        self._profile(worker, event)
        pending = min(event.pending, worker.pending)  # It may have heard of turns that it has no more.
        changed = (event.capacity_turns, pending) != (worker.capacity, worker.engine_pending)
        if changed or worker.leaves_ns is not None:  # What still ends there in time depends on its speed.
            worker.capacity, worker.engine_pending = event.capacity_turns, pending
            run.fleet.reindex(worker)
        self._follow_load(worker, event)
        self._turns.note_waiting(worker, event.pending, excused=self._gets_on(worker, event))
        self._turns.look_at_oldest(worker)
        worker.brought = False
        if event.progress != worker.progress or event.executing == 0:
            worker.progress = event.progress
            run.came("stall", worker.id)
        elif not run.timers.waiting("stall", worker.id):
            run.expect_progress(worker)
        return Changed.ROOM

    def _gets_on(self, worker: Worker, event: e.WorkerReported) -> bool:
        """Whether the worker gets on with its other turns, or is about to begin turns under the weights that it has
        pulled.

        What it has brought shows that; its word counts only while its weights may still be loading.
        """
        holds_turns = event.loading in (LoadPhase.WAITING, LoadPhase.APPLYING) and worker.loading_version is not None
        run = self._run
        return worker.brought or (
            holds_turns and run.now_ns - worker.load_ordered_ns < run.patience.limit_ns("load", run.now_ns)
        )

    def _follow_load(self, worker: Worker, event: e.WorkerReported) -> None:
        """The time to load counts from the last progress.

        Waiting for running turns is no loading; an engine that does not get on with these is found as stalled.
        """
        loaded = (event.loading, event.load_progress)
        waits = event.loading is LoadPhase.WAITING and event.executing > 0
        run = self._run
        if (waits or loaded != worker.loaded) and run.timers.waiting("load", worker.id):
            run.goes_on("load", worker.id)
        worker.loaded = loaded

    def _profile(self, worker: Worker, event: e.WorkerReported) -> None:
        """Take from two reports how fast the worker prefilled and decoded between them, and at what batch size."""
        run, iterations = self._run, event.progress - worker.progress
        tokens = event.decoded_tokens - worker.decoded_tokens
        decode_ns = event.accounts_ns.get(Account.DECODE, 0) - worker.decode_ns
        prefilled = event.prompt_tokens - event.prefix_hit_tokens - worker.prefilled_tokens
        prefill_ns = sum([event.accounts_ns.get(account, 0) for account in _PREFILLS]) - worker.prefill_ns
        first = worker.progress < 0
        worker.decoded_tokens += max(0, tokens)
        worker.decode_ns += max(0, decode_ns)
        worker.prefilled_tokens += max(0, prefilled)
        worker.prefill_ns += max(0, prefill_ns)
        if first:
            return
        profile = run.profiles.get(worker.kind)
        if profile is None:
            profile = run.profiles[worker.kind] = BatchProfile()
        if min(prefilled, prefill_ns) > 0:
            profile.note_prefill(prefilled, prefill_ns)
        if min(tokens, iterations, decode_ns, worker.outstanding) <= 0:
            return
        batch = min(max(1, round(tokens / iterations)), worker.capacity)
        if batch:
            turns = map(run.turns.live.__getitem__, worker.turns)
            context_tokens = sum([turn.prompt_tokens + turn.accepted for turn in turns])
            profile.note(batch, tokens, decode_ns, context_tokens / len(worker.turns))

    # Going

    def _on_disconnected(self, event: e.WorkerDisconnected) -> None:
        run = self._run
        worker = run.fleet.workers.get(event.worker)
        if worker is None:
            run.leases.early.pop(event.worker, None)
        if worker is None or worker.epoch != event.epoch or not worker.connected:
            return
        worker.said_goodbye = event.goodbye
        if event.goodbye or worker.state is WorkerState.DRAINING:
            self.lose(worker, EndCause.RELEASED if event.goodbye else EndCause.LOST)
        else:
            self._detach(worker)

    def _on_barred(self, event: e.WorkerBarred) -> None:
        """Move the worker's turns elsewhere."""
        run = self._run
        run.leases.early.pop(event.worker, None)
        worker = run.fleet.workers.get(event.worker)
        if worker is None or worker.state is WorkerState.GONE or event.epoch < worker.epoch:
            return
        self.bar(worker, EndCause.BARRED, event.cause)

    def bar(self, worker: Worker, cause: EndCause, why: str) -> None:
        """Give up a worker that is not to be believed; the place of its lease is not leased again in this run."""
        run = self._run
        if worker.role is WorkerRole.TRAINER:
            run.fail(f"the trainer's device is not to be believed: {why}")
        self.give_up(worker.id, cause)
        run.out.append(c.BarLease(lease=worker.lease, provider=worker.provider))

    def _resume_due(self, worker_id: WorkerId) -> None:
        """A worker that did not come back may be dead; one that came back before and brought nothing is of no use."""
        worker = self._run.fleet.workers[worker_id]
        if worker.strikes > 1 and self._run.turns.finished - worker.others_finished > 1:
            self._run.struck_out[worker_id] = None
        else:
            self.give_up(worker_id, EndCause.LOST)

    def strike_out(self) -> None:
        """Give up the workers whose turns bring nothing while others' do. Their places are not leased again."""
        run = self._run
        struck_out, run.struck_out = run.struck_out, {}
        for worker_id in struck_out:
            worker = run.fleet.workers.get(worker_id)
            if worker is not None and worker.state is not WorkerState.GONE:
                self.give_up(worker_id, EndCause.STRUCK_OUT)
                run.out.append(c.BarLease(lease=worker.lease, provider=worker.provider))

    def _detach(self, worker: Worker) -> None:
        """Move the worker's turns elsewhere at once. The worker may come back under a later epoch."""
        self._turns.cut_off(worker, "connection lost")
        self._clear(worker, "heartbeat", "stall", "load", "reload")
        self._move(worker, WorkerState.DETACHED, "connection lost")
        limits = self._run.limits
        # While it trains, the trainer may be slow to see that its connection is gone.
        trainer_ns = limits.boot_timeout_ns + limits.train_timeout_ns + self._run.permit_ns
        awaited_ns = trainer_ns if worker.role is WorkerRole.TRAINER else limits.resume_timeout_ns
        self._run.wait("resume", worker.id, awaited_ns)

    def drain(self, worker: Worker, reason: str) -> None:
        """Give the worker nothing more, take its turns back with all they have, and let it say goodbye."""
        if worker.state in (WorkerState.GONE, WorkerState.DRAINING):
            return
        self._move(worker, WorkerState.DRAINING, reason)
        self._clear(worker, "boot", "load", "reload", "resume", "stall", "departure")
        worker.loading_version = None
        self._run.wait("drain", worker.id, self._run.limits.drain_timeout_ns)
        self._turns.call_back(worker, reason)
        if worker.epoch > 0:
            self._tell_to_drain(worker, reason)

    def _tell_to_drain(self, worker: Worker, reason: str) -> None:
        self._run.out.append(c.DrainWorker(worker=worker.id, epoch=worker.epoch, reason=reason))

    def give_up(self, worker_id: WorkerId, cause: EndCause) -> None:
        """Stop believing a worker, whatever it may still say; its lease goes back when it was the last."""
        worker = self._run.fleet.workers[worker_id]
        if worker.state is WorkerState.GONE:
            return
        self.lose(worker, cause)
        self._run.out.append(c.FenceWorker(worker=worker_id, reason=cause))

    def lose(self, worker: Worker, cause: EndCause) -> None:
        run = self._run
        self._turns.take_away(worker, f"worker {cause}")
        self._clear(worker, *_WAITS)
        self._move(worker, WorkerState.GONE, cause)
        if all(w.state is WorkerState.GONE for w in run.fleet.of_lease(worker.lease)):
            run.vacated[worker.lease] = cause

    # Weights

    def ensure_weights_everywhere(self) -> None:
        for worker in self._run.fleet.workers.values():
            self._ensure_weights(worker)

    def _ensure_weights(self, worker: Worker) -> None:
        """Have the worker load the run's version, unless it has it.

        A load under way is not replaced by a newer one: its result is the base of the next delta, and a worker whose
        link is slower than the steps would otherwise never finish a load.
        """
        run, version = self._run, self._run.version
        if version is None or worker.role is WorkerRole.TRAINER:
            return
        if worker.state not in (WorkerState.READY, WorkerState.LOADING):
            return
        if worker.version is not None and worker.version > version:
            worker.version = None
            self._move(worker, WorkerState.LOADING, f"its weights are not of this run, which is at {version}")
        if worker.version == version or worker.loading_version is not None:
            return
        worker.loading_version, worker.load_ordered_ns = version, run.now_ns
        run.timers.clear("reload", worker.id)
        run.expect("load", worker.id)
        run.out.append(c.LoadWeights(worker=worker.id, epoch=worker.epoch, version=version))

    def _on_weights_applied(self, event: e.WeightsApplied) -> None:
        run = self._run
        worker = run.heard_from(event.worker, event.epoch)
        if worker is None or worker.role is WorkerRole.TRAINER or run.version is None:
            return
        if not (-1 if worker.version is None else worker.version) <= event.version <= run.version:
            return
        mismatch = run.agreement.prove(worker.id, event.version, event.proof, run.plan.mismatch_max)
        if mismatch is not None:
            run.warn("Mismatch", str(mismatch))
            self.bar(worker, EndCause.MISMATCHED, str(mismatch))
            return
        worker.version = event.version
        worker.load_failures = 0
        if worker.loading_version is not None and event.version >= worker.loading_version:
            worker.loading_version = None
            run.came("load", worker.id)
        if worker.version == run.version:
            self._clear(worker, "reload")  # An order that came twice has done what it had failed to do.
        if worker.state is WorkerState.LOADING:
            self._move(worker, WorkerState.READY, f"serves version {event.version}")
        else:
            run.fleet.reindex(worker)
        self._ensure_weights(worker)

    def _on_weights_failed(self, event: e.WeightsFailed) -> None:
        run = self._run
        worker = run.heard_from(event.worker, event.epoch)
        if worker is None or worker.loading_version is None or event.version != worker.loading_version:
            return
        self._clear(worker, "load")
        worker.loading_version = None
        worker.load_failures += not run.trainer_away
        if worker.load_failures >= MAX_LOAD_FAILURES:
            self.give_up(worker.id, EndCause.FENCED)
        else:
            run.wait("reload", worker.id, run.limits.retry_base_ns)

    def _move(self, worker: Worker, state: WorkerState, cause: str) -> None:
        run, first = self._run, state is WorkerState.READY and not worker.served
        run.fleet.move(worker, state, run.now_ns, cause)
        if state in TRAINER_AT_HAND:
            run.leases.failures.pop(worker.provider, None)
        if first:
            took_ns = run.now_ns - run.ledger.books[worker.id].opened_ns
            run.leases.took_to_get_ready(worker.lease, worker.provider, took_ns)

    def _clear(self, worker: Worker, *waits: str) -> None:
        for what in waits:
            self._run.timers.clear(what, worker.id)
