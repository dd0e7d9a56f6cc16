"""The lease table: the right to use GPUs, from request to end, and what each provider offers now."""

import re
from collections import Counter, deque
from dataclasses import dataclass, field

import msgspec

from elastic.core.events import WorkerJoined
from elastic.core.ids import lease_id, parse_lease
from elastic.core.transitions import Story, take_transition
from elastic.core.types import NS_PER_S, LeaseId, LeaseState, Nanoseconds, Offer, WorkerId

READY_TIMES_KEPT = 8
"""Remembered ready times of a provider's workers: enough to show slow workers, few enough to forget a bad hour."""
LIVE = (LeaseState.GRANTED, LeaseState.RELEASING)
STARTS_MAX = 2
"""Starts that fail for the same cause, one after the other, after which no other one is tried."""
_FIGURES = re.compile(r"[0-9a-f]*[0-9][0-9a-f]*")


@dataclass(slots=True)
class Lease:
    id: LeaseId
    offer: Offer
    state: LeaseState = LeaseState.REQUESTED
    workers: tuple[WorkerId, ...] = ()
    expires_at_ns: Nanoseconds | None = None
    leaving: bool = False
    replaces: LeaseId | None = None
    release_reason: str = ""
    story: Story = field(default_factory=Story)

    @property
    def provider(self) -> str:
        return self.offer.provider

    @property
    def live(self) -> bool:
        return self.state in LIVE

    @property
    def goes(self) -> bool:
        """Whether it is on its way back, or will be once it is granted."""
        return self.leaving or self.state is LeaseState.RELEASING or bool(self.release_reason)


@dataclass(slots=True)
class FailedStarts:
    """Why the last workers of a provider have failed before they joined, how many in a row did so, and how many leases
    it had been asked for by then."""

    fault: str
    times: int
    asked: int


