"""A run's finished steps as rows, read from its journals, also while it goes on.

- What the evaluation of a version came to is in the row of the step that began with it: in that of step 10 stands what
  ten steps have led to. The evaluation of the version with which a run ends is a row of its own, behind the last step.
- A step's row is final once the step's weights are on the relay, a later step is over, or the run is.
- A step that the run did again from a checkpoint keeps the row that it had first: loggers take none back.
- Nothing is written, and each query is short: the run does not wait for it.
"""

import math
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from statistics import fmean, pstdev

from elastic.core.types import NS_PER_S
from elastic.report.metrics import mean_metrics
from elastic.report.tracking.delivery import TrackedRow, TrackedSample
from elastic.report.tracking.names import in_environment, named, of_environment, of_evaluation, of_provider
from elastic.report.tracking.samples import SampleBounds, Tell, chosen, sample_of
from elastic.report.trajectories import detail_of_row
from elastic.runtime.journal import (
    CONTINUES,
    EvaluationRow,
    GroupRow,
    JournalReader,
    RunDirectory,
    SampleRow,
    StepRow,
    TrajectoryFilter,
    TrajectoryRow,
)
from elastic.runtime.status import RunStatus, success_rate

OPEN_JOURNALS = 16
ROWS_AT_ONCE = 1000
"""How many rows are read at a time of a table that is read as a whole."""
KEPT_ROWS = 64
"""Rows that several loggers take, one after the other."""
TRAJECTORIES_MAX = 1_000_000
STALE = "stale"
"""How the reason of a group begins that was dropped for the age of its tokens."""
STARTED_AT = "%Y-%m-%dT%H:%M:%S%z"


class _GroupPlaces:
    """Where in a journal the ends of groups are, as far as it has been read: places by step, and the last one."""

    def __init__(self) -> None:
        self.by_step: dict[int, array[int]] = {}
        self.last = 0


