"""Machines whose owners start `elastic worker` on them: each dials in with a ticket, and is leased when it is wanted.

A lease's price is its ticket's, or this section's where that has none. Nothing is started or ended here: a worker whose
lease is over is turned away, and ends by itself. Which tickets there are is kept with the run (`protocol/tickets.py`).
"""

import asyncio
from collections.abc import Mapping
from typing import ClassVar

from elastic.core.types import LeaseId
from providers.base import Emit, KnownLease, LeaseRequest, ProviderContext, ProviderUnavailable
from providers.base_provider import BaseProvider, Found, LeaseHandle
from providers.markets import JoinedMarket, JoinedSettings, LeaseEnding
from providers.pending_workers import PendingWorkers

LABEL_NOTE = "joined:"
"""A note of the journal begins with it, and a lease: the label of the ticket by which that lease's worker came."""


class JoinedProvider(BaseProvider[JoinedSettings]):
    """Leases one worker each, to the cheapest first."""

    Settings: ClassVar[type[JoinedSettings]] = JoinedSettings

    def __init__(self, name: str, settings: JoinedSettings, context: ProviderContext) -> None:
        if context.pending_workers is None:
            raise ProviderUnavailable(f"{name}: nobody lets workers in by ticket here")
        self._room: PendingWorkers = context.pending_workers
        self._joined_market = JoinedMarket(name, settings)
        super().__init__(self._joined_market, context)

    async def start(self, emit: Emit) -> None:
        if self._room.on_change is not None:
            raise ProviderUnavailable(f"{self.name}: one provider of a run can be of this kind, and one is already")
        self._room.on_change = self._follow
        await super().start(emit)

    async def launch(self, request: LeaseRequest, place: str) -> LeaseHandle:
        (ticket,) = request.tickets
        try:
            terms = self._room.admit(place, ticket.worker)
        finally:
            self._follow()
        self.context.note(f"{LABEL_NOTE}{request.lease}", terms.label)
        return _Worker()

    async def find(self, known: Mapping[LeaseId, KnownLease]) -> Mapping[LeaseId, Found]:
        """Workers that were let in come back to their sessions; who waited comes again."""
        return {lease_id: Found(_Worker()) for lease_id, lease in known.items() if lease.granted}

    async def aclose(self) -> str:
        self._room.close()
        return await super().aclose()

    def _follow(self) -> None:
        usd = self.settings.usd_per_gpu_hour
        terms = [applicant.terms for applicant in self._room.applicants.values()]
        self._joined_market.waiting = {
            t.ticket: usd if t.usd_per_gpu_hour is None else t.usd_per_gpu_hour for t in terms
        }
        self.announce()


class _Worker:
    """A lease's `LeaseHandle`: somebody else's process. Whether it lives, its connection tells."""

    async def keep(self) -> LeaseEnding:
        return await asyncio.get_running_loop().create_future()

    async def give_back(self) -> None:
        pass
