"""Shared parts of routes: callers, pages, problems, ETags."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Annotated, Any, TypeVar

import sqlalchemy as sa
from fastapi import Depends, Header, Query, Request
from pydantic import BaseModel

from elastic.config import ConfigProblem
from elastic.protocol.api import Listed, Problem
from elastic.server import ids
from elastic.server.api.auth import Caller, CallerDep, RequesterDep, requires
from elastic.server.api.state import ServerState, state_of
from elastic.server.api.writes import etag_of
from elastic.server.intake.submissions import code_in
from elastic.server.permissions import Action
from elastic.server.problems import (
    MEDIA_TYPE,
    TYPES,
    ApiProblem,
    configuration_errors,
    invalid_configuration,
    not_found,
)
from elastic.server.retention.rules import RUN, UNRESUMABLE
from elastic.server.store import people, runs, uploads
from elastic.server.store.pages import LIMIT, LIMIT_MAX, Cursor, Order, page
from elastic.server.store.runs import HostedRunRow
from elastic.server.vendors import profiles_in

R = TypeVar("R", bound=BaseModel)

StateDep = Annotated[ServerState, Depends(state_of)]
IfMatch = Annotated[str | None, Header(description="the ETag of what is edited")]
OnlyProject = Annotated[str | None, Query(max_length=64, description="for keys of no project: only of this one")]
ALWAYS = (
    *(
        "invalid-request",
        "unauthenticated",
        "forbidden",
        "stale-page",
        "request-timeout",
        "too-large",
        "unsupported-media-type",
    ),
    *("misdirected", "internal", "unavailable"),
)

_OF_WRITES = ("idempotency-mismatch",)

__all__ = ["CallerDep", "Cursor", "IfMatch", "OnlyProject", "StateDep", "etag_of"]


def rules(action: Action, *problems: str, **openapi: Any) -> dict[str, Any]:
    """Return the arguments of a route that does `action`: its authorisation, and its possible problems besides the
    general ones."""
    return {
        "dependencies": [Depends(requires(action))],
        "responses": problem_responses(*ALWAYS, *problems, *(_OF_WRITES if action.value.endswith(":write") else ())),
        "openapi_extra": {"x-action": action.value, "security": [{"key": []}], **openapi},
    }


def problem_responses(*kinds: str) -> dict[int | str, dict[str, Any]]:
    """Return the problems that a route may answer with, by status."""
    by_status: dict[int | str, dict[str, Any]] = {}
    for kind in kinds:
        type_ = TYPES[kind]
        found = by_status.setdefault(
            type_.status,
            {"model": Problem, "description": type_.title, "content": {MEDIA_TYPE: {"examples": {}}}},
        )
        found["content"][MEDIA_TYPE]["examples"][kind] = {
            "value": {
                "type": f"/problems/{kind}",
                "title": type_.title,
                "status": type_.status,
                "detail": type_.advice,
                "instance": "/v1/runs",
                "request_id": "req_01JD3K5T7WQ8M2N4P6R8S0V2X4",
            }
        }
    return by_status


def cursor_of(prefix: str) -> Callable[..., Awaitable[Cursor]]:
    """A dependency: the page of a list of things whose ids have this prefix. Raises `ApiProblem`."""

    async def cursor(
        limit: Annotated[int, Query(ge=1, le=LIMIT_MAX)] = LIMIT,
        starting_after: Annotated[str | None, Query(max_length=64, description="an entry's id: older ones")] = None,
        ending_before: Annotated[str | None, Query(max_length=64, description="an entry's id: newer ones")] = None,
    ) -> Cursor:
        if starting_after is not None and ending_before is not None:
            raise ApiProblem("invalid-cursor", "starting_after and ending_before exclude each other")
        for name, value in (("starting_after", starting_after), ("ending_before", ending_before)):
            if value is not None and not ids.is_id(value, prefix):
                raise ApiProblem("invalid-cursor", f"{name}: {value!r} is of no entry of this list")
        return Cursor(limit, starting_after or "", ending_before or "")

    return cursor


def listing(
    request: Request,
    connection: sa.Connection,
    table: sa.FromClause,
    where: Sequence[sa.ColumnElement[bool]],
    cursor: Cursor,
    resource: Callable[[sa.RowMapping], R],
    columns: Sequence[sa.ColumnElement[Any]] = (),
    order: Order | None = None,
) -> Listed[R]:
    """Return a page of the rows of a table that are wanted, as resources. Raises `ApiProblem` where an order is walked
    through backwards."""
    if order is not None and cursor.ending_before:
        raise ApiProblem("invalid-cursor", "ending_before goes with no order; allowed: starting_after")
    rows, has_more = page(connection, table, where, cursor, columns, order)
    return Listed(url=request.url.path, data=[resource(row) for row in rows], has_more=has_more)


def seen_of(
    connection: sa.Connection, caller: Caller, table: sa.FromClause, project: str | None = None
) -> list[sa.ColumnElement[bool]]:
    """Return the condition of the rows that the caller sees, of a table whose rows have projects; with `project` only
    of this one. Raises `ApiProblem`."""
    of = caller.project if project is None else project_of(connection, caller, project)
    return [] if of is None else [table.c.project == of]


def seen(caller: Caller, what: str, id_: str, found: sa.RowMapping | None) -> sa.RowMapping:
    """Return what was found under this id, if the caller sees it. Raises `ApiProblem`."""
    if found is None or not caller.sees(found["project"]):
        raise not_found(what, id_)
    return found


def run_of(connection: sa.Connection, caller: Caller, run: str) -> HostedRunRow:
    """The run with this id, if the caller sees it. Raises `ApiProblem`."""
    found = runs.find(connection, run)
    if found is None or not caller.sees(found.project):
        raise not_found("run", run)
    return found


async def seen_run(run: str, asking: RequesterDep) -> HostedRunRow:
    """The run that the path names. Raises `ApiProblem` where the caller sees no such run."""
    if asking.run is None:
        raise not_found("run", run)
    return asking.run


RunDep = Annotated[HostedRunRow, Depends(seen_run)]


def project_of(connection: sa.Connection, caller: Caller, wanted: str | None) -> str:
    """Return the id of a request's project: the caller's own, or the one that a server-wide key names.

    Raises `ApiProblem`, which does not tell whether another project exists.
    """
    if wanted is None:
        wanted = caller.project or people.DEFAULT_PROJECT
    found = people.project(connection, wanted)
    if found is None or not caller.sees(found["id"]):
        raise not_found("project", wanted)
    return found["id"]


def refuse_profiles(connection: sa.Connection, project: str, config: Mapping[str, Any]) -> None:
    """Raise `ApiProblem` where a run of the server's own user would have its credentials from that user's files."""
    found = people.project(connection, project)
    problems = list(profiles_in(config)) if found is None or found["unix_user"] is None else []
    if problems:
        raise invalid_configuration(configuration_errors(problems))


def refuse_code(connection: sa.Connection, state: ServerState, project: str, config: Mapping[str, Any]) -> None:
    """Raise `ApiProblem` where a configuration names code that would be carried out as the server's own user."""
    found = people.project(connection, project)
    if state.settings.shared_trust or (found is not None and found["unix_user"] is not None):
        return
    words = (
        "names code, which would run as the server's own user; allowed in projects with a unix_user, or on a server "
        "that was started with --shared-trust"
    )
    if problems := [ConfigProblem(words, key) for key in code_in(config)]:
        raise invalid_configuration(configuration_errors(problems))


