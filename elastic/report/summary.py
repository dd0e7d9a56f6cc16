"""A run's results as one struct, computed from its journal; every format of the report is written from it.

It works on any journal: of a finished run, of a failed one, of one still going, or of one whose orchestrator was
killed.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import PurePath
from typing import Any

import msgspec
import numpy as np

from elastic.core import events as e
from elastic.core.agreement import Mismatch
from elastic.core.types import NS_PER_S, BudgetForecast, EndCause, Nanoseconds
from elastic.report.agreement import WorkerAgreement, agreements_of
from elastic.report.alone import AloneCost, alone_costs
from elastic.report.batches import TRAINED, Batches, batches_of
from elastic.report.coserving import CoServingHost, co_serving_of
from elastic.report.diagnoses import Course, Diagnosis, diagnoses_of
from elastic.report.environments import EnvironmentUsage, environments_of
from elastic.report.evaluations import Evaluations, evaluations_of
from elastic.report.functions import FunctionUsage, functions_of
from elastic.report.history import History, Segment, config_of, history_of
from elastic.report.lanes import WorkerLane, lanes, replacements
from elastic.report.learning import StepLearning, learning_of
from elastic.report.metrics import mean_metrics
from elastic.report.policies import PolicyUsage, policies_of
from elastic.report.refusals import LeaseRefusals, Remark, refused_leases_of, refused_of, remarks_of
from elastic.report.timeline import Timeline, timeline
from elastic.report.upstream import UpstreamUsage, upstream_of
from elastic.report.usage import (
    JoinedUsage,
    LeaseEnd,
    Usage,
    joined_usage,
    lease_ends,
    ledger_of,
    strays_usd_of,
    unattributed_share,
    usage_of,
)
from elastic.report.weights import WeightUpdates, weights_of
from elastic.runtime.agents import CHATS_NOTE, ChatTotals, chats_of
from elastic.runtime.journal import (
    INTERRUPTED,
    SIMULATED,
    TRACEBACK,
    GroupRow,
    MoveRow,
    PullRow,
    StepRow,
    StoredRun,
    TrajectoryRow,
    TurnRow,
)
from elastic.runtime.refusals import RefusalCount
from elastic.runtime.status import CPU_SATURATED_SHARE, EnvironmentStep, mean_reward, success_rate, tokens_at_risk

TRAINER = "trainer"
"""`Plan.trainer_provider` unless set otherwise; it stands first."""
HISTOGRAM_BINS_PER_DECADE = 10
CONFIGLESS = "a journal notes no configuration, so what the run was to do, and its prices, are missing"
SHORTEST_S = 1e-3
"""Turns faster than this share the histogram's first bin."""


class Quantiles(msgspec.Struct, frozen=True, kw_only=True):
    """A distribution in a few numbers; None where nothing was measured. Its unit is in the name it goes by."""

    count: int = 0
    p50: float | None = None
    p95: float | None = None
    p99: float | None = None
    max: float | None = None


class Histogram(msgspec.Struct, frozen=True, kw_only=True):
    """`counts[i]` values lie between `edges_s[i]` and `edges_s[i + 1]`, which are spaced evenly in their logarithm."""

    edges_s: list[float]
    counts: list[int]


class StepSummary(msgspec.Struct, frozen=True, kw_only=True):
    """One finished training step. `success_rate` is the share of scored trajectories with a reward above 0,
    `standard_error` that of the share; `mean_reward` is of the same trajectories. All are None in a simulation, where
    no policy learns.
    """

    step: int
    at_s: float
    duration_s: float
    seeding_s: float
    rollout_s: float
    groups_trained: int
    groups_dropped: int
    trajectories: int
    success_rate: float | None
    mean_reward: float | None
    standard_error: float | None
    trainer: dict[str, float | None]
    environments: dict[str, EnvironmentStep] = {}
    """The same by environment, where there are several."""
    metrics: dict[str, float] = {}
    """What environments measure besides rewards: the means over the step's scored trajectories that have them."""


class Moves(msgspec.Struct, frozen=True, kw_only=True):
    """Turns that left a worker unfinished. `tokens_kept` were accepted before and not generated again.

    `redispatch_s` runs from a turn's leaving its worker to its start on the next.
    """

    turns: int
    tokens_kept: int
    redispatch_s: Quantiles


