"""The spot market of EC2 as a run sees it: pools with prices, and what has failed or was taken back in them. Pure.

- A *pool* is an instance type in a zone. It is used unless its price is above the limit, or it failed lately: each
  failure doubles a pool's back-off, and a launch there ends it.
- Pools are asked for in the order of what an hour of work costs in them: a pool whose instances are taken back soon is
  dearer than its price says, by the time that each instance boots.
- The bill is EC2's: seconds, a minute at the least, each hour at the price that stood when it began, and nothing where
  EC2 itself ended the instance in its first hour.

Sources: EC2 User Guide, "Spot Instances" (pricing, billing for interrupted instances); RLBoost §3, ROSE §5.
"""

import itertools
import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec
from pydantic import Field, model_validator

from elastic.core.types import NS_PER_S, LeaseId, Nanoseconds, Offer
from elastic.system.outages import backoff
from providers.base import ProviderSettings
from providers.markets import CapacityUnavailable, Market, TakenBack

HOUR_S = 3600
LEAST_BILLED_S = 60
CAP_NOTICE_S = 30.0
"""Leases get notice so long before the spending cap is reached. Their turns end or move meanwhile."""
UNSEEN_S = 60.0
"""How long EC2 may not know a new instance yet, nor list it."""
ENDING_S = 10.0
"""How long EC2 may go on to bill an instance after its lease's end."""
CAP_PRECISION_S = 0.5
NOTICE_S = 120.0
"""The notice that EC2 gives of most interruptions."""
REBALANCE_PAUSE_S = 600.0
"""How long a pool rests after a rebalance recommendation, unless it is the only one."""

NEVER_JOINED = "NeverJoined"
"""The reason of a pool whose last instance was launched and brought no worker."""
QUOTA_CODES = frozenset({"MaxSpotInstanceCountExceeded", "VcpuLimitExceeded", "InstanceLimitExceeded"})
"""Codes of refusals that concern the account, not the pool."""


class Ec2Settings(ProviderSettings):
    region: str = Field("us-east-1", pattern=r"^[a-z]{2}(-[a-z]+)+-\d$", description="where to ask for instances")
    profile: str = Field("", description="of the shared AWS configuration; else the usual chain finds credentials")
    endpoint_url: str = Field("", description="of an EC2 that is not AWS's own; all services are asked there")
    instance_types: tuple[str, ...] = Field(
        ("g5.xlarge",), min_length=1, max_length=20, description="types with gpus_per_worker GPUs each"
    )
    zones: tuple[str, ...] = Field((), description="availability zones; else all of the region that have these types")
    subnets: dict[str, str] = Field(default_factory=dict, description="by zone, where it is not the default one")
    image: str = Field("", pattern=r"^(ami-[0-9a-f]{8,17})?$", description="AMI that workers boot; or …")
    launch_template: str = Field(
        "",
        pattern=r"^(lt-[0-9a-f]{8,17}(:(\d+|\$Default|\$Latest))?)?$",
        description="… launch template, or its version",
    )
    security_groups: tuple[str, ...] = Field((), description="of instances from an AMI; they need no way in")
    instance_profile: str = Field("", description="of instances from an AMI")
    install: tuple[str, ...] = Field(
        (), max_length=50, description="shell commands that bring `elastic` onto an image that does not have it"
    )
    secret_prefix: str = Field(
        "",
        pattern=r"^[A-Za-z0-9/_+=.@-]*$",
        description="tickets go through Secrets Manager under this name; without it, through user data",
    )
    queue: str = Field(
        "", description="URL of the SQS queue to which EventBridge sends EC2's notices; else none is read"
    )
    usd_per_gpu_hour_max: float | None = Field(None, gt=0, description="pools that are dearer are not used")
    usd_max: float | None = Field(None, gt=0, description="what this provider's instances may cost in all")
    boot_s: float = Field(90.0, ge=0, allow_inf_nan=False, description="from the grant to the worker's first word")
    max_life_s: float = Field(
        86_400.0,
        ge=300,
        le=30 * 86_400,
        description="after this an instance ends itself, also where its run has forgotten it",
    )
    install_s: float = Field(
        1800.0, ge=60, le=86_400, description="an instance whose worker has not begun by then ends itself"
    )
    retry_s: float = Field(15.0, gt=0, description="first back-off of a pool that has no capacity; it doubles …")
    retry_max_s: float = Field(900.0, gt=0, description="… up to this")
    poll_s: float = Field(5.0, gt=0, description="time between two looks at this run's instances")
    price_s: float = Field(300.0, gt=0, description="time between two looks at the prices")
    reconcile_s: float = Field(120.0, gt=0, description="time between two searches for instances of no lease")
    answer_timeout_s: float = Field(20.0, gt=0, description="longest time that one call may take, its repeats included")

    @model_validator(mode="after")
    def _belongs_together(self) -> "Ec2Settings":
        if bool(self.image) == bool(self.launch_template):
            found = "both" if self.image else "neither"
            raise ValueError(f"image or launch_template must be given, and one of them alone; found {found}")
        if self.launch_template and (self.security_groups or self.instance_profile):
            raise ValueError("security_groups and instance_profile are the launch template's, where there is one")
        if self.secret_prefix and self.image and not self.instance_profile:
            raise ValueError("secret_prefix needs instance_profile: without it no instance may read its secret")
        return self

    @property
    def usd_per_gpu_hour_most(self) -> float | None:
        return self.usd_per_gpu_hour_max


