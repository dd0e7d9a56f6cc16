"""A live orchestrator under the workers of a large run, half of which vanish at one moment and come back.

The orchestrator is live and whole (`_streaming.py`); 1,024 workers, which eight processes stand in for
(`_stand_ins.py`), are connected by TLS, with sixteen streams of 50 tokens/s each: turns of a median of 2,000 tokens,
with pauses for tools. Then four of the processes are killed: their leases are lost, others are granted at once, and as
many workers dial in. With `--quick` there are 128; `--workers N` says how many, for machines whose cores do not carry
all of them.

- workers, gpus_modelled: what was connected, and how many H100 produce as many tokens (3,000 a second each);
- streams_in, carried: streams that got in, and whether those were nearly all. A machine that does not carry them says
  what it was busy with (core_share, generator_core_share), and nobody is killed there;
- turns_per_s, tokens_per_s, core_share: what the orchestrator brought to an end and accepted, and took of its core, in
  the time before the kill;
- decision_us_p99: of the core, from an event to its commands, by the CPU time of its thread; over the whole run;
- kills: workers that were killed; lost: tokens that had been accepted and that no turn has any more, turns that were
  given up, and trajectories that failed;
- running_again_s: from the kill until each of the turns that ran on a killed worker has had another token, or ended;
- rss_mb: the process's in the end; rss_drift: by which share it grew, less 24 bytes for each token of an open
  trajectory, from 20 to 40 s after the kill, with `--quick` from 5 to 10. Below 0 where tokens take less.
"""

import argparse
import asyncio
import gc
import time
from array import array
from collections.abc import Sequence
from typing import Any

import psutil

from benchmarks._common import Arguments, Figures, Measured, benchmark, multiple_of
from benchmarks._stand_ins import PATIENCE_S, Look
from benchmarks._streaming import (
    STREAMS_PER_WORKER,
    StandInFleet,
    StreamedRun,
    comes_to,
    streamed_run,
    streaming_config,
    used,
)
from benchmarks._waiting import awaited
from elastic.core import commands as c
from elastic.core import events as e
from elastic.core.scheduler import Scheduler
from elastic.core.types import Nanoseconds
from elastic.runtime.journal import TurnRow

WORKERS_QUICK, WORKERS = 128, 1_024
PROCESSES = 8
H100_TOKENS_PER_S = 3_000
TOKEN_BYTES_MAX = 24
STARTED_SHARE = 0.95
SETTLE_S, RUN_S, RUN_QUICK_S = 3.0, 20.0, 4.0
DRIFT_S, DRIFT_QUICK_S = (20.0, 40.0), (5.0, 10.0)
"""After the kill."""
AGAIN_PATIENCE_S = 60.0


class TimedScheduler(Scheduler):
    """Notes how long each decision takes."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.decisions_ns = array("q")

    def handle(self, event: e.Event, now_ns: Nanoseconds) -> list[c.Command]:
        began_ns = time.thread_time_ns()
        commands = super().handle(event, now_ns)
        self.decisions_ns.append(time.thread_time_ns() - began_ns)
        return commands


class Trouble:
    """What was given up, by the core's commands and events."""

    def __init__(self) -> None:
        self.turns = self.trajectories = 0

    def note(self, event: e.Event, commands: Sequence[c.Command]) -> None:
        self.trajectories += type(event) is e.TrajectoryFailed
        self.turns += sum(type(command) is c.FailTurn for command in commands)


