"""Browsers sign in, and hold a cookie from then on: their event streams send no headers."""

import sqlalchemy as sa
from fastapi import APIRouter, Request, Response

from elastic.protocol.api import Me, SessionChange
from elastic.protocol.http_server import presented_key
from elastic.server.api.auth import COOKIE, authenticated
from elastic.server.api.routes.common import CallerDep, StateDep, rules
from elastic.server.api.routes.me import me
from elastic.server.api.routes.model_route import ModelRoute
from elastic.server.api.state import ServerState
from elastic.server.permissions import Action
from elastic.server.problems import ApiProblem, not_found
from elastic.server.store import audit, members, sessions

router = APIRouter(prefix="/v1/session", tags=["session"], route_class=ModelRoute)


@router.post("", status_code=201, **rules(Action.RUNS_READ))
def sign_in(request: Request, caller: CallerDep, state: StateDep, response: Response) -> Me:
    """Sign a browser in with the key that this request shows: it gets a cookie, and the token for its writes."""
    if not presented_key(request.headers):
        raise ApiProblem("unauthenticated", "sign in with a key; a session makes no other one")
    with state.store.writing() as tx:
        secret = sessions.begin(tx, state.settings.session_s, key=caller.key)
        _note(tx, request, caller, 201, caller.project)
    hand_cookie(request, response, state, secret)
    return me(caller, state).model_copy(update={"csrf_token": sessions.csrf_token(secret)})


@router.put("", **rules(Action.RUNS_READ, "not-found", "not-a-person"))
def change(request: Request, body: SessionChange, caller: CallerDep, state: StateDep) -> Me:
    """Go on in another project that one is a member of."""
    if caller.member is None or caller.key is not None:
        raise ApiProblem("not-a-person", "this session was begun with a key, which is of one project")
    with state.store.writing() as tx:
        held = members.memberships(tx, caller.member)
        wanted = next((one for one in held if body.project in (one.project, one.project_name)), None)
        if wanted is None:
            raise not_found("project", body.project)
        sessions.change_member(tx, request.cookies.get(COOKIE, ""), wanted.member)
        _note(tx, request, caller, 200, wanted.project)
        changed = authenticated(tx, request)
    return me(changed, state)


@router.delete("", status_code=204, **rules(Action.RUNS_READ))
def sign_out(request: Request, caller: CallerDep, state: StateDep) -> Response:
    """Sign the browser out: its cookie is worth nothing from now on."""
    with state.store.writing() as tx:
        sessions.end(tx, request.cookies.get(COOKIE, ""))
        _note(tx, request, caller, 204, caller.project)
    response = Response(status_code=204)
    response.delete_cookie(COOKIE, httponly=True, samesite="strict")
    return response


def hand_cookie(request: Request, response: Response, state: ServerState, secret: str) -> None:
    """Give the browser the session's cookie: for no script to read, and for no other site to send."""
    lasts_s = int(state.settings.session_s)
    response.set_cookie(COOKIE, secret, max_age=lasts_s, httponly=True, samesite="strict", secure=is_https(request))


def is_https(request: Request) -> bool:
    """Whether the browser came by HTTPS, perhaps to a proxy in front."""
    return request.url.scheme == "https" or request.headers.get("x-forwarded-proto") == "https"


def _note(tx: sa.Connection, request: Request, caller: CallerDep, status: int, project: str | None) -> None:
    audit.write(
        tx,
        actor=caller.actor,
        action=Action.RUNS_READ,
        resource=request.url.path,
        project=project,
        status=status,
        request_id=request.state.request_id,
    )
