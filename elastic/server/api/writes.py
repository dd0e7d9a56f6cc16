"""Requests that change something: carried out whole, once for an Idempotency-Key, and noted in the audit log."""

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated

import sqlalchemy as sa
from fastapi import Depends, Header, Request
from fastapi.responses import Response
from pydantic import BaseModel
from sqlalchemy.exc import IntegrityError

from elastic.server.api.auth import Caller, CallerDep, refuse_changed
from elastic.server.api.state import ServerState, state_of
from elastic.server.permissions import Action
from elastic.server.problems import ApiProblem
from elastic.server.store import audit
from elastic.server.store.database import now_us
from elastic.server.store.tables import idempotency

KEY_CHARACTERS = 255
REPLAYED = "idempotent-replayed"


@dataclass(frozen=True)
class WriteResult:
    """The result of a request. `kept` replaces `body` in the answer to repetitions, if set."""

    status: int
    body: BaseModel | None = None
    headers: Mapping[str, str] = field(default_factory=dict[str, str])
    kept: BaseModel | None = None
    resource: str = ""
    project: str | None = None


def created(
    place: str, body: BaseModel, project: str | None, version: int | None = None, kept: BaseModel | None = None
) -> WriteResult:
    """The result of a request that has made what is now at `place`."""
    headers = {"location": place, **({} if version is None else {"etag": etag_of(version)})}
    return WriteResult(201, body, headers, kept=kept, resource=place, project=project)


def edited(body: BaseModel, version: int, project: str | None = None) -> WriteResult:
    """The result of a request that has changed something to this version."""
    return WriteResult(200, body, {"etag": etag_of(version)}, project=project)


def etag_of(version: int) -> str:
    return f'"{version}"'


@dataclass(frozen=True)
class WriteRequest:
    """A request that changes something. `key` is its Idempotency-Key, empty without one."""

    request: Request
    state: ServerState
    caller: Caller
    key: str

    def carry_out(
        self, action: Action, body: BaseModel | None, work: Callable[[sa.Connection], WriteResult], mark: str = ""
    ) -> Response:
        """Do `work` in one transaction with the record of its answer: both are durable, or neither is.

        `mark` stands for parts of the request that `body` does not show, such as a secret. Raises what `work` raises;
        nothing is kept then.
        """
        fingerprint = self.fingerprint(body, mark)
        try:
            response = self._once(action, fingerprint, work)
        except IntegrityError:
            # Another request with the same key was faster: its record is the answer now.
            response = self._once(action, fingerprint, work)
        self.state.wake()
        return response

    def fingerprint(self, body: BaseModel | None, mark: str = "") -> str:
        """Return what tells this request from others."""
        return _fingerprint(self.request, body, mark)

    def answered(self, body: BaseModel | None, mark: str = "") -> Response | None:
        """Return the answer of the request that this one repeats; None for one that repeats none.

        A route that has an effect besides the store's asks this before it. Raises `ApiProblem` if the key came with
        another request.
        """
        with self.state.store.reading() as connection:
            return self._former(connection, self.fingerprint(body, mark))

    def refuse_changed(self) -> None:
        """Raises `ApiProblem` where the caller may not do this any more."""
        with self.state.store.reading() as connection:
            refuse_changed(connection, self.request, self.caller)

    def _former(self, connection: sa.Connection, fingerprint: str) -> Response | None:
        # The rest of the request may have come long after its head.
        refuse_changed(connection, self.request, self.caller)
        former = _recalled(connection, self.caller.actor, self.key) if self.key else None
        if former is None:
            return None
        if former["fingerprint"] != fingerprint:
            raise ApiProblem("idempotency-mismatch", f"Idempotency-Key {self.key!r} came with another request before")
        return _response(former["status"], bytes(former["body"]), {**former["headers"], REPLAYED: "true"})

    def _once(self, action: Action, fingerprint: str, work: Callable[[sa.Connection], WriteResult]) -> Response:
        with self.state.store.writing() as tx:
            if (former := self._former(tx, fingerprint)) is not None:
                return former
            answer = work(tx)
            content = _json(answer.body)
            if self.key:
                tx.execute(
                    sa.insert(idempotency).values(
                        actor=self.caller.actor,
                        key=self.key,
                        fingerprint=fingerprint,
                        status=answer.status,
                        headers=dict(answer.headers),
                        body=_json(answer.kept or answer.body),
                        created_us=now_us(),
                    )
                )
            audit.write(
                tx,
                actor=self.caller.actor,
                action=action,
                resource=answer.resource or self.request.url.path,
                project=answer.project or self.caller.project,
                status=answer.status,
                request_id=self.request.state.request_id,
            )
        return _response(answer.status, content, answer.headers)


async def _write_request(
    request: Request,
    caller: CallerDep,
    state: Annotated[ServerState, Depends(state_of)],
    idempotency_key: Annotated[
        str | None,
        Header(
            max_length=KEY_CHARACTERS,
            description="a repetition under the same key is answered as the first time, for a day",
        ),
    ] = None,
) -> WriteRequest:
    return WriteRequest(request, state, caller, idempotency_key or "")


WriteDep = Annotated[WriteRequest, Depends(_write_request)]


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
