"""Routing and selection, each on a small view of the world."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.core.demand import Demand
from elastic.core.fleet import Fleet
from elastic.core.turns import Turn
from elastic.core.types import Capabilities, WorkerKind, WorkerRole, WorkerState
from policies.routing import AffinityRouting, PinnedRouting, TurnWiseRouting, added_work_s
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


def with_batch(fleet: Fleet, **max_batch: int) -> Fleet:
    """The workers' credits go so far beyond their batches."""
    for name, batch in max_batch.items():
        fleet.workers[name].max_batch = batch
        fleet.reindex(fleet.workers[name])
    return fleet


@pytest.mark.parametrize("policy", [AffinityRouting(), TurnWiseRouting(), PinnedRouting()])
def test_a_free_place_goes_before_the_queue_of_a_better_role(policy) -> None:
    fleet = with_batch(fleet_of(("d", D, 2, 6), ("e", E, 1, 6)), d=2, e=2)
    assert policy.route(turn(), fleet) == "e"
    full = with_batch(fleet_of(("d", D, 2, 6), ("e", E, 2, 6)), d=2, e=2)
    assert policy.route(turn(), full) == "d"


def test_a_prefix_is_not_worth_waiting_for_while_others_have_places() -> None:
    fleet = with_batch(fleet_of(("d", D, 2, 6), ("e", E, 1, 6)), d=2, e=2)
    assert AffinityRouting().route(turn("d"), fleet) == "e"
    assert AffinityRouting().route(turn("d"), with_batch(fleet_of(("d", D, 2, 6), ("e", E, 2, 6)), d=2, e=2)) == "d"


def test_who_gives_turns_back_does_not_look_least_loaded() -> None:
    fleet = fleet_of(("e", E, 0, 4), ("e2", E, 2, 4))
    assert AffinityRouting().route(turn(), fleet) == "e"
    for _ in range(2):
        fleet.given_back(fleet.workers["e"])
    assert AffinityRouting().route(turn(), fleet) == "e2"
    fleet.progressed(fleet.workers["e"], 1000)
    assert AffinityRouting().route(turn(), fleet) == "e"


def test_hardware_does_not_draw_turns_to_who_gives_them_back() -> None:
    fleet = two_kinds()
    assert AffinityRouting().route(task(*PREFILL_HEAVY), fleet) == "compute"
    for _ in range(4):
        fleet.given_back(fleet.workers["compute"])
    assert AffinityRouting().route(task(*PREFILL_HEAVY), fleet) == "bandwidth"


def test_route_leaves_out_workers_with_weights_too_old() -> None:
    fleet = fleet_of(("e", E, 0, 4))
    assert AffinityRouting().route(turn("e", oldest_version=4), fleet) is None
    assert AffinityRouting().route(turn("e", oldest_version=2), fleet) == "e"


@pytest.mark.parametrize(("rewards", "dropped"), [([0.0, 1.0], False), ([1.0, 1.0], True), ([0.5, 0.5, 0.4], False)])
def test_groups_without_variance_are_dropped(rewards: list[float], dropped: bool) -> None:
    assert (NonZeroVariance().drop_reason(rewards) is not None) is dropped


@pytest.mark.parametrize(("affine", "chosen"), [("e", "e"), (None, "d"), ("gone", "d")])
def test_pinned_trajectories_stay(affine: str | None, chosen: str) -> None:
    assert PinnedRouting().route(turn(affine), fleet_of(("d", D, 1, 4), ("e", E, 3, 4))) == chosen


def test_turn_wise_routing_knows_no_prefix() -> None:
    assert TurnWiseRouting().route(turn("e"), fleet_of(("d", D, 1, 4), ("e", E, 0, 4))) == "d"


COMPUTE, BANDWIDTH = (990.0, 3350.0), (148.0, 4000.0)
"""TFLOPS and GB/s of an H800 and an H20."""


def two_kinds(credit: int = 8, due_tokens: int = 4000, **outstanding: int) -> Fleet:
    """Two elastic workers, `compute` and `bandwidth`, each with so many turns that have `due_tokens` left each."""
    fleet = fleet_of(*((name, E, outstanding.get(name, 0), credit) for name in ("compute", "bandwidth")))
    for name, (tflops, memory) in (("compute", COMPUTE), ("bandwidth", BANDWIDTH)):
        worker = fleet.workers[name]
        worker.due_tokens = due_tokens * worker.outstanding
        fleet.move(worker, WorkerState.LOADING, 0, "test")
        worker.introduce(
            Capabilities(
                engine="test",
                replayable_sampling=True,
                max_context_tokens=1000,
                device=name,
                tflops=tflops,
                memory_gb_per_s=memory,
            )
        )
        fleet.move(worker, WorkerState.READY, 0, "test")
    return fleet


