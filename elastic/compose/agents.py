"""How a run that agents drive is wired: what they may ask for, and the fronts that serve them."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from elastic.compose.plan import read_model_config
from elastic.config import OUTSIDE, Config, ConfigError, validate
from elastic.core.types import INTEGER_MAX, SamplingParameters
from elastic.environments.outside import OutsideSettings
from elastic.runtime.agents import AgentLimits, AgentsWiring
from elastic.runtime.journal import AGENTS
from elastic.system.given import read_text
from elastic.system.processes import inherited

GENERATION_CONFIG = "generation_config.json"


def agent_limits(config: Config) -> AgentLimits | None:
    """What agents may ask for; None where no agents drive the run. Raises `ConfigError`."""
    if config.environment.name != OUTSIDE or config.front is None:
        return None
    settings = validate(OutsideSettings, config.environment.settings, "", "environment", "settings")
    model = read_model_config(config)
    return AgentLimits(
        sampling=SamplingParameters(
            max_new_tokens=config.rollout.max_tokens_per_turn,
            noise_seed=0,
            stop_token_ids=_ends(model, config.model.checkpoint),
            temperature=config.rollout.temperature,
        ),
        pinned=frozenset(config.rollout.pin),
        max_turns=min(config.rollout.max_turns, config.front.trajectory_turns_max),
        max_context_tokens=config.engine.max_context_tokens,
        vocab_size=model.get("vocab_size", INTEGER_MAX),
        open_turns_max=config.front.open_turns_max,
        deadline_s=settings.deadline_s,
        idle_s=settings.idle_s,
    )


def agents_wiring(config: Config, run_dir: Path, notes: Mapping[str, str]) -> AgentsWiring | None:
    """How agents are served; `notes` are those of the run's former journals."""
    limits = agent_limits(config)
    if limits is None or config.front is None:
        return None
    return AgentsWiring(
        limits=limits,
        front=config.front,
        command=(sys.executable, "-m", "elastic.cli", "front", str(run_dir.resolve())),
        environment=inherited(),
        former=notes.get(AGENTS, ""),
    )


def _ends(model: Mapping[str, Any], checkpoint: Path) -> tuple[int, ...]:
    """The tokens at which the model's turns end, by its config and its generation config. Raises `ConfigError`."""
    path = checkpoint / GENERATION_CONFIG
    try:
        more = json.loads(read_text(path)) if path.exists() else {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.checkpoint: {path} cannot be read: {error}") from error
    found: list[int] = []
    for said in (model.get("eos_token_id"), more.get("eos_token_id")):
        found += [one for one in (said if isinstance(said, list) else [said]) if isinstance(one, int)]
    return tuple(sorted(set(found)))
