"""Runs that only evaluate a policy: which one, of what else they are like, and what two of them come to beside each
other."""

from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec

from elastic.compose.checkpoints import adapter_of, checkpoints
from elastic.compose.export import export
from elastic.compose.plan import read_model_config
from elastic.compose.runs import load_run_config
from elastic.config import TOGETHER, Config, ConfigError, EvaluationConfig
from elastic.core.evaluation import EvaluationRecord, SetFigures
from elastic.core.scores import Estimate, paired
from elastic.core.types import NS_PER_S
from elastic.runtime.journal import CONFIG, DirectoryStore, EvaluationRow, RunDirectory
from elastic.system.files import write_whole
from elastic.system.given import read_json

POLICY = "policy"
"""The directory, within that of an evaluation's run, of a policy that comes from another run's checkpoint."""


_NOTE = "evaluation.json"


class EvaluatedPolicy(msgspec.Struct, frozen=True):
    """What a policy is called, and the name of the run that evaluates it."""

    words: str
    run: str


class EvaluationNote(msgspec.Struct, frozen=True, kw_only=True):
    """What `elastic evaluate` has begun: the policies, in runs beside each other, with these providers."""

    policies: list[EvaluatedPolicy]
    providers: list[str]
    remarks: list[str]

    def write(self, runs: Path) -> None:
        """Put the note into each of its runs. Raises `ConfigError`."""
        for one in self.policies:
            path = runs / one.run / _NOTE
            try:
                write_whole(path, msgspec.json.encode(self))
            except OSError as error:
                raise ConfigError(f"run.directory: {path} cannot be written ({error.strerror})") from error


def evaluation_note(run: RunDirectory) -> EvaluationNote:
    """What was begun of which the run is a part. Raises `ConfigError`."""
    try:
        return msgspec.json.decode((run.path / _NOTE).read_bytes(), type=EvaluationNote)
    except (OSError, msgspec.DecodeError) as error:
        allowed = "a run of `elastic evaluate`; `elastic run --resume` goes on with others"
        raise ConfigError(f"--resume: {run.path} is no evaluation; allowed: {allowed}") from error


class ChosenPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """A policy to evaluate: a Hugging Face `directory`, or the checkpoint of `step` of a run, its newest unless one is
    given. `words` say which."""

    words: str
    directory: Path | None = None
    run: RunDirectory | None = None
    step: int | None = None

    def placed(self, run_dir: Path) -> Path:
        """The policy's directory; that of a checkpoint is written to the directory of the run that evaluates it. Raises
        `ConfigError`."""
        if self.directory is not None:
            return self.directory
        assert self.run is not None
        there = {int(path.stem): path for path in checkpoints(self.run.path)}
        chosen = there.get(max(there, default=0) if self.step is None else self.step)
        merge = chosen is not None and bool(adapter_of(load_run_config(self.run.path), chosen))
        export(self.run, run_dir / POLICY, self.step, merge=merge)
        return run_dir / POLICY


def run_to_evaluate(store: DirectoryStore, name: str) -> RunDirectory:
    """A run by its name; the `latest` is the latest that trains, rather than an evaluation or a simulation. Raises
    `ConfigError`."""
    trains = (run for run in reversed(store.runs()) if load_run_config(run.path).run.steps and not run.is_simulated())
    found = next(trains, None) if name == "latest" else None
    return store.find(name) if found is None else found


def policy_of_run(run: RunDirectory, step: int | None) -> ChosenPolicy:
    """The policy of a run's step: step 0 has that which it began with. Raises `ConfigError`."""
    there = [int(path.stem) for path in checkpoints(run.path)]
    if step == 0 or (step is None and not there):
        return ChosenPolicy(words=f"{run.name}, step 0", directory=load_run_config(run.path).model.checkpoint)
    if step is not None and step not in there:
        steps = ", ".join(map(str, sorted(there))) or "none"
        raise ConfigError(f"--step: found {step}; run {run.name} has checkpoints of steps {steps}, and 0")
    chosen = max(there) if step is None else step
    return ChosenPolicy(words=f"{run.name}, step {chosen}", run=run, step=chosen)


