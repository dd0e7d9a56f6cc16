"""What GPUs were paid for and what they did with their time, from a run's books.

GPU time is device time × GPUs. A book left open by a crash ends with the journal, and what it has not accounted
for is unattributed.
"""

from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import final

import msgspec

from elastic.core import events as e
from elastic.core.ledger import NANO_USD_PER_USD, DeviceBook, Ledger, overhead_share
from elastic.core.types import DEATHS, NS_PER_S, SHARED_ACCOUNTS, Account, EndCause, Nanoseconds
from elastic.report.history import History
from providers.joined import LABEL_NOTE

ORDERLY_ENDS = frozenset({EndCause.RELEASED, EndCause.EXPIRED})
"""Ends after which no time should be missing from a lease's books: nothing was taken away or given up."""


@final
class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """What some GPUs did and cost. `accounts_s` has every account, in GPU-seconds, and sums to `gpu_s`;
    those of shared devices are there where a device is shared.

    `overhead_share` is docs/design.md's: overhead accounts over all time. `preempted_share` is the papers' (ROSE §6.1):
    preempted GPUs × recovery time over all time. There a lease that ends by time is preempted too, and a recovery is
    the time that the worker which came in place of a lost one spent booting and loading. `preemptions` counts the
    leases that were taken away before their time. `usd_per_gpu_hour` is what the GPU time came to, with minutes that
    were billed though not used and hours that were not billed though used.
    """

    gpu_s: float
    accounts_s: dict[str, float]
    overhead_share: float
    preempted_share: float
    usd: float
    usd_per_gpu_hour: float | None
    tokens: int
    tokens_per_s: float
    usd_per_million_tokens: float | None
    leases: int
    lease_ends: dict[str, int]
    preemptions: int


class JoinedUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Use of machines that joined by tickets with one label and one price."""

    label: str
    usd_per_gpu_hour: float
    leases: int
    gpu_s: float
    usd: float


class LeaseEnd(msgspec.Struct, frozen=True, kw_only=True):
    """How a lease ended. `replaced_s`: after a death, how long it took until the provider granted the next one."""

    at_s: float
    lease: str
    provider: str
    cause: str
    detail: str = ""
    replaced_s: float | None = None


def lease_ends(history: History, books: Sequence[DeviceBook]) -> list[LeaseEnd]:
    """The first end of each lease that was ever billed, in order of time."""
    provider_of = {book.lease: book.provider for book in books}
    ends: dict[str, LeaseEnd] = {}
    for t_ns, event in history.events_of(e.LeaseEnded):
        if event.lease in provider_of and event.lease not in ends:
            ends[event.lease] = LeaseEnd(
                at_s=t_ns / NS_PER_S,
                lease=event.lease,
                provider=provider_of[event.lease],
                cause=event.cause,
                detail=event.detail,
            )
    granted: dict[str, list[float]] = {}
    for book in sorted(books, key=lambda book: book.opened_ns):
        granted.setdefault(book.provider, []).append(book.opened_ns / NS_PER_S)
    return [_replaced(end, granted[end.provider]) if end.cause in DEATHS else end for end in ends.values()]


def _replaced(end: LeaseEnd, granted_s: list[float]) -> LeaseEnd:
    """The death with the first grant since, which is then no other death's."""
    at_s = next((at_s for at_s in granted_s if at_s >= end.at_s), None)
    if at_s is None:
        return end
    granted_s.remove(at_s)
    return msgspec.structs.replace(end, replaced_s=at_s - end.at_s)


