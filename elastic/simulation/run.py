"""Simulated runs, put together: the configuration, policies and journal of live ones around modelled devices."""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from elastic.compose import scheduling
from elastic.compose.execution import RunOutcome, notes_of
from elastic.compose.incarnations import configured_budget, journaled
from elastic.compose.plan import TRAINER_PROVIDER, RunPlan
from elastic.compose.scheduling import policies, run_plan
from elastic.config import Config, ConfigError, EngineConfig
from elastic.core.ids import parse_turn
from elastic.core.scheduler import Scheduler
from elastic.core.types import NS_PER_S, WeightMode
from elastic.runtime.journal import (
    INTERRUPTED,
    SIMULATED,
    DirectoryStore,
    JournalError,
    JournalWriter,
    RunDirectory,
    StoredRun,
    TrajectoryRow,
    TurnRow,
)
from elastic.runtime.sampler import Sampler
from elastic.runtime.status import RunStatus
from elastic.simulation.performance import (
    Episode,
    Episodes,
    EpisodeTurn,
    ProfileError,
    SimulatedRun,
    load_profile,
)
from elastic.simulation.performance.environments import EnvironmentSettings
from elastic.simulation.performance.episodes import DrawnEpisodes, EpisodeLimits, RecordedEpisodes
from elastic.simulation.performance.launchers import doubts
from elastic.simulation.performance.profile import ComputedProfile, Device, EngineRates, Profile, with_numbers
from elastic.simulation.performance.run import RunSettings, SharedPool
from providers.base import ProviderSettings
from traces.sessions import SESSIONS, read_sessions

DEFAULT_PROFILE = "local"
HORIZON_S = 90 * 24 * 3600.0
JOURNAL_INTERVAL_S = 0.2


class Experiment(msgspec.Struct, frozen=True, kw_only=True):
    """What a simulation needs besides the run's configuration, whose section `simulation` says what is not said here.

    `profile` is a profile's name or path, `profiles` those of providers (or the trainer) with one of their own.
    `turns` is a run's path, or a trace's name; with `environment_times` its environments' times are taken, too.
    `frame_s` is how long tokens may wait to be sent; the configuration's flush interval by default.
    """

    profile: str = ""
    profiles: dict[str, str] = {}
    turns: str = ""
    environment_times: bool = False
    frame_s: float | None = None
    horizon_s: float = HORIZON_S


def settled(config: Config, experiment: Experiment) -> Experiment:
    """What the options and the configuration say together, a run's name as its path. Raises `ConfigError`."""
    for option, value in (("--hours", experiment.horizon_s), ("--frame-s", experiment.frame_s)):
        if value is not None and not (math.isfinite(value) and value > 0):
            raise ConfigError(f"{option}: found {value}; allowed: a positive number")
    said = config.simulation
    turns = experiment.turns or said.turns_from
    if turns and turns not in SESSIONS:
        turns = str(DirectoryStore(config.run.directory).find(turns).path.resolve())
    if experiment.environment_times and (not turns or turns in SESSIONS):
        raise ConfigError("--environment-times: needs --turns-from RUN, whose environments' times are to be taken")
    return msgspec.structs.replace(
        experiment,
        profile=experiment.profile or said.profile,
        profiles=said.profiles | experiment.profiles,
        turns=turns,
    )


def devices_of(plan: RunPlan, experiment: Experiment) -> dict[str, Device]:
    """What the trainer's device and the workers of each provider are. Raises `ConfigError`."""
    config = plan.config
    gpus = {TRAINER_PROVIDER: ("trainer.gpus", config.trainer.gpus)}
    gpus |= {name: (f"providers.{name}.gpus_per_worker", s.gpus_per_worker) for name, s in plan.providers.items()}
    for name in experiment.profiles:
        if name not in gpus:
            raise ConfigError(f"--profile {name}=…: the run has no provider {name!r}; allowed: {', '.join(gpus)}")
    devices: dict[str, Device] = {}
    for name, (key, count) in gpus.items():
        where = "engine" if name == TRAINER_PROVIDER else f"providers.{name}.engine"
        engine = plan.engine(name)
        profile = _profile_of(experiment.profiles.get(name, experiment.profile), engine, key, count)
        profile = _with_numbers(profile, config.simulation.numbers)
        devices[name] = Device(profile=profile, rates=rates_of(engine, profile, where))
    _check_one_model(devices)
    return devices


def _profile_of(name: str, engine: EngineConfig, key: str, gpus: int) -> Profile:
    """The named profile; else the local one. The engine of one that is not computed is that of `engine.pacing`."""
    try:
        profile = load_profile(name or DEFAULT_PROFILE, gpus)
    except ProfileError as error:
        raise ConfigError(f"--profile: {error}") from error
    if isinstance(profile, ComputedProfile):
        if profile.gpus != gpus:
            raise ConfigError(
                f"{key}: found {gpus}, but --profile {name} has {profile.gpus} GPUs; allowed: the same number, or "
                f"{name.rpartition(':')[0]}, which has as many as {key} says"
            )
        return profile
    pacing = engine.pacing
    if pacing is None and not name:
        raise ConfigError(
            "engine.pacing: missing, and no --profile given: a simulation must know how fast devices are; "
            "such as --profile H100/Qwen3-8B"
        )
    if pacing is None:
        return profile
    return msgspec.structs.replace(
        profile,
        prefill_tokens_per_s=pacing.prefill_tokens_per_s,
        decode_step_s=dict(pacing.decode_step_s),
        kv_tokens=float(engine.kv_blocks * engine.kv_block_tokens),
    )


