"""The account of every GPU-nanosecond: where each lease's time went, exact to the nanosecond.

A device's book opens when its lease is granted and closes when the lease ends. A *cursor* moves through that
time as the worker's own reports come in; whatever lies between the last report and the end is attributed by how
the lease ended. `OVERHEAD_ACCOUNTS` says which accounts are overhead, and why prefill that an engine repeats of its own
accord is none. Source: docs/design.md, "A GPU-second"; the papers' allocation overhead is that of ROSE §6.1.
"""

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Self

from msgspec import UNSET, UnsetType

from elastic.core.ids import lease_of
from elastic.core.types import (
    NS_PER_S,
    OVERHEAD_ACCOUNTS,
    UNPRICED_ACCOUNTS,
    Account,
    LeaseId,
    Nanoseconds,
    Offer,
    WorkerId,
)

NANO_USD_PER_USD = 1_000_000_000
NS_PER_HOUR = 3600 * NS_PER_S
BILLING_SKEW_NS = NS_PER_S
"""How much earlier than it was heard of a lease may have begun to be billed, where that may cost a whole increment."""


CLOSED_KEPT = 256
"""Books that are kept whole after their end. What is wrong with one shows soon; older ones are folded, and stand in the
journal."""


@dataclass(frozen=True, slots=True)
class Price:
    """The price of one device: nano-dollars per hour, the billing increment, and the least time that is billed, 0 for
    none."""

    nano_usd_per_hour: int
    increment_ns: Nanoseconds = 0
    least_ns: Nanoseconds = 0

    @classmethod
    def most_of(cls, offer: Offer) -> Self:
        """The highest price that a lease of the offer may have."""
        usd = offer.usd_per_gpu_hour_most
        per_gpu = round((offer.usd_per_gpu_hour if usd is UNSET else usd) * NANO_USD_PER_USD)
        return cls(per_gpu * offer.gpus_per_worker, offer.billing_ns or 0, offer.least_billed_ns or 0)

    def billed_ns(self, duration_ns: Nanoseconds) -> Nanoseconds:
        """The time that is paid for: begun increments count whole."""
        duration_ns = max(duration_ns, self.least_ns)
        if not self.increment_ns:
            return duration_ns
        return -(-duration_ns // self.increment_ns) * self.increment_ns

    def most_nano_usd(self, duration_ns: Nanoseconds) -> int:
        """Return the most that this duration can cost, whenever billing begins."""
        skew_ns = BILLING_SKEW_NS if self.increment_ns else 0
        return -(-self.billed_ns(duration_ns + skew_ns) * self.nano_usd_per_hour // NS_PER_HOUR)


@dataclass(frozen=True, slots=True)
class Repriced:
    """What a device had cost `after_ns` after its grant, by its provider's own account, and its hour's price since."""

    after_ns: Nanoseconds
    nano_usd: int
    nano_usd_per_hour: int

    def nano_usd_for(self, duration_ns: Nanoseconds, least_ns: Nanoseconds) -> int:
        since_ns = max(0, duration_ns - self.after_ns)
        least_nano_usd = -(-least_ns * self.nano_usd_per_hour // NS_PER_HOUR)
        return max(least_nano_usd, self.nano_usd - (-since_ns * self.nano_usd_per_hour // NS_PER_HOUR))


@dataclass(slots=True)
class DeviceBook:
    """One worker's share of a lease: `gpus` GPUs from `opened_ns` to `closed_ns`, billed by `billing_ns` if it is
    set, and for `least_ns` at the least. `charged_ns` is what the provider charges for by its own account, if it has
    said so; before that, `repriced` is what it says of the price, if that is not the offer's.

    A device that is had by permit `parks` in between. No other worker is believed to park.
    """

    lease: LeaseId
    worker: WorkerId
    provider: str
    gpus: int
    nano_usd_per_gpu_hour: int
    opened_ns: Nanoseconds
    cursor_ns: Nanoseconds
    closed_ns: Nanoseconds | None = None
    reported: bool = False
    accounts_ns: dict[Account, int] = field(default_factory=dict[Account, int])
    credited_ns: dict[Account, int] = field(default_factory=dict[Account, int])
    decoded_tokens: int = 0
    billing_ns: Nanoseconds | UnsetType = UNSET
    charged_ns: Nanoseconds | UnsetType = UNSET
    parks: bool | UnsetType = UNSET
    least_ns: Nanoseconds | UnsetType = UNSET
    repriced: Repriced | UnsetType = UNSET

    @property
    def price(self) -> Price:
        """Its price, which has no minimum any more once the provider has said what it charges."""
        least_ns = (self.least_ns or 0) if self.charged_ns is UNSET else 0
        return Price(self.gpus * self.nano_usd_per_gpu_hour, self.billing_ns or 0, least_ns)

    def add(self, account: Account, duration_ns: int) -> None:
        self.accounts_ns[account] = self.accounts_ns.get(account, 0) + duration_ns
        self.cursor_ns += duration_ns

    @property
    def unpriced_ns(self) -> Nanoseconds:
        """The time in which the device was others' to pay for."""
        return sum(self.accounts_ns.get(account, 0) for account in UNPRICED_ACCOUNTS)

    @property
    def imbalance_ns(self) -> int:
        """Return the difference between a closed book's duration and the sum of its accounts."""
        return abs(
            sum(self.accounts_ns.values())
            - ((self.cursor_ns if self.closed_ns is None else self.closed_ns) - self.opened_ns)
        )

    def cost_nano_usd(self, now_ns: Nanoseconds) -> int:
        end_ns = now_ns if self.closed_ns is None else self.closed_ns
        price = self.price
        if self.repriced is not UNSET and self.charged_ns is UNSET:
            return self.repriced.nano_usd_for(end_ns - self.opened_ns, price.least_ns)
        return price.billed_ns(self._charged_ns(end_ns)) * price.nano_usd_per_hour // NS_PER_HOUR

    def most_nano_usd(self, now_ns: Nanoseconds) -> int:
        """Return the most that the device can have cost."""
        end_ns = now_ns if self.closed_ns is None else self.closed_ns
        if self.repriced is not UNSET and self.charged_ns is UNSET:
            return self.repriced.nano_usd_for(end_ns - self.opened_ns, self.price.least_ns)
        return self.price.most_nano_usd(max(0, self._charged_ns(end_ns)))

    def _charged_ns(self, end_ns: Nanoseconds) -> Nanoseconds:
        return end_ns - self.opened_ns - self.unpriced_ns if self.charged_ns is UNSET else self.charged_ns


@dataclass(slots=True)
class FoldedBooks:
    """Closed books of one provider, added up: the run's bill and balance need no more of them."""

    books: int = 0
    nano_usd: int = 0
    most_nano_usd: int = 0
    imbalance_ns: int = 0
    gpu_ns: dict[Account, int] = field(default_factory=dict[Account, int])

    def add(self, book: DeviceBook) -> None:
        assert book.closed_ns is not None
        self.books += 1
        self.nano_usd += book.cost_nano_usd(book.closed_ns)
        self.most_nano_usd += book.most_nano_usd(book.closed_ns)
        self.imbalance_ns += book.imbalance_ns
        for account, duration_ns in book.accounts_ns.items():
            self.gpu_ns[account] = self.gpu_ns.get(account, 0) + book.gpus * duration_ns


class Ledger:
    """All books of a run. A book's accounts always sum to its cursor minus its opening.

    The last `CLOSED_KEPT` closed ones are kept; older ones are `folded`, by provider, so that what a run holds does not
    grow with the leases that it has had. `strays_nano_usd` is what each provider has billed for what no lease had, and
    `closed_nano_usd_max` what that and all closed books have cost at the most.
    """

    def __init__(self) -> None:
        self.books: dict[WorkerId, DeviceBook] = {}
        self.folded: dict[str, FoldedBooks] = {}
        self.strays_nano_usd: dict[str, int] = {}
        self.closed_nano_usd_max = 0
        self._closed: deque[WorkerId] = deque()
        self._folded_aliens: dict[WorkerId, None] = {}
        """Workers of folded books whose names are not their leases': other leases could bring them again."""

    def open(
        self,
        lease: LeaseId,
        worker: WorkerId,
        provider: str,
        gpus: int,
        usd_per_gpu_hour: float,
        now_ns: Nanoseconds,
        billing_ns: Nanoseconds | UnsetType = UNSET,
        parks: bool | UnsetType = UNSET,
        least_ns: Nanoseconds | UnsetType = UNSET,
    ) -> None:
        while len(self._closed) > CLOSED_KEPT:
            self._fold(self._closed.popleft())
        price = round(usd_per_gpu_hour * NANO_USD_PER_USD)
        self.books[worker] = DeviceBook(
            lease,
            worker,
            provider,
            gpus,
            price,
            now_ns,
            now_ns,
            billing_ns=billing_ns,
            parks=parks,
            least_ns=least_ns,
        )

    def reprice(self, worker: WorkerId, nano_usd: int, usd_per_gpu_hour: float, now_ns: Nanoseconds) -> None:
        """The provider says what the device has cost so far, its minimum aside, and what it costs from now on."""
        book = self.books.get(worker)
        if book is not None and book.closed_ns is None:
            per_hour = book.gpus * round(usd_per_gpu_hour * NANO_USD_PER_USD)
            book.repriced = Repriced(now_ns - book.opened_ns, nano_usd, per_hour)

    def bill_strays(self, provider: str, nano_usd: int) -> None:
        self.strays_nano_usd[provider] = self.strays_nano_usd.get(provider, 0) + nano_usd
        self.closed_nano_usd_max += nano_usd

    def closed_nano_usd(self, provider: str) -> int:
        """Return the most that the provider's closed books, and what no lease had, have cost."""
        past = self.strays_nano_usd.get(provider, 0)
        if (folded := self.folded.get(provider)) is not None:
            past += folded.most_nano_usd
        closed = (book for book in self.books.values() if book.provider == provider and book.closed_ns is not None)
        return past + sum(book.most_nano_usd(0) for book in closed)

    def knows(self, worker: WorkerId) -> bool:
        """Whether there was a book of this worker. Leases are never named twice, nor are workers named after them."""
        return worker in self.books or worker in self._folded_aliens

    def just_closed(self, lease: LeaseId) -> list[DeviceBook]:
        """The books of a lease that was the last to end."""
        last = (self.books[worker] for worker in reversed(self._closed))
        return list(takewhile(lambda book: book.lease == lease, last))

    def _fold(self, worker: WorkerId) -> None:
        book = self.books.pop(worker)
        self.folded.setdefault(book.provider, FoldedBooks()).add(book)
        if lease_of(worker) != book.lease:
            self._folded_aliens[worker] = None

    def report(
        self, worker: WorkerId, accounts_ns: Mapping[Account, int], decoded_tokens: int, now_ns: Nanoseconds
    ) -> None:
        """Credit what the worker says it did since its last report.

        `accounts_ns` is cumulative. What does not fit into the time that has passed here (a report that overtook
        its predecessor's delay) is carried to the next report; what came before a worker's first report and is
        not covered by it is booting.
        """
        book = self.books.get(worker)
        if book is None or book.closed_ns is not None:
            return
        if not book.parks and not UNPRICED_ACCOUNTS.isdisjoint(accounts_ns):
            accounts_ns = _priced(accounts_ns)
        credited_ns, had_ns = book.credited_ns, book.accounts_ns
        fresh = {
            account: ns
            for account in sorted(accounts_ns)
            if (ns := accounts_ns[account] - credited_ns.get(account, 0)) > 0
        }
        total_ns = sum(fresh.values())
        room_ns = now_ns - book.cursor_ns
        if not book.reported:
            book.reported = True
            book.add(Account.BOOTING, max(0, room_ns - total_ns))
            room_ns = now_ns - book.cursor_ns
        for account, ns in fresh.items() if total_ns <= room_ns else _fit(fresh, total_ns, room_ns):
            had_ns[account] = had_ns.get(account, 0) + ns
            credited_ns[account] = credited_ns.get(account, 0) + ns
            book.cursor_ns += ns
        book.decoded_tokens = max(book.decoded_tokens, decoded_tokens)

    def lose(self, worker: WorkerId, tokens: int) -> None:
        """`tokens` that the worker decoded will never be accepted: move their time from decode to lost."""
        book = self.books.get(worker)
        if book is None or tokens <= 0 or book.decoded_tokens <= 0:
            return
        decoded_ns = book.credited_ns.get(Account.DECODE, 0)
        moved_ns = min(tokens * decoded_ns // book.decoded_tokens, book.accounts_ns.get(Account.DECODE, 0))
        if moved_ns > 0:
            book.accounts_ns[Account.DECODE] -= moved_ns
            book.accounts_ns[Account.LOST] = book.accounts_ns.get(Account.LOST, 0) + moved_ns

    def close(
        self, worker: WorkerId, now_ns: Nanoseconds, *, clean: bool, charged_ns: Nanoseconds | UnsetType = UNSET
    ) -> None:
        """The lease is over; what is left was draining (after a goodbye), booting (never spoke) or is unattributed."""
        book = self.books.get(worker)
        if book is None or book.closed_ns is not None:
            return
        spoken = Account.DRAINING if clean else Account.UNATTRIBUTED
        book.add(spoken if book.reported else Account.BOOTING, now_ns - book.cursor_ns)
        book.closed_ns, book.charged_ns = now_ns, charged_ns
        self.closed_nano_usd_max += book.most_nano_usd(now_ns)
        self._closed.append(worker)

    def imbalance_ns(self) -> int:
        """Sum over the closed books of |accounts − duration|; anything but zero is a bug."""
        kept = sum(book.imbalance_ns for book in self.books.values() if book.closed_ns is not None)
        return kept + sum(folded.imbalance_ns for folded in self.folded.values())

    def bill_nano_usd(self, now_ns: Nanoseconds) -> dict[str, int]:
        """Cost so far by provider."""
        bill = dict(self.strays_nano_usd)
        for provider, folded in self.folded.items():
            bill[provider] = bill.get(provider, 0) + folded.nano_usd
        for book in self.books.values():
            bill[book.provider] = bill.get(book.provider, 0) + book.cost_nano_usd(now_ns)
        return bill


def overhead_share(accounts_ns: Mapping[Account, int]) -> float:
    """Allocation overhead: the share of time that went to getting, losing and refilling capacity, of all that is paid
    for."""
    total_ns = sum(ns for account, ns in accounts_ns.items() if account not in UNPRICED_ACCOUNTS)
    return sum(accounts_ns.get(account, 0) for account in OVERHEAD_ACCOUNTS) / total_ns if total_ns else 0.0


def _priced(accounts_ns: Mapping[Account, int]) -> Mapping[Account, int]:
    """What is said of a device that never parks, with the time that would have no price as idle time."""
    unpriced_ns = sum(accounts_ns.get(account, 0) for account in UNPRICED_ACCOUNTS)
    priced = {account: ns for account, ns in accounts_ns.items() if account not in UNPRICED_ACCOUNTS}
    return priced | {Account.IDLE: priced.get(Account.IDLE, 0) + unpriced_ns}


def _fit(fresh: Mapping[Account, int], total_ns: int, room_ns: int) -> Iterable[tuple[Account, int]]:
    """`fresh`, which is larger than `room_ns`, scaled down to that, exact to the nanosecond."""
    scaled = {account: ns * room_ns // total_ns for account, ns in fresh.items()}
    largest = max(fresh, key=lambda account: fresh[account])
    scaled[largest] += room_ns - sum(scaled.values())
    return scaled.items()
