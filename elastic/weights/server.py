"""Serves any relay over HTTP: `GET /blobs?prefix=`, and GET (with ranges), PUT and DELETE of `/blobs/{key}`.

With `?wait_s=` (below ten) a GET waits for a blob that is not there yet. Every request bears a token. Who has which
right is said in `elastic.weights.rights`.
"""

import asyncio
import mmap
import re
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from itertools import chain
from typing import IO

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from elastic.weights.blobs import check_key
from elastic.weights.errors import BlobConflict, BlobNotFound, InvalidKey, RelayError, RelayUnavailable
from elastic.weights.relay import REQUESTS, Relay
from elastic.weights.rights import REQUEST_BYTES, REQUESTS_OPEN, Bearer, RelayRights

PIECE_BYTES = 8 << 20
"""Bytes of a blob that a request holds in memory. The rest of an upload waits in a file."""

BLOB_BYTES_MAX = 64 * 2**30

_RANGE = re.compile(r"bytes=(\d{1,100})-(\d{0,100})")
_WAIT = re.compile(r"\d(\.\d{1,9})?")
LOOK_S = 0.02
"""How often one looks for a blob for which a GET waits."""
WAITING_MAX = 64
"""GETs that wait at a time. Further ones are answered at once: all workers of a site are one caller, whose requests are
bounded."""
POSITION_MAX = 2**62
"""What lies behind it is in no file."""
_BYTES = "application/octet-stream"

Handler = Callable[[Request, Bearer], Awaitable[Response]]
_Endpoint = Callable[[Request], Awaitable[Response]]


def relay_app(
    relay: Relay, rights: RelayRights, blob_bytes_max: int = BLOB_BYTES_MAX, piece_bytes: int = PIECE_BYTES
) -> Starlette:
    """An ASGI application that serves `relay` to holders of tokens, as `rights` says.

    Answers 401 to unknown tokens, and 403 to requests that a token does not allow.
    """

    waiting: set[Request] = set()

    async def list_keys(request: Request, bearer: Bearer) -> Response:
        return JSONResponse(await run_in_threadpool(relay.list_keys, request.query_params.get("prefix", "")))

    async def get(request: Request, bearer: Bearer) -> Response:
        key = check_key(request.path_params["key"])
        wanted = _RANGE.fullmatch(request.headers.get("range", ""))
        start = int(wanted[1]) if wanted else 0
        length = int(wanted[2]) - start + 1 if wanted and wanted[2] else None
        if start > POSITION_MAX:
            return PlainTextResponse(f"{key}: nothing at byte {start}", 416)
        wait = _WAIT.fullmatch(request.query_params.get("wait_s", ""))
        clock = asyncio.get_running_loop().time
        until_s = clock() + (float(wait[0]) if wait else 0.0)
        while True:
            pieces = _counted(rights, bearer, _pieces(relay, key, start, length, piece_bytes))
            try:
                first = await run_in_threadpool(next, pieces, b"")
                break
            except BlobNotFound:
                if clock() >= until_s or len(waiting) >= WAITING_MAX:
                    raise
            waiting.add(request)
            try:
                await asyncio.sleep(LOOK_S)
            finally:
                waiting.discard(request)
        if wanted and not first:
            return PlainTextResponse(f"{key}: nothing at byte {start}", 416)
        status = 206 if wanted else 200
        if len(first) == piece_bytes != length:
            # Where it ends is not known yet, and so neither is its content range.
            return StreamingResponse(chain([first], pieces), status, media_type=_BYTES)
        headers = {"content-range": f"bytes {start}-{start + len(first) - 1}/*"} if wanted else None
        return Response(first, status, headers, _BYTES)

    async def put(request: Request, bearer: Bearer) -> Response:
        key = check_key(request.path_params["key"])
        if not bearer.owner and (refusal := await _refused_request(relay, key, bearer)) is not None:
            return refusal
        bytes_max = blob_bytes_max if bearer.owner else REQUEST_BYTES
        with tempfile.SpooledTemporaryFile(piece_bytes) as file:
            async for part in request.stream():
                if file.tell() + len(part) > bytes_max:
                    return PlainTextResponse(f"{key}: more than {bytes_max} bytes", 413)
                file.write(part)
            await run_in_threadpool(_put_file, relay, key, file, piece_bytes)
        return Response(status_code=204)

    async def delete(request: Request, bearer: Bearer) -> Response:
        if not bearer.owner:
            return _forbidden("delete anything")
        await run_in_threadpool(relay.delete, check_key(request.path_params["key"]))
        return Response(status_code=204)

    guarded = _Guard(rights)
    return Starlette(
        routes=[
            Route("/blobs", guarded(list_keys), methods=["GET"]),
            Route("/blobs/{key:path}", guarded(get), methods=["GET"]),
            Route("/blobs/{key:path}", guarded(put), methods=["PUT"]),
            Route("/blobs/{key:path}", guarded(delete), methods=["DELETE"]),
        ]
    )


