"""Refusals of requests in the shape that OpenAI's clients read: `{"error": {message, type, param, code}}`."""

import math
from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

CODES = {
    400: "invalid_request",
    401: "invalid_api_key",
    403: "permission_denied",
    404: "not_found",
    405: "method_not_allowed",
    408: "request_timeout",
    409: "conflict",
    410: "gone",
    413: "request_too_large",
    415: "unsupported_media_type",
    421: "misdirected_request",
    429: "rate_limit_exceeded",
    500: "server_error",
    502: "server_error",
    503: "overloaded",
}
"""`error.code` where there is no better one; to OpenAI's clients it is a string."""
JSON_TYPE = "application/json"
RETRY_AFTER_S = {429: 1.0, 503: 1.0}
"""When a client shall come again, where nothing else is said."""
TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    410: "gone_error",
    429: "rate_limit_error",
}
"""`error.type` by status. What is left is `invalid_request_error`, or from 500 on `server_error`. LiteLLM takes all
that bears `invalid_request_error` for a 400."""


class FrontError(Exception):
    """A request that is not served: its HTTP status, and the field and the code that clients branch on.

    `retry` overrules what a client would do by itself with this status: OpenAI's ask again after 408, 409, 429 and
    what is from 500 on. `closes` ends the connection, so that the client comes back by another one.
    """

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        *,
        retry: bool | None = None,
        retry_after_s: float | None = None,
        closes: bool = False,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code or CODES.get(status)
        self.retry = retry
        self.closes = closes
        self.retry_after_s = RETRY_AFTER_S.get(status) if retry_after_s is None else retry_after_s

    @property
    def said(self) -> str:
        """The message. An unpaired surrogate, which a client can have named a field by, is no UTF-8."""
        return str(self).encode(errors="replace").decode()

    def told(self) -> dict[str, Any]:
        """What is in the answer's `error`."""
        kind = TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"message": self.said, "type": kind, "param": self.param, "code": self.code}

    def body(self) -> bytes:
        return msgspec.json.encode({"error": self.told()})

    def headers(self) -> dict[str, str]:
        headers: dict[str, str] = {}
        if self.retry_after_s is not None:
            headers["Retry-After"] = str(math.ceil(self.retry_after_s))
        if self.retry is not None:
            headers["x-should-retry"] = "true" if self.retry else "false"
        if self.closes:
            headers["connection"] = "close"
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return headers

    def response(self) -> Response:
        return Response(self.body(), self.status, self.headers(), JSON_TYPE)


def too_long(context_tokens: int, prompt_tokens: int, output_tokens: int = 0) -> FrontError:
    """The refusal of a prompt that the model cannot take: clients match the beginning of its message, or its code."""
    asked = f"{prompt_tokens} of prompt and {output_tokens} of output were asked for"
    if not output_tokens:
        asked = f"the prompt has {prompt_tokens}, which leaves none for an answer"
    said = f"This model's maximum context length is {context_tokens} tokens. However, {asked}."
    return FrontError(400, said, "max_tokens" if output_tokens else None, "context_length_exceeded")


def no_such_model(asked: str, *served: str) -> FrontError:
    there = f"there is {served[0]!r}" if len(served) == 1 else f"there are {', '.join(map(repr, served))}"
    return FrontError(404, f"no model {asked!r:.300}; {there}", "model", "model_not_found")


def openai_error(status: int, message: str) -> Response:
    """An answer in the shape that OpenAI's clients read."""
    return FrontError(status, message).response()


async def _refused(_: Request, error: Exception) -> Response:
    assert isinstance(error, FrontError)
    return error.response()


async def _not_routed(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return openai_error(error.status_code, error.detail)


ERROR_HANDLERS: Mapping[Any, Any] = {FrontError: _refused, HTTPException: _not_routed}
"""Error handlers that give errors the shape that OpenAI's clients read."""