class Pulls(msgspec.Struct, frozen=True, kw_only=True):
    """Weight pulls by workers; times are those of the pulls that succeeded."""

    count: int
    failed: int
    bytes: int
    pull_s: Quantiles
    apply_s: Quantiles


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """A run in numbers; shares lie in [0, 1], times are seconds since the run began.

    `outcome` is finished, failed, interrupted (by a signal), stopped (told to end, or out of its budget) or incomplete
    (it still goes on, or its orchestrator was killed). A run that was resumed has several `segments`; figures are those
    of all, times leave out what lay between them. `paced` says whether engines modelled a device's speed, None where
    that is not known.

    `usd` is the whole bill, of `total` and `functions`, and what a million accepted or trained tokens cost is of it.
    `on_demand_usd` is what that bill would be with all GPU time at the trainer's price, which is on demand; None
    where that is unknown.
    """

    run: str
    segments: int
    outcome: str
    cause: str
    diagnoses: list[Diagnosis]
    """What went wrong, as far as the rules see it."""
    started_at: str
    seed: str
    requested_providers: list[str]
    paced: bool | None
    wall_s: float
    steps_planned: int | None
    steps: list[StepSummary]
    learning: list[StepLearning]
    """Empty in a simulation, where no policy learns."""
    evaluations: Evaluations
    success_first: float | None
    success_last: float | None
    mean_reward_first: float | None
    mean_reward_last: float | None
    trajectories_finished: int
    trajectories_truncated: int
    trajectories_failed: dict[str, int]
    refilled: dict[str, int]
    """Trajectories in whose place another one came, by what had failed them."""
    groups_trained: int
    groups_dropped: dict[str, int]
    total: Usage
    providers: dict[str, Usage]
    usd: float
    usd_per_million_tokens: float | None
    usd_per_million_trained_tokens: float | None
    on_demand_usd: float | None
    functions: list[FunctionUsage]
    alone: list[AloneCost]
    co_serving: list[CoServingHost]
    ledger_imbalance_ns: int
    unattributed_share: float | None
    lease_ends: list[LeaseEnd]
    moves: Moves
    preempted_moves: Moves
    turns: int
    turn_latency_s: Quantiles
    first_token_s: Quantiles
    turn_latency: Histogram
    first_token: Histogram
    pulls: Pulls
    weights: WeightUpdates
    late_share: float | None
    """The share of the engines' paced iterations that took longer than modelled, as the engines measured."""
    cpu_saturated_share: float | None
    core_share_max: float | None
    """The largest share of one core that the orchestrator took at a sample. This and the next two are None in a
    simulation."""
    flush_interval_s_max: float | None
    kill_loses_tokens_max: int | None
    """The most tokens that lay in workers, and would have been lost with them."""
    timeline: Timeline
    batches: Batches
    trajectory_latency_s: Quantiles
    trajectory_latency: Histogram
    lanes: list[WorkerLane]
    simulated: bool
    """The run never happened: devices, providers and environments were models on virtual time."""
    refused: list[RefusalCount]
    caps: dict[str, int]
    budget: BudgetForecast | None
    """As they stood last."""
    notes: list[str]
    """The simulation's remarks on its own figures."""
    joined: list[JoinedUsage]
    refused_leases: list[LeaseRefusals]
    remarks: list[Remark]
    agreements: list[WorkerAgreement]
    mismatches: list[Mismatch]
    """Workers that were found not to generate with the weights which they named."""
    traceback: str
    """The traceback of the first environment that raised."""
    policies: list[PolicyUsage]
    """The usage of each policy, where agents call the model by several names."""
    environments: list[EnvironmentUsage]
    upstream: list[UpstreamUsage]
    """Calls of models elsewhere; their cost is among that of `functions`."""
    chats: ChatTotals
    """What spare credit has answered beside the rollouts."""
    unreadable: list[str] = []
    """What of the journals could not be read, each with its file; what stands before that is in the report."""


def summarise(run: StoredRun) -> Summary:
    """Everything the report says about a run, over all of its segments.

    Raises `JournalError` where a journal of one cannot be read.
    """
    with history_of(run) as history:
        return _summary(history)


