"""The composition root: reads a configuration, picks policies, providers and environment, and wires a run.

The only room that knows everybody. Commands of the command line end here.
"""

import asyncio
import contextlib
import fcntl
import gc
import importlib.metadata
import json
import os
import secrets
import shutil
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import msgspec
import structlog
import uvicorn
from pydantic import BaseModel

from elastic import wire
from elastic.config import Config, ConfigError, EngineConfig, load_config, validate
from elastic.core.digest import digest
from elastic.core.policy import (
    BalancingPolicy,
    Policies,
    ProvisioningPolicy,
    RoutingPolicy,
    SeedingPolicy,
    SuccessionPolicy,
)
from elastic.core.scheduler import Scheduler
from elastic.core.types import NS_PER_S, Limits, Plan
from elastic.envs.base import Environment
from elastic.runtime.gateway import GatewayError
from elastic.runtime.journal import Journal, JournalError, JournalReader, earlier_journals, next_archive
from elastic.runtime.orchestrator import Orchestrator
from elastic.runtime.status import RunStatus
from elastic.weights.relay import open_relay
from elastic.weights.server import relay_app
from functions.base import FunctionPool, Meter
from functions.local import LocalFunctionPool, Prices
from policies.balancing import ContinuousBalancing
from policies.provisioning import MarginalValue, TakeWhatIsOffered
from policies.routing import AffinityRouting, PinnedRouting, TurnWiseRouting
from policies.sampling import DynamicSampling, FixedBatch
from policies.seeding import AdaptiveWindow, FixedWindow
from policies.selection import NonZeroVariance
from policies.succession import EarlySuccessor
from providers.base import Provider, ProviderContext, ProviderSettings
from providers.serving_messages import LendOrder

T = TypeVar("T")
log = structlog.get_logger(__name__)

TRAINER_PROVIDER = "trainer"
JOURNAL = "journal.sqlite"
REDIAL_SHARE = 2 / 3
"""Of the silence that fences a worker: it dials again before that, and may resume its session."""
ANSWER_GRACE_S = 2.0
"""A function pool kills a call that is out of time and says so; only one that does not is given up without it."""
WORKER_DRAIN_SHARE = 0.8
"""Of the time a drain may take: the worker's goodbye comes before the orchestrator gives it up."""
ENVIRONMENT_VARIABLES = ("ELASTIC_JOIN", "ELASTIC_WORKER", "ELASTIC_JOIN_TOKEN")
RECIPE_FILE = "recipe"
"""Beside a base policy that was made here: the name of what it was made from."""


class RunPlan(msgspec.Struct, frozen=True, kw_only=True):
    """A resolved run: what `--dry-run` shows and `execute` carries out."""

    config: Config
    providers: dict[str, ProviderSettings]
    provider_types: dict[str, type[Provider]]
    environment: type[Environment]
    environment_settings: BaseModel
    reward: str = ""
    """The entry point of the function that computes rewards (`module:attribute`); empty: the environment does."""

    def resolved(self) -> dict[str, Any]:
        """The configuration as it takes effect: with the providers that are used, and everybody's defaults."""
        body = self.config.model_dump(mode="json")
        body["environment"]["settings"] = self.environment_settings.model_dump(mode="json")
        body["providers"] = {name: settings.model_dump(mode="json") for name, settings in self.providers.items()}
        return body


class Acquisition(msgspec.Struct, frozen=True, kw_only=True):
    """What a run would acquire from one provider, and what that costs at most."""

    provider: str
    max_workers: int
    gpus_per_worker: int
    usd_per_gpu_hour: float
    usd_per_hour_max: float


class RewardCalls(msgspec.Struct, frozen=True, kw_only=True):
    """What a run would call for its rewards, and what that costs."""

    function: str
    concurrency: int
    usd_per_s: float
    usd_per_call: float


class Prepared(Enum):
    """What came of preparing a base policy."""

    MADE = "made"
    THERE = "there"
    OF_OTHER_SETTINGS = "of other settings"


class PastLife(msgspec.Struct, frozen=True, kw_only=True):
    """What a run did before it is resumed."""

    providers: tuple[str, ...] = ()
    status: str = ""
    steps_done: int = 0


