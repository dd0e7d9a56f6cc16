"""The fleet: each worker's state, credit, reputation and load, indexed: the least loaded is found in O(log n)."""

from bisect import bisect_left, insort
from collections.abc import Collection, Container
from dataclasses import dataclass, field

from elastic.core.load_ends import Load, LoadEnds
from elastic.core.transitions import Story, take_transition
from elastic.core.types import (
    Capabilities,
    LeaseId,
    LoadPhase,
    Nanoseconds,
    TurnId,
    WorkerId,
    WorkerKind,
    WorkerRole,
    WorkerState,
)

_Load = tuple[int, float, int, WorkerId]
_Place = tuple[WorkerKind, int]

REPUTATION_KEPT = 1 / 2
"""Factor on a worker's reputation for each turn that it gives back."""
LEAST_REPUTATION = 1 / 64
REPUTATION_TOKENS = 1000
"""Accepted tokens that take a worker's reputation from nothing to 1."""
HOPELESS_DECLINES = 4
"""Declined turns in a row after which a resting worker does not count as help for the trainer's device."""
STRUCK_OUT = 4
"""Strikes that are not forgotten yet and cost a worker its lease, once others have finished as many turns."""
RELAPSES_MAX = 3
"""Each relapse doubles what a worker owes, up to so many times: one that fails rarely keeps its lease, and one that
fails on purpose holds others up ever more rarely."""
_LAST = 1 << 20
"""Stands before the queues of workers that get turns only where nobody else has room."""


@dataclass(slots=True)
class Worker:
    """One engine instance of a lease.

    - `slots` names the turns that it was sent in this epoch, by their numbers, until it says that their attempts have
      ended; `sent` is how many there were.
    - `turns` maps each turn on the worker to whether it has begun; `pending` is how many have not, as far as is known.
      `due_tokens` is what all of them were expected to decode when they were sent.
    - Decoded and prefilled tokens, their times, the attempts `waiting` in the engine's queue and the progress of
      loading weights (`loaded`) are those of the last report.
    - `engine_pending` is the length of the engine's queue: the last report's, adjusted for what was sent and ended
      since.
    - `reputation` falls with every turn that the worker returns and rises with accepted tokens, up to 1.
    - `declines` counts turns in a row that it returned before it began them. After each it is `resting`; then it gets a
      single turn, until it has begun that.
    - `strikes` counts turns that it failed to bring to an end, the last one at `struck_ns`; those that it was sent
      before that count no more. `others_finished` is how many turns had been finished by then at the first one. With a
      strike it gets a turn only where nobody else has room, at first one at a time, and with each that it finishes one
      more (`trusted`). Its strikes are forgotten once it has finished the turns that it `owes`: as many as it held at
      its strikes, and more after `relapses`.
    - `unbegun_ns` is when it was sent the last of the turns of which it had begun none as its connection went.
    - `brought` says whether a token has come since the last report, or the first sign of a turn.
    - `leaves_ns` is when it must have handed everything over, if its lease is about to end.
    """

    id: WorkerId
    lease: LeaseId
    provider: str
    role: WorkerRole
    order: int
    state: WorkerState = WorkerState.BOOTING
    epoch: int = 0
    capabilities: Capabilities | None = None
    kind: WorkerKind = field(init=False)
    version: int | None = None
    loading_version: int | None = None
    load_failures: int = 0
    capacity: int = 0
    max_batch: int | None = None
    progress: int = -1
    engine_pending: int = 0
    decoded_tokens: int = 0
    decode_ns: Nanoseconds = 0
    prefilled_tokens: int = 0
    prefill_ns: Nanoseconds = 0
    waiting: dict[TurnId, int] = field(default_factory=dict[TurnId, int])
    loaded: tuple[LoadPhase, int] = (LoadPhase.NONE, 0)
    slots: dict[int, TurnId] = field(default_factory=dict[int, TurnId])
    sent: int = 0
    turns: dict[TurnId, bool] = field(default_factory=dict[TurnId, bool])
    pending: int = 0
    due_tokens: int = 0
    reputation: float = 1.0
    declines: int = 0
    resting: bool = False
    strikes: int = 0
    struck_ns: Nanoseconds = -1
    owes: int = 0
    trusted: int = 1
    relapses: int = 0
    unbegun_ns: Nanoseconds | None = None
    others_finished: int = 0
    brought: bool = False
    load_ordered_ns: Nanoseconds = 0
    leaves_ns: Nanoseconds | None = None
    leaves_why: str = ""
    served: bool = False
    said_goodbye: bool = False
    story: Story = field(default_factory=Story)

    def __post_init__(self) -> None:
        self.kind = WorkerKind(self.provider)

    @property
    def outstanding(self) -> int:
        return len(self.turns)

    @property
    def places(self) -> int:
        """Turns that it can execute at once: its credit, or its batch size if that is smaller."""
        batch, credit = self.max_batch, self.capacity
        return credit if batch is None or credit < batch else batch

    @property
    def queued(self) -> int:
        """Turns that wait on it for room in its batch or memory; all that have not begun, where it declares no batch
        size."""
        batch, pending = self.max_batch, self.pending
        if batch is None or not pending:
            return pending
        waiting = len(self.turns) - (batch if batch < self.capacity else self.capacity)
        if waiting < self.engine_pending:
            waiting = self.engine_pending
        return waiting if waiting < pending else pending

    @property
    def has_place(self) -> bool:
        """Whether it would begin one more turn at once."""
        if self.engine_pending:
            return False
        batch, credit = self.max_batch, self.capacity  # As `places`: this is asked for most of all.
        return len(self.turns) < (credit if batch is None or credit < batch else batch)

    def begin_epoch(self, epoch: int) -> None:
        """None of the turns that it was sent before are its any more."""
        self.epoch, self.sent = epoch, 0
        self.slots.clear()

    def introduce(self, capabilities: Capabilities) -> None:
        self.capabilities = capabilities
        self.max_batch = capabilities.max_batch
        self.kind = WorkerKind(self.provider, capabilities.tflops, capabilities.memory_gb_per_s)

    @property
    def connected(self) -> bool:
        return self.epoch > 0 and self.state not in (WorkerState.DETACHED, WorkerState.GONE)


