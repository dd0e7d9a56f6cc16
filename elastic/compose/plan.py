"""A run's plan: its configuration, resolved and checked before a process starts."""

import importlib.metadata
import re
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from pydantic import BaseModel, ConfigDict

from elastic.compose.checkpoints import checkpoints
from elastic.compose.data import counted
from elastic.compose.device_sharing import sharing_policies
from elastic.compose.evaluation import with_tasks
from elastic.compose.scheduling import TRAINER_PROVIDER, policies
from elastic.config import (
    PLAYED_BY_ROWS,
    Config,
    ConfigError,
    ConfigProblem,
    EngineConfig,
    EnvironmentConfig,
    RewardsConfig,
    is_class_of_settings,
    validate,
)
from elastic.engine import resolve_engine
from elastic.environments.base import Environment
from elastic.pool.client import NOT_A_JOB, PoolUnavailable, membership_here
from elastic.protocol.endpoint import is_loopback
from elastic.runtime.states import KEEP
from elastic.system.cores import cores
from elastic.system.given import read_json
from elastic.system.installed import found_point, installed, is_ours, load_point
from elastic.system.named_code import CodeUnusable, missing
from elastic.system.plain_values import shown
from elastic.worker.trainer import generates, resolve_trainer, seeding_engines, trainer_device
from elastic.worker.trainer.base import TrainerKind, TrainerSettings
from providers.base import INCREMENTS_S, Billing, Provider, ProviderSettings
from providers.serving_messages import ServedLoad

PROVIDERS_OPTION = "--providers"
RANKS_A_CORE = 8
"""The most ranks of a trainer for each core of a machine without GPUs: more are likelier a mistake than a wish."""
BFLOAT16_BYTES = 2
TRACE_PLAYERS = {name: f"{name}-replay" for name in ("serving", "serverless", "spot")}
"""The kinds of sections with these names and without a `kind`: they play traces on this machine."""


class GivenSettings(BaseModel):
    """Settings of an environment of a third party's, which env workers check: nobody else imports it."""

    model_config = ConfigDict(extra="allow", frozen=True)


class ChosenEnvironment(msgspec.Struct, frozen=True, kw_only=True):
    """An environment of a run: its section, the class of its kind, and the settings of that. There is no class where
    env workers play its episodes in token ids."""

    config: EnvironmentConfig
    kind: type[Environment] | None
    settings: BaseModel

    @property
    def driven_outside(self) -> bool:
        """Whether agents outside of the run drive its trajectories, through fronts."""
        return bool(getattr(self.kind, "driven_outside", False))

    @property
    def in_workers(self) -> bool:
        """Whether env workers play its episodes through fronts."""
        return bool(getattr(self.kind, "in_workers", False))

    @property
    def make(self) -> Callable[[], Environment] | None:
        """What makes one for an episode; None where env workers do."""
        return None if self.kind is None else partial(self.kind, self.settings)