class SpotPool(NamedTuple):
    instance_type: str
    zone: str

    def __str__(self) -> str:
        return f"{self.instance_type} in {self.zone}"


class PricePoint(NamedTuple):
    """The price of an instance's hour from `at_s` (Unix time) on."""

    at_s: float
    usd_per_hour: float


class Running(NamedTuple):
    """An instance, or an order that may have become one, that is billed since `began_s` (Unix time). `usd` is its whole
    bill once that is known; the run has been told `told_usd` of it."""

    pool: SpotPool
    began_s: float
    usd: float | None = None
    told_usd: float = 0.0


class PoolHistory(msgspec.Struct):
    """A run's experience of a pool: the time of its instances, and the number of interruptions."""

    held_s: float = 0.0
    interruptions: int = 0

    @property
    def life_s(self) -> float | None:
        """The mean life of an instance; None before the first interruption."""
        return self.held_s / self.interruptions if self.interruptions else None


class Failure(NamedTuple):
    code: str
    message: str
    times: int
    until_ns: Nanoseconds


class Ec2Market(Market[Ec2Settings]):
    """Spot pools for one run. The provider reports prices, scores, failures and interruptions with their times."""

    delay_key = "boot_s"
    bars_last = False

    def __init__(self, name: str, settings: Ec2Settings) -> None:
        super().__init__(name, settings)
        self.prices: dict[SpotPool, tuple[PricePoint, ...]] = {}
        self.scores: dict[str, int] = {}
        """Placement scores by zone, 1 to 10; empty if EC2 does not tell them."""
        self.history: dict[SpotPool, PoolHistory] = {}
        self.failures: dict[SpotPool, Failure] = {}
        self.spent_usd: Callable[[], float] = lambda: 0.0
        """What is over has cost so much, in all processes of the run."""
        self.now_s: Callable[[], float] = lambda: 0.0
        """AWS's clock."""
        self.running: dict[str, Running] = {}
        """What is billed, or may be, by its lease; what no lease has, by its instance."""
        self.capped = False
        """Whether leases were told that `usd_max` is about to be spent: nothing is leased any more."""
        self.closed = ""
        """Why the provider can lease nothing at all; empty if it can."""

    # What others tell

    def priced(self, prices: Mapping[SpotPool, Sequence[PricePoint]]) -> None:
        """Add newer prices, and keep the known past ones."""
        for pool, points in prices.items():
            known = {*self.prices.get(pool, ()), *points}
            self.prices[pool] = tuple(sorted(known))

    def failed(self, pool: SpotPool, code: str, message: str) -> None:
        """Record that a pool launched nothing. A quota is the account's, so all pools of the type wait."""
        hit = [p for p in self.pools() if p.instance_type == pool.instance_type] if code in QUOTA_CODES else [pool]
        for one in {*hit, pool}:
            before = self.failures.get(one)
            if before is not None and before.until_ns > self.at_ns and before.code == code:
                continue  # Told of the same moment by another request.
            times = before.times + 1 if before else 1
            pause_s = backoff(times - 1, self.settings.retry_s, self.settings.retry_max_s)
            self.failures[one] = Failure(code, message, times, self.at_ns + round(pause_s * NS_PER_S))

    def launched(self, pool: SpotPool) -> None:
        """Record that a pool has capacity. Its worker may still not come."""
        if (failure := self.failures.get(pool)) is not None and failure.code != NEVER_JOINED:
            del self.failures[pool]

    def joined(self, pool: SpotPool) -> None:
        """Record that an instance of the pool has become a worker."""
        if (failure := self.failures.get(pool)) is not None and failure.code == NEVER_JOINED:
            del self.failures[pool]

    def advised_against(self, pool: SpotPool) -> None:
        """Record EC2's recommendation to move instances out of the pool."""
        until_ns = self.at_ns + round(REBALANCE_PAUSE_S * NS_PER_S)
        self.failures[pool] = Failure("RebalanceRecommendation", "its instances are likelier to be taken", 1, until_ns)

    def held(self, pool: SpotPool, held_s: float, *, interrupted: bool) -> None:
        """Record the end of an instance."""
        seen = self.history.setdefault(pool, PoolHistory())
        seen.held_s += held_s
        seen.interruptions += interrupted

    # What the run asks

    def advance(self, now_ns: Nanoseconds) -> Iterator[TakenBack]:
        self.at_ns = max(self.at_ns, now_ns)
        return iter(())

    def pools(self) -> list[SpotPool]:
        """Return all pools that the settings allow and that have a price."""
        s = self.settings
        return [p for p in self.prices if p.instance_type in s.instance_types and (not s.zones or p.zone in s.zones)]

    def usable(self) -> list[SpotPool]:
        """Return the pools to order from, the best first."""
        fitting = [pool for pool in self.pools() if self._fits(pool)]
        waiting = [pool for pool in fitting if (f := self.failures.get(pool)) is not None and f.until_ns > self.at_ns]
        advised = [pool for pool in waiting if self.failures[pool].code == "RebalanceRecommendation"]
        free = [pool for pool in fitting if pool not in waiting] or advised
        return sorted(free, key=lambda pool: (self._working_usd(pool), -self.scores.get(pool.zone, 0), pool))

    def why_nothing(self) -> str:
        """Return why each pool cannot be used now, and when the next one is tried."""
        if self.closed:
            return self.closed
        if self.free_by_cap() == 0:
            return (
                f"usd_max = ${self.settings.usd_max:g} pays for no other instance: "
                f"${self.spent_usd():.2f} are spent, with what is held ${self.committed_usd(0.0):.2f}"
            )
        if not self.pools():
            s = self.settings
            zones = ", ".join(s.zones) or f"any zone of {s.region}"
            return f"no spot price of {', '.join(s.instance_types)} in {zones}: is it offered there?"
        told = [
            f"{pool}: ${self.usd_now(pool):.2f} an hour, above usd_per_gpu_hour_max"
            for pool in self.pools()
            if not self._fits(pool)
        ]
        told += self.waits()
        if left := self._waiting():
            wait_s = (min(f.until_ns for f in left.values()) - self.at_ns) / NS_PER_S
            told.append(f"the next is tried in {wait_s:.0f} s")
        return "; ".join(told)

    def waits(self) -> list[str]:
        """Return the pools that rest now, each with its last failure."""
        return [f"{pool}: {f.code} ({f.message})" for pool, f in sorted(self._waiting().items())]

    def _waiting(self) -> dict[SpotPool, Failure]:
        failures = self.failures.items()
        return {pool: f for pool, f in failures if f.until_ns > self.at_ns and pool in self.prices and self._fits(pool)}

    def usd_now(self, pool: SpotPool) -> float:
        """Return the price of an instance's hour in the pool."""
        return self.prices[pool][-1].usd_per_hour

    def usd_per_gpu_hour(self) -> float:
        """The price of the pool that comes first."""
        pools = self.usable() or self.pools()
        return self.usd_now(pools[0]) / self.settings.gpus_per_worker if pools else self.settings.usd_per_gpu_hour

    def life_s(self) -> float:
        """Return the time after which an instance ends itself."""
        return self.settings.max_life_s

    def expected_life_s(self) -> float:
        """Return the mean life of instances in the pool that comes first."""
        pools = self.usable()
        life_s = self._life_s(pools[0]) if pools else None
        return self.life_s() if life_s is None else min(life_s, self.life_s())

    def free(self) -> int:
        if self.closed or not self.usable():
            return 0
        by_cap = self.free_by_cap()
        return super().free() if by_cap is None else min(super().free(), by_cap)

    def offer(self) -> Offer:
        pools = self.usable() or self.pools()
        most_usd = max(map(self.usd_now, pools)) / self.settings.gpus_per_worker if pools else msgspec.UNSET
        least_ns = LEAST_BILLED_S * NS_PER_S
        return msgspec.structs.replace(
            super().offer(), least_billed_ns=least_ns, usd_per_gpu_hour_most=most_usd, ending_s=UNSEEN_S + ENDING_S
        )

    @property
    def last_offer(self) -> Offer:
        """The offer that the run has read. Leases are booked at its price."""
        return self._offered or self.offer()

    def is_within(self, pool: SpotPool, offer: Offer) -> bool:
        """Return whether an hour in the pool costs no more than the offer has said."""
        most_usd = offer.usd_per_gpu_hour_most
        return most_usd is msgspec.UNSET or self.usd_now(pool) <= most_usd * self.settings.gpus_per_worker

    def forget(self, lease: LeaseId, *, barred: bool = False) -> None:
        super().forget(lease, barred=barred)
        self.running.pop(lease, None)

    def pick(self, lease: LeaseId) -> str:
        if self.free() <= 0:
            raise CapacityUnavailable(
                f"{self.name}: nothing is to be had in {self.settings.region}: {self.why_nothing()}"
            )
        return ""

    # What may be spent

    @property
    def notice_s(self) -> float:
        """How long before `usd_max` is spent leases get notice, at the least."""
        return CAP_NOTICE_S + self.settings.poll_s + ENDING_S

    def bill_usd(self, one: Running, after_s: float, least_s: float = LEAST_BILLED_S) -> float:
        """Return the bill of what runs if it ends `after_s` from now, at the prices that are known now."""
        if one.usd is not None:
            return one.usd
        end_s = self.now_s() + after_s
        return bill_usd(one.began_s, end_s, self.prices.get(one.pool, ()), interrupted=False, least_s=least_s)

    def usd_per_hour_most(self, one: Running) -> float:
        """Return what its hour costs from now on at the most: at the price of its running hour, or of now."""
        points = self.prices.get(one.pool, ())
        hours = max(0.0, self.now_s() - one.began_s) // HOUR_S
        return max(usd_at(points, one.began_s + hours * HOUR_S), usd_at(points, self.now_s()))

    def committed_usd(self, after_s: float) -> float:
        """Return what the run's instances will have cost in all if everything ends `after_s` from now."""
        return self.spent_usd() + sum(self.bill_usd(one, after_s) - one.told_usd for one in self.running.values())

    def cap_left_s(self) -> float | None:
        """Return how long what runs can go on within `usd_max`; None where that is longer than notice needs."""
        limit, most_s = self.settings.usd_max, 2 * self.notice_s
        if limit is None or self.committed_usd(most_s) <= limit:
            return None
        least_s = 0.0
        while most_s - least_s > CAP_PRECISION_S:
            middle_s = (least_s + most_s) / 2
            if self.committed_usd(middle_s) <= limit:
                least_s = middle_s
            else:
                most_s = middle_s
        return least_s

    def free_by_cap(self) -> int | None:
        """Return how many more instances `usd_max` pays for until they could get notice; None without a cap."""
        limit = self.settings.usd_max
        if limit is None:
            return None
        dearest = max((self.usd_now(pool) for pool in self.pools() if self._fits(pool)), default=0.0)
        if self.capped or not dearest:
            return 0
        one = dearest * max(LEAST_BILLED_S, self.settings.boot_s + self.notice_s) / HOUR_S
        asked = len(self._held - self.running.keys())
        left = limit - self.committed_usd(self.notice_s) - asked * one
        return max(0, math.floor(left / one))

    def _fits(self, pool: SpotPool) -> bool:
        limit = self.settings.usd_per_gpu_hour_max
        return limit is None or self.usd_now(pool) <= limit * self.settings.gpus_per_worker

    def _life_s(self, pool: SpotPool) -> float | None:
        """Return the pool's own mean life, or that of all pools if the pool has none."""
        own = self.history.get(pool)
        if own is not None and own.life_s is not None:
            return own.life_s
        held_s = sum(seen.held_s for seen in self.history.values())
        return PoolHistory(held_s, sum(seen.interruptions for seen in self.history.values())).life_s

    def _working_usd(self, pool: SpotPool) -> float:
        usd, life_s, boot_s = self.usd_now(pool), self._life_s(pool), self.settings.boot_s
        if life_s is None:
            return usd
        return usd * life_s / max(life_s - boot_s, 0.1 * life_s) if life_s else usd


def bill_usd(
    began_s: float,
    ended_s: float,
    prices: Iterable[PricePoint],
    *,
    interrupted: bool,
    least_s: float = LEAST_BILLED_S,
) -> float:
    """Return EC2's bill for an instance between these times. `interrupted` means that EC2 has ended it."""
    duration_s = max(0.0, ended_s - began_s)
    if interrupted and duration_s < HOUR_S:
        return 0.0
    billed_s = max(least_s, duration_s)
    points = sorted(prices)
    usd = 0.0
    for hour in itertools.count():
        from_s = hour * HOUR_S
        if from_s >= billed_s:
            return usd
        usd += usd_at(points, began_s + from_s) * min(HOUR_S, billed_s - from_s) / HOUR_S
    raise AssertionError


def usd_at(points: Sequence[PricePoint], at_s: float) -> float:
    """Return the hourly price at this time: the last one told before it, or else the first."""
    if not points:
        return 0.0
    index = bisect_right([point.at_s for point in points], at_s)
    return points[max(0, index - 1)].usd_per_hour
