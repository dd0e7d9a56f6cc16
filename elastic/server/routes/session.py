"""Browsers sign in by a key, and hold a cookie from then on: their event streams send no headers."""

import sqlalchemy as sa
from fastapi import APIRouter, Request, Response

from elastic.resources import Me
from elastic.server.auth import COOKIE, presented_key
from elastic.server.permissions import Action
from elastic.server.problems import ApiProblem
from elastic.server.routes.common import CallerDep, StateDep, rules
from elastic.server.routes.health import me
from elastic.server.store import audit, sessions

router = APIRouter(prefix="/v1/session", tags=["session"])


@router.post("", status_code=201, **rules(Action.RUNS_READ))
def sign_in(request: Request, caller: CallerDep, state: StateDep, response: Response) -> Me:
    """Sign a browser in with the key that this request shows: it gets a cookie, and the token for its writes."""
    if not presented_key(request):
        raise ApiProblem("unauthenticated", "sign in with a key; a session makes no other one")
    with state.store.writing() as tx:
        secret = sessions.begin(tx, caller.key, state.settings.session_s)
        _note(tx, request, caller, 201)
    secure = request.url.scheme == "https" or request.headers.get("x-forwarded-proto") == "https"
    response.set_cookie(
        COOKIE, secret, max_age=int(state.settings.session_s), httponly=True, samesite="strict", secure=secure
    )
    return me(caller).model_copy(update={"csrf_token": sessions.csrf_token(secret)})


@router.delete("", status_code=204, **rules(Action.RUNS_READ))
def sign_out(request: Request, caller: CallerDep, state: StateDep) -> Response:
    """Sign the browser out: its cookie is worth nothing from now on."""
    with state.store.writing() as tx:
        sessions.end(tx, request.cookies.get(COOKIE, ""))
        _note(tx, request, caller, 204)
    response = Response(status_code=204)
    response.delete_cookie(COOKIE, httponly=True, samesite="strict")
    return response


def _note(tx: sa.Connection, request: Request, caller: CallerDep, status: int) -> None:
    audit.write(
        tx,
        actor=caller.key,
        action=Action.RUNS_READ,
        resource=request.url.path,
        project=caller.project,
        status=status,
        request_id=request.state.request_id,
    )
