"""A project's credentials for vendors: written, named, removed; no answer ever has their fields.

The processes of its runs have them as the variables that the vendors' clients read; workers and reward functions do
not.
"""

from typing import Annotated

import sqlalchemy as sa
from fastapi import APIRouter, Path, Request, Response

from elastic.protocol.api import VENDORS, AwsCredentials, Listed, ModalCredentials, ProjectCredentials, revealed
from elastic.server.api.routes.common import CallerDep, StateDep, project_of, rules
from elastic.server.api.routes.model_route import ModelRoute
from elastic.server.api.writes import WriteDep, WriteRequest, WriteResult
from elastic.server.permissions import Action
from elastic.server.problems import not_found
from elastic.server.store import secrets
from elastic.server.store.vault import Vault

router = APIRouter(prefix="/v1/projects/{project}/credentials", tags=["secrets"], route_class=ModelRoute)
Vendor = Annotated[str, Path(max_length=64)]


@router.put("/aws", response_model=ProjectCredentials, **rules(Action.SECRETS_WRITE, "not-found"))
def put_aws(project: str, body: AwsCredentials, write: WriteDep) -> Response:
    """Keep the project's credentials at AWS. Processes of runs that begin from now on use them, for `ec2`."""
    return _put("aws", project, body, write)


@router.put("/modal", response_model=ProjectCredentials, **rules(Action.SECRETS_WRITE, "not-found"))
def put_modal(project: str, body: ModalCredentials, write: WriteDep) -> Response:
    """Keep the project's credentials at Modal. Processes of runs that begin from now on use them."""
    return _put("modal", project, body, write)


def _put(vendor: str, project: str, body: AwsCredentials | ModalCredentials, write: WriteRequest) -> Response:
    vault, value = Vault(write.state.settings.home), revealed(body)

    def work(tx: sa.Connection) -> WriteResult:
        found = project_of(tx, write.caller, project)
        secrets.put(tx, found, vendor, vault.sealed(value))
        (row,) = (row for row in secrets.credentials_of(tx, found) if row["name"] == vendor)
        return WriteResult(200, secrets.as_credentials(row), project=found)

    return write.carry_out(Action.SECRETS_WRITE, body, work, mark=vault.mark(value))


@router.get("", **rules(Action.SECRETS_READ, "not-found"))
def list_credentials(project: str, request: Request, caller: CallerDep, state: StateDep) -> Listed[ProjectCredentials]:
    """Name the vendors that a project has credentials for."""
    with state.store.reading() as connection:
        rows = secrets.credentials_of(connection, project_of(connection, caller, project))
    return Listed(url=request.url.path, data=[secrets.as_credentials(row) for row in rows], has_more=False)


@router.delete("/{vendor}", status_code=204, **rules(Action.SECRETS_WRITE, "not-found"))
def delete(project: str, vendor: Vendor, write: WriteDep) -> Response:
    """Remove the credentials for a vendor. Processes that have them keep them until they end."""

    def work(tx: sa.Connection) -> WriteResult:
        found = project_of(tx, write.caller, project)
        if vendor not in VENDORS or not secrets.remove(tx, found, vendor):
            raise not_found("credentials", vendor)
        return WriteResult(204, project=found)

    return write.carry_out(Action.SECRETS_WRITE, None, work)