class RunPlan(msgspec.Struct, frozen=True, kw_only=True):
    """A resolved run: what `--dry-run` shows and `execute` carries out."""

    config: Config
    providers: dict[str, ProviderSettings]
    provider_types: dict[str, type[Provider]]
    environments: tuple["ChosenEnvironment", ...]
    reward: str = ""
    """The entry point of the function that computes rewards (`module:attribute`); empty: the environment does."""

    @property
    def in_turns(self) -> dict[str, type[Provider]]:
        """By the providers whose devices the run has in turns with other jobs, that of the trainer's device. If there
        are any, the run is to be a pool's job."""
        kinds = self.provider_types.items()
        return {name: kind.trainer_of_turns for name, kind in kinds if kind.trainer_of_turns is not None}

    @property
    def driven_outside(self) -> bool:
        """Whether agents drive any of the run's trajectories, through fronts."""
        return any(one.driven_outside for one in self.environments)

    @property
    def token_level(self) -> tuple[str, ...]:
        """The environments that speak token ids, by name."""
        return tuple(one.config.name for one in self.environments if not one.driven_outside)

    @property
    def hosted(self) -> tuple[str, ...]:
        """Those of them whose episodes env workers play."""
        return tuple(one.config.name for one in self.environments if one.kind is None)

    def engine(self, provider: str) -> EngineConfig:
        """Return the engine settings of a provider's workers, or of the trainer's device: the run's, with their own
        overrides."""
        config = self.config
        own = config.trainer.engine if provider == TRAINER_PROVIDER else self.providers[provider].engine
        return EngineConfig.model_validate(config.engine.overlaid(own))

    def resolved(self) -> dict[str, Any]:
        """The configuration as it takes effect: with the providers in use, and with every default."""
        body = self.config.model_dump(mode="json")
        splits = body["evaluation"]["splits"] if body["evaluation"] else []
        sections = [*(body["environments"] or [body["environment"]]), *splits]
        for section, chosen in zip(sections, self.environments, strict=True):
            section["settings"] = chosen.settings.model_dump(mode="json")
        body["providers"] = {name: settings.model_dump(mode="json") for name, settings in self.providers.items()}
        return body


class Acquisition(msgspec.Struct, frozen=True, kw_only=True):
    """The most that a run would acquire from one provider, and the most that it would cost; None where a vendor has
    not said its price."""

    provider: str
    max_workers: int
    gpus_per_worker: int
    usd_per_gpu_hour: float | None
    usd_per_hour_max: float | None


class RewardCalls(msgspec.Struct, frozen=True, kw_only=True):
    """The function that a run would call for its rewards, and the price of its calls."""

    function: str
    concurrency: int
    usd_per_s: float
    usd_per_call: float


HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
"""How models are named on the Hugging Face Hub: an owner and a name."""


ENVIRONMENT_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,62}")
"""Env workers, their keys and logs are called after it."""


def kind_of(sections: Mapping[str, Mapping[str, Any]], name: str) -> str:
    """Which provider a section is: as it says, or as its name does."""
    return str(sections.get(name, {}).get("kind") or TRACE_PLAYERS.get(name, name))


def _pick(kind: str, name: str, where: str, *key: str) -> importlib.metadata.EntryPoint:
    points = installed(f"elastic.{kind}s")
    if name not in points:
        short = [name for name, player in TRACE_PLAYERS.items() if player in points] if kind == "provider" else []
        what, there = kind.replace("_", " "), ", ".join(sorted([*points, *short])) or "none"
        near = [TRACE_PLAYERS[name]] if name in short else get_close_matches(name, [*points, *short], 1)
        meant = f" (did you mean {near[0]!r}?)" if near else ""
        raise ConfigError(ConfigProblem(f"unknown {what} {name!r}{meant}; installed: {there}", key, where))
    return points[name]


def _picked(kind: str, name: str, where: str, *key: str) -> Any:
    """What is installed under the name. Raises `ConfigError`."""
    try:
        return load_point(_pick(kind, name, where, *key))
    except CodeUnusable as error:
        raise ConfigError(ConfigProblem(str(error), key, where)) from error


def _in_turns(config: Config, where: str) -> Config:
    """Fill in open settings as they are best for a job that shares its devices. Raises `ConfigError`."""
    provisioning, seeding, engine = config.provisioning, config.seeding, config.engine
    kind, own = resolve_engine(engine, where)
    if filled := kind.in_turns(own):
        engine = EngineConfig.model_validate(engine.overlaid({engine.kind: dict(filled)}))
    if provisioning.hold == "auto":
        provisioning = provisioning.model_copy(update={"hold": "rollouts"})
    if seeding.policy == "auto":
        seeding = seeding.model_copy(update={"policy": "none"})
    return config.model_copy(update={"provisioning": provisioning, "seeding": seeding, "engine": engine})


