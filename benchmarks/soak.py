"""What a live run keeps of workers that come and go: memory, descriptors and tasks of the orchestrator's process.

The example on real processes; every few seconds a worker's process is killed, and its provider has another
one. Growth is from the first part of the time that is measured to its last, each by its median: after a warm-up, 0 but
for noise.
"""

import asyncio
import os
import signal
from itertools import cycle
from pathlib import Path
from statistics import median

import psutil

from benchmarks._common import Figures, benchmark
from benchmarks._configurations import configuration
from benchmarks._live import LiveRun, live_run, reserved
from benchmarks._shapes import write_policy
from elastic.environments.frozenlake import FrozenLake, FrozenLakeSettings

WORKERS = 2
KILL_EVERY_S = 4.0
SAMPLE_EVERY_S = 0.25
PARTS = 3
"""The first and the last of so many are compared."""
READY_TIMEOUT_S = 120.0


async def churn(run: LiveRun) -> None:
    """Kills workers for ever, one every few seconds, of each place in turn."""
    for number in cycle(range(WORKERS)):
        ready = await run.until("a worker", lambda: run.ready("reserved"), READY_TIMEOUT_S)
        os.kill(run.process_id(ready[number % len(ready)]), signal.SIGKILL)
        await asyncio.sleep(KILL_EVERY_S)


async def measure(directory: Path, warm_up_s: float, measured_s: float) -> Figures:
    providers = {"reserved": reserved(WORKERS)}
    process, samples = psutil.Process(), list[tuple[float, int, int]]()
    config = configuration("soak", policy=write_policy(directory))
    async with live_run(config, directory / "run", providers, FrozenLake, FrozenLakeSettings()) as run:
        await run.until("a worker", lambda: run.ready("reserved"), READY_TIMEOUT_S)
        churning = asyncio.create_task(churn(run))
        await asyncio.sleep(warm_up_s)
        known = len(run.orchestrator.scheduler.ledger.books)
        for _ in range(round(measured_s / SAMPLE_EVERY_S)):
            await asyncio.sleep(SAMPLE_EVERY_S)
            samples.append((process.memory_info().rss / 1e6, process.num_fds(), len(asyncio.all_tasks())))
        came = len(run.orchestrator.scheduler.ledger.books) - known
        churning.cancel()
    first, last = samples[: len(samples) // PARTS], samples[-(len(samples) // PARTS) :]
    rss, fds, tasks = (median(s[i] for s in last) - median(s[i] for s in first) for i in range(3))
    return {
        "minutes": measured_s / 60,
        "workers_that_came": came,
        "rss_growth_mb": rss,
        "fd_growth": fds,
        "task_growth": tasks,
    }


if __name__ == "__main__":
    benchmark(__doc__, lambda a: measure(a.scratch, *((8.0, 24.0) if a.quick else (60.0, 540.0))))
