"""What every run may have now: whether it may begin, its share of scarce GPUs, and its slice of a budget. Pure.

The decision covers all runs together. Its result is in the store before any process is told.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from elastic.core.ledger import NANO_USD_PER_USD
from elastic.protocol.api import ALIVE, RunPhase
from elastic.server.quotas import budgets, sharing
from elastic.server.quotas.budgets import ProjectAccount, RunAccount
from elastic.server.quotas.sharing import LeaseClaim, SharedProvider
from elastic.server.store import runs
from elastic.server.store.quotas import TRAINER, QuotaRow
from elastic.server.store.runs import HostedRunRow, QuotaWait, RunLimits, RunShare


class ProjectSpending(NamedTuple):
    """A project's cost and allotments in nano-dollars, in all and for this day."""

    total: int
    today: int
    allotted: int
    allotted_today: int


@dataclass(frozen=True, kw_only=True)
class ProjectStatus:
    """A project's quota, and the cost of its finished runs, in all and today."""

    quota: QuotaRow
    settled_nano_usd: int = 0
    settled_today_nano_usd: int = 0

    def spending(self, its: Iterable[HostedRunRow], day: int) -> ProjectSpending:
        """Return the project's spending, with the cost of its unfinished runs."""
        total = allotted = self.settled_nano_usd
        today = allotted_today = self.settled_today_nano_usd
        for run in its:
            cost, base = run.seen_nano_usd, run.base_nano_usd(day)
            may = cost if run.allotted_nano_usd is None else max(cost, run.allotted_nano_usd)
            total, today = total + cost, today + cost - base
            allotted, allotted_today = allotted + may, allotted_today + may - base
        return ProjectSpending(total, today, allotted, allotted_today)


@dataclass(kw_only=True)
class RunAllotment:
    """What one run may have from now on; fields as in the runs' table."""

    shares: dict[str, RunShare] = field(default_factory=dict[str, RunShare])
    caps: dict[str, int] = field(default_factory=dict[str, int])
    allotted_nano_usd: int | None = None
    day: int = 0
    day_base_nano_usd: int = 0
    waits: QuotaWait | None = None

    def limits(self, run: HostedRunRow) -> RunLimits:
        """Return the limits for the run's process."""
        allotted = self.allotted_nano_usd
        bounds = [run.budget_usd, None if allotted is None else allotted / NANO_USD_PER_USD]
        budget_usd = min((usd for usd in bounds if usd is not None), default=None)
        return RunLimits(self.caps, budget_usd)


def going(run: HostedRunRow) -> bool:
    """Whether it has a process, or is about to have another one."""
    return run.phase in ALIVE or run.phase is RunPhase.RESTARTING


def allot(
    records: Sequence[HostedRunRow],
    projects: Mapping[str, ProjectStatus],
    capacities: Mapping[str, int],
    held: Mapping[str, Mapping[str, int]],
    now_us: int,
    period_us: int,
) -> dict[str, RunAllotment]:
    """Return the allotment of each run. `projects` has all of their projects. `held` has the GPUs by provider that
    reachable processes hold or have requested."""
    day = budgets.day_of(now_us)
    made = {
        run.id: RunAllotment(
            caps=dict(run.caps),
            allotted_nano_usd=run.allotted_nano_usd,
            day=day,
            day_base_nano_usd=run.base_nano_usd(day),
        )
        for run in records
    }
    _share(records, projects, capacities, held, made, now_us, period_us)
    for project, status in projects.items():
        its = [run for run in records if run.project == project]
        _make_room(its, status.quota, made)
        beginning = _admit(its, status.quota, made, now_us)
        _spend(its, status, made, beginning)
    return made