def _from_hub(config: Config) -> Config:
    """With the directories of policies that are in the Hugging Face Hub's cache on this machine."""
    model, trainer = config.model, config.trainer
    if (found := _in_hub(model.checkpoint)) is not None:
        model = model.model_copy(update={"checkpoint": found})
    if trainer.reference is not None and (found := _in_hub(trainer.reference)) is not None:
        trainer = trainer.model_copy(update={"reference": found})
    return config.model_copy(update={"model": model, "trainer": trainer})


def _in_hub(checkpoint: Path) -> Path | None:
    if checkpoint.exists() or not HUB_ID.fullmatch(str(checkpoint)):
        return None
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(str(checkpoint), local_files_only=True))
    except (ImportError, OSError):
        return None


def resolve(config: Config, provider_names: Sequence[str], where: str) -> RunPlan:
    """Check everything that can be checked before a process starts. Raises `ConfigError`."""
    config = _from_hub(config)
    types: dict[str, type[Provider]] = {}
    settings: dict[str, ProviderSettings] = {}
    names = list(dict.fromkeys(provider_names))
    if "reserved" in config.providers and "reserved" not in names:
        names.append("reserved")
    for name in (*names, *config.providers):
        source = (where, "providers", name) if name in config.providers else (PROVIDERS_OPTION,)
        kind = kind_of(config.providers, name)
        found = types.setdefault(name, _picked("provider", kind, *source))
        if not (is_class_of_settings(found) and hasattr(found, "trainer_of_turns")):
            allowed = "a subclass of providers.base.Provider, with Settings"
            message = f"{found_point(installed('elastic.providers')[kind])} is {shown(found)}; allowed: {allowed}"
            raise ConfigError(ConfigProblem(message, source[1:], source[0]))
        section = config.providers.get(name, {}) | {"kind": kind}
        checked = validate(found.Settings, section, where, "providers", name)
        if name in names:
            settings[name] = checked
    if unknown := sorted(config.run.caps.keys() - {*names, *config.providers}):
        allowed = ", ".join(sorted({*names, *config.providers})) or "none"
        problem = f"names no provider; allowed: {allowed}"
        raise ConfigError(*(ConfigProblem(problem, ("run", "caps", name), where) for name in unknown))
    config = with_tasks(counted(config, where), where)
    environments = tuple(_chosen(config, number, where) for number in range(len(config.mixture)))
    reward = config.rewards.name and _pick("reward", config.rewards.name, where, "rewards", "name").value
    if any(types[name].trainer_of_turns for name in names):
        config = _in_turns(config, where)
    _check_pool(config.rewards, where)
    resolve_engine(config.engine, where)
    resolve_trainer(config.trainer, where)
    _check_engine(config, config.trainer.engine, where, "trainer", "engine")
    generates = seeding_engines(config) > 0 or not has_ranks(config)
    if config.seeding.policy == "auto" and not generates:
        config = config.model_copy(update={"seeding": config.seeding.model_copy(update={"policy": "none"})})
    for name, chosen in settings.items():
        _check_engine(config, chosen.engine, where, "providers", name, "engine")
        if isinstance(chosen, ServedLoad) and chosen.executor is not None:
            sharing_policies(chosen.executor, where, "providers", name, "executor")
    policies(config, where)
    return RunPlan(
        config=config,
        providers=settings,
        provider_types={name: types[name] for name in names},
        environments=environments,
        reward=reward,
    )


