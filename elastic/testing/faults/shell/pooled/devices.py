"""The truth about a pool's devices, and models of an engine and a trainer that share them.

A device belongs to the process whose state is on it. Nobody else may bring state there or compute there meanwhile, and
nobody may while the cluster has given it to another job.
"""

from collections.abc import Callable

import torch

from elastic.core.cluster import Cluster
from elastic.core.types import WeightMode
from elastic.engine.base import ChunkSink
from elastic.protocol import wire
from elastic.system.parking import Switch
from elastic.testing.faults.shell.models import ModelEngine, ModelTrainer
from elastic.testing.faults.shell.process import Process
from elastic.testing.faults.shell.threads import loop_here
from elastic.weights.source import WeightsSource


class NodeDevice:
    """One node's device, and whose state is on it. `cluster` is the pool's, as its last process had it.

    Violations go to `found`.
    """

    def __init__(self, node: str, cluster: Callable[[], Cluster | None], found: list[AssertionError]) -> None:
        self.node = node
        self.cluster = cluster
        self.found = found
        self.states: dict[OnDevice, None] = {}


class OnDevice:
    """What a process has on its node's device."""

    def __init__(self, device: NodeDevice, process: Process, job: str) -> None:
        self._device, self._process, self._job = device, process, job

    def take(self) -> None:
        """Its state comes to the device."""
        self._device.states[self] = None
        self.use()

    def leave(self) -> None:
        self._device.states.pop(self, None)

    def use(self) -> None:
        """The process computes."""
        device, job, process = self._device, self._job, self._process
        if not process.alive:
            return
        if self not in device.states:
            self._fail("while it is parked")
        for other in device.states:
            if other._process.alive and other._process is not process:
                self._fail(f"({process.name}) together with {other._job} ({other._process.name})")
        cluster = device.cluster()
        for permit in () if cluster is None else cluster.permits.values():
            if device.node in permit.nodes and permit.job != job:
                self._fail(f"which {permit.job} has by permit {permit.number}")

    def _fail(self, what: str) -> None:
        self._device.found.append(AssertionError(f"{self._job} computes on {self._device.node}, {what}"))


class SharingEngine(ModelEngine):
    """A model of an engine that parks. `place` has to be set before it is started; it begins resumed."""

    place: OnDevice

    def __init__(self, *arguments: object, place: OnDevice, **options: object) -> None:
        super().__init__(*arguments, **options)  # type: ignore[arg-type]
        self.place = place
        self._parked = False
        self.followed = 0
        """Versions that were put in force while it was parked."""
        place.take()

    def start(self, sink: ChunkSink) -> None:
        self._sink = sink
        self._loop = loop_here()

    def park(self) -> Switch:
        if not self._parked:
            self.abort(list(self._requests))
            self._parked = True
            self.place.leave()
        return Switch(0.0, 1)

    def resume(self) -> Switch:
        if self._parked:
            self._parked = False
            self.place.take()
            self._go_on()
        return Switch(0.0, 1)

    def load_version(self, source: WeightsSource, mode: WeightMode) -> float:
        took_s = super().load_version(source, mode)
        self.followed += self._parked
        return took_s

    def close(self) -> None:
        self.place.leave()
        super().close()

    def _go_on(self) -> None:
        if not self._parked:
            super()._go_on()

    def _iterate(self) -> None:
        if self._parked:
            self._iterating = None
            return
        if self._requests and not self._asleep and not self._device.hangs():
            self.place.use()
        super()._iterate()


class SharingTrainer(ModelTrainer):
    """A model of a trainer that parks. It begins resumed."""

    def __init__(self, *arguments: object, place: OnDevice) -> None:
        super().__init__(*arguments)  # type: ignore[arg-type]
        self.place = place
        place.take()

    def park(self) -> Switch:
        self.place.leave()
        return Switch(0.0, 1)

    def resume(self) -> Switch:
        self.place.take()
        return Switch(0.0, 1)

    def train_group(self, group: wire.TrainGroupFrame) -> None:
        self.place.use()
        super().train_group(group)

    def update(self) -> dict[str, float]:
        self.place.use()
        return super().update()

    def tensors(self) -> dict[str, torch.Tensor]:
        self.place.use()
        return super().tensors()