def _with_numbers(profile: Profile, numbers: Mapping[str, float]) -> Profile:
    try:
        return with_numbers(profile, numbers)
    except ProfileError as error:
        raise ConfigError(f"simulation.numbers.{error}") from error


def _check_one_model(devices: Mapping[str, Device]) -> None:
    models = {d.profile.model: name for name, d in devices.items() if isinstance(d.profile, ComputedProfile)}
    if len(models) > 1:
        found = ", ".join(f"{model} ({name})" for model, name in models.items())
        raise ConfigError(f"--profile: a run has one model; found {found}")


def rates_of(engine: EngineConfig, profile: Profile, where: str) -> EngineRates:
    if profile.kv_tokens < engine.max_context_tokens:
        raise ConfigError(
            f"{where}.max_context_tokens: {engine.max_context_tokens} tokens do not fit into the KV cache of "
            f"profile {profile.name}, which has {profile.kv_tokens:.0f}"
        )
    sheet = profile if isinstance(profile, ComputedProfile) else None
    return EngineRates(
        prefill_tokens_per_s=profile.prefill_tokens_per_s,
        decode_step_s=profile.decode_step_s,
        context_s=profile.context_s,
        overhead_s=profile.overhead_s,
        kv_tokens=int(profile.kv_tokens),
        kv_block_tokens=engine.kv_block_tokens,
        prefill_chunk_tokens=engine.prefill_chunk_tokens,
        max_batch=engine.max_batch,
        max_pending=engine.max_pending,
        max_context_tokens=engine.max_context_tokens,
        tflops=engine.tflops or (None if sheet is None else sheet.tflops),
        memory_gb_per_s=engine.memory_gb_per_s or (None if sheet is None else sheet.memory_gb_per_s),
    )


def episodes_of(config: Config, experiment: Experiment) -> Episodes:
    """A live run's, a trace's, or drawn ones. Raises `ConfigError`."""
    limits = EpisodeLimits(
        max_turns=config.rollout.max_turns,
        max_tokens_per_turn=config.rollout.max_tokens_per_turn,
        max_context_tokens=config.engine.max_context_tokens,
    )
    name = experiment.turns
    if not name:
        return DrawnEpisodes(config.run.seed, limits)
    if name in SESSIONS:
        sessions = [
            Episode(tuple(EpisodeTurn(t.new_tokens, t.output_tokens, t.gap_s) for t in session), 0.0)
            for session in read_sessions(name)
        ]
        return DrawnEpisodes(config.run.seed, limits, sessions)
    run = DirectoryStore(config.run.directory).find(name)
    try:
        return RecordedEpisodes(recorded_episodes(run, environment_times=experiment.environment_times), limits)
    except (JournalError, ValueError) as error:
        raise ConfigError(f"--turns-from: {run.path}: {error}") from error


def recorded_episodes(run: StoredRun, *, environment_times: bool = False) -> dict[str, Episode]:
    """How long each finished trajectory's turns were, and its reward; nothing else of the run, unless the times are
    wanted that its environments took before each turn."""
    turns: dict[str, list[TurnRow]] = {}
    with run.newest_journal() as journal:
        for row in journal.rows(TurnRow):
            turns.setdefault(row.trajectory, []).append(row)
        trajectories = journal.rows(TrajectoryRow)
    return {
        row.trajectory: Episode(
            _shapes(
                sorted(turns[row.trajectory], key=lambda turn: parse_turn(turn.turn)),
                row.started_ns if environment_times else None,
            ),
            row.reward,
        )
        for row in trajectories
        if row.reward is not None and row.trajectory in turns
    }


def _shapes(rows: Sequence[TurnRow], started_ns: int | None) -> tuple[EpisodeTurn, ...]:
    """`started_ns` is when the trajectory began, None where its times do not count."""
    shapes: list[EpisodeTurn] = []
    context, ended_ns = 0, started_ns
    for row in rows:
        prompt, tokens = row.prompt_tokens, row.tokens
        latency_s = max(0, row.requested_ns - ended_ns) / NS_PER_S if ended_ns is not None else 0.0
        shapes.append(EpisodeTurn(max(0, prompt - context), tokens, latency_s))
        context = prompt + tokens
        ended_ns = None if started_ns is None else row.finished_ns
    return tuple(shapes)