def _chosen(config: Config, number: int, where: str) -> ChosenEnvironment:
    """The environment with this number. Raises `ConfigError`."""
    environment, section = config.mixture[number], config.environment_section(number)
    key = "name" if environment.kind == environment.name else "kind"
    kind = _own_kind(environment, where, *section, key)
    if environment.data is not None and environment.kind not in PLAYED_BY_ROWS:
        allowed = " and ".join(map(repr, PLAYED_BY_ROWS))
        problem = f"found for kind {environment.kind!r}; allowed for kinds {allowed}"
        raise ConfigError(ConfigProblem(problem, (*section, "data"), where))
    if not ENVIRONMENT_NAME.fullmatch(environment.name):
        problem = f"found {environment.name!r}; allowed: up to 63 letters, digits, _ and -"
        raise ConfigError(ConfigProblem(problem, (*section, "name"), where))
    checked = GivenSettings if kind is None else kind.Settings
    settings = validate(checked, environment.settings, where, *section, "settings")
    if (load_s := getattr(settings, "load_s", 0.0)) > environment.start_timeout_s:
        problem = (
            f"found {load_s:g}, and its env workers have {environment.start_timeout_s:g} s to start in; allowed: up to "
            "that, or a longer start_timeout_s of the environment"
        )
        raise ConfigError(ConfigProblem(problem, (*section, "settings", "start_s"), where))
    return ChosenEnvironment(config=environment, kind=kind, settings=settings)


def _own_kind(environment: EnvironmentConfig, where: str, *key: str) -> type[Environment] | None:
    """The class of a kind of ours, and None for a third party's, which env workers import. Raises `ConfigError` where
    it is not installed, and could not be elsewhere."""
    elsewhere = environment.python is not None or bool(environment.container)
    if elsewhere and environment.kind not in installed("elastic.environments"):
        return None
    if not is_ours(_pick("environment", environment.kind, where, *key)):
        return None
    kind = _picked("environment", environment.kind, where, *key)
    played = getattr(kind, "driven_outside", False) or getattr(kind, "in_process", False)
    return kind if played else None


def _check_pool(rewards: RewardsConfig, where: str) -> None:
    pool, key = _picked("function_pool", rewards.pool, where, "rewards", "pool"), ("rewards", "pool_settings")
    settings = getattr(pool, "Settings", None)
    if settings is not None:
        validate(settings, rewards.pool_settings, where, *key)
    elif rewards.pool_settings:
        raise ConfigError(ConfigProblem(f"pool {rewards.pool!r} takes none", key, where))


def _check_engine(config: Config, own: dict[str, Any], where: str, *section: str) -> None:
    resolve_engine(validate(EngineConfig, config.engine.overlaid(own), where, *section), where, section)


def rollout_gpus(config: Config) -> int:
    """Return the GPUs that a worker of a pool's job takes on its node: those of its engine's ranks."""
    return resolve_engine(config.engine, "")[1].ranks


def acquisitions(plan: RunPlan, asked_usd: Mapping[str, float] | None = None) -> list[Acquisition]:
    """The trainer's device, and the most that each provider would be asked for.

    `asked_usd` is the price of a GPU's hour where a vendor said it. Else one that asks a vendor has the most that its
    settings allow.
    """
    asked = asked_usd or {}
    trainer = plan.config.trainer
    rows: list[tuple[str, int, int, float | None]] = [
        (TRAINER_PROVIDER, 1, trainer.gpus, trainer.usd_per_gpu_hour),
        *(
            (
                name,
                s.max_workers,
                s.gpus_per_worker,
                asked.get(name)
                or s.usd_per_gpu_hour
                or s.usd_per_gpu_hour_most
                or (None if asks_a_vendor(plan, name) else 0.0),
            )
            for name, s in plan.providers.items()
        ),
    ]
    return [
        Acquisition(
            provider=name,
            max_workers=workers,
            gpus_per_worker=gpus,
            usd_per_gpu_hour=usd,
            usd_per_hour_max=None if usd is None else workers * gpus * usd,
        )
        for name, workers, gpus, usd in rows
    ]


def asks_a_vendor(plan: RunPlan, provider: str) -> bool:
    """Whether a vendor says what the provider has, and at which price."""
    return hasattr(plan.provider_types[provider], "examine")


def unpriced(rows: Sequence[Acquisition]) -> list[str]:
    """A remark on each provider whose price is not known."""
    return [
        f"the price of {row.provider} is not known here, and not in the sum; usd_per_gpu_hour_max bounds it"
        for row in rows
        if row.usd_per_hour_max is None
    ]


