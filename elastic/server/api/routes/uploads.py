"""Uploads: checkpoints and data that a project's submissions may name, as `upload:ID` or `upload:ID/FILE`.

Each is announced with its files and their checksums; then come the files, one request each, in any order and again
after a failure. Once the last one is there, the upload is ready, and never changes.
"""

import contextlib
import errno
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import sqlalchemy as sa
from fastapi import APIRouter, Depends, Path, Request, Response
from fastapi.responses import FileResponse
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect

from elastic.protocol.api import Listed, NewUpload, ProblemError, Upload, UploadFile
from elastic.server import ids
from elastic.server.api.auth import Caller, credentials_of
from elastic.server.api.downloads import Download
from elastic.server.api.routes.common import (
    CallerDep,
    Cursor,
    StateDep,
    cursor_of,
    listing,
    project_of,
    rules,
    seen,
    seen_of,
)
from elastic.server.api.routes.model_route import ModelRoute
from elastic.server.api.state import ServerState
from elastic.server.api.streams import LOOK_S
from elastic.server.api.writes import WriteDep, WriteRequest, WriteResult, created
from elastic.server.intake.upload_files import ChecksumMismatch, Receiving, UploadStorage
from elastic.server.permissions import Action
from elastic.server.pools import settle_jobs
from elastic.server.problems import ApiProblem, not_found
from elastic.server.store import StoreUnavailable, uploads
from elastic.server.store.tables import uploads as uploads_table

router = APIRouter(prefix="/v1/uploads", tags=["uploads"], route_class=ModelRoute)
UploadId = Annotated[str, Path(max_length=64)]
Digest = Annotated[str, Path(pattern=r"^[0-9a-f]{64}$", description="the file's SHA-256")]
WRITE_BYTES = 1 << 20
_BINARY = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@router.post(
    "",
    status_code=201,
    response_model=Upload,
    **rules(Action.UPLOADS_WRITE, "not-found", "quota-exceeded"),
)
def create(body: NewUpload, write: WriteDep, tx: sa.Connection) -> WriteResult:
    """Announce an upload: its files, each with its size and checksum. `missing` says which are to be sent."""
    _check(body)
    project = project_of(tx, write.caller, body.project)
    taken, wanted = uploads.bytes_of(tx, project), sum(file.bytes for file in body.files)
    most = write.state.settings.project_uploads_bytes_max
    if taken + wanted > most:
        raise ApiProblem(
            "quota-exceeded", f"the project's uploads have {taken} bytes; with these {wanted} more than {most}"
        )
    row = uploads.insert(tx, project, body.name, body.files, write.caller.actor)
    return created(f"{router.prefix}/{row['id']}", _shown(write.state, row), project)


@router.get("", **rules(Action.UPLOADS_READ, "invalid-cursor"))
def list_uploads(
    request: Request, caller: CallerDep, state: StateDep, cursor: Annotated[Cursor, Depends(cursor_of(ids.UPLOAD))]
) -> Listed[Upload]:
    """List uploads, newest first."""
    with state.store.reading() as connection:
        return listing(
            request,
            connection,
            uploads_table,
            seen_of(connection, caller, uploads_table),
            cursor,
            lambda row: _shown(state, row),
        )


@router.get("/{upload}", **rules(Action.UPLOADS_READ, "not-found"))
def show(upload: UploadId, caller: CallerDep, state: StateDep) -> Upload:
    """Show an upload: its files, and which of them are missing."""
    with state.store.reading() as connection:
        return _shown(state, _upload_of(connection, caller, upload))


@router.put(
    "/{upload}/files/{digest}",
    response_model=Upload,
    **rules(
        Action.UPLOADS_WRITE,
        "not-found",
        "checksum-mismatch",
        "storage-full",
        requestBody={"required": True, "content": _BINARY},
    ),
)
async def receive(upload: UploadId, digest: Digest, write: WriteDep) -> Response:
    """Send a file of an upload, as it is. What does not have its size and checksum leaves nothing."""
    if (former := await run_in_threadpool(write.answered, None)) is not None:
        return former
    row, file = await run_in_threadpool(_file_of, write.state, write.caller, upload, digest)
    storage = UploadStorage(write.state.settings)
    with _room():
        if not await run_in_threadpool(_has, storage, row, digest):
            with await run_in_threadpool(storage.receiving, upload, digest, file.bytes) as receiving:
                await _take_in(write, receiving)
                await run_in_threadpool(receiving.keep)

        def work(tx: sa.Connection) -> WriteResult:
            found = _upload_of(tx, write.caller, upload)
            storage.complete(found["project"], upload, uploads.files_of(found))
            return WriteResult(200, _shown(write.state, found), project=found["project"])

        return await run_in_threadpool(write.carry_out, Action.UPLOADS_WRITE, None, work)


_FETCHES = rules(Action.UPLOADS_READ, "not-found", "invalid-range")
_FETCHES["responses"][200] = {"description": "the file", "content": _BINARY}


