"""Serves any relay over HTTP: `GET /blobs?prefix=`, and GET (with ranges), PUT and DELETE of `/blobs/{key}`."""

import re
import secrets
from collections.abc import Awaitable, Callable

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from elastic.weights.errors import BlobConflict, BlobNotFound, InvalidKey, RelayError, RelayUnavailable
from elastic.weights.relay import Relay, check_key

_RANGE = re.compile(r"bytes=(\d+)-(\d*)")

Handler = Callable[[Request], Awaitable[Response]]


def relay_app(relay: Relay, token: str, blob_bytes_max: int = 64 * 2**30) -> Starlette:
    """An ASGI application for `relay`; every request must bear `token`. It holds one blob a PUT in memory."""
    if not token:
        raise ValueError("relay_app: needs a token; without one anybody could replace the weights")

    async def list_keys(request: Request) -> Response:
        return JSONResponse(await run_in_threadpool(relay.list_keys, request.query_params.get("prefix", "")))

    async def get(request: Request) -> Response:
        key = check_key(request.path_params["key"])
        wanted = _RANGE.fullmatch(request.headers.get("range", ""))
        if wanted is None:
            return Response(await run_in_threadpool(relay.get, key), media_type="application/octet-stream")
        start = int(wanted[1])
        length = int(wanted[2]) - start + 1 if wanted[2] else None
        content = await run_in_threadpool(relay.get, key, start, length) if length is None or length > 0 else b""
        if not content:
            return PlainTextResponse(f"{key}: nothing at byte {start}", 416)
        headers = {"content-range": f"bytes {start}-{start + len(content) - 1}/*"}
        return Response(content, 206, headers, "application/octet-stream")

    async def put(request: Request) -> Response:
        key = check_key(request.path_params["key"])
        parts: list[bytes] = []
        size = 0
        async for part in request.stream():
            size += len(part)
            if size > blob_bytes_max:
                return PlainTextResponse(f"{key}: more than {blob_bytes_max} bytes", 413)
            parts.append(part)
        await run_in_threadpool(relay.put, key, *parts)
        return Response(status_code=204)

    async def delete(request: Request) -> Response:
        await run_in_threadpool(relay.delete, check_key(request.path_params["key"]))
        return Response(status_code=204)

    guarded = _Guard(token)
    return Starlette(
        routes=[
            Route("/blobs", guarded(list_keys), methods=["GET"]),
            Route("/blobs/{key:path}", guarded(get), methods=["GET"]),
            Route("/blobs/{key:path}", guarded(put), methods=["PUT"]),
            Route("/blobs/{key:path}", guarded(delete), methods=["DELETE"]),
        ]
    )


class _Guard:
    """Lets through who bears the token, and answers the relay's errors in HTTP's words."""

    def __init__(self, token: str) -> None:
        self._expected = f"Bearer {token}".encode()

    def __call__(self, handler: Handler) -> Handler:
        async def guarded(request: Request) -> Response:
            offered = request.headers.get("authorization", "").encode()
            if not secrets.compare_digest(offered, self._expected):
                return PlainTextResponse("wrong or missing bearer token", 401, {"www-authenticate": "Bearer"})
            try:
                return await handler(request)
            except RelayError as error:
                return PlainTextResponse(str(error), _status(error))
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