class RunOutcome(msgspec.Struct, frozen=True, kw_only=True):
    run_dir: Path
    failed: str
    interrupted: bool


def installed(group: str) -> dict[str, importlib.metadata.EntryPoint]:
    """Entry points of one kind by name: ours and third parties' alike."""
    return {point.name: point for point in importlib.metadata.entry_points(group=group)}


def _pick(kind: str, name: str, where: str) -> importlib.metadata.EntryPoint:
    points = installed(f"elastic.{kind}s")
    if name not in points:
        raise ConfigError(f"{where}: unknown {kind} {name!r}; installed: {', '.join(sorted(points)) or 'none'}")
    return points[name]


def resolve(config: Config, provider_names: Sequence[str], where: str) -> RunPlan:
    """Check everything that can be checked before a process starts. Raises `ConfigError`."""
    types: dict[str, type[Provider]] = {}
    settings: dict[str, ProviderSettings] = {}
    names = list(dict.fromkeys(provider_names))
    if "reserved" in config.providers and "reserved" not in names:
        names.append("reserved")
    for name in (*names, *config.providers):
        source = f"{where}: providers.{name}" if name in config.providers else "--providers"
        kind = types.setdefault(name, _pick("provider", name, source).load())
        checked = validate(kind.Settings, config.providers.get(name, {}), where, f"providers.{name}")
        if name in names:
            settings[name] = checked
    environment = _pick("environment", config.environment.name, f"{where}: environment.name").load()
    reward = config.rewards.name and _pick("reward", config.rewards.name, f"{where}: rewards.name").value
    for name, chosen in settings.items():
        engine = validate(EngineConfig, engine_settings(config, chosen), where, f"providers.{name}.engine")
        _pick("engine", engine.kind, f"{where}: providers.{name}.engine.kind")
    _pick("engine", config.engine.kind, f"{where}: engine.kind")
    return RunPlan(
        config=config,
        providers=settings,
        provider_types={name: types[name] for name in names},
        environment=environment,
        environment_settings=validate(environment.Settings, config.environment.settings, where, "environment.settings"),
        reward=reward,
    )


def engine_settings(config: Config, provider: ProviderSettings) -> dict[str, Any]:
    """The run's engine settings, with what a provider's workers have of their own."""
    return config.engine.model_dump(mode="json") | provider.engine


def acquisitions(plan: RunPlan) -> list[Acquisition]:
    """The trainer's device and what each provider would be asked for."""
    trainer = plan.config.trainer
    rows = [(TRAINER_PROVIDER, 1, trainer.gpus, trainer.usd_per_gpu_hour)]
    rows += [(name, s.max_workers, s.gpus_per_worker, s.usd_per_gpu_hour) for name, s in plan.providers.items()]
    return [
        Acquisition(
            provider=name,
            max_workers=workers,
            gpus_per_worker=gpus,
            usd_per_gpu_hour=usd,
            usd_per_hour_max=workers * gpus * usd,
        )
        for name, workers, gpus, usd in rows
    ]


def reward_calls(plan: RunPlan) -> RewardCalls | None:
    """What would be called for rewards; None where the environment has them."""
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
        return json.loads(path.read_text())
    except OSError as error:
        raise ConfigError(
            f"model.checkpoint: {path} cannot be read ({error.strerror}); "
            "`elastic prepare CONFIG` makes the base policy of the examples"
        ) from error
    except ValueError as error:
        raise ConfigError(f"model.checkpoint: {path} is not JSON: {error}") from error


