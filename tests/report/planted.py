"""Runs in which one thing goes wrong, and runs in which nothing does: what the report's first lines say of each.

Scripted runs are journals as a run leaves them, drawn step by step from a `Script`; simulated ones are the product's
simulator with the core inside. A planted fault counts as found where it is named and nothing else is.
"""

import tempfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import msgspec

from elastic.compose.plan import resolve
from elastic.config import JournalConfig, load_config
from elastic.core.ids import group_id
from elastic.core.ledger import NANO_USD_PER_USD, Ledger
from elastic.core.types import NS_PER_S, Account, InfrastructureCause
from elastic.report import summarise
from elastic.report.diagnoses import DiagnosisKind
from elastic.runtime.journal import GroupRow, RunDirectory, SampleRow, SqliteJournal, StepRow, StoredRun
from elastic.runtime.status import ProviderStatus
from elastic.simulation import run as simulation
from tests.journal_rows import run_status, step_record, trajectory_row

Trend = tuple[float, float]
"""What a figure is in the first and in the last step; from step to step it changes by one factor."""

ROOT = Path(__file__).resolve().parents[2]
STEP_S = 30.0


@dataclass(frozen=True, kw_only=True)
class ScriptedProvider:
    """A provider's GPU all along the run; `overhead` is its share of the time."""

    usd_per_gpu_hour: float
    tokens_per_s: float
    overhead: float = 0.1


@dataclass(frozen=True, kw_only=True)
class Script:
    """How a run goes. `success` is of a task that is neither `hopeless` nor `easy`, which are shares of the tasks.
    `graded` rewards are that and chance, `pays` what double the usual length adds to one."""

    steps: int = 24
    groups: int = 6
    members: int = 6
    turns: int = 1
    success: Trend = (0.3, 0.8)
    hopeless: float = 0.1
    easy: float = 0.05
    graded: bool = False
    pays: float = 0.0
    tokens: Trend = (100.0, 130.0)
    entropy: Trend = (1.1, 0.6)
    mismatch_mean: Trend = (0.003, 0.004)
    mismatch_kl: Trend = (0.001, 0.003)
    failing: float = 0.01
    refilled: float = 0.01
    stale: float = 0.0
    stale_times: float = 1.0
    """How much longer stale groups are than others."""
    providers: Mapping[str, ScriptedProvider] = field(
        default_factory=lambda: {
            "spot": ScriptedProvider(usd_per_gpu_hour=2.66, tokens_per_s=500.0, overhead=0.2),
            "serverless": ScriptedProvider(usd_per_gpu_hour=3.95, tokens_per_s=450.0),
        }
    )


PLANTED: Mapping[DiagnosisKind, Script] = {
    DiagnosisKind.ENTROPY_COLLAPSE: Script(entropy=(0.9, 0.01), success=(0.45, 0.43)),
    DiagnosisKind.MISMATCH_GROWTH: Script(mismatch_mean=(0.004, 0.12), mismatch_kl=(0.001, 0.2)),
    DiagnosisKind.LENGTH_AGAINST_REWARD: Script(tokens=(100.0, 320.0), graded=True, pays=0.8),
    DiagnosisKind.GROUPS_WITHOUT_SIGNAL: Script(hopeless=0.75),
    DiagnosisKind.FAILED_MEMBERS: Script(failing=0.12),
    DiagnosisKind.REFILLED_MEMBERS: Script(refilled=0.12),
    DiagnosisKind.DROPPED_LONG: Script(stale=0.25, stale_times=2.0),
    DiagnosisKind.POOR_PROVIDER: Script(
        providers={
            "spot": ScriptedProvider(usd_per_gpu_hour=2.66, tokens_per_s=60.0),
            "serverless": ScriptedProvider(usd_per_gpu_hour=3.95, tokens_per_s=450.0),
        }
    ),
}

