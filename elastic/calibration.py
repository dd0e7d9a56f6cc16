"""A profile measured from what a live run has journaled: what its machine takes for everything but the turns."""

import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec
import numpy as np

from elastic.config import Config, ConfigError, PacingConfig, validate
from elastic.core import events as e
from elastic.core.ledger import DeviceBook
from elastic.core.types import NS_PER_S, Account, WorkerId
from elastic.runtime.journal import JournalError, JournalReader
from elastic.sim.performance.profile import Number, read_profile, write_profile

TRAINER = "trainer"
MESSAGE_S = Number(0.0005, estimate="one way over loopback; a journal does not show it", low=0.0001, high=0.005)
FREE_BYTES_PER_S = 1e12
"""Pull times are measured whole, so the link adds nothing to them."""
BUSY = (Account.DECODE, Account.PREFILL, Account.RECOMPUTE)


class CalibrationError(Exception):
    """The run does not show what a profile needs; the message names it."""


def profile_run(run_dir: Path, path: Path) -> None:
    """Measure the run, and write its profile to `path`. Raises `CalibrationError`."""
    try:
        reader = JournalReader(run_dir / "journal.sqlite")
    except JournalError as error:
        raise CalibrationError(str(error)) from error
    try:
        numbers, steps = _Measurement(run_dir, reader).numbers()
    finally:
        reader.close()
    write_profile(path, numbers, steps)
    read_profile(path)