class StepSource:
    """The rows of one run; `to_text` says of each environment, by name, how its tokens become text.

    Methods raise `JournalError`, or `OSError`.
    """

    def __init__(self, run: RunDirectory, samples: SampleBounds, tell: Tell) -> None:
        self.finished: list[int] = []
        """Steps whose rows are final, in order; it only grows."""
        self._run = run
        self._samples = samples
        self._tell = tell
        self._open: OrderedDict[tuple[Path, int], JournalReader] = OrderedDict()
        self._read = 0
        """Journals that have nothing more to say."""
        self._where: dict[int, Path] = {}
        """The journal that has a finished step."""
        self._ends: dict[int, EvaluationRow] = {}
        """The evaluation with which the run ended, by the step after the last one."""
        self._rows: OrderedDict[int, TrackedRow] = OrderedDict()
        self._group_places: dict[tuple[Path, int], _GroupPlaces] = {}

    def poll(self, *, over: bool) -> None:
        """Look for steps that are finished now. `over` says that nothing more comes."""
        paths = self._run.journal_paths()
        for path in paths[self._read :]:
            self._look(path, final=over or path != paths[-1])
        self._read = max(0, len(paths) - 1)
        if over and paths and self.finished:
            self._look_behind(paths[-1])

    def _look_behind(self, path: Path) -> None:
        """Take the evaluation with which a run ended as the row of the step that would have been next."""
        journal, step = self._journal(path), self.finished[-1] + 1
        if journal.meta().get("status") == "finished" and (found := _evaluated(journal, step)) is not None:
            self._where[step] = path
            self._ends[step] = found
            self.finished.append(step)

    def _look(self, path: Path, *, final: bool) -> None:
        """Take a journal's steps. `final`: the run is over, or has gone on in a later journal."""
        journal = self._journal(path)
        more = True
        while more:
            begin = self.finished[-1] + 1 if self.finished else 0
            rows = journal.since(StepRow, begin, ROWS_AT_ONCE)
            for place, row in enumerate(rows):
                if final or row.weights is not None or place + 1 < len(rows):
                    self._where[row.step] = path
                    self.finished.append(row.step)
            more = len(rows) == ROWS_AT_ONCE

    def row(self, step: int) -> TrackedRow:
        """The row of a finished step."""
        if step not in self._rows:
            self._rows[step] = self._make(step)
            while len(self._rows) > KEPT_ROWS:
                self._rows.popitem(last=False)
        return self._rows[step]

    def close(self) -> None:
        while self._open:
            self._open.popitem()[1].close()

    def _make(self, step: int) -> TrackedRow:
        path = self._where[step]
        chain, earlier = self._chain(path)
        journal = self._journal(path)
        if (end := self._ends.get(step)) is not None:
            at_s = self._begun_s(chain[0]) + end.t_ns / NS_PER_S
            return TrackedRow(step=step, at_s=at_s, figures=_finite(figures_of_evaluation(end)))
        (row,) = journal.since(StepRow, step, 1)
        trajectories: dict[str, TrajectoryRow] = {}
        groups: dict[str, GroupRow] = {}
        for place in chain:
            one = self._journal(place)
            groups |= {found.group: found for found in self._groups(place, step)}
            wanted = TrajectoryFilter(step=step)
            found = one.trajectories(wanted, None, TRAJECTORIES_MAX)
            trajectories |= {row.trajectory: row for _, row in found if row is not None}
        status = journal.last_until(SampleRow, row.t_ns)
        before = [last.status for one in earlier if (last := self._journal(one).last(SampleRow)) is not None]
        ended = list(trajectories.values())
        figures = named(figures_of(row, ended, list(groups.values())))
        figures |= {of_environment(name): value for name, value in mean_metrics(ended).items()}
        figures |= figures_by_environment(row)
        for evaluation in [found for place in chain if (found := _evaluated(self._journal(place), step)) is not None]:
            figures |= figures_of_evaluation(evaluation)
        if status is not None:
            figures |= costs_of(status.status, before)
        return TrackedRow(
            step=step,
            at_s=self._begun_s(chain[0]) + row.t_ns / NS_PER_S,
            figures=_finite(figures),
            samples=self._samples_of(ended, chain),
        )

    def _groups(self, path: Path, step: int) -> list[GroupRow]:
        """The groups that have ended in a step, by this journal."""
        journal, known = self._journal(path), self._group_places.setdefault(_file(path), _GroupPlaces())
        more = True
        while more:
            found = journal.group_places(known.last, ROWS_AT_ONCE)
            for known.last, of_step in found:
                known.by_step.setdefault(of_step, array("q")).append(known.last)
            more = len(found) == ROWS_AT_ONCE
        return journal.groups_at(known.by_step.get(step, ()))

    def _samples_of(self, ended: Sequence[TrajectoryRow], chain: Sequence[Path]) -> list[TrackedSample]:
        names = [row.trajectory for row in chosen(ended, self._samples.trajectories)]
        whole: dict[str, TrajectoryRow] = {}
        for path in chain:
            whole |= self._journal(path).by_key(TrajectoryRow, names)
        details = self._tell([detail_of_row(whole[name]) for name in names]) if names else []
        return [sample_of(detail, self._samples.bytes) for detail in details]

    def _chain(self, path: Path) -> tuple[list[Path], list[Path]]:
        """The journals from which this one goes on, and this one; and the last journals of what was before these."""
        paths = self._run.journal_paths()
        paths = paths[: paths.index(path) + 1]
        chain: list[Path] = []
        earlier: list[Path] = []
        follows = ""
        for one in reversed(paths):
            if not chain or (not earlier and one.name == follows):
                chain.insert(0, one)
            elif one.name != follows:
                earlier.append(one)
            follows = self._journal(one).meta().get(CONTINUES, "")
        return chain, earlier

    def _begun_s(self, path: Path) -> float:
        with suppress(ValueError):
            return datetime.strptime(self._journal(path).meta().get("started_at", ""), STARTED_AT).timestamp()
        return 0.0

    def _journal(self, path: Path) -> JournalReader:
        key = _file(path)
        if key not in self._open:
            self._open[key] = JournalReader(path)
            while len(self._open) > OPEN_JOURNALS:
                self._open.popitem(last=False)[1].close()
        self._open.move_to_end(key)
        return self._open[key]


def _file(path: Path) -> tuple[Path, int]:
    """Which journal it is: that of an incarnation that came to nothing is removed, and the next one's has its name."""
    return path, path.stat().st_ino


def _finite(figures: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in figures.items() if math.isfinite(value)}


def _evaluated(journal: JournalReader, version: int) -> EvaluationRow | None:
    row = journal.last_until(EvaluationRow, version)
    return row if row is not None and row.version == version else None


def figures_of_evaluation(row: EvaluationRow) -> dict[str, float]:
    """What a version came to in each environment, and in all together where there are several, under loggers' names:
    metrics, their standard errors, and how many episodes failed or were cut off."""
    record, found = row.record, dict[str, float]()
    together = {"": record.metrics} if len(record.sets) > 1 else {}
    for environment, metrics in (together | {name: one.metrics for name, one in record.sets.items()}).items():
        for name, estimate in metrics.items():
            found[of_evaluation(name, environment)] = estimate.mean
            if estimate.error is not None:
                found[of_evaluation(f"{name}/stderr", environment)] = estimate.error
    for environment, one in record.sets.items():
        found[of_evaluation("failed", environment)] = float(one.failed)
        found[of_evaluation("cut_off", environment)] = float(one.cut_off)
    return found


