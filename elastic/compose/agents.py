"""How a run that agents drive is wired: what they may ask for, and the fronts that serve them."""

import os
import sys
from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from elastic.compose.data import data_source
from elastic.compose.plan import RunPlan, read_model_config
from elastic.config import OUTSIDE, Config, ConfigError, ConfigProblem, FrontConfig
from elastic.core.ids import env_worker_id
from elastic.core.types import INTEGER_MAX, SamplingParameters
from elastic.environments.outside import OutsideSettings
from elastic.environments.rows import BadData, check_first_row
from elastic.environments.run_link import CHAT_KEY_VARIABLE, KEY_VARIABLE
from elastic.front.addresses import agents_url
from elastic.protocol.endpoint import Address, is_loopback
from elastic.protocol.proxies import VARIABLES as PROXIES
from elastic.protocol.proxies import HttpSettingsError, proxy_for
from elastic.protocol.run_secrets import RunSecrets
from elastic.protocol.tls import own_authority
from elastic.runtime.agents import (
    ENV_WORKERS,
    EPISODE_HOSTS,
    AgentLimits,
    AgentsWiring,
    ChatLimits,
    EnvWorkerOrder,
    EnvWorkersOrder,
    EpisodeTimes,
    EvaluatedSampling,
    ServingFronts,
    ServingHosts,
    UpstreamBounds,
)
from elastic.runtime.journal import AGENTS
from elastic.runtime.orchestrator import MakeHosts
from elastic.runtime.validation import vocabulary
from elastic.system.given import read_json
from elastic.system.processes import inherited

SOONER = 0.9
"""The share of the time for which fronts hold calls after which the run tells a chatting person why nothing came."""
GENERATION_CONFIG = "generation_config.json"


def agent_limits(plan: RunPlan) -> AgentLimits | None:
    """What agents may ask for; None where no agents drive the run. Raises `ConfigError`."""
    config, driven = plan.config, [one for one in plan.environments if one.driven_outside]
    if not driven or config.front is None:
        return None
    times = {one.config.name: _times(one.settings) for one in driven}
    first = next(iter(times.values()))
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
        vocab_size=vocabulary(model, INTEGER_MAX),
        open_turns_max=config.front.open_turns_max,
        deadline_s=first.deadline_s,
        idle_s=first.idle_s,
        of_environments=times,
        played=frozenset(one.config.name for one in driven if one.in_workers),
        policies=config.front.policies,
        upstream=_upstream_bounds(config.front),
        evaluation=_evaluated_sampling(config),
    )


def _times(settings: BaseModel) -> EpisodeTimes:
    """Return the time limits of an environment that agents drive, whose settings extend `OutsideSettings`."""
    own = settings if isinstance(settings, OutsideSettings) else OutsideSettings()  # type: ignore[call-arg]
    return EpisodeTimes(own.deadline_s, own.idle_s)


def _evaluated_sampling(config: Config) -> EvaluatedSampling:
    own = config.evaluation
    if own is None:
        return EvaluatedSampling()
    return EvaluatedSampling(temperature=own.temperature, top_p=own.top_p, max_tokens=own.max_tokens)


def _upstream_bounds(front: FrontConfig) -> UpstreamBounds | None:
    if not front.upstream:
        return None
    return UpstreamBounds(
        calls_max=front.upstream_calls_max,
        usd_max=front.upstream_usd_max,
        concurrency=front.upstream_concurrency,
        timeout_s=front.upstream_timeout_s,
        context_tokens=front.upstream_context_tokens,
        usd_per_million_in=front.upstream_usd_per_million_in,
        usd_per_million_out=front.upstream_usd_per_million_out,
    )


def agents_wiring(
    plan: RunPlan, run_dir: Path, notes: Mapping[str, str], ready: Callable[[str], None]
) -> AgentsWiring | None:
    """How agents are served; `notes` are those of the run's former journals. Raises `TlsError`."""
    config, limits = plan.config, agent_limits(plan)
    front = config.front
    if limits is None or front is None:
        return None
    from elastic.front.process import front_certificate

    front_certificate(config, run_dir)
    return AgentsWiring(
        limits=limits,
        chats=ChatLimits(front.chats_max, front.chat_tokens_max) if front.chats_max else None,
        chat_wait_s=SOONER * front.hold_s,
        make_fronts=partial(
            ServingFronts,
            run_dir,
            front,
            (sys.executable, "-m", "elastic.cli", "front", str(run_dir.resolve())),
            _environment(front),
            notes.get(AGENTS, ""),
        ),
        base_url=lambda served: agents_url(config, Address.parse(served)),
        ready=ready,
        env_workers=_env_workers(plan, run_dir),
    )


def _env_workers(plan: RunPlan, run_dir: Path) -> EnvWorkersOrder | None:
    """How the run's env workers are started that call fronts, if it has any."""
    return _workers_of(plan, run_dir, [one.config.name for one in plan.environments if one.in_workers], ENV_WORKERS)


def make_hosts(plan: RunPlan, run_dir: Path) -> MakeHosts | None:
    """What starts the run's env workers that play episodes in token ids, if it has any."""
    order = _workers_of(plan, run_dir, plan.hosted, EPISODE_HOSTS)
    return None if order is None else partial(ServingHosts, order, plan.driven_outside)


