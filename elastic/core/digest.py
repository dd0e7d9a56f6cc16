"""A hash of the scheduler's whole state: two runs in the same state have the same digest (invariant 13)."""

import hashlib
from typing import Any

import msgspec

from elastic.core.scheduler import Scheduler
from elastic.core.transitions import Story

DIGEST_BYTES = 16


def digest(scheduler: Scheduler) -> str:
    """The canonical state as a hexadecimal hash. Order counts where the core's decisions depend on it."""
    return hashlib.blake2b(_encoder.encode(_view(scheduler)), digest_size=DIGEST_BYTES).hexdigest()


def _view(scheduler: Scheduler) -> tuple[Any, ...]:
    step, leases, turns = scheduler.step, scheduler.leases, scheduler.turns
    return (
        (scheduler.now_ns, scheduler.phase, scheduler.failed, scheduler.version),
        (scheduler.trainer_mode, scheduler.training, scheduler.history, scheduler.seeding_plan),
        step and (step.number, step.version, step.started_ns, step.seeding_ended_ns, step.rollout_ended_ns),
        step and (step.updating, step.groups, step.free_slots, step.launched, step.meter),
        (leases.leases, leases.offers, leases.failures, leases.worker_bound),
        {provider: (leases.ready_ns(provider), leases.mean_ready_ns(provider)) for provider in leases.offers},
        scheduler.fleet.workers,
        (turns.live, turns.conversations, turns.demands),
        scheduler.scorings,
        scheduler.ledger.books,
        list(scheduler.profiles.items()),
        scheduler.timers.waits(),
    )


def _plain(value: Any) -> Any:
    """What msgspec does not know by itself."""
    if isinstance(value, Story):
        return value.chapters
    raise NotImplementedError(f"{type(value).__name__} has no canonical form")


_encoder = msgspec.msgpack.Encoder(enc_hook=_plain)
