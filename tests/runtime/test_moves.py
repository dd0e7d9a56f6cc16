"""Moves in the journal: every turn that goes on elsewhere, whatever took it away from its worker."""

import asyncio
import os
import signal
from pathlib import Path

import msgspec
import pytest

from elastic.compose.execution import execute
from elastic.compose.plan import resolve
from elastic.compose.runs import new_run_dir
from elastic.config import Config
from elastic.core import commands as c
from elastic.core.scheduler import Scheduler
from elastic.core.types import WorkerState
from elastic.runtime.journal import JournalReader, MoveRow, RunDirectory


@pytest.mark.nightly
async def test_turns_of_a_frozen_worker_are_journaled_as_moves(tmp_path: Path, checkpoint: Path) -> None:
    """It is fenced by time alone: no connection breaks, and no lease has ended yet, when its turns are moved."""
    plan = resolve(_config(tmp_path, checkpoint), [], "test")
    run_dir = new_run_dir(plan.config)
    ready = asyncio.get_running_loop().create_future()
    running = asyncio.create_task(execute(plan, run_dir, on_ready=ready.set_result))
    try:
        async with asyncio.timeout(120):
            scheduler = (await ready).scheduler
            frozen, turns = await _freeze_one(scheduler, run_dir)
            outcome = await running
    finally:
        running.cancel()
        await asyncio.wait([running])
    assert outcome.failed == ""
    with RunDirectory(run_dir).newest_journal() as journal:
        moves = journal.rows(MoveRow)
        again = _dispatched_again(journal, scheduler)
    assert {(move.turn, move.attempt) for move in moves} == again
    assert {move.turn for move in moves if move.from_worker == frozen} & turns
    assert all(move.left_ns <= move.started_ns for move in moves)


def _config(directory: Path, checkpoint: Path) -> Config:
    return Config.model_validate(
        {
            "run": {"steps": 1, "directory": directory / "runs"},
            "model": {"checkpoint": checkpoint},
            "rollout": {"groups": 2, "group_size": 4},
            "seeding": {"window_s": 0},
            "engine": {"pacing": {"prefill_tokens_per_s": 8000, "decode_step_s": {1: 0.1}}},
            "scheduler": {"heartbeat_interval_s": 0.25, "heartbeat_timeout_s": 2.0},
            "providers": {"reserved": {"max_workers": 2}},
        }
    )


async def _freeze_one(scheduler: Scheduler, run_dir: Path) -> tuple[str, set[str]]:
    """SIGSTOP of a worker with running turns, once there are two; its name, and those turns."""
    while True:
        workers = [w for w in scheduler.fleet.workers.values() if w.provider == "reserved"]
        ready = [w for w in workers if w.state is WorkerState.READY]
        worker = max(ready, key=lambda w: w.outstanding - w.pending, default=None)
        if worker is not None and len(ready) > 1 and worker.outstanding > worker.pending:
            record = msgspec.json.decode((run_dir / "leases" / f"{worker.lease}.json").read_bytes())
            os.kill(next(iter(record["processes"].values()))["pid"], signal.SIGSTOP)
            return worker.id, set(worker.turns)
        await asyncio.sleep(0.01)


def _dispatched_again(reader: JournalReader, scheduler: Scheduler) -> set[tuple[str, int]]:
    """Turns and attempts after the first, as a fresh core decides them."""
    fresh = Scheduler(scheduler.plan, scheduler.limits, scheduler.policies, 0)
    commands = (command for t_ns, event in reader.events() for command in fresh.handle(event, t_ns))
    return {(k.turn, k.attempt) for k in commands if isinstance(k, c.StartTurn) and k.attempt > 1}