def build(
    plan: RunPlan,
    experiment: Experiment,
    scheduler: Scheduler,
    journal: JournalWriter,
    shared: SharedPool | None = None,
    devices: Mapping[str, Device] | None = None,
) -> SimulatedRun:
    """The run's world, ready to live; on a `shared` pool as one of its jobs. `devices` are in the place of what their
    providers would have.

    Raises `ConfigError` for what cannot be simulated.
    """
    config = plan.config
    devices = devices_of(plan, experiment) | dict(devices or {})
    rewards = config.rewards
    reward_s = max(rewards.pacing_s, devices[TRAINER_PROVIDER].profile.reward_s)
    settings = RunSettings(
        heartbeat_ns=round(config.scheduler.heartbeat_interval_s * NS_PER_S),
        flush_ns=round((experiment.frame_s or config.scheduler.flush_interval_s) * NS_PER_S),
        horizon_ns=round(experiment.horizon_s * NS_PER_S),
        environments=EnvironmentSettings(
            max_tokens_per_turn=config.rollout.max_tokens_per_turn,
            scored_by_function=bool(plan.reward),
            reward_s=reward_s,
            reward_usd=rewards.usd_per_call + rewards.usd_per_s * reward_s,
            take_time=not experiment.environment_times,
        ),
        weight_mode=WeightMode(config.weights.mode),
    )
    trainer = ProviderSettings(
        max_workers=1,
        usd_per_gpu_hour=config.trainer.usd_per_gpu_hour,
        gpus_per_worker=config.trainer.gpus,
        billing=config.trainer.billing,
    )
    try:
        episodes = episodes_of(config, experiment)
        providers = {name: (plan.provider_types[name], one) for name, one in plan.providers.items()}
        run = SimulatedRun(scheduler, settings, devices, trainer, providers, episodes, journal, shared)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    _check_patience(config, run)
    return run


def _check_patience(config: Config, run: SimulatedRun) -> None:
    """Every lease that the core would give up before its workers can be there is a mistake of the configuration."""
    for name, launcher in run.launchers.items():
        profile, market = launcher.device.profile, launcher.market
        asked_s, boot_s = launcher.queue_s(), market.boot_s() + launcher.boot_s()
        if asked_s >= config.scheduler.acquire_timeout_s:
            raise ConfigError(
                f"scheduler.acquire_timeout_s: {config.scheduler.acquire_timeout_s:g} s, but {name} grants what it is "
                f"asked for after {asked_s:g} s (profile {profile.name}: {launcher.queue_key}); allowed: a longer "
                f"timeout"
            )
        if boot_s + profile.message_s >= config.scheduler.boot_timeout_s:
            delay = f" + providers.{name}.{market.delay_key}" if market.boot_s() else ""
            raise ConfigError(
                f"scheduler.boot_timeout_s: {config.scheduler.boot_timeout_s:g} s, but workers of {name} speak "
                f"{boot_s:g} s after their lease's grant (profile {profile.name}: {launcher.boot_key}{delay}); "
                f"allowed: a longer timeout, such as --set scheduler.boot_timeout_s={math.ceil(2 * boot_s)}, or a "
                f"better number for {launcher.boot_key} in simulation.numbers"
            )


def simulate(
    plan: RunPlan,
    run_dir: Path,
    experiment: Experiment,
    *,
    observe: Callable[[RunStatus], None] = lambda _: None,
    stopped: Callable[[], bool] = lambda: False,
    note: Callable[[str], None] = lambda _: None,
) -> RunOutcome:
    """Live through the run on virtual time, into `run_dir`, as `elastic.compose.execution` does on wall time.

    `stopped` is asked at each sample; once it is true the run gives everything back. `note` is told what a reader of
    the figures must know, as the report says it, too. Raises `ConfigError` when it cannot begin, and
    `SimulationError` when it cannot end.
    """
    config = plan.config
    notes: list[str] = []

    def tell(lines: Sequence[str]) -> None:
        for line in lines:
            notes.append(line)
            note(line)
        journal.meta("notes", msgspec.json.encode(notes).decode())

    experiment = settled(config, experiment)
    scheduler = Scheduler(run_plan(plan), scheduling.limits(config), policies(config), 0)
    settings = config.journal.model_copy(update={"commit_interval_s": JOURNAL_INTERVAL_S})
    told = notes_of(plan, run_dir) | {SIMULATED: msgspec.json.encode(experiment).decode()}
    journal = RunDirectory(run_dir).begin_journal(settings, waits=True, notes=told)
    with journaled(journal, scheduler) as ending:
        run = build(plan, experiment, scheduler, journal)
        tell([line for name, one in plan.providers.items() for line in doubts(name, plan.provider_types[name], one)])
        sampler = Sampler(config.run.name, scheduler, run.recorder, journal, observe, window=2)
        asked = False

        def sample() -> None:
            nonlocal asked
            if journal.failed is not None:
                raise journal.failed
            if not asked and stopped():
                asked = True
                run.stop(INTERRUPTED)
            sampler.sample(run.loop.now_ns)

        failed = run.live(told=configured_budget(config), sample=sample)
        sample()
        tell(run.environments.episodes.notes())
        ending.conclude(failed, scheduler.stopped)
    return RunOutcome(run_dir=run_dir, failed=failed, interrupted=failed == INTERRUPTED, stopped=scheduler.stopped)
