"""What was refused at the door: frames that cannot be true, and strangers."""

import msgspec

from elastic.report.history import History
from elastic.runtime.refusals import REFUSED_NOTE, RefusalCount


def refused_of(history: History) -> list[RefusalCount]:
    """Refusals by worker and reason over all segments, whose workers have different names."""
    counts: dict[tuple[str, str], int] = {}
    for segment in history.segments:
        for refused in msgspec.json.decode(segment.meta().get(REFUSED_NOTE, "[]"), type=list[RefusalCount]):
            key = (f"{segment.prefix}{refused.worker}" if refused.worker else "", refused.reason)
            counts[key] = counts.get(key, 0) + refused.count
    return [RefusalCount(worker=worker, reason=reason, count=count) for (worker, reason), count in counts.items()]