class LeaseTable:
    """Leases that are not over, offers by provider, and each provider's failures in a row.

    `worker_bound` is how many workers are worth having in all, None while that is not known. `lull_since_ns` is since
    when there are no rollouts to do, where leases are given back meanwhile; nothing is asked for of providers that are
    `paused`. `slices` has requests that wait for a turn on a shared pool. Providers are `stopped`, each for a cause,
    whose workers cannot start.
    """

    def __init__(self) -> None:
        self.leases: dict[LeaseId, Lease] = {}
        self.offers: dict[str, Offer] = {}
        self.failures: dict[str, int] = {}
        self.failed_starts: dict[str, FailedStarts] = {}
        self.stopped: dict[str, str] = {}
        self.newly_ready: dict[LeaseId, None] = {}
        self._ready_ns: dict[str, deque[Nanoseconds]] = {}
        self.worker_bound: int | None = None
        self.lull_since_ns: Nanoseconds | None = None
        self.last_lull_ns: Nanoseconds | None = None
        self.paused: dict[str, None] = {}
        self.slices: dict[LeaseId, None] = {}
        self.early: dict[WorkerId, WorkerJoined] = {}
        """Workers that have come while their leases were asked for: how they have joined."""
        self._issued: dict[str, int] = {}
        self._asked: Counter[str] = Counter()
        self._held: Counter[str] = Counter()

    def request(self, provider: str, replaces: LeaseId | None = None) -> Lease:
        number = self._issued.get(provider, 0) + 1
        self._issued[provider] = number
        lease = Lease(lease_id(provider, number), self.offers[provider], replaces=replaces)
        self.leases[lease.id] = lease
        self._asked[provider] += 1
        self._held[provider] += 1
        return lease

    def failed_to_start(self, lease: Lease, fault: str) -> bool:
        """Note why no worker of a lease has ever joined; returns whether another start would fail as well.

        A lease that was asked for before the last such failure tells nothing new.
        """
        past = self.failed_starts.get(lease.provider)
        if past is not None and parse_lease(lease.id)[1] <= past.asked:
            return False
        repeated = past is not None and _FIGURES.sub("", past.fault) == _FIGURES.sub("", fault)
        times = past.times + 1 if past is not None and repeated else 1
        self.failed_starts[lease.provider] = FailedStarts(fault, times, self._issued[lease.provider])
        return times >= STARTS_MAX

    def offer_again(self, provider: str) -> bool:
        """Forget why workers of the provider did not start; returns whether it was stopped for that."""
        self.failed_starts.pop(provider, None)
        return self.stopped.pop(provider, None) is not None

    def took_to_get_ready(self, lease: LeaseId, provider: str, duration_ns: Nanoseconds) -> None:
        """A worker is ready for the first time, so long after its lease was granted."""
        self.newly_ready[lease] = None
        self._ready_ns.setdefault(provider, deque(maxlen=READY_TIMES_KEPT)).append(duration_ns)

    def ready_ns(self, provider: str) -> Nanoseconds | None:
        """The longest that its last workers took to get ready; None before the first."""
        return max(self._ready_ns.get(provider, ()), default=None)

    def mean_ready_ns(self, provider: str) -> float | None:
        """Return the mean time until the provider's last workers were ready; None before the first."""
        times_ns = self._ready_ns.get(provider)
        return sum(times_ns) / len(times_ns) if times_ns else None

    @property
    def grant_within_ns(self) -> Nanoseconds:
        """The longest that any provider's request may wait for a turn on a shared pool; 0 where nothing is shared."""
        longest_s = 0.0
        for offer in self.offers.values():
            if offer.grant_within_s and offer.grant_within_s > longest_s:
                longest_s = offer.grant_within_s
        return round(longest_s * NS_PER_S)

    def replaced(self) -> set[LeaseId]:
        """Leases whose replacements are asked for, or there, before they are over."""
        return {x.replaces for x in self.leases.values() if x.replaces is not None and x.replaces in self.leases}

    def replacements_left(self, provider: str) -> int:
        """How many of the replacements that the provider offers have not been asked for."""
        offer = self.offers.get(provider)
        asked = (x for x in self.leases.values() if x.provider == provider and x.replaces is not None)
        taken = sum(lease.state is LeaseState.REQUESTED for lease in asked)
        return offer.replacements - taken if offer is not None else 0

    def issuer(self, lease: LeaseId) -> str | None:
        """The provider that was once asked for this lease, also after its end."""
        try:
            provider, number = parse_lease(lease)
        except ValueError:
            return None
        return provider if 0 < number <= self._issued.get(provider, 0) else None

    def asked(self, provider: str) -> int:
        """Leases of a provider that are asked for and not yet granted."""
        return self._asked[provider]

    @property
    def coming(self) -> bool:
        """Whether any lease is asked for."""
        return any(self._asked.values())

    def available(self, provider: str) -> int:
        """Leases of a provider's offer that are not asked for yet, nor granted since it was made."""
        return max(0, self.offers[provider].available - self._asked[provider])

    def held(self, provider: str) -> int:
        """Leases of a provider that are asked for, granted or on their way back."""
        return self._held[provider]

    def move(self, lease: Lease, state: LeaseState, now_ns: Nanoseconds, cause: str) -> None:
        """Change a lease's state; raises `IllegalTransition` where the table forbids it."""
        take_transition(lease.id, lease.state, state, lease.story, now_ns, cause)
        if lease.state is LeaseState.REQUESTED:
            self._asked[lease.provider] -= 1
            self.slices.pop(lease.id, None)
        if state is LeaseState.GRANTED and lease.replaces is None:
            offer = self.offers[lease.provider]
            self.offers[lease.provider] = msgspec.structs.replace(offer, available=offer.available - 1)
        lease.state = state
        if state in (LeaseState.ENDED, LeaseState.REFUSED):
            self._held[lease.provider] -= 1
            del self.leases[lease.id]
