"""Webhooks: made, edited, tried, removed. Their signing secrets are shown once."""

from typing import Annotated

import sqlalchemy as sa
from fastapi import APIRouter, Depends, Path, Request, Response

from elastic.protocol.api import (
    CreatedWebhook,
    Listed,
    NewWebhook,
    ProblemError,
    Webhook,
    WebhookChange,
    WebhookDelivery,
)
from elastic.server import ids
from elastic.server.api.auth import Caller
from elastic.server.api.routes.common import (
    CallerDep,
    Cursor,
    IfMatch,
    StateDep,
    check_etag,
    cursor_of,
    etag_of,
    listing,
    project_of,
    rules,
    seen,
    seen_of,
)
from elastic.server.api.routes.model_route import ModelRoute
from elastic.server.api.writes import WriteDep, WriteResult, created, edited
from elastic.server.permissions import Action
from elastic.server.problems import ApiProblem
from elastic.server.settings import ServerSettings
from elastic.server.store import webhooks
from elastic.server.store.tables import deliveries as deliveries_table
from elastic.server.store.tables import webhooks as webhooks_table
from elastic.server.store.vault import Vault
from elastic.server.webhooks import new_secret
from elastic.server.webhooks.addresses import UnsafeTarget, checked

router = APIRouter(prefix="/v1/webhooks", tags=["webhooks"], route_class=ModelRoute)
WebhookId = Annotated[str, Path(max_length=64)]


@router.post(
    "",
    status_code=201,
    response_model=CreatedWebhook,
    **rules(Action.WEBHOOKS_WRITE, "not-found"),
)
def create(body: NewWebhook, write: WriteDep, tx: sa.Connection) -> WriteResult:
    """Have a URL told what becomes of the project's runs. The secret that messages are signed with is shown once."""
    _check_url(write.state.settings, body.url)
    secret = new_secret()
    project = project_of(tx, write.caller, body.project)
    sealed = Vault(write.state.settings.home).sealed(secret)
    row = webhooks.insert(tx, project, body.url, list(dict.fromkeys(body.events)), sealed)
    made = webhooks.as_webhook(row).model_dump()
    kept = CreatedWebhook(**made, secret=None)
    shown = CreatedWebhook(**made, secret=secret)
    return created(f"{router.prefix}/{row['id']}", shown, project, row["version"], kept)


@router.get("", **rules(Action.WEBHOOKS_READ, "invalid-cursor"))
def list_webhooks(
    request: Request, caller: CallerDep, state: StateDep, cursor: Annotated[Cursor, Depends(cursor_of(ids.WEBHOOK))]
) -> Listed[Webhook]:
    """List webhooks, newest first, without their secrets."""
    with state.store.reading() as connection:
        return listing(
            request,
            connection,
            webhooks_table,
            seen_of(connection, caller, webhooks_table),
            cursor,
            webhooks.as_webhook,
        )


@router.get("/{webhook}", **rules(Action.WEBHOOKS_READ, "not-found"))
def show(webhook: WebhookId, caller: CallerDep, state: StateDep, response: Response) -> Webhook:
    """Show a webhook, without its secret."""
    with state.store.reading() as connection:
        found = _webhook_of(connection, caller, webhook)
    response.headers["etag"] = etag_of(found["version"])
    return webhooks.as_webhook(found)


@router.patch(
    "/{webhook}",
    response_model=Webhook,
    **rules(Action.WEBHOOKS_WRITE, "not-found", "precondition-failed", "precondition-required"),
)
def change(
    webhook: WebhookId, body: WebhookChange, write: WriteDep, tx: sa.Connection, if_match: IfMatch = None
) -> WriteResult:
    """Edit a webhook, or switch it off and on. What was to be told meanwhile is not sent later."""
    if body.url is not None:
        _check_url(write.state.settings, body.url)
    found = _webhook_of(tx, write.caller, webhook)
    check_etag(if_match, found["version"])
    changes = body.model_dump(include={"url", "events"}, exclude_unset=True, exclude_none=True)
    if body.enabled is not None:
        changes["disabled"] = None if body.enabled else found["disabled"] or webhooks.DISABLED
    if body.url is not None or body.enabled:
        changes |= {"failures": 0, "open_until_us": 0}
    webhooks.change(tx, found["id"], **changes)
    now = _webhook_of(tx, write.caller, webhook)
    return edited(webhooks.as_webhook(now), now["version"], now["project"])


@router.delete("/{webhook}", status_code=204, **rules(Action.WEBHOOKS_WRITE, "not-found"))
def delete(webhook: WebhookId, write: WriteDep, tx: sa.Connection) -> WriteResult:
    """Remove a webhook, with its messages that are still to be sent."""
    found = _webhook_of(tx, write.caller, webhook)
    webhooks.remove(tx, found["id"])
    return WriteResult(204, project=found["project"])


@router.post(
    "/{webhook}/test",
    status_code=202,
    response_model=WebhookDelivery,
    **rules(Action.WEBHOOKS_WRITE, "not-found"),
)
def try_out(webhook: WebhookId, write: WriteDep, tx: sa.Connection) -> WriteResult:
    """Send a message of type `webhook.test`, signed and repeated as any other."""
    found = _webhook_of(tx, write.caller, webhook)
    row = webhooks.enqueue(tx, found["id"], webhooks.TEST, {"webhook": found["id"]})
    return WriteResult(202, webhooks.as_delivery(row), project=found["project"])


@router.get("/{webhook}/deliveries", **rules(Action.WEBHOOKS_READ, "not-found", "invalid-cursor"))
def list_deliveries(
    webhook: WebhookId,
    request: Request,
    caller: CallerDep,
    state: StateDep,
    cursor: Annotated[Cursor, Depends(cursor_of(ids.DELIVERY))],
) -> Listed[WebhookDelivery]:
    """List what a webhook was told in the last 30 days, or is still to be told, newest first."""
    with state.store.reading() as connection:
        found = _webhook_of(connection, caller, webhook)
        where = [deliveries_table.c.webhook == found["id"]]
        return listing(request, connection, deliveries_table, where, cursor, webhooks.as_delivery)


def _webhook_of(connection: sa.Connection, caller: Caller, webhook: str) -> sa.RowMapping:
    return seen(caller, "webhook", webhook, webhooks.find(connection, webhook))


def _check_url(settings: ServerSettings, url: str) -> None:
    """Names are resolved and checked whenever something is sent."""
    try:
        checked(url, settings.webhook_networks)
    except UnsafeTarget as error:
        raise ApiProblem(
            "invalid-request", f"url: {error}", [ProblemError(pointer="#/url", detail=str(error))]
        ) from None
