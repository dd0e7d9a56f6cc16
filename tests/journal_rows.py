"""Rows of journals for tests and benchmarks that look at little of them: as if nothing had happened, but for what is
given."""

from typing import Any

import msgspec

from elastic.core.ids import group_id, trajectory_id
from elastic.core.policy import StepRecord
from elastic.runtime.journal import TrajectoryRow
from elastic.runtime.status import RunStatus

_STATUS = RunStatus(
    run="run",
    phase="running",
    step=0,
    steps=1,
    elapsed_s=0.0,
    success_rate=None,
    last_success_rate=None,
    trajectories_running=0,
    queued_turns=0,
    tokens_per_s=0.0,
    preemptions=0,
    usd=0.0,
    cpu_share=0.0,
    pacing_holds=True,
    trainer="awake",
    providers={},
)
_RECORD = StepRecord(step=0, duration_ns=1, seeding_ns=0, rollout_ns=1, groups_trained=0, groups_dropped=0)


def run_status(**changes: Any) -> RunStatus:
    return msgspec.structs.replace(_STATUS, **changes)


def step_record(step: int, **changes: Any) -> StepRecord:
    return msgspec.structs.replace(_RECORD, step=step, **changes)


def trajectory_row(step: int, group: int, member: int, **changes: Any) -> TrajectoryRow:
    """One turn of one token, worth 1."""
    row = TrajectoryRow(
        trajectory=trajectory_id(step, group, member),
        step=step,
        group=group_id(step, group),
        started_ns=0,
        ended_ns=1,
        reward=1.0,
        cause="",
        turns=1,
        policy_tokens=1,
        token_ids=b"\x90",
    )
    return msgspec.structs.replace(row, **changes)
