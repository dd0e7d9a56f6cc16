"""A live trainer's permits: what the pool says reaches the core as events, also when either process died in between."""

import pytest

from elastic.core import events as e
from elastic.core.types import NS_PER_S
from elastic.pool import messages as w
from elastic.pool.client import PoolClient, PoolMembership
from elastic.protocol.endpoint import Endpoint
from elastic.runtime.pool_permits import PoolPermits
from tests.pool.model import ROLLOUT, TRAIN, JobsPool


class NearClient(PoolClient):
    """Of a pool in this process, which hears at once; time stands still."""

    def __init__(self, pool: JobsPool) -> None:
        super().__init__(PoolMembership(endpoint=Endpoint("nowhere:1"), job="job", placement=1, token="secret"))
        self._pool = pool

    def _now_ns(self) -> int:
        return 0

    def say(self, message: w.FromJob) -> None:
        self._pool.hear(message)


class House:
    """A run's permits and its pool, whose messages arrive at once."""

    def __init__(self, pool: JobsPool | None = None) -> None:
        self.pool = pool or JobsPool(lambda message: None)
        self.pool.send = self._deliver
        self.events: list[e.Event] = []
        self.client = NearClient(self.pool)
        self.permits = PoolPermits(self.client, lambda event, payload=None: self.events.append(event), lambda: NS_PER_S)

    def welcome(self) -> None:
        self.client.tell(self.client.part.welcomed(self.pool.welcome(), 0))

    def _deliver(self, message: w.ToJob) -> None:
        self.client.tell(self.client.part.heard(message, 0))


@pytest.fixture
def house() -> House:
    house = House()
    house.welcome()
    house.permits.take_up(None, asked=False, last=0)
    return house


def test_a_permit_is_asked_for_granted_recalled_and_yielded(house: House):
    house.permits.ask_permit()
    house.permits.ask_permit()
    assert [m for m in house.pool.heard if isinstance(m, w.AskPhase)] == [w.AskPhase(TRAIN)]
    permit = house.pool.grant(TRAIN)
    house.pool.recall(permit, 5.0)
    house.permits.yield_permit(permit, finished=False)
    assert house.events == [
        e.PermitGranted(permit=permit, deadline_ns=601 * NS_PER_S),
        e.PermitRecalled(permit=permit, until_ns=6 * NS_PER_S),
    ]
    assert house.pool.heard[-1] == w.YieldPhase(permit, False)
    assert not house.pool.permits


def test_a_permit_that_is_taken_is_over_and_the_next_one_can_be_asked_for_before(house: House):
    house.permits.ask_permit()
    permit = house.pool.grant(TRAIN)
    house.permits.ask_permit()
    assert TRAIN not in house.pool.asked
    house.pool.take(permit, "not yielded in time")
    assert house.events[-1] == e.PermitEnded(permit=permit, cause="not yielded in time")
    assert TRAIN in house.pool.asked


def test_of_rollouts_permits_the_trainer_hears_nothing(house: House):
    house.client.part.ask(ROLLOUT)
    house.pool.take(house.pool.grant(ROLLOUT))
    assert house.events == []


def test_steps_and_progress_are_told(house: House):
    house.permits.report_progress(0, 0, 4)
    permit = house.pool.grant(ROLLOUT)
    house.permits.report_progress(0, 3, 4)
    house.permits.report_progress(1, 0, 4)
    told = [m for m in house.pool.heard if isinstance(m, w.StepsDone | w.PhaseProgress)]
    assert told == [w.StepsDone(0), w.PhaseProgress(permit, 3, 4), w.StepsDone(1), w.PhaseProgress(permit, 0, 4)]


@pytest.mark.parametrize(
    ("had", "asked", "last", "events", "left"),
    [
        (7, False, 7, [], False),
        (None, True, 6, [e.PermitGranted(permit=7, deadline_ns=601 * NS_PER_S)], False),
        (None, False, 6, [e.PermitGranted(permit=7, deadline_ns=601 * NS_PER_S)], False),
        (None, True, 7, [], True),
        (
            6,
            False,
            6,
            [
                e.PermitEnded(permit=6, cause="it was over before the run went on"),
                e.PermitGranted(permit=7, deadline_ns=601 * NS_PER_S),
            ],
            False,
        ),
    ],
)
def test_the_next_process_is_told_what_it_does_not_know_and_yields_the_rest(had, asked, last, events, left):
    pool = JobsPool(lambda message: None)
    pool.permit_numbers = 6
    pool.grant(TRAIN)
    house = House(pool)
    house.welcome()
    house.permits.take_up(had, asked=asked, last=last)
    assert house.events == events
    assert (7 not in pool.permits) == left
    assert (TRAIN in pool.asked) == (left and asked)
