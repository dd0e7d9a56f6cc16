"""The runner's part of retention: removes expired parts of runs, and finishes removals that another runner began."""

import sqlalchemy as sa
import structlog

from elastic.server import ids
from elastic.server.intake.upload_files import UploadStorage
from elastic.server.permissions import Action
from elastic.server.retention import records
from elastic.server.retention.rules import REMOVED, REMOVING, RUN, due, remove
from elastic.server.settings import ServerSettings
from elastic.server.store import Store, audit, runs, uploads
from elastic.server.store.database import now_us
from elastic.server.store.runs import HostedRunRow
from elastic.system.isolation import IsolatedLoop

log = structlog.get_logger(__name__)

ACTOR = RETENTION = "retention"
AT_ONCE = 100
"""Runs that are handled in one pass, before the runner returns to its other work."""


def retire(store: Store, settings: ServerSettings, isolated: IsolatedLoop) -> bool:
    """Remove expired parts of some runs and uploads; returns whether there are more. Raises `StoreUnavailable`.

    What cannot be removed waits in `isolated`.
    """
    with store.reading() as connection:
        begun = records.half_removed(connection, isolated.attempt)
    for run in begun:
        with isolated.attempt(f"{run.id}: {RETENTION}"):
            _finish(store, settings, run)
    with store.reading() as connection:
        found = [run.id for run, _ in records.over(connection, None, now_us(), isolated.attempt)]
    for id_ in found[:AT_ONCE]:
        with isolated.attempt(f"{id_}: {RETENTION}"):
            run = _begin(store, id_)
            if run is not None:
                _finish(store, settings, run)
    _retire_uploads(store, settings, isolated)
    return len(found) > AT_ONCE


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


def _begin(store: Store, id_: str) -> HostedRunRow | None:
    """Record what will be removed. Returns None if nothing is left to remove, or if the runner deletes the whole
    run."""
    with store.writing() as tx:
        run = runs.find(tx, id_)
        if run is None:
            return None
        own, server = records.policy(tx, run.project), records.policy(tx, records.SERVER)
        parts = due(run, own.or_else(server), now_us())
        if not parts or records.needed_by(tx, run) is not None:
            return None
        audit.write(
            tx,
            actor=ACTOR,
            action=Action.RUNS_WRITE,
            resource=f"/v1/runs/{id_}: {', '.join(parts)}",
            project=run.project,
            status=204,
            request_id=ids.new_id(ids.REQUEST),
        )
        log.info("kept no longer", run=id_, parts=parts)
        if RUN in parts:
            runs.want(tx, id_, wanted=runs.DELETE)
            return None
        runs.observe(tx, id_, retired={**(run.retired or {}), **dict.fromkeys(parts, REMOVING)})
        return runs.find(tx, id_)


def _finish(store: Store, settings: ServerSettings, run: HostedRunRow) -> None:
    retired = dict(run.retired or {})
    for part in [part for part, state in retired.items() if state == REMOVING]:
        try:
            remove(settings.run_dir(run.id), part)
        except OSError as error:
            log.error("cannot be removed now", run=run.id, part=part, error=str(error))
            continue
        retired[part] = REMOVED
    with store.writing() as tx:
        runs.observe(tx, run.id, retired=retired)