def _share(
    records: Sequence[HostedRunRow],
    projects: Mapping[str, ProjectStatus],
    capacities: Mapping[str, int],
    held: Mapping[str, Mapping[str, int]],
    made: Mapping[str, RunAllotment],
    now_us: int,
    period_us: int,
) -> None:
    quotas = {project: status.quota for project, status in projects.items()}
    kinds = {kind for quota in quotas.values() for kind in quota.gpus} | capacities.keys()
    for kind in sorted(kinds - {TRAINER}):
        bound = {project: quota.gpus[kind] for project, quota in quotas.items() if kind in quota.gpus}
        weights = {project: quota.weight for project, quota in quotas.items()}
        provider = SharedProvider(gpus=capacities.get(kind), quotas=bound, weights=weights)
        sections = [
            (run, name)
            for run in records
            for name, one in run.needs.providers.items()
            if one.kind == kind and (kind in capacities or run.project in bound)
        ]
        claims = {(run.id, name): _claim(run, name, held, now_us) for run, name in sections}
        given = sharing.shares(list(claims.values()), provider, now_us, period_us)
        told = sharing.caps(list(claims.values()), provider, given)
        for (run, name), claim in claims.items():
            share = given[claim.key]
            since_us = claim.since_us_after(share, told[claim.key], now_us)
            made[run].shares[name] = RunShare(share, since_us)
            made[run].caps[name] = min(told[claim.key], made[run].caps.get(name, told[claim.key]))


def _claim(run: HostedRunRow, name: str, held: Mapping[str, Mapping[str, int]], now_us: int) -> LeaseClaim:
    needs, share = run.needs.providers[name], (run.shares or {}).get(name, RunShare(0, now_us))
    wants = run.phase in (RunPhase.STARTING, RunPhase.RUNNING, RunPhase.RESTARTING) and run.wanted == runs.RUN
    most = min(needs.gpus, run.caps.get(name, needs.gpus)) if wants else 0
    return LeaseClaim(
        key=f"{run.id}/{name}",
        project=run.project,
        gpus=most,
        unit=needs.unit,
        share=share.gpus,
        since_us=share.since_us,
        told=_known_cap(run, name, needs.gpus) if going(run) else 0,
        held=held.get(run.id, {}).get(name, 0),
    )


def _known_cap(run: HostedRunRow, name: str, most: int) -> int:
    """The highest cap that its process may know: what it was told, or is about to be."""
    known = [said.caps.get(name, most) for said in (run.told, run.limits) if said is not None]
    return min(most, max(known, default=most))


def _make_room(records: Sequence[HostedRunRow], quota: QuotaRow, made: Mapping[str, RunAllotment]) -> None:
    """Stop the runs submitted last if there are more runs than allowed now. They wait."""
    staying = [run for run in records if going(run) and run.wanted == runs.RUN]
    count, trainers = len(staying), sum(run.needs.trainer_gpus for run in staying)
    for run in reversed(staying):
        gpus = run.needs.trainer_gpus
        if quota.runs_max is not None and count > quota.runs_max:
            made[run.id].waits = QuotaWait("RunsAtOnce", f"the project may have {quota.runs_max} runs at once by now")
        elif gpus and trainers > quota.gpus.get(TRAINER, trainers):
            words = f"the project may have {quota.gpus[TRAINER]} GPUs in trainers by now"
            made[run.id].waits = QuotaWait("TrainerGpus", words)
        else:
            continue
        count, trainers = count - 1, trainers - gpus


def _admit(
    records: Sequence[HostedRunRow], quota: QuotaRow, made: Mapping[str, RunAllotment], now_us: int
) -> list[HostedRunRow]:
    """The runs that may begin now, as far as there is money; the others are told what they wait for."""
    live = [run for run in records if going(run)]
    count, trainers = len(live), sum(run.needs.trainer_gpus for run in live)
    admitted: list[HostedRunRow] = []
    for run in records:
        if run.phase is not RunPhase.PENDING or run.wanted != runs.RUN or run.not_before_us > now_us:
            continue
        gpus = run.needs.trainer_gpus
        if quota.runs_max is not None and count >= quota.runs_max:
            made[run.id].waits = QuotaWait("RunsAtOnce", f"the project has {count} of {quota.runs_max} runs at once")
        elif trainers + gpus > quota.gpus.get(TRAINER, trainers + gpus):
            words = f"its trainer takes {gpus} GPUs; the project has {trainers} of {quota.gpus[TRAINER]} in trainers"
            made[run.id].waits = QuotaWait("TrainerGpus", words)
        else:
            admitted.append(run)
            count, trainers = count + 1, trainers + gpus
    return admitted


