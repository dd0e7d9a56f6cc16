"""What markets have, without clock or I/O: whoever drives one tells it the time, and hears what it takes back."""

from typing import Annotated, NamedTuple

from pydantic import AfterValidator, Field, model_validator

import traces
from elastic.core.types import NS_PER_S, LeaseId, Nanoseconds
from providers.base import ProviderSettings
from traces.spot import Change, read_spot_trace, replay


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


class TakenBack(NamedTuple):
    lease: LeaseId
    at_ns: Nanoseconds
    detail: str


class SpotMarket:
    """Instances that come and go as in the trace; a lease takes the one that has been available longest.

    `at_ns` is when what has last changed has. Raises `traces.TraceError`.
    """

    def __init__(self, settings: SpotSettings, opened_ns: Nanoseconds = 0) -> None:
        s = self._settings = settings
        self._trace = read_spot_trace(traces.find(s.trace))
        self._changes = replay(self._trace, start_s=s.start_s, end_s=s.end_s, speed=s.speed, repeat=s.repeat)
        self._next = next(self._changes, None)
        self._opened_ns = self.at_ns = opened_ns
        self._now_s = s.start_s
        self.instances: dict[str, LeaseId | None] = {}

    @property
    def next_ns(self) -> Nanoseconds | None:
        """When something changes next; None if nothing ever does."""
        return None if self._next is None else self._opened_ns + round(self._next.time_s * NS_PER_S)

    def advance(self, now_ns: Nanoseconds) -> list[TakenBack]:
        """Have all happen that does until `now_ns`."""
        taken: list[TakenBack] = []
        while (change := self._next) is not None and (at_ns := self.next_ns) is not None and at_ns <= now_ns:
            s, self.at_ns = self._settings, at_ns
            self._now_s = min(s.start_s + change.time_s * s.speed, s.end_s or self._trace.end_s)
            if change.change is Change.ADD:
                self.instances[change.instance] = None
            elif (lease := self.instances.pop(change.instance)) is not None:
                taken.append(TakenBack(lease, at_ns, f"the market took instance {change.instance} back"))
            self._next = next(self._changes, None)
        return taken

    def free(self) -> int:
        return sum(lease is None for lease in self.instances.values())

    def expected_life_s(self) -> float | None:
        life_s = self._trace.mean_life_s(self._now_s)
        return None if life_s is None else life_s / self._settings.speed

    def take(self, lease: LeaseId) -> str:
        """The instance that the lease now stands on. Raises `LookupError` when none is available."""
        instance = next((i for i, holder in self.instances.items() if holder is None), None)
        if instance is None:
            raise LookupError("no instance is available")
        self.instances[instance] = lease
        return instance

    def forget(self, lease: LeaseId, *, barred: bool = False) -> None:
        for instance, holder in self.instances.items():
            if holder == lease:
                self.instances[instance] = lease if barred else None