def _summary(history: History) -> Summary:
    metas = [segment.meta() for segment in history.segments]
    meta = metas[-1]
    configs = [config_of(meta) for meta in metas]
    config = configs[-1] or {}
    samples, books, end_ns = history.samples(), history.books(), history.end_ns
    turns, moves = history.rows(TurnRow), history.rows(MoveRow)
    trajectories = history.rows(TrajectoryRow)
    simulated = SIMULATED in meta
    steps = _steps(history.rows(StepRow), trajectories, learns=not simulated)
    ends = lease_ends(history, books)
    workers = lanes(history, books, ends, end_ns, _drain_ns(config))
    replacing = replacements(workers)
    status = samples[-1][1] if samples else None
    loaded = [status for _, status in samples if status.flush_interval_s]
    tokens = {name: p.tokens for name, p in status.providers.items()} if status else {}
    shown = timeline(samples, [step.at_s for step in steps])
    strays_usd = strays_usd_of(history)
    names = {book.provider for book in books} | shown.providers.keys() | strays_usd.keys()
    by_provider = {
        name: usage_of(
            [b for b in books if b.provider == name],
            ends,
            replacing,
            end_ns,
            tokens.get(name, 0),
            strays_usd.get(name, 0.0),
        )
        for name in sorted(names, key=lambda name: (name != TRAINER, name))
    }
    preempted = {end.lease for end in ends if end.cause == EndCause.PREEMPTED}
    lost_workers = {book.worker for book in books if book.lease in preempted}
    trained = {event.group for _, event in history.events_of(e.GroupTrained)}
    latencies_s, first_tokens_s = (
        _since_request((turn, turn.finished_ns) for turn in turns),
        _since_request((turn, turn.first_token_ns) for turn in turns),
    )
    outcome, cause = _outcome(meta, history.segments[-1])
    total = usage_of(books, ends, replacing, end_ns, sum(tokens.values()), sum(strays_usd.values()))
    batches, functions = batches_of(history), functions_of(history)
    groups = {fate.fate: fate.groups for fate in batches.fates}
    functions_usd = sum(usage.usd for usage in functions)
    rollouts = {name: usage for name, usage in by_provider.items() if name != TRAINER}
    other_usd = functions_usd + (by_provider[TRAINER].usd if TRAINER in by_provider else 0.0)
    usd, on_demand_usd = total.usd + functions_usd, _on_demand_usd(total, functions_usd, config)
    rated = [step.success_rate for step in steps if step.success_rate is not None]
    means = [step.mean_reward for step in steps if step.mean_reward is not None]
    scored = [row for row in trajectories if _scored(row)]
    failed = _counts(row.cause or "no finite reward" for row in trajectories if _failed(row))
    refilled = status.refilled if status else {}
    lives_s = [(row.ended_ns - row.started_ns) / NS_PER_S for row in scored]
    learning = [] if simulated else learning_of(history.rows(StepRow), scored)
    return Summary(
        run=meta.get("run") or (status.run if status else history.name),
        segments=len(history.segments),
        outcome=outcome,
        cause=cause,
        diagnoses=diagnoses_of(
            Course(
                learning=learning,
                members=len(scored) + sum(failed.values()),
                failed=failed,
                refilled=refilled,
                parted=batches.parted,
                rollouts=rollouts,
                usd=usd,
                on_demand_usd_per_gpu_hour=_on_demand_usd_per_gpu_hour(config),
            )
        ),
        started_at=metas[0].get("started_at", ""),
        seed=meta.get("seed", ""),
        requested_providers=_providers(metas),
        paced=bool(config["engine"].get("pacing")) if "engine" in config else None,
        wall_s=end_ns / NS_PER_S,
        steps_planned=status.steps if status else config.get("run", {}).get("steps"),
        steps=steps,
        learning=learning,
        evaluations=evaluations_of(history),
        success_first=rated[0] if rated else None,
        success_last=rated[-1] if rated else None,
        mean_reward_first=means[0] if means else None,
        mean_reward_last=means[-1] if means else None,
        trajectories_finished=len(scored),
        trajectories_truncated=sum(row.truncated for row in scored),
        trajectories_failed=failed,
        refilled=refilled,
        groups_trained=groups.pop(TRAINED, 0) if groups else len(trained),
        groups_dropped=groups,
        total=total,
        providers=by_provider,
        usd=usd,
        usd_per_million_tokens=_per_million(usd, total.tokens),
        usd_per_million_trained_tokens=_per_million(usd, batches.trained_tokens),
        on_demand_usd=on_demand_usd,
        functions=functions,
        alone=alone_costs(rollouts, other_usd, end_ns / NS_PER_S),
        co_serving=co_serving_of(history),
        ledger_imbalance_ns=ledger_of(books).imbalance_ns(),
        unattributed_share=unattributed_share(books, ends),
        lease_ends=ends,
        moves=_moves(moves),
        preempted_moves=_moves([move for move in moves if move.from_worker in lost_workers]),
        turns=len(turns),
        turn_latency_s=quantiles(latencies_s),
        first_token_s=quantiles(first_tokens_s),
        turn_latency=histogram(latencies_s),
        first_token=histogram(first_tokens_s),
        pulls=_pulls(history.rows(PullRow)),
        weights=weights_of(history),
        caps=status.caps if status else {},
        budget=status.budget if status else None,
        late_share=status.late_share if status else None,
        cpu_saturated_share=_share(status.cpu_share > CPU_SATURATED_SHARE for _, status in samples),
        core_share_max=max((status.core_share for status in loaded), default=None),
        flush_interval_s_max=max((status.flush_interval_s for status in loaded), default=None),
        kill_loses_tokens_max=max(
            (tokens_at_risk(status.tokens_per_s, status.flush_interval_s) for status in loaded), default=None
        ),
        timeline=shown,
        batches=batches,
        trajectory_latency_s=quantiles(lives_s),
        trajectory_latency=histogram(lives_s),
        lanes=workers,
        simulated=simulated,
        refused=refused_of(history),
        notes=msgspec.json.decode(meta.get("notes", "[]"), type=list[str]),
        joined=joined_usage(history, books),
        refused_leases=refused_leases_of(history),
        remarks=remarks_of(history),
        agreements=agreements_of(history),
        mismatches=status.mismatches if status else [],
        traceback=next(filter(None, (meta.get(TRACEBACK, "") for meta in metas)), ""),
        policies=_policies(trajectories, config),
        environments=environments_of(
            trajectories, history.rows(GroupRow), status.environments if status is not None else {}
        ),
        upstream=upstream_of(history) if _calls_upstream(configs) else [],
        chats=chats_of(meta.get(CHATS_NOTE, "{}") for meta in metas),
        unreadable=[*history.broken, *([CONFIGLESS] if None in configs else [])],
    )