class Fleet:
    """Workers by id and by lease. `reindex` must follow every change of a worker's version, credit or load.

    Loads change several times in most events and are asked for in few: they are put in order when they are.
    Until a worker has opened, nobody takes what nobody could take before: it has got room, or room for other versions,
    or, about to leave, has a place.
    """

    def __init__(self, max_pending: int) -> None:
        self.workers: dict[WorkerId, Worker] = {}
        self.trainer: Worker | None = None
        self._max_pending = max_pending
        self._added = 0
        self._of_lease: dict[LeaseId, dict[WorkerId, Worker]] = {}
        self._loads: dict[WorkerRole, dict[_Place, list[_Load]]] = {role: {} for role in WorkerRole}
        self._indexed: dict[WorkerId, tuple[_Place, _Load]] = {}
        self._out_of_order: dict[WorkerId, Worker] = {}
        self._ends = LoadEnds()
        self._opened = False
        self.leaving: dict[WorkerId, Worker] = {}
        """Ready ones whose end is known: they get only what ends before that."""
        self.struck: dict[WorkerId, Worker] = {}
        """Those with strikes."""
        self._able: dict[WorkerId, None] = {}
        self.help_changed = False
        """Whether other workers, or workers of other versions, are of use beside the trainer's device than when this
        was last set."""
        self._helpers: dict[int, int] = {}
        self._helping: dict[WorkerId, int] = {}
        self._places: dict[WorkerId, int] = {}
        self.places = 0
        """Turns that ready workers can execute at once, in all."""

    def add(self, worker: WorkerId, lease: LeaseId, provider: str, role: WorkerRole) -> Worker:
        record = Worker(worker, lease, provider, role, order=self._added)
        self._added += 1
        self.workers[worker] = record
        self._able[worker] = None
        self._of_lease.setdefault(lease, {})[worker] = record
        if role is WorkerRole.TRAINER:
            self.trainer = record
        return record

    def of_lease(self, lease: LeaseId) -> list[Worker]:
        return list(self._of_lease.get(lease, {}).values())

    def forget(self, lease: LeaseId) -> None:
        """Drop the workers of a lease that has ended; all of them are gone."""
        for worker in self._of_lease.pop(lease, {}):
            del self.workers[worker]
            self._able.pop(worker, None)
            self.leaving.pop(worker, None)
            self.struck.pop(worker, None)
            if self.trainer is not None and self.trainer.id == worker:
                self.trainer = None

    def move(self, worker: Worker, state: WorkerState, now_ns: Nanoseconds, cause: str) -> None:
        """Change a worker's state; raises `IllegalTransition` where the table forbids it."""
        take_transition(worker.id, worker.state, state, worker.story, now_ns, cause)
        worker.state = state
        worker.served = worker.served or state is WorkerState.READY
        self.reindex(worker)

    def assign(self, worker: Worker, turn: TurnId, due_tokens: int = 0) -> int:
        """Returns the turn's slot on the worker."""
        slot, worker.sent = worker.sent, worker.sent + 1
        worker.slots[slot] = turn
        worker.turns[turn] = False
        worker.due_tokens += due_tokens
        worker.pending += 1
        if worker.engine_pending:
            worker.engine_pending += 1  # Engines begin turns in order: it waits behind the others.
        self._out_of_order[worker.id] = worker
        return slot

    def begin(self, worker: Worker, turn: TurnId) -> None:
        """The worker's first token of the turn has come: it is pending no longer."""
        if worker.turns.get(turn) is False:
            worker.turns[turn] = True
            worker.brought = True
            if not worker.resting:
                worker.declines = 0
            self._pends_no_more(worker)

    def unassign(self, worker: Worker, turn: TurnId, due_tokens: int = 0) -> None:
        begun = worker.turns.pop(turn, None)
        worker.due_tokens -= due_tokens if begun is not None else 0
        if begun is False:
            self._pends_no_more(worker)
        elif begun:
            self._out_of_order[worker.id] = worker

    def _pends_no_more(self, worker: Worker) -> None:
        worker.pending -= 1
        if worker.engine_pending > worker.pending:
            worker.engine_pending = worker.pending  # Those that it begins first were in no queue.
        self._out_of_order[worker.id] = worker

    def unassign_all(self, worker: Worker) -> None:
        """Take all turns off the worker."""
        worker.turns.clear()
        worker.pending = worker.engine_pending = worker.due_tokens = 0
        self._out_of_order[worker.id] = worker

    def given_back(self, worker: Worker) -> None:
        """Lower the reputation of a worker that has given a turn back unasked."""
        worker.reputation = max(LEAST_REPUTATION, REPUTATION_KEPT * worker.reputation)
        self._out_of_order[worker.id] = worker

    def rest(self, worker: Worker) -> None:
        """The worker has declined a turn: it gets none before `rested`, and then one, until it has begun that."""
        worker.declines += 1
        worker.resting = True
        self.reindex(worker)

    def strike(self, worker: Worker, now_ns: Nanoseconds, finished: int) -> None:
        """The worker has failed a turn. It gets turns last, few at a time, until it has made good what it holds now."""
        worker.owes += max(1, len(worker.turns)) << min(worker.relapses, RELAPSES_MAX)
        worker.trusted = 1
        if not worker.strikes:
            worker.others_finished = finished
            worker.relapses += 1
        worker.strikes += 1
        worker.struck_ns = now_ns
        worker.resting = worker.resting or worker.strikes > 1
        self.struck[worker.id] = worker
        self.reindex(worker)

    def redeem(self, worker: Worker) -> None:
        """A worker with strikes has finished a turn."""
        worker.owes -= 1
        worker.trusted += 1
        if worker.owes <= 0:
            worker.strikes = worker.owes = 0
            del self.struck[worker.id]
            self.reindex(worker)

    def bring_late(self, worker: Worker) -> None:
        """The worker has finished a turn far later than others would have: it is of some use, and gets turns last."""
        if worker.strikes > 1:
            worker.strikes = 1

    def rested(self, worker: Worker) -> None:
        worker.resting = False
        self.reindex(worker)

    def progressed(self, worker: Worker, tokens: int) -> None:
        """Tokens of the worker were accepted."""
        worker.brought = True
        if worker.reputation < 1:
            worker.reputation = min(1.0, worker.reputation + tokens / REPUTATION_TOKENS)
            self._out_of_order[worker.id] = worker

    def has_room(self, worker: Worker) -> bool:
        """Whether it may be sent another turn: there is a free place, or fewer than Θ turns wait there."""
        return worker.leaves_ns is None and self.may_take(worker)

    def may_take(self, worker: Worker) -> bool:
        """As `has_room`, but includes workers that are about to leave."""
        if not _accepts(worker):
            return False
        return (worker.max_batch is not None and worker.has_place) or worker.queued < self._max_pending

    def with_room(self, worker: WorkerId, oldest_version: int) -> Worker | None:
        record = self.workers.get(worker)
        if record is None or record.version is None or record.version < oldest_version:
            return None
        return record if self.has_room(record) else None

    def least_loaded(self, role: WorkerRole, oldest_version: int, avoided: Container[WorkerId] = ()) -> list[Worker]:
        if self._out_of_order:
            self._put_in_order()
        places = self._loads[role]
        if not places:
            return []
        best: dict[WorkerKind, _Load] = {}
        for (kind, version), loads in places.items():
            if version < oldest_version:
                continue
            least = next((load for load in loads if load[3] not in avoided), None) if avoided else loads[0]
            if least is not None and (kind not in best or least < best[kind]):
                best[kind] = least
        if self.struck:
            best = {kind: load for kind, load in best.items() if load[0] < _LAST} or best
        return [self.workers[load[3]] for load in sorted(best.values())]

    def take_opened(self) -> bool:
        """Whether any worker has opened since this was asked last."""
        if self._out_of_order:
            self._put_in_order()
        opened, self._opened = self._opened, False
        return opened

    def ends(self, count: int, others: Collection[WorkerId]) -> list[Worker]:
        """Return `count` ready workers of each kind with the most to do, `count` with the least, and all `others` that
        are ready, in the order in which they came to the fleet."""
        if self._out_of_order:
            self._put_in_order()
        found = {*self._ends.ends(count, others), *others}
        workers = [worker for name in found if (worker := self.workers.get(name)) is not None]
        return sorted((w for w in workers if w.state is WorkerState.READY), key=lambda worker: worker.order)

    @property
    def helping_workers(self) -> int:
        """Ready workers with credit other than the trainer's device."""
        return len(self._helping)

    @property
    def loading_versions(self) -> tuple[int, ...]:
        """Versions that workers are loading, ascending."""
        return tuple(sorted({w.loading_version for w in self.workers.values() if w.loading_version is not None}))

    @property
    def able(self) -> bool:
        """Return whether any worker is, or will be, in a state to take a turn. Its places may all be taken now."""
        return bool(self._able)

    def helped(self, oldest_version: int) -> bool:
        """Whether any worker but the trainer's device is of use, even if it has no room just now."""
        return bool(self._helpers) and max(self._helpers) >= oldest_version

    def reindex(self, worker: Worker) -> None:
        """Bring the index up to date after anything about the worker's room has changed."""
        self._out_of_order[worker.id] = worker
        self._reindex_help(worker)
        self._reindex_places(worker)
        if worker.leaves_ns is not None and worker.state is WorkerState.READY:
            self.leaving[worker.id] = worker
        else:
            self.leaving.pop(worker.id, None)
        if _able(worker):
            self._able[worker.id] = None
        else:
            self._able.pop(worker.id, None)

    def _put_in_order(self) -> None:
        for worker in self._out_of_order.values():
            self._reindex_load(worker)
            if worker.leaves_ns is not None and worker.has_place and self.may_take(worker):
                self._opened = True
        self._out_of_order.clear()

    def _reindex_load(self, worker: Worker) -> None:
        queued = worker.queued
        self._ends.place(worker.id, worker.order, worker.kind, _to_do(worker, queued))
        entry, wanted = self._indexed.get(worker.id), self._load_entry(worker, queued)
        if entry == wanted:
            return
        places = self._loads[worker.role]
        if entry is not None:
            place, load = entry
            loads = places[place]
            del loads[bisect_left(loads, load)]
            if not loads:
                del places[place]
            del self._indexed[worker.id]
        if wanted is not None:
            place, load = wanted
            insort(places.setdefault(place, []), load)
            self._indexed[worker.id] = wanted
            if entry is None or entry[0] != place:
                self._opened = True

    def _load_entry(self, worker: Worker, queued: int) -> tuple[_Place, _Load] | None:
        """As `has_room` says, with what of it is known already."""
        version = worker.version
        if version is None or worker.leaves_ns is not None or not _accepts(worker):
            return None
        turns, batch, places = len(worker.turns), worker.max_batch, worker.capacity
        if batch is not None and batch < places:
            places = batch
        begins = turns < places and not worker.engine_pending
        if not (begins and batch is not None) and queued >= self._max_pending:
            return None
        queue = (0 if begins else 1 + queued) + (_LAST if worker.strikes else 0)
        return (worker.kind, version), (queue, (turns + 1) / (places * worker.reputation), worker.order, worker.id)

    def _reindex_help(self, worker: Worker) -> None:
        counted, helps_with = self._helping.get(worker.id), self._helps_with(worker)
        if counted == helps_with:
            return
        self.help_changed = True
        if counted is not None:
            del self._helping[worker.id]
            self._helpers[counted] -= 1
            if not self._helpers[counted]:
                del self._helpers[counted]
        if helps_with is not None:
            self._helping[worker.id] = helps_with
            self._helpers[helps_with] = self._helpers.get(helps_with, 0) + 1

    def _reindex_places(self, worker: Worker) -> None:
        had = self._places.pop(worker.id, 0)
        if worker.state is WorkerState.READY and worker.places:
            self._places[worker.id] = worker.places
        self.places += self._places.get(worker.id, 0) - had

    def _helps_with(self, worker: Worker) -> int | None:
        """The version with which a worker is of use beside the trainer's device."""
        useful = worker.state is WorkerState.READY and worker.role is not WorkerRole.TRAINER and worker.capacity > 0
        hopeless = worker.resting and worker.declines >= HOPELESS_DECLINES
        return worker.version if useful and not hopeless and worker.leaves_ns is None else None

    def stale_index(self) -> str:
        """Return the differences between the index and a recomputation; empty if the index is right."""
        self._put_in_order()
        loads = {w.id: entry for w in self.workers.values() if (entry := self._load_entry(w, w.queued)) is not None}
        if loads != self._indexed:
            return f"load index {self._indexed}, should be {loads}"
        in_order = {(p, load) for places in self._loads.values() for p, all_ in places.items() for load in all_}
        if set(loads.values()) != in_order:
            return f"loads in order {self._loads}, should be {loads}"
        to_do = {w.id: (w.kind, load) for w in self.workers.values() if (load := _to_do(w, w.queued)) is not None}
        if stale := self._ends.stale(to_do):
            return stale
        able = {w.id for w in self.workers.values() if _able(w)}
        if able != set(self._able):
            return f"able are {list(self._able)}, should be {able}"
        places = {w.id: w.places for w in self.workers.values() if w.state is WorkerState.READY and w.places}
        if places != self._places or sum(places.values()) != self.places:
            return f"places {self._places}, {self.places} in all, should be {places}"
        helping = {w.id: version for w in self.workers.values() if (version := self._helps_with(w)) is not None}
        if helping != self._helping:
            return f"helpers {self._helping}, should be {helping}"
        versions = list(helping.values())
        counts = {version: versions.count(version) for version in versions}
        return "" if counts == self._helpers else f"helper counts {self._helpers}, should be {counts}"


