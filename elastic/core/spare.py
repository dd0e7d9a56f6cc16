"""Spare credit: places that rollouts leave free now, given to turns that are not trained.

Pure, and beside the scheduler, which knows nothing of these turns: it routes rollouts as if there were none. This looks
at the same fleet, and guarantees:

- A turn is placed only while no rollout's turn is queued, and only where it begins at once: in a free place of the
  batch of a worker that takes turns: of the trainer's device while it generates, too. Never on a worker that loads
  weights, is about to leave or has failed turns.
- A worker never holds more of them than rollouts leave places: as soon as these need one, or the worker is to do
  anything else, the turn is taken back. It keeps its accepted tokens, and goes on once there is a place again.
- A turn that found no place for `wait_ns`, or of which its worker brought no token for `token_ns`, is given up; so is
  one that goes to and fro, and of which no token came for as long as both.
"""

from dataclasses import dataclass, field

from elastic.core import commands as c
from elastic.core.fleet import Worker
from elastic.core.scheduler import Phase, Scheduler
from elastic.core.types import (
    NS_PER_S,
    TURN_ENDS,
    Chunk,
    FinishReason,
    InfrastructureCause,
    Nanoseconds,
    TurnId,
    WorkerId,
    WorkerState,
)

FIRST_SLOT = 1 << 40
"""Slots from here on are of turns on spare credit: the scheduler counts its own from 0 in each epoch."""
NO_SPARE = f"{InfrastructureCause.CAPACITY}: rollouts have left no place on any worker"
ERRORS_MAX = 3
"""A turn with which engines fail so often is given up."""
REST_NS = NS_PER_S // 4
"""For a turn that a worker has given back; twice as long each next time, up to half of `wait_ns`."""
ENDING = f"{InfrastructureCause.CAPACITY}: the run is over"
SILENT = f"{InfrastructureCause.PROGRESS}: its worker has brought no token in time"
STUCK = f"{InfrastructureCause.PROGRESS}: workers that had it have brought no token in time"


@dataclass(slots=True)
class SpareTurn:
    """A turn on spare credit. While a worker has it, it is under `attempt` in `slot` there, with `start` tokens
    accepted before that. `since_ns` is when it was queued, or when its worker was last heard of it;
    `progress_ns` is when it was asked for, or when its last token came. `device_ns` is the time of devices that it
    took: a worker's is shared by the turns that it has."""

    id: TurnId
    max_new_tokens: int
    since_ns: Nanoseconds
    progress_ns: Nanoseconds
    rests_until_ns: Nanoseconds = 0
    """It is not placed before: a worker has given it back."""
    rest_ns: Nanoseconds = REST_NS
    """How long it rests when a worker gives it back the next time."""
    accepted: int = 0
    errors: int = 0
    attempt: int = 0
    start: int = 0
    worker: WorkerId | None = None
    epoch: int = 0
    slot: int = -1
    device_ns: float = 0.0


