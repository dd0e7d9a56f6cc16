"""The report's words and rows, once for every format: headline figures, what to beware of, and tables."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime

import msgspec

from elastic.core.types import DEATHS, Account, BudgetForecast
from elastic.report import units
from elastic.report.agreement import sources_of
from elastic.report.batches import TRAINED
from elastic.report.comparison import Comparison
from elastic.report.document import Figure, Table
from elastic.report.evaluations import EvaluatedVersion, Evaluations, estimate_words
from elastic.report.summary import Moves, Pulls, Quantiles, StepSummary, Summary
from elastic.report.upstream import UpstreamUsage
from elastic.report.usage import LeaseEnd, Usage
from elastic.report.weights import PARTS, WorkerPull, mean, mean_split_s
from elastic.runtime.journal import INTERRUPTED
from elastic.runtime.status import CPU_SATURATED_SHARE, LATE_SHARE_MAX
from elastic.system.plain_values import printable

MOST_CAUSES = 10
MOST_ROWS = 40
"""Most rows of what may be many. The JSON has all."""

_SPLIT = ("awaited", *PARTS[1:])
"""A pull's parts, where the trainer's time has a column of its own."""


class Bill(msgspec.Struct, frozen=True, kw_only=True):
    """The costs of one provider, of the functions (without `usage` of devices), or of all together."""

    name: str
    usage: Usage | None
    usd: float
    usd_per_million_tokens: float | None


def bills(summary: Summary) -> list[Bill]:
    """Each provider's, the functions', and their sum where there is more than one."""
    found = [
        Bill(name=name, usage=usage, usd=usage.usd, usd_per_million_tokens=usage.usd_per_million_tokens)
        for name, usage in summary.providers.items()
    ]
    if summary.functions:
        usd = sum(function.usd for function in summary.functions)
        found.append(Bill(name="functions", usage=None, usd=usd, usd_per_million_tokens=None))
    if len(found) > 1:
        whole = summary.usd_per_million_tokens
        found.append(Bill(name="all", usage=summary.total, usd=summary.usd, usd_per_million_tokens=whole))
    return found


def subtitle(summary: Summary) -> str:
    """When, with which seed and on which providers."""
    parts = [
        "simulated" if summary.simulated else "",
        f"{summary.segments} segments" if summary.segments > 1 else "",
        _when(summary.started_at),
        f"seed {summary.seed}" if summary.seed else "",
        "providers " + ", ".join(summary.requested_providers) if summary.requested_providers else "",
    ]
    return " · ".join(part for part in parts if part)


def _when(started_at: str) -> str:
    """An ISO time to the minute, with its zone; anything else as it is."""
    try:
        return f"{datetime.fromisoformat(started_at):%Y-%m-%d %H:%M %Z}".rstrip()
    except ValueError:
        return started_at


def headline(summary: Summary) -> list[Figure]:
    total, moves = summary.total, summary.preempted_moves
    steps = len(summary.steps)
    of = f" of {summary.steps_planned}" if summary.steps_planned not in (None, steps) else ""
    return [
        *_learnt(summary, f"in {steps}{of} steps"),
        Figure("wall time", units.duration(summary.wall_s), f"{units.duration(total.gpu_s)} of GPU time"),
        Figure(
            "throughput",
            f"{units.count(total.tokens_per_s)}/s",
            f"{units.count(total.tokens)} tokens",
        ),
        Figure(
            "cost",
            units.usd(summary.usd),
            f"{units.usd(summary.usd_per_million_tokens)} a million tokens",
        ),
        Figure(
            "preemptions",
            units.count(total.preemptions),
            f"{moves.turns:,} turns moved, p95 {units.duration(moves.redispatch_s.p95)}"
            if moves.turns
            else "no turn was preempted",
        ),
        *_deaths(summary),
        Figure(
            "allocation overhead",
            units.share(total.overhead_share),
            f"{units.share(total.preempted_share)} by the papers' definition",
        ),
    ]


def deaths(summary: Summary) -> list[LeaseEnd]:
    return [end for end in summary.lease_ends if end.cause in DEATHS]


def followed(end: LeaseEnd) -> str:
    return "not replaced" if end.replaced_s is None else f"replaced after {units.duration(end.replaced_s)}"


def _deaths(summary: Summary) -> list[Figure]:
    died = deaths(summary)
    if not died:
        return []
    said: list[str] = []
    for provider in dict.fromkeys(end.provider for end in died):
        own = [end for end in died if end.provider == provider]
        waits = [end.replaced_s for end in own if end.replaced_s is not None]
        came = f"{len(waits)} replaced" if len(own) > 1 else followed(own[0])
        within = f" in {units.duration(max(waits))} at most" if waits[1:] else ""
        said.append(f"{printable(provider)} {len(own)}, {came}{within}")
    return [Figure("deaths", units.count(len(died)), "; ".join(said))]


def _learnt(summary: Summary, steps: str) -> list[Figure]:
    if summary.simulated:
        return [Figure("steps", units.count(len(summary.steps)), "simulated: no policy learns")]
    if summary.steps and not summary.groups_trained and not summary.groups_dropped:
        return [Figure("versions", units.count(len(summary.steps)), "offered by a trainer elsewhere")]
    return [
        Figure(
            "success",
            _percent(summary.success_last),
            f"from {_percent(summary.success_first)} {steps}",
        ),
        Figure(
            "mean reward",
            units.reward(summary.mean_reward_last),
            f"from {units.reward(summary.mean_reward_first)}",
        ),
        *_evaluated(summary.evaluations),
    ]


def _evaluated(found: Evaluations) -> list[Figure]:
    """What the policy comes to on what it is not trained on."""
    if not found.versions or not found.metric:
        return []
    first, last = found.versions[0].version, found.versions[-1].version
    now = found.of(last)
    error = "" if now is None or now.error is None else f"± {units.reward(now.error)} "
    words = [f"{error}at version {last}{', timed out' if found.versions[-1].timed_out else ''}"]
    words += [
        f"{what} {_mean_of(found, version)} at {version}"
        for what, version in (("from", first), ("best", found.best))
        if version is not None and version != last
    ]
    return [Figure(found.metric, _mean_of(found, last), "; ".join(words))]


def _mean_of(found: Evaluations, version: int) -> str:
    one = found.of(version)
    return units.NONE if one is None else units.reward(one.mean)


def warnings(summary: Summary) -> list[str]:
    """Warnings that a reader needs before trusting the figures."""
    found = [f"A part cannot be shown: {one}." for one in summary.unreadable]
    if summary.simulated:
        found.append("Simulated: devices, providers and environments are models, and times are virtual.")
        found += [f"{note}." for note in summary.notes]
    if summary.outcome == "failed":
        found.append(f"The run failed: {summary.cause or 'no cause was recorded'}.")
    if why := summary.evaluations.ends:
        found.append(f"The run ended before its last step, as evaluation.stop_when says: {why}.")
    if summary.outcome == INTERRUPTED:
        found.append("The run was interrupted, and goes on with --resume.")
    if summary.outcome == "stopped":
        found.append(f"The run was stopped before its end: {summary.cause}.")
    if summary.outcome == "incomplete":
        found.append("The journal has no end: the run still goes on, or its orchestrator was killed.")
    if (budget := summary.budget) is not None:
        found.append(_budget_words(budget, goes_on=summary.outcome == "incomplete"))
    found += [f"{provider} is capped at {gpus} GPUs." for provider, gpus in summary.caps.items()]
    if summary.late_share is not None and summary.late_share > LATE_SHARE_MAX:
        found.append(
            f"{units.share(summary.late_share)} of the paced iterations took longer than modelled: engines ran below "
            "the speed they model."
        )
    found += [f"{mismatch}. None of its tokens counts from then on." for mismatch in summary.mismatches[:MOST_ROWS]]
    if summary.chats.turns:
        found.append(
            f"Spare credit has answered {summary.chats.turns:,} chats: {summary.chats.tokens:,} tokens in "
            f"{summary.chats.gpu_s:,.1f} GPU-seconds, which are those of workers above. Nothing of them is trained."
        )
    if summary.ledger_imbalance_ns:
        found.append(
            f"The ledger is out of balance by {summary.ledger_imbalance_ns:,} ns. This is a bug; please report it."
        )
    if slow := [refused for refused in summary.refused if refused.of_turns]:
        found += [f"{turns}." for turns in slow[:MOST_ROWS]]
        found.append(
            "A turn that goes badly is given to another worker, if there is one that has a place, and its own is sent "
            "fewer for a while. An honest worker on a busy machine may be so slow."
        )
    if of_workers := [refused for refused in summary.refused if refused.worker and not refused.of_turns]:
        found += [f"{refused}." for refused in of_workers[:MOST_ROWS]]
        found.append(
            "Nothing that is refused is used, and where a worker is turned away, what its lease stood on is not leased "
            "again in this run. Its log says what it was at; if that goes on, start its machine from a clean image, "
            "with the orchestrator's version."
        )
    return found


def _budget_words(budget: BudgetForecast, *, goes_on: bool) -> str:
    spent = "spent or committed" if goes_on else "spent"
    words = f"Of a budget of {units.usd(budget.budget_usd)} are {units.usd(budget.committed_usd)} {spent}"
    if goes_on and budget.ends_in_s is not None:
        words += f"; with what is held it ends in {units.duration(budget.ends_in_s)}"
    return f"{words}."


def tables(summary: Summary, comparison: Comparison | None = None) -> list[Table]:
    """All tables that have a row, in the order in which they are read."""
    found = [
        providers(summary),
        _joined(summary),
        _accounts(summary),
        _functions(summary),
        _upstream(summary),
        _upstream_by_trajectory(summary),
        _policies(summary),
        _co_serving(summary),
        cost(summary, comparison),
        _alone(summary),
        _fates(summary),
        _staleness(summary),
        _recovery(summary),
        _latency(summary),
        _trajectories(summary),
        _environments(summary),
        traceback(summary),
        _lease_ends(summary),
        _lost_leases(summary),
        _changed_layers(summary),
        _weights_by_worker(summary),
        _weights_by_version(summary),
        _refused_weights(summary),
        _agreements(summary),
        _sources(summary),
        _refused(summary),
        _turns_gone_badly(summary),
        _refused_leases(summary),
        _remarks(summary),
        _integrity(summary),
        _steps(summary),
        _step_environments(summary),
        _evaluations(summary),
        _metrics(summary),
    ]
    return [table for table in found if table.rows]


def providers(summary: Summary) -> Table:
    return Table(
        title="Providers",
        header=[
            "provider",
            "leases",
            "preempted",
            "GPU time",
            "overhead",
            "papers'",
            "tokens",
            "tokens/s",
            "$/GPU-hour",
            "cost",
            "$/M tokens",
        ],
        rows=[
            [
                bill.name,
                units.count(usage and usage.leases),
                units.count(usage and usage.preemptions),
                units.duration(usage and usage.gpu_s),
                units.share(usage and usage.overhead_share),
                units.share(usage and usage.preempted_share),
                units.count(usage and usage.tokens),
                units.count(usage and usage.tokens_per_s),
                units.usd(usage and usage.usd_per_gpu_hour),
                units.usd(bill.usd),
                units.usd(bill.usd_per_million_tokens),
            ]
            for bill in bills(summary)
            for usage in [bill.usage]
        ],
        note="Overhead: time booting, loading, applying, recomputing, lost or unattributed, over all GPU time. "
        "Papers': preempted GPUs × recovery time, over all GPU time (ROSE §6.1); a lease that ends by time counts as "
        "preempted, with the time that its replacement took to start. The trainer's cost includes training.",
    )


def _joined(summary: Summary) -> Table:
    return Table(
        title="Machines that joined",
        header=["label", "leases", "GPU time", "$/GPU-hour", "cost"],
        rows=[
            [
                one.label or "no label",
                units.count(one.leases),
                units.duration(one.gpu_s),
                units.usd(one.usd_per_gpu_hour),
                units.usd(one.usd),
            ]
            for one in summary.joined
        ],
        note="By the label and the price of the tickets that they came by.",
    )


def _accounts(summary: Summary) -> Table:
    usages = {name: usage for name, usage in _with_total(summary).items() if usage.gpu_s > 0}
    accounts = [account for account in Account if account in summary.total.accounts_s]
    return Table(
        title="GPU time by account",
        header=["account", *usages],
        rows=[
            [account.value, *(_amount(usage, account) for usage in usages.values())] for account in accounts if usages
        ],
        note="GPU-seconds: device time × GPUs. A provider's accounts add up to what its leases lasted.",
    )


def _functions(summary: Summary) -> Table:
    return Table(
        title="Functions",
        header=["function", "calls", "failed", "cold starts", "billed", "of it cold starts", "cost"],
        rows=[
            [
                usage.function,
                *map(units.count, (usage.calls, usage.failed, usage.cold_starts)),
                *map(units.duration, (usage.billed_s, usage.cold_start_s)),
                units.usd(usage.usd),
            ]
            for usage in summary.functions
        ],
        note="Functions are not leases: each call is metered, and its cost comes on top of the providers'.",
    )


def _upstream(summary: Summary) -> Table:
    models = sorted({usage.model for usage in summary.upstream})
    return Table(
        title="Models elsewhere",
        header=["model", "calls", "failed", "at their bound", "open", "prompt tokens", "answer tokens", "time", "cost"],
        rows=[
            [model, *_upstream_cells([usage for usage in summary.upstream if usage.model == model])]
            for model in models[:MOST_ROWS]
        ],
        note="Agents' calls, which are not trained. A call of which nobody knows what it came to counts as the dearest "
        f"that it could be; open ones are not in the cost. It is part of the functions'.{_more(models, 'models')}",
    )


def _upstream_by_trajectory(summary: Summary) -> Table:
    dearest = sorted(summary.upstream, key=lambda usage: (-usage.usd, -usage.calls))
    return Table(
        title="Models elsewhere by trajectory",
        header=["trajectory", "model", "calls", "failed", "at their bound", "open", "prompt", "answer", "time", "cost"],
        rows=[
            [usage.trajectory or "a driver's own", usage.model, *_upstream_cells([usage])]
            for usage in dearest[:MOST_CAUSES]
        ],
        note="Tokens of prompts and answers. The dearest first; the JSON has all.",
    )


def _upstream_cells(usages: Sequence[UpstreamUsage]) -> list[str]:
    counts = ("calls", "failed", "bounded", "open", "prompt_tokens", "answer_tokens")
    return [
        *(units.count(sum(getattr(usage, name) for usage in usages)) for name in counts),
        units.duration(sum(usage.duration_s for usage in usages)),
        units.usd(sum(usage.usd for usage in usages)),
    ]


def _policies(summary: Summary) -> Table:
    return Table(
        title="Policies",
        header=["policy", "trajectories", "turns", "tokens", "mean reward"],
        rows=[
            [
                usage.policy,
                *map(units.count, (usage.trajectories, usage.turns, usage.tokens)),
                f"{usage.mean_reward:.3f}",
            ]
            for usage in summary.policies
        ],
        note="By the name that agents call the model by, in scored trajectories: a policy's own reward, else that of "
        "the trajectory.",
    )


def _co_serving(summary: Summary) -> Table:
    return Table(
        title="Co-serving",
        header=[
            "host",
            "requests",
            "failed",
            "TTFT P50",
            "P99",
            "target",
            "TPOT P50",
            "P99",
            "target",
            "violated",
            "serving",
            "idle utilisation",
            "reclaims",
            "P99",
        ],
        rows=[
            [
                found.host,
                *map(units.count, (service.requests, service.failed)),
                *map(_milliseconds, (service.ttft_p50_ms, service.ttft_p99_ms, service.ttft_slo_ms)),
                *map(_milliseconds, (service.tpot_p50_ms, service.tpot_p99_ms, service.tpot_slo_ms)),
                units.duration(60 * service.violated_minutes),
                units.share(service.serving_s / service.lent_s if service.lent_s else None),
                units.share(found.idle_utilisation),
                units.count(service.reclaims),
                _milliseconds(service.reclaim_p99_ms),
            ]
            for found in summary.co_serving
            for service in [found.service]
        ],
        note="Each host's own requests: time to first token and time per output token beside their targets, and how "
        "long a P99 was above one. Serving is its part of the lent device's time, idle utilisation what rollouts made "
        "of the rest. A reclaim runs from the arrival of the request that needs memory to its pages being free.",
    )


def cost(summary: Summary, comparison: Comparison | None) -> Table:
    per_million = summary.usd_per_million_trained_tokens
    rows = [
        ["cost", units.usd(summary.usd)],
        ["trained tokens", units.count(summary.batches.trained_tokens)],
        ["cost per million trained tokens", units.usd(per_million)],
        ["with all GPU time on demand", units.usd(summary.on_demand_usd)],
    ]
    if comparison is not None:
        rows += [
            [f"{comparison.other}: cost", units.usd(comparison.other_usd)],
            [
                f"{comparison.other}: per million trained tokens",
                units.usd(comparison.other_usd_per_million_trained_tokens),
            ],
            ["cost per million, over the other run's", _times(comparison.cost_ratio)],
            ["tokens/s, over the other run's", _times(comparison.throughput_ratio)],
            ["mean step time, over the other run's", _times(comparison.step_time_ratio)],
        ]
    caution = "" if comparison is None or comparison.same_seed else " The other run has another seed."
    return Table(
        title="Cost of training" if comparison is None else f"Beside {comparison.other}",
        header=["", "value"],
        rows=rows if summary.batches.trained_tokens or comparison else [],
        note="Trained tokens are those of the policy in the groups trained on; the cost is the whole run's, its "
        f"trainer and functions included. On demand: the same GPU time at the trainer's price.{caution}",
    )


def _alone(summary: Summary) -> Table:
    return Table(
        title="What each provider would have cost alone",
        header=["provider", "$/GPU-hour", "tokens/GPU-s", "overhead", "GPU time", "GPUs", "cost", "of the run's"],
        rows=[
            [
                one.provider,
                units.usd(one.usd_per_gpu_hour),
                units.count(one.tokens_per_gpu_s),
                units.share(one.overhead_share),
                units.duration(one.gpu_s),
                units.count(one.gpus and round(one.gpus, 1)),
                units.usd(one.usd),
                _times(one.usd / summary.usd if one.usd is not None and summary.usd else None),
            ]
            for one in summary.alone
        ],
        note="An estimate: all tokens that came from providers come from this one, at the price, the throughput and "
        "the overhead that it had in this run; the trainer and functions stay as they were. Tokens a GPU-second are "
        "those of its time outside of overhead, GPU time is what they all would take, GPUs how many that is for as "
        "long as the run lasted. Whether it would have had so many is not asked.",
    )


def _times(ratio: float | None) -> str:
    return units.NONE if ratio is None else f"{ratio:.2f} ×"


def _fates(summary: Summary) -> Table:
    return Table(
        title="Lengths of what was trained and dropped",
        header=["groups", "count", "trajectories", "mean tokens", "p50", "p95"],
        rows=[
            [
                fate.fate if fate.fate == TRAINED else f"dropped: {fate.fate}",
                units.count(fate.groups),
                units.count(fate.trajectories),
                *(
                    units.count(value and round(value, 1))
                    for value in (fate.tokens_mean, fate.tokens_p50, fate.tokens_p95)
                ),
            ]
            for fate in summary.batches.fates
        ],
        note="Policy tokens of a trajectory, as far as it had come. Stale: older than the staleness bound allows. "
        "Surplus: launched by dynamic sampling beyond what the step took.",
    )


def _staleness(summary: Summary) -> Table:
    total = summary.batches.trained_tokens
    return Table(
        title="Staleness of trained tokens",
        header=["versions behind the trainer", "tokens", "share"],
        rows=[
            [str(age), units.count(tokens), units.share(tokens / total)]
            for age, tokens in summary.batches.trained_tokens_by_age.items()
            if total
        ],
        note=f"{summary.batches.masked_tokens:,} more tokens of these groups were older than the staleness bound, and "
        "were left out."
        if summary.batches.masked_tokens
        else "",
    )


def _recovery(summary: Summary) -> Table:
    kinds = {"a preempted one": summary.preempted_moves, "any": summary.moves}
    return Table(
        title="Moved turns",
        header=["worker left", "turns", "tokens kept", "p50", "p95", "max"],
        rows=[_move_row(name, moves) for name, moves in kinds.items() if moves.turns],
        note="From a turn's leaving its worker to its start on the next. Tokens kept were accepted before the move "
        "and not generated again. Any includes hand-overs from the trainer's device.",
    )


def _move_row(name: str, moves: Moves) -> list[str]:
    times = moves.redispatch_s
    return [
        name,
        units.count(moves.turns),
        units.count(moves.tokens_kept),
        *map(units.duration, (times.p50, times.p95, times.max)),
    ]


def _latency(summary: Summary) -> Table:
    measured = {
        "turn latency": summary.turn_latency_s,
        "trajectory, first prompt to reward": summary.trajectory_latency_s,
        "time to first token": summary.first_token_s,
        "weight pull": summary.pulls.pull_s,
        "weight apply": summary.pulls.apply_s,
    }
    return Table(
        title="Latency",
        header=["", "count", "p50", "p95", "p99", "max"],
        rows=[_latency_row(name, q) for name, q in measured.items() if q.count],
        note=_pulls_note(summary.pulls) if summary.pulls.count else "",
    )


def _pulls_note(pulls: Pulls) -> str:
    return f"{pulls.count:,} weight pulls, {units.size(pulls.bytes)} in all; {pulls.failed:,} failed."


def _latency_row(name: str, q: Quantiles) -> list[str]:
    return [name, units.count(q.count), *map(units.duration, (q.p50, q.p95, q.p99, q.max))]


def _environments(summary: Summary) -> Table:
    """Return the table of environments: in runs with several, and in those in which episodes were played in vain."""
    found = summary.environments
    shown = len(found) > 1 or any(one.cut_off or one.begun_again for one in found)
    return Table(
        title="Environments",
        header=[
            *("", "groups trained", "dropped", "trajectories", "failed", "success", "mean reward"),
            *("cut off", "begun again", "tokens lost by these"),
        ],
        rows=[
            [
                one.environment,
                *map(units.count, (one.groups_trained, one.groups_dropped, one.finished, one.failed)),
                units.share(one.success_rate),
                units.reward(one.mean_reward),
                *(units.count(n or 0) for n in (one.cut_off, one.begun_again, one.lost_tokens)),
            ]
            for one in found
            if shown
        ],
        note="Cut off: members that ran still as their groups had enough (redundancy). Begun again: trajectories whose "
        "env workers were gone. What either had sampled is lost.",
    )


def _trajectories(summary: Summary) -> Table:
    counts = {
        "trajectories finished": summary.trajectories_finished,
        "… of them truncated": summary.trajectories_truncated,
        **{f"trajectories failed: {cause}": n for cause, n in summary.trajectories_failed.items()},
        **{f"… of the failed replaced: {cause}": n for cause, n in summary.refilled.items()},
        "groups trained": summary.groups_trained,
        **{f"groups dropped: {reason}": n for reason, n in summary.groups_dropped.items()},
    }
    return Table(
        title="Trajectories and groups",
        header=["", "count"],
        rows=[[name, units.count(n)] for name, n in counts.items() if n],
        note="A failure of the infrastructure is never scored or trained on. Truncated: ended by a limit of turns or "
        "tokens. Zero variance: all of a group's rewards are equal, so it has nothing to teach. Unusable: no finite "
        "gradient came of it, and it was left out.",
    )


def _lease_ends(summary: Summary) -> Table:
    causes = list(summary.total.lease_ends)
    return Table(
        title="How leases ended",
        header=["provider", *(cause.replace("_", " ") for cause in causes)],
        rows=[
            [name, *(units.count(usage.lease_ends.get(cause, 0)) for cause in causes)]
            for name, usage in summary.providers.items()
            if causes
        ],
    )


def _lost_leases(summary: Summary) -> Table:
    lost = deaths(summary)
    return Table(
        title="Lost leases",
        header=["lease", "at", "how", "why", "what followed"],
        rows=[
            [x.lease, units.duration(x.at_s), x.cause.replace("_", " "), x.detail, followed(x)]
            for x in lost[:MOST_ROWS]
        ],
        note="Ended neither in order nor because a provider took its capacity back." + _more(lost, "are in the JSON"),
    )


def _weights_by_version(summary: Summary) -> Table:
    rows: list[list[str]] = []
    for version in summary.weights.versions:
        pulls = [pull for pull in summary.weights.pulls if pull.version == version.version and not pull.first]
        rows.append(
            [
                str(version.version),
                units.share(version.changed),
                units.size(version.bytes),
                units.share(version.over_full),
                units.duration(version.encode_s),
                units.count(len(pulls)),
                *_split(pulls),
                units.duration(mean(pull.current_s for pull in pulls)),
            ]
        )
    return Table(
        title="Weights by version",
        header=["version", "changed", "bytes", "of full", "encode", "pulls", *_SPLIT, "current after"],
        rows=rows,
        note="Encode: the trainer's time. The rest are means over pulls by workers that held an earlier version. "
        "Awaited: what was still encoded then. Queue: waiting for the pull before, the device and running turns. "
        "Apply: making the new weights beside the old ones. Only in the pause is nothing generated.",
    )


def _weights_by_worker(summary: Summary) -> Table:
    refused = Counter(refused.worker for refused in summary.weights.refused)
    by_worker: dict[str, list[WorkerPull]] = {}
    for pull in summary.weights.pulls:
        by_worker.setdefault(pull.worker, []).append(pull)
    for worker in refused:
        by_worker.setdefault(worker, [])
    return Table(
        title="Weights by worker",
        header=["worker", "pulls", "bytes", "of full", *_SPLIT, "refused"],
        rows=[
            [
                worker,
                units.count(len(pulls)),
                units.size(sum(pull.bytes for pull in pulls)),
                units.share(mean(pull.over_full for pull in pulls)),
                *_split(pulls),
                units.count(refused[worker]),
            ]
            for worker, pulls in list(by_worker.items())[:MOST_ROWS]
        ],
        note="Means over a worker's pulls, its first included, which is a keyframe and the deltas since."
        + _more(by_worker, "workers are in the JSON"),
    )


def _refused_weights(summary: Summary) -> Table:
    refused = summary.weights.refused
    return Table(
        title="Refused weights",
        header=["at", "worker", "what", "why", "replaced by"],
        rows=[
            [units.duration(r.at_s), r.worker, r.what, r.reason, f"version {r.version}" if r.replaced else "not then"]
            for r in refused[:MOST_ROWS]
        ],
        note="What did not verify is not served; a pull that begins with a keyframe takes its place."
        + _more(refused, "are in the JSON"),
    )


def _agreements(summary: Summary) -> Table:
    wrong = {mismatch.worker for mismatch in summary.mismatches}
    return Table(
        title="Log-probabilities beside the trainer's",
        header=["worker", "tokens", "mean", "worst version", ""],
        rows=[
            [
                one.worker,
                units.count(one.tokens),
                f"{one.mean:.2g}",
                f"{one.worst:.2g}",
                "wrong" * (one.worker in wrong),
            ]
            for one in summary.agreements[:MOST_ROWS]
        ],
        note="The mean difference between a worker's and the trainer's log-probabilities of the same tokens with the "
        "same weights, in nats. A worker marked wrong does not generate with the weights that it names, and was fenced."
        + _more(summary.agreements, "workers are nearer, and in the JSON"),
    )


def _sources(summary: Summary) -> Table:
    return Table(
        title="Log-probabilities by provider and engine",
        header=["source", "tokens", "mean", "largest", "mismatch KL", "masked", "clipped"],
        rows=[
            [
                one.source,
                units.count(round(one.tokens)),
                f"{one.log_ratio_mean:.2g}",
                f"{one.log_ratio_max:.2g}",
                f"{one.mismatch_kl:.2g}",
                f"{one.masked_fraction:.1%}",
                f"{one.clip_fraction:.1%}",
            ]
            for one in sources_of(step.trainer for step in summary.steps)
        ],
        note="Of all tokens that were looked at for a gradient: how far the trainer's log-probabilities are from those "
        "that the engine recorded, in nats, and what came of it. Older weights count as well; one source that is far "
        "from the others computes otherwise.",
    )


def _more(all_rows: Collection[object], what: str) -> str:
    """A note on the rows that a table leaves out."""
    hidden = len(all_rows) - MOST_ROWS
    return f" {hidden:,} more {what}." if hidden > 0 else ""


def causes(summary: Summary) -> Table:
    """Why trajectories failed, the commonest cause first."""
    return Table(
        title="Why trajectories failed",
        header=["cause", "trajectories"],
        rows=[[cause, units.count(count)] for cause, count in list(summary.trajectories_failed.items())[:MOST_CAUSES]],
    )


def traceback(summary: Summary) -> Table:
    return Table(
        title="The first environment that raised",
        header=["traceback"],
        rows=[[line] for line in summary.traceback.splitlines()],
    )


def _refused(summary: Summary) -> Table:
    return Table(
        title="Refused at the door",
        header=["who", "count", "why"],
        rows=[
            [f"worker {r.worker}" if r.worker else "unauthenticated peers", units.count(r.count), r.reason]
            for r in sorted(summary.refused, key=lambda r: -r.count)
            if not r.of_turns
        ][:MOST_ROWS],
        note="Frames of workers, and connections of unauthenticated peers. A worker's first refused frame is its last.",
    )


def _turns_gone_badly(summary: Summary) -> Table:
    found = sorted((one for one in summary.refused if one.of_turns), key=lambda one: -one.count)
    return Table(
        title="Turns that went badly",
        header=["worker", "turns", "why"],
        rows=[[one.worker, units.count(one.count), one.reason] for one in found[:MOST_ROWS]],
        note="Their workers were sent fewer for a while. " + _more(found, "are in the JSON"),
    )


def _refused_leases(summary: Summary) -> Table:
    return Table(
        title="Refused leases",
        header=["provider", "count", "why"],
        rows=[[r.provider, units.count(r.count), r.reason] for r in summary.refused_leases[:MOST_ROWS]],
        note="What was asked of a provider and not to be had; it is asked again after a back-off."
        + _more(summary.refused_leases, "reasons are in the JSON"),
    )


def _remarks(summary: Summary) -> Table:
    return Table(
        title="Remarks of providers",
        header=["provider", "remark"],
        rows=[[remark.provider, remark.words] for remark in summary.remarks],
    )


def _split(pulls: Sequence[WorkerPull]) -> list[str]:
    split_s = mean_split_s(pulls)
    return [units.duration(split_s.get(part)) for part in PARTS]


def _changed_layers(summary: Summary) -> Table:
    weights = summary.weights
    shares = {layer: weights.changed_of(layer) for layer in weights.layers}
    return Table(
        title="Changed elements by layer",
        header=["layer", "mean", "least", "most", "last"],
        rows=[
            [layer, *map(units.share, (mean(values), min(values), max(values), values[-1]))]
            for layer, values in shares.items()
        ],
        note="Share of a layer's elements, in bf16, that differ from the version before.",
    )


def _integrity(summary: Summary) -> Table:
    return Table(
        title="Can these figures be trusted?",
        header=["", "value"],
        rows=[
            ["ledger imbalance", f"{summary.ledger_imbalance_ns:,} ns"],
            ["unattributed time of leases that ended in order", units.share(summary.unattributed_share)],
            ["paced iterations that took longer than modelled", units.share(summary.late_share)],
            [
                f"samples with the CPU above {100 * CPU_SATURATED_SHARE:.0f} %",
                units.share(summary.cpu_saturated_share),
            ],
            ["the orchestrator's share of its core, at the most", units.share(summary.core_share_max)],
            ["tokens stayed in workers for, at the most", units.duration(summary.flush_interval_s_max)],
            ["tokens lost if all workers had been killed, at the most", units.count(summary.kill_loses_tokens_max)],
        ],
    )


def _steps(summary: Summary) -> Table:
    learns = not summary.simulated
    return Table(
        title="Training steps",
        header=[
            "step",
            *(["success", "± s.e.", "mean reward"] if learns else []),
            *("duration", "seeding", "rollout", "trained", "dropped", "trajectories"),
        ],
        rows=[
            [
                str(step.step),
                *(_learnt_cells(step) if learns else []),
                *map(units.duration, (step.duration_s, step.seeding_s, step.rollout_s)),
                units.count(step.groups_trained),
                units.count(step.groups_dropped),
                units.count(step.trajectories),
            ]
            for step in summary.steps
        ],
        note="Success is the share of scored trajectories with a reward above 0, mean reward that of all, while "
        "the policy was being trained."
        if learns
        else "Rewards of a simulation are drawn, and are not shown: no policy learns.",
    )


def _step_environments(summary: Summary) -> Table:
    return Table(
        title="Training steps by environment",
        header=["step", "environment", "success", "mean reward", "trained", "dropped", "trajectories", "failed"],
        rows=[
            [
                str(step.step),
                name,
                units.share(one.success_rate),
                units.reward(one.mean_reward),
                *map(units.count, (one.groups_trained, one.groups_dropped, one.trajectories, one.failed)),
            ]
            for step in summary.steps
            for name, one in step.environments.items()
        ],
        note="Of trajectories and groups that ended during the step.",
    )


def _evaluations(summary: Summary) -> Table:
    found = summary.evaluations
    names = list(dict.fromkeys(name for one in found.versions for name in one.metrics))
    return Table(
        title="Evaluations",
        header=["version", "of", *names, "tasks", "finished", "failed", "cut off", "took", ""],
        rows=[row for one in found.versions for row in _evaluation_rows(one, names, one.version == found.best)],
        note="Means over tasks, with their standard errors. Failed episodes, and those that were cut off as time was "
        f"up, are in no mean.{f' Best: by {found.metric}.' if found.metric else ''}",
    )


def _evaluation_rows(one: EvaluatedVersion, names: Sequence[str], best: bool) -> list[list[str]]:
    """Return the rows of all tasks, and of each environment's tasks where there are several environments."""
    sets = one.environments
    parts = [(name, of.metrics, [of]) for name, of in sets.items()]
    if len(sets) != 1:
        parts.insert(0, ("all", one.metrics, list(sets.values())))
    marks = ", ".join(["best"] * best + ["timed out"] * one.timed_out)
    return [
        [
            str(one.version),
            name,
            *(estimate_words(metrics.get(metric)) for metric in names),
            *(
                units.count(sum(getattr(of, count) for of in own))
                for count in ("tasks", "finished", "failed", "cut_off")
            ),
            units.duration(one.duration_s) if place == 0 else "",
            marks if place == 0 else "",
        ]
        for place, (name, metrics, own) in enumerate(parts)
    ]


