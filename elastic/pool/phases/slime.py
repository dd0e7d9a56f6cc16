"""Phases of slime, whose driver has a phase callback: `--phase-callback-path elastic.pool.phases.slime.SlimePhases`.

slime's driver calls `on_phase_begin(phase, role)` and `on_phase_end(phase, role)` around what uses its devices; `role`
is `sampler`, `trainer` or `both`. It takes its own states off the devices (`--offload-train`, `--offload-rollout`).
Source: the fork of slime that llm-d's time slicing runs (slime/utils/phase_callback.py); slime itself has no such hook.
"""

from typing import Any

from elastic.pool.phases import PhaseError, ScriptPhase

KINDS = {"sampler": "rollout", "trainer": "train", "both": "sync"}


class SlimePhases:
    """A phase callback for slime. It has an effect in a pool only."""

    def __init__(self) -> None:
        self._under_way: ScriptPhase | None = None

    def on_phase_begin(self, phase: str, role: str, context: dict[str, Any] | None = None) -> None:
        """Wait for the nodes of this role. Raises `PhaseError`, also for an unknown role."""
        if role not in KINDS:
            raise PhaseError(f"slime's phase {phase!r}: role: found {role!r}; allowed: {', '.join(KINDS)}")
        begun = ScriptPhase(KINDS[role], (), both=role == "both", name=f"slime's {phase}")
        begun.begin()
        self._under_way = begun

    def on_phase_end(self, phase: str, role: str, context: dict[str, Any] | None = None) -> None:
        if self._under_way is not None:
            self._under_way.end()
            self._under_way = None

    def close(self) -> None:
        self.on_phase_end("", "")
