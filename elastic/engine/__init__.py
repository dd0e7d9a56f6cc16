"""Rollout engines behind one protocol. An engine's own imports (torch, vLLM) happen only when it is created."""

from collections.abc import Mapping
from importlib.metadata import entry_points
from typing import Any

from elastic.config import EngineConfig
from elastic.engine.base import DeviceShare, RolloutEngine

ENTRY_POINTS = "elastic.engines"


def create_engine(
    model_config: Mapping[str, Any], settings: EngineConfig, share: DeviceShare | None = None
) -> RolloutEngine:
    """The engine that `settings.kind` names, for the model whose `config.json` this is.

    Kinds come from the entry-point group "elastic.engines"; each names a function of the same three arguments.
    Raises `ValueError` for a kind that is not installed.
    """
    installed = {entry.name: entry for entry in entry_points(group=ENTRY_POINTS)}
    if settings.kind not in installed:
        raise ValueError(
            f"engine.kind: no engine {settings.kind!r}; installed: {', '.join(sorted(installed)) or 'none'}"
        )
    return installed[settings.kind].load()(model_config, settings, share)
