"""Tokens a second of requests to a run that others train, beside those of a run's own rollouts by the same workers."""

import asyncio
import tempfile
from pathlib import Path
from statistics import median

from benchmarks._churn import PROMPT_TOKENS, SeenRequests, asked
from benchmarks._common import Figures
from benchmarks._configurations import configuration
from benchmarks._live import live_run, reserved, run_to_end
from benchmarks._paced import FixedTask, TaskSettings
from benchmarks._served import DoorsRun
from benchmarks._shapes import write_chat_policy
from elastic.core.types import NS_PER_S
from elastic.runtime.journal import RunDirectory, SampleRow

WORKERS = 2
ENGINE = {"max_batch": 8, "max_pending": 4}
AT_ONCE = WORKERS * sum(ENGINE.values())
"""Requests: as many turns as a run's own workers have, those sent ahead included."""
TOKENS = 64
"""Of a turn."""
EPISODES = 224
COUNTED = (2 * AT_ONCE * TOKENS, (EPISODES - 2 * AT_ONCE) * TOKENS)
"""Between which numbers of tokens time is taken: all workers are there and full, and turns wait for each."""
PAIRS = 3
TASK = TaskSettings(prompts={"": PROMPT_TOKENS}, observations={"": 1})
END_S = 240.0


def measured_rates(place: Path) -> Figures:
    """Pairs of one run each, whose order alternates."""
    arms = {"run": _own_rate, "requests": _requests_rate}
    found: dict[str, list[float]] = {arm: [] for arm in arms}
    for pair in range(PAIRS):
        for arm, rate in list(arms.items())[:: -1 if pair % 2 else 1]:
            with tempfile.TemporaryDirectory(dir=place) as directory:
                found[arm].append(rate(Path(directory)))
    ratios = [requests / run for run, requests in zip(*found.values(), strict=True)]
    return {"tokens_per_s_over_run": median(ratios), "tokens_per_s": found}


def _requests_rate(directory: Path) -> float:
    settings = [f"engine.{key}={value}" for key, value in ENGINE.items()]
    seen = SeenRequests()
    with DoorsRun(directory, *settings, workers=WORKERS) as run:
        asyncio.run(asked(run, EPISODES, seen, 0, at_once=AT_ONCE, tokens=TOKENS))
        run.until("its tokens", lambda: _counted(run.run_dir))
        if seen.failed:
            raise RuntimeError(f"{seen.failed} of {EPISODES} requests failed")
        return _rate(run.run_dir)


def _own_rate(directory: Path) -> float:
    run_dir = directory / "run"
    run_to_end(_rolled_out(directory, run_dir))
    return _rate(run_dir)


async def _rolled_out(directory: Path, run_dir: Path) -> None:
    """The step of a run of single-turn episodes, until its tokens are those that count."""
    rollout = {"groups": EPISODES // 8, "group_size": 8, "max_turns": 1, "max_tokens_per_turn": TOKENS}
    more = {"engine": ENGINE, "seeding": {"policy": "none"}, "rollout": rollout}
    config = configuration("served", policy=write_chat_policy(directory / "policy"), **more)
    async with live_run(config, run_dir, {"reserved": reserved(WORKERS)}, FixedTask, TASK) as run:
        await run.until("its tokens", lambda: _counted(run_dir), END_S)


def _counted(run_dir: Path) -> bool:
    with RunDirectory(run_dir).newest_journal() as journal:
        sample = journal.last(SampleRow)
    return sample is not None and _tokens(sample) >= COUNTED[1]


def _rate(run_dir: Path) -> float:
    first, last = COUNTED
    with RunDirectory(run_dir).newest_journal() as journal:
        samples = [row for row in journal.rows(SampleRow) if first <= _tokens(row) <= last]
    passed_s = (samples[-1].t_ns - samples[0].t_ns) / NS_PER_S
    return (_tokens(samples[-1]) - _tokens(samples[0])) / passed_s


def _tokens(sample: SampleRow) -> int:
    return sum(one.tokens for one in sample.status.providers.values())