class RemainingFleet:
    """The fleet without the workers that a turn must avoid."""

    def __init__(self, fleet: Fleet, avoided: Container[WorkerId]) -> None:
        self._fleet = fleet
        self._avoided = avoided

    def with_room(self, worker: WorkerId, oldest_version: int) -> Worker | None:
        return None if worker in self._avoided else self._fleet.with_room(worker, oldest_version)

    def least_loaded(self, role: WorkerRole, oldest_version: int) -> list[Worker]:
        return self._fleet.least_loaded(role, oldest_version, self._avoided)


def _to_do(worker: Worker, queued: int) -> Load | None:
    """What a ready worker has to do, on which so many turns wait for room."""
    return (queued, len(worker.turns) - worker.pending) if worker.state is WorkerState.READY else None


def _accepts(worker: Worker) -> bool:
    """Whether a worker takes turns now, and has credit for another one."""
    return not (
        worker.state is not WorkerState.READY
        or len(worker.turns) >= worker.capacity
        or worker.version is None
        or worker.resting
        or (worker.declines and worker.pending)
        or (worker.strikes and len(worker.turns) >= worker.trusted)
    )


def _able(worker: Worker) -> bool:
    """A ready worker without credit has said that it takes nothing; the trainer's device asleep will wake for turns."""
    if worker.leaves_ns is not None:
        return False
    if worker.state is WorkerState.READY:
        return worker.capacity > 0
    return worker.state not in (WorkerState.DRAINING, WorkerState.GONE)
