"""What evaluation takes, whether it leaves training alone, and what the report says first of runs.

The example runs with a trainer that is embedded, synchronous, and without dynamic sampling, so that what is trained
hangs on nothing but the seed; elsewhere timing changes batches. One run evaluates every version, one never does, and
one is killed with `kill -9` in the middle of an evaluation and taken up.

- `disturbance`: of two runs that differ in evaluation alone, how many end with other weights, moments or counters than
  the one that never evaluates, bit for bit.
- `seconds_per_1000_samples`: of the example's episodes, on this machine.
- `capacity_share`: tokens a second of evaluations over those of rollouts of as many episodes, on the same simulated
  GPUs; the means over versions and steps.
- `paired_interval`: the last version beside the first on the same tasks and noise: the difference of mean rewards,
  within its interval of 95 %.
- `resumed_equal`: whether the run that was killed came to the same rewards in each evaluation.
- `diagnoses_found`, `diagnoses_false`: of planted faults those that the report names, and of good runs those of which
  it says that anything went wrong.
"""

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from benchmarks._common import Arguments, Figures, benchmark
from benchmarks._runs import EXAMPLE, CommandRun, prepare
from elastic.compose.plan import resolve
from elastic.config import load_config
from elastic.core.scores import paired
from elastic.core.types import NS_PER_S
from elastic.report.history import History, history_of
from elastic.runtime.journal import EvaluatedRow, EvaluationRow, JournalReader, RunDirectory, StepRow, TrajectoryRow
from elastic.simulation import run as simulation
from tests.proof import same_weights
from tests.report.planted import measured

SEED = 7
STEPS, TASKS, SAMPLES = 2, 12, 4
SETTINGS = (
    f"run.steps={STEPS}",
    "rollout.groups=4",
    "rollout.group_size=4",
    "rollout.dynamic_sampling=false",
    "trainer.checkpoint_every_steps=1",
)
EVALUATED = ("evaluation.every=1", f"evaluation.tasks={TASKS}", f"evaluation.samples={SAMPLES}")
SIMULATED = (
    "run.steps=3",
    "rollout.groups=16",
    "rollout.group_size=8",
    "rollout.dynamic_sampling=false",
    "evaluation.every=1",
    "evaluation.tasks=16",
    "evaluation.samples=8",
)

Rewards = dict[int, dict[str, list[list[float | None]]]]
"""By version and environment those of each task's episodes."""


def begin(directory: Path, *settings: str) -> CommandRun:
    return CommandRun.of_example(directory / "runs", *SETTINGS, *settings, seed=SEED)


def ended(run: CommandRun) -> Path:
    """The directory of a run once it has come to its end."""
    with run:
        run.until("its end", run.ended)
    return run.run_dir


def killed(directory: Path) -> Path:
    """A run that is killed while its second evaluation is under way, and comes to its end in another process."""
    with begin(directory, *EVALUATED) as run:
        run.until("the middle of an evaluation", lambda: _is_amid(run.run_dir, version=1))
        run.process.kill()
        run.process.wait()
        run.start("run", "--resume", str(run.run_dir))
        return ended(run)


def _is_amid(run_dir: Path, version: int) -> bool:
    """Whether some episodes of the version's evaluation are over, and others are not."""
    paths = RunDirectory(run_dir).journal_paths()
    if not paths:
        return False
    with closing(JournalReader(paths[-1])) as journal:
        over = sum(row.step == version for row in journal.rows(EvaluatedRow))
        done = any(row.version == version for row in journal.rows(EvaluationRow))
    return over > 0 and not done


def rewards(run_dir: Path) -> Rewards:
    with history_of(RunDirectory(run_dir)) as history:
        records = {row.version: row.record for row in history.rows(EvaluationRow)}
    return {version: {name: one.rewards for name, one in record.sets.items()} for version, record in records.items()}


def seconds_per_1000_samples(run_dir: Path) -> float:
    with history_of(RunDirectory(run_dir)) as history:
        records = [row.record for row in history.rows(EvaluationRow)]
    episodes = sum(one.finished for record in records for one in record.sets.values())
    return 1000 * sum(record.ended_ns - record.started_ns for record in records) / NS_PER_S / episodes


def paired_interval(found: Rewards) -> dict[str, float | None]:
    first, last = (
        [_finished(task) for tasks in found[at].values() for task in tasks] for at in (min(found), max(found))
    )
    difference = paired(last, first)
    if difference is None or difference.interval is None:
        return {"mean": None, "low": None, "high": None}
    low, high = difference.interval
    return {"mean": difference.mean, "low": low, "high": high}


def _finished(task: Sequence[float | None]) -> list[float]:
    return [reward for reward in task if reward is not None]


def capacity_share(directory: Path) -> float:
    config = load_config(EXAMPLE, [*SIMULATED, f'run.directory="{directory}"'])
    directory.mkdir()
    simulation.simulate(resolve(config, ["serving"], str(EXAMPLE)), directory, simulation.Experiment())
    with history_of(RunDirectory(directory)) as history:
        return _evaluated_tokens_per_s(history) / _trained_tokens_per_s(history)


def _evaluated_tokens_per_s(history: History) -> float:
    rows = [row.record for row in history.rows(EvaluationRow) if row.version > 0]  # No worker was there at the start.
    tokens = sum(row.policy_tokens for row in history.rows(EvaluatedRow) if row.step > 0)
    return tokens * NS_PER_S / sum(record.ended_ns - record.started_ns for record in rows)


def _trained_tokens_per_s(history: History) -> float:
    rows = [row for row in history.rows(StepRow) if row.step > 0]
    tokens = sum(row.policy_tokens for row in history.rows(TrajectoryRow) if row.step > 0)
    return tokens * NS_PER_S / sum(row.record.rollout_ns for row in rows)


def main(arguments: Arguments) -> Figures:
    prepare()
    place = arguments.scratch
    alone = ended(begin(place / "alone"))
    calm = ended(begin(place / "calm", *EVALUATED))
    others, found = [calm], rewards(calm)
    if not arguments.quick:
        others.append(killed(place / "killed"))
    return {
        "disturbance": sum(not same_weights(alone, other) for other in others),
        "seconds_per_1000_samples": seconds_per_1000_samples(calm),
        "capacity_share": capacity_share(place / "simulated"),
        "paired_interval": paired_interval(found),
        "resumed_equal": None if arguments.quick else rewards(others[-1]) == found,
        **measured(map(RunDirectory, [alone, *others])),
    }


if __name__ == "__main__":
    benchmark(__doc__, main)
