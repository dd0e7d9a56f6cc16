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

from elastic.core.events import (
    LeaseEnded,
    LeaseGranted,
    LeaseNotice,
    LeaseRefused,
    LeaseRepriced,
    OfferChanged,
    StraysBilled,
)
from elastic.core.ids import tagged
from elastic.core.types import NS_PER_S, LeaseId, Nanoseconds, WorkerId
from elastic.protocol.endpoint import Endpoint
from elastic.system.outages import Outage
from providers.pending_workers import PendingWorkers

ProviderEvent: TypeAlias = (
    OfferChanged | LeaseGranted | LeaseRefused | LeaseNotice | LeaseEnded | LeaseRepriced | StraysBilled
)
Emit: TypeAlias = Callable[[ProviderEvent], None]


class WorkerTicket(msgspec.Struct, frozen=True):
    """Credentials with which one worker of a lease dials in. `token` is valid once; never log it."""

    worker: WorkerId
    token: str


class LeaseRequest(msgspec.Struct, frozen=True, kw_only=True):
    lease: LeaseId
    tickets: tuple[WorkerTicket, ...]


class KnownLease(msgspec.Struct, frozen=True, kw_only=True):
    """A lease that the run has requested from this provider and does not know to be over; see `Provider.adopt`.

    `granted_at_ns` is when the run heard of its grant, by the run's clock; None where that is not known.
    """

    request: LeaseRequest
    granted: bool
    granted_at_ns: Nanoseconds | None = None
    expires_at_ns: Nanoseconds | None = None


class ProviderContext(msgspec.Struct, frozen=True, kw_only=True):
    """A provider's surroundings. Every resource is tagged with `run`, so that it can be found again.

    - `endpoint` is where its workers dial; the `pending_workers` has workers that dialled in by themselves.
    - `worker_command` starts a worker on this machine. A worker's ticket reaches it through `worker_environment`, never
      through its arguments. `host_command` starts a serving host. `pass_env` names environment variables for both,
      besides those that all processes of a run inherit.
    - `now_ns` is the run's clock, for events and markets; it goes on over the run's incarnations.
    - `note` stores a text under a key in the run's journal, for its report; a later text replaces an earlier one.
    - `spent_usd` returns what a provider's resources that are over have cost, in all processes of the run, by its
      journal.
    - `secret` returns the token of a host by its name, the same in each incarnation. A host that has not heard from the
      run for `orchestrator_timeout_s` ends.
    """

    run: str
    run_dir: Path
    endpoint: Endpoint
    worker_command: tuple[str, ...]
    host_command: tuple[str, ...] = ()
    pass_env: tuple[str, ...] = ()
    now_ns: Callable[[], Nanoseconds]
    note: Callable[[str, str], None] = lambda key, text: None
    spent_usd: Callable[[str], float] = lambda provider: 0.0
    secret: Callable[[str], str] = lambda host: secrets.token_urlsafe(32)
    acquire_timeout_s: float
    release_timeout_s: float
    orchestrator_timeout_s: float = 60.0
    pending_workers: PendingWorkers | None = None

    def tag(self, provider: str) -> str:
        """Return the name of this run's resources at a provider, which no other run has, whatever it is called."""
        return tagged(self.run, self.secret(provider))


Billing: TypeAlias = Literal["exact", "second", "minute", "hour"]
INCREMENTS_S: Mapping[Billing, int] = {"second": 1, "minute": 60, "hour": 3600}
"""Length of a billing increment; begun increments count whole."""


USD_MAX = 1e6
"""Highest price of anything for an hour, a second or a call."""


class ProviderSettings(BaseModel):
    """Configuration that every provider has. Adapters add their own keys in a subclass."""

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)

    kind: str = Field(default="", description="which provider this is; else the section's name says it")
    max_workers: int = Field(1, ge=0, le=10_000, description="most workers to hold at once")
    usd_per_gpu_hour: float = Field(
        0.0, ge=0, le=USD_MAX, allow_inf_nan=False, description="price of one GPU for an hour"
    )
    billing: Billing = Field(
        default="exact",
        description="how a lease is billed: by exact time, or by each begun second, minute or hour",
    )
    gpus_per_worker: int = Field(1, ge=1, description="GPUs of one worker")
    engine: dict[str, Any] = Field(
        default_factory=dict, description="settings of its workers' engines that differ from [engine]"
    )

    @property
    def usd_per_gpu_hour_most(self) -> float | None:
        """Return the highest acceptable price, if the vendor sets prices and there is such a limit."""
        return None

    @property
    def billing_ns(self) -> Nanoseconds | msgspec.UnsetType:
        """Return the billing increment, if there is one."""
        return INCREMENTS_S[self.billing] * NS_PER_S if self.billing in INCREMENTS_S else msgspec.UNSET