@router.get("/{upload}/files/{digest}", response_class=FileResponse, **_FETCHES)
def fetch(upload: UploadId, digest: Digest, request: Request, caller: CallerDep, state: StateDep) -> Response:
    """Fetch a file of an upload that is ready. `Range` is understood."""
    row, file = _file_of(state, caller, upload, digest)
    path = UploadStorage(state.settings).place(row["project"], upload) / file.path
    try:
        whole = Download(path.open("rb"), path.name)
    except FileNotFoundError:
        raise not_found("file", digest) from None
    return state.streams.while_admitted(request, credentials_of(request), Action.UPLOADS_READ, row["project"], whole)


@router.delete("/{upload}", status_code=204, **rules(Action.UPLOADS_WRITE, "not-found", "upload-in-use"))
def delete(upload: UploadId, write: WriteDep) -> Response:
    """Delete an upload that no run or job which goes on names."""
    if (former := write.answered(None)) is not None:
        return former
    settings = write.state.settings
    with contextlib.suppress(ApiProblem):  # A job whose pool does not answer goes on.
        settle_jobs(write.state.store, settings, write.caller.project)

    def work(tx: sa.Connection) -> WriteResult:
        found = _upload_of(tx, write.caller, upload)
        if (run := uploads.user_of(tx, found["project"], upload)) is not None:
            raise ApiProblem("upload-in-use", f"{run} uses it: wait until it has ended", run=run)
        uploads.remove(tx, upload)
        UploadStorage(settings).discard(found["project"], upload)
        return WriteResult(204, project=found["project"])

    return write.carry_out(Action.UPLOADS_WRITE, None, work)


async def _take_in(write: WriteRequest, receiving: Receiving) -> None:
    waiting, looked_s = bytearray(), time.monotonic()
    try:
        async for chunk in write.request.stream():
            if time.monotonic() - looked_s >= LOOK_S:
                with contextlib.suppress(StoreUnavailable):
                    await run_in_threadpool(write.refuse_changed)
                looked_s = time.monotonic()
            waiting += chunk
            if len(waiting) >= WRITE_BYTES:
                await run_in_threadpool(receiving.write, bytes(waiting))
                waiting.clear()
    except ClientDisconnect:
        raise ApiProblem("request-timeout", "the sender left before the end of the file") from None
    await run_in_threadpool(receiving.write, bytes(waiting))


@contextmanager
def _room() -> Iterator[None]:
    """A context: turns failures to receive a file into problems."""
    try:
        yield
    except ChecksumMismatch as error:
        raise ApiProblem("checksum-mismatch", f"the file has {error}") from None
    except OSError as error:
        if error.errno not in _FULL:
            raise
        raise ApiProblem("storage-full", f"the server's disk: {error.strerror}") from None


def _has(storage: UploadStorage, row: sa.RowMapping, digest: str) -> bool:
    return storage.is_ready(row["project"], row["id"]) or digest in storage.received(row["id"])


def _upload_of(connection: sa.Connection, caller: Caller, upload: str) -> sa.RowMapping:
    return seen(caller, "upload", upload, uploads.find(connection, upload))


def _file_of(state: ServerState, caller: Caller, upload: str, digest: str) -> tuple[sa.RowMapping, UploadFile]:
    with state.store.reading() as connection:
        row = _upload_of(connection, caller, upload)
    file = next((file for file in uploads.files_of(row) if file.sha256 == digest), None)
    if file is None:
        raise not_found("file", digest)
    return row, file


def _shown(state: ServerState, row: sa.RowMapping) -> Upload:
    storage = UploadStorage(state.settings)
    ready = storage.is_ready(row["project"], row["id"])
    return uploads.as_upload(row, ready=ready, received=set() if ready else storage.received(row["id"]))


def _check(body: NewUpload) -> None:
    """Raises `ApiProblem` where two files have one place, or one content two sizes."""
    errors: list[ProblemError] = []
    paths: set[str] = set()
    sizes: dict[str, int] = {}
    for number, file in enumerate(body.files):
        if file.path in paths or any(f"{file.path}/" == other[: len(file.path) + 1] for other in paths):
            errors.append(ProblemError(pointer=f"#/files/{number}/path", detail=f"{file.path!r} is there twice"))
        if any(parent in paths for parent in _parents(file.path)):
            errors.append(ProblemError(pointer=f"#/files/{number}/path", detail=f"{file.path!r} lies in a file"))
        if sizes.setdefault(file.sha256, file.bytes) != file.bytes:
            errors.append(ProblemError(pointer=f"#/files/{number}/bytes", detail="differs for the same checksum"))
        paths.add(file.path)
    if errors:
        raise ApiProblem("invalid-request", f"{errors[0].pointer}: {errors[0].detail}", errors)


def _parents(path: str) -> Iterator[str]:
    while "/" in path:
        path = path.rpartition("/")[0]
        yield path
