"""A worker whose log-probabilities are not the trainer's is named, barred and trusted no more (invariant 10)."""

import math
import random
import sys
from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.core import commands as c
from elastic.core import events as e
from elastic.core.agreement import LAST_TOKENS, LEAST_TOKENS, OUTCOME_STEPS, Agreement
from elastic.core.types import EndCause, LogprobCheck
from tests.core.conftest import CAPABILITIES, CoreHarness

BOUND = 0.2


def check(worker: str, tokens: int, mean: float, version: int = 0) -> LogprobCheck:
    return LogprobCheck(worker, version, tokens, tokens * mean)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 700), st.floats(0, 0.6)), max_size=12))
def test_a_worker_is_found_wrong_by_the_mean_of_its_last_tokens_of_a_version(
    reports: list[tuple[int, int, float]],
) -> None:
    agreement, found = Agreement(), list[int]()
    tokens, far, at = 0, 0.0, -1
    for version, more, mean in sorted(reports, key=lambda report: report[0]):
        if version != at and tokens >= LEAST_TOKENS:
            tokens, far = 0, 0.0
        at = version
        tokens, far = tokens + more, far + more * mean
        wrong = tokens >= LEAST_TOKENS and far / tokens > BOUND
        tokens, far = min(tokens, LAST_TOKENS), far * min(1, LAST_TOKENS / tokens)
        found += [m.version for m in agreement.note([check("w", more, mean, version)], BOUND)]
        assert bool(found) == wrong
        if found:
            assert agreement.terms == (("w", None),)
            assert agreement.note([check("w", 999, 9.0, version)], BOUND) == []
            break
    assert len(agreement.mismatches) == len(found)


@given(st.lists(st.integers(1, 700), min_size=1, max_size=40), st.floats(0.0, 0.1), st.floats(1.0, 8.0))
def test_whoever_serves_garbage_is_found_however_long_it_was_sound(sound: list[int], near: float, far: float) -> None:
    agreement = Agreement()
    for tokens in sound:
        assert agreement.note([check("w", tokens, near)], BOUND) == []
    garbage = 0
    while not agreement.note([check("w", 50, far)], BOUND):
        garbage += 50
        assert garbage <= LAST_TOKENS


def test_an_engine_is_allowed_the_noise_that_it_declares() -> None:
    agreement = Agreement()
    agreement.declare("noisy", BOUND + 0.1)
    assert agreement.note([check("noisy", 500, 0.25)], BOUND) == []
    (found,) = agreement.note([check("other", 500, 0.25)], BOUND)
    assert (found.worker, found.bound) == ("other", BOUND)
    (found,) = agreement.note([check("noisy", 500, 0.5)], BOUND)
    assert found.bound == pytest.approx(0.3)
    agreement.declare("noisy", BOUND + 0.4)
    assert dict(agreement.terms) == {"noisy": None, "other": None}, "who was found wrong cannot declare itself right"


def test_a_run_is_not_to_be_believed_once_half_of_the_tokens_of_the_last_steps_disagree() -> None:
    agreement = Agreement()
    agreement.note([check(f"wrong{n}", 50, 3.0) for n in range(3)] + [check("right", 151, 0.0)], BOUND)
    assert agreement.failing() == ""
    agreement.note([check("wrong3", 50, 3.0)], BOUND)
    assert "200 of 351 tokens" in agreement.failing()
    for _ in range(OUTCOME_STEPS):
        agreement.begin_step(0)
        agreement.note([check("right", 30, 0.0)], BOUND)
    assert agreement.failing() == ""


def proof(version: int, far: float = 1.0, tokens: int = 128) -> tuple[float, ...]:
    """What a version answers: `far` nats from another one's on most tokens."""
    return tuple(-5.0 - far * ((version * (place + 1)) % 7) / 7 for place in range(tokens))


@given(
    st.integers(0, 6), st.integers(0, 6), st.floats(0.01, 3.0), st.floats(0.0, 0.1), st.booleans(), st.integers(0, 999)
)
def test_a_worker_is_found_wrong_by_the_version_whose_proof_it_gives(
    version: int, served: int, far: float, noise: float, declared: bool, seed: int
) -> None:
    """Never an honest one, and always another one that can be told apart; also where noise is more than is declared."""
    agreement, drawn = Agreement(), random.Random(f"{seed}")
    agreement.declare("w", BOUND + declared * noise)
    for number in range(7):
        agreement.expect(number, proof(number, far))
    answer = tuple(one + drawn.gauss(0.0, 1.25 * noise) for one in proof(served, far))
    found = agreement.prove("w", version, answer, BOUND)
    apart = math.dist(proof(version, far), proof(served, far))
    if version == served:
        assert found is None
    elif apart > 20 * noise:
        assert found is not None
        assert found.mean > BOUND or found.serves is not None
        assert found.serves in (None, served), "it is the nearest that is named"
        assert dict(agreement.terms) == {"w": None}
        assert agreement.prove("w", served, proof(served, far), BOUND) is None, "it is found wrong once"


@pytest.mark.parametrize("said", [1e38, -1e300, -sys.float_info.max])
def test_a_worker_whose_proof_is_out_of_all_bounds_is_found_wrong(said: float) -> None:
    agreement = Agreement()
    for number in range(3):
        agreement.expect(number, proof(number))
    assert agreement.prove("w", 2, (said,) * len(proof(2)), BOUND) is not None
    assert dict(agreement.terms) == {"w": None}