class _Measurement:
    def __init__(self, run_dir: Path, reader: JournalReader) -> None:
        meta = reader.meta()
        if "simulated" in meta:
            raise CalibrationError(f"{run_dir}: a simulated run; only live ones can be measured")
        try:
            config = validate(Config, msgspec.json.decode(meta.get("config", "{}")), str(run_dir))
        except ConfigError as error:
            raise CalibrationError(str(error)) from error
        if config.engine.pacing is None:
            raise CalibrationError(f"{run_dir}: engine.pacing: missing; without it a journal does not show iterations")
        self._where = run_dir.name
        self._config = config
        self._pacing: PacingConfig = config.engine.pacing
        self._books = msgspec.json.decode(meta.get("books", "[]"), type=list[DeviceBook])
        self._turns = reader.rows("turns")
        self._pulls = [row for row in reader.rows("pulls") if not row["error"]]
        kinds = ("LeaseGranted", "LeaseEnded", "WorkerJoined", "WorkerDisconnected", "WorkerReported", "OfferChanged")
        self._events = list(reader.events_of(*kinds, "GroupTrained", "WeightsPublished"))

    def numbers(self) -> tuple[dict[str, Number], dict[int, Number]]:
        pacing, first, later = self._pacing, self._first_pulls(), self._later_pulls()
        update_s = self._update_s()
        kv_tokens = self._config.engine.kv_blocks * self._config.engine.kv_block_tokens
        numbers = {
            "prefill_tokens_per_s": Number(pacing.prefill_tokens_per_s, source="engine.pacing"),
            "context_s": Number(0.0, source="engine.pacing knows of no context"),
            "overhead_s": self._number(self._overhead_s(), "busy time of engines beyond their pacing, an iteration"),
            "kv_tokens": Number(float(kv_tokens), source="engine.kv_blocks x engine.kv_block_tokens"),
            "message_s": MESSAGE_S,
            "boot_s": self._number(self._boot_s("spot"), "mean from a worker's start to its first words"),
            "serving_start_s": self._number(self._serving_start_s(), "from the run's start to the first host on offer"),
            "serving_boot_s": self._number(self._boot_s("serving"), "mean from a loan to the worker's first words"),
            "trainer_boot_s": self._number(self._boot_s(TRAINER), "from the trainer's start to its first words"),
            "exit_s": self._number(self._exit_s(), "median from a goodbye to the lease's end"),
            "keyframe_bytes": self._number(_median(row["bytes"] for row in first), "median of first pulls"),
            "delta_bytes": self._number(_median(row["bytes"] for row in later), "median of later pulls"),
            "link_bytes_per_s": Number(FREE_BYTES_PER_S, source="the times of pulls are measured whole"),
            "relay_bytes_per_s": Number(FREE_BYTES_PER_S, source="the times of pulls are measured whole"),
            "first_load_s": self._number(_median(row["pull_s"] for row in first), "median of first pulls"),
            "load_s": self._number(_median(row["pull_s"] for row in later), "median of later pulls"),
            "apply_s": self._number(_quartile(row["apply_s"] for row in later), "lower quartile of applications"),
            "train_tokens_per_s": self._number(self._train_tokens_per_s(update_s), "tokens over training time"),
            "train_group_s": Number(0.0, source="in train_tokens_per_s"),
            "update_s": self._number(update_s, "median from a step's last group to its weights"),
            "reset_s": self._number(self._reset_s(), "median between the first requests of a step"),
            "step_s": self._number(self._step_s(), "median from a turn's end to the next one's request"),
            "environment_serial": Number(1.0, source="environments share the orchestrator's event loop"),
            "reward_s": Number(0.0, estimate="rewards are the environment's own", low=0.0, high=0.1),
        }
        source = "engine.pacing"
        return numbers, {batch: Number(step_s, source=source) for batch, step_s in pacing.decode_step_s.items()}

    def _number(self, value: float | None, how: str) -> Number:
        if value is None:
            raise CalibrationError(
                f"{self._where}: nothing to measure: {how}; a longer run, or one on spot and serving"
            )
        return Number(float(value), source=f"measured in {self._where}: {how}")

    def _boot_s(self, provider: str) -> float | None:
        """The mean, since what boots cost is their sum. A provider that this run did not use boots as the others do."""
        granted: dict[str, int] = {}
        found: dict[str, list[float]] = {}
        for t_ns, event in self._events:
            if isinstance(event, e.LeaseGranted):
                granted |= dict.fromkeys(event.workers, t_ns)
            elif isinstance(event, e.WorkerJoined) and event.epoch == 1 and event.worker in granted:
                name = event.worker.rpartition("-")[0]
                delay_s = self._config.providers.get(name, {}).get("boot_delay_s", 0.0)
                found.setdefault(name, []).append((t_ns - granted[event.worker]) / NS_PER_S - delay_s)
        others = [value for name, values in found.items() if name != TRAINER for value in values]
        boots = found.get(provider) or others or found.get(TRAINER, [])
        return statistics.mean(boots) if boots else None

    def _serving_start_s(self) -> float | None:
        """A run that did not use serving had no hosts to wait for."""
        offers = [(t_ns, event.offer) for t_ns, event in self._events if isinstance(event, e.OfferChanged)]
        of_serving = [(t_ns, offer) for t_ns, offer in offers if offer.provider == "serving"]
        warm = (t_ns / NS_PER_S for t_ns, offer in of_serving if offer.available)
        return next(warm, None) if of_serving else 0.0

    def _exit_s(self) -> float:
        left: dict[WorkerId, int] = {}
        found: list[float] = []
        for t_ns, event in self._events:
            if isinstance(event, e.WorkerDisconnected) and event.goodbye:
                left[event.worker] = t_ns
            elif isinstance(event, e.LeaseEnded) and event.lease in left:
                found.append((t_ns - left[event.lease]) / NS_PER_S)
        return _median(found) or 0.0

    def _first_pulls(self) -> list[dict[str, float]]:
        seen: set[str] = set()
        return [row for row in self._pulls if not (row["worker"] in seen or seen.add(row["worker"]))]

    def _later_pulls(self) -> list[dict[str, float]]:
        first = {id(row) for row in self._first_pulls()}
        return [row for row in self._pulls if id(row) not in first and row["bytes"]] or self._first_pulls()

    def _overhead_s(self) -> float | None:
        """What is left of the engines' busy time once their modelled iterations are taken off, for each iteration.

        An iteration's modelled time is taken as linear in its batch, so sums over iterations are enough.
        """
        sizes = sorted(self._pacing.decode_step_s)
        times = [self._pacing.decode_step_s[size] for size in sizes]
        slope_s, base_s = np.polyfit(sizes, times, 1) if len(sizes) > 1 else (0.0, times[0])
        last: dict[WorkerId, e.WorkerReported] = {}
        for _, event in self._events:
            if isinstance(event, e.WorkerReported) and event.progress:
                last[event.worker] = event
        iterations = sum(report.progress for report in last.values())
        if not iterations:
            return None
        busy_s = sum(r.accounts_ns.get(account, 0) for r in last.values() for account in BUSY) / NS_PER_S
        decoded = sum(report.decoded_tokens for report in last.values())
        prefilled = sum(report.prompt_tokens - report.prefix_hit_tokens for report in last.values())
        modelled_s = base_s * iterations + slope_s * decoded + prefilled / self._pacing.prefill_tokens_per_s
        return max(0.0, (busy_s - modelled_s) / iterations)

    def _update_s(self) -> float | None:
        last_ns: int | None = None
        found: list[float] = []
        for t_ns, event in self._events:
            if isinstance(event, e.GroupTrained):
                last_ns = t_ns
            elif isinstance(event, e.WeightsPublished) and last_ns is not None:
                found.append((t_ns - last_ns) / NS_PER_S)
        return _quartile(found)

    def _train_tokens_per_s(self, update_s: float | None) -> float | None:
        trained = {event.group for _, event in self._events if isinstance(event, e.GroupTrained)}
        updates = sum(isinstance(event, e.WeightsPublished) for _, event in self._events)
        contexts: dict[str, int] = {}
        for row in self._turns:
            if row["trajectory"].rpartition("/")[0] in trained:
                tokens = row["prompt_tokens"] + row["tokens"]
                contexts[row["trajectory"]] = max(contexts.get(row["trajectory"], 0), tokens)
        training_ns = sum(b.accounts_ns.get(Account.TRAINING, 0) for b in self._books if b.provider == TRAINER)
        left_s = training_ns / NS_PER_S - updates * (update_s or 0.0)
        return sum(contexts.values()) / left_s if left_s > 0 and contexts else None

    def _reset_s(self) -> float | None:
        """Environments are reset one after the other, and each asks for its first turn at once."""
        by_step: dict[str, list[int]] = {}
        for row in self._turns:
            if row["turn"].endswith("/0"):
                by_step.setdefault(row["turn"].partition("/")[0], []).append(row["requested_ns"])
        spans = [(max(t) - min(t)) / (len(t) - 1) / NS_PER_S for t in by_step.values() if len(t) > 1]
        return _median(spans)

    def _step_s(self) -> float | None:
        ended = {row["turn"]: row["finished_ns"] for row in self._turns}
        gaps: list[float] = []
        for row in self._turns:
            trajectory, _, number = row["turn"].rpartition("/")
            before = ended.get(f"{trajectory}/{int(number) - 1}")
            if before is not None:
                gaps.append((row["requested_ns"] - before) / NS_PER_S)
        return _median(gaps) if gaps else 0.0


def _median(values: Iterable[float]) -> float | None:
    found = list(values)
    return statistics.median(found) if found else None


def _quartile(values: Iterable[float]) -> float | None:
    found: Sequence[float] = sorted(values)
    return found[len(found) // 4] if found else None