def longest_increment_s(plan: RunPlan) -> int:
    """Return how long the longest increment is that a provider of the run bills, its trainer's device included; 0 where
    time is billed as it is."""
    billings: list[Billing] = [plan.config.trainer.billing, *(each.billing for each in plan.providers.values())]
    return max(INCREMENTS_S.get(billing, 0) for billing in billings)


def reward_calls(plan: RunPlan) -> RewardCalls | None:
    """The calls that rewards would take; None where the environment gives them itself."""
    rewards = plan.config.rewards
    if not plan.reward:
        return None
    return RewardCalls(
        function=rewards.name,
        concurrency=rewards.concurrency,
        usd_per_s=rewards.usd_per_s,
        usd_per_call=rewards.usd_per_call,
    )


def read_model_config(config: Config) -> dict[str, Any]:
    """The base policy's `config.json`. Raises `ConfigError` where there is none."""
    path = config.model.checkpoint / "config.json"
    try:
        found = read_json(path)
    except OSError as error:
        checkpoint = config.model.checkpoint
        if not checkpoint.exists() and HUB_ID.fullmatch(str(checkpoint)):
            raise ConfigError(
                f"model.checkpoint: found {str(checkpoint)!r}, a name as on the Hugging Face Hub that is not in its "
                f"cache here; allowed: a directory, such as the one that `hf download {checkpoint} --local-dir DIR` "
                f"makes, or a name that `hf download {checkpoint}` has put there"
            ) from error
        raise ConfigError(
            f"model.checkpoint: {path} cannot be read ({error.strerror}); "
            "`elastic prepare CONFIG` makes the base policy of the examples"
        ) from error
    except ValueError as error:
        raise ConfigError(f"model.checkpoint: {path} is not JSON: {error}") from error
    parts = {"": found, "text_config: ": found.get("text_config") or {}} if isinstance(found, dict) else {"": found}
    for key, part in parts.items():
        if not isinstance(part, dict):
            raise ConfigError(f"model.checkpoint: {path}: {key}expected a JSON object (found {type(part).__name__})")
    return found


def check_live(
    plan: RunPlan, listening: str = "--listen HOST:PORT, and --advertise HOST", *, for_pool: bool = False
) -> None:
    """Raises `ConfigError` for settings that only simulations support so far, for a pool's where there is none, and for
    code of files that are not there.

    `listening` are the options by which a run is reached from elsewhere, with the one for another name of this machine.
    A run `for_pool` is about to be one of its jobs.
    """
    for name in plan.in_turns:
        try:
            membership = membership_here()
        except PoolUnavailable as error:
            raise ConfigError(str(error)) from error
        if membership is None:
            raise ConfigError(ConfigProblem(NOT_A_JOB, where=f"{PROVIDERS_OPTION} {name}"))
        if seeding_engines(plan.config):
            problem = f"found 'vllm' with {PROVIDERS_OPTION} {name}, where other jobs have the device; allowed: 'auto'"
            raise ConfigError(ConfigProblem(problem, ("trainer", plan.config.trainer.kind, "seeding")))
    _check_ranks(plan, for_pool=for_pool)
    if gone := list(missing(plan.config.model_dump(mode="json"))):
        raise ConfigError(*(ConfigProblem(f"found {str(code)!r}, but no such file", key) for key, code in gone))
    _check_reach(plan, listening)


