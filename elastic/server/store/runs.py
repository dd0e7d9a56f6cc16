"""Hosted runs in the store: the requests for each run, and what its runner has seen of it."""

import json
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import msgspec
import sqlalchemy as sa
from pydantic import BaseModel
from sqlalchemy.exc import SQLAlchemyError

from elastic.config import Config
from elastic.core.ledger import NANO_USD_PER_USD
from elastic.protocol.api import ENDED, Condition, HostedRun, HostedRunDetail, RunFigures, RunPhase
from elastic.server import ids
from elastic.server.quotas.needs import RunNeeds
from elastic.server.store import webhooks
from elastic.server.store.database import now_us
from elastic.server.store.rows import first, inserted, told
from elastic.server.store.tables import idempotency, runs
from elastic.system.processes import Identity

RUN, STOP, DELETE = "run", "stop", "delete"
"""The requests for a run."""
Attempting = Callable[[str], AbstractContextManager[object]]
"""Gives the context in which an item of many is read; the default one lets its exception end all."""


class RunShare(msgspec.Struct, frozen=True):
    """A run's share of one provider that is shared, and since when it is as large."""

    gpus: int
    since_us: int


class RunLimits(msgspec.Struct, frozen=True):
    """The most GPUs that a run may hold by provider, and the most that it may cost."""

    caps: dict[str, int] = {}
    budget_usd: float | None = None


class QuotaWait(msgspec.Struct, frozen=True):
    """Why a run does not begin yet: `reason` for programs, `message` for people."""

    reason: str
    message: str


class RunProcess(msgspec.Struct, frozen=True):
    """A run's process, the machine or container in which it was begun, and the number of the run's journals before
    it."""

    identity: Identity
    world: str
    journals: int


@dataclass(frozen=True, kw_only=True)
class HostedRunRow:
    """A row of the runs' table; fields as there."""

    id: str
    project: str
    name: str
    config: str
    providers: list[str]
    labels: dict[str, str]
    wanted: str
    force: bool
    budget_usd: float | None = None
    caps: dict[str, int]
    max_restarts: int
    generation: int
    created_by: str
    created_us: int
    managed: bool
    observed_generation: int
    phase: RunPhase
    cause: str
    conditions: list[Condition]
    figures: RunFigures
    process: RunProcess | None = None
    attempt: int
    restarts: int
    furthest_step: int
    not_before_us: int
    started_us: int | None = None
    ended_us: int | None = None
    needs: RunNeeds = field(default_factory=RunNeeds)
    shares: dict[str, RunShare] | None = None
    limits: RunLimits | None = None
    told: RunLimits | None = None
    limits_number: int = 0
    allotted_nano_usd: int | None = None
    cost_nano_usd: int = 0
    day: int = 0
    day_base_nano_usd: int = 0
    warned: bool = False
    waits: QuotaWait | None = None
    retired: dict[str, str] | None = None

    @property
    def seen_nano_usd(self) -> int:
        """The run's last known cost."""
        return max(self.cost_nano_usd, round(self.figures.usd * NANO_USD_PER_USD))

    def base_nano_usd(self, day: int) -> int:
        """Return the run's cost at the beginning of this day."""
        return self.day_base_nano_usd if self.day == day else self.seen_nano_usd

    @property
    def ended(self) -> bool:
        return self.phase in ENDED

    @property
    def identity(self) -> Identity | None:
        """The identity of the run's process, if one was seen."""
        return None if self.process is None else self.process.identity


@dataclass(frozen=True, kw_only=True)
class NewRun:
    """A checked submission. What its budget and caps are in `config`, and where it listens, is left out there."""

    project: str
    name: str
    config: Config
    providers: list[str]
    labels: dict[str, str] = field(default_factory=dict[str, str])
    budget_usd: float | None = None
    caps: dict[str, int] = field(default_factory=dict[str, int])
    max_restarts: int = 10
    needs: RunNeeds = field(default_factory=RunNeeds)


def as_record(row: sa.RowMapping) -> HostedRunRow:
    """Return a run from all columns of its row."""
    columns = {str(name): value for name, value in row.items() if value is not None}
    return msgspec.convert(columns, HostedRunRow, dec_hook=lambda kind, value: kind.model_validate(value))


def _columns(typed: Mapping[str, Any]) -> dict[str, Any]:
    return msgspec.to_builtins(typed, enc_hook=BaseModel.model_dump)


def insert(tx: sa.Connection, new: NewRun, created_by: str, conditions: list[Condition]) -> HostedRunRow:
    row = {
        "id": ids.new_id(ids.RUN),
        "project": new.project,
        "name": new.name,
        "config": new.config.model_dump_json(),
        "providers": new.providers,
        "labels": new.labels,
        "wanted": RUN,
        "budget_usd": new.budget_usd,
        "caps": new.caps,
        "max_restarts": new.max_restarts,
        "created_by": created_by,
        "created_us": now_us(),
        "phase": RunPhase.PENDING,
        "conditions": conditions,
        "figures": RunFigures(steps=new.config.run.steps),
        "needs": new.needs,
    }
    return as_record(inserted(tx, runs, **_columns(row)))


_FIND = sa.select(runs).where(runs.c.id == sa.bindparam("run"), runs.c.wanted != DELETE)


def find(connection: sa.Connection, id_: str) -> HostedRunRow | None:
    """Return a run by its id, unless it is being deleted."""
    row = first(connection, _FIND, run=id_)
    return None if row is None else as_record(row)


