"""Examples that learn: `math`, `calculator`, `gymnasium` and `verifiers` of `examples/`, run as users run them.

Of each the base policy is prepared, judged on 200 held-out tasks, trained, and judged once more. No held-out task is in
any demonstration or training: `PARTS` in the examples' files parts them. They are played through the run's own
environment and fronts, by a run of one step whose tasks they are, and whose journal has the rewards. Two members play
each task: `greedy` ones at a temperature near 0, `sampled` ones at 1.

    {EXAMPLE: {success_before: {greedy, sampled}, success_after: {greedy, sampled}, standard_error: {greedy, sampled},
               wall_s, steps, load}}

`standard_error` is that of the gain, task by task; `wall_s` is what training takes, the warm-up apart, and `load` the
machine's over the last minute of it. What an example needs that is not installed is said in `skipped_because`.

In full mode: `success_before` 20 to 60 %, a gain of 10 points and two standard errors, within 10 minutes on two cores.
`--quick` is ten steps of one example from a base policy that has seen next to nothing, and shows no gain.
"""

import json
import math
import os
import subprocess
import sys
from argparse import Namespace
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

from benchmarks import ROOT
from benchmarks._client_environments import python_of, why_missing
from benchmarks._common import Arguments, Figures, benchmark, option
from benchmarks._runs import RunFailed, sets
from elastic.runtime.journal import RunDirectory
from elastic.runtime.journal.records import TrajectoryRow

TASKS, MEMBERS = 200, 2
TEMPERATURES = {"greedy": 0.01, "sampled": 1.0}
QUICK_STEPS = 10
QUICK = ("rollout.groups=4", "rollout.group_size=4", "environment.settings.demonstration_steps=10")
TIMEOUT_S = 3600.0
BEFORE, GAIN_LEAST, ERRORS_LEAST, WALL_S_MOST = (0.2, 0.6), 0.1, 2.0, 600.0


class Example(NamedTuple):
    """held_out: settings that make a run's tasks the held-out ones, where `{rows}` is their file.
    rows: the script that prints rows, and where those that are trained on go.
    python: what runs it. played_by: the interpreter that plays its episodes, if another one.
    """

    held_out: Sequence[str]
    rows: tuple[str, str] | None = None
    missing: str = ""
    python: Path = Path(sys.executable)
    played_by: Path | None = None


def examples() -> Mapping[str, Example]:
    by_file = ["environment.data.source={rows}"]
    places = [ROOT / ".cache" / name / "bin" / "python" for name in ("verifiers", "environments-verifiers")]
    verifiers = next((place for place in places if place.exists()), None)
    return {
        "math": Example(by_file, ("sums.py", "sums.jsonl")),
        "calculator": Example(
            by_file, ("calculator.py", "calculator.jsonl"), why_missing("openai-agents"), python_of("openai-agents")
        ),
        "gymnasium": Example(["environment.settings.options.part=held-out"]),
        "verifiers": Example(
            ["environment.settings.config.taskset.part=held-out"],
            missing="" if verifiers else "not installed: examples/verifiers.toml and `make test-environments` say how",
            played_by=verifiers,
        ),
    }


class Trial:
    """One example, with what it makes kept below `directory`."""

    def __init__(self, name: str, example: Example, directory: Path, settings: Sequence[str]) -> None:
        self._name, self._example, self._directory = name, example, directory
        played_by = [] if example.played_by is None else [f"environment.python={example.played_by}"]
        self._settings = [f"run.directory={directory / 'runs'}", *played_by, *settings]
        self._config = str(ROOT / "examples" / f"{name}.toml")

    def prepare(self) -> None:
        """Write the rows and make the base policy, where it is not there yet."""
        if self._example.rows is not None:
            script, file = self._example.rows
            (ROOT / ".cache").mkdir(exist_ok=True)
            (ROOT / ".cache" / file).write_text(self._python([f"examples/{script}"]))
            self._held_out_rows.write_text(self._python([f"examples/{script}", "held-out"]))
        self._elastic("prepare", self._config, *sets(self._settings))

    def train(self) -> Figures:
        """Return the run's summary."""
        return self._run(self._settings)

    def exported(self, summary: Mapping[str, Any]) -> Path:
        """Where the policy is that the run has come to."""
        place = self._directory / "policy"
        self._elastic("export", str(Path(summary["report"]).parent), "-o", str(place))
        return place

    def successes(self, temperature: float, policy: Path | None = None) -> dict[str, float]:
        """By group, the share of a held-out task's members that succeed with this policy, or the base policy."""
        chosen = [] if policy is None else [f"model.checkpoint={policy}"]
        held_out = [setting.format(rows=self._held_out_rows) for setting in self._example.held_out]
        evaluated = ["run.steps=1", f"rollout.groups={TASKS}", f"rollout.group_size={MEMBERS}"]
        heat = f"rollout.temperature={temperature}"
        summary = self._run([*self._settings, *held_out, *chosen, *evaluated, heat])
        by_group: defaultdict[str, list[float]] = defaultdict(list)
        with RunDirectory(Path(summary["report"]).parent).journals() as journals:
            for row in (row for journal in journals for row in journal.rows(TrajectoryRow)):
                by_group[row.group].append(float(row.reward is not None and row.reward >= 1.0))
        if len(by_group) != TASKS:
            raise RunFailed(f"{self._name}: played {len(by_group)} held-out tasks of {TASKS}")
        return {group: fmean(found) for group, found in by_group.items()}

    @property
    def _held_out_rows(self) -> Path:
        return self._directory / "held-out.jsonl"

    def _run(self, settings: Sequence[str]) -> Figures:
        return json.loads(self._elastic("run", self._config, "--json", *sets(settings)).splitlines()[-1])

    def _elastic(self, *arguments: str) -> str:
        return self._python(["-m", "elastic.cli", *arguments])

    def _python(self, arguments: Sequence[str]) -> str:
        command = [str(self._example.python), *arguments]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
        if done.returncode:
            raise RunFailed(f"{' '.join(command)} exited with {done.returncode}:\n{done.stderr[-2000:]}")
        return done.stdout