async def _refused_request(relay: Relay, key: str, bearer: Bearer) -> Response | None:
    """Why a worker may not put `key`; None where it may, and it counts as one of its requests until it is answered."""
    if not key.startswith(REQUESTS):
        return _forbidden(f"put anything but what begins with {REQUESTS}")
    if bearer.requests:
        bearer.requests &= set(await run_in_threadpool(relay.list_keys, REQUESTS))
    if len(bearer.requests - {key}) >= REQUESTS_OPEN:
        return PlainTextResponse(f"{REQUESTS_OPEN} requests of this worker are not answered yet", 429)
    bearer.requests.add(key)
    return None


def _forbidden(what: str) -> Response:
    return PlainTextResponse(f"a worker's token may not {what}", 403)


def _pieces(relay: Relay, key: str, start: int, length: int | None, piece_bytes: int) -> Iterator[bytes]:
    """`length` bytes from `start`, or all that there are, piece by piece."""
    left = length
    while left is None or left > 0:
        wanted = piece_bytes if left is None else min(left, piece_bytes)
        piece = relay.get(key, start, wanted)
        if piece:
            yield piece
        if len(piece) < wanted:
            return
        start += wanted
        left = None if left is None else left - wanted


def _counted(rights: RelayRights, bearer: Bearer, pieces: Iterator[bytes]) -> Iterator[bytes]:
    for piece in pieces:
        rights.served_bytes += 0 if bearer.owner else len(piece)
        yield piece


def _put_file(relay: Relay, key: str, file: IO[bytes], piece_bytes: int) -> None:
    if file.tell() <= piece_bytes:
        file.seek(0)
        relay.put(key, file.read())
        return
    file.flush()
    with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped, memoryview(mapped) as content:
        relay.put(key, content)


class _Guard:
    """Lets through who bears a token that counts, and answers the relay's errors in HTTP's words."""

    def __init__(self, rights: RelayRights) -> None:
        self._rights = rights

    def __call__(self, handler: Handler) -> _Endpoint:
        async def guarded(request: Request) -> Response:
            scheme, _, token = request.headers.get("authorization", "").partition(" ")
            bearer = self._rights.bearer(token) if scheme == "Bearer" else None
            if bearer is None:
                return PlainTextResponse("wrong or missing bearer token", 401, {"www-authenticate": "Bearer"})
            try:
                return await handler(request, bearer)
            except RelayError as error:
                return PlainTextResponse(str(error), _status(error))
            except OSError as error:
                return PlainTextResponse(f"{request.url.path}: {error.strerror or error}", 507)
            except ClientDisconnect:
                # Nobody is left to answer, and the half-sent blob was never stored.
                return Response(status_code=400)

        return guarded


def _status(error: RelayError) -> int:
    match error:
        case InvalidKey():
            return 400
        case BlobNotFound():
            return 404
        case BlobConflict():
            return 409
        case RelayUnavailable():
            return 503
        case _:
            return 507
