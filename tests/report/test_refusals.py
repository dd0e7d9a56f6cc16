"""What providers have refused, as the report counts it."""

from collections.abc import Iterator
from typing import Any, cast

from elastic.core import events as e
from elastic.report.refusals import LeaseRefusals, refused_leases_of


class Told:
    """A history of these events alone."""

    def __init__(self, *events: e.Event) -> None:
        self._events = events

    def events_of(self, *kinds: str) -> Iterator[tuple[int, e.Event]]:
        return ((0, event) for event in self._events if type(event).__name__ in kinds)


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
