"""Jobs of pools that were submitted here, in the store: whose each is, what it names, and what counts of it.

A row is there before its pool hears of the job, so that quotas hold for submissions at the same time and nothing that
the job names is removed. A pool says what becomes of its jobs; `settle` notes it.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import sqlalchemy as sa

from elastic.server.store import quotas, webhooks
from elastic.server.store.database import now_us
from elastic.server.store.rows import first
from elastic.server.store.tables import jobs


class JobsUse(NamedTuple):
    """A project's jobs that are not over and do not wait for its quota, the GPUs that they asked for to train on, the
    cost of all that there were, and how many wait for its quota."""

    jobs: int
    trainer_gpus: int
    usd: float
    waiting: int


def insert(
    tx: sa.Connection,
    id_: str,
    project: str,
    pool: str,
    fingerprint: str,
    config: str,
    train_gpus: int,
    waits: str | None,
) -> None:
    row = {"id": id_, "project": project, "pool": pool, "fingerprint": fingerprint, "config": config}
    tx.execute(sa.insert(jobs).values(**row, train_gpus=train_gpus, usd=0.0, created_us=now_us(), waits=waits))


def find(connection: sa.Connection, id_: str) -> sa.RowMapping | None:
    return first(connection, sa.select(jobs).where(jobs.c.id == id_))


def note_again(tx: sa.Connection, id_: str) -> None:
    """Note that the job is submitted once more: its pool may hear of it from now on."""
    tx.execute(sa.update(jobs).where(jobs.c.id == id_).values(created_us=now_us()))


def remove(tx: sa.Connection, id_: str, noted_us: int | None = None) -> None:
    """Forget a job; with `noted_us` only if it was not noted again since then."""
    unwanted = sa.delete(jobs).where(jobs.c.id == id_)
    tx.execute(unwanted if noted_us is None else unwanted.where(jobs.c.created_us == noted_us))


def retire(tx: sa.Connection, id_: str) -> None:
    """Forget a job of which nothing is left; what it cost stays counted."""
    row = find(tx, id_)
    if row is not None:
        spent_usd = quotas.account(tx, row["project"]).jobs_usd + row["usd"]
        quotas.change_account(tx, row["project"], jobs_usd=spent_usd)
        remove(tx, id_)


def note_retired(tx: sa.Connection, id_: str, retired: Mapping[str, str]) -> None:
    """Note what retention has removed of a job, or is about to."""
    tx.execute(sa.update(jobs).where(jobs.c.id == id_).values(retired=dict(retired)))


def any_in(connection: sa.Connection, pool: str, project: str | None) -> bool:
    """Return whether the pool has had a job of the project, or of any."""
    wanted = sa.select(jobs.c.id).where(jobs.c.pool == pool)
    if project is not None:
        wanted = wanted.where(jobs.c.project == project)
    return connection.execute(wanted.limit(1)).first() is not None


def living(connection: sa.Connection, pool: str, project: str | None) -> list[sa.RowMapping]:
    """Return the pool's jobs, of one project or all, that are not known to be over."""
    wanted = sa.select(jobs).where(jobs.c.pool == pool, jobs.c.ended_us.is_(None)).order_by(jobs.c.id)
    if project is not None:
        wanted = wanted.where(jobs.c.project == project)
    return list(connection.execute(wanted).mappings())


def settle(tx: sa.Connection, id_: str, *, usd: float, over: bool, waits: str | None = None) -> None:
    """Note what a pool says of a job: its cost so far, whether it is over, and why it waits for its quota."""
    row = find(tx, id_)
    if row is not None:
        ended_us = (row["ended_us"] or now_us()) if over else None
        tx.execute(sa.update(jobs).where(jobs.c.id == id_).values(usd=usd, ended_us=ended_us, waits=waits))


def note_refused(tx: sa.Connection, former: sa.RowMapping) -> None:
    """Note that a job has not been submitted once more, as which it was noted: it is over since it was over before,
    unless it has come to another end meanwhile."""
    same = jobs.c.id == former["id"], jobs.c.announced.is_not_distinct_from(former["announced"])
    tx.execute(sa.update(jobs).where(*same, jobs.c.ended_us.is_not(None)).values(ended_us=former["ended_us"]))


def end(tx: sa.Connection, id_: str, *, usd: float, state: str, cause: str, resubmissions: int) -> None:
    """Note that a job is over, in this state. Announces it to webhooks, once each time that it was submitted: the pool
    may refuse a resubmission that is noted here, and who has asked it first may note its answer last."""
    row = find(tx, id_)
    if row is not None and (row["announced"] is None or row["announced"] < resubmissions):
        told = {"job": id_, "pool": row["pool"], "state": state, "cause": cause, "usd": usd}
        webhooks.announce(tx, row["project"], f"job.{state}", told)
        tx.execute(sa.update(jobs).where(jobs.c.id == id_).values(announced=resubmissions))
    settle(tx, id_, usd=usd, over=True)


def note_wait(tx: sa.Connection, id_: str, waits: str | None) -> None:
    tx.execute(sa.update(jobs).where(jobs.c.id == id_).values(waits=waits))


def waiting(connection: sa.Connection, pools: Sequence[str], project: str | None = None) -> list[sa.RowMapping]:
    """Return the jobs of these pools that wait for the quota of their project, or of this one, in the order in which
    they were submitted."""
    wanted = sa.select(jobs).where(jobs.c.pool.in_(pools), jobs.c.ended_us.is_(None), jobs.c.waits.is_not(None))
    if project is not None:
        wanted = wanted.where(jobs.c.project == project)
    return list(connection.execute(wanted.order_by(jobs.c.created_us, jobs.c.id)).mappings())


def use(connection: sa.Connection, project: str, but: str = "") -> JobsUse:
    """Add up what the project has on pools, without the job `but`."""
    goes_on, waits = jobs.c.ended_us.is_(None), jobs.c.waits.is_not(None)
    counts = goes_on & ~waits
    total = sa.select(
        sa.func.coalesce(sa.func.sum(sa.case((counts, 1), else_=0)), 0),
        sa.func.coalesce(sa.func.sum(sa.case((counts, jobs.c.train_gpus), else_=0)), 0),
        sa.func.coalesce(sa.func.sum(jobs.c.usd), 0.0),
        sa.func.coalesce(sa.func.sum(sa.case((goes_on & waits, 1), else_=0)), 0),
    )
    row = connection.execute(total.where(jobs.c.project == project, jobs.c.id != but)).one()
    usd = float(row[2]) + quotas.account(connection, project).jobs_usd
    return JobsUse(int(row[0]), int(row[1]), usd, int(row[3]))


def naming(connection: sa.Connection, project: str, text: str) -> str | None:
    """Return a job of the project that is not over and has this text in its configuration."""
    wanted = sa.select(jobs.c.id).where(
        jobs.c.project == project, jobs.c.ended_us.is_(None), jobs.c.config.contains(text, autoescape=True)
    )
    return connection.execute(wanted.limit(1)).scalar()


def last_naming_us(connection: sa.Connection, project: str, text: str) -> int:
    """Return when the last job that has this text in its configuration was over; 0 for none."""
    wanted = sa.select(sa.func.max(jobs.c.ended_us)).where(
        jobs.c.project == project, jobs.c.config.contains(text, autoescape=True)
    )
    return connection.execute(wanted).scalar() or 0