def _calls_upstream(configs: Iterable[Mapping[str, Any] | None]) -> bool:
    """Whether agents could call models elsewhere; looking for it reads all that was said of agents."""
    return any(((config or {}).get("front") or {}).get("upstream") for config in configs)


def _policies(trajectories: Sequence[TrajectoryRow], config: Mapping[str, Any]) -> list[PolicyUsage]:
    front = config.get("front") or {}
    own = front.get("model_name") or PurePath(config.get("model", {}).get("checkpoint", "")).name
    return policies_of([row for row in trajectories if _scored(row)], own, front.get("policies", ()))


def _on_demand_usd(total: Usage, functions_usd: float, config: Mapping[str, Any]) -> float | None:
    price = _on_demand_usd_per_gpu_hour(config)
    return None if price is None else total.gpu_s / 3600 * price + functions_usd


def _on_demand_usd_per_gpu_hour(config: Mapping[str, Any]) -> float | None:
    """The trainer's."""
    return config.get("trainer", {}).get("usd_per_gpu_hour")


def _providers(metas: Iterable[Mapping[str, str]]) -> list[str]:
    """Providers that any segment of the run asked for."""
    return list(dict.fromkeys(name for meta in metas for name in meta.get("providers", "").split(",") if name))


def _drain_ns(config: Mapping[str, Any]) -> Nanoseconds:
    return round(config.get("scheduler", {}).get("drain_timeout_s", 0.0) * NS_PER_S)


def _per_million(usd: float, tokens: int) -> float | None:
    return usd / tokens * 1e6 if tokens else None


def quantiles(values: Iterable[float | None]) -> Quantiles:
    found = [value for value in values if value is not None]
    if not found:
        return Quantiles()
    p50, p95, p99, largest = (float(q) for q in np.percentile(found, (50, 95, 99, 100)))
    return Quantiles(count=len(found), p50=p50, p95=p95, p99=p99, max=largest)