METRICS_SHOWN = 12
"""Columns of the table of metrics; the others are in the report's JSON."""


def _metrics(summary: Summary) -> Table:
    names = sorted({name for step in summary.steps for name in step.metrics})[:METRICS_SHOWN]
    return Table(
        title="Metrics",
        header=["step", *names],
        rows=[
            [str(step.step), *(units.reward(step.metrics.get(name)) for name in names)]
            for step in summary.steps
            if step.metrics
        ],
        note="What environments measure besides rewards: means of the step's scored trajectories that have it.",
    )


def _learnt_cells(step: StepSummary) -> list[str]:
    return [units.share(step.success_rate), units.share(step.standard_error), units.reward(step.mean_reward)]


def _with_total(summary: Summary) -> Mapping[str, Usage]:
    return summary.providers | {"all": summary.total} if len(summary.providers) > 1 else summary.providers


def _amount(usage: Usage, account: Account) -> str:
    spent_s = usage.accounts_s.get(account, 0.0)
    return f"{spent_s:,.1f} s" if spent_s else units.NONE


def _milliseconds(value_ms: float | None) -> str:
    return units.duration(None if value_ms is None else value_ms / 1e3)


def _percent(rate: float | None) -> str:
    return units.NONE if rate is None else f"{100 * rate:.0f} %"