GOOD: Mapping[str, Script] = {
    "learns": Script(),
    "solves": Script(success=(0.3, 0.99), hopeless=0.0, entropy=(1.2, 0.02)),
    "still rises though it is sure": Script(success=(0.1, 0.7), entropy=(0.8, 0.05)),
    "is sure from the beginning": Script(entropy=(0.08, 0.06), success=(0.4, 0.5)),
    "thinks longer as it gets better": Script(tokens=(100.0, 320.0), success=(0.2, 0.8)),
    "finds the short way": Script(tokens=(300.0, 80.0), turns=5),
    "graded": Script(graded=True),
    "hard tasks": Script(hopeless=0.35, success=(0.1, 0.45)),
    "stale groups of any length": Script(stale=0.25, mismatch_kl=(0.0001, 0.01)),
    "engines in bfloat16": Script(mismatch_mean=(0.012, 0.017), mismatch_kl=(0.002, 0.005)),
    "few steps": Script(steps=5, success=(0.05, 0.1), entropy=(0.5, 0.01)),
    "one provider": Script(providers={"reserved": ScriptedProvider(usd_per_gpu_hour=10.47, tokens_per_s=500.0)}),
}

SHORT = ("run.steps=5", "rollout.groups=8", "rollout.group_size=4", "rollout.max_turns=6")
SIMULATED: Mapping[str, tuple[str, Sequence[str], Sequence[str]]] = {
    "alone": ("examples/frozenlake.toml", [], SHORT),
    "spot": ("examples/frozenlake.toml", ["spot"], SHORT),
    "asynchronous": ("examples/frozenlake.toml", ["serving", "spot"], [*SHORT, "rollout.staleness_bound=2"]),
    "serverless": ("examples/frozenlake-serverless.toml", ["serverless"], SHORT),
}
"""Configurations, the providers of their runs, and what is set."""
SEEDS = (1, 2)


def written(script: Script, directory: Path, seed: int) -> RunDirectory:
    """A run that went as the script says."""
    directory.mkdir(parents=True)
    run = RunDirectory(directory)
    with closing(run.begin_journal(JournalConfig.model_validate({}))) as journal:
        _write(script, journal, Random(seed))
    return run


def _write(script: Script, journal: SqliteJournal, rng: Random) -> None:
    config = {"trainer": {"usd_per_gpu_hour": 10.47}, "run": {"steps": script.steps}}
    notes = {"run": "scripted", "seed": "1", "status": "finished", "config": msgspec.json.encode(config).decode()}
    for key, value in notes.items():
        journal.meta(key, value)
    refilled = dict[str, int]()
    for step in range(script.steps):
        at = step / max(1, script.steps - 1)
        for group in range(script.groups):
            _group(script, journal, rng, refilled, step, group, at)
        _step(script, journal, rng, step, at)
    _bills(script, journal, refilled)


def _between(trend: Trend, at: float) -> float:
    return trend[0] * (trend[1] / trend[0]) ** at


def _group(
    script: Script, journal: SqliteJournal, rng: Random, refilled: dict[str, int], step: int, group: int, at: float
) -> None:
    drawn = rng.random()
    success = 0.0 if drawn < script.hopeless else 1.0 if drawn > 1 - script.easy else _between(script.success, at)
    stale = rng.random() < script.stale
    usual = _between(script.tokens, at) * rng.uniform(0.9, 1.1) * (script.stale_times if stale else 1.0)
    lengths = list[int]()
    for member in range(script.members):
        cause = "the environment raised ValueError: no such tool" if rng.random() < script.failing else ""
        if not cause and rng.random() < script.refilled:
            refilled["engine error"] = refilled.get("engine error", 0) + 1
            cause = f"{InfrastructureCause.ENGINE}: three workers have failed with it"
        length = max(1, round(rng.gauss(usual, usual / 4)))
        lengths.append(length)
        reward = float(rng.random() < success)
        if script.graded:
            reward = success + rng.gauss(0.0, 0.15) + script.pays * (length / usual - 1)
        journal.append(
            trajectory_row(
                step,
                group,
                member,
                reward=None if cause else reward,
                cause=cause,
                turns=script.turns,
                policy_tokens=length * script.turns,
            )
        )
    journal.append(
        GroupRow(
            group=group_id(step, group),
            t_ns=0,
            step=step,
            version=step,
            dropped="stale: tokens of version 0" if stale else "",
            lengths=[length * script.turns for length in lengths],
            tokens_by_age={} if stale else {0: sum(lengths)},
        )
    )


