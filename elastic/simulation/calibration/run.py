"""Measures a live run by its journal: how long its machine takes for each activity, and how fast its engines were."""

import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TypeAlias

import msgspec
import numpy as np

from elastic.compose.plan import TRAINER_PROVIDER
from elastic.compose.runs import is_claimed
from elastic.config import Config, ConfigError, PacingConfig, validate
from elastic.core import events as e
from elastic.core.ids import group_of, parse_trajectory, parse_turn, provider_of, turn_id
from elastic.core.types import NS_PER_S, Account, LeaseId, Nanoseconds, WorkerId
from elastic.runtime.journal import (
    INTERRUPTED,
    RUNNING,
    SIMULATED,
    UNEXPECTED,
    CallRow,
    JournalError,
    JournalReader,
    PullRow,
    RunDirectory,
    TurnRow,
)
from elastic.simulation.calibration.fit import FitError, IterationSample, fit_rates
from elastic.simulation.calibration.numbers import (
    DEFAULT_BASE,
    ENVIRONMENT_SERIAL,
    Base,
    CalibrationError,
    EngineNumbers,
    Measured,
    complete,
    save,
    speeds,
)
from elastic.simulation.performance.profile import Number
from functions.base import CallOutcome

SERVING = "serving"
FINISHED = ("finished", f"failed: {INTERRUPTED}")
STOPPED = "stopped: "
"""How a run may have ended to be measured; the rest of an interrupted one, or one that was stopped, is as good as
any."""
MESSAGE_S = Number(0.0005, estimate="one way over loopback; a journal does not show it", low=0.0001, high=0.005)
FREE_BYTES_PER_S = 1e12
"""A link that adds nothing to pull times, since these are measured whole."""
FREE_REWARD_S = Number(0.0, estimate="rewards are the environment's own", low=0.0, high=0.1)
BUSY = (Account.DECODE, Account.PREFILL, Account.RECOMPUTE)
DELAYS = ("boot_delay_s", "cold_start_s")
"""Keys of providers' settings that delay a worker's start. Simulated providers delay it too."""
FEWEST_ITERATIONS = 8
"""Fewest iterations between two reports, so that the one at a report hardly counts."""
SAMPLES_PER_RATE = 4
QUANTILES = (0.05, 0.5, 0.95)
"""Quantiles of the engines' batch sizes at which the decode time is fitted."""

_Statistic: TypeAlias = Callable[[Iterable[float]], float | None]


def profile_run(
    run_dir: Path, path: Path, *, engine: EngineNumbers | None = None, base: str = DEFAULT_BASE
) -> Measured:
    """Measure the run, and write its profile to `path`.

    The engine's numbers are those given, else of the run's pacing, else fitted to what its workers reported. What the
    run does not show is estimated as the profile `base` has it. Raises `CalibrationError`, and `ProfileError` where
    there is no such base.
    """
    around = Base(base)
    try:
        with RunDirectory(run_dir).newest_journal() as reader:
            run = RunMeasurement(run_dir, reader, around)
            measured = complete(engine or run.engine(), run.around_engine(), around, f"{run_dir.name} does not show it")
    except JournalError as error:
        raise CalibrationError(str(error)) from error
    save(measured, path)
    return measured