def usage_of(
    books: Sequence[DeviceBook],
    ends: Sequence[LeaseEnd],
    replacements: Container[str],
    end_ns: Nanoseconds,
    tokens: int,
    strays_usd: float = 0.0,
) -> Usage:
    """What the devices of `books` came to by `end_ns`, with the tokens accepted from them, and with what was billed for
    what no lease had.

    `replacements` has the workers that came in place of lost ones.
    """
    leases = {book.lease for book in books}
    causes = dict(Counter(end.cause for end in ends if end.lease in leases).most_common())
    accounts_ns = _accounts_ns(books, end_ns)
    gpu_ns = sum(accounts_ns.values())
    usd = sum(ledger_of(books).bill_nano_usd(end_ns).values()) / NANO_USD_PER_USD + strays_usd
    return Usage(
        gpu_s=gpu_ns / NS_PER_S,
        accounts_s={account.value: ns / NS_PER_S for account, ns in accounts_ns.items()},
        overhead_share=overhead_share(accounts_ns),
        preempted_share=_starting_gpu_ns(b for b in books if b.worker in replacements) / gpu_ns if gpu_ns else 0.0,
        usd=usd,
        usd_per_gpu_hour=usd / gpu_ns * NS_PER_S * 3600 if gpu_ns else None,
        tokens=tokens,
        tokens_per_s=tokens * NS_PER_S / end_ns if end_ns else 0.0,
        usd_per_million_tokens=usd / tokens * 1e6 if tokens else None,
        leases=len(leases),
        lease_ends=causes,
        preemptions=causes.get(EndCause.PREEMPTED, 0),
    )


def strays_usd_of(history: History) -> Mapping[str, float]:
    """What each provider has billed for what no lease had."""
    usd: dict[str, float] = {}
    for _, event in history.events_of(e.StraysBilled):
        usd[event.provider] = usd.get(event.provider, 0.0) + event.usd
    return usd


def joined_usage(history: History, books: Sequence[DeviceBook]) -> list[JoinedUsage]:
    """By the label and the price of the tickets, in that order."""
    labels = {
        segment.prefix + key.removeprefix(LABEL_NOTE): label
        for segment in history.segments
        for key, label in segment.meta().items()
        if key.startswith(LABEL_NOTE)
    }
    grouped: dict[tuple[str, int], list[DeviceBook]] = {}
    for book in books:
        if book.lease in labels:
            grouped.setdefault((labels[book.lease], book.nano_usd_per_gpu_hour), []).append(book)
    return [
        JoinedUsage(
            label=label,
            usd_per_gpu_hour=price / NANO_USD_PER_USD,
            leases=len({book.lease for book in group}),
            gpu_s=sum(_accounts_ns(group, history.end_ns).values()) / NS_PER_S,
            usd=sum(book.cost_nano_usd(history.end_ns) for book in group) / NANO_USD_PER_USD,
        )
        for (label, price), group in sorted(grouped.items(), key=lambda entry: entry[0])
    ]


def unattributed_share(books: Sequence[DeviceBook], ends: Sequence[LeaseEnd]) -> float | None:
    """Over the leases that ended in order; None if none did."""
    orderly = {end.lease for end in ends if end.cause in ORDERLY_ENDS}
    accounts_ns = _accounts_ns([b for b in books if b.lease in orderly and b.closed_ns is not None], 0)
    total_ns = sum(accounts_ns.values())
    return accounts_ns[Account.UNATTRIBUTED] / total_ns if total_ns else None


def ledger_of(books: Iterable[DeviceBook]) -> Ledger:
    ledger = Ledger()
    ledger.books = {book.worker: book for book in books}
    return ledger


def _accounts_ns(books: Sequence[DeviceBook], end_ns: Nanoseconds) -> dict[Account, int]:
    """GPU-nanoseconds by account, every account named but those of shared devices where nothing is."""
    shared = {account for book in books for account in book.accounts_ns} & SHARED_ACCOUNTS
    accounts_ns = {account: 0 for account in Account if account not in SHARED_ACCOUNTS or account in shared}
    for book in books:
        for account, ns in book.accounts_ns.items():
            accounts_ns[account] += ns * book.gpus
        if book.closed_ns is None:
            accounts_ns[Account.UNATTRIBUTED] += (end_ns - book.cursor_ns) * book.gpus
    return accounts_ns


def _starting_gpu_ns(books: Iterable[DeviceBook]) -> int:
    starting = (Account.BOOTING, Account.LOADING)
    return sum(book.accounts_ns.get(account, 0) * book.gpus for book in books for account in starting)
