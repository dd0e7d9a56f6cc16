"""What a run's configuration says that is not the default."""

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from elastic.config import Config


def differences(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a whole configuration that differ from the defaults, by their keys, such as `run.steps`.

    A section that may be there several times, such as a provider's, has its values under its own name; of these all
    that are set count.
    """
    return dict(_differing(config, _defaults(), ""))


@cache
def _defaults() -> dict[str, Any]:
    return Config.model_validate({"model": {"checkpoint": "."}}).model_dump(mode="json")


def _differing(config: Mapping[str, Any], defaults: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in config.items():
        key, default = f"{prefix}{name}", defaults.get(name)
        if isinstance(value, dict) and (value or isinstance(default, dict)):
            yield from _differing(value, default if isinstance(default, dict) else {}, f"{key}.")
        elif value != default or key == "model.checkpoint":
            yield key, value
