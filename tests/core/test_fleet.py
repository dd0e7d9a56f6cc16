"""The fleet's index against a search through all workers."""

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from elastic.core.fleet import Fleet, Worker
from elastic.core.transitions import LEGAL
from elastic.core.types import WorkerRole, WorkerState

MAX_PENDING = 2
LOOKED_AT = 2
VERSIONS = (0, 1, 2)


def searched(fleet: Fleet, role: WorkerRole, oldest_version: int) -> Worker | None:
    """The least loaded worker with room, the slow way."""
    able = [w for w in fleet.workers.values() if w.role is role and fleet.with_room(w.id, oldest_version) is not None]
    return min(able, key=lambda w: (w.pending, len(w.turns) / w.capacity, w.order), default=None)


def takers(fleet: Fleet) -> set[tuple[str, int]]:
    """Who would take a turn, by the oldest version that the turn allows."""
    return {(w, oldest) for w in fleet.workers for oldest in VERSIONS if fleet.with_room(w, oldest) is not None}


def searched_ends(fleet: Fleet) -> list[str]:
    """The ready workers of each kind with the least and with the most to do, the slow way."""
    ready = [w for w in fleet.workers.values() if w.state is WorkerState.READY]
    chosen: set[str] = set()
    for kind in {w.kind for w in ready}:
        for sign in (1, -1):
            alike = [w for w in ready if w.kind == kind]
            alike.sort(key=lambda w: (sign * w.queued, sign * (len(w.turns) - w.pending), w.order))
            chosen |= {w.id for w in alike[:LOOKED_AT]}
    return [w.id for w in ready if w.id in chosen]


@given(st.integers(0, 2**32), st.integers(1, 120))
def test_who_takes_more_than_before_has_opened_and_who_has_most_to_do_is_found(seed: int, actions: int) -> None:
    rng, fleet, before = Random(seed), Fleet(MAX_PENDING), set[tuple[str, int]]()
    for n in range(actions):
        _act(rng, fleet, n)
        now = takers(fleet)
        if rng.random() < 0.5:
            assert fleet.take_opened() or now <= before
            assert not fleet.take_opened()
            before = now
        else:
            before &= now
        assert [w.id for w in fleet.ends(LOOKED_AT, ())] == searched_ends(fleet)


@given(st.integers(0, 2**32), st.integers(1, 120))
def test_index_finds_what_a_search_finds(seed: int, actions: int) -> None:
    rng, fleet = Random(seed), Fleet(MAX_PENDING)
    for n in range(actions):
        _act(rng, fleet, n)
        assert fleet.stale_index() == ""
        for role in WorkerRole:
            for oldest in VERSIONS:
                assert next(iter(fleet.least_loaded(role, oldest)), None) is searched(fleet, role, oldest)
        others = [w for w in fleet.workers.values() if w.role is not WorkerRole.TRAINER and w.capacity > 0]
        ready = [w.version for w in others if w.state is WorkerState.READY and w.version is not None]
        assert all(fleet.helped(oldest) is any(v >= oldest for v in ready) for oldest in (0, 1, 2))


def _act(rng: Random, fleet: Fleet, n: int) -> None:
    workers = list(fleet.workers.values())
    if not workers or rng.random() < 0.15:
        fleet.add(f"w{n}", f"l{n % 7}", "spot", rng.choice(list(WorkerRole)))
        return
    worker = rng.choice(workers)
    match rng.randrange(6):
        case 0:
            following = sorted(LEGAL[WorkerState][worker.state])
            if following:
                fleet.move(worker, rng.choice(following), n, "test")
        case 1:
            worker.version, worker.capacity = rng.choice((None, 0, 1, 2)), rng.randint(0, 3)
            fleet.reindex(worker)
        case 2 | 3:
            fleet.assign(worker, f"t{n}")
        case 4 if worker.turns:
            fleet.begin(worker, rng.choice(list(worker.turns)))
        case 5 if worker.turns:
            fleet.unassign(worker, rng.choice(list(worker.turns)))
        case _:
            for lost in fleet.of_lease(worker.lease):
                if lost.state is not WorkerState.GONE:
                    fleet.move(lost, WorkerState.GONE, n, "test")
            fleet.forget(worker.lease)


def test_forgotten_lease_leaves_nothing() -> None:
    fleet = Fleet(MAX_PENDING)
    worker = fleet.add("t", "l", "trainer", WorkerRole.TRAINER)
    assert fleet.trainer is worker
    fleet.move(worker, WorkerState.GONE, 0, "test")
    fleet.forget("l")
    assert (fleet.trainer, fleet.workers, fleet.of_lease("l")) == (None, {}, [])