async def _measure(workers: int, run_s: float, drift_s: tuple[float, float]) -> Figures:
    streams = workers * STREAMS_PER_WORKER
    fleet, trouble = StandInFleet(PROCESSES, STREAMS_PER_WORKER), Trouble()
    async with streamed_run(
        streaming_config(workers, streams),
        workers,
        fleet,
        encrypted=True,
        decided=trouble.note,
        make_scheduler=TimedScheduler,
    ) as run:
        carried = await comes_to(run.streaming, STARTED_SHARE * streams, PATIENCE_S)
        await asyncio.sleep(SETTLE_S)
        figures = {
            "workers": workers,
            "streams_in": run.streaming(),
            "carried": carried,
            **await _usual(run, run_s if carried else SETTLE_S),
        }
        if not carried:
            return figures
        fleet.add(PROCESSES // 2)
        await fleet.ask(Look())  # Once it answers, a process is there.
        kills, again_s = await _kill_half(run)
        killed_s = time.monotonic() - again_s
        rests_bytes = [await _rest_bytes(run, killed_s + after_s) for after_s in drift_s]
        rss_bytes, missing = psutil.Process().memory_info().rss, await _missing_tokens(run)
        assert isinstance(run.scheduler, TimedScheduler)
        decisions_ns = sorted(run.scheduler.decisions_ns)
    return {
        **figures,
        "gpus_modelled": round(figures["tokens_per_s"] / H100_TOKENS_PER_S),
        "rss_mb": rss_bytes / 2**20,
        "rss_drift": (rests_bytes[1] - rests_bytes[0]) / rests_bytes[0],
        "decision_us_p99": decisions_ns[len(decisions_ns) * 99 // 100] / 1e3,
        "kills": kills,
        "lost": missing + trouble.turns + trouble.trajectories,
        "running_again_s": again_s,
    }


async def _usual(run: StreamedRun, run_s: float) -> dict[str, float]:
    before = await run.fleet.ask(Look())
    began_s, cpu_s = time.monotonic(), time.process_time()
    tokens, turns = run.accepted, run.scheduler.turns.finished
    await asyncio.sleep(run_s)
    wall_s = time.monotonic() - began_s
    figures = {
        "turns_per_s": (run.scheduler.turns.finished - turns) / wall_s,
        "tokens_per_s": (run.accepted - tokens) / wall_s,
        "core_share": (time.process_time() - cpu_s) / wall_s,
    }
    return figures | {"generator_core_share": used(before, await run.fleet.ask(Look())).core_share}


async def _kill_half(run: StreamedRun) -> tuple[int, float]:
    """Kill half of the processes at once, not the one with the trainer; returns how many workers that were, and after
    how long all of their turns run again."""
    live = run.scheduler.turns.live
    doomed = run.fleet.processes[PROCESSES // 2 : PROCESSES]
    workers = {worker for process in doomed for worker in process.workers}
    known = {turn.id: turn.accepted for turn in live.values() if turn.worker in workers}
    killed_s = time.monotonic()
    for process in doomed:
        process.close()

    def again() -> bool:
        for name in list(known):
            turn = live.get(name)
            if turn is None or turn.accepted > known[name]:
                del known[name]
        return not known

    await awaited("all turns running again", again, AGAIN_PATIENCE_S)
    return len(workers), time.monotonic() - killed_s


async def _rest_bytes(run: StreamedRun, at_s: float) -> int:
    """The process's memory at that time, without its trajectories' tokens."""
    await asyncio.sleep(max(0.0, at_s - time.monotonic()))
    gc.collect()
    return psutil.Process().memory_info().rss - TOKEN_BYTES_MAX * run.accepted


async def _missing_tokens(run: StreamedRun) -> int:
    """How many tokens were accepted that neither a turn which still runs has, nor a finished one in the journal."""
    accepted, finished = run.accepted, run.scheduler.turns.finished
    live = sum(turn.accepted for turn in run.scheduler.turns.live.values())
    await asyncio.wrap_future(run.journal.durable())
    with run.kept.newest_journal() as journal:
        return accepted - live - sum(row.tokens for row in journal.rows(TurnRow)[:finished])


def main(arguments: Arguments) -> Measured:
    if arguments.quick:
        return _measure(arguments.workers or WORKERS_QUICK, RUN_QUICK_S, DRIFT_QUICK_S)
    return _measure(arguments.workers or WORKERS, RUN_S, DRIFT_S)


def add_options(options: argparse.ArgumentParser) -> None:
    words = f"a multiple of {PROCESSES}; without it {WORKERS:,}"
    options.add_argument("--workers", type=multiple_of(PROCESSES), metavar="N", help=words)


if __name__ == "__main__":
    benchmark(__doc__, main, add_options)
