"""The markets of providers: what capacity each has and when it takes leases back. Shared by live adapters and
simulator.

A market has no clock and does no I/O: its driver passes the time, hears which leases are taken back, and starts workers
on the leased places.
"""

from collections.abc import Iterator, Mapping
from typing import Annotated, ClassVar, Generic, NamedTuple, Protocol, Self, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

import traces
from elastic.core.types import NS_PER_S, EndCause, LeaseId, Nanoseconds, Offer, WorkerRole
from providers.base import ProviderSettings
from providers.serving_messages import ServingSettings
from traces.spot import SpotChange, read_spot_trace, replay

SettingsT = TypeVar("SettingsT", bound=ProviderSettings)


class CapacityUnavailable(Exception):
    """The requested capacity does not exist now. The message says why."""


class LeaseEnding(NamedTuple):
    """How a lease ended. `fault` is as in `elastic.core.events.LeaseEnded`."""

    cause: EndCause
    detail: str = ""
    fault: str = ""


class TakenBack(NamedTuple):
    """A lease whose place is gone, or will be gone at `deadline_ns`."""

    lease: LeaseId
    deadline_ns: Nanoseconds
    ending: LeaseEnding


class Market(Generic[SettingsT]):
    """Leases with up to `max_workers` workers in all. Each lease has a place in the market, named if places differ.

    `at_ns` is the time of the market's last change by itself.
    """

    role: ClassVar[WorkerRole] = WorkerRole.ELASTIC
    workers_per_lease: int = 1
    delay_key: ClassVar[str] = ""
    """The key of the setting for the time from a grant to the start of its workers."""
    bars_last: ClassVar[bool] = True
    """Whether a barred place stays barred for the run's next process."""

    def __init__(self, name: str, settings: SettingsT) -> None:
        self.name = name
        self.settings = settings
        self.at_ns: Nanoseconds = 0
        self._held: set[LeaseId] = set()
        self._offered: Offer | None = None

    # What a kind of market says

    def free(self) -> int:
        """Return how many more leases the market could give without `max_workers`."""
        return self._most_leases - len(self._held)

    def overlap(self) -> int:
        """Return how many leases beyond `max_workers` may be held, each replacing one that ends soon."""
        return 0

    def life_s(self) -> float | None:
        """Return how long after its grant a lease ends in any case; None for no such limit."""
        return None

    def expected_life_s(self) -> float | None:
        return self.life_s()

    def usd_per_gpu_hour(self) -> float:
        """The price of the present offer."""
        return self.settings.usd_per_gpu_hour

    @property
    def next_ns(self) -> Nanoseconds | None:
        """The time of the next change by itself; None if there is none."""
        return None

    def advance(self, now_ns: Nanoseconds) -> Iterator[TakenBack]:
        """Yield the changes until `now_ns`. Each change happens once the caller has handled the one before."""
        return iter(())

    def pick(self, lease: LeaseId) -> str:
        """Return a place for the lease. Raises `CapacityUnavailable`."""
        if self.free() <= 0:
            raise CapacityUnavailable(f"nothing of {self.name} is left")
        return ""

    def restore(self, lease: LeaseId, place: str) -> None:
        """Record that the lease has had this place since `at_ns`."""
        self._held.add(lease)

    def forget(self, lease: LeaseId, *, barred: bool = False) -> None:
        """Record that the lease is over and its place was given back. A `barred` place is not leased again."""
        self._held.discard(lease)

    # What is the same for all

    def boot_s(self) -> float:
        """Return the time from a grant to the start of its workers."""
        return float(getattr(self.settings, self.delay_key)) if self.delay_key else 0.0

    def expiry(self) -> LeaseEnding:
        """Return the reason of a lease that ends by time."""
        return LeaseEnding(EndCause.EXPIRED, f"its {self.life_s():g} s are over")

    def take(self, lease: LeaseId) -> str:
        """Lease a place and return it. Raises `CapacityUnavailable`."""
        if len(self._held) >= self._most_leases + self.overlap():
            besides = f" and {self.overlap()} besides" if self.overlap() else ""
            raise CapacityUnavailable(
                f"{self.name} holds max_workers = {self.settings.max_workers} workers{besides} already"
            )
        place = self.pick(lease)
        self._held.add(lease)
        return place

    def news(self, *, again: bool = False) -> Offer | None:
        """Return the offer if it has changed, or if `again`."""
        offer = self.offer()
        if offer == self._offered and not again:
            return None
        self._offered = offer
        return offer

    def offer(self) -> Offer:
        """Return the present offer."""
        held = len(self._held)
        return Offer(
            provider=self.name,
            role=self.role,
            available=max(0, min(self.free(), self._most_leases - held)),
            replacements=max(0, self.overlap() - max(0, held - self._most_leases)),
            usd_per_gpu_hour=self.usd_per_gpu_hour(),
            gpus_per_worker=self.settings.gpus_per_worker,
            workers_per_lease=self.workers_per_lease,
            boot_s=self.boot_s(),
            expected_life_s=self.expected_life_s(),
            billing_ns=self.settings.billing_ns,
        )

    @property
    def _most_leases(self) -> int:
        return self.settings.max_workers // self.workers_per_lease