def check_policy(plan: RunPlan, resumed: Path | None = None) -> None:
    """Read the base policy as a worker would, and a resumed run's checkpoint as the trainer would.

    Raises `ConfigError` for a policy that does not match its own config or cannot say every word of the environment,
    for a checkpoint that is damaged or of another model, and where there is no such device.
    """
    import torch

    from elastic.model.checkpoint import CheckpointError, load_model
    from elastic.trainer.checkpoint import saved
    from elastic.trainer.trainer import GRPOTrainer

    config, words = plan.config, len(plan.environment.vocabulary)
    if config.engine.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("engine.device: found 'cuda', but no CUDA device is here; allowed: 'auto', 'cpu'")
    read_model_config(config)
    try:
        model = load_model(config.model.checkpoint)
    except CheckpointError as error:
        raise ConfigError(f"model.checkpoint: {error}") from error
    if model.config.vocab_size < words:
        raise ConfigError(
            f"model.checkpoint: {config.model.checkpoint} has a vocabulary of {model.config.vocab_size} tokens; "
            f"environment {config.environment.name!r} needs at least {words}"
        )
    if resumed and (checkpoints := saved(resumed / "checkpoints")):
        trainer = GRPOTrainer(config.trainer, model, config.rollout.groups, config.rollout.temperature)
        try:
            trainer.load(checkpoints[-1])
        except CheckpointError as error:
            raise ConfigError(
                f"--resume: {error}; a damaged file can be removed, and the run goes on from the one before it, "
                "or from the base policy"
            ) from error


# Runs


def new_run_dir(config: Config) -> Path:
    """A directory of its own for a new run, named after it and the time."""
    stamp = time.strftime("%Y%m%d-%H%M%S")
    for suffix in ("", *(f"-{n}" for n in range(2, 1000))):
        path = config.run.directory / f"{config.run.name}-{stamp}{suffix}"
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            raise ConfigError(f"run.directory: {path} cannot be made ({error.strerror})") from error
        save_run_config(path, config)
        return path
    raise ConfigError(f"run.directory: {config.run.directory} has too many runs of this second")


def discard_run(run_dir: Path) -> None:
    """A run that could not begin leaves nothing."""
    shutil.rmtree(run_dir, ignore_errors=True)


def find_run(directory: Path, name: str) -> Path:
    """A run by its path, its name, or `latest`. Raises `ConfigError` that names those there are."""
    runs = list_runs(directory)
    if name == "latest" and runs:
        return runs[-1]
    for candidate in (Path(name), directory / name):
        if (candidate / "config.json").is_file():
            return candidate
    there = ", ".join(path.name for path in runs[-5:]) or "none"
    raise ConfigError(f"no run {name!r} in {directory}; the latest are: {there}")


def list_runs(directory: Path) -> list[Path]:
    """Runs in a directory, oldest first."""
    return sorted(
        (p.parent for p in directory.glob("*/config.json")), key=lambda p: (p / "config.json").stat().st_mtime
    )


def load_run_config(run_dir: Path, overrides: Sequence[str] = ()) -> Config:
    """The resolved configuration that a run was started with."""
    return load_config(run_dir / "config.json", overrides)


def save_run_config(run_dir: Path, config: Config) -> None:
    """What the run's other processes, and whoever resumes it, read."""
    path = run_dir / "config.json"
    try:
        path.write_text(config.model_dump_json(indent=2))
    except OSError as error:
        raise ConfigError(f"run.directory: {path} cannot be written ({error.strerror})") from error


def past_life(run_dir: Path) -> PastLife:
    """How far a run has come, by the newest of its journals that knows with which providers it began.

    Raises `ConfigError` for one that cannot be read, and for a run that was only simulated.
    """
    newest = run_dir / JOURNAL
    for path in (newest, *reversed(earlier_journals(newest))):
        past = _told_by(path) if path.exists() else None
        if past is not None:
            return past
    return PastLife()


def _told_by(journal_path: Path) -> PastLife | None:
    """What one journal says of the life it is of; None if that had hardly begun."""
    try:
        with contextlib.closing(JournalReader(journal_path)) as reader:
            meta, steps = reader.meta(), reader.rows("steps")
    except JournalError as error:
        raise ConfigError(f"{error}; the run goes on without this journal once it is moved away") from error
    if "simulated" in meta:
        raise ConfigError(f"{journal_path}: a simulated run; only live ones can go on")
    if "providers" not in meta:
        return None
    return PastLife(
        providers=tuple(name for name in meta["providers"].split(",") if name),
        status=meta.get("status", ""),
        steps_done=steps[-1]["step"] + 1 if steps else 0,
    )


