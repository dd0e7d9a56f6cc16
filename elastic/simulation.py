"""Simulated runs, put together: the configuration, policies and journal of live ones around modelled devices."""

import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from elastic import compose
from elastic.config import Config, ConfigError
from elastic.core.scheduler import Scheduler
from elastic.core.types import NS_PER_S, WeightMode
from elastic.runtime.journal import Journal, JournalError, JournalReader
from elastic.runtime.status import RunStatus, run_status, tokens_per_s, total_tokens
from elastic.sim.performance import (
    Chronicle,
    Episode,
    Episodes,
    Profile,
    ProfileError,
    SimulatedRun,
    Turn,
    load_profile,
)
from elastic.sim.performance.episodes import DrawnEpisodes, EpisodeLimits, RecordedEpisodes
from elastic.sim.performance.profile import EngineRates
from elastic.sim.performance.run import RunSettings
from providers.base import ProviderSettings
from traces.sessions import SESSIONS, read_sessions

DEFAULT_PROFILE = "local"
HORIZON_S = 90 * 24 * 3600.0
JOURNAL_INTERVAL_S = 0.2


class Experiment(msgspec.Struct, frozen=True, kw_only=True):
    """What a simulation needs besides the run's configuration. `turns` is a run's path, or a trace's name.

    `frame_s` is how long tokens may wait to be sent; the configuration's flush interval by default.
    """

    profile: str = ""
    turns: str = ""
    frame_s: float | None = None
    horizon_s: float = HORIZON_S


def profile_of(config: Config, experiment: Experiment) -> Profile:
    """The named profile; else the local one, whose engine is that of the configuration's pacing."""
    pacing = config.engine.pacing
    try:
        profile = load_profile(experiment.profile or DEFAULT_PROFILE)
    except ProfileError as error:
        raise ConfigError(f"--profile: {error}") from error
    if experiment.profile and "/" in experiment.profile:
        return profile
    if pacing is None and not experiment.profile:
        raise ConfigError(
            "engine.pacing: missing, and no --profile given: a simulation must know how fast devices are; "
            "such as --profile H100/Qwen3-8B"
        )
    if pacing is not None:
        kv_tokens = float(config.engine.kv_blocks * config.engine.kv_block_tokens)
        return msgspec.structs.replace(
            profile,
            prefill_tokens_per_s=pacing.prefill_tokens_per_s,
            decode_step_s=dict(pacing.decode_step_s),
            kv_tokens=kv_tokens,
        )
    return profile


def rates_of(config: Config, profile: Profile) -> EngineRates:
    engine = config.engine
    if profile.kv_tokens < engine.max_context_tokens:
        raise ConfigError(
            f"engine.max_context_tokens: {engine.max_context_tokens} tokens do not fit into the KV cache of "
            f"profile {profile.name}, which has {profile.kv_tokens:.0f}"
        )
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
            Episode(tuple(Turn(t.new_tokens, t.output_tokens, t.gap_s) for t in session), 0.0)
            for session in read_sessions(name)
        ]
        return DrawnEpisodes(config.run.seed, limits, sessions)
    run_dir = compose.find_run(config.run.directory, name)
    try:
        return RecordedEpisodes(recorded_episodes(run_dir))
    except (JournalError, ValueError) as error:
        raise ConfigError(f"--turns-from: {run_dir}: {error}") from error


def recorded_episodes(run_dir: Path) -> dict[str, Episode]:
    """How long each finished trajectory's turns were, and its reward; nothing else of the run."""
    reader = JournalReader(run_dir / compose.JOURNAL)
    try:
        turns: dict[str, list[tuple[int, int, int]]] = {}
        for row in reader.rows("turns"):
            number = int(row["turn"].rpartition("/")[2])
            turns.setdefault(row["trajectory"], []).append((number, row["prompt_tokens"], row["tokens"]))
        return {
            row["trajectory"]: Episode(_shapes(sorted(turns.get(row["trajectory"], []))), row["reward"])
            for row in reader.rows("trajectories")
            if not row["cause"] and turns.get(row["trajectory"])
        }
    finally:
        reader.close()


def _shapes(rows: Sequence[tuple[int, int, int]]) -> tuple[Turn, ...]:
    shapes: list[Turn] = []
    context = 0
    for _, prompt, tokens in rows:
        shapes.append(Turn(max(0, prompt - context), tokens))
        context = prompt + tokens
    return tuple(shapes)