def read(connection: sa.Connection, wanted: sa.Select[Any], attempting: Attempting = nullcontext) -> list[HostedRunRow]:
    """Return runs from a query of all columns of their rows. A row that cannot be read is an attempt that failed, and
    the others are returned."""
    try:
        return [as_record(row) for row in connection.execute(wanted).mappings()]
    except SQLAlchemyError:
        raise
    except Exception:
        found: list[HostedRunRow] = []
        for id_ in connection.execute(wanted.with_only_columns(runs.c.id)).scalars().all():
            with attempting(f"{id_}: its row"):
                found += [as_record(row) for row in connection.execute(wanted.where(runs.c.id == id_)).mappings()]
        return found


def naming(connection: sa.Connection, id_: str) -> str | None:
    """Return a run that the runner attends to and whose configuration names something of another run; None where there
    is none."""
    wanted = sa.select(runs.c.id).where(runs.c.managed, runs.c.id != id_, runs.c.config.contains(id_, autoescape=True))
    return connection.execute(wanted.limit(1)).scalar()


def managed(
    connection: sa.Connection, project: str | None = None, attempting: Attempting = nullcontext
) -> list[HostedRunRow]:
    """Return the runs that the runner attends to, of one project or all, oldest first. For unreadable ones see
    `read`."""
    wanted = sa.select(runs).where(runs.c.managed).order_by(runs.c.id)
    if project is not None:
        wanted = wanted.where(runs.c.project == project)
    return read(connection, wanted, attempting)


def want(tx: sa.Connection, id_: str, **changes: Any) -> None:
    """Change the request for a run. The runner carries it out."""
    changed = _columns(changes)
    tx.execute(
        sa.update(runs).where(runs.c.id == id_).values(**changed, managed=True, generation=runs.c.generation + 1)
    )


def observe(tx: sa.Connection, id_: str, **seen: Any) -> None:
    """Record what the runner has seen or done. Announces a new phase, and a budget that is nearly used, to webhooks."""
    if "phase" in seen:
        former = tx.execute(sa.select(runs.c.project, runs.c.name, runs.c.phase).where(runs.c.id == id_)).first()
        if former is not None and former.phase != seen["phase"]:
            told = {"run": id_, "name": former.name, "phase": seen["phase"], "cause": seen.get("cause", "")}
            webhooks.announce(tx, former.project, f"run.{seen['phase']}", told)
    if seen.get("warned"):
        of = (runs.c.project, runs.c.name, runs.c.budget_usd, runs.c.warned)
        former = tx.execute(sa.select(*of).where(runs.c.id == id_)).first()
        if former is not None and not former.warned:
            told = {"run": id_, "name": former.name, "budget_usd": former.budget_usd}
            webhooks.announce(tx, former.project, "run.budget_warning", told)
    tx.execute(sa.update(runs).where(runs.c.id == id_).values(**_columns(seen)))


def settle(tx: sa.Connection, id_: str, generation: int) -> None:
    """Mark a run as needing no more attention, unless its request has changed meanwhile."""
    tx.execute(sa.update(runs).where(runs.c.id == id_, runs.c.generation == generation).values(managed=False))


def remove(tx: sa.Connection, id_: str) -> None:
    tx.execute(sa.delete(runs).where(runs.c.id == id_))


def forget_answers(tx: sa.Connection, before_us: int) -> None:
    """Drop recorded answers to requests from before `before_us`."""
    tx.execute(sa.delete(idempotency).where(idempotency.c.created_us < before_us))


LISTED = [
    column
    for column in runs.c
    if column.name.removesuffix("_us") + "_at" in HostedRun.model_fields or column.name in HostedRun.model_fields
]
"""Columns of a run that lists show."""


_NO_NUMBER = -1e308


def _figure(name: str) -> sa.ColumnElement[Any]:
    """A figure of runs; those that have none are last."""
    return sa.func.coalesce(runs.c.figures[name].as_float(), _NO_NUMBER)


ORDERS: Mapping[str, sa.ColumnElement[Any]] = {
    "name": sa.func.lower(runs.c.name),
    "phase": runs.c.phase,
    "step": _figure("step"),
    "success": _figure("last_success_rate"),
    "reward": _figure("last_mean_reward"),
    "tokens_per_s": _figure("tokens_per_s"),
    "usd": _figure("usd"),
    "preemptions": _figure("preemptions"),
}
"""Values by which runs may be listed."""


def labelled(label: str) -> sa.ColumnElement[bool]:
    """The condition of runs with a label: `NAME=VALUE`, or `NAME` with any value."""
    name, given, value = label.partition("=")
    found = runs.c.labels[name].as_string()
    return found == value if given else found.is_not(None)


def matching(text: str) -> sa.ColumnElement[bool]:
    """The condition of runs whose name, id or labels have a text in them."""
    # Labels are kept as JSON, which has other letters than those of ASCII, quotes and backslashes by escapes.
    in_labels = sa.cast(runs.c.labels, sa.Text).icontains(json.dumps(text)[1:-1], autoescape=True)
    return sa.or_(*(place.icontains(text, autoescape=True) for place in (runs.c.name, runs.c.id)), in_labels)


def as_run(record: HostedRunRow) -> HostedRun:
    return told(HostedRun, vars(record))


def as_run_detail(
    record: HostedRunRow, config: dict[str, Any], differences: dict[str, Any], created_by_name: str
) -> HostedRunDetail:
    return told(HostedRunDetail, vars(record), config=config, differences=differences, created_by_name=created_by_name)


def as_listed_run(row: sa.RowMapping) -> HostedRun:
    """Return a run from the columns in `LISTED`."""
    return told(HostedRun, row)
