"""Webhooks and their deliveries in the store.

A delivery is recorded in the transaction of its event, so that a server that dies in between loses none.
"""

import json
from typing import Any, Literal, NamedTuple

import sqlalchemy as sa

from elastic.protocol.api import WEBHOOK_EVENTS, Webhook, WebhookDelivery
from elastic.server import ids
from elastic.server.clock import rfc3339
from elastic.server.store.database import now_us
from elastic.server.store.rows import changed, first, inserted, told
from elastic.server.store.tables import deliveries, webhooks
from elastic.system.outages import backoff

WAITING, DELIVERED, FAILED = "waiting", "delivered", "failed"
TEST = "webhook.test"
WAITS_S = (5, 300, 1_800, 7_200, 18_000, 36_000, 50_400, 72_000, 86_400)
"""Waiting time before each retry. After the last retry a delivery has failed."""
CLAIM_S = 60
"""How long a claimed delivery is reserved for the server that claimed it."""
DISABLED = "switched off"
OPENS_AFTER = 5
"""Failed attempts in a row, of whatever deliveries, after which a webhook's circuit opens."""
OPEN_BASE_S, OPEN_MAX_S = 30, 3_600
"""How long it stays open: twice as long after each probe that fails, up to the most."""
GIVEN_UP_S = sum(WAITS_S) + 86_400
"""Age at which a delivery that still waits has failed, whether its circuit let it be tried or not."""
NOT_REACHED = "not sent: its receiver has not answered others for too long"


def insert(tx: sa.Connection, project: str, url: str, events: list[str], secret: bytes) -> sa.RowMapping:
    row = {"id": ids.new_id(ids.WEBHOOK), "project": project, "url": url, "events": events, "secret": secret}
    return inserted(tx, webhooks, **row, version=1, created_us=now_us())


def find(connection: sa.Connection, id_: str) -> sa.RowMapping | None:
    return first(connection, sa.select(webhooks).where(webhooks.c.id == id_))


def change(tx: sa.Connection, id_: str, **changes: Any) -> None:
    changed(tx, webhooks, id_, changes)


def remove(tx: sa.Connection, id_: str) -> None:
    tx.execute(sa.delete(deliveries).where(deliveries.c.webhook == id_))
    tx.execute(sa.delete(webhooks).where(webhooks.c.id == id_))


def announce(tx: sa.Connection, project: str, type_: str, data: dict[str, Any]) -> None:
    """Record deliveries of an event for every webhook of the project that subscribes to it."""
    if type_ not in WEBHOOK_EVENTS:
        return
    wanted = sa.select(webhooks).where(webhooks.c.project == project, webhooks.c.disabled.is_(None))
    for row in tx.execute(wanted).mappings().all():
        if type_ in row["events"]:
            enqueue(tx, row["id"], type_, data)


def enqueue(tx: sa.Connection, webhook: str, type_: str, data: dict[str, Any]) -> sa.RowMapping:
    at_us = now_us()
    body = json.dumps({"type": type_, "timestamp": rfc3339(at_us), "data": data})
    row = {"id": ids.new_id(ids.DELIVERY), "webhook": webhook, "type": type_, "body": body, "state": WAITING}
    return inserted(tx, deliveries, **row, created_us=at_us)


class DueWebhook(NamedTuple):
    """A webhook with something to send now."""

    id: str
    project: str


def due(connection: sa.Connection) -> list[DueWebhook]:
    """Return the webhooks with due deliveries, longest due first, but for those that are being sent to or whose
    circuit is open."""
    found = (
        sa.select(webhooks.c.id, webhooks.c.project)
        .join(deliveries, webhooks.c.id == deliveries.c.webhook)
        .where(_IS_WAITING, deliveries.c.not_before_us <= now_us(), _is_free(now_us()))
        .group_by(webhooks.c.id, webhooks.c.project)
        .order_by(sa.func.min(deliveries.c.not_before_us), sa.func.min(deliveries.c.id))
    )
    return [DueWebhook(*row) for row in connection.execute(found)]


