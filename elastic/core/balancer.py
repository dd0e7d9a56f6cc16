"""Continuous balancing: at short intervals a policy looks at all loads, and turns move with all that they have.

A turn that is moved keeps its accepted tokens, goes where the policy wants it if there is room when it arrives, and
is left alone from then on until a token has come of it. Source: RLBoost §4.2.1, Algorithm 2.
"""

from collections import Counter
from collections.abc import Iterator

from elastic.core.fleet import Worker
from elastic.core.run_state import Deadlines, Handlers, RunState
from elastic.core.turn_manager import TurnManager
from elastic.core.turns import Turn
from elastic.core.types import TurnId, TurnState, WorkerId, WorkerKind, WorkerRole

CONSIDERED = 64
"""Workers of each kind that one balancing round considers: so many of the most and of the least loaded. Rounds are
frequent, and a round over a thousand workers would delay other decisions."""


class WorkerLoad:
    """A worker as a balancing policy sees it (`elastic.core.policy.LoadView`); its turns are looked up on demand.

    Moving turns count at their destination: not on the worker that was asked for them, and in `arriving` on the next.
    """

    __slots__ = ("_arriving", "_run", "_worker", "executing", "pending")

    def __init__(self, run: RunState, worker: Worker, pending: int, executing: int, arriving: int = 0) -> None:
        self._run = run
        self._worker = worker
        self._arriving = arriving
        self.pending = pending
        self.executing = executing

    @property
    def room(self) -> int:
        return max(0, self._room() - self._arriving)

    @property
    def id(self) -> WorkerId:
        return self._worker.id

    @property
    def kind(self) -> WorkerKind:
        return self._worker.kind

    def movable_pending(self) -> list[TurnId]:
        """Engines begin turns in order: of those not begun, the last ones are the ones that wait."""
        running = (turn for turn in self._turns() if turn.state is TurnState.RUNNING)
        waiting = [turn for turn in running if not self._worker.turns[turn.id]]
        return [turn.id for turn in waiting[len(waiting) - self.pending :] if _may_move(turn)][::-1]

    def movable_executing(self) -> list[TurnId]:
        begun = [turn for turn in self._turns() if self._worker.turns[turn.id] and _may_move(turn)]
        return [turn.id for turn in sorted(begun, key=lambda turn: (turn.context_tokens, turn.order))]

    def context_tokens(self) -> float:
        contexts = [turn.context_tokens for turn in self._turns()]
        return sum(contexts) / len(contexts) if contexts else 0.0

    def _turns(self) -> Iterator[Turn]:
        return (self._run.turns.live[turn] for turn in self._worker.turns)

    def _room(self) -> int:
        """Places in its batch; no more than one while it is not known whether it takes turns at all."""
        worker, run = self._worker, self._run
        may_take = worker.role is not WorkerRole.TRAINER and worker.has_place
        if not may_take or run.fleet.with_room(worker.id, run.oldest_version) is None:
            return 0
        return 1 if worker.declines else worker.places - worker.outstanding


def _may_move(turn: Turn) -> bool:
    return turn.state is TurnState.RUNNING and (turn.moved_at is None or turn.accepted > turn.moved_at)


class Balancer:
    def __init__(self, run: RunState, turns: TurnManager) -> None:
        self._run = run
        self._turns = turns
        self.handlers: Handlers = {}
        self.due: Deadlines = {"balance": lambda _: self._balance()}

    def watch(self) -> None:
        """While turns are under way, look at the loads now and then."""
        run = self._run
        if run.policies.balancing is not None and run.turns.live and not run.timers.waiting("balance", "fleet"):
            run.wait("balance", "fleet", run.limits.balance_interval_ns)

    def stop(self) -> None:
        self._run.timers.clear("balance", "fleet")

    def _balance(self) -> None:
        run, policy = self._run, self._run.policies.balancing
        if policy is None or run.turns.head() is not None:
            return
        for move in policy.moves(self.loads(), run.profiles):
            turn = run.turns.live[move.turn]
            may_go = not turn.avoids(move.to, run.now_ns)
            if may_go and run.fleet.with_room(move.to, turn.oldest_version) is not None:
                self._turns.transfer(turn, move.to)

    def loads(self) -> list[WorkerLoad]:
        """Return the ready workers with the most and with the least work of each kind, in the fleet's order.

        Where turns are on their way, the workers that they leave and go to are looked at, too: what these have to do is
        not what the fleet counts.
        """
        alike: dict[tuple[int, int, WorkerKind], list[Worker]] = {}
        arriving = Counter(turn.destination for turn in self._run.turns.moving.values() if turn.destination is not None)
        leaving = self._leaving()
        for worker in self._run.fleet.ends(CONSIDERED, arriving.keys() | leaving.keys()):
            pending, executing = worker.queued, len(worker.turns) - worker.pending
            if worker.id in leaving:
                called_back = leaving[worker.id]
                pending, executing = max(0, pending - called_back[False]), executing - called_back[True]
            load = pending, executing + arriving.get(worker.id, 0), worker.kind
            alike.setdefault(load, []).append(worker)
        in_order = sorted(alike, key=lambda load: load[:2])
        chosen: dict[int, WorkerLoad] = {}
        for ends in (in_order, in_order[::-1]):
            left = dict.fromkeys((kind for *_, kind in in_order), CONSIDERED)
            for pending, executing, kind in ends:
                taken = alike[pending, executing, kind][: left[kind]]
                left[kind] -= len(taken)
                for worker in taken:
                    chosen[worker.order] = WorkerLoad(self._run, worker, pending, executing, arriving.get(worker.id, 0))
        return [chosen[order] for order in sorted(chosen)]

    def _leaving(self) -> dict[WorkerId, Counter[bool]]:
        """How many turns each worker is called back, begun and not begun."""
        workers, leaving = self._run.fleet.workers, dict[WorkerId, Counter[bool]]()
        for turn in self._run.turns.moving.values():
            if turn.worker is not None:
                leaving.setdefault(turn.worker, Counter())[workers[turn.worker].turns[turn.id]] += 1
        return leaving
