"""A project's secrets, and its credentials for vendors: written, named, removed; no answer ever has a value.

A secret is a variable in the environment of the runs that the project's people begin or resume from then on. The
processes of its runs have credentials as the variables that the vendors' clients read; workers and reward functions do
not.
"""

from typing import Annotated

import sqlalchemy as sa
from fastapi import APIRouter, Path, Request, Response
from pydantic import BaseModel

from elastic.protocol.api import (
    VENDORS,
    AwsCredentials,
    Listed,
    ModalCredentials,
    ProblemError,
    ProjectCredentials,
    ProjectSecret,
    SecretValue,
    revealed,
)
from elastic.server.api.routes.common import CallerDep, StateDep, project_of, rules
from elastic.server.api.routes.model_route import ModelRoute
from elastic.server.api.writes import WriteDep, WriteRequest, WriteResult
from elastic.server.permissions import Action
from elastic.server.problems import ApiProblem, not_found
from elastic.server.store import secrets
from elastic.server.store.vault import Vault
from elastic.server.vendors import ALLOWED, may_name

router = APIRouter(prefix="/v1/projects/{project}", tags=["secrets"], route_class=ModelRoute)
SecretName = Annotated[str, Path(pattern=r"^[A-Z][A-Z0-9_]{0,63}$")]
Vendor = Annotated[str, Path(max_length=64)]
PER_PROJECT = 64
_READ, _WRITE = rules(Action.SECRETS_READ, "not-found"), rules(Action.SECRETS_WRITE, "not-found")


@router.put("/secrets/{secret}", response_model=ProjectSecret, **_WRITE)
def put(project: str, secret: SecretName, body: SecretValue, write: WriteDep) -> Response:
    """Keep a secret, or give it another value. Processes of runs that begin from now on have it as a variable."""
    if not may_name(secret):
        errors = [ProblemError(pointer="path/secret", detail=f"is no name of a secret; allowed: {ALLOWED}")]
        raise ApiProblem("invalid-request", f"{secret}: is no name of a secret; allowed: {ALLOWED}", errors)
    value = body.value.get_secret_value()
    if "\0" in value:
        errors = [ProblemError(pointer="#/value", detail="has a zero byte, which no variable can have")]
        raise ApiProblem("invalid-request", "value: has a zero byte, which no variable can have", errors)
    return _keep(write, project, secret, body, value)


@router.put("/credentials/aws", response_model=ProjectCredentials, **_WRITE)
def put_aws(project: str, body: AwsCredentials, write: WriteDep) -> Response:
    """Keep the project's credentials at AWS. Processes of runs that begin from now on use them, for `ec2`."""
    return _keep(write, project, "aws", body, revealed(body))


@router.put("/credentials/modal", response_model=ProjectCredentials, **_WRITE)
def put_modal(project: str, body: ModalCredentials, write: WriteDep) -> Response:
    """Keep the project's credentials at Modal. Processes of runs that begin from now on use them."""
    return _keep(write, project, "modal", body, revealed(body))


def _keep(write: WriteRequest, project: str, name: str, body: BaseModel, value: str) -> Response:
    vault = Vault(write.state.settings.home)

    def work(tx: sa.Connection) -> WriteResult:
        found = project_of(tx, write.caller, project)
        kept = {row["name"] for row in secrets.all_of(tx, found)} - VENDORS.keys()
        if len(kept) >= PER_PROJECT and name not in kept | VENDORS.keys():
            raise ApiProblem("invalid-request", f"the project has {len(kept)} secrets; allowed: {PER_PROJECT}")
        secrets.put(tx, found, name, vault.sealed(value))
        (row,) = (row for row in secrets.all_of(tx, found) if row["name"] == name)
        return WriteResult(200, secrets.as_told(row), project=found)

    return write.carry_out(Action.SECRETS_WRITE, body, work, mark=vault.mark(value))


@router.get("/secrets", **_READ)
def list_secrets(project: str, request: Request, caller: CallerDep, state: StateDep) -> Listed[ProjectSecret]:
    """Name a project's secrets, without their values."""
    with state.store.reading() as connection:
        rows = secrets.all_of(connection, project_of(connection, caller, project))
    told = [one for one in map(secrets.as_told, rows) if isinstance(one, ProjectSecret)]
    return Listed(url=request.url.path, data=told, has_more=False)


@router.get("/credentials", **_READ)
def list_credentials(project: str, request: Request, caller: CallerDep, state: StateDep) -> Listed[ProjectCredentials]:
    """Name the vendors that a project has credentials for."""
    with state.store.reading() as connection:
        rows = secrets.all_of(connection, project_of(connection, caller, project))
    told = [one for one in map(secrets.as_told, rows) if isinstance(one, ProjectCredentials)]
    return Listed(url=request.url.path, data=told, has_more=False)


@router.delete("/secrets/{secret}", status_code=204, **_WRITE)
def delete(project: str, secret: SecretName, write: WriteDep) -> Response:
    """Remove a secret. Processes that have it keep it until they end."""
    return _remove(write, project, "secret", secret)


@router.delete("/credentials/{vendor}", status_code=204, **_WRITE)
def delete_credentials(project: str, vendor: Vendor, write: WriteDep) -> Response:
    """Remove the credentials for a vendor. Processes that have them keep them until they end."""
    return _remove(write, project, "credentials", vendor)


def _remove(write: WriteRequest, project: str, what: str, name: str) -> Response:
    def work(tx: sa.Connection) -> WriteResult:
        found = project_of(tx, write.caller, project)
        if (name in VENDORS) is not (what == "credentials") or not secrets.remove(tx, found, name):
            raise not_found(what, name)
        return WriteResult(204, project=found)

    return write.carry_out(Action.SECRETS_WRITE, None, work)
