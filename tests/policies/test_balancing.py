"""Moves: pending turns first, executing ones down to the plateau, and never back and forth."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from elastic.core.policy import LoadView, Move
from elastic.core.profiles import BatchProfile
from elastic.core.types import WorkerKind
from policies.balancing import ContinuousBalancing

KIND = WorkerKind("spot")
BATCH = 4


@dataclass
class FakeLoad:
    """A worker that executes the first `BATCH` of its turns; a moved turn stays until it gets a token."""

    id: str
    turns: list[str]
    kind: WorkerKind = KIND
    context: float = 100.0
    moved: set[str] = field(default_factory=set)

    @property
    def executing(self) -> int:
        return min(BATCH, len(self.turns))

    @property
    def pending(self) -> int:
        return len(self.turns) - self.executing

    @property
    def room(self) -> int:
        return BATCH - self.executing

    def movable_pending(self) -> Sequence[str]:
        return [turn for turn in self.turns[BATCH:] if turn not in self.moved]

    def movable_executing(self) -> Sequence[str]:
        return [turn for turn in self.turns[:BATCH] if turn not in self.moved]

    def context_tokens(self) -> float:
        return self.context


def loads(*counts: int) -> list[FakeLoad]:
    return [FakeLoad(f"w{n}", [f"w{n}t{t}" for t in range(count)]) for n, count in enumerate(counts)]


def profile(throughput: dict[int, float], context: float = 100.0) -> dict[WorkerKind, BatchProfile]:
    found = BatchProfile()
    for batch, tokens in throughput.items():
        found.note(batch, round(1000 * tokens), 1000, context)
    return {KIND: found}


NO_GAIN_BEYOND_TWO = profile({1: 1.0, 2: 2.0, 3: 2.05, 4: 2.1})


def moves(workers: Sequence[LoadView], profiles: dict[WorkerKind, BatchProfile] | None = None) -> list[Move]:
    return list(ContinuousBalancing().moves(workers, profiles or {}))


def apply(workers: list[FakeLoad], found: Sequence[Move]) -> None:
    by_id = {worker.id: worker for worker in workers}
    for move in found:
        source = next(worker for worker in workers if move.turn in worker.turns)
        source.turns.remove(move.turn)
        by_id[move.to].turns.append(move.turn)
        by_id[move.to].moved.add(move.turn)


def test_pending_turns_go_where_they_can_begin_at_once() -> None:
    workers = loads(7, 5, 3)
    found = moves(workers)
    assert [(move.turn[:2], move.to) for move in found] == [("w0", "w2")]


def test_most_overloaded_gives_first_and_emptiest_gets_first() -> None:
    workers = loads(6, 8, 2, 0)
    found = moves(workers)
    assert [move.turn[:2] for move in found] == ["w1", "w1", "w0", "w1", "w0", "w1"]
    assert [move.to for move in found][:3] == ["w3", "w3", "w2"]


def test_nothing_moves_between_saturated_workers() -> None:
    assert moves(loads(9, 4)) == []
    assert moves(loads(9, 5, 4)) == []


def test_executing_turns_stay_while_something_is_pending_or_no_plateau_is_known() -> None:
    assert moves(loads(4, 0)) == []
    assert moves(loads(4, 0), profile({4: 2.0})) == []


def test_executing_turns_go_down_to_the_plateau() -> None:
    workers = loads(4, 0)
    found = moves(workers, NO_GAIN_BEYOND_TWO)
    assert [move.to for move in found] == ["w1", "w1"]
    apply(workers, found)
    assert moves(workers, NO_GAIN_BEYOND_TWO) == []


def test_executing_turns_go_only_where_iterations_read_less() -> None:
    """Throughput that was seen under two lengths of context makes two plateaus; the longer one has room for more."""
    workers = loads(4, 1)
    found = profile({1: 1.0, 2: 2.0, 3: 2.05, 4: 2.1})
    for batch, tokens in {8: 4.0, 16: 8.0, 24: 8.1, 32: 8.2}.items():
        found[KIND].note(batch, round(1000 * tokens), 1000, 250.0)
    for context, plateau, receivers in ((120.0, 2, ["w1"]), (400.0, 10, [])):
        workers[1].context = context
        assert ContinuousBalancing().plateau(found[KIND], workers[1]) == plateau > workers[1].executing
        assert [move.to for move in moves(workers, found)] == receivers


def test_memory_bound_batches_are_left_alone() -> None:
    assert moves(loads(4, 0), profile({1: 1.0, 2: 2.0, 4: 4.0})) == []


def test_throughput_that_rose_to_the_largest_batch_seen_is_no_plateau_under_longer_contexts_either() -> None:
    workers = loads(4, 0)
    for worker in workers:
        worker.context = 150.0
    assert moves(workers, profile({1: 1.0, 2: 2.0, 4: 4.0})) == []


def test_batches_of_much_shorter_contexts_tell_nothing_of_a_plateau() -> None:
    (long,) = loads(4)
    found = profile({1: 1.0, 4: 4.0, 8: 8.0}, context=1000.0)
    found[KIND].note(2, 30_000, 1000, 50.0)
    long.context = 1000.0
    assert ContinuousBalancing().plateau(found[KIND], long) is None


def test_plateau_shrinks_with_longer_contexts() -> None:
    policy = ContinuousBalancing()
    (worker,) = loads(4)
    assert policy.plateau(NO_GAIN_BEYOND_TWO[KIND], worker) == 2
    worker.context = 200.0
    assert policy.plateau(NO_GAIN_BEYOND_TWO[KIND], worker) == 1
    worker.context = 50.0
    assert policy.plateau(NO_GAIN_BEYOND_TWO[KIND], worker) == 4


@given(st.lists(st.integers(0, 10), min_size=2, max_size=6), st.booleans())
def test_moves_end_and_no_turn_moves_twice_without_news(counts: list[int], profiled: bool) -> None:
    workers, seen = loads(*counts), set[str]()
    before = sum(worker.pending for worker in workers)
    for _ in range(sum(counts) + 1):
        found = moves(workers, NO_GAIN_BEYOND_TWO if profiled else None)
        if not found:
            break
        assert len({move.turn for move in found}) == len(found)
        assert not seen & {move.turn for move in found}
        seen |= {move.turn for move in found}
        room = {worker.id: worker.room for worker in workers}
        for worker in workers:
            assert sum(move.to == worker.id for move in found) <= room[worker.id]
        apply(workers, found)
    else:
        raise AssertionError("it never ends")
    free = sum(worker.room for worker in workers)
    pending = sum(worker.pending for worker in workers)
    assert pending <= before
    assert pending == 0 or free == 0


@given(st.lists(st.integers(0, 4), min_size=2, max_size=6), st.integers(1, 50))
def test_moves_end_even_if_every_move_is_news(counts: list[int], seed: int) -> None:
    """Every turn gets a token between two looks: what remains must still come to rest."""
    workers = loads(*counts)
    for _ in range(sum(counts) + 1):
        for worker in workers:
            worker.moved.clear()
        found = moves(workers, NO_GAIN_BEYOND_TWO)
        if not found:
            return
        apply(workers, found)
    raise AssertionError("it never ends")