REMARK = "remark: "
"""Prefix of the key of a note that the report shows as it is. The provider's name, a colon and a distinguishing text
follow."""


class Provider(Protocol):
    """One source of GPUs. Methods return quickly; what comes of them arrives through `emit`.

    For every `acquire` exactly one of LeaseGranted and LeaseRefused is emitted, and for every granted lease
    exactly one LeaseEnded, after which none of its processes is alive. `release` of an unknown or ended
    lease is a no-op; `release` of a lease that is not granted yet ends in LeaseRefused, or in LeaseGranted
    followed by LeaseEnded. LeaseRepriced may come of a granted lease at any time before its end. What the vendor bills
    and no lease had comes as StraysBilled.
    """

    Settings: ClassVar[type[ProviderSettings]]
    on_this_machine: ClassVar[bool] = False
    """Whether its workers run on the orchestrator's machine, with the run's files at hand."""
    trainer_of_turns: "ClassVar[type[Provider] | None]" = None
    """The provider of the trainer's device, where the run shares this provider's devices in turns with other jobs.

    The run must be a pool's job. Its processes outlive their leases, and what a run leaves of them ends without it.
    """
    name: str

    def __init__(self, name: str, settings: ProviderSettings, context: ProviderContext) -> None: ...

    @classmethod
    def elsewhere(cls, settings: Any) -> bool:
        """Whether its workers run on other machines, and so cannot dial this machine's loopback."""
        ...

    async def adopt(self, known: Sequence[KnownLease], emit: Emit) -> list[LeaseId]:
        """Take over what earlier processes of the run have left of these leases; end everything else that they left.

        Called once, before `start`. A granted lease that is over ends by LeaseEnded with its cause. A requested lease
        that turns out to exist is granted by LeaseGranted. Returns the requested leases that do not exist: they may be
        requested again.
        """
        ...

    async def start(self, emit: Emit) -> None:
        """Begin to report offers. Raises `ProviderUnavailable`, with the reason, if the provider can never give
        anything."""
        ...

    async def acquire(self, request: LeaseRequest) -> None: ...

    async def release(self, lease: LeaseId, reason: str = "") -> None:
        """End a lease. `reason` is the run's; it is "boot_timeout" if no worker of the lease has joined in time."""
        ...

    def bar(self, lease: LeaseId) -> None:
        """A worker of the lease has lied: after the lease's end, do not lease its place again in this run.

        Does nothing for a lease that is unknown or has ended.
        """
        ...

    @property
    def closing_s(self) -> float:
        """The longest time that `aclose` may take."""
        ...

    @property
    def waits_for(self) -> str:
        """What `aclose` waits for at the moment, in words."""
        ...

    async def aclose(self) -> str:
        """End every lease and stop reporting. Safe to call twice.

        Returns what is not proven to be gone, with where to look for it; empty if nothing can be left.
        """
        ...


class VendorFinding(msgspec.Struct, frozen=True, kw_only=True):
    """One check: what was checked, the result, and how to mend it if it is not `ok`."""

    what: str
    ok: bool
    found: str
    mend: str = ""


class CapacityNow(msgspec.Struct, frozen=True, kw_only=True):
    """The capacity of one place now; `why` there is none, if there is none. `score` is the vendor's, 1 to 10."""

    place: str
    usd_per_gpu_hour: float
    gpus_per_worker: int
    usable: bool
    why: str = ""
    score: int | None = None
    since: str = ""
    """The time (UTC) from which the price is valid."""


class Examination(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a provider's class method `examine(name, settings)`, which may block for some seconds.

    Kinds of providers without this method are on this machine, or need no examination.
    """

    findings: tuple[VendorFinding, ...] = ()
    capacity: tuple[CapacityNow, ...] = ()


class ProviderUnavailable(Exception):
    """The provider cannot give anything. The message names the fault and how to mend it."""


class ProviderSilent(ProviderUnavailable, Outage):
    """The provider does not answer now."""


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
