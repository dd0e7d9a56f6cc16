"""What a run looks like right now: one snapshot for the terminal, for `--json`, and for the journal's samples."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

import msgspec

from elastic.core.agreement import Mismatch
from elastic.core.allowance import BudgetForecast, budget_forecast, capped_gpus, gpus_of
from elastic.core.controls import BUDGET_EXHAUSTED
from elastic.core.fleet import Worker
from elastic.core.ledger import NANO_USD_PER_USD
from elastic.core.run_state import RunWarning
from elastic.core.scheduler import Scheduler
from elastic.core.types import NS_PER_S, Nanoseconds, WorkerState


class ProviderStatus(msgspec.Struct, kw_only=True):
    """One provider at one moment. `tokens` counts accepted tokens since the run began; `gpus` are all that is asked for
    or held, what is on its way back included. `deaths` are leases that
    ended neither in order nor by a preemption, `replaced` how many of them another lease followed."""

    ready: int = 0
    booting: int = 0
    other: int = 0
    gpus: int = 0
    capacity_turns: int = 0
    running_turns: int = 0
    tokens: int = 0
    leases_ended: int = 0
    preemptions: int = 0
    deaths: int = 0
    replaced: int = 0
    paced_iterations: int = 0
    """Of its workers' engines: those whose time was modelled."""
    late_iterations: int = 0
    """Those of them that took longer than modelled."""
    usd: float = 0.0
    usd_per_hour: float = 0.0


class RunCondition(msgspec.Struct, frozen=True, kw_only=True):
    """Something that keeps the run from working at full speed now: its kind, a reason of one word, and a message."""

    type: str
    reason: str
    message: str


class RunStatus(msgspec.Struct, kw_only=True):
    """The run at one moment. Success rates are shares of scored trajectories with a reward above 0; mean rewards are of
    the same trajectories.

    `cpu_share` is that of the whole machine. `late_share` is that of the paced iterations which took longer than
    modelled, None where nothing is paced; where it passes `LATE_SHARE_MAX`, `pacing_holds` is false.
    """

    run: str
    phase: str
    step: int
    steps: int
    elapsed_s: float
    success_rate: float | None
    last_success_rate: float | None
    mean_reward: float | None = None
    last_mean_reward: float | None = None
    trajectories_running: int
    queued_turns: int
    tokens_per_s: float
    preemptions: int
    usd: float
    cpu_share: float
    late_share: float | None = None
    pacing_holds: bool
    trainer: str
    providers: dict[str, ProviderStatus]
    caps: dict[str, int] = {}
    """The most GPUs that may be held, by provider, where that is limited."""
    budget: BudgetForecast | None = None
    conditions: list[RunCondition] = []
    mismatches: list[Mismatch] = []
    warnings: list[RunWarning] = []
    """Those since the sample before."""


PROVIDER_STOPPED = "ProviderStopped"
LATE_SHARE_MAX = 0.05
"""Above this share of late iterations, paced engines run below the speed that they model."""
CPU_SATURATED_SHARE = 0.85
"""Above this, several engines on one machine compete for it and stop adding up as separate devices would."""


class ProviderCounts(Protocol):
    """A shell's counts for one provider since the run began. The core forgets past leases."""

    tokens: int
    leases_ended: int
    preemptions: int
    deaths: int
    replaced: int
    paced_iterations: int
    late_iterations: int


def run_status(
    run: str,
    scheduler: Scheduler,
    now_ns: Nanoseconds,
    counts: Mapping[str, ProviderCounts],
    *,
    rewards: Sequence[float],
    last_success_rate: float | None,
    last_mean_reward: float | None,
    tokens_per_s: float,
    function_usd: float,
    cpu_share: float = 0.0,
) -> RunStatus:
    """The state of a run's core, with what its shell has counted. `rewards` are those of this step so far."""
    providers = _provider_statuses(scheduler, now_ns, counts)
    late = late_share(counts.values())
    step = scheduler.step
    return RunStatus(
        run=run,
        phase=scheduler.phase,
        step=step.number if step else scheduler.version or 0,
        steps=scheduler.plan.steps,
        elapsed_s=now_ns / NS_PER_S,
        success_rate=success_rate(rewards),
        last_success_rate=last_success_rate,
        mean_reward=mean_reward(rewards),
        last_mean_reward=last_mean_reward,
        trajectories_running=sum(len(group.unfinished) for group in (step.groups.values() if step else ())),
        queued_turns=sum(turn.worker is None for turn in scheduler.turns.live.values()),
        tokens_per_s=tokens_per_s,
        preemptions=sum(provider.preemptions for provider in providers.values()),
        usd=sum(provider.usd for provider in providers.values()) + function_usd,
        cpu_share=cpu_share,
        late_share=late,
        pacing_holds=late is None or late <= LATE_SHARE_MAX,
        trainer=scheduler.trainer_mode,
        providers=providers,
        caps=dict(scheduler.controls.caps),
        budget=budget_forecast(scheduler.pieces[0], now_ns),
        conditions=conditions(scheduler, now_ns),
        mismatches=list(scheduler.agreement.mismatches),
    )


