"""The contract of a provider: an adapter that gets GPUs from somewhere, loses them, and gives them back.

The scheduler never asks which provider it talks to; everything that differs between a spot market, a serving
cluster and a serverless platform ends here. A kind of provider is a *market* (`providers.markets`: which capacity there
is, when, at which price; pure, and also the simulator's) and a *launcher* (how workers are started on it, found again
and ended: processes, hosts, actors). Kinds are entry points of the group `elastic.providers`; the section of a
configuration says of which kind it is. Source: docs/design.md, `Provider`.
"""

import secrets
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol, TypeAlias

import msgspec
from pydantic import BaseModel, ConfigDict, Field

from elastic.core.events import LeaseEnded, LeaseGranted, LeaseNotice, LeaseRefused, OfferChanged
from elastic.core.types import NS_PER_S, LeaseId, Nanoseconds, WorkerId
from elastic.endpoint import Endpoint
from providers.waiting_room import WaitingRoom

ProviderEvent: TypeAlias = OfferChanged | LeaseGranted | LeaseRefused | LeaseNotice | LeaseEnded
Emit: TypeAlias = Callable[[ProviderEvent], None]


class WorkerTicket(msgspec.Struct, frozen=True):
    """What one worker of a lease needs to dial in. `token` is spent by its first use; never log it."""

    worker: WorkerId
    token: str


class LeaseRequest(msgspec.Struct, frozen=True, kw_only=True):
    lease: LeaseId
    tickets: tuple[WorkerTicket, ...]


class KnownLease(msgspec.Struct, frozen=True, kw_only=True):
    """A lease that the run has asked this provider for, and does not know to be over; see `Provider.adopt`."""

    request: LeaseRequest
    granted: bool
    expires_at_ns: Nanoseconds | None = None


class ProviderContext(msgspec.Struct, frozen=True, kw_only=True):
    """Where a provider's workers belong. Every resource is tagged with `run`, so that it can be found again.

    `endpoint` is where its workers dial; in the `waiting_room` are those that did so by themselves. `worker_command`
    starts a worker on this machine; a worker's ticket reaches it through `worker_environment`, never through its
    arguments.
    `host_command` starts a serving host. `pass_env` names environment variables that both inherit besides those that
    all processes of a run do. `now_ns` is the run's clock, on which events give their times and markets stand; it goes
    on over the run's incarnations. `note` keeps a text under a key in the run's journal, for its report; the last one
    stands. `secret` is the token of a host of this name, the same in each incarnation; a host that has not heard from
    the run for `orchestrator_timeout_s` ends. `pool` is the
    `elastic.pool_client.PoolClient` of a run that is a job of one.
    """

    run: str
    run_dir: Path
    endpoint: Endpoint
    worker_command: tuple[str, ...]
    host_command: tuple[str, ...] = ()
    pass_env: tuple[str, ...] = ()
    now_ns: Callable[[], Nanoseconds]
    note: Callable[[str, str], None] = lambda key, text: None
    secret: Callable[[str], str] = lambda host: secrets.token_urlsafe(32)
    acquire_timeout_s: float
    release_timeout_s: float
    orchestrator_timeout_s: float = 60.0
    waiting_room: WaitingRoom | None = None
    pool: object = None


Billing: TypeAlias = Literal["exact", "second", "minute", "hour"]
INCREMENTS_S: Mapping[Billing, int] = {"second": 1, "minute": 60, "hour": 3600}
"""What a begun increment is, where whole ones are billed."""


class ProviderSettings(BaseModel):
    """What the configuration of every provider has; adapters add their own keys in a subclass."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: str = Field(default="", description="which provider this is; else the section's name says it")
    max_workers: int = Field(1, ge=0, le=10_000, description="most workers to hold at once")
    usd_per_gpu_hour: float = Field(0.0, ge=0, allow_inf_nan=False, description="price of one GPU for an hour")
    billing: Billing = Field(
        default="exact",
        description="what is billed of a lease: the time as it is, or each begun second, minute, hour",
    )
    gpus_per_worker: int = Field(1, ge=1)
    engine: dict[str, Any] = Field(
        default_factory=dict, description="settings of its workers' engines that differ from [engine]"
    )

    @property
    def usd_per_gpu_hour_most(self) -> float | None:
        """Above which nothing is taken, where prices are the vendor's and there is such a limit."""
        return None

    @property
    def billing_ns(self) -> Nanoseconds | msgspec.UnsetType:
        """The increment by which leases are billed, where there is one."""
        return INCREMENTS_S[self.billing] * NS_PER_S if self.billing in INCREMENTS_S else msgspec.UNSET


