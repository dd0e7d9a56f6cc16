"""What a run's functions were called for and cost. They are not leases: each call is metered (docs/design.md)."""

from itertools import groupby
from operator import attrgetter

import msgspec

from elastic.report.history import History
from elastic.runtime.journal import CallRow


class FunctionUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Every call of one function. `billed_s` includes the cold starts, which took `cold_start_s` of it."""

    function: str
    calls: int
    failed: int
    cold_starts: int
    billed_s: float
    cold_start_s: float
    usd: float


def functions_of(history: History) -> list[FunctionUsage]:
    by_function = attrgetter("function")
    return [
        FunctionUsage(
            function=function,
            calls=len(calls),
            failed=sum(call.failed for call in calls),
            cold_starts=sum(call.cold_start_s > 0 for call in calls),
            billed_s=sum(call.cold_start_s + call.duration_s for call in calls),
            cold_start_s=sum(call.cold_start_s for call in calls),
            usd=sum(call.usd for call in calls),
        )
        for function, group in groupby(sorted(history.rows(CallRow), key=by_function), by_function)
        for calls in [list(group)]
    ]
