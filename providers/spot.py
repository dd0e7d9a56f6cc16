"""A spot market: instances come and go as in a recorded trace, with a real process on each that is leased.

An *add* of the trace makes an instance available. A lease takes the one that has been available longest; the
lease is granted, and billed, at once, and its worker starts `boot_delay_s` later. A *remove* of a leased
instance gives notice of `notice_s`, where that is more than 0, and then kills the worker. Given back before
that, an instance is available again. When the trace ends without `repeat`, the market stays as it is then.
The market goes by the run's time, so it has gone on when the run does after a crash.
"""

import asyncio
from collections.abc import Mapping
from typing import ClassVar

import traces
from elastic.core.types import NS_PER_S, EndCause, LeaseId, Nanoseconds
from providers import processes
from providers.base import Emit, KnownLease, LeaseRequest, ProviderContext, ProviderUnavailable
from providers.keeper import Ending, Holding, LeaseKeeper, Refusal
from providers.markets import SpotMarket, SpotSettings, TakenBack


class SpotProvider(LeaseKeeper[SpotSettings]):
    """Leases one instance each. `expected_life_s` is the mean life that the trace has shown so far."""

    Settings: ClassVar[type[SpotSettings]] = SpotSettings

    def __init__(self, name: str, settings: SpotSettings, context: ProviderContext) -> None:
        super().__init__(name, settings, context)
        try:
            self._market = SpotMarket(settings)
        except traces.TraceError as error:
            raise ProviderUnavailable(f"{name}: {error}") from error
        self._taken_unheard: dict[LeaseId, TakenBack] = {}

    async def find(self, known: Mapping[LeaseId, KnownLease]) -> Mapping[LeaseId, Holding]:
        found = await processes.adopt(self.context, self.name, known)
        taken: list[TakenBack] = []
        for lease, workers in sorted(found.items(), key=lambda item: int(item[1].kept["at_ns"])):
            taken += self._market.advance(int(workers.kept["at_ns"]))
            self._market.instances[workers.kept["instance"]] = lease
        taken += self._market.advance(self.context.now_ns())
        self._taken_unheard = {one.lease: one for one in taken}
        return found

    def resumed(self, lease: LeaseId, holding: Holding) -> None:
        if (taken := self._taken_unheard.pop(lease, None)) is not None:
            self._notice(taken._replace(detail=f"{taken.detail} while nobody listened"))

    async def start(self, emit: Emit) -> None:
        processes.check_command("a worker", self.context.worker_command)
        await super().start(emit)
        self.run_in_background(self._follow_market(), "market")

    def free(self) -> int:
        return self._market.free()

    def boot_s(self) -> float:
        return self.settings.boot_delay_s

    def expected_life_s(self) -> float | None:
        return self._market.expected_life_s()

    async def take(self, request: LeaseRequest) -> Holding:
        try:
            instance = self._market.take(request.lease)
        except LookupError:
            raise Refusal(f"no instance of {self.name} is available") from None
        kept = {"instance": instance, "at_ns": str(self._market.at_ns)}
        workers = processes.LocalWorkers(self.context, self.name, request, self.settings.boot_delay_s, kept)
        try:
            workers.record()
        except OSError:
            self._market.forget(request.lease)
            raise
        return workers

    def forget(self, lease: LeaseId, *, barred: bool) -> None:
        self._market.forget(lease, barred=barred)

    async def _follow_market(self) -> None:
        while (next_ns := self._market.next_ns) is not None:
            await asyncio.sleep((next_ns - self.context.now_ns()) / NS_PER_S)
            for taken in self._market.advance(next_ns):
                if self.holds(taken.lease):
                    self._notice(taken)
            self.announce()

    def _notice(self, taken: TakenBack) -> None:
        deadline_ns: Nanoseconds = taken.at_ns + round(self.settings.notice_s * NS_PER_S)
        self.foretell(taken.lease, Ending(EndCause.PREEMPTED, taken.detail), deadline_ns)
