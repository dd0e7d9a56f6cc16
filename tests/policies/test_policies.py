"""The first policies, each on a small view of the world."""

import pytest

from elastic.core.fleet import Fleet
from elastic.core.turns import Turn
from elastic.core.types import WorkerRole, WorkerState
from policies.routing import AffinityRouting
from policies.selection import NonZeroVariance


def fleet_of(*workers: tuple[str, WorkerRole, int, int]) -> Fleet:
    """Ready workers as (id, role, turns held, credit), all of version 3."""
    fleet = Fleet(max_pending=100)
    for name, role, held, capacity in workers:
        worker = fleet.add(name, name, "any", role)
        worker.version, worker.capacity = 3, capacity
        fleet.move(worker, WorkerState.READY, 0, "test")
        for n in range(held):
            fleet.assign(worker, f"{name}{n}")
    return fleet


def turn(affine: str | None = None, oldest_version: int = 3) -> Turn:
    return Turn("t", "trajectory", 1, 1, oldest_version, 0, affine_worker=affine)


D, T, E = WorkerRole.DEDICATED, WorkerRole.TRAINER, WorkerRole.ELASTIC


@pytest.mark.parametrize(
    ("workers", "affine", "chosen"),
    [
        ([("d", D, 0, 4), ("e", E, 3, 4)], "e", "e"),
        ([("d", D, 1, 4), ("e", E, 4, 4)], "e", "d"),
        ([("d", D, 3, 4), ("d2", D, 1, 4), ("e", E, 0, 4)], None, "d2"),
        ([("d", D, 4, 4), ("e", E, 2, 4), ("e2", E, 1, 4)], None, "e2"),
        ([("t", T, 0, 4), ("e", E, 0, 4)], None, "t"),
        ([("e", E, 1, 2), ("e2", E, 1, 8)], None, "e2"),
        ([("d", D, 4, 4), ("e", E, 0, 0)], "e", None),
        ([], "gone", None),
    ],
)
def test_route_falls_back_from_the_affine_worker_to_the_queue(workers, affine, chosen) -> None:
    assert AffinityRouting().route(turn(affine), fleet_of(*workers)) == chosen


def test_route_leaves_out_workers_with_weights_too_old() -> None:
    fleet = fleet_of(("e", E, 0, 4))
    assert AffinityRouting().route(turn("e", oldest_version=4), fleet) is None
    assert AffinityRouting().route(turn("e", oldest_version=2), fleet) == "e"


@pytest.mark.parametrize(("rewards", "dropped"), [([0.0, 1.0], False), ([1.0, 1.0], True), ([0.5, 0.5, 0.4], False)])
def test_groups_without_variance_are_dropped(rewards: list[float], dropped: bool) -> None:
    assert (NonZeroVariance().drop_reason(rewards) is not None) is dropped
