"""The runner's part of retention: removes expired parts of runs and jobs, and finishes what another runner began."""

import contextlib
from collections.abc import Sequence

import sqlalchemy as sa
import structlog

from elastic.server import ids
from elastic.server.intake.upload_files import UploadStorage
from elastic.server.permissions import Action
from elastic.server.pools import settle_pool
from elastic.server.problems import ApiProblem
from elastic.server.retention import records
from elastic.server.retention.rules import REMOVED, REMOVING, RUN, Left, due, remove
from elastic.server.settings import ServerSettings
from elastic.server.store import Store, audit, jobs, runs, uploads
from elastic.server.store.database import now_us
from elastic.system.isolation import IsolatedLoop

log = structlog.get_logger(__name__)

ACTOR = RETENTION = "retention"
AT_ONCE = 100
"""Runs and jobs that are handled in one pass, before the runner returns to its other work."""


def retire(store: Store, settings: ServerSettings, isolated: IsolatedLoop) -> bool:
    """Remove expired parts of some runs, jobs and uploads; returns whether there are more. Raises `StoreUnavailable`.

    What cannot be removed waits in `isolated`.
    """
    with store.reading() as connection:
        begun = records.half_removed(connection, isolated.attempt)
    for left in begun:
        with isolated.attempt(f"{left.id}: {RETENTION}"):
            _finish(store, settings, left)
    with store.reading() as connection:
        over = [left for left, _ in records.over(connection, None, now_us(), isolated.attempt)]
    found = _known_over(store, settings, over, isolated)
    for one in found[:AT_ONCE]:
        with isolated.attempt(f"{one.id}: {RETENTION}"):
            left = _begin(store, one)
            if left is not None:
                _finish(store, settings, left)
    _retire_uploads(store, settings, isolated)
    return len(found) > AT_ONCE


def _known_over(store: Store, settings: ServerSettings, over: Sequence[Left], isolated: IsolatedLoop) -> list[Left]:
    """Have the store know which of these jobs go on again, and return all but those of which nobody can say it: their
    pools are away, or the server was not started with them."""
    answered = set[tuple[str, str]]()
    for path in settings.pools:
        for project in {left.project for left in over if left.pool == path.name}:
            with isolated.attempt(f"{project}: {RETENTION} of jobs"), contextlib.suppress(ApiProblem):
                settle_pool(store, settings, path.name, project)
                answered.add((project, path.name))
    return [left for left in over if not left.pool or (left.project, left.pool) in answered]


def _retire_uploads(store: Store, settings: ServerSettings, isolated: IsolatedLoop) -> None:
    """Remove uploads that were never completed or that no run uses. The next server sweeps files that a dying runner
    leaves behind."""
    storage = UploadStorage(settings)

    def over(connection: sa.Connection, project: str | None = None) -> list[sa.RowMapping]:
        found = records.uploads_over(connection, project, storage.status, settings.open_upload_days)
        return [row for row, _, _ in found]

    with store.reading() as connection:
        found = over(connection)
    for row in found[:AT_ONCE]:
        with isolated.attempt(f"{row['id']}: {RETENTION}"):
            with store.writing() as tx:
                if row["id"] not in {one["id"] for one in over(tx, row["project"])}:
                    continue  # Somebody has begun to use it meanwhile.
                audit.write(
                    tx,
                    actor=ACTOR,
                    action=Action.UPLOADS_WRITE,
                    resource=f"/v1/uploads/{row['id']}",
                    project=row["project"],
                    status=204,
                    request_id=ids.new_id(ids.REQUEST),
                )
                uploads.remove(tx, row["id"])
            log.info("an upload is kept no longer", upload=row["id"], project=row["project"])
            storage.discard(row["project"], row["id"])


def _begin(store: Store, one: Left) -> Left | None:
    """Record what will be removed. Returns None if nothing is left to remove, or if the runner deletes the whole
    run."""
    with store.writing() as tx:
        left = records.again(tx, one)
        if left is None:
            return None
        own, server = records.policy(tx, left.project), records.policy(tx, records.SERVER)
        parts = due(left, own.or_else(server), now_us())
        if not parts or records.needed_by(tx, left) is not None:
            return None
        audit.write(
            tx,
            actor=ACTOR,
            action=Action.RUNS_WRITE,
            resource=f"{left.url}: {', '.join(parts)}",
            project=left.project,
            status=204,
            request_id=ids.new_id(ids.REQUEST),
        )
        log.info("kept no longer", run=left.id, parts=parts)
        if RUN in parts and not left.pool:
            runs.want(tx, left.id, wanted=runs.DELETE)
            return None
        records.note(tx, left, {**left.retired, **dict.fromkeys(parts, REMOVING)})
        return records.again(tx, left)


def _finish(store: Store, settings: ServerSettings, left: Left) -> None:
    retired = dict(left.retired)
    for part in [part for part, state in retired.items() if state == REMOVING]:
        try:
            remove(left.directory(settings), part)
        except OSError as error:
            log.error("cannot be removed now", run=left.id, part=part, error=str(error))
            continue
        retired[part] = REMOVED
    with store.writing() as tx:
        if retired.get(RUN) == REMOVED:
            jobs.retire(tx, left.id)
        else:
            records.note(tx, left, retired)
