"""A provider: workstations of an office, which are free at night. Its market says when; workers start on this machine.

A market is pure: it has no clock and does no I/O. So `elastic simulate` uses it, too (`market_type`).
"""

from collections.abc import Iterator
from typing import ClassVar

from pydantic import Field

from elastic.core.types import NS_PER_S, EndCause, Nanoseconds
from providers.base import ProviderSettings
from providers.markets import LeaseEnding, Market, TakenBack
from providers.processes import LocalProvider


class OfficeSettings(ProviderSettings):
    night_s: float = Field(36_000.0, gt=0, description="how long workstations are free; the run begins in the evening")
    day_s: float = Field(50_400.0, gt=0, description="how long they are then in use")
    notice_s: float = Field(60.0, ge=0, description="warning in the morning before a workstation is taken back")


class OfficeMarket(Market[OfficeSettings]):
    """Every workstation is free in the same hours."""

    _changes = 0
    """Mornings and evenings so far."""

    @property
    def _is_night(self) -> bool:
        return self._changes % 2 == 0

    def free(self) -> int:
        return super().free() if self._is_night else 0

    @property
    def next_ns(self) -> Nanoseconds:
        nights, days = self._changes // 2 + 1, (self._changes + 1) // 2
        return round((nights * self.settings.night_s + days * self.settings.day_s) * NS_PER_S)

    def advance(self, now_ns: Nanoseconds) -> Iterator[TakenBack]:
        while self.next_ns <= now_ns:
            self.at_ns = self.next_ns
            self._changes += 1
            if not self._is_night:
                deadline_ns = self.at_ns + round(self.settings.notice_s * NS_PER_S)
                for lease in sorted(self._held):
                    yield TakenBack(lease, deadline_ns, LeaseEnding(EndCause.PREEMPTED, "the office opens"))


class OfficeProvider(LocalProvider):
    """To start workers elsewhere, override `launch` and `find` of `providers.base_provider.BaseProvider` instead."""

    Settings: ClassVar[type[ProviderSettings]] = OfficeSettings
    market_type = OfficeMarket