def is_policy(path: Path) -> bool:
    """Whether a directory is a policy, as Hugging Face has them, rather than a run."""
    try:
        found = read_json(path / CONFIG)
    except (OSError, ValueError):
        return False
    return isinstance(found, dict) and ("model_type" in found or "architectures" in found)


def evaluation_of(config: Config, name: str) -> Config:
    """The configuration of a run that evaluates, once, and trains nothing."""
    own = config.evaluation or EvaluationConfig()  # type: ignore[call-arg]
    once: dict[str, Any] = {"at_start": True, "at_end": False, "every": 0, "keep_best": "", "stop_when": None}
    run = config.run.model_copy(update={"steps": 0, "name": name})
    return config.model_copy(update={"run": run, "evaluation": own.model_copy(update=once)})


def with_policy(config: Config, checkpoint: Path) -> Config:
    """The same with another policy, of the same architecture. Raises `ConfigError` for one of another."""
    there = config.model_copy(update={"model": config.model.model_copy(update={"checkpoint": checkpoint})})
    wanted, found = (read_model_config(one).get("model_type") for one in (config, there))
    if found != wanted:
        raise ConfigError(
            f"{checkpoint}: found a policy of architecture {found!r}; allowed: {wanted!r}, which the run's engines and "
            "trainer are configured for"
        )
    return there


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """How much higher the first policy's mean rewards are than the other's, task by task, and where that difference is
    in 95 of 100 cases; None where one task alone says it."""

    estimate: Estimate
    interval: tuple[float, float] | None


class Evaluated(msgspec.Struct, frozen=True, kw_only=True):
    """What a policy's evaluation came to, in the run in this directory."""

    policy: str
    run: str
    seconds: float
    timed_out: bool
    metrics: dict[str, Estimate]
    sets: dict[str, SetFigures]


class ComparedPolicies(msgspec.Struct, frozen=True, kw_only=True):
    """One policy, or two on the same tasks and seeds with the differences of the first from the second: by set, and of
    all tasks together under `all`."""

    policies: list[Evaluated]
    differences: dict[str, Difference] = {}
    remarks: list[str] = []


def evaluated(run_dir: Path, words: str) -> Evaluated | None:
    """What the run's evaluation came to; None where it has not come to its end. Raises `JournalError`."""
    if not RunDirectory(run_dir).journal_paths():
        return None
    with RunDirectory(run_dir).journals() as journals:
        rows = [row for journal in journals for row in journal.rows(EvaluationRow)]
    if not rows:
        return None
    record: EvaluationRecord = rows[-1].record
    return Evaluated(
        policy=words,
        run=str(run_dir),
        seconds=record.duration_ns / NS_PER_S,
        timed_out=record.timed_out,
        metrics=record.metrics,
        sets=record.sets,
    )


def compared(policies: Sequence[Evaluated], remarks: Sequence[str]) -> ComparedPolicies:
    """The policies beside each other, if they are two."""
    if len(policies) == 1:
        return ComparedPolicies(policies=list(policies), remarks=list(remarks))
    one, other = policies
    sets = {name: (_finished(one.sets[name]), _finished(other.sets[name])) for name in one.sets}
    together = tuple(list(chain.from_iterable(pair[side] for pair in sets.values())) for side in range(2))
    found = {name: paired(*pair) for name, pair in {**sets, TOGETHER: together}.items()}
    differences = {
        name: Difference(estimate=value, interval=value.interval) for name, value in found.items() if value is not None
    }
    return ComparedPolicies(policies=list(policies), differences=differences, remarks=list(remarks))


def _finished(figures: SetFigures) -> list[list[float]]:
    return [[reward for reward in task if reward is not None] for task in figures.rewards]
