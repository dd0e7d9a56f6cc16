"""The figures that a run sends to its fronts, which serve them as metrics."""

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from elastic.protocol import metrics
from elastic.protocol.front_messages import MetricsTold
from elastic.runtime.agents.chats import Chats
from elastic.runtime.engine_meters import EngineMeters
from elastic.runtime.status import RunStatus


class RunMetrics:
    """`status` takes the run's status now; a run without `chats` tells nothing of them."""

    def __init__(self, status: Callable[[], RunStatus], meters: EngineMeters, chats: Chats | None = None) -> None:
        self._status = status
        self._meters = meters
        self._chats = chats

    def told(self, request: int, rejections: int) -> MetricsTold:
        status = self._status()
        return MetricsTold(
            request,
            _values(status, metrics.RUN),
            {name: _values(provider, metrics.PROVIDER) for name, provider in status.providers.items()},
            self._meters.figures(),
            self._of_chats(),
            rejections,
        )

    def _of_chats(self) -> dict[str, float]:
        if self._chats is None:
            return {}
        return {**msgspec.structs.asdict(self._chats.totals), "under_way": self._chats.under_way}


def _values(status: object, fields: Mapping[str, Any]) -> dict[str, float]:
    found = {field: getattr(status, field) for field in fields}
    return {field: value for field, value in found.items() if value is not None}