def refuse_gone(tx: sa.Connection, project: str, config: str) -> None:
    """Raise `ApiProblem` where an upload that a checked configuration names is there no more. Once its row is in the
    store, the upload stays."""
    if (upload := uploads.gone(tx, project, config)) is not None:
        raise ApiProblem("invalid-configuration", f"upload {upload} was deleted meanwhile")


def refuse_retired(id_: str, retired: Mapping[str, str] | None, what: str = "run") -> None:
    """Raise `ApiProblem` for a run or job, as `what` says, without what it would go on from."""
    if gone := [part for part in (RUN, *UNRESUMABLE) if part in (retired or {})]:
        words = "is kept no longer" if RUN in gone else f"has no {' and '.join(gone)} any more"
        named: dict[str, Any] = {what: id_}
        raise ApiProblem("run-retired", f"{id_} {words}", **named)


def check_etag(if_match: str | None, version: int) -> None:
    """Raise `ApiProblem` unless the request names the present version."""
    etag = etag_of(version)
    if if_match is None:
        raise ApiProblem("precondition-required", f"send If-Match with the ETag of what you have read; now {etag}")
    if if_match.strip() not in (etag, "*"):
        raise ApiProblem("precondition-failed", f"If-Match: found {if_match[:100]}; now {etag}")
