"""The base policy of the examples, made before a run can begin."""

from collections.abc import Callable
from enum import Enum
from pathlib import Path

from elastic.compose.plan import RunPlan
from elastic.config import ConfigError

RECIPE_FILE = "recipe"
"""Beside a base policy that was made here: the name of what it was made from."""


WARMED_UP = "frozenlake"
"""The environment whose demonstrations a base policy can be made from."""


class Prepared(Enum):
    """The result of preparing a base policy."""

    MADE = "made"
    THERE = "there"
    OF_OTHER_SETTINGS = "of other settings"


def prepare(plan: RunPlan, progress: Callable[[int, int, float], None], *, force: bool = False) -> Prepared:
    """Make the base policy of the examples by a short supervised warm-up, unless it is there.

    Raises `ConfigError` where it cannot be made or written, or the directory holds something else.
    """
    checkpoint, environment = plan.config.model.checkpoint, plan.config.environment.name
    keep = _holds_policy(checkpoint) and not force
    if environment != WARMED_UP:
        if keep:
            return Prepared.THERE
        raise ConfigError(
            f"environment.name: found {environment!r}, for which no base policy can be made; allowed: {WARMED_UP!r}, "
            f"which has a warm-up, or a checkpoint of your own in model.checkpoint = {str(checkpoint)!r}"
        )

    from elastic.engine.model.checkpoint import CheckpointError
    from elastic.engine.model.config import Qwen3Config
    from elastic.worker.trainer.warmup import WarmupSettings, cache_key, warm_up

    model = Qwen3Config()
    settings = WarmupSettings.model_validate({"lake": plan.environment_settings.model_dump()})
    recipe, key = checkpoint / RECIPE_FILE, cache_key(settings, model)
    try:
        if keep:
            same = not recipe.exists() or recipe.read_text() == key
            return Prepared.THERE if same else Prepared.OF_OTHER_SETTINGS
        checkpoint.parent.mkdir(parents=True, exist_ok=True)
        warm_up(settings, model, checkpoint, progress)
        recipe.write_text(key)
    except CheckpointError as error:
        raise ConfigError(f"model.checkpoint: {error}") from error
    except OSError as error:
        raise ConfigError(f"model.checkpoint: {checkpoint} cannot be made ({error.strerror})") from error
    return Prepared.MADE


def _holds_policy(directory: Path) -> bool:
    """Whether a base policy is there. Raises `ConfigError` where anything else is: it is not ours to write over."""
    try:
        there = (directory / "config.json").is_file()
        occupied = directory.exists() and any(directory.iterdir())
    except OSError as error:
        raise ConfigError(f"model.checkpoint: {directory} cannot be read ({error.strerror})") from error
    if occupied and not there:
        raise ConfigError(
            f"model.checkpoint: {directory} has files but no config.json; allowed: a checkpoint, an empty directory, "
            "or one that does not exist"
        )
    return there