def histogram(values_s: Sequence[float]) -> Histogram:
    """Logarithmic bins that just hold all values."""
    if not values_s:
        return Histogram(edges_s=[], counts=[])
    exponents = np.log10(np.maximum(values_s, SHORTEST_S)) * HISTOGRAM_BINS_PER_DECADE
    bins = np.floor(exponents).astype(int)
    first = int(bins.min())
    counts = np.bincount(bins - first)
    edges_s = 10.0 ** (np.arange(first, first + len(counts) + 1) / HISTOGRAM_BINS_PER_DECADE)
    return Histogram(edges_s=edges_s.tolist(), counts=counts.tolist())


def _outcome(meta: Mapping[str, str], segment: Segment) -> tuple[str, str]:
    """How the run ended, and why it failed or was stopped: as its owner wrote it, else as the core was told to stop."""
    status, _, cause = meta.get("status", "").partition(": ")
    if status not in ("finished", "failed", "stopped"):
        return "incomplete", ""
    if status == "failed" and not cause:
        stops = [event.reason for _, event in segment.events_of(e.StopRequested)]
        cause = stops[0] if stops else ""
    return (INTERRUPTED, "") if (status, cause) == ("failed", INTERRUPTED) else (status, cause)


def _scored(trajectory: TrajectoryRow) -> bool:
    """Whether it counts: an infrastructure failure is never a result (invariant 11)."""
    reward = trajectory.reward
    return not trajectory.cause and reward is not None and math.isfinite(reward)


def _failed(trajectory: TrajectoryRow) -> bool:
    return not (_scored(trajectory) or trajectory.is_cut_off or trajectory.waits_for_score)


def _steps(steps: Sequence[StepRow], trajectories: Sequence[TrajectoryRow], *, learns: bool) -> list[StepSummary]:
    scored: dict[int, list[TrajectoryRow]] = {}
    for row in filter(_scored, trajectories):
        scored.setdefault(row.step, []).append(row)
    return [_step(row, scored.get(row.step, []), learns=learns) for row in steps]


def _step(row: StepRow, scored: Sequence[TrajectoryRow], *, learns: bool) -> StepSummary:
    rewards = [one.reward or 0.0 for one in scored]
    rate = success_rate(rewards) if learns else None
    unusable = int(row.trainer.get("groups_unusable") or 0)
    return StepSummary(
        step=row.step,
        at_s=row.t_ns / NS_PER_S,
        duration_s=row.record.duration_ns / NS_PER_S,
        seeding_s=row.record.seeding_ns / NS_PER_S,
        rollout_s=row.record.rollout_ns / NS_PER_S,
        groups_trained=row.record.groups_trained - unusable,
        groups_dropped=row.record.groups_dropped + unusable,
        trajectories=len(rewards),
        success_rate=rate,
        mean_reward=mean_reward(rewards) if learns else None,
        standard_error=None if rate is None else math.sqrt(rate * (1 - rate) / len(rewards)),
        trainer=row.trainer,
        environments=row.environments if learns else {},
        metrics=mean_metrics(scored),
    )


def _since_request(moments: Iterable[tuple[TurnRow, Nanoseconds | None]]) -> list[float]:
    """The time from each turn's request to a moment of it, where that came."""
    return [(at_ns - turn.requested_ns) / NS_PER_S for turn, at_ns in moments if at_ns is not None]


def _moves(moves: Sequence[MoveRow]) -> Moves:
    return Moves(
        turns=len(moves),
        tokens_kept=sum(move.accepted_tokens for move in moves),
        redispatch_s=quantiles((move.started_ns - move.left_ns) / NS_PER_S for move in moves),
    )


def _pulls(pulls: Sequence[PullRow]) -> Pulls:
    done = [pull for pull in pulls if not pull.error]
    return Pulls(
        count=len(pulls),
        failed=len(pulls) - len(done),
        bytes=sum(pull.bytes for pull in pulls),
        pull_s=quantiles(pull.pull_s for pull in done),
        apply_s=quantiles(pull.apply_s for pull in done),
    )


def _counts(values: Iterable[str]) -> dict[str, int]:
    return dict(Counter(values).most_common())


def _share(flags: Iterable[bool]) -> float | None:
    found = list(flags)
    return sum(found) / len(found) if found else None
