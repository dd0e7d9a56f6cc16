"""What was refused: at the door, frames that cannot be true, and unauthenticated peers; by providers, leases. And
their remarks."""

import re
from collections import Counter

import msgspec

from elastic.core import events as e
from elastic.core.ids import provider_of
from elastic.report.history import History
from elastic.runtime.refusals import REFUSED_NOTE, RefusalCount
from providers.base import REMARK


def refused_of(history: History) -> list[RefusalCount]:
    """Refusals by worker and reason over all segments, whose workers have different names."""
    counts: dict[tuple[str, str, str], int] = {}
    for segment in history.segments:
        for refused in msgspec.json.decode(segment.meta().get(REFUSED_NOTE, "[]"), type=list[RefusalCount]):
            key = (f"{segment.prefix}{refused.worker}" if refused.worker else "", refused.reason, refused.what)
            counts[key] = counts.get(key, 0) + refused.count
    return [
        RefusalCount(worker=worker, reason=reason, count=count, what=what)
        for (worker, reason, what), count in counts.items()
    ]


class LeaseRefusals(msgspec.Struct, frozen=True, kw_only=True):
    """How often a provider has refused leases for a reason."""

    provider: str
    reason: str
    count: int


class Remark(msgspec.Struct, frozen=True, kw_only=True):
    provider: str
    words: str


def remarks_of(history: History) -> list[Remark]:
    """Return the providers' last remarks for the report."""
    return [
        Remark(provider=key.removeprefix(REMARK).partition(":")[0], words=words)
        for segment in history.segments
        for key, words in segment.meta().items()
        if key.startswith(REMARK)
    ]


_TIMES = re.compile(r"\b\d+(\.\d+)? s\b")


def refused_leases_of(history: History) -> list[LeaseRefusals]:
    """The commonest first. Reasons that differ in a time alone are one, with the first one's words."""
    counts: Counter[tuple[str, str]] = Counter()
    words: dict[tuple[str, str], str] = {}
    for _, event in history.events_of(e.LeaseRefused):
        key = provider_of(event.lease), _TIMES.sub("", event.reason)
        counts[key] += 1
        words.setdefault(key, event.reason)
    return [LeaseRefusals(provider=key[0], reason=words[key], count=count) for key, count in counts.most_common()]
