"""Throughput around the end of leases that end by time, with successors asked for early and without.

Two serverless workers, granted together, so that they end together: the hard case. The trainer's device does not
help out. `dip` is how far the accepted tokens of a second fall below the median, at worst, from the moment that the
workers must drain until the next ones have had time to come; `gap_s` is the longest time without any token there.
"""

import tempfile
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import mean, median
from typing import cast

from benchmarks._arms import by_name, in_turn
from benchmarks._common import Figures, benchmark
from benchmarks._configurations import configuration
from benchmarks._live import live_run
from benchmarks._shapes import write_policy
from elastic.config import Config
from elastic.core.events import LeaseGranted, TokensReceived
from elastic.core.types import NS_PER_S
from elastic.environments.frozenlake import FrozenLake, FrozenLakeSettings
from elastic.runtime.journal import JournalReader, RunDirectory
from providers.base import Provider
from providers.markets import ServerlessSettings
from providers.serverless import ServerlessProvider

DRAIN_S = 2.0
BEFORE_S = 4.0
"""Of throughput to compare with."""
AFTER_S = 6.0
"""From the drain on: enough to boot and load a worker anew."""
TOGETHER_S = 3.0
"""Leases that end so close to each other end together."""
FULL_RUNS = 3
MODES = {"early_successor": 1.5, "none": 0.0}
TIMEOUT_S = 300.0


def handing_over(checkpoint: Path, margin: float) -> Config:
    kinds, provisioning = ("unseeded", "all-capacity", "handover"), {"successor_margin": margin}
    return configuration(*kinds, policy=checkpoint, provisioning=provisioning)


async def measure(checkpoint: Path, margin: float, lease_s: float, ends: int) -> tuple[float, float]:
    """(dip, gap in seconds), each the mean over the first `ends` ends of leases."""
    settings = ServerlessSettings.model_validate({"max_workers": 2, "lease_s": lease_s, "cold_start_s": 0.5})
    with tempfile.TemporaryDirectory() as directory:
        run_dir = Path(directory) / "run"
        providers = {"serverless": (cast("type[Provider]", ServerlessProvider), settings)}
        config, lake = handing_over(checkpoint, margin), FrozenLakeSettings(sizes=(8,))
        async with live_run(config, run_dir, providers, FrozenLake, lake) as run:
            live = run.orchestrator
            await run.until("a worker", lambda: bool(run.ready("serverless")) and bool(live.scheduler.step), TIMEOUT_S)
            enough_ns = live.now_ns() + round((BEFORE_S + ends * lease_s + AFTER_S) * NS_PER_S)
            await run.until("enough leases' ends", lambda: live.now_ns() > enough_ns, TIMEOUT_S)
        with RunDirectory(run_dir).newest_journal() as journal:
            drains_s, tokens = read(journal)
    if not tokens:
        raise RuntimeError(f"leases of {lease_s:g} s end before a worker has booted on this machine")
    began_s = tokens[0][0]
    usable_s = [drain_s for drain_s in drains_s if began_s + BEFORE_S <= drain_s <= tokens[-1][0]][:ends]
    if not usable_s:
        raise RuntimeError(f"no lease ended while tokens came; drains at {drains_s}, tokens from {began_s:.1f} s")
    found = [around(drain_s, tokens) for drain_s in usable_s]
    return mean(dip for dip, _ in found), mean(gap_s for _, gap_s in found)


def read(reader: JournalReader) -> tuple[list[float], list[tuple[float, int]]]:
    """When workers had to drain, one time for those that must together; and tokens by the time of their frame."""
    drains_s: list[float] = []
    tokens: list[tuple[float, int]] = []
    for t_ns, event in reader.events():
        if isinstance(event, LeaseGranted) and event.expires_at_ns is not None:
            drain_s = event.expires_at_ns / NS_PER_S - DRAIN_S
            if not drains_s or drain_s > drains_s[-1] + TOGETHER_S:
                drains_s.append(drain_s)
        elif isinstance(event, TokensReceived):
            tokens.append((t_ns / NS_PER_S, sum(chunk.count for chunk in event.chunks)))
    return drains_s, tokens


def around(drain_s: float, tokens: Sequence[tuple[float, int]]) -> tuple[float, float]:
    """(dip, gap in seconds) of one end, against the median second before it."""
    times_s = [drain_s, *(t_s for t_s, _ in tokens if drain_s <= t_s < drain_s + AFTER_S), drain_s + AFTER_S]
    before = rates(tokens, next(t_s for t_s, _ in tokens), drain_s)
    after = rates(tokens, drain_s, drain_s + AFTER_S)
    gap_s = max(later - earlier for earlier, later in pairwise(times_s))
    return max(0.0, 1 - min(after) / median(before)), gap_s


def rates(tokens: Sequence[tuple[float, int]], from_s: float, to_s: float) -> list[int]:
    """Tokens in each whole second."""
    counts = [0] * int(to_s - from_s)
    for t_s, count in tokens:
        if 0 <= (second := int(t_s - from_s)) < len(counts) and t_s >= from_s:
            counts[second] += count
    return counts


async def compare(directory: Path, runs: int, lease_s: float, ends: int) -> Figures:
    checkpoint = write_policy(directory)
    found = await in_turn(MODES, runs, lambda mode, _: measure(checkpoint, MODES[mode], lease_s, ends))
    return by_name(found, ("dip", "gap_s"))


if __name__ == "__main__":
    benchmark(__doc__, lambda a: compare(a.scratch, *((1, 14.0, 1) if a.quick else (FULL_RUNS, 25.0, 2))))