def _check_ranks(plan: RunPlan, *, for_pool: bool) -> None:
    """A trainer of several GPUs is of a kind that has ranks, and leaves generating to others, who are there."""
    config = plan.config
    gpus, kind = config.trainer.gpus, config.trainer.kind
    if gpus == 1 and not generates(config) and not plan.providers and not for_pool:
        problem = f"found {kind!r}, on whose device nothing generates, and no provider; name one by {PROVIDERS_OPTION}"
        raise ConfigError(ConfigProblem(problem, ("trainer", "kind")))
    if gpus == 1:
        return
    if not has_ranks(config):
        problem = (
            f"found {gpus}, but trainers of kind {kind!r} are one process on one GPU, and the others would be billed "
            "for nothing; allowed in live runs: 1 (`elastic simulate` takes any number), or trainer.kind = "
            "'transformers'"
        )
        raise ConfigError(ConfigProblem(problem, ("trainer", "gpus")))
    if seeding_engines(config):
        return
    if config.seeding.policy != "none":
        problem = (
            f"found {config.seeding.policy!r} with trainer.gpus = {gpus}, whose devices do not generate; "
            "allowed: 'none', 'auto'"
        )
        raise ConfigError(ConfigProblem(problem, ("seeding", "policy")))
    if not plan.providers and not for_pool:
        problem = f"found {gpus}, whose devices do not generate, and no provider; name one by {PROVIDERS_OPTION}"
        raise ConfigError(ConfigProblem(problem, ("trainer", "gpus")))


def has_ranks(config: Config) -> bool:
    """Whether the run's trainer is several processes, each with a GPU."""
    kind, _ = resolve_trainer(config.trainer, "")
    return config.trainer.gpus > 1 and kind.ranks


def _check_devices(config: Config) -> None:
    """The devices that the configuration names are here. Raises `ConfigError`."""
    gpus, device = config.trainer.gpus, trainer_device(config)
    if device == "cpu" and has_ranks(config) and gpus > RANKS_A_CORE * cores():
        problem = f"found {gpus} ranks on CPUs, of which {cores()} are here; allowed: up to {RANKS_A_CORE * cores()}"
        raise ConfigError(ConfigProblem(problem, ("trainer", "gpus")))
    if config.engine.device != "cuda" and (gpus == 1 or device == "cpu"):
        return
    import torch

    there = torch.cuda.device_count()
    if config.engine.device == "cuda" and not there:
        raise ConfigError("engine.device: found 'cuda', but no CUDA device is here; allowed: 'auto', 'cpu'")
    if 1 < gpus > there and device != "cpu":
        raise ConfigError(
            f"trainer.gpus: found {gpus}, but {there} CUDA devices are here; allowed: up to {max(1, there)}, or ranks "
            "on CPUs with trainer.engine.device = 'cpu'"
        )


def _check_reach(plan: RunPlan, listening: str) -> None:
    """Workers on other machines can dial the run: nothing is rented that could never join."""
    run = plan.config.run
    if run.beyond_loopback and not (run.advertised_host and is_loopback(run.advertised_host)):
        return
    for name, settings in plan.providers.items():
        if plan.provider_types[name].elsewhere(settings):
            problem = (
                f"its workers are on other machines, and a run at {run.advertise or run.host} is reached from this one "
                f"alone; have it listen where they reach it ({listening} where they know this machine by another name)"
            )
            raise ConfigError(ConfigProblem(problem, ("providers", name)))


def check_policy(plan: RunPlan, resumed: Path | None = None, *, trains_here: bool = True) -> None:
    """Read how the base policy is stored, and a resumed run's checkpoint as the trainer would, which takes seconds.

    Raises `ConfigError` for a policy that does not match its own config, cannot say every word of the environment or
    takes longer to pull than a worker may, for a checkpoint that is damaged or of another model, and where there is
    no such device, unless the trainer may be on another machine.
    """
    config = plan.config
    if trains_here:
        _check_devices(config)
    _check_words(config)
    model = read_model_config(config)
    kind, settings = resolve_trainer(config.trainer, "")
    policy = kind.examine(config, settings)
    _check_engines(plan, model, kind, settings)
    for one in plan.environments:
        # Env workers say how many words theirs have.
        if one.kind is not None and policy.vocab_size < (words := len(one.kind.vocabulary)):
            raise ConfigError(
                f"model.checkpoint: {config.model.checkpoint} has a vocabulary of {policy.vocab_size} tokens; "
                f"environment {one.config.name!r} needs at least {words}"
            )
    _check_reference(config, policy.vocab_size)
    _check_pulls(config, BFLOAT16_BYTES * (policy.parameters + policy.float32))
    if resumed is not None and checkpoints(resumed):
        _check_checkpoint(config, resumed)


