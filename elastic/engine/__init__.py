"""Rollout engines behind one protocol. An engine's own imports (torch, vLLM) happen only when it is created."""

from collections.abc import Mapping, Sequence
from typing import Any

from elastic.config import ConfigError, ConfigProblem, EngineConfig, validate
from elastic.engine.base import DeviceShare, EngineKind, EngineSettings, RolloutEngine
from elastic.system.installed import installed, load_point
from elastic.system.named_code import CodeUnusable

ENTRY_POINTS = "elastic.engines"


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
    known = installed(ENTRY_POINTS)
    names = ", ".join(sorted(known)) or "none"
    if config.kind not in known:
        unknown = f"unknown engine {config.kind!r}; installed: {names}"
        raise ConfigError(ConfigProblem(unknown, (*section, "kind"), where))
    for name in config.sections:
        if name not in known:
            keys = ", ".join(sorted(EngineConfig.model_fields))
            unknown = f"unknown key; allowed: {keys}, and sections of: {names}"
            raise ConfigError(ConfigProblem(unknown, (*section, name), where))
    kinds: dict[str, type[EngineKind]] = {}
    for name in {config.kind, *config.sections}:
        try:
            kinds[name] = load_point(known[name])
        except CodeUnusable as error:
            key = (*section, "kind" if name == config.kind else name)
            raise ConfigError(ConfigProblem(str(error), key, where)) from error
    settings = {
        name: validate(kind.Settings, config.sections.get(name, {}), where, *section, name)
        for name, kind in kinds.items()
    }
    return kinds[config.kind], settings[config.kind]
