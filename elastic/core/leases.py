"""The lease table: the right to use GPUs, from request to end, and what each provider offers now."""

from dataclasses import dataclass, field

from elastic.core.transitions import Story, take_transition
from elastic.core.types import EndCause, LeaseId, LeaseState, Nanoseconds, Offer, WorkerId

LIVE = (LeaseState.GRANTED, LeaseState.RELEASING)


@dataclass(slots=True)
class Lease:
    id: LeaseId
    offer: Offer
    state: LeaseState = LeaseState.REQUESTED
    workers: tuple[WorkerId, ...] = ()
    expires_at_ns: Nanoseconds | None = None
    under_notice: bool = False
    release_reason: str = ""
    cause: EndCause | None = None
    story: Story = field(default_factory=Story)

    @property
    def provider(self) -> str:
        return self.offer.provider

    @property
    def live(self) -> bool:
        return self.state in LIVE


class LeaseTable:
    """Leases that are not over, offers by provider, and each provider's refusals in a row."""

    def __init__(self) -> None:
        self.leases: dict[LeaseId, Lease] = {}
        self.offers: dict[str, Offer] = {}
        self.refusals: dict[str, int] = {}
        self._issued: dict[str, int] = {}

    def request(self, provider: str) -> Lease:
        number = self._issued.get(provider, 0) + 1
        self._issued[provider] = number
        lease = Lease(f"{provider}-{number}", self.offers[provider])
        self.leases[lease.id] = lease
        return lease

    def held(self, provider: str) -> int:
        """Leases of a provider that are asked for, granted or on their way back."""
        return sum(lease.provider == provider for lease in self.leases.values())

    def move(self, lease: Lease, state: LeaseState, now_ns: Nanoseconds, cause: str) -> None:
        """Change a lease's state; raises `IllegalTransition` where the table forbids it."""
        take_transition(lease.id, lease.state, state, lease.story, now_ns, cause)
        lease.state = state
        if state in (LeaseState.ENDED, LeaseState.REFUSED):
            del self.leases[lease.id]