def measure(name: str, example: Example, directory: Path) -> Figures:
    trial = Trial(name, example, directory, [])
    trial.prepare()
    before = {how: trial.successes(temperature) for how, temperature in TEMPERATURES.items()}
    summary = trial.train()
    load = os.getloadavg()[0]
    policy = trial.exported(summary)
    after = {how: trial.successes(temperature, policy) for how, temperature in TEMPERATURES.items()}
    return {
        "success_before": {how: fmean(found.values()) for how, found in before.items()},
        "success_after": {how: fmean(found.values()) for how, found in after.items()},
        "standard_error": {how: error_of_gain(before[how], after[how]) for how in TEMPERATURES},
        "wall_s": summary["wall_s"],
        "steps": len(summary["steps"]),
        "load": load,
    }


def measure_quickly(name: str, example: Example, directory: Path) -> Figures:
    trial = Trial(
        name, example, directory, [f"run.steps={QUICK_STEPS}", f"model.checkpoint={directory / 'base'}", *QUICK]
    )
    trial.prepare()
    summary = trial.train()
    nothing = dict.fromkeys(("success_before", "success_after", "standard_error"))
    return {**nothing, "wall_s": summary["wall_s"], "steps": len(summary["steps"]), "load": os.getloadavg()[0]}


def error_of_gain(before: Mapping[str, float], after: Mapping[str, float]) -> float:
    """Of the mean difference over tasks, which are the same before and after."""
    return stdev([after[group] - before[group] for group in before]) / math.sqrt(len(before))


def missed(figures: Mapping[str, Any]) -> list[str]:
    """The bars that an example's figures miss."""
    found: list[str] = []
    for how in TEMPERATURES:
        before, after = figures["success_before"][how], figures["success_after"][how]
        gain, least = after - before, max(GAIN_LEAST, ERRORS_LEAST * figures["standard_error"][how])
        if not BEFORE[0] <= before <= BEFORE[1]:
            found.append(f"{how} success before: {before:.0%}; allowed: {BEFORE[0]:.0%} to {BEFORE[1]:.0%}")
        if gain < least:
            found.append(f"{how} gain: {gain:.1%}; allowed: {least:.1%} or more")
    if figures["wall_s"] > WALL_S_MOST:
        found.append(f"wall_s: {figures['wall_s']:.0f}; allowed: {WALL_S_MOST:.0f} or less")
    return found


def chosen(arguments: Namespace) -> dict[str, Example]:
    """The examples that are to be measured."""
    found = examples()
    return {arguments.example: found[arguments.example]} if arguments.example else dict(found)


def main(arguments: Arguments) -> Figures:
    results: Figures = {}
    for name, example in chosen(arguments).items():
        if example.missing:
            results[name] = {"skipped_because": example.missing}
        elif arguments.quick and any("wall_s" in figures for figures in results.values()):
            results[name] = {"skipped_because": "--quick is ten steps of one example"}
        else:
            (directory := arguments.scratch / name).mkdir()
            results[name] = (measure_quickly if arguments.quick else measure)(name, example, directory)
    return results


if __name__ == "__main__":
    measured = benchmark(__doc__, main, option("--example", choices=list(examples()), help="this one alone"))
    evaluated = {name: figures for name, figures in measured.items() if figures.get("success_after")}
    if bars := [f"{name}: {bar}" for name, figures in evaluated.items() for bar in missed(figures)]:
        sys.exit("\n".join(bars))