class RunMeasurement:
    """Raises `CalibrationError` for a run that is simulated, still going on, or failed."""

    def __init__(self, run_dir: Path, reader: JournalReader, base: Base) -> None:
        meta = reader.meta()
        if SIMULATED in meta:
            raise CalibrationError(f"{run_dir}: a simulated run; only live ones can be measured")
        if is_claimed(run_dir):
            raise CalibrationError(f"{run_dir}: still going on; it can be measured once it has ended")
        status = meta.get("status", RUNNING)
        if status == RUNNING:  # and nobody is at it
            status = UNEXPECTED
        if status not in FINISHED and not status.startswith(STOPPED):
            raise CalibrationError(f"{run_dir}: {status}; only a run that went well can be measured")
        try:
            config = validate(Config, msgspec.json.decode(meta.get("config", "{}")), str(run_dir))
        except ConfigError as error:
            raise CalibrationError(str(error)) from error
        self._where = run_dir.name if status == FINISHED[0] else f"{run_dir.name} (interrupted)"
        self._config = config
        self._base = base
        self._reader = reader
        self._books = reader.books()
        self._turns = reader.rows(TurnRow)
        self._calls = reader.rows(CallRow)
        self._first_pulls, self._later_pulls = _by_age(row for row in reader.rows(PullRow) if not row.error)
        kinds = ("LeaseGranted", "LeaseEnded", "WorkerJoined", "WorkerDisconnected", "WorkerReported", "OfferChanged")
        self._events = list(reader.events_of(*kinds, "GroupTrained", "WeightsPublished"))

    def around_engine(self) -> dict[str, Number]:
        """Return all numbers except the engine's own."""
        update_s = self._update_s()
        shown = {
            "boot_s": (self._boot_s(), "mean from a worker's start to its first words"),
            "serving_start_s": (self._serving_start_s(), "from the run's start to the first host on offer"),
            "serving_boot_s": (_mean(self._boots_s(SERVING)), "mean from a loan to the worker's first words"),
            "trainer_boot_s": (
                _mean(self._boots_s(TRAINER_PROVIDER)),
                "from the trainer's start to its first words",
            ),
            "exit_s": (_median(self._exits_s()), "median from a goodbye to the lease's end"),
            "train_tokens_per_s": (self._train_tokens_per_s(update_s), "tokens over training time, for each GPU"),
            "update_s": (update_s, "lower quartile of the times from a step's last group to its weights"),
            "reset_s": (self._reset_s(), "median between the first requests of a step"),
            "step_s": (self._step_s(), "median from a turn's end to the next one's request"),
        }
        return {
            "message_s": MESSAGE_S,
            "train_group_s": self._train_group_s(update_s),
            "environment_serial": ENVIRONMENT_SERIAL,
            "reward_s": self._reward_s(),
            **{key: self._number(key, value, how) for key, (value, how) in shown.items()},
            **self._weights(),
        }

    def engine(self) -> EngineNumbers:
        """Return the numbers of the run's pacing, or fitted ones. Raises `CalibrationError` if there are neither."""
        pacing = self._config.engine.pacing
        return self._fitted() if pacing is None else self._paced(pacing)

    def _number(self, key: str, value: float | None, how: str) -> Number:
        if value is None:
            return self._base.estimate(key, f"{self._where} does not show it ({how})")
        return Number(float(value), source=f"measured in {self._where}: {how}")

    # Engines

    def _kv_tokens(self) -> Number:
        engine = self._config.engine
        kv_tokens = float(engine.kv_blocks * engine.kv_block_tokens)
        return Number(kv_tokens, source="engine.kv_blocks x engine.kv_block_tokens")

    def _paced(self, pacing: PacingConfig) -> EngineNumbers:
        source = "engine.pacing"
        overhead_s = self._overhead_s(pacing)
        context_tokens = self._context_tokens() * max(pacing.decode_step_s)
        how = "busy time of engines beyond their pacing, an iteration"
        if overhead_s is not None and overhead_s < 0:
            why = f"in {self._where} engines were busy {-overhead_s:.2g} s less, an iteration, than their pacing"
            overhead = Number(0.0, estimate=why, low=0.0, high=-overhead_s)
        else:
            overhead = self._number("overhead_s", overhead_s, how)
        return EngineNumbers(
            prefill_tokens_per_s=Number(pacing.prefill_tokens_per_s, source=source),
            decode_step_s={batch: Number(step_s, source=source) for batch, step_s in pacing.decode_step_s.items()},
            context_s=Number(
                0.0,
                estimate="engine.pacing knows of no context; what it costs all the same is in overhead_s",
                low=0.0,
                high=overhead.value / context_tokens,
            ),
            overhead_s=overhead,
            kv_tokens=self._kv_tokens(),
        )

    def _overhead_s(self, pacing: PacingConfig) -> float | None:
        """What is left of the engines' busy time once their modelled iterations are taken off, for each iteration.

        An iteration's modelled time is taken as linear in its batch, so sums over iterations are enough.
        """
        sizes = sorted(pacing.decode_step_s)
        times = [pacing.decode_step_s[size] for size in sizes]
        slope_s, base_s = np.polyfit(sizes, times, 1) if len(sizes) > 1 else (0.0, times[0])
        last: dict[WorkerId, e.WorkerReported] = {}
        for _, event in self._events:
            if isinstance(event, e.WorkerReported) and event.progress:
                last[event.worker] = event
        iterations = sum(report.progress for report in last.values())
        if not iterations:
            return None
        busy_s = sum(_busy_ns(report) for report in last.values()) / NS_PER_S
        decoded = sum(report.decoded_tokens for report in last.values())
        prefilled = sum(report.prompt_tokens - report.prefix_hit_tokens for report in last.values())
        modelled_s = base_s * iterations + slope_s * decoded + prefilled / pacing.prefill_tokens_per_s
        return float(busy_s - modelled_s) / iterations

    def _fitted(self) -> EngineNumbers:
        samples = engine_samples(self._reader.events())
        batches = _batches(samples)
        advice = "`--engine CONFIG` measures the engine itself"
        if len(samples) < SAMPLES_PER_RATE * (len(batches) + 1):
            raise CalibrationError(
                f"{self._where}: {len(samples)} reports of busy engines are too few to fit their speed; {advice}"
            )
        try:
            rates = fit_rates(samples, batches, context=False, overhead=False)
        except FitError as error:
            raise CalibrationError(f"{self._where}: engines' reports: {error}; {advice}") from error
        how = f"fitted to {len(samples)} reports of {self._where}, with a median error of {rates.error:.1%}"
        smallest_s = min(rates.decode_step_s.values())
        prefill, steps = speeds(rates, samples, how)
        merged = "a run's reports do not tell it from decode_step_s, which has it"
        return EngineNumbers(
            prefill_tokens_per_s=prefill,
            decode_step_s=steps,
            context_s=Number(0.0, estimate=merged, low=0.0, high=smallest_s / self._context_tokens()),
            overhead_s=Number(0.0, estimate=merged, low=0.0, high=smallest_s),
            kv_tokens=self._kv_tokens(),
        )

    def _context_tokens(self) -> float:
        """Return a sequence's context in tokens, the mean over the ends of its turns."""
        return max(1.0, _mean(row.prompt_tokens + row.tokens for row in self._turns) or 1.0)

    # Processes

    def _boot_s(self) -> float | None:
        """Return the mean boot time of the workers that begin to boot once the trainer is up, or of all if there are
        none.

        Those beside it take longer, since all that a run has boots at once; but what they wait for is the trainer.
        """
        joined = ((t_ns, event.worker) for t_ns, event in self._events if isinstance(event, e.WorkerJoined))
        up_ns = next((t_ns for t_ns, worker in joined if provider_of(worker) == TRAINER_PROVIDER), 0)
        return _mean(self._boots_s(since_ns=up_ns) or self._boots_s())

    def _boots_s(self, provider: str = "", since_ns: Nanoseconds = 0) -> list[float]:
        """Return the times from each worker's start to its first message, without the delay that its provider is set
        to have.

        They are of one provider's workers, or of all that are processes of their own; granted at `since_ns` or later.
        """
        granted: dict[str, Nanoseconds] = {}
        found: list[float] = []
        for t_ns, event in self._events:
            if isinstance(event, e.LeaseGranted) and t_ns >= since_ns:
                granted |= dict.fromkeys(event.workers, t_ns)
            elif isinstance(event, e.WorkerJoined) and event.epoch == 1 and event.worker in granted:
                name = provider_of(event.worker)
                if name == provider or not (provider or name in (TRAINER_PROVIDER, SERVING)):
                    settings = self._config.providers.get(name, {})
                    delay_s = sum(settings.get(key, 0.0) for key in DELAYS)
                    found.append((t_ns - granted[event.worker]) / NS_PER_S - delay_s)
        return found

    def _serving_start_s(self) -> float | None:
        offers = ((t_ns, event.offer) for t_ns, event in self._events if isinstance(event, e.OfferChanged))
        return next((t_ns / NS_PER_S for t_ns, offer in offers if offer.provider == SERVING and offer.available), None)

    def _exits_s(self) -> list[float]:
        left: dict[WorkerId, Nanoseconds] = {}
        lease_of: dict[WorkerId, LeaseId] = {}
        found: list[float] = []
        for t_ns, event in self._events:
            if isinstance(event, e.LeaseGranted):
                lease_of |= dict.fromkeys(event.workers, event.lease)
            elif isinstance(event, e.WorkerDisconnected) and event.goodbye:
                left[lease_of.get(event.worker, event.worker)] = t_ns
            elif isinstance(event, e.LeaseEnded) and event.lease in left:
                found.append((t_ns - left[event.lease]) / NS_PER_S)
        return found

    # Weights

    def _weights(self) -> dict[str, Number]:
        first = self._first_pulls
        return {
            "link_bytes_per_s": self._free_link("link_bytes_per_s"),
            "relay_bytes_per_s": self._free_link("relay_bytes_per_s"),
            "keyframe_bytes": self._number(
                "keyframe_bytes", _median(row.bytes for row in first), "median of first pulls"
            ),
            "first_load_s": self._number("first_load_s", _median(row.pull_s for row in first), "median of first pulls"),
            "delta_bytes": self._of_later_pulls("delta_bytes", lambda pull: pull.bytes, _median, "median"),
            "load_s": self._of_later_pulls("load_s", lambda pull: pull.pull_s, _median, "median"),
            "apply_s": self._of_later_pulls("apply_s", lambda pull: pull.apply_s, _quartile, "lower quartile"),
        }

    def _free_link(self, key: str) -> Number:
        """Return a link that is as fast as the fastest whole pull."""
        pulls = (*self._first_pulls, *self._later_pulls)
        if not pulls:
            return self._number(key, None, "times of pulls")
        fastest = max((row.bytes / row.pull_s for row in pulls if row.pull_s > 0), default=0.0)
        why = "the times of pulls are measured whole, in first_load_s and load_s, to which the link adds nothing"
        return Number(FREE_BYTES_PER_S, estimate=why, low=min(fastest, FREE_BYTES_PER_S), high=FREE_BYTES_PER_S)

    def _of_later_pulls(self, key: str, cost: Callable[[PullRow], float], statistic: _Statistic, name: str) -> Number:
        """Return the cost of a later pull. A first one brings all weights, so its cost is a bound."""
        value = statistic(cost(pull) for pull in self._later_pulls)
        bound = statistic(cost(pull) for pull in self._first_pulls)
        if value is None and bound is not None:
            return Number(
                bound, estimate=f"in {self._where} no worker pulled twice; as first pulls", low=0.0, high=bound
            )
        return self._number(key, value, f"{name} of later pulls")

    # Training

    def _update_s(self) -> float | None:
        last_ns: Nanoseconds | None = None
        found: list[float] = []
        for t_ns, event in self._events:
            if isinstance(event, e.GroupTrained):
                last_ns = t_ns
            elif isinstance(event, e.WeightsPublished) and last_ns is not None:
                found.append((t_ns - last_ns) / NS_PER_S)
        return _quartile(found)

    def _trained(self) -> set[str]:
        return {event.group for _, event in self._events if isinstance(event, e.GroupTrained)}

    def _training_s(self, update_s: float | None) -> float:
        """Return the training time on the trainer's device, without updates."""
        updates = sum(isinstance(event, e.WeightsPublished) for _, event in self._events)
        training_ns = sum(b.accounts_ns.get(Account.TRAINING, 0) for b in self._books if b.provider == TRAINER_PROVIDER)
        return training_ns / NS_PER_S - updates * (update_s or 0.0)

    def _train_tokens_per_s(self, update_s: float | None) -> float | None:
        trained, left_s = self._trained(), self._training_s(update_s)
        contexts: dict[str, int] = {}
        for row in self._turns:
            if group_of(row.trajectory) in trained:
                tokens = row.prompt_tokens + row.tokens
                contexts[row.trajectory] = max(contexts.get(row.trajectory, 0), tokens)
        gpus = self._config.trainer.gpus
        return sum(contexts.values()) / left_s / gpus if left_s > 0 and contexts else None

    def _train_group_s(self, update_s: float | None) -> Number:
        groups, left_s = len(self._trained()), self._training_s(update_s)
        if not groups or left_s <= 0:
            return self._number("train_group_s", None, "training time by group")
        why = "a run's training time does not tell groups from tokens: all of it is in train_tokens_per_s"
        return Number(0.0, estimate=why, low=0.0, high=left_s / groups)

    # Environments

    def _reset_s(self) -> float | None:
        """Return the time of an environment's reset. Resets are sequential, and each is followed by its first turn."""
        by_step: dict[int, list[int]] = {}
        for row in self._turns:
            if parse_turn(row.turn)[1] == 0:
                by_step.setdefault(parse_trajectory(row.trajectory).step, []).append(row.requested_ns)
        return _median((max(t) - min(t)) / (len(t) - 1) / NS_PER_S for t in by_step.values() if len(t) > 1)

    def _step_s(self) -> float | None:
        ended = {row.turn: row.finished_ns for row in self._turns}
        gaps: list[float] = []
        for row in self._turns:
            trajectory, number = parse_turn(row.turn)
            before = ended.get(turn_id(trajectory, number - 1))
            if before is not None:
                gaps.append((row.requested_ns - before) / NS_PER_S)
        return _median(gaps)

    def _reward_s(self) -> Number:
        if not self._config.rewards.name:
            return FREE_REWARD_S
        warm = (row.duration_s for row in self._calls if row.outcome is CallOutcome.OK and not row.cold_start_s)
        return self._number("reward_s", _median(warm), "median of calls of a warm function")