def build(plan: compose.RunPlan, experiment: Experiment, scheduler: Scheduler, chronicle: Chronicle) -> SimulatedRun:
    """The run's world, ready to live. Raises `ConfigError` for what cannot be simulated."""
    config = plan.config
    profile = profile_of(config, experiment)
    rewards = config.rewards
    reward_s = max(rewards.pacing_s, profile.reward_s)
    settings = RunSettings(
        heartbeat_ns=round(config.scheduler.heartbeat_interval_s * NS_PER_S),
        flush_ns=round((experiment.frame_s or config.scheduler.flush_interval_s) * NS_PER_S),
        max_tokens_per_turn=config.rollout.max_tokens_per_turn,
        horizon_ns=round(experiment.horizon_s * NS_PER_S),
        weight_mode=WeightMode(config.weights.mode),
        scored_by_function=bool(plan.reward),
        reward_s=reward_s,
        reward_usd=rewards.usd_per_call + rewards.usd_per_s * reward_s,
    )
    trainer = ProviderSettings(
        max_workers=1, usd_per_gpu_hour=config.trainer.usd_per_gpu_hour, gpus_per_worker=config.trainer.gpus
    )
    try:
        return SimulatedRun(
            scheduler,
            settings,
            profile,
            rates_of(config, profile),
            trainer,
            plan.providers,
            episodes_of(config, experiment),
            chronicle,
        )
    except ValueError as error:
        raise ConfigError(str(error)) from error


def simulate(
    plan: compose.RunPlan,
    run_dir: Path,
    experiment: Experiment,
    *,
    observe: Callable[[RunStatus], None] = lambda _: None,
    stopped: Callable[[], bool] = lambda: False,
) -> compose.RunOutcome:
    """Live through the run on virtual time, into `run_dir`, as `compose.execute` does on wall time.

    `stopped` is asked at each sample; once it is true the run gives everything back. Raises `ConfigError` when
    it cannot begin, and `SimulationError` when it cannot end.
    """
    config = plan.config
    scheduler = Scheduler(compose.run_plan(plan), compose.limits(config), compose.policies(config), 0)
    journal = Journal(run_dir / compose.JOURNAL, JOURNAL_INTERVAL_S)
    with compose.journaled(journal, scheduler, _meta(plan, run_dir, experiment)) as ending:
        run = build(plan, experiment, scheduler, journal)
        sampler = _Sampler(config, run, journal, observe, stopped)
        failed = run.live(sample=sampler.sample)
        sampler.sample()
        ending.conclude(failed)
    return compose.RunOutcome(run_dir=run_dir, failed=failed, interrupted=failed == compose.INTERRUPTED)


def _meta(plan: compose.RunPlan, run_dir: Path, experiment: Experiment) -> dict[str, str]:
    return {
        "run": run_dir.name,
        "status": compose.RUNNING,
        "simulated": msgspec.json.encode(experiment).decode(),
        "config": plan.config.model_dump_json(),
        "providers": ",".join(plan.providers),
        "seed": str(plan.config.run.seed),
        "started_at": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }


class _Sampler:
    """Journals and shows how the run stands, as the live orchestrator does."""

    def __init__(
        self,
        config: Config,
        run: SimulatedRun,
        journal: Journal,
        observe: Callable[[RunStatus], None],
        stopped: Callable[[], bool],
    ) -> None:
        self._config = config
        self._run = run
        self._journal = journal
        self._observe = observe
        self._stopped = stopped
        self._asked_to_stop = False
        self._token_marks = deque([(0, 0)], maxlen=2)

    def sample(self) -> None:
        if self._stopped() and not self._asked_to_stop:
            self._asked_to_stop = True
            self._run.stop(compose.INTERRUPTED)
        status = self._status()
        self._journal.sample(self._run.loop.now_ns, msgspec.to_builtins(status))
        self._journal.books(self._run.scheduler.ledger)
        self._observe(status)

    def _status(self) -> RunStatus:
        run, now_ns = self._run, self._run.loop.now_ns
        self._token_marks.append((now_ns, total_tokens(run.spending)))
        return run_status(
            self._config.run.name,
            run.scheduler,
            now_ns,
            run.spending,
            rewards=run.rewards,
            last_success_rate=run.last_success,
            tokens_per_s=tokens_per_s(self._token_marks),
            function_usd=run.function_usd,
        )
