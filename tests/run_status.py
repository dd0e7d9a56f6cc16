"""A run's status for tests that need one and look at little of it."""

from typing import Any

import msgspec

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


def run_status(**changes: Any) -> RunStatus:
    """One in which nothing has happened yet, but for `changes`."""
    return msgspec.structs.replace(_STATUS, **changes)
