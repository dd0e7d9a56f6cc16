"""Serverless GPU functions: each lease is one call of a function, which ends by timeout whatever happens.

A call starts cold: its lease is granted, and billed, at once, and its worker starts `cold_start_s` later. `lease_s`
after the grant its processes are killed, unless it was given back before. Calls beyond `max_workers` are to be had
only in place of ones that end soon, `overlap` of them, so that a successor can be warm by then. Source: RollArt,
mechanism 3; docs/design.md, "A lease".
"""

from collections.abc import Mapping
from typing import ClassVar

from pydantic import Field

from elastic.core.types import LeaseId
from providers import processes
from providers.base import Emit, KnownLease, LeaseRequest, ProviderContext, ProviderSettings
from providers.keeper import Holding, LeaseKeeper


class ServerlessSettings(ProviderSettings):
    lease_s: float = Field(300.0, gt=0, allow_inf_nan=False, description="time limit of a call; then it is killed")
    cold_start_s: float = Field(0.0, ge=0, allow_inf_nan=False, description="from the grant to the worker's start")
    overlap: int | None = Field(
        None, ge=0, description="calls besides max_workers that take over from ones that end soon; else max_workers"
    )


class ServerlessProvider(LeaseKeeper[ServerlessSettings]):
    """Leases one worker each, of which none outlives `lease_s`."""

    Settings: ClassVar[type[ServerlessSettings]] = ServerlessSettings

    def __init__(self, name: str, settings: ServerlessSettings, context: ProviderContext) -> None:
        super().__init__(name, settings, context)
        self._calls: set[LeaseId] = set()

    async def find(self, known: Mapping[LeaseId, KnownLease]) -> Mapping[LeaseId, Holding]:
        found = await processes.adopt(self.context, self.name, known)
        self._calls.update(found)
        return found

    async def start(self, emit: Emit) -> None:
        processes.check_command("a worker", self.context.worker_command)
        await super().start(emit)

    def overlap(self) -> int:
        return self.settings.max_workers if self.settings.overlap is None else self.settings.overlap

    def free(self) -> int:
        return self.settings.max_workers + self.overlap() - len(self._calls)

    def boot_s(self) -> float:
        return self.settings.cold_start_s

    def life_s(self) -> float:
        return self.settings.lease_s

    def expected_life_s(self) -> float:
        return self.settings.lease_s

    async def take(self, request: LeaseRequest) -> Holding:
        workers = processes.LocalWorkers(self.context, self.name, request, self.settings.cold_start_s)
        workers.record()
        self._calls.add(request.lease)
        return workers

    def forget(self, lease: LeaseId, *, barred: bool) -> None:
        self._calls.remove(lease)