@contextlib.contextmanager
def _next_life(run_dir: Path, config: Config, scheduler: Scheduler) -> Iterator[PastLife]:
    """What the run did before, its journal and configuration making room for those of the life that is lived within.

    One that fails before the trainer is there leaves no trace: what made room is put back.
    """
    past = past_life(run_dir)
    settings, journal = run_dir / "config.json", run_dir / JOURNAL
    former_settings, archived = settings.read_bytes(), next_archive(journal)
    save_run_config(run_dir, config)
    _move_journal(journal, archived)
    try:
        yield past
    except Exception:
        if scheduler.version is None:
            _move_journal(archived, journal)
            settings.write_bytes(former_settings)
        raise


def _move_journal(source: Path, target: Path) -> None:
    """Move a journal, and what SQLite keeps beside it, to where nothing is left of any other."""
    for suffix in ("", "-wal", "-shm"):
        target.with_name(target.name + suffix).unlink(missing_ok=True)
        with contextlib.suppress(FileNotFoundError):
            source.with_name(source.name + suffix).rename(target.with_name(target.name + suffix))


def replay(run_dir: Path) -> Scheduler:
    """The scheduler in the state to which the run's journal leads (invariant 13)."""
    reader = JournalReader(run_dir / JOURNAL)
    try:
        meta = reader.meta()
        config = validate(Config, json.loads(meta["config"]), str(reader.path))
        plan = resolve(config, [name for name in meta["providers"].split(",") if name], str(reader.path))
        scheduler = Scheduler(run_plan(plan), limits(config), policies(config), 0)
        for t_ns, event in reader.events():
            scheduler.handle(event, t_ns)
    finally:
        reader.close()
    return scheduler


async def execute(
    plan: RunPlan,
    run_dir: Path,
    *,
    resume: bool = False,
    observe: Callable[[RunStatus], None] = lambda _: None,
    on_ready: Callable[[Orchestrator], None] = lambda _: None,
) -> RunOutcome:
    """Carry out a run in `run_dir`. `on_ready` gets the orchestrator, to stop it from outside.

    Raises what the orchestrator raises when the run cannot begin; every process is gone by then.
    """
    config = plan.config
    scheduler = Scheduler(run_plan(plan), limits(config), policies(config), 0)
    next_life = _next_life(run_dir, config, scheduler) if resume else contextlib.nullcontext(PastLife())
    with claimed(run_dir), next_life as past:
        (run_dir / "logs").mkdir(exist_ok=True)
        journal = Journal(run_dir / JOURNAL, config.journal.commit_interval_s)
        for key, value in _meta(plan, run_dir).items():
            journal.meta(key, value)
        status = UNEXPECTED
        try:
            await _reconcile(plan, run_dir, [name for name in past.providers if name not in plan.providers])
            async with _relay(config, run_dir) as (relay, relay_token):
                orchestrator = Orchestrator(
                    config,
                    scheduler,
                    journal,
                    make_providers=lambda join, now_ns: make_providers(
                        plan, run_dir, join, now_ns, resume=resume, note=journal.meta
                    ),
                    make_environment=lambda: plan.environment(plan.environment_settings),
                    stop_token_ids=plan.environment.stop_token_ids,
                    welcome=_welcome(config, relay, relay_token),
                    observe=observe,
                    make_reward_pool=partial(make_reward_pool, plan, run_dir) if plan.reward else None,
                    engines={name: engine_settings(config, s) for name, s in plan.providers.items() if s.engine},
                )
                on_ready(orchestrator)
                failed = await orchestrator.run(config.run.host, config.run.port)
            status = f"failed: {failed}" if failed else "finished"
        except Exception as error:
            status = f"failed: {error}"
            raise
        finally:
            journal.meta("digest", digest(scheduler))
            journal.meta("status", status)
            journal.close()
    return RunOutcome(run_dir=run_dir, failed=failed, interrupted=failed == INTERRUPTED)


