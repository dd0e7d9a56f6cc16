"""Requests that change something: carried out whole, once for an Idempotency-Key, and noted in the audit log."""

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import sqlalchemy as sa
from fastapi import Request
from fastapi.responses import Response
from pydantic import BaseModel
from sqlalchemy.exc import IntegrityError

from elastic.server.api.auth import Caller
from elastic.server.api.state import ServerState
from elastic.server.permissions import Action
from elastic.server.problems import ApiProblem
from elastic.server.store import audit
from elastic.server.store.database import now_us
from elastic.server.store.tables import idempotency

KEY_CHARACTERS = 255
REPLAYED = "idempotent-replayed"


@dataclass(frozen=True)
class WriteResult:
    """What a request came to. `kept` is what a repetition is answered with, if not the same."""

    status: int
    body: BaseModel | None = None
    headers: Mapping[str, str] = field(default_factory=dict[str, str])
    kept: BaseModel | None = None
    resource: str = ""
    project: str | None = None


def carry_out(
    request: Request,
    state: ServerState,
    caller: Caller,
    action: Action,
    body: BaseModel | None,
    work: Callable[[sa.Connection], WriteResult],
    mark: str = "",
) -> Response:
    """Do `work` in one transaction with the record of its answer: both are durable, or neither is.

    `mark` tells apart what the body does not show of itself, as secrets. Raises what `work` raises, and then nothing
    is kept.
    """
    key = request.headers.get("idempotency-key", "")
    if len(key) > KEY_CHARACTERS:
        raise ApiProblem("invalid-request", f"Idempotency-Key has {len(key)} characters; allowed: {KEY_CHARACTERS}")
    fingerprint = _fingerprint(request, body, mark)
    try:
        response = _once(request, state, caller, action, key, fingerprint, work)
    except IntegrityError:
        # Somebody else was faster with the same key: theirs is the answer now.
        response = _once(request, state, caller, action, key, fingerprint, work)
    state.wake()
    return response


def _once(
    request: Request,
    state: ServerState,
    caller: Caller,
    action: Action,
    key: str,
    fingerprint: str,
    work: Callable[[sa.Connection], WriteResult],
) -> Response:
    with state.store.writing() as tx:
        if key and (former := _recalled(tx, caller.actor, key)) is not None:
            if former["fingerprint"] != fingerprint:
                raise ApiProblem("idempotency-mismatch", f"Idempotency-Key {key!r} came with another request before")
            headers = {**former["headers"], REPLAYED: "true"}
            return _response(former["status"], bytes(former["body"]), headers)
        answer = work(tx)
        content = _json(answer.body)
        if key:
            tx.execute(
                sa.insert(idempotency).values(
                    actor=caller.actor,
                    key=key,
                    fingerprint=fingerprint,
                    status=answer.status,
                    headers=dict(answer.headers),
                    body=_json(answer.kept or answer.body),
                    created_us=now_us(),
                )
            )
        audit.write(
            tx,
            actor=caller.actor,
            action=action,
            resource=answer.resource or request.url.path,
            project=answer.project or caller.project,
            status=answer.status,
            request_id=request.state.request_id,
        )
    return _response(answer.status, content, answer.headers)


def _recalled(tx: sa.Connection, actor: str, key: str) -> sa.RowMapping | None:
    found = sa.select(idempotency).where(idempotency.c.actor == actor, idempotency.c.key == key)
    return tx.execute(found).mappings().first()


def _fingerprint(request: Request, body: BaseModel | None, mark: str) -> str:
    said = [request.method, request.url.path, request.url.query, None if body is None else body.model_dump(mode="json")]
    said += [mark] if mark else []
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()


def _json(body: BaseModel | None) -> bytes:
    return b"" if body is None else body.model_dump_json().encode()


def _response(status: int, content: bytes, headers: Mapping[str, str]) -> Response:
    return Response(content, status, dict(headers), media_type="application/json" if content else None)