def conditions(scheduler: Scheduler, now_ns: Nanoseconds) -> list[RunCondition]:
    """Caps, providers that are asked no more, a budget that is nearly used, and why the run ends."""
    run, controls = scheduler.pieces[0], scheduler.controls
    found: list[RunCondition] = []
    for provider, cap in sorted(controls.caps.items()):
        message = f"{provider} is capped at {cap} GPUs, and has {capped_gpus(run, provider)}"
        found.append(RunCondition(type="Capped", reason="CapSet", message=message))
    for provider, fault in sorted(scheduler.leases.stopped.items()):
        message = f"{provider} is asked for nothing more, for its workers cannot start: {fault}"
        found.append(RunCondition(type=PROVIDER_STOPPED, reason="CannotStart", message=message))
    budget = budget_forecast(run, now_ns)
    if budget is not None and budget.warned:
        message = f"${budget.committed_usd:.2f} of the budget of ${budget.budget_usd:.2f} are spent or committed"
        if budget.ends_in_s is not None:
            message += f"; it ends in {budget.ends_in_s:.0f} s with what is held"
        found.append(RunCondition(type="BudgetWarning", reason="BudgetNearlyUsed", message=message))
    if scheduler.stopped:
        exhausted = scheduler.stopped.startswith(BUDGET_EXHAUSTED)
        reason = BUDGET_EXHAUSTED if exhausted else "StopRequested"
        found.append(RunCondition(type="Stopping", reason=reason, message=scheduler.stopped))
    return found


def success_rate(rewards: Sequence[float]) -> float | None:
    """The share of rewards above 0; None where nothing has been scored."""
    return sum(reward > 0 for reward in rewards) / len(rewards) if rewards else None


def mean_reward(rewards: Sequence[float]) -> float | None:
    return sum(rewards) / len(rewards) if rewards else None


def late_share(counts: Iterable[ProviderCounts]) -> float | None:
    """The share of the paced iterations that took longer than modelled; None where nothing is paced."""
    paced = late = 0
    for count in counts:
        paced += count.paced_iterations
        late += count.late_iterations
    return late / paced if paced else None


def tokens_per_s(marks: Sequence[tuple[Nanoseconds, int]]) -> float:
    """The mean rate from the first to the last of `marks`: times, and tokens counted until then."""
    (first_ns, first), (last_ns, last) = marks[0], marks[-1]
    return (last - first) * NS_PER_S / (last_ns - first_ns) if last_ns > first_ns else 0.0


def total_tokens(counts: Mapping[str, ProviderCounts]) -> int:
    return sum(count.tokens for count in counts.values())


def _provider_statuses(
    scheduler: Scheduler, now_ns: Nanoseconds, counts: Mapping[str, ProviderCounts]
) -> dict[str, ProviderStatus]:
    statuses = {
        name: ProviderStatus(
            tokens=count.tokens,
            leases_ended=count.leases_ended,
            preemptions=count.preemptions,
            deaths=count.deaths,
            replaced=count.replaced,
            paced_iterations=count.paced_iterations,
            late_iterations=count.late_iterations,
        )
        for name, count in counts.items()
    }
    for provider, nano_usd in scheduler.ledger.bill_nano_usd(now_ns).items():
        statuses.setdefault(provider, ProviderStatus()).usd = nano_usd / NANO_USD_PER_USD
    for book in scheduler.ledger.books.values():
        if book.closed_ns is None:
            nano_usd_per_hour = book.price.nano_usd_per_hour
            statuses.setdefault(book.provider, ProviderStatus()).usd_per_hour += nano_usd_per_hour / NANO_USD_PER_USD
    for lease in scheduler.leases.leases.values():
        statuses.setdefault(lease.provider, ProviderStatus()).gpus += gpus_of(lease.offer)
    _count_workers(statuses, scheduler.fleet.workers.values())
    return dict(sorted(statuses.items()))


def _count_workers(statuses: dict[str, ProviderStatus], workers: Iterable[Worker]) -> None:
    for worker in workers:
        status = statuses.setdefault(worker.provider, ProviderStatus())
        if worker.state is WorkerState.READY:
            status.ready += 1
            status.capacity_turns += worker.capacity
        elif worker.state in (WorkerState.BOOTING, WorkerState.LOADING):
            status.booting += 1
        else:
            status.other += 1
        status.running_turns += worker.outstanding
