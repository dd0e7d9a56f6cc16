"""What providers have refused, as the report counts it."""

from collections.abc import Iterator
from typing import Any, cast

from elastic.core import events as e
from elastic.core.types import NS_PER_S, EndCause
from elastic.report import tables
from elastic.report.refusals import LeaseRefusals, Remark, refused_leases_of
from elastic.runtime.journal import event_row
from providers.base import REMARK


class Told:
    """A history of these events alone."""

    def __init__(self, *events: e.Event) -> None:
        self._events = events

    def events_of(self, *kinds: type[e.Event]) -> Iterator[tuple[int, e.Event]]:
        return ((0, event) for event in self._events if isinstance(event, kinds))


def test_refusals_that_differ_in_a_time_alone_are_one() -> None:
    told = Told(
        e.LeaseRefused(lease="ec2-1", reason="no capacity; the next is tried in 14 s"),
        e.LeaseRefused(lease="ec2-2", reason="no capacity; the next is tried in 3 s"),
        e.LeaseRefused(lease="spot-1", reason="none left"),
        e.LeaseEnded(lease="spot-2", cause=e.EndCause.LOST),
    )
    assert refused_leases_of(cast(Any, told)) == [
        LeaseRefusals(provider="ec2", reason="no capacity; the next is tried in 14 s", count=2),
        LeaseRefusals(provider="spot", reason="none left", count=1),
    ]


def test_why_leases_were_lost_and_what_providers_remark_is_told(summary_of) -> None:
    def fill(run) -> None:
        for number, (cause, detail) in enumerate(
            [(EndCause.BOOT_TIMEOUT, "no worker of i-1 has joined"), (EndCause.PREEMPTED, "EC2 took i-2 back")]
        ):
            run.open(f"ec2-{number}", "ec2", 0.0)
            end = e.LeaseEnded(lease=f"ec2-{number}", cause=cause, detail=detail)
            run.journal.append(event_row(end, NS_PER_S))
        run.books()
        run.meta(**{f"{REMARK}ec2: pool": "passed over once", "other": "no remark"})
        run.meta(**{f"{REMARK}ec2: pool": "passed over twice"})

    summary = summary_of(fill)
    assert summary.remarks == [Remark(provider="ec2", words="passed over twice")]
    found = {table.title: table.rows for table in tables.tables(summary)}
    assert found["Lost leases"] == [["ec2-0", "1 s", "boot timeout", "no worker of i-1 has joined", "not replaced"]]
    assert found["Remarks of providers"] == [["ec2", "passed over twice"]]