def _step(script: Script, journal: SqliteJournal, rng: Random, step: int, at: float) -> None:
    trends = {name: getattr(script, name) for name in ("entropy", "mismatch_mean", "mismatch_kl")}
    trainer = {name: _between(trend, at) * rng.uniform(0.8, 1.25) for name, trend in trends.items()}
    record = step_record(
        step,
        duration_ns=round(STEP_S * NS_PER_S),
        rollout_ns=round(0.8 * STEP_S * NS_PER_S),
        groups_trained=script.groups,
    )
    t_ns = round((step + 1) * STEP_S * NS_PER_S)
    journal.append(StepRow(step=step, t_ns=t_ns, record=record, success_rate=None, trainer=dict(trainer)))


def _bills(script: Script, journal: SqliteJournal, refilled: dict[str, int]) -> None:
    end_s = script.steps * STEP_S
    end_ns = round(end_s * NS_PER_S)
    ledger = Ledger()
    ledger.open("trainer", "trainer", "trainer", 1, 10.47, 0)
    ledger.report("trainer", {Account.TRAINING: end_ns}, 0, end_ns)
    for name, provider in script.providers.items():
        ledger.open(name, name, name, 1, provider.usd_per_gpu_hour, 0)
        booting_ns = round(provider.overhead * end_ns)
        ledger.report(name, {Account.BOOTING: booting_ns, Account.DECODE: end_ns - booting_ns}, 0, end_ns)
    bill = ledger.bill_nano_usd(end_ns)
    status = run_status(
        step=script.steps,
        steps=script.steps,
        elapsed_s=end_s,
        usd=sum(bill.values()) / NANO_USD_PER_USD,
        providers={
            name: ProviderStatus(tokens=round(end_s * one.tokens_per_s)) for name, one in script.providers.items()
        },
        refilled=refilled,
    )
    journal.append(SampleRow(t_ns=end_ns, status=status))
    journal.books(ledger.books.values())


def simulated(name: str, directory: Path, seed: int) -> RunDirectory:
    """A run of the simulator's, on virtual time."""
    configuration, providers, changes = SIMULATED[name]
    directory.mkdir(parents=True)
    config = load_config(ROOT / configuration, [*changes, f"run.seed={seed}", f'run.directory="{directory}"'])
    simulation.simulate(resolve(config, providers, configuration), directory, simulation.Experiment())
    return RunDirectory(directory)


def named(run: StoredRun) -> set[DiagnosisKind]:
    """What the report says went wrong in a run."""
    return {one.kind for one in summarise(run).diagnoses}


def measured(further: Iterable[StoredRun] = ()) -> dict[str, int]:
    """How many planted faults are found, one a run, and in how many runs something is named that is not there.
    `further` runs are known to be good."""
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch)
        found = sum(named(written(script, place / kind, 1)) == {kind} for kind, script in PLANTED.items())
        good = [written(script, place / name, 2) for name, script in GOOD.items()]
        good += [simulated(name, place / f"simulated-{name}-{seed}", seed) for name in SIMULATED for seed in SEEDS]
        runs = [*good, *further]
        false = sum(bool(named(run)) for run in runs)
    return {
        "diagnoses_found": found,
        "diagnoses_planted": len(PLANTED),
        "diagnoses_false": false,
        "diagnoses_good_runs": len(runs),
    }
