"""A project's secrets: written, named, removed; no answer ever has a value.

Each is a variable in the environment of the runs that the project's people begin or resume from then on.
"""

from typing import Annotated

import sqlalchemy as sa
from fastapi import APIRouter, Path, Request, Response

from elastic.protocol.api import Listed, ProblemError, ProjectSecret, SecretValue
from elastic.server.api.routes.common import CallerDep, StateDep, project_of, rules
from elastic.server.api.routes.model_route import ModelRoute
from elastic.server.api.writes import WriteDep, WriteResult
from elastic.server.permissions import Action
from elastic.server.problems import ApiProblem, not_found
from elastic.server.store import secrets
from elastic.server.store.vault import Vault
from elastic.server.vendors import ALLOWED, may_name

router = APIRouter(prefix="/v1/projects/{project}/secrets", tags=["secrets"], route_class=ModelRoute)
SecretName = Annotated[str, Path(pattern=r"^[A-Z][A-Z0-9_]{0,63}$")]
PER_PROJECT = 64


@router.put(
    "/{secret}",
    response_model=ProjectSecret,
    **rules(Action.SECRETS_WRITE, "not-found"),
)
def put(project: str, secret: SecretName, body: SecretValue, write: WriteDep) -> Response:
    """Keep a secret, or give it another value. Processes of runs that begin from now on have it as a variable."""
    if not may_name(secret):
        errors = [ProblemError(pointer="path/secret", detail=f"is no name of a secret; allowed: {ALLOWED}")]
        raise ApiProblem("invalid-request", f"{secret}: is no name of a secret; allowed: {ALLOWED}", errors)
    value = body.value.get_secret_value()
    if "\0" in value:
        errors = [ProblemError(pointer="#/value", detail="has a zero byte, which no variable can have")]
        raise ApiProblem("invalid-request", "value: has a zero byte, which no variable can have", errors)

    vault = Vault(write.state.settings.home)

    def work(tx: sa.Connection) -> WriteResult:
        found = project_of(tx, write.caller, project)
        kept = secrets.all_of(tx, found)
        if len(kept) >= PER_PROJECT and secret not in {row["name"] for row in kept}:
            raise ApiProblem("invalid-request", f"the project has {len(kept)} secrets; allowed: {PER_PROJECT}")
        secrets.put(tx, found, secret, vault.sealed(value))
        (row,) = (row for row in secrets.all_of(tx, found) if row["name"] == secret)
        return WriteResult(200, secrets.as_secret(row), project=found)

    return write.carry_out(Action.SECRETS_WRITE, body, work, mark=vault.mark(value))


@router.get("", **rules(Action.SECRETS_READ, "not-found"))
def list_secrets(project: str, request: Request, caller: CallerDep, state: StateDep) -> Listed[ProjectSecret]:
    """Name a project's secrets, without their values."""
    with state.store.reading() as connection:
        rows = secrets.all_of(connection, project_of(connection, caller, project))
    return Listed(url=request.url.path, data=[secrets.as_secret(row) for row in rows], has_more=False)


@router.delete("/{secret}", status_code=204, **rules(Action.SECRETS_WRITE, "not-found"))
def delete(project: str, secret: SecretName, write: WriteDep) -> Response:
    """Remove a secret. Processes that have it keep it until they end."""

    def work(tx: sa.Connection) -> WriteResult:
        found = project_of(tx, write.caller, project)
        if not secrets.remove(tx, found, secret):
            raise not_found("secret", secret)
        return WriteResult(204, project=found)

    return write.carry_out(Action.SECRETS_WRITE, None, work)
