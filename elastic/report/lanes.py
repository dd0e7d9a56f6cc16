"""Each worker's life as a lane: booting, ready, on notice, and how it ended."""

from collections.abc import Sequence

import msgspec

from elastic.core import events as e
from elastic.core.ledger import DeviceBook
from elastic.core.types import NS_PER_S, Nanoseconds
from elastic.report.usage import LeaseEnd
from elastic.runtime.journal import JournalReader


class Lane(msgspec.Struct, frozen=True, kw_only=True):
    """One worker from its lease's grant on. `ready_s` is when it first had weights, `notice_s` when its end was known.

    `cause` is why its lease ended, empty while it has not.
    """

    worker: str
    provider: str
    opened_s: float
    ready_s: float | None
    notice_s: float | None
    closed_s: float
    cause: str


def lanes(
    journal: JournalReader, books: Sequence[DeviceBook], ends: Sequence[LeaseEnd], end_ns: Nanoseconds
) -> list[Lane]:
    """Workers in the order in which they came."""
    ready: dict[str, float] = {}
    notice: dict[str, float] = {}
    for t_ns, event in journal.events_of("WorkerJoined", "WeightsApplied", "LeaseNotice"):
        if isinstance(event, e.LeaseNotice):
            notice.setdefault(event.lease, t_ns / NS_PER_S)
        elif isinstance(event, e.WeightsApplied) or (
            isinstance(event, e.WorkerJoined) and event.weights_version is not None
        ):
            ready.setdefault(event.worker, t_ns / NS_PER_S)
    causes = {end.lease: end.cause for end in ends}
    return [
        Lane(
            worker=book.worker,
            provider=book.provider,
            opened_s=book.opened_ns / NS_PER_S,
            ready_s=ready.get(book.worker),
            notice_s=notice.get(book.lease),
            closed_s=(end_ns if book.closed_ns is None else book.closed_ns) / NS_PER_S,
            cause=causes.get(book.lease, ""),
        )
        for book in sorted(books, key=lambda book: (book.opened_ns, book.worker))
    ]
