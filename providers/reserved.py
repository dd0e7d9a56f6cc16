"""Machines that we own: workers start when asked for, stay, and are never preempted."""

from typing import ClassVar

from providers.base import ProviderSettings
from providers.markets import ReservedMarket, TrainerMarket
from providers.processes import LocalProvider


class ReservedProvider(LocalProvider):
    """Dedicated rollout workers, `max_workers` of them."""

    Settings: ClassVar[type[ProviderSettings]] = ProviderSettings
    market_type = ReservedMarket


class TrainerProvider(ReservedProvider):
    """The trainer's own device: a worker that also trains, and belongs to the run whatever else it uses."""

    market_type = TrainerMarket