def engine_samples(events: Iterable[tuple[Nanoseconds, e.Event]]) -> list[IterationSample]:
    """One sample for each time between two reports of a worker, while no other use had its device.

    A sequence's first token counts as prefill, not decode. Samples of the trainer's engine are used only where there
    are no others, for its device may be of another kind.
    """
    last: dict[WorkerId, e.WorkerReported] = {}
    firsts: dict[WorkerId, int] = {}
    begun: set[tuple[str, int, int]] = set()
    found: dict[bool, list[IterationSample]] = {True: [], False: []}
    for _, event in events:
        if isinstance(event, e.TokensReceived):
            started = {(event.worker, event.epoch, slot) for slot, _, count, _ in event.chunks.plain if count} - begun
            begun |= started
            firsts[event.worker] = firsts.get(event.worker, 0) + len(started)
        elif isinstance(event, e.WorkerReported):
            before = last.get(event.worker)
            last[event.worker] = event
            prefills = firsts.pop(event.worker, 0)
            if before is not None and (sample := _between(before, event, prefills)):
                found[provider_of(event.worker) == TRAINER_PROVIDER].append(sample)
    return found[False] or found[True]


def _between(before: e.WorkerReported, after: e.WorkerReported, prefills: int) -> IterationSample | None:
    iterations = after.progress - before.progress
    busy_ns = _busy_ns(after) - _busy_ns(before)
    served_ns = after.accounts_ns.get(Account.SERVING, 0) - before.accounts_ns.get(Account.SERVING, 0)
    if iterations < FEWEST_ITERATIONS or busy_ns <= 0 or served_ns:
        return None
    decoded = max(0, after.decoded_tokens - before.decoded_tokens - prefills)
    prompts = after.prompt_tokens - before.prompt_tokens
    prefilled = max(0, prompts - (after.prefix_hit_tokens - before.prefix_hit_tokens))
    return IterationSample(busy_ns / NS_PER_S, iterations, batch=decoded / iterations, prefilled=prefilled / iterations)


def _batches(samples: Sequence[IterationSample]) -> list[int]:
    """Return the batch sizes at which decode times are fitted: a few, all within the seen range."""
    if not samples:
        return []
    return sorted({max(1, round(size)) for size in np.quantile([sample.batch for sample in samples], QUANTILES)})


def _busy_ns(report: e.WorkerReported) -> Nanoseconds:
    return sum(report.accounts_ns.get(account, 0) for account in BUSY)


def _by_age(pulls: Iterable[PullRow]) -> tuple[list[PullRow], list[PullRow]]:
    """Split pulls into each worker's first one and the later ones that transferred bytes."""
    first: dict[str, PullRow] = {}
    later = [row for row in pulls if first.setdefault(row.worker, row) is not row and row.bytes]
    return list(first.values()), later


def _mean(values: Iterable[float]) -> float | None:
    """Return the mean, which counts for boots since they cost their sum."""
    found = list(values)
    return statistics.mean(found) if found else None


def _median(values: Iterable[float]) -> float | None:
    found = list(values)
    return statistics.median(found) if found else None


def _quartile(values: Iterable[float]) -> float | None:
    found = sorted(values)
    return found[len(found) // 4] if found else None