def claim(tx: sa.Connection, webhook: str) -> sa.RowMapping | None:
    """Return the webhook's longest due delivery with its URL and secret, and reserve both for a while."""
    at_us = now_us()
    until_us = at_us + CLAIM_S * 1_000_000
    oldest = (
        sa.select(deliveries, webhooks.c.project, webhooks.c.url, webhooks.c.secret)
        .join(webhooks, webhooks.c.id == deliveries.c.webhook)
        .where(webhooks.c.id == webhook, _IS_WAITING, deliveries.c.not_before_us <= at_us, _is_free(at_us))
        .order_by(deliveries.c.not_before_us, deliveries.c.id)
        .limit(1)
    )
    row = first(tx, oldest)
    if row is not None:
        tx.execute(sa.update(webhooks).where(webhooks.c.id == webhook).values(claimed_until_us=until_us))
        tx.execute(sa.update(deliveries).where(deliveries.c.id == row["id"]).values(not_before_us=until_us))
    return row


_IS_WAITING = deliveries.c.state == WAITING


def _is_free(at_us: int) -> sa.ColumnElement[bool]:
    return webhooks.c.disabled.is_(None) & (webhooks.c.claimed_until_us <= at_us) & (webhooks.c.open_until_us <= at_us)


def delivered(tx: sa.Connection, row: sa.RowMapping, answer: str) -> None:
    _settle(tx, row, DELIVERED, answer, 0)
    _release(tx, row["webhook"], failures=0, open_until_us=0)


def refused(tx: sa.Connection, row: sa.RowMapping, answer: str) -> None:
    """Record a failed attempt. Retries come at growing intervals until the delivery has failed.

    After `OPENS_AFTER` failed attempts in a row the webhook's circuit opens: nothing is sent for a while, then one
    delivery as a probe.
    """
    tried = row["attempts"]
    if tried >= len(WAITS_S):
        _settle(tx, row, FAILED, answer, 0)
    else:
        _settle(tx, row, WAITING, answer, now_us() + WAITS_S[tried] * 1_000_000)
    found = find(tx, row["webhook"])
    if found is not None:
        failures = found["failures"] + 1
        _release(tx, row["webhook"], failures=failures, open_until_us=now_us() + opens_for_s(failures) * 1_000_000)


def opens_for_s(failures: int) -> int:
    """Return for how long a circuit opens after so many failed attempts in a row."""
    beyond = failures - OPENS_AFTER
    return 0 if beyond < 0 else backoff(beyond, OPEN_BASE_S, OPEN_MAX_S)


def gone(tx: sa.Connection, row: sa.RowMapping, answer: str) -> None:
    """Disable the webhook, because its receiver wants no more deliveries."""
    _settle(tx, row, FAILED, answer, 0)
    change(tx, row["webhook"], disabled="its receiver answered 410: gone", claimed_until_us=0)


def forget(tx: sa.Connection, before_us: int) -> None:
    """Drop finished deliveries from before `before_us`. What waits longer than all retries take has failed."""
    too_old_us = now_us() - GIVEN_UP_S * 1_000_000
    tx.execute(
        sa.update(deliveries)
        .where(_IS_WAITING, deliveries.c.created_us < too_old_us)
        .values(state=FAILED, answer=sa.func.coalesce(sa.func.nullif(deliveries.c.answer, ""), NOT_REACHED))
    )
    tx.execute(sa.delete(deliveries).where(deliveries.c.created_us < before_us, deliveries.c.state != WAITING))


def _settle(tx: sa.Connection, row: sa.RowMapping, state: str, answer: str, not_before_us: int) -> None:
    tx.execute(
        sa.update(deliveries)
        .where(deliveries.c.id == row["id"])
        .values(state=state, answer=answer, attempts=row["attempts"] + 1, not_before_us=not_before_us)
    )


def _release(tx: sa.Connection, webhook: str, *, failures: int, open_until_us: int) -> None:
    values = {"failures": failures, "open_until_us": open_until_us, "claimed_until_us": 0}
    tx.execute(sa.update(webhooks).where(webhooks.c.id == webhook).values(**values))


def as_webhook(row: sa.RowMapping) -> Webhook:
    return told(
        Webhook,
        row,
        enabled=row["disabled"] is None,
        disabled_because=row["disabled"] or "",
        circuit=_circuit(row),
        next_probe_at=rfc3339(row["open_until_us"]) if row["failures"] >= OPENS_AFTER else None,
    )


def _circuit(row: sa.RowMapping) -> Literal["closed", "open", "half-open"]:
    if row["failures"] < OPENS_AFTER:
        return "closed"
    return "open" if row["open_until_us"] > now_us() else "half-open"


def as_delivery(row: sa.RowMapping) -> WebhookDelivery:
    waits = row["state"] == WAITING and row["not_before_us"]
    return told(WebhookDelivery, row, next_at=rfc3339(row["not_before_us"]) if waits else None)
