"""What the configurations of benchmarks have in common, by name."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from elastic.config import Config

KINDS: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "all-capacity": {"provisioning": {"policy": "take_all"}},
    "unseeded": {"seeding": {"policy": "fixed", "window_s": 0.0, "bound_workers": False}},
    # Environments of benchmarks wait until they are told to go on.
    "untimed": {"environment": {"step_timeout_s": 86_400}},
    "paced": {"engine": {"pacing": {"prefill_tokens_per_s": 8000, "decode_step_s": {1: 0.03, 16: 0.04}}}},
    "endless": {
        "rollout": {"groups": 500, "group_size": 8, "max_turns": 4, "max_tokens_per_turn": 64},
        "scheduler": {"boot_timeout_s": 240.0},
        # No step ends that could tell how many workers are worth having.
        "seeding": {"window_s": 0, "bound_workers": False},
    },
    # A machine with fewer processors than devices is no reason to fence one.
    "patient": {
        "scheduler": {
            "heartbeat_timeout_s": 20.0,
            "stall_timeout_s": 30.0,
            "turn_stall_timeout_s": 60.0,
            "boot_timeout_s": 200.0,
        }
    },
    "many-steps": {
        "run": {"steps": 10_000},
        "trainer": {"learning_rate": 1e-9, "updates_per_step": 1, "checkpoint_every_steps": 1000},
    },
}


def configuration(*kinds: str, policy: Path | str, **sections: Mapping[str, Any]) -> Config:
    """A run of this policy, of these kinds, and with these sections: a key goes before the same key of a kind, and a
    kind's before that of one which is named earlier."""
    merged: dict[str, dict[str, Any]] = {}
    for one in (*(KINDS[kind] for kind in kinds), sections, {"model": {"checkpoint": str(policy)}}):
        for name, keys in one.items():
            merged[name] = {**merged.get(name, {}), **keys}
    return Config.model_validate(merged)


def endless(policy: Path, turns: int, **sections: Mapping[str, Any]) -> Config:
    """A run that goes on until it is ended, with these `sections` besides; its workers take `turns` at once, paced."""
    room = {"max_batch": turns, "max_pending": turns, "max_context_tokens": 512, **sections.pop("engine", {})}
    return configuration("untimed", "paced", "endless", policy=policy, engine=room, **sections)
