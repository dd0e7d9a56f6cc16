"""Machines that we own: workers start when asked for, stay, and are never preempted."""

from typing import ClassVar

from elastic.core.types import WorkerRole
from providers import processes
from providers.base import Emit, LeaseRequest, ProviderSettings
from providers.keeper import Holding, LeaseKeeper


class ReservedProvider(LeaseKeeper[ProviderSettings]):
    """Dedicated rollout workers, `max_workers` of them."""

    Settings: ClassVar[type[ProviderSettings]] = ProviderSettings
    role: ClassVar[WorkerRole] = WorkerRole.DEDICATED

    async def start(self, emit: Emit) -> None:
        processes.check_command("a worker", self.context.worker_command)
        await super().start(emit)

    def free(self) -> int:
        return self.settings.max_workers

    async def take(self, request: LeaseRequest) -> Holding:
        workers = processes.LocalWorkers(self.context, self.name, request)
        await workers.start()
        return workers

    async def reconcile(self) -> list[str]:
        return await processes.reconcile(self.context, self.name)


class TrainerProvider(ReservedProvider):
    """The trainer's own device: a worker that also trains, and belongs to the run whatever else it uses."""

    role: ClassVar[WorkerRole] = WorkerRole.TRAINER