@dataclass(slots=True)
class SpareCredit:
    """The turns on spare credit of a run. Methods return what its workers are to be told."""

    scheduler: Scheduler
    wait_ns: Nanoseconds
    token_ns: Nanoseconds = 30 * NS_PER_S
    turns: dict[TurnId, SpareTurn] = field(default_factory=dict[TurnId, SpareTurn])
    """Those that are not over, oldest first."""
    given_up: list[tuple[SpareTurn, str]] = field(default_factory=list[tuple[SpareTurn, str]])
    """Turns that are over without an end, and why, since somebody took them from here."""
    _held: dict[WorkerId, dict[int, SpareTurn]] = field(default_factory=dict[WorkerId, dict[int, SpareTurn]])
    """By worker and slot: those that it has, oldest first."""
    _slot: int = FIRST_SLOT

    def ask(self, turn: TurnId, max_new_tokens: int, now_ns: Nanoseconds) -> list[c.Command]:
        """Queue a turn."""
        self.turns[turn] = SpareTurn(turn, max_new_tokens, now_ns, now_ns)
        return self.look(now_ns)

    def end(self, turn: TurnId, now_ns: Nanoseconds) -> list[c.Command]:
        """Nobody wants more of the turn."""
        ended = self.turns.pop(turn, None)
        return [] if ended is None else self._take_back([ended], now_ns)

    def look(self, now_ns: Nanoseconds) -> list[c.Command]:
        """Take back what is where it may not be, place what waits, and give up what has waited for too long.

        To be called now and then while there are turns, and after what makes room.
        """
        told: list[c.Command] = []
        for name, held in list(self._held.items()):
            worker = self.scheduler.fleet.workers.get(name)
            if worker is None or not _has_spare_credit(worker):
                told += self.leave(name, now_ns)
                continue
            told += self._take_back([turn for turn in held.values() if turn.epoch != worker.epoch], now_ns)
            told += self.yield_places(name, now_ns)
        for turn in list(self.turns.values()):
            if self.scheduler.phase in (Phase.STOPPING, Phase.ENDED):
                told += self._give_up(turn, ENDING, now_ns)
            elif now_ns - turn.progress_ns >= self.wait_ns + self.token_ns:
                told += self._give_up(turn, STUCK, now_ns)
            elif turn.worker is None and now_ns >= turn.rests_until_ns and (worker := self._place()) is not None:
                told.append(self._start(turn, worker, now_ns))
            elif now_ns - turn.since_ns >= (self.wait_ns if turn.worker is None else self.token_ns):
                told += self._give_up(turn, NO_SPARE if turn.worker is None else SILENT, now_ns)
        return told

    def yield_places(self, name: WorkerId, now_ns: Nanoseconds) -> list[c.Command]:
        """Take turns back from a worker that holds more than rollouts leave places, the newest first."""
        held, worker = self._held.get(name), self.scheduler.fleet.workers.get(name)
        if not held or worker is None:
            return []
        surplus = len(worker.turns) + len(held) - worker.places
        return [] if surplus <= 0 else self._take_back(list(held.values())[-surplus:], now_ns)

    def leave(self, name: WorkerId, now_ns: Nanoseconds) -> list[c.Command]:
        """Take all turns back from a worker."""
        held = self._held.get(name)
        return [] if not held else self._take_back(list(held.values()), now_ns)

    def take(
        self, name: WorkerId, epoch: int, chunk: Chunk, now_ns: Nanoseconds
    ) -> tuple[SpareTurn, bool] | tuple[None, bool]:
        """The turn whose next tokens these are, None if they are nobody's; and whether it is over with them.

        A turn that its worker gives back waits for another place.
        """
        turn = self._held.get(name, {}).get(chunk.slot)
        if turn is None or turn.epoch != epoch:
            return None, False
        fits = chunk.start == turn.accepted and chunk.start + chunk.count <= turn.max_new_tokens
        if fits:
            self._account(turn, now_ns)
            turn.accepted += chunk.count
            turn.since_ns = now_ns
            if chunk.count:
                turn.progress_ns = now_ns
        over = fits and (chunk.finish in TURN_ENDS or turn.accepted == turn.max_new_tokens)
        if over:
            del self.turns[turn.id]
        if over or chunk.finish is not None:
            self._leave_worker(turn)
            turn.rests_until_ns = now_ns + turn.rest_ns
            turn.rest_ns = max(turn.rest_ns, min(2 * turn.rest_ns, self.wait_ns // 2))
        if chunk.finish is FinishReason.ERROR:
            turn.errors += 1
            if turn.errors == ERRORS_MAX:
                self._give_up(turn, f"{InfrastructureCause.ENGINE}: {chunk.detail}", now_ns)
        return (turn, over) if fits else (None, False)

    def holds(self, name: WorkerId) -> int:
        """How many of them the worker has."""
        return len(self._held.get(name, ()))

    def pending(self, name: WorkerId) -> int:
        """How many of those that it has the worker has not begun, as far as is known."""
        return sum(turn.accepted == turn.start for turn in self._held.get(name, {}).values())

    def _place(self) -> Worker | None:
        """The worker with the most room for one more; none while a rollout's turn waits."""
        best: Worker | None = None
        least = 1.0
        if self.scheduler.turns.queue or self.scheduler.phase is not Phase.RUNNING:
            return None
        for worker in self.scheduler.fleet.workers.values():
            if _has_spare_credit(worker) and worker.places:
                share = (len(worker.turns) + self.holds(worker.id)) / worker.places
                if share < least:
                    best, least = worker, share
        return best

    def _start(self, turn: SpareTurn, worker: Worker, now_ns: Nanoseconds) -> c.StartTurn:
        turn.attempt += 1
        turn.worker, turn.epoch, turn.slot = worker.id, worker.epoch, self._slot
        turn.start, turn.since_ns = turn.accepted, now_ns
        self._slot += 1
        self._held.setdefault(worker.id, {})[turn.slot] = turn
        return c.StartTurn(
            worker=worker.id,
            epoch=worker.epoch,
            turn=turn.id,
            attempt=turn.attempt,
            slot=turn.slot,
            start=turn.accepted,
        )

    def _give_up(self, turn: SpareTurn, cause: str, now_ns: Nanoseconds) -> list[c.Command]:
        self.given_up.append((turn, cause))
        return self.end(turn.id, now_ns)

    def _take_back(self, turns: list[SpareTurn], now_ns: Nanoseconds) -> list[c.Command]:
        """Off their workers; those that are not over wait for other places."""
        told: list[c.Command] = []
        for turn in turns:
            if turn.worker is None:
                continue
            worker = self.scheduler.fleet.workers.get(turn.worker)
            if worker is not None and worker.connected and worker.epoch == turn.epoch:
                abort = c.AbortTurn(worker=worker.id, epoch=turn.epoch, turn=turn.id, attempt=turn.attempt)
                told.append(abort)
            self._account(turn, now_ns)
            self._leave_worker(turn)
            turn.since_ns = now_ns
        return told

    def _account(self, turn: SpareTurn, now_ns: Nanoseconds) -> None:
        """Count the turn's share of its worker's time since that was last heard of it."""
        name = turn.worker or ""
        worker, book = self.scheduler.fleet.workers.get(name), self.scheduler.ledger.books.get(name)
        if worker is not None and book is not None:
            turns = len(worker.turns) + self.holds(name)
            turn.device_ns += book.gpus * (now_ns - turn.since_ns) / turns

    def _leave_worker(self, turn: SpareTurn) -> None:
        assert turn.worker is not None
        held = self._held[turn.worker]
        del held[turn.slot]
        if not held:
            del self._held[turn.worker]
        turn.worker, turn.slot = None, -1


def _has_spare_credit(worker: Worker) -> bool:
    """Whether the worker may have a turn on spare credit beside those of rollouts, if it has a place."""
    return (
        worker.state is WorkerState.READY
        and worker.version is not None
        and worker.loading_version is None
        and worker.leaves_ns is None
        and not worker.engine_pending
        and not (worker.resting or worker.declines or worker.strikes)
    )
