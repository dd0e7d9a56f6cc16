"""Projects' quotas, capacity that is shared, and what projects have spent, in the store."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import sqlalchemy as sa

from elastic.core.ledger import NANO_USD_PER_USD
from elastic.server.quotas.budgets import SpendingLimits, day_of
from elastic.server.store.database import now_us
from elastic.server.store.rows import columns, first, inserted, put
from elastic.server.store.tables import accounts, capacities, quotas, runs

TRAINER = "trainer"
"""The name of trainers' GPUs in quotas."""


@dataclass(frozen=True, kw_only=True)
class QuotaRow:
    """The limits of a project. `gpus` are limits by kind of provider; None means no limit."""

    project: str
    gpus: Mapping[str, int] = field(default_factory=dict[str, int])
    runs_max: int | None = None
    usd_per_day: float | None = None
    budget_usd: float | None = None
    weight: float = 1.0
    version: int = 0

    @property
    def spending(self) -> SpendingLimits:
        return SpendingLimits(budget_nano_usd=_nano(self.budget_usd), day_nano_usd=_nano(self.usd_per_day))


@dataclass(frozen=True, kw_only=True)
class AccountRow:
    """The cost of a project's deleted runs, in all and on `day`, its recent spending, and the cost of its removed
    jobs."""

    project: str
    deleted_nano_usd: int = 0
    day: int = 0
    deleted_today_nano_usd: int = 0
    marks: list[list[int]] = field(default_factory=list[list[int]])
    warned: list[str] = field(default_factory=list[str])
    jobs_usd: float = 0.0


def _nano(usd: float | None) -> int | None:
    return None if usd is None else int(usd * NANO_USD_PER_USD)


def quota(connection: sa.Connection, project: str) -> QuotaRow:
    """Return a project's quota; without limits if none was ever set."""
    row = first(connection, sa.select(quotas).where(quotas.c.project == project))
    return QuotaRow(project=project) if row is None else QuotaRow(**columns(row))


def all_quotas(connection: sa.Connection) -> dict[str, QuotaRow]:
    return {row["project"]: QuotaRow(**columns(row)) for row in connection.execute(sa.select(quotas)).mappings()}


def change_quota(tx: sa.Connection, project: str, changes: Mapping[str, Any]) -> None:
    put(tx, quotas, project, changes, {"gpus": {}, "weight": 1.0})


def capacity(connection: sa.Connection, provider: str) -> tuple[int | None, int]:
    """Return how many GPUs of a kind all runs may hold (None for any number), and the version of this limit."""
    row = first(connection, sa.select(capacities).where(capacities.c.provider == provider))
    return (None, 0) if row is None else (row["gpus"], row["version"])


def all_capacities(connection: sa.Connection) -> dict[str, int]:
    """Return the limits of all kinds of providers that have one."""
    rows = connection.execute(sa.select(capacities).where(capacities.c.gpus.is_not(None))).mappings()
    return {row["provider"]: row["gpus"] for row in rows}


def change_capacity(tx: sa.Connection, provider: str, gpus: int | None) -> None:
    put(tx, capacities, provider, {"gpus": gpus}, {})


def account(connection: sa.Connection, project: str) -> AccountRow:
    row = first(connection, sa.select(accounts).where(accounts.c.project == project))
    return AccountRow(project=project) if row is None else AccountRow(**columns(row))


def change_account(tx: sa.Connection, project: str, **changes: Any) -> None:
    if tx.execute(sa.update(accounts).where(accounts.c.project == project).values(**changes)).rowcount:
        return
    new = {"deleted_nano_usd": 0, "day": 0, "deleted_today_nano_usd": 0, "marks": [], "warned": [], "jobs_usd": 0.0}
    inserted(tx, accounts, project=project, **new | changes)


def deleted(tx: sa.Connection, project: str, cost_nano_usd: int, today_nano_usd: int) -> None:
    """Add the cost of a deleted run to its project."""
    found, day = account(tx, project), day_of(now_us())
    before = found.deleted_today_nano_usd if found.day == day else 0
    change_account(
        tx,
        project,
        deleted_nano_usd=found.deleted_nano_usd + cost_nano_usd,
        day=day,
        deleted_today_nano_usd=before + today_nano_usd,
    )


def settled_nano_usd(connection: sa.Connection, project: str, day: int) -> tuple[int, int]:
    """Return the cost of a project's finished and deleted runs, in all and on this day."""
    today = sa.case((runs.c.day == day, runs.c.cost_nano_usd - runs.c.day_base_nano_usd), else_=0)
    total = sa.select(sa.func.coalesce(sa.func.sum(runs.c.cost_nano_usd), 0), sa.func.coalesce(sa.func.sum(today), 0))
    row = connection.execute(total.where(runs.c.project == project, ~runs.c.managed)).one()
    gone = account(connection, project)
    gone_today = gone.deleted_today_nano_usd if gone.day == day else 0
    return int(row[0]) + gone.deleted_nano_usd, int(row[1]) + gone_today