def _spend(
    records: Sequence[HostedRunRow],
    status: ProjectStatus,
    made: Mapping[str, RunAllotment],
    beginning: Sequence[HostedRunRow],
) -> None:
    limits = status.quota.spending
    if not limits:
        for run in records:
            made[run.id].allotted_nano_usd = None
        return
    begins = {run.id for run in beginning}
    accounts = [_account(run, made[run.id], run.id in begins) for run in records]
    account = ProjectAccount(
        runs=accounts, gone_nano_usd=status.settled_nano_usd, gone_today_nano_usd=status.settled_today_nano_usd
    )
    given, taken = budgets.slices(account, limits), budgets.taken_back(account, limits)
    for run, before in zip(records, accounts, strict=True):
        change = given.get(run.id, 0) - taken.get(run.id, 0)
        made[run.id].allotted_nano_usd = before.allotted_nano_usd + change
        if before.begins and run.id not in given:
            made[run.id].waits = _unfunded(account, status.quota, before)


def _account(run: HostedRunRow, allotment: RunAllotment, begins: bool) -> RunAccount:
    seen = run.seen_nano_usd
    stands = run.figures.budget
    committed = max(seen, round(stands.committed_usd * NANO_USD_PER_USD)) if stands is not None else seen
    if going(run):
        # One that goes on since before there was a budget owes what it has committed.
        allotted = committed if run.allotted_nano_usd is None else run.allotted_nano_usd
    else:
        # One that waits may have been given its slice already; one that has ended was charged what it cost.
        allotted = seen if run.allotted_nano_usd is None or run.ended else max(seen, run.allotted_nano_usd)
    own = None if run.budget_usd is None else int(run.budget_usd * NANO_USD_PER_USD)
    unfunded = allotted <= seen and (own is None or allotted < own)
    return RunAccount(
        run=run.id,
        allotted_nano_usd=allotted,
        day_base_nano_usd=allotment.day_base_nano_usd,
        committed_nano_usd=committed,
        known_nano_usd=_known_budget(run) if going(run) else 0,
        own_nano_usd=own,
        slice_nano_usd=run.needs.slice_nano_usd,
        alive=going(run) and run.wanted == runs.RUN,
        begins=begins and unfunded,
    )


def _known_budget(run: HostedRunRow) -> int:
    """The highest budget that its process may know: what it was told, or is about to be."""
    known = [said.budget_usd for said in (run.told, run.limits) if said is not None]
    return max((int(usd * NANO_USD_PER_USD) for usd in known if usd is not None), default=0)


def _unfunded(account: ProjectAccount, quota: QuotaRow, run: RunAccount) -> QuotaWait:
    slice_usd, limits = run.slice / NANO_USD_PER_USD, quota.spending
    total_usd, today_usd = account.total_nano_usd / NANO_USD_PER_USD, account.today_nano_usd / NANO_USD_PER_USD
    if limits.budget_nano_usd is not None and limits.budget_nano_usd - account.total_nano_usd < run.slice:
        words = f"of the project's ${quota.budget_usd:.2f} are ${total_usd:.2f} spent or allotted"
        return QuotaWait("ProjectBudget", f"{words}; it takes ${slice_usd:.2f} to go on")
    words = f"of the project's ${quota.usd_per_day or 0:.2f} a day are ${today_usd:.2f} spent or allotted today (UTC)"
    return QuotaWait("DollarsADay", f"{words}; it takes ${slice_usd:.2f} to go on")
