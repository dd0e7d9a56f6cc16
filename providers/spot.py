"""A spot market: instances come and go as in a recorded trace, with a real process on each that is leased.

An *add* of the trace makes an instance available. A lease takes the one that has been available longest; the
lease is granted, and billed, at once, and its worker starts `boot_delay_s` later. A *remove* of a leased
instance gives notice of `notice_s`, where that is more than 0, and then kills the worker. Given back before
that, an instance is available again. When the trace ends without `repeat`, the market stays as it is then.
"""

import asyncio
import itertools
from typing import Annotated, ClassVar

from pydantic import AfterValidator, Field, model_validator

import traces
from elastic.core.types import EndCause, LeaseId
from providers import processes
from providers.base import Emit, LeaseRequest, ProviderContext, ProviderSettings, ProviderUnavailable
from providers.keeper import Ending, Holding, LeaseKeeper, Refusal
from traces.spot import Change, SpotEvent, SpotTrace, read_spot_trace, replay


def _readable(trace: str) -> str:
    read_spot_trace(traces.find(trace))
    return trace


class SpotSettings(ProviderSettings):
    trace: Annotated[str, AfterValidator(_readable)] = Field(
        "rlboost-a", validate_default=True, description="a shipped trace's name, or a path"
    )
    speed: float = Field(1.0, gt=0, allow_inf_nan=False, description="seconds of the trace in a second")
    start_s: float = Field(0.0, ge=0, allow_inf_nan=False, description="where in the trace to begin")
    end_s: float | None = Field(None, gt=0, allow_inf_nan=False, description="where to end; else at its last event")
    repeat: bool = Field(False, description="begin again at the end")
    boot_delay_s: float = Field(0.0, ge=0, allow_inf_nan=False, description="from the grant to the worker's start")
    notice_s: float = Field(0.0, ge=0, allow_inf_nan=False, description="warning before an instance is taken back")

    @model_validator(mode="after")
    def _window(self) -> "SpotSettings":
        replay(read_spot_trace(traces.find(self.trace)), start_s=self.start_s, end_s=self.end_s)
        return self


class SpotProvider(LeaseKeeper[SpotSettings]):
    """Leases one instance each. `expected_life_s` is the mean life that the trace has shown so far."""

    Settings: ClassVar[type[SpotSettings]] = SpotSettings

    def __init__(self, name: str, settings: SpotSettings, context: ProviderContext) -> None:
        super().__init__(name, settings, context)
        try:
            self._trace: SpotTrace = read_spot_trace(traces.find(settings.trace))
        except traces.TraceError as error:
            raise ProviderUnavailable(f"{name}: {error}") from error
        self._instances: dict[str, LeaseId | None] = {}
        self._now_s = settings.start_s

    async def start(self, emit: Emit) -> None:
        processes.check_command("a worker", self.context.worker_command)
        await super().start(emit)
        self.run_in_background(self._follow_market(), "market")

    def free(self) -> int:
        return sum(lease is None for lease in self._instances.values())

    def boot_s(self) -> float:
        return self.settings.boot_delay_s

    def expected_life_s(self) -> float | None:
        life_s = self._trace.mean_life_s(self._now_s)
        return None if life_s is None else life_s / self.settings.speed

    async def take(self, request: LeaseRequest) -> Holding:
        instance = next((i for i, lease in self._instances.items() if lease is None), None)
        if instance is None:
            raise Refusal(f"no instance of {self.name} is available")
        self._instances[instance] = request.lease
        return processes.LocalWorkers(self.context, self.name, request, self.settings.boot_delay_s)

    def forget(self, lease: LeaseId, *, barred: bool) -> None:
        for instance, holder in self._instances.items():
            if holder == lease:
                self._instances[instance] = lease if barred else None

    async def reconcile(self) -> list[str]:
        return await processes.reconcile(self.context, self.name)

    async def _follow_market(self) -> None:
        s = self.settings
        loop = asyncio.get_running_loop()
        opened_s = loop.time()
        events = replay(self._trace, start_s=s.start_s, end_s=s.end_s, speed=s.speed, repeat=s.repeat)
        for time_s, together in itertools.groupby(events, key=lambda event: event.time_s):
            await asyncio.sleep(max(0.0, opened_s + time_s - loop.time()))
            self._now_s = min(s.start_s + time_s * s.speed, s.end_s or self._trace.end_s)
            for event in together:
                self._apply(event)
            self.announce()

    def _apply(self, event: SpotEvent) -> None:
        if event.change is Change.ADD:
            self._instances[event.instance] = None
            return
        lease = self._instances.pop(event.instance)
        if lease is not None and self.holds(lease):
            ending = Ending(EndCause.PREEMPTED, f"the market took instance {event.instance} back")
            self.foretell(lease, ending, self.settings.notice_s)
