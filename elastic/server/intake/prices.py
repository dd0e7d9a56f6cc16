"""The server's prices: floors for those of submissions, so that no budget is kept by a price of one's own."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from pydantic import BaseModel, ValidationError

from elastic.compose.plan import kind_of
from elastic.config import RewardsConfig, TrainerConfig
from elastic.server.intake.path_keys import settings_of
from elastic.server.store.quotas import TRAINER

PRICE, LIMIT = "usd_per_", "_max"
GPU_HOUR = "usd_per_gpu_hour"


class LowPrice(NamedTuple):
    """A price of a submission that is below the server's."""

    place: tuple[str, ...]
    own: float
    floor: float


def settle_prices(raw: dict[str, Any], providers: Sequence[str], prices: Mapping[str, float]) -> Iterator[LowPrice]:
    """Put the server's prices where a submission has none of its own, and yield those that are below the server's.

    The server's are `prices`, of a GPU for an hour by kind of provider and of the `trainer`; else what the section
    would have without a price of its own.
    """
    for section, price in ((TRAINER, prices.get(TRAINER)), *((name, _price(raw, name, prices)) for name in providers)):
        if price is not None:
            place = raw if section == TRAINER else raw.setdefault("providers", {})
            if isinstance(place, dict) and isinstance(settings := place.setdefault(section, {}), dict):
                settings.setdefault(GPU_HOUR, price)
    for place, section, settings, price in _sections(raw, prices):
        for key in [key for key in section if key.startswith(PRICE) and not key.endswith(LIMIT)]:
            floor = price if key == GPU_HOUR and price is not None else _default(settings, section, key)
            own = section[key]
            if floor is not None and isinstance(own, (int, float)) and not isinstance(own, bool) and own < floor:
                yield LowPrice((*place, key), own, floor)


def _price(raw: Mapping[str, Any], name: str, prices: Mapping[str, float]) -> float | None:
    sections: Any = raw.get("providers", {})
    if not isinstance(sections, dict) or not isinstance(sections.get(name, {}), dict):
        return None
    return prices.get(kind_of(sections, name))


def _sections(
    raw: Mapping[str, Any], prices: Mapping[str, float]
) -> Iterator[tuple[tuple[str, ...], dict[str, Any], type[BaseModel], float | None]]:
    """Yield the sections that have prices, each with its place, its settings and the server's price of a GPU for an
    hour."""
    for name, settings in ((TRAINER, TrainerConfig), ("rewards", RewardsConfig)):
        if isinstance(section := raw.get(name), dict):
            yield (name,), section, settings, prices.get(name)
    providers: Any = raw.get("providers")
    for name, section in providers.items() if isinstance(providers, dict) else ():
        if isinstance(section, dict):
            settings = settings_of("elastic.providers", kind_of(providers, name))
            if settings is not None:
                yield ("providers", name), section, settings, _price(raw, name, prices)


def _default(settings: type[BaseModel], section: Mapping[str, Any], key: str) -> float | None:
    """Return the price that a section would have without this key; None if the key is none of its own."""
    if key not in settings.model_fields:
        return None
    found = settings.model_fields[key].get_default(call_default_factory=True)
    with contextlib.suppress(ValidationError):
        found = getattr(settings.model_validate({k: v for k, v in section.items() if k != key}), key)
    return found if isinstance(found, (int, float)) else None
