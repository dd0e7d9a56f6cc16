"""Machines that we own: workers start when asked for, stay, and are never preempted."""

from collections.abc import Mapping
from typing import ClassVar

from elastic.core.types import LeaseId, WorkerRole
from providers import processes
from providers.base import Emit, KnownLease, LeaseRequest, ProviderContext, ProviderSettings
from providers.keeper import Holding, LeaseKeeper, Refusal


class ReservedProvider(LeaseKeeper[ProviderSettings]):
    """Dedicated rollout workers, `max_workers` of them."""

    Settings: ClassVar[type[ProviderSettings]] = ProviderSettings
    role: ClassVar[WorkerRole] = WorkerRole.DEDICATED

    async def start(self, emit: Emit) -> None:
        processes.check_command("a worker", self.context.worker_command)
        await super().start(emit)

    def __init__(self, name: str, settings: ProviderSettings, context: ProviderContext) -> None:
        super().__init__(name, settings, context)
        self._places = settings.max_workers
        self._taken: set[LeaseId] = set()

    async def find(self, known: Mapping[LeaseId, KnownLease]) -> Mapping[LeaseId, Holding]:
        found = await processes.adopt(self.context, self.name, known)
        self._taken.update(found)
        return found

    def free(self) -> int:
        return self._places - len(self._taken)

    def forget(self, lease: LeaseId, *, barred: bool) -> None:
        self._taken.discard(lease)
        self._places -= barred

    async def take(self, request: LeaseRequest) -> Holding:
        if self.free() <= 0:
            raise Refusal(f"no machine of {self.name} is left")
        workers = processes.LocalWorkers(self.context, self.name, request)
        self._taken.add(request.lease)
        try:
            await workers.start()
        except BaseException:
            self._taken.discard(request.lease)
            raise
        return workers


class TrainerProvider(ReservedProvider):
    """The trainer's own device: a worker that also trains, and belongs to the run whatever else it uses."""

    role: ClassVar[WorkerRole] = WorkerRole.TRAINER
