"""The run's port to its trainer: where one that joins stands, and what becomes of a checkpoint that nothing led to."""

import dataclasses
from typing import Any, cast

import pytest

from elastic.core import commands as c
from elastic.core import events as e
from elastic.core.types import Capabilities, WorkerId
from elastic.protocol import wire
from elastic.runtime.gateway import Door
from elastic.runtime.trainer import GatewayTrainer
from policies.seeding import FixedWindow
from tests.core.conftest import CoreHarness

PLAN = {"steps": 10**9, "groups": 0, "staleness_bound": 10**9, "driven_outside": True}
CAPABILITIES = Capabilities(engine="idle", replayable_sampling=True, max_context_tokens=9, device="cpu")


@dataclasses.dataclass
class Heard:
    """What a run says through its door, and does to checkpoints."""

    sent: list[wire.FromOrchestrator] = dataclasses.field(default_factory=list[wire.FromOrchestrator])
    fenced: list[str] = dataclasses.field(default_factory=list[str])
    stopped: list[str] = dataclasses.field(default_factory=list[str])
    discarded: list[int] = dataclasses.field(default_factory=list[int])
    joined: list[int] = dataclasses.field(default_factory=list[int])

    def send(self, worker: WorkerId, epoch: int, message: wire.FromOrchestrator) -> None:
        self.sent.append(message)

    def fence(self, worker: WorkerId, cause: str) -> None:
        self.fenced.append(cause)


class Port:
    """The port of a run whose importer was lost while it imported `at a`."""

    def __init__(self, **plan: Any) -> None:
        self.core = CoreHarness(seeding=FixedWindow(0), **PLAN | plan)
        self.core.trainer(capacity=0)
        self.core.tell(e.WorkerSlept(worker="trainer", epoch=1))
        self.heard = Heard()
        door = cast(Door, self.heard)
        self.trainer = GatewayTrainer(
            door, self.core.scheduler, lambda _: {}, self.heard.stopped.append, 3, self.heard.discarded.append
        )

    def offered(self, look: str) -> None:
        self.core.tell(e.VersionOffered(source=f"at {look}", look=look))
        if orders := self.core.sent(c.UpdateWeights):
            self.trainer.remember(orders[-1])

    def join(self, version: int, source: str = "") -> None:
        ready = wire.Ready(CAPABILITIES, version, "ab" * 32, source=source)
        self.trainer.join("second", 1, ready, self.heard.joined.append)


@pytest.fixture
def port() -> Port:
    return Port()


def test_an_importer_that_has_kept_what_is_asked_for_joins(port: Port) -> None:
    port.offered("a")
    port.join(1, "at a")
    assert (port.heard.joined, port.heard.fenced, port.heard.discarded) == ([1], [], [])


def test_what_was_kept_of_an_offer_that_was_refused_is_discarded_and_the_run_goes_on(port: Port) -> None:
    port.offered("a")
    port.core.tell(e.TrainerFailed(worker="trainer", epoch=1, error="not published"))
    assert port.trainer.reaches(1), "who resumes the run needs no other beginning"
    port.join(1, "at a")
    assert (port.heard.joined, port.heard.stopped, port.heard.discarded) == ([], [], [1])
    assert len(port.heard.fenced) == 1
    port.join(0)
    assert port.heard.joined == [0]


def test_what_was_kept_of_another_offer_than_is_asked_for_is_discarded(port: Port) -> None:
    port.offered("a")
    port.join(1, "at b")
    assert (port.heard.joined, port.heard.stopped, port.heard.discarded) == ([], [], [1])


def test_a_trainer_that_nothing_led_to_its_version_ends_a_run_that_trains() -> None:
    port = Port(groups=1, steps=2, staleness_bound=0)
    port.join(1)
    assert port.heard.discarded == []
    assert "out of step" in port.heard.stopped[0]