def _check_engines(
    plan: RunPlan, model: Mapping[str, Any], trainer: type[TrainerKind], trains: TrainerSettings
) -> None:
    """Every engine of the run can serve the model, and what is trained of it."""
    providers = (*((TRAINER_PROVIDER,) if generates(plan.config) else ()), *plan.providers)
    places = [("trainer",) if provider == TRAINER_PROVIDER else ("providers", provider) for provider in providers]
    engines = [(config, *resolve_engine(config, "")) for config in map(plan.engine, providers)]
    for place, (config, kind, own) in zip(places, engines, strict=True):
        if why := kind.unfit(model):
            problem = f"found {config.kind!r}, which cannot serve {plan.config.model.checkpoint}: {why}"
            raise ConfigError(ConfigProblem(f"{problem}; allowed: 'vllm'", (*place, "engine", "kind")))
        if why := trainer.unserved(plan.config, trains, config, own):
            raise ConfigError(ConfigProblem(f"found {config.kind!r}, and {why}", (*place, "engine", "kind")))
    for place, (config, kind, own) in zip(places, engines, strict=True):
        try:
            kind.check(model, config, own)
        except ValueError as error:
            raise ConfigError(f"{'.'.join(place)}.{error}") from error


def _check_reference(config: Config, vocab_size: int) -> None:
    """The trainer's kind can load the reference, whose tokens are the policy's."""
    reference = config.trainer.reference
    if reference is None:
        return
    as_policy = config.model_copy(update={"model": config.model.model_copy(update={"checkpoint": reference})})
    kind, settings = resolve_trainer(config.trainer, "")
    try:
        read_model_config(as_policy)
        found = kind.examine(as_policy, settings).vocab_size
    except ConfigError as error:
        raise ConfigError(str(error).replace("model.checkpoint", "trainer.reference")) from error
    if found != vocab_size:
        raise ConfigError(
            f"trainer.reference: {reference} has a vocabulary of {found} tokens; allowed: the policy's, of {vocab_size}"
        )


def _check_words(config: Config) -> None:
    """What stands beside the base policy's weights is there."""
    from elastic.engine.model.stored import CheckpointError, check_words

    try:
        check_words(config.model.checkpoint)
    except CheckpointError as error:
        raise ConfigError(f"model.checkpoint: {error}") from error


def _check_checkpoint(config: Config, resumed: Path) -> None:
    """A trainer can go on from one of a run's last checkpoints."""
    from elastic.engine.model.stored import CheckpointError

    kind, settings = resolve_trainer(config.trainer, "")
    wrong: list[str] = []
    for path in reversed(checkpoints(resumed)[-KEEP:]):
        try:
            kind.check_checkpoint(config, settings, path)
            return
        except CheckpointError as error:
            wrong.append(str(error))
    raise ConfigError(
        f"--resume: {'; '.join(wrong)}; damaged files can be removed, and the run goes on from the base policy"
    )


def _check_pulls(config: Config, keyframe_bytes: int) -> None:
    """A newcomer's pull, of all weights, can end in time over the link that the configuration assumes."""
    gbps, timeout_s = config.weights.link_gbps, config.weights.pull_timeout_s
    keyframe_s = keyframe_bytes * 8 / (gbps * 1e9)
    if keyframe_s > timeout_s:
        raise ConfigError(
            f"weights.pull_timeout_s: found {timeout_s:g}, but {keyframe_bytes / 1e9:.1f} GB of weights take "
            f"{keyframe_s:.0f} s at weights.link_gbps = {gbps:g}; allowed: more than that"
        )
    if timeout_s > config.scheduler.load_timeout_s:
        raise ConfigError(
            f"scheduler.load_timeout_s: found {config.scheduler.load_timeout_s:g}, less than a pull may take; "
            f"allowed: from weights.pull_timeout_s = {timeout_s:g} on"
        )