def _workers_of(plan: RunPlan, run_dir: Path, names: Collection[str], owner: str) -> EnvWorkersOrder | None:
    """How the env workers of these environments are started. Each is the driver of its own trajectories."""
    config, secrets = plan.config, RunSecrets.of(run_dir)
    authority = own_authority(run_dir) if config.front and not is_loopback(config.front.host) else None
    trusted = {} if authority is None else {"SSL_CERT_FILE": str(authority.resolve())}
    chat_key = secrets.viewer_key("judge")
    common = {**inherited(*config.run.pass_env), **trusted, CHAT_KEY_VARIABLE: chat_key}
    workers = dict[str, EnvWorkerOrder]()
    keys = list[str]()
    for number, environment in enumerate(config.mixture):
        # Of an environment in containers the interpreter is in there.
        interpreter = sys.executable if environment.container else environment.python or sys.executable
        place = (str(run_dir.resolve()), "--environment", environment.name)
        for process in range(environment.processes if environment.name in names else 0):
            name = env_worker_id(environment.name, process)
            keys.append(secrets.driver_key(name))
            workers[name] = EnvWorkerOrder(
                command=(str(interpreter), "-m", "elastic.cli", "env-worker", *place),
                variables={**common, KEY_VARIABLE: keys[-1]},
                start_timeout_s=environment.start_timeout_s,
                step_timeout_s=environment.step_timeout_s,
                max_restarts=environment.max_restarts,
                section=".".join(config.environment_section(number)),
            )
    if not workers:
        return None
    return EnvWorkersOrder(run_dir=run_dir, workers=workers, secrets=(chat_key, *keys), owner=owner)


def _environment(front: FrontConfig) -> dict[str, str]:
    """What a front's process inherits: with an upstream also its key, and the way there. No other process gets them."""
    return inherited(*((front.upstream_key_env, *PROXIES) if front.upstream else ()))


def _check_upstream(front: FrontConfig) -> None:
    key = front.upstream_key_env
    if key and not os.environ.get(key, "").strip():
        problem = f"the environment has no {key}, or an empty one"
        raise ConfigError(ConfigProblem(problem, ("front", "upstream_key_env")))
    if key and not all(char.isascii() and char.isprintable() for char in os.environ[key]):
        problem = f"{key} has characters that no header may have"
        raise ConfigError(ConfigProblem(problem, ("front", "upstream_key_env")))
    if front.upstream:
        try:
            proxy_for(front.upstream)
        except HttpSettingsError as error:
            raise ConfigError(ConfigProblem(str(error), ("front", "upstream"))) from error


def check_front(plan: RunPlan) -> None:
    """Raises `ConfigError` where agents could not be served: without a tokenizer, a template or such a renderer,
    without a parser of calls where an environment has tools, or without the upstream's key."""
    config, front = plan.config, plan.config.front
    if not plan.driven_outside:
        if front is not None:
            names = ", ".join(repr(one.name) for one in config.mixture)
            problem = (
                f"environment {names} plays its trajectories itself, so that agents would have "
                f"none; allowed with fronts: an environment of kind {OUTSIDE!r}"
            )
            raise ConfigError(ConfigProblem(problem, ("front",)))
        return
    if front is None:
        raise ConfigError(ConfigProblem("missing, and agents play trajectories of the run", ("front",)))
    _check_upstream(front)
    for number, environment in enumerate(config.mixture):
        if (source := data_source(environment, config.run.seed)) is not None:
            try:
                check_first_row(source, elsewhere=bool(environment.python or environment.container))
            except BadData as error:
                section = (*config.environment_section(number), "data")
                raise ConfigError(ConfigProblem(str(error), section)) from error
    from elastic.front.rendering.renderer import make_renderer
    from elastic.front.rendering.tokenizer import Tokenizer, TokenizerError

    try:
        tokenizer = Tokenizer(config.model.checkpoint)
    except TokenizerError as error:
        problem = f"{error}; agents need the policy's tokenizer: allowed is a checkpoint that has one"
        raise ConfigError(ConfigProblem(problem, ("model", "checkpoint"))) from error
    renderer = make_renderer(
        tokenizer,
        renderer=front.renderer,
        tool_parser=front.tool_parser,
        reasoning_parser=front.reasoning_parser,
    )
    offering = [one.config.name for one in plan.environments if getattr(one.settings, "offers_tools", False)]
    if renderer.unread and offering:
        problem = f"found {front.tool_parser!r}, and the tools of environment {offering[0]!r} could not be called: "
        raise ConfigError(ConfigProblem(problem + renderer.unread, ("front", "tool_parser")))


def stop_token_ids(config: Config) -> tuple[int, ...]:
    """The tokens at which the base policy's turns end. Raises `ConfigError`."""
    return _ends(read_model_config(config), config.model.checkpoint)


def _ends(model: Mapping[str, Any], checkpoint: Path) -> tuple[int, ...]:
    """The tokens at which the model's turns end, by its config and its generation config. Raises `ConfigError`."""
    path = checkpoint / GENERATION_CONFIG
    try:
        more = read_json(path) if path.exists() else {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.checkpoint: {path} cannot be read: {error}") from error
    if not isinstance(more, dict):
        raise ConfigError(f"model.checkpoint: {path}: expected a JSON object (found {type(more).__name__})")
    found: list[int] = []
    for said in (model.get("eos_token_id"), more.get("eos_token_id")):
        found += [one for one in (said if isinstance(said, list) else [said]) if isinstance(one, int)]
    return tuple(sorted(set(found)))