REMARK = "remark: "
"""Begins the key of a note that the report shows as it is; then comes the provider's name, a colon and what tells it
from others."""


class Provider(Protocol):
    """One source of GPUs. Methods return quickly; what comes of them arrives through `emit`.

    For every `acquire` exactly one of LeaseGranted and LeaseRefused is emitted, and for every granted lease
    exactly one LeaseEnded, after which none of its processes is alive. `release` of an unknown or ended
    lease is a no-op; `release` of a lease that is not granted yet ends in LeaseRefused, or in LeaseGranted
    followed by LeaseEnded.
    """

    Settings: ClassVar[type[ProviderSettings]]
    on_this_machine: ClassVar[bool] = False
    """Whether its workers run on the orchestrator's machine, with the run's files at hand."""
    name: str

    def __init__(self, name: str, settings: ProviderSettings, context: ProviderContext) -> None: ...

    async def adopt(self, known: Sequence[KnownLease], emit: Emit) -> list[LeaseId]:
        """Take over what earlier processes of the run have left of these leases; what they left besides is ended.

        To be called once, before `start`. What was granted before and is over ends by LeaseEnded with its cause. What
        was asked for and turns out to be held is granted by LeaseGranted. Returns what was asked for and is not held:
        it may be asked for again.
        """
        ...

    async def start(self, emit: Emit) -> None:
        """Begin to report offers. Raises `ProviderUnavailable` when nothing can ever be had (say why)."""
        ...

    async def acquire(self, request: LeaseRequest) -> None: ...

    async def release(self, lease: LeaseId, reason: str = "") -> None:
        """`reason` is the run's; of a lease whose workers have not joined in time it is "boot_timeout"."""
        ...

    def bar(self, lease: LeaseId) -> None:
        """A worker of the lease has lied: what it stands on is not leased again in this run, once it has ended.

        A no-op for a lease that is unknown, or has ended.
        """
        ...

    async def aclose(self) -> None:
        """End every lease and stop reporting. Safe to call twice."""
        ...


class VendorFinding(msgspec.Struct, frozen=True, kw_only=True):
    """Something that was looked at, what was found, and what would mend it where it is not `ok`."""

    what: str
    ok: bool
    found: str
    mend: str = ""


class CapacityNow(msgspec.Struct, frozen=True, kw_only=True):
    """What could be had somewhere now; `why` nothing can, where it cannot. `score` is the vendor's, 1 to 10."""

    place: str
    usd_per_gpu_hour: float
    gpus_per_worker: int
    usable: bool
    why: str = ""
    score: int | None = None
    since: str = ""
    """Since when the price stands (UTC)."""


class Examination(msgspec.Struct, frozen=True, kw_only=True):
    """What a provider's own `examine(name, settings)` tells, which is a class method and may block for some seconds.

    Kinds of providers that have none are on this machine, or somebody else's to ask.
    """

    findings: tuple[VendorFinding, ...] = ()
    capacity: tuple[CapacityNow, ...] = ()


class ProviderUnavailable(Exception):
    """The provider cannot give anything; the message names what is wrong and what would mend it."""


def worker_environment(
    context: ProviderContext, ticket: WorkerTicket, endpoint: Endpoint | None = None
) -> Mapping[str, str]:
    """Environment variables that hand a ticket to `elastic worker`, out of sight of process lists.

    Workers dial `endpoint`, the run's unless it is given.
    """
    endpoint = endpoint or context.endpoint
    return {
        "ELASTIC_RUN": context.run,
        "ELASTIC_JOIN": endpoint.address,
        "ELASTIC_JOIN_FINGERPRINT": endpoint.fingerprint,
        "ELASTIC_WORKER": ticket.worker,
        "ELASTIC_JOIN_TOKEN": ticket.token,
        "ELASTIC_ORCHESTRATOR_TIMEOUT_S": str(context.orchestrator_timeout_s),
    }