@contextlib.contextmanager
def claimed(run_dir: Path) -> Iterator[None]:
    """The run is ours alone. Raises `ConfigError` while another process is at it; a dead one's claim is void."""
    with (run_dir / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(f"run {run_dir} is still going on in another process; stop that one first") from error
        yield


def is_claimed(run_dir: Path) -> bool:
    """Whether a process is at the run now."""
    with contextlib.suppress(FileNotFoundError), (run_dir / "lock").open() as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


INTERRUPTED = "interrupted"
RUNNING = "running"
UNEXPECTED = "failed: it ended unexpectedly"


def run_plan(plan: RunPlan) -> Plan:
    return Plan(
        steps=plan.config.run.steps,
        groups=plan.config.rollout.groups,
        group_size=plan.config.rollout.group_size,
        staleness_bound=plan.config.rollout.staleness_bound,
        minibatches=plan.config.trainer.updates_per_step,
        trainer_provider=TRAINER_PROVIDER,
        providers=tuple(plan.providers),
    )


def limits(config: Config) -> Limits:
    """The configuration's times, in the core's nanoseconds."""
    s = config.scheduler

    def ns(seconds: float) -> int:
        return round(seconds * NS_PER_S)

    return Limits(
        heartbeat_timeout_ns=ns(s.heartbeat_timeout_s),
        stall_timeout_ns=ns(s.stall_timeout_s),
        turn_stall_timeout_ns=ns(s.turn_stall_timeout_s),
        handover_timeout_ns=ns(s.handover_timeout_s),
        drain_timeout_ns=ns(s.drain_timeout_s),
        acquire_timeout_ns=ns(s.acquire_timeout_s),
        boot_timeout_ns=ns(s.boot_timeout_s),
        load_timeout_ns=ns(s.load_timeout_s),
        resume_timeout_ns=ns(s.resume_timeout_s),
        release_timeout_ns=ns(s.release_timeout_s),
        queue_timeout_ns=ns(s.queue_timeout_s),
        train_timeout_ns=ns(config.trainer.step_timeout_s),
        reseed_delay_ns=ns(s.reseed_delay_s),
        retry_base_ns=ns(s.retry_base_s),
        retry_max_ns=ns(s.retry_max_s),
        max_engine_errors=s.max_engine_errors,
        max_pending=config.engine.max_pending,
        balance_interval_ns=ns(config.balancing.interval_s),
        score_timeout_ns=ns(config.rewards.timeout_s + ANSWER_GRACE_S),
        score_retry_ns=ns(config.rewards.retry_base_s),
        score_attempts_max=config.rewards.max_retries + 1,
        scorings_max=config.rewards.concurrency,
    )


def policies(config: Config) -> Policies:
    rollout = config.rollout
    return Policies(
        routing=_routing(config),
        seeding=_seeding(config),
        provisioning=_provisioning(config),
        selection=NonZeroVariance(),
        balancing=_balancing(config),
        succession=_succession(config),
        sampling=DynamicSampling(rollout.dynamic_sampling_most) if rollout.dynamic_sampling else FixedBatch(),
    )


def make_reward_pool(plan: RunPlan, run_dir: Path, meter: Meter) -> FunctionPool:
    rewards = plan.config.rewards
    return LocalFunctionPool(
        plan.reward,
        concurrency=rewards.concurrency,
        idle_s=rewards.idle_s,
        prices=Prices(rewards.usd_per_s, rewards.usd_per_call, rewards.pacing_s),
        log=run_dir / "logs" / "functions.log",
        meter=meter,
    )


def _succession(config: Config) -> SuccessionPolicy | None:
    margin = config.provisioning.successor_margin
    return EarlySuccessor(margin) if margin > 0 else None


def _seeding(config: Config) -> SeedingPolicy:
    s = config.seeding
    window_ns = round(s.window_s * NS_PER_S)
    if s.policy == "fixed":
        return FixedWindow(window_ns)
    return AdaptiveWindow(
        window_ns,
        rate=s.rate,
        longest_ns=round(s.longest_window_s * NS_PER_S),
        remembers=s.memory,
        bounds_workers=s.bound_workers,
    )


def _routing(config: Config) -> RoutingPolicy:
    match config.routing.policy:
        case "static":
            return PinnedRouting()
        case "turn_wise":
            return TurnWiseRouting()
        case "affinity":
            return AffinityRouting(config.routing.hardware)


def _balancing(config: Config) -> BalancingPolicy | None:
    return ContinuousBalancing(config.balancing.plateau_share) if config.balancing.policy == "continuous" else None


def _provisioning(config: Config) -> ProvisioningPolicy:
    if config.provisioning.policy == "take_all":
        return TakeWhatIsOffered()
    return MarginalValue(config.provisioning.usd_per_hour_saved)


def make_providers(
    plan: RunPlan,
    run_dir: Path,
    join: str,
    now_ns: Callable[[], int],
    *,
    resume: bool,
    note: Callable[[str, str], None] = lambda key, text: None,
) -> Mapping[str, Provider]:
    """The trainer's device and every chosen provider, ready to start; `note` keeps what they have to say for the
    run's report."""
    from providers.reserved import TrainerProvider

    def context(command: Sequence[str]) -> ProviderContext:
        return ProviderContext(
            run=run_dir.name,
            run_dir=run_dir.resolve(),
            join=join,
            worker_command=tuple(command),
            host_command=(*elastic, "serving-host"),
            now_ns=now_ns,
            note=note,
            acquire_timeout_s=plan.config.scheduler.acquire_timeout_s,
            release_timeout_s=plan.config.scheduler.release_timeout_s,
        )

    elastic = (sys.executable, "-m", "elastic.cli")
    trainer = plan.config.trainer
    trainer_command = (*elastic, "worker", "--trainer", str(run_dir.resolve()), *(("--resume",) if resume else ()))
    providers: dict[str, Provider] = {
        TRAINER_PROVIDER: TrainerProvider(
            TRAINER_PROVIDER,
            TrainerProvider.Settings(
                max_workers=1, usd_per_gpu_hour=trainer.usd_per_gpu_hour, gpus_per_worker=trainer.gpus
            ),
            context(trainer_command),
        )
    }
    for name, settings in plan.providers.items():
        providers[name] = plan.provider_types[name](name, settings, context((*elastic, "worker")))
    return providers


async def _reconcile(plan: RunPlan, run_dir: Path, names: Sequence[str]) -> None:
    """End what the run's earlier life left with providers that it does not use any more."""
    former = resolve(plan.config, names, str(run_dir))
    providers = make_providers(former, run_dir, "", time.monotonic_ns, resume=True)
    for name in names:
        for line in await providers[name].reconcile():
            log.warning("left over from an earlier process", what=line)


def _meta(plan: RunPlan, run_dir: Path) -> dict[str, str]:
    return {
        "run": run_dir.name,
        "status": RUNNING,
        "config": plan.config.model_dump_json(),
        "providers": ",".join(plan.providers),
        "seed": str(plan.config.run.seed),
        "started_at": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }


def _welcome(config: Config, relay: str, relay_token: str) -> wire.Welcome:
    s = config.scheduler
    return wire.Welcome(
        session_key="",
        epoch=0,
        heartbeat_interval_s=s.heartbeat_interval_s,
        flush_interval_s=s.flush_interval_s,
        silence_timeout_s=s.heartbeat_timeout_s * REDIAL_SHARE,
        engine=config.engine.model_dump(mode="json"),
        model=read_model_config(config),
        relay=relay,
        relay_token=relay_token,
        resume_timeout_s=s.resume_timeout_s,
        pull_timeout_s=config.weights.pull_timeout_s,
        load_timeout_s=s.load_timeout_s,
        drain_timeout_s=s.drain_timeout_s * WORKER_DRAIN_SHARE,
        whole_turns=s.collect == "responses",
    )


@contextlib.asynccontextmanager
async def _relay(config: Config, run_dir: Path) -> AsyncIterator[tuple[str, str]]:
    """Where workers pull weights from: the run's directory, or that directory over HTTP."""
    directory = (run_dir / "weights").resolve()
    directory.mkdir(exist_ok=True)
    if config.weights.relay == "directory":
        yield str(directory), ""
        return
    try:
        listener = socket.create_server((config.run.host, 0))
    except OSError as error:
        raise GatewayError(
            f"cannot serve weights on {config.run.host}: {error.strerror or error}; name another run.host"
        ) from error
    token, timeout_s = secrets.token_urlsafe(32), config.scheduler.release_timeout_s
    app = relay_app(open_relay(str(directory)), token)
    server = _Server(uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=1))
    serving = asyncio.create_task(server.serve(sockets=[listener]), name="weights relay")
    try:
        yield "http://{}:{}".format(*listener.getsockname()[:2]), token
    finally:
        server.should_exit = True
        await asyncio.wait({serving}, timeout=timeout_s)
        serving.cancel()
        await asyncio.wait({serving}, timeout=timeout_s)


