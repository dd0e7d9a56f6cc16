"""Takes a run's status: what its core holds, and what its shell has counted."""

from collections.abc import Iterable, Mapping, Sequence

from msgspec import UNSET, UnsetType

from elastic.core.allowance import budget_forecast, capped_gpus, gpus_of
from elastic.core.controls import BUDGET_EXHAUSTED
from elastic.core.fleet import Worker
from elastic.core.ledger import NANO_USD_PER_USD
from elastic.core.scheduler import Scheduler
from elastic.core.types import NS_PER_S, Nanoseconds, WorkerState
from elastic.runtime.flushing import SATURATED_SHARE, UNKNOWN_LOAD, CoreLoad
from elastic.runtime.status import (
    LATE_SHARE_MAX,
    PROVIDER_STOPPED,
    EnvironmentStatus,
    EvaluationStatus,
    LostPlays,
    ProviderCounts,
    ProviderStatus,
    RunCondition,
    RunStatus,
    ServingStatus,
    UpstreamStatus,
    late_share,
    mean_reward,
    success_rate,
)


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
    load: CoreLoad = UNKNOWN_LOAD,
    upstream: UpstreamStatus | None = None,
    lost: Mapping[str, LostPlays] | None = None,
    cut_tokens: Mapping[str, int] | None = None,
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
        core_share=load.share,
        flush_interval_s=load.flush_interval_s,
        late_share=late,
        pacing_holds=late is None or late <= LATE_SHARE_MAX,
        trainer=scheduler.trainer_mode,
        providers=providers,
        caps=dict(scheduler.controls.caps),
        budget=budget_forecast(scheduler.pieces[0], now_ns),
        conditions=conditions(scheduler, now_ns, load),
        mismatches=list(scheduler.agreement.mismatches),
        upstream=upstream,
        environments=_environment_statuses(scheduler, lost or {}, cut_tokens or {}),
        evaluation=_evaluation_status(scheduler),
        serving=_serving_status(scheduler),
        refilled={str(cause): count for cause, count in scheduler.outcomes.refilled.items()},
    )


def _serving_status(scheduler: Scheduler) -> ServingStatus | UnsetType:
    serving, version, live = scheduler.serving, scheduler.version or 0, scheduler.turns.live.values()
    if serving is None:
        return UNSET
    waiting = sum(turn.worker is None for turn in live)
    label = serving.labels.get(version, "")
    return ServingStatus(version=version, label=label, running=len(live) - waiting, waiting=waiting, held=serving.held)


def _evaluation_status(scheduler: Scheduler) -> EvaluationStatus | UnsetType:
    evaluation, plan = scheduler.evaluation, scheduler.plan.evaluation
    if evaluation is None or plan is UNSET:
        return UNSET
    episodes = plan.episodes
    return EvaluationStatus(version=evaluation.version, episodes=episodes, ended=episodes - evaluation.unended)


def _environment_statuses(
    scheduler: Scheduler, lost: Mapping[str, LostPlays], cut_tokens: Mapping[str, int]
) -> dict[str, EnvironmentStatus]:
    run = scheduler.pieces[0]
    return {
        one.name: EnvironmentStatus(
            groups=groups,
            cut_off=run.outcomes.cut_off.get(one.name, 0),
            begun_again=lost[one.name].times if one.name in lost else 0,
            lost_tokens=(lost[one.name].tokens if one.name in lost else 0) + cut_tokens.get(one.name, 0),
        )
        for one, groups in zip(run.plan.environments, run.launched_of, strict=True)
        if one.name
    }


def conditions(scheduler: Scheduler, now_ns: Nanoseconds, load: CoreLoad = UNKNOWN_LOAD) -> list[RunCondition]:
    """A core that is full, caps, providers that are asked no more, a budget that is nearly used, and why the run
    ends."""
    run, controls = scheduler.pieces[0], scheduler.controls
    found: list[RunCondition] = []
    if load.share > SATURATED_SHARE:
        found.append(RunCondition(type="CoreSaturated", reason="CoreBusy", message=saturated(load)))
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


def saturated(load: CoreLoad) -> str:
    return (
        f"the orchestrator takes {load.share:.0%} of the one core that it can use: it slows the run down, and more "
        "workers would not make it faster"
    )


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
