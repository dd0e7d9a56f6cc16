"""What was refused at the door: frames that cannot be true, and strangers."""

import msgspec

from elastic.report.history import History
from elastic.runtime.refusals import REFUSED_NOTE, RefusalCount


def refused_of(history: History) -> list[RefusalCount]:
    """By worker and reason, over all lives; the workers of different lives have different names."""
    counts: dict[tuple[str, str], int] = {}
    for life in history.lives:
        for refused in msgspec.json.decode(life.meta().get(REFUSED_NOTE, "[]"), type=list[RefusalCount]):
            key = (f"{life.prefix}{refused.worker}" if refused.worker else "", refused.reason)
            counts[key] = counts.get(key, 0) + refused.count
    return [RefusalCount(worker=worker, reason=reason, count=count) for (worker, reason), count in counts.items()]
