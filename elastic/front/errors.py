"""Errors in the shape that the clients of a route read: Anthropic's below `/v1/messages`, OpenAI's elsewhere."""

from collections.abc import Mapping
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from elastic.protocol.anthropic import errors as anthropic
from elastic.protocol.openai.errors import JSON_TYPE, FrontError

REQUEST_ID = "request_id"
"""What the id of a request is called in the state of its scope."""


def error_response(request: Request, error: FrontError) -> Response:
    path = request.scope["path"]
    if path != anthropic.ROUTE and not path.startswith(f"{anthropic.ROUTE}/"):
        return error.response()
    body = anthropic.body(error, request.scope.get("state", {}).get(REQUEST_ID))
    return Response(body, anthropic.status_of(error), error.headers(), JSON_TYPE)


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, FrontError)
    return error_response(request, error)


async def _not_routed(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    response = error_response(request, FrontError(error.status_code, error.detail))
    response.headers.update(error.headers or {})  # A 405 says what is allowed.
    return response


async def _broken(request: Request, _: Exception) -> Response:
    return error_response(request, FrontError(500, "the front has failed at this request; its log says how"))


ERROR_SHAPES: Mapping[Any, Any] = {FrontError: _refused, HTTPException: _not_routed, Exception: _broken}
"""Handlers of all errors of a front's application."""
