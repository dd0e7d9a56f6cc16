"""Rollout engines behind one protocol. An engine's own imports (torch, vLLM) happen only when it is created."""

from collections.abc import Mapping, Sequence
from typing import Any

from elastic.config import EngineConfig, resolve_kind
from elastic.engine.base import DeviceShare, EngineKind, EngineSettings, RolloutEngine


def create_engine(
    model_config: Mapping[str, Any],
    config: EngineConfig,
    share: DeviceShare | None = None,
    devices: Sequence[int] = (),
) -> RolloutEngine:
    """The engine that `config.kind` names, for the model whose `config.json` this is, on so many of this process's
    `devices`; on all that it sees where none are named.

    Raises `ConfigError` for a kind that is not installed and settings that are not its own, else what its `create`
    raises.
    """
    kind, settings = resolve_engine(config, "the engine's settings")
    return kind.create(model_config, config, settings, share, devices)


def resolve_engine(
    config: EngineConfig, where: str, section: tuple[str, ...] = ("engine",)
) -> tuple[type[EngineKind], EngineSettings]:
    """What an engine is made by, and its own settings; the sections of all others are looked at as well.

    Kinds come from the entry-point group "elastic.engines"; each names an `EngineKind`.
    Raises `ConfigError` for a kind or a section that is not installed or cannot be loaded, and for settings that are
    not its own.
    """
    return resolve_kind(config, "engine", EngineKind, where, section)