def figures_of(row: StepRow, trajectories: Sequence[TrajectoryRow], groups: Sequence[GroupRow]) -> dict[str, float]:
    """What is known of a step, by our own names; what is not known is left out."""
    record, trainer = row.record, {name: value for name, value in row.trainer.items() if value is not None}
    step_s = record.duration_ns / NS_PER_S
    found: dict[str, float | None] = {
        **trainer,
        **_spread("reward", [one.reward for one in trajectories if one.reward is not None]),
        **_spread("tokens", [one.policy_tokens for one in trajectories if not one.cause]),
        **_spread("turns", [one.turns for one in trajectories if not one.cause]),
        "reward_std": _deviation([one.reward for one in trajectories if one.reward is not None]),
        "success_rate": success_rate([one.reward for one in trajectories if one.reward is not None]),
        "truncated_share": _mean([float(one.truncated) for one in trajectories if not one.cause]),
        "failed_share": _mean([float(bool(one.cause)) for one in trajectories if not one.is_cut_off]),
        "same_rewards_share": _same_rewards(trainer),
        "staleness_max": max((age for one in groups if not one.dropped for age in one.tokens_by_age), default=None),
        "groups_stale": float(sum(one.dropped.startswith(STALE) for one in groups)),
        "dropped_tokens_mean": _mean([float(tokens) for one in groups if one.dropped for tokens in one.lengths]),
        "step_s": step_s,
        "train_wait_s": record.train_wait_ns / NS_PER_S,
        "rollout_s": record.rollout_ns / NS_PER_S,
        "train_s": record.train_ns / NS_PER_S,
        "seeding_s": record.seeding_ns / NS_PER_S,
        "trainer_idle_share": record.train_wait_ns / record.duration_ns if record.duration_ns else None,
        "trained_tokens_per_s": trainer["tokens"] / step_s if "tokens" in trainer and step_s else None,
        "groups_trained": float(record.groups_trained),
        "groups_dropped": float(record.groups_dropped),
        "workers_mean": record.workers_mean,
        "weights_changed_share": None if row.weights is None else _mean(list(row.weights.changed.values())),
    }
    return {name: value for name, value in found.items() if value is not None}


def figures_by_environment(row: StepRow) -> dict[str, float]:
    """A step's figures in each of several environments, under loggers' names."""
    found: dict[str, float] = {}
    for environment, one in row.environments.items():
        ended = one.trajectories + one.failed
        figures: dict[str, float | None] = {
            "reward_mean": one.mean_reward,
            "success_rate": one.success_rate,
            "failed_share": one.failed / ended if ended else None,
            "groups_trained": float(one.groups_trained),
            "groups_dropped": float(one.groups_dropped),
        }
        known = named({name: value for name, value in figures.items() if value is not None})
        found |= {in_environment(name, environment): value for name, value in known.items()}
    return found


def costs_of(status: RunStatus, before: Sequence[RunStatus]) -> dict[str, float]:
    """What the run had and had cost by then, under loggers' names; `before` are the ends of what it did before it began
    again at a checkpoint."""
    everything = [*before, status]
    figures = {
        "rollout_tokens_per_s": status.tokens_per_s,
        "gpus": float(sum(one.gpus for one in status.providers.values())),
        "usd": sum(one.usd for one in everything),
        "preemptions": float(sum(one.preemptions for one in everything)),
    }
    by_provider = {
        of_provider(name, figure): value
        for name, one in status.providers.items()
        for figure, value in (("gpus", float(one.gpus)), ("running_turns", float(one.running_turns)))
    }
    return named(figures) | by_provider


def _spread(what: str, values: Sequence[float]) -> dict[str, float]:
    if not values:
        return {}
    return {f"{what}_mean": fmean(values), f"{what}_max": max(values), f"{what}_min": min(values)}


def _mean(values: Iterable[float]) -> float | None:
    values = list(values)
    return fmean(values) if values else None


def _deviation(values: Sequence[float]) -> float | None:
    return pstdev(values) if values else None


def _same_rewards(trainer: dict[str, float]) -> float | None:
    groups, with_signal = trainer.get("groups"), trainer.get("groups_with_signal")
    return 1 - with_signal / groups if groups and with_signal is not None else None
