"""Configurations of benchmarks' runs: `configurations.toml` has them by name."""

import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

from benchmarks import HERE
from benchmarks._common import flattened
from elastic.config import Config

Sections: TypeAlias = Mapping[str, Any]
KINDS: Mapping[str, Mapping[str, Sections]] = tomllib.loads((HERE / "configurations.toml").read_text())


def merged(*kinds: str, **sections: Sections) -> dict[str, dict[str, Any]]:
    """These kinds, and these sections: a key goes before the same key of a kind, and a kind's before that of one which
    is named earlier."""
    found: dict[str, dict[str, Any]] = {}
    for one in (*(KINDS[kind] for kind in kinds), sections):
        for name, keys in one.items():
            found[name] = {**found.get(name, {}), **keys}
    return found


def configuration(*kinds: str, policy: Path | str, **sections: Sections) -> Config:
    """A run of this policy."""
    return Config.model_validate(merged(*kinds, **sections, model={"checkpoint": str(policy)}))


def written(file: Path, *kinds: str, policy: Path | str = "", **sections: Sections) -> Path:
    """The file of a configuration, of this policy where there is one, for a command."""
    model = {"model": {"checkpoint": str(policy)}} if policy else {}
    found = flattened(merged(*kinds, **sections, **model))
    file.write_text("".join(f"{key} = {json.dumps(value)}\n" for key, value in found))
    return file


def endless(*kinds: str, policy: Path, turns: int, **sections: Sections) -> Config:
    """A run that goes on until it is ended; its workers take `turns` at once, paced."""
    room = {"max_batch": turns, "max_pending": turns, **sections.pop("engine", {})}
    return configuration("untimed", "paced", "endless", *kinds, policy=policy, engine=room, **sections)