class ReservedMarket(Market[ProviderSettings]):
    """Machines that are always there, except barred ones."""

    role = WorkerRole.DEDICATED

    def __init__(self, name: str, settings: ProviderSettings) -> None:
        super().__init__(name, settings)
        self._barred = 0

    def free(self) -> int:
        return super().free() - self._barred

    def forget(self, lease: LeaseId, *, barred: bool = False) -> None:
        super().forget(lease)
        self._barred += barred


class TrainerMarket(ReservedMarket):
    """The run's own device. A bar ends the run; a user who resumes it has seen the reason."""

    role = WorkerRole.TRAINER
    workers_per_lease = 1
    bars_last = False


class ServerlessSettings(ProviderSettings):
    lease_s: float = Field(300.0, gt=0, allow_inf_nan=False, description="time limit of a call; then it is killed")
    cold_start_s: float = Field(0.0, ge=0, allow_inf_nan=False, description="from the grant to the worker's start")
    overlap: int | None = Field(
        None, ge=0, description="calls beyond max_workers that replace calls which end soon; by default max_workers"
    )


class ServerlessMarket(Market[ServerlessSettings]):
    """Calls that start cold and end by time. A replacement may overlap a call that ends soon."""

    delay_key = "cold_start_s"

    def free(self) -> int:
        return super().free() + self.overlap()

    def overlap(self) -> int:
        return self.settings.max_workers if self.settings.overlap is None else self.settings.overlap

    def life_s(self) -> float:
        return self.settings.lease_s


def _readable(trace: str) -> str:
    read_spot_trace(traces.find(trace))
    return traces.settled(trace)


class SpotTraceSettings(BaseModel):
    """A spot trace, and how it is played."""

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)

    trace: Annotated[str, AfterValidator(_readable)] = Field(
        "rlboost-a",
        validate_default=True,
        description="a shipped trace's name, or a path",
        json_schema_extra={"format": "path"},
    )
    speed: float = Field(1.0, gt=0, allow_inf_nan=False, description="seconds of the trace in a second")
    start_s: float = Field(0.0, ge=0, allow_inf_nan=False, description="where in the trace to begin")
    end_s: float | None = Field(None, gt=0, allow_inf_nan=False, description="where to end; else at its last event")
    repeat: bool = Field(False, description="begin again at the end")
    notice_s: float = Field(0.0, ge=0, allow_inf_nan=False, description="warning before an instance is taken back")

    @model_validator(mode="after")
    def _window(self) -> Self:
        replay(read_spot_trace(traces.find(self.trace)), start_s=self.start_s, end_s=self.end_s)
        return self


class SpotSettings(ProviderSettings, SpotTraceSettings):
    boot_delay_s: float = Field(0.0, ge=0, allow_inf_nan=False, description="from the grant to the worker's start")


