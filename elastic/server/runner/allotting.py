"""The runner's part of quotas and budgets: decides what runs may have, and writes it down before they are told.

What is written is told under an id with its number, until it is acknowledged: a runner that dies in between is followed
by one that tells the same under the same id, so a slice is neither lost nor given twice.
"""

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa
import structlog

from elastic.core.ledger import NANO_USD_PER_USD
from elastic.protocol.api import ALIVE
from elastic.protocol.run_control import ControlError
from elastic.server.quotas import budgets
from elastic.server.runner.allotment import ProjectStatus, RunAllotment, allot
from elastic.server.runner.launching import control_of
from elastic.server.settings import ServerSettings
from elastic.server.store import Store, quotas, runs, webhooks
from elastic.server.store.database import now_us
from elastic.server.store.quotas import TRAINER
from elastic.server.store.runs import HostedRunRow
from elastic.system.isolation import IsolatedLoop

log = structlog.get_logger(__name__)

STATUS_TIMEOUT_S = 2.0


async def allotted(
    store: Store, settings: ServerSettings, records: Sequence[HostedRunRow], isolated: IsolatedLoop
) -> dict[str, RunAllotment]:
    """Return each run's allotment from the present store. Raises `StoreUnavailable`."""
    kinds = await asyncio.to_thread(_shared_kinds, store)
    held = await _held(settings, records, kinds, isolated) if kinds else {}
    return await asyncio.to_thread(_decide, store, settings, records, held)


def _shared_kinds(store: Store) -> set[str]:
    with store.reading() as connection:
        named = {kind for quota in quotas.all_quotas(connection).values() for kind in quota.gpus}
        return (named | quotas.all_capacities(connection).keys()) - {TRAINER}


async def _held(
    settings: ServerSettings, records: Sequence[HostedRunRow], kinds: set[str], isolated: IsolatedLoop
) -> dict[str, dict[str, int]]:
    """GPUs by provider of the processes that answer."""

    async def ask(run: HostedRunRow) -> tuple[str, dict[str, int]]:
        held: dict[str, int] = {}
        with isolated.attempt(f"{run.id}: GPUs held"), contextlib.suppress(ControlError):
            reply = await control_of(settings, run, STATUS_TIMEOUT_S).status()
            held = {name: int(one.get("gpus", 0)) for name, one in reply.status["providers"].items()}
        return run.id, held

    asked = [
        run for run in records if run.phase in ALIVE and any(one.kind in kinds for one in run.needs.providers.values())
    ]
    return dict(await asyncio.gather(*(ask(run) for run in asked)))


def _decide(
    store: Store, settings: ServerSettings, records: Sequence[HostedRunRow], held: dict[str, dict[str, int]]
) -> dict[str, RunAllotment]:
    at_us = now_us()
    day = budgets.day_of(at_us)
    with store.reading() as connection:
        found = quotas.all_quotas(connection)
        capacities = quotas.all_capacities(connection)
        projects: dict[str, ProjectStatus] = {}
        for project in {run.project for run in records}:
            quota = found.get(project, quotas.QuotaRow(project=project))
            spent = quotas.settled_nano_usd(connection, project, day) if quota.spending else (0, 0)
            projects[project] = ProjectStatus(quota=quota, settled_nano_usd=spent[0], settled_today_nano_usd=spent[1])
    made = allot(records, projects, capacities, held, at_us, round(settings.fair_share_period_s * 1e6))
    changes = {run.id: change for run in records if (change := _changes(run, made[run.id]))}
    budgeted = [one for one in projects.values() if one.quota.spending]
    with store.reading() as connection:
        accounts = {one.quota.project: quotas.account(connection, one.quota.project) for one in budgeted}
    due = {
        one.quota.project: account
        for one in budgeted
        if (account := _account_changes(one, accounts[one.quota.project], records, at_us))
    }
    if changes or due:
        with store.writing() as tx:
            for id_, change in changes.items():
                runs.observe(tx, id_, **change)
            for project, change in due.items():
                _write_account(tx, project, change)
    return made


def _changes(run: HostedRunRow, made: RunAllotment) -> dict[str, Any]:
    """Return the columns of the run's row that change."""
    limits = made.limits(run)
    now = {
        "shares": made.shares or None,
        "allotted_nano_usd": made.allotted_nano_usd,
        "day": made.day,
        "day_base_nano_usd": made.day_base_nano_usd,
        "waits": made.waits,
        "limits": limits,
        "limits_number": run.limits_number + (limits != run.limits),
    }
    return {key: value for key, value in now.items() if value != getattr(run, key)}


def _account_changes(
    status: ProjectStatus, account: quotas.AccountRow, records: Sequence[HostedRunRow], at_us: int
) -> dict[str, Any]:
    """The next mark of what was spent, and which limits are nearly used."""
    quota, day = status.quota, budgets.day_of(at_us)
    spent = status.spending((run for run in records if run.project == quota.project), day)
    uses = {"budget_usd": (spent.total, quota.budget_usd), "usd_per_day": (spent.today, quota.usd_per_day)}
    warned = [
        name
        for name, (nano_usd, limit_usd) in uses.items()
        if limit_usd is not None and nano_usd >= budgets.WARNED_SHARE * limit_usd * NANO_USD_PER_USD
    ]
    changes: dict[str, Any] = {}
    if (marks := budgets.marked(account.marks, at_us, spent.total)) is not None:
        changes["marks"] = marks
    if warned != account.warned:
        changes["warned"] = warned
        changes["news"] = [
            {"limit": name, "limit_usd": uses[name][1], "spent_usd": uses[name][0] / NANO_USD_PER_USD}
            for name in warned
            if name not in account.warned
        ]
    return changes


def _write_account(tx: sa.Connection, project: str, changes: dict[str, Any]) -> None:
    for news in changes.pop("news", ()):
        log.warning("a project's budget is nearly used", project=project, **news)
        webhooks.announce(tx, project, "project.budget_warning", {"project": project, **news})
    quotas.change_account(tx, project, **changes)
