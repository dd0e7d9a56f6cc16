"""Draws each worker's lifetime as a lane: booting, ready, on notice, its end, and its replacement."""

from collections.abc import Sequence
from itertools import groupby
from operator import attrgetter

import msgspec

from elastic.core import events as e
from elastic.core.ledger import DeviceBook
from elastic.core.types import NS_PER_S, EndCause, Nanoseconds
from elastic.report.history import History
from elastic.report.usage import LeaseEnd

TAKEN = frozenset({EndCause.PREEMPTED, EndCause.EXPIRED})


class WorkerLane(msgspec.Struct, frozen=True, kw_only=True):
    """One worker from its lease's grant on. `ready_s` is when it first had weights, `notice_s` when its end was known.

    `expires_s` is when its lease would have ended by time, None without such a limit, and `cause` why it ended,
    empty while it has not. `lost` workers were taken away, or left because their time was over. `segment` counts the
    run's from 1 on.
    """

    worker: str
    segment: int
    provider: str
    opened_s: float
    ready_s: float | None
    notice_s: float | None
    expires_s: float | None
    closed_s: float
    cause: str
    lost: bool

    @property
    def foreseen_s(self) -> float:
        """When a replacement of this worker could have come, if it was lost.

        The replacement of a worker whose lease ends by time is requested before that end, but not before the worker
        itself was useful.
        """
        if self.expires_s is not None and self.ready_s is not None:
            return self.ready_s
        return self.closed_s if self.notice_s is None else self.notice_s


def replacements(lanes: Sequence[WorkerLane]) -> set[str]:
    """The workers that came in place of lost ones: for each loss the provider's next, from when it was foreseen on."""
    found: set[str] = set()
    by_origin = attrgetter("segment", "provider")
    for _, owned in groupby(sorted(lanes, key=by_origin), by_origin):
        in_order = sorted(owned, key=attrgetter("opened_s"))
        losses = sorted((lane for lane in in_order if lane.lost), key=attrgetter("foreseen_s"))
        for lane in in_order:
            if losses and losses[0].foreseen_s <= lane.opened_s and losses[0] is not lane:
                losses.pop(0)
                found.add(lane.worker)
    return found


def lanes(
    history: History,
    books: Sequence[DeviceBook],
    ends: Sequence[LeaseEnd],
    end_ns: Nanoseconds,
    drain_ns: Nanoseconds,
) -> list[WorkerLane]:
    """Workers in the order in which they came. They leave up to `drain_ns` before their lease ends by time."""
    ready: dict[str, float] = {}
    notice: dict[str, float] = {}
    expiry_ns: dict[str, Nanoseconds] = {}
    for t_ns, event in history.events_of(e.LeaseGranted, e.WorkerJoined, e.WeightsApplied, e.LeaseNotice):
        if isinstance(event, e.LeaseNotice):
            notice.setdefault(event.lease, t_ns / NS_PER_S)
        elif isinstance(event, e.LeaseGranted):
            if event.expires_at_ns is not None:
                expiry_ns.setdefault(event.lease, event.expires_at_ns)
        elif isinstance(event, e.WeightsApplied) or event.weights_version is not None:
            ready.setdefault(event.worker, t_ns / NS_PER_S)
    causes = {end.lease: end.cause for end in ends}
    return [
        WorkerLane(
            worker=book.worker,
            segment=history.segment_at(book.opened_ns),
            provider=book.provider,
            opened_s=book.opened_ns / NS_PER_S,
            ready_s=ready.get(book.worker),
            notice_s=notice.get(book.lease),
            expires_s=None if expires_ns is None else expires_ns / NS_PER_S,
            closed_s=(end_ns if book.closed_ns is None else book.closed_ns) / NS_PER_S,
            cause=cause,
            lost=cause in TAKEN
            or (expires_ns is not None and book.closed_ns is not None and book.closed_ns >= expires_ns - drain_ns),
        )
        for book in sorted(books, key=lambda book: (book.opened_ns, book.worker))
        for expires_ns, cause in [(expiry_ns.get(book.lease), causes.get(book.lease, ""))]
    ]