def task(prompt: int, decode: int, affine: str | None = None, cached: int = 0) -> Turn:
    """A turn whose tag is known to decode so much."""
    demand = Demand()
    demand.note(prompt, decode)
    return Turn("t", "trajectory", prompt, 10_000, 3, 0, affine_worker=affine, affine_tokens=cached, demand=demand)


PREFILL_HEAVY, DECODE_HEAVY = (4000, 10), (100, 4000)


def test_tasks_go_to_the_kind_that_suits_them() -> None:
    assert AffinityRouting().route(task(*PREFILL_HEAVY), two_kinds()) == "compute"
    assert AffinityRouting().route(task(*DECODE_HEAVY), two_kinds()) == "bandwidth"


def test_load_outweighs_hardware_in_the_end() -> None:
    assert AffinityRouting().route(task(*PREFILL_HEAVY), two_kinds(compute=1)) == "compute"
    assert AffinityRouting().route(task(*PREFILL_HEAVY), two_kinds(compute=7)) == "bandwidth"


def test_turns_that_end_soon_are_no_load_for_one_that_decodes_for_long() -> None:
    assert AffinityRouting().route(task(*DECODE_HEAVY), two_kinds(bandwidth=7)) == "compute"
    assert AffinityRouting().route(task(*DECODE_HEAVY), two_kinds(bandwidth=7, due_tokens=100)) == "bandwidth"


def test_decoding_in_a_batch_costs_little_until_the_batch_is_bound_by_arithmetic() -> None:
    assert AffinityRouting().route(task(*DECODE_HEAVY), two_kinds(bandwidth=3)) == "bandwidth"
    many = two_kinds(credit=128, bandwidth=60)
    assert AffinityRouting().route(task(*DECODE_HEAVY), many) == "compute"
    assert AffinityRouting().route(task(*DECODE_HEAVY), two_kinds(credit=128, bandwidth=60, compute=60)) == "compute"


def test_a_prefix_outweighs_hardware_while_it_is_worth_more() -> None:
    prompt, decode = PREFILL_HEAVY
    assert AffinityRouting().route(task(prompt, decode, "bandwidth", cached=prompt - 50), two_kinds()) == "bandwidth"
    assert AffinityRouting().route(task(prompt, decode, "bandwidth", cached=200), two_kinds()) == "compute"


def test_hardware_is_left_out_where_it_is_not_declared_or_not_wanted() -> None:
    assert AffinityRouting().route(task(*DECODE_HEAVY), fleet_of(("a", E, 0, 8), ("b", E, 0, 8))) == "a"
    prompt, decode = PREFILL_HEAVY
    assert AffinityRouting(hardware=False).route(task(prompt, decode, "bandwidth"), two_kinds()) == "bandwidth"
    assert AffinityRouting(hardware=False).route(task(*DECODE_HEAVY), two_kinds()) == "compute"


def test_work_is_not_known_where_a_kind_declares_nothing() -> None:
    assert added_work_s(WorkerKind("spot", tflops=2.0), 0, 1, 1) is None
    assert added_work_s(WorkerKind("spot", memory_gb_per_s=1.0), 0, 1, 1) is None


KIND = WorkerKind("spot", tflops=100.0, memory_gb_per_s=1000.0)
"""Bound by arithmetic from a batch of 100 on."""


def test_work_of_prefill_is_arithmetic_that_everybody_waits_for() -> None:
    alone = added_work_s(KIND, 0, 1e6, 0)
    assert alone == pytest.approx(1e6 / 100e12)
    assert added_work_s(KIND, 9, 1e6, 0) == pytest.approx(10 * alone)


def test_work_of_decoding_is_what_it_adds_to_the_batch() -> None:
    alone, beside_nine, beside_many = (added_work_s(KIND, batch, 0, 1000) for batch in (0, 9, 200))
    assert alone == pytest.approx(1000 / 1000e9, rel=0.02)
    assert beside_nine < 1.2 * alone
    assert beside_many > 4 * alone


def test_work_of_decoding_grows_with_the_context_that_is_read() -> None:
    short, long = (added_work_s(KIND, 16, 0, 1000, context) for context in (0, 32_000))
    assert long > 3 * short


@given(st.lists(st.tuples(st.integers(0, 5000), st.integers(0, 5000)), min_size=1, max_size=60))
def test_demand_is_a_mean_of_what_was_seen(turns: list[tuple[int, int]]) -> None:
    demand = Demand()
    for prefill, decode in turns:
        demand.note(prefill, decode)
    assert min(p for p, _ in turns) - 1e-6 <= demand.prefill_tokens <= max(p for p, _ in turns) + 1e-6
    assert min(d for _, d in turns) - 1e-6 <= demand.decode_tokens <= max(d for _, d in turns) + 1e-6
