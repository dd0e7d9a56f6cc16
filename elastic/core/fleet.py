"""The fleet: every worker's state, credit and load, indexed so that the least loaded is found in O(log n)."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from sortedcontainers import SortedList

from elastic.core.transitions import Story, take_transition
from elastic.core.types import Capabilities, LeaseId, Nanoseconds, TurnId, WorkerId, WorkerRole, WorkerState

_LoadKey = tuple[int, float, int, WorkerId]


@dataclass(slots=True)
class Worker:
    """One engine instance of a lease. `turns` maps the turns it holds to whether it has begun them."""

    id: WorkerId
    lease: LeaseId
    provider: str
    role: WorkerRole
    order: int
    state: WorkerState = WorkerState.BOOTING
    epoch: int = 0
    capabilities: Capabilities | None = None
    version: int | None = None
    loading_version: int | None = None
    load_failures: int = 0
    capacity: int = 0
    progress: int = -1
    turns: dict[TurnId, bool] = field(default_factory=dict[TurnId, bool])
    pending: int = 0
    said_goodbye: bool = False
    story: Story = field(default_factory=Story)

    @property
    def outstanding(self) -> int:
        return len(self.turns)

    @property
    def connected(self) -> bool:
        return self.epoch > 0 and self.state not in (WorkerState.DETACHED, WorkerState.GONE)


class Fleet:
    """Workers by id, and per (role, version) those with room in order of load."""

    def __init__(self, max_pending: int) -> None:
        self.workers: dict[WorkerId, Worker] = {}
        self._max_pending = max_pending
        self._loads: dict[tuple[WorkerRole, int], SortedList[_LoadKey]] = {}
        self._indexed: dict[WorkerId, tuple[tuple[WorkerRole, int], _LoadKey]] = {}

    def add(self, worker: WorkerId, lease: LeaseId, provider: str, role: WorkerRole) -> Worker:
        record = Worker(worker, lease, provider, role, order=len(self.workers))
        self.workers[worker] = record
        return record

    def move(self, worker: Worker, state: WorkerState, now_ns: Nanoseconds, cause: str) -> None:
        """Change a worker's state; raises `IllegalTransition` where the table forbids it."""
        take_transition(worker.id, worker.state, state, worker.story, now_ns, cause)
        worker.state = state
        self.reindex(worker)

    def assign(self, worker: Worker, turn: TurnId) -> None:
        worker.turns[turn] = False
        worker.pending += 1
        self.reindex(worker)

    def begin(self, worker: Worker, turn: TurnId) -> None:
        """The worker's first token of the turn has come: it is pending no longer."""
        if worker.turns.get(turn) is False:
            worker.turns[turn] = True
            worker.pending -= 1
            self.reindex(worker)

    def unassign(self, worker: Worker, turn: TurnId) -> None:
        begun = worker.turns.pop(turn, None)
        if begun is not None:
            worker.pending -= not begun
            self.reindex(worker)

    def has_room(self, worker: Worker) -> bool:
        return (
            worker.state is WorkerState.READY
            and len(worker.turns) < worker.capacity
            and worker.pending < self._max_pending
        )

    def with_room(self, worker: WorkerId, oldest_version: int) -> Worker | None:
        record = self.workers.get(worker)
        if record is None or record.version is None or record.version < oldest_version:
            return None
        return record if self.has_room(record) else None

    def least_loaded(self, role: WorkerRole, oldest_version: int) -> Worker | None:
        best: _LoadKey | None = None
        for (indexed_role, version), loads in self._loads.items():
            if indexed_role is role and version >= oldest_version and loads and (best is None or loads[0] < best):
                best = loads[0]
        return self.workers[best[3]] if best else None

    def ready_others(self, oldest_version: int) -> Iterator[Worker]:
        """Ready workers other than the trainer's device, whether or not they have room."""
        return (
            w
            for w in self.workers.values()
            if w.state is WorkerState.READY
            and w.role is not WorkerRole.TRAINER
            and w.capacity > 0
            and w.version is not None
            and w.version >= oldest_version
        )

    def of_lease(self, lease: LeaseId) -> list[Worker]:
        return [w for w in self.workers.values() if w.lease == lease]

    def forget(self, worker: WorkerId) -> None:
        del self.workers[worker]

    def reindex(self, worker: Worker) -> None:
        """Bring the load index up to date after anything about the worker's room has changed."""
        entry = self._indexed.get(worker.id)
        if worker.version is not None and self.has_room(worker):
            key = (worker.role, worker.version)
            load = (worker.pending, len(worker.turns) / worker.capacity, worker.order, worker.id)
            if entry == (key, load):
                return
            if entry is not None:
                self._loads[entry[0]].remove(entry[1])
            self._loads.setdefault(key, SortedList()).add(load)
            self._indexed[worker.id] = (key, load)
        elif entry is not None:
            self._loads[entry[0]].remove(entry[1])
            del self._indexed[worker.id]
            if not self._loads[entry[0]]:
                del self._loads[entry[0]]
