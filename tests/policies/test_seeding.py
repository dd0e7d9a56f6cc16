"""The seeding window: it finds the balance of idle times, and remembers it."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.core.policy import SeedingPlan, StepRecord
from elastic.core.types import NS_PER_S
from policies.seeding import AdaptiveWindow, FixedWindow, worker_bound

RECORD = StepRecord(
    step=0,
    duration_ns=1000,
    seeding_ns=200,
    rollout_ns=800,
    groups_trained=1,
    groups_dropped=0,
    train_ns=400,
    train_wait_ns=0,
    remote_wait_ns=0,
    workers_mean=4.0,
    workers_end=4,
)


def record(**changes: float) -> StepRecord:
    return msgspec.structs.replace(RECORD, **changes)


def test_fixed_window_is_fixed() -> None:
    plan = FixedWindow(7).first()
    assert plan.window_ns == 7
    assert FixedWindow(7).following(plan, record(train_wait_ns=500)) == plan


@pytest.mark.parametrize(
    ("train_wait_ns", "remote_wait_ns", "window_ns"), [(400, 0, 300), (0, 400, 100), (300, 300, 200), (0, 4000, 0)]
)
def test_window_follows_the_difference_in_idle_time(train_wait_ns: int, remote_wait_ns: int, window_ns: int) -> None:
    went = record(train_wait_ns=train_wait_ns, remote_wait_ns=remote_wait_ns)
    assert AdaptiveWindow(200, rate=4).following(SeedingPlan(window_ns=200), went).window_ns == window_ns


def test_window_starts_from_what_was_used_of_it() -> None:
    assert AdaptiveWindow(0, rate=4).following(SeedingPlan(window_ns=900), record(seeding_ns=200)).window_ns == 200


def test_window_has_an_upper_end() -> None:
    policy = AdaptiveWindow(0, rate=1, longest_ns=500)
    assert policy.following(policy.first(), record(train_wait_ns=10_000)).window_ns == 500


def world(policy: AdaptiveWindow, capacities: list[int], work: float = 8000, train_ns: int = 500) -> list[int]:
    """A model of steps: rollouts share `work` between workers and seeding, then groups are trained one by one.

    Returns the window at the start of each step.
    """
    plan, windows = policy.first(), list[int]()
    for capacity, next_capacity in zip(capacities, capacities[1:] + capacities[-1:], strict=True):
        window = plan.window_ns
        windows.append(window)
        rollout = max(float(window), (work - window) / capacity)
        end = max(window + train_ns, rollout + train_ns / 4)
        went = record(
            seeding_ns=window,
            rollout_ns=round(rollout),
            train_ns=train_ns,
            train_wait_ns=round(end - window - train_ns),
            remote_wait_ns=round(end - rollout),
            workers_mean=float(capacity),
            workers_end=next_capacity,
        )
        plan = policy.following(plan, went)
    return windows


@given(st.integers(1, 8), st.integers(0, 4000), st.integers(2, 8))
def test_window_converges_under_steady_capacity(capacity: int, start_ns: int, rate: int) -> None:
    windows = world(AdaptiveWindow(start_ns, rate=rate), [capacity] * 120)
    assert max(windows[-10:]) - min(windows[-10:]) <= 20


def test_returning_capacity_finds_its_window_at_once() -> None:
    remembering = world(AdaptiveWindow(0), [6] * 40 + [1] * 40 + [6] * 5)
    forgetful = world(AdaptiveWindow(0, remembers=False), [6] * 40 + [1] * 40 + [6] * 5)
    best = remembering[39]
    assert abs(remembering[80] - best) < abs(forgetful[80] - best) / 4


def test_memory_is_of_steps_in_which_nobody_came_or_went() -> None:
    policy = AdaptiveWindow(0)
    assert policy.following(policy.first(), record()).memory == {4: 0}
    for workers_mean in (3.999, 4.001, 2.0):
        assert policy.following(policy.first(), record(workers_mean=workers_mean)).memory == {}
    assert AdaptiveWindow(0, remembers=False).following(policy.first(), record()).memory == {}


def test_each_number_of_workers_has_a_window_of_its_own() -> None:
    policy = AdaptiveWindow(300)
    plan = policy.following(SeedingPlan(window_ns=300, memory={5: 70}), record(train_wait_ns=400))
    assert plan.memory == {4: 300, 5: 70}
    assert policy.following(plan, record(workers_end=5)).window_ns == 70


def test_step_without_help_teaches_nothing_but_memory_still_serves() -> None:
    policy = AdaptiveWindow(300)
    alone = record(workers_mean=0.0, workers_end=0, train_wait_ns=5000)
    assert policy.following(policy.first(), alone) == policy.first()
    plan = SeedingPlan(window_ns=300, memory={1: 70})
    assert policy.following(plan, record(workers_mean=0.0, workers_end=1)).window_ns == 70


def test_the_first_step_has_as_many_workers_as_the_trainers_device_has_engines() -> None:
    assert AdaptiveWindow(0).first().worker_bound == 1
    assert AdaptiveWindow(0, reserved_engines=8).first().worker_bound == 8
    assert AdaptiveWindow(0, reserved_engines=8, bounds_workers=False).first().worker_bound is None


def test_worker_bound_makes_rollouts_no_longer_than_training() -> None:
    assert worker_bound(400, 1, record()) == 9
    assert worker_bound(400, 8, record()) == (800 * 4 + 400 * 8) / 400
    assert worker_bound(0, 1, record(workers_mean=0.1)) == 1
    assert worker_bound(0, 1, record(train_ns=0)) is None
    assert AdaptiveWindow(0).following(SeedingPlan(window_ns=0), RECORD).worker_bound is not None
    assert AdaptiveWindow(0, bounds_workers=False).following(SeedingPlan(window_ns=0), RECORD).worker_bound is None


def test_the_window_may_be_as_long_as_large_models_need() -> None:
    """70 to 190 s are what tuning has found for models of 8 to 32 billion parameters."""
    went = record(seeding_ns=190 * NS_PER_S, train_wait_ns=0)
    assert AdaptiveWindow(0).following(SeedingPlan(window_ns=190 * NS_PER_S), went).window_ns == 190 * NS_PER_S
