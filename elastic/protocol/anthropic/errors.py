"""Refusals of requests as Anthropic's clients read them: `{"type": "error", "error": {type, message}, request_id}`."""

from typing import Any

import msgspec

from elastic.protocol.openai.errors import FrontError

ROUTE = "/v1/messages"
"""Below which errors have this shape."""
OVERLOADED = 529
TYPES = {
    401: "authentication_error",
    402: "billing_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    OVERLOADED: "overloaded_error",
}
"""`error.type` by status. What is left is `invalid_request_error`, or from 500 on `api_error`."""
TOO_LONG = "context_length_exceeded"


def status_of(error: FrontError) -> int:
    """A server that can take no more says 529."""
    return OVERLOADED if error.status == 503 else error.status


def told(error: FrontError) -> dict[str, Any]:
    """The `error` of an answer. Clients find a prompt that is too long by how its message begins."""
    status = status_of(error)
    kind = TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    message = f"prompt is too long: {error.said}" if error.code == TOO_LONG else error.said
    return {"type": kind, "message": message}


def body(error: FrontError, request_id: str | None = None) -> bytes:
    return msgspec.json.encode({"type": "error", "error": told(error), "request_id": request_id})