class _Server(uvicorn.Server):
    """Leaves signals to the run, which ends with it anyway."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


# What runs in other processes


def prepare(plan: RunPlan, progress: Callable[[int, int, float], None], *, force: bool = False) -> Prepared:
    """Make the base policy of the examples by a short supervised warm-up, unless it is there.

    Raises `ConfigError` where it cannot be made or written, or the directory holds something else.
    """
    from elastic.model.checkpoint import CheckpointError
    from elastic.model.config import Qwen3Config
    from elastic.trainer.warmup import WarmupSettings, cache_key, warm_up

    checkpoint, model = plan.config.model.checkpoint, Qwen3Config()
    keep = _holds_policy(checkpoint) and not force
    if plan.config.environment.name != "frozenlake":
        if keep:
            return Prepared.THERE
        raise ConfigError(f"model.checkpoint: {checkpoint} cannot be made: only frozenlake has a warm-up")
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


def run_worker(join: str | None, trainer_run_dir: Path | None, *, resume: bool) -> NoReturn:
    """Be a worker (or, with `trainer_run_dir`, the trainer of that run) until the lease ends."""
    from elastic.worker.agent import leave_process, run_agent

    ticket = worker_ticket(join)
    if trainer_run_dir is None:
        leave_process(run_loop(run_agent(*ticket)))
    from elastic.worker.trainer_host import run_trainer_host

    config = load_run_config(trainer_run_dir)
    leave_process(run_loop(run_trainer_host(*ticket, config, trainer_run_dir, resume)))


def run_serving_host() -> int:
    """Be a serving host until a signal, with the settings that its provider put into the environment."""
    from elastic.worker import serving_host
    from elastic.worker.agent import run_agent
    from elastic.worker.warmup import warm_up

    async def start_agent(order: LendOrder, share: serving_host.HostShare) -> None:
        end = await run_agent(
            order.join,
            order.worker,
            order.token,
            share.build_engine,
            share=share,
            born_ns=time.monotonic_ns(),
        )
        if end.code != 0:
            raise RuntimeError(end.reason)

    settings = serving_host.parse_settings(os.environ.get(serving_host.HOST_VARIABLE, ""))
    # Before anything is offered: from the order to lend on, every second of it would be the run's.
    warm_up()
    run_loop(serving_host.serve_host(settings, start_agent))
    return 0


def run_loop(work: Coroutine[Any, Any, T]) -> T:
    """Like `asyncio.run`, on the fastest event loop there is."""
    gc.collect()
    gc.freeze()  # modules stay: a full collection that went through them would hold the loop up
    with asyncio.Runner(loop_factory=event_loop) as runner:
        return runner.run(work)


def event_loop() -> asyncio.AbstractEventLoop:
    """uvloop's, where there is one."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


def worker_ticket(join: str | None) -> tuple[str, str, str]:
    """Where to dial and as whom: (join, worker, token), from the environment that a provider sets."""
    found = {name: os.environ.get(name, "") for name in ENVIRONMENT_VARIABLES}
    if join:
        found["ELASTIC_JOIN"] = join
    missing = [name for name, value in found.items() if not value]
    if missing:
        raise ConfigError(f"elastic worker: {', '.join(missing)} not set; a provider hands these to its workers")
    host, _, port = found["ELASTIC_JOIN"].rpartition(":")
    if not (host and port.isdecimal() and 0 < int(port) < 65_536):
        raise ConfigError(f"elastic worker: --join takes HOST:PORT (found {found['ELASTIC_JOIN']!r})")
    return found["ELASTIC_JOIN"], found["ELASTIC_WORKER"], found["ELASTIC_JOIN_TOKEN"]
