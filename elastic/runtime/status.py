"""What a run looks like right now: one snapshot for the terminal, for `--json`, and for the journal's samples."""

import msgspec


class ProviderStatus(msgspec.Struct, kw_only=True):
    """One provider at one moment. `tokens` counts accepted tokens since the run began."""

    ready: int = 0
    booting: int = 0
    other: int = 0
    capacity_turns: int = 0
    running_turns: int = 0
    tokens: int = 0
    leases_ended: int = 0
    preemptions: int = 0
    usd: float = 0.0
    usd_per_hour: float = 0.0


class RunStatus(msgspec.Struct, kw_only=True):
    """The run at one moment. Success rates are shares of finished trajectories that were rewarded.

    `cpu_share` is that of the whole machine; where it passes `CPU_SATURATED_SHARE`, paced engines no longer
    keep their modelled speed and `pacing_holds` is false.
    """

    run: str
    phase: str
    step: int
    steps: int
    elapsed_s: float
    success_rate: float | None
    last_success_rate: float | None
    trajectories_running: int
    queued_turns: int
    tokens_per_s: float
    preemptions: int
    usd: float
    cpu_share: float
    pacing_holds: bool
    trainer: str
    providers: dict[str, ProviderStatus]


CPU_SATURATED_SHARE = 0.85
"""Above this, several paced engines on one machine compete for it and stop adding up as separate devices would."""