class SpotMarket(Market[SpotSettings]):
    """Instances that come and go as in the trace. A lease takes the instance that has been available longest.

    Raises `traces.TraceError`.
    """

    delay_key = "boot_delay_s"

    def __init__(self, name: str, settings: SpotSettings) -> None:
        super().__init__(name, settings)
        self._trace = read_spot_trace(traces.find(settings.trace))
        s = settings
        self._changes = replay(self._trace, start_s=s.start_s, end_s=s.end_s, speed=s.speed, repeat=s.repeat)
        self._next = next(self._changes, None)
        self._now_s = s.start_s
        self._instances: dict[str, LeaseId | None] = {}

    def free(self) -> int:
        return sum(lease is None for lease in self._instances.values())

    def expected_life_s(self) -> float | None:
        """The mean life of instances in the trace so far."""
        life_s = self._trace.mean_life_s(self._now_s)
        return None if life_s is None else life_s / self.settings.speed

    @property
    def next_ns(self) -> Nanoseconds | None:
        return None if self._next is None else round(self._next.time_s * NS_PER_S)

    def advance(self, now_ns: Nanoseconds) -> Iterator[TakenBack]:
        s = self.settings
        while (change := self._next) is not None and (at_ns := round(change.time_s * NS_PER_S)) <= now_ns:
            self._next, self.at_ns = next(self._changes, None), at_ns
            self._now_s = min(s.start_s + change.time_s * s.speed, s.end_s or self._trace.end_s)
            if change.change is SpotChange.ADD:
                self._instances[change.instance] = None
            elif (lease := self._instances.pop(change.instance)) in self._held:
                ending = LeaseEnding(EndCause.PREEMPTED, f"the market took instance {change.instance} back")
                yield TakenBack(lease, at_ns + round(s.notice_s * NS_PER_S), ending)

    def pick(self, lease: LeaseId) -> str:
        instance = next((i for i, holder in self._instances.items() if holder is None), None)
        if instance is None:
            raise CapacityUnavailable(f"no instance of {self.name} is available")
        self._instances[instance] = lease
        return instance

    def restore(self, lease: LeaseId, place: str) -> None:
        super().restore(lease, place)
        self._instances[place] = lease

    def forget(self, lease: LeaseId, *, barred: bool = False) -> None:
        super().forget(lease)
        for instance, holder in self._instances.items():
            if holder == lease and not barred:
                self._instances[instance] = None


class LendableHost(Protocol):
    """A serving host as its market sees it. `kv_used_share` is recent, and of a lendable host."""

    @property
    def lendable(self) -> bool:
        """Whether the host answers, is not lent, and is not under pressure."""
        ...

    @property
    def kv_used_share(self) -> float: ...


class ServingMarket(Market[ServingSettings]):
    """Hosts with their own load, which has priority. A lease borrows the host with the least used KV cache."""

    def __init__(self, name: str, settings: ServingSettings, hosts: Mapping[str, LendableHost]) -> None:
        super().__init__(name, settings)
        self._hosts = hosts
        self.lent: dict[str, LeaseId] = {}
        """By the host's name; of one that is barred, the lease that has been the last."""

    def free(self) -> int:
        return len(self._offered_hosts())

    def pick(self, lease: LeaseId) -> str:
        offered = self._offered_hosts()
        if not offered:
            raise CapacityUnavailable(f"no host of {self.name} is free")
        place = min(offered, key=lambda name: self._hosts[name].kv_used_share)
        self.lent[place] = lease
        return place

    def restore(self, lease: LeaseId, place: str) -> None:
        super().restore(lease, place)
        self.lent[place] = lease

    def forget(self, lease: LeaseId, *, barred: bool = False) -> None:
        super().forget(lease)
        if not barred:
            self.lent = {place: lent for place, lent in self.lent.items() if lent != lease}

    def _offered_hosts(self) -> list[str]:
        return [name for name, host in self._hosts.items() if name not in self.lent and host.lendable]


class JoinedSettings(ProviderSettings):
    max_workers: int = Field(64, ge=0, le=10_000, description="most workers to take at once")


class JoinedMarket(Market[JoinedSettings]):
    """Machines that joined by themselves. Machines of the lowest price are offered first.

    `waiting` has the price of each machine.
    """

    bars_last = False

    def __init__(self, name: str, settings: JoinedSettings) -> None:
        super().__init__(name, settings)
        self.waiting: Mapping[str, float] = {}

    def free(self) -> int:
        return sum(usd == self.usd_per_gpu_hour() for usd in self.waiting.values())

    def usd_per_gpu_hour(self) -> float:
        return min(self.waiting.values(), default=self.settings.usd_per_gpu_hour)

    def pick(self, lease: LeaseId) -> str:
        """Return a machine of the price last offered, at which the lease is billed."""
        offered = self._offered.usd_per_gpu_hour if self._offered is not None else None
        place = next((place for place, usd in self.waiting.items() if usd == offered), None)
        if place is None:
            raise CapacityUnavailable(f"nobody of {self.name} waits any more for ${offered} an hour")
        self.waiting = {one: usd for one, usd in self.waiting.items() if one != place}
        return place