def test_the_first_version_and_the_last_ones_are_remembered() -> None:
    agreement = Agreement()
    for number in range(20):
        agreement.expect(number, proof(number))
    assert [*agreement.proofs] == [0, *range(13, 20)]
    agreement.expect(20, ())
    assert agreement.prove("w", 20, (), BOUND) is None
    found = agreement.prove("w", 19, proof(0), BOUND)
    assert found is not None
    assert "are those of version 0" in str(found)
    silent = agreement.prove("other", 19, (), BOUND)
    assert silent is not None
    assert str(silent) == "other does not prove that it serves version 19"


@pytest.mark.parametrize("honest", [True, False])
def test_who_keeps_a_former_version_is_barred_as_it_says_that_it_serves_the_new_one(make_core, honest: bool) -> None:
    core = make_core(steps=3)
    core.trainer()
    worker = core.worker()
    core.tell(e.WorkerJoined(worker="trainer", epoch=2, capabilities=CAPABILITIES, weights_version=0, proof=proof(0)))
    trained(core, 0, epoch=2)
    core.tell(e.WeightsPublished(worker="trainer", epoch=2, version=1, proof=proof(1)))
    out = core.tell(e.WeightsApplied(worker=worker, epoch=1, version=1, proof=proof(1 if honest else 0)))
    fenced = c.FenceWorker(worker=worker, reason=EndCause.MISMATCHED) in out
    assert fenced != honest
    assert (c.BarLease(lease="spot-1", provider="spot") in out) != honest
    assert [m.serves for m in core.scheduler.agreement.mismatches] == ([] if honest else [0])


def trained(core: CoreHarness, step: int, *checks: LogprobCheck, epoch: int = 1) -> list[c.Command]:
    """The step's group of two is trained on, and the trainer tells of these checks."""
    for member, reward in enumerate((0.0, 1.0)):
        core.tell(e.TrajectoryFinished(trajectory=f"{step}/0/{member}", reward=reward, tokens=1))
    core.tell(e.WorkerSlept(worker="trainer", epoch=epoch))
    return core.tell(e.GroupTrained(worker="trainer", epoch=epoch, group=f"{step}/0", checks=checks))


def test_who_is_found_wrong_is_barred_at_once_and_named_and_none_of_its_tokens_is_trained_on(make_core) -> None:
    core = make_core(steps=3, groups=2)
    core.trainer()
    worker = core.worker()
    core.tell(e.TrajectoryFinished(trajectory="0/0/0", reward=0.0, tokens=1))
    core.tell(e.TrajectoryFinished(trajectory="0/0/1", reward=1.0, tokens=1))
    core.end_seeding()
    checks = (check(worker, 300, 2.0), check("trainer", 400, 0.001))
    out = core.tell(e.GroupTrained(worker="trainer", epoch=1, group="0/0", checks=checks))
    assert c.FenceWorker(worker=worker, reason=EndCause.MISMATCHED) in out
    assert c.BarLease(lease="spot-1", provider="spot") in out
    (warning,) = core.scheduler.warnings(0)
    assert worker in warning.message
    for member, reward in enumerate((0.0, 1.0)):
        core.tell(e.TrajectoryFinished(trajectory=f"0/1/{member}", reward=reward, tokens=1))
    assert core.one(c.TrainGroup).bounds == ((worker, None),)
    assert core.scheduler.failed == ""


def test_what_is_said_of_a_worker_that_is_gone_counts_for_tokens_that_it_has_left(make_core) -> None:
    core = make_core(steps=3)
    core.trainer()
    worker = core.worker()
    core.lease_ended("spot-1")
    out = trained(core, 0, check(worker, 300, 2.0), check("trainer", 400, 0.001))
    assert not [command for command in out if isinstance(command, c.FenceWorker | c.BarLease)]
    assert [mismatch.worker for mismatch in core.scheduler.agreement.mismatches] == [worker]


def test_a_trainer_whose_own_engine_disagrees_with_it_ends_the_run(make_core) -> None:
    core = make_core(steps=3)
    core.trainer()
    trained(core, 0, check("trainer", 300, 2.0))
    assert "the trainer's device is not to be believed" in core.scheduler.failed


@pytest.mark.parametrize(("share", "failed"), [(0.4, False), (0.5, True)])
def test_a_run_of_whose_tokens_half_disagree_ends_as_failed(make_core, share: float, failed: bool) -> None:
    core = make_core(steps=3)
    core.trainer()
    tokens = round(1000 * share)
    trained(core, 0, check("spot-9/w", tokens, 2.0), check("spot-8/w", 1000 - tokens, 0.0))
    core.tell(e.WeightsPublished(worker="trainer", epoch=1, version=1))
    assert bool(core.scheduler.failed) == failed


def test_a_worker_that_joins_declares_its_engines_noise(make_core: Callable[..., CoreHarness]) -> None:
    core = make_core()
    core.trainer()
    acquire = core.offer("spot")[-1]
    assert isinstance(acquire, c.AcquireLease)
    core.grant(acquire.lease)
    noisy = msgspec.structs.replace(CAPABILITIES, logprob_noise=0.1)
    core.tell(e.WorkerJoined(worker=f"{acquire.lease}/w", epoch=1, capabilities=noisy, weights_version=0))
    assert core.scheduler.agreement.terms == ((f"{acquire.lease}/w", pytest.approx(0.3)),)
