"""The API's description: as FastAPI makes it, with an example for every body and the ways to show a key."""

import functools
from collections.abc import Iterator
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from elastic.server.api import routes
from elastic.server.api.auth import COOKIE, CSRF_HEADER
from elastic.server.api.examples import example
from elastic.server.problems import MEDIA_TYPE

DESCRIPTION = """Submit runs of agentic reinforcement learning, watch them, stop and resume them.

Every error is `application/problem+json` (RFC 9457); its `type` says what happened, docs/server.md what to do.
Lists are pages, newest first: go on with `starting_after` the last id. A POST with an `Idempotency-Key` may be
repeated.
"""
SCHEMES = {
    "key": {"type": "http", "scheme": "bearer", "description": "a key, such as `elastic_3f9a…`"},
    "header": {"type": "apiKey", "in": "header", "name": "x-api-key"},
    "session": {
        "type": "apiKey",
        "in": "cookie",
        "name": COOKIE,
        "description": f"of a browser that has signed in; its writes carry the session's token as `{CSRF_HEADER}`",
    },
}


def install(app: FastAPI) -> None:
    """Have `app.openapi` describe the application."""
    app.openapi = lambda: _description(app.version)


@functools.cache
def _description(version: str) -> dict[str, Any]:
    """Describes all routes, once a process: that takes a second, and every application has the same."""
    schema = get_openapi(title="Elastic", version=version, description=DESCRIPTION, routes=routes.all_routes())
    schema.setdefault("components", {})["securitySchemes"] = SCHEMES
    for operation in operations(schema):
        _polish(operation, schema["components"]["schemas"])
    schema["components"]["schemas"].pop("HTTPValidationError", None)
    schema["components"]["schemas"].pop("ValidationError", None)
    return schema


def operations(schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for path in schema["paths"].values():
        yield from (
            operation for method, operation in path.items() if method in ("get", "post", "put", "patch", "delete")
        )


def _polish(operation: dict[str, Any], schemas: dict[str, Any]) -> None:
    """Faults of a request are problems here (400), not what FastAPI says of itself (422)."""
    responses = operation["responses"]
    if "HTTPValidationError" in str(responses.get("422", "")):
        del responses["422"]
    if operation.get("security"):
        operation["security"] = [{"key": []}, {"header": []}, {"session": []}]
    for parameter in operation.get("parameters", ()):
        # Who leaves it out is told so (428), with the tag that there is.
        if parameter["name"] == "if-match":
            parameter |= {"required": True, "schema": {"type": "string"}}
    for response in responses.values():
        content = response.get("content", {})
        if MEDIA_TYPE in content and (plain := content.pop("application/json", None)) is not None:
            content[MEDIA_TYPE]["schema"] = plain["schema"]
    bodies = [operation.get("requestBody", {}), *(body for status, body in responses.items() if status[0] == "2")]
    for body in bodies:
        for content in body.get("content", {}).values():
            if content.get("schema") and "example" not in content:
                content["example"] = example(content["schema"], schemas)
