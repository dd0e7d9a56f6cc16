"""The learning rate by update: it rises, then stays or falls until the run's last update. Pure."""

import math

from elastic.config import TrainerConfig


def learning_rate(settings: TrainerConfig, updates: int, last_update: int | None) -> float:
    """Return the learning rate of the update after `updates` others: linear in the first `warmup_updates`, then by
    `schedule`.

    The run makes `last_update` updates in all, of which some may have no gradient and so no place in the count; None
    where that is not known, and the rate stays.
    """
    rise = min(1.0, (updates + 1) / max(1, settings.warmup_updates))
    if settings.schedule == "constant" or last_update is None:
        return settings.learning_rate * rise
    falling = max(1, last_update - settings.warmup_updates)
    gone = min(1.0, max(0, updates + 1 - settings.warmup_updates) / falling)
    left = 1.0 - gone if settings.schedule == "linear" else (1.0 + math.cos(math.pi * gone)) / 2
    final = settings.schedule_final_share
    return settings.learning_rate * rise * (final + (1.0 - final) * left)
