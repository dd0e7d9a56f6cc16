"""Webhooks and their deliveries in the store.

A delivery is recorded in the transaction of its event, so that a server that dies in between loses none.
"""

import json
from typing import Any

import sqlalchemy as sa

from elastic.resources import WEBHOOK_EVENTS, Webhook, WebhookDelivery
from elastic.server import ids
from elastic.server.clock import rfc3339
from elastic.server.store.database import now_us
from elastic.server.store.tables import deliveries, webhooks

WAITING, DELIVERED, FAILED = "waiting", "delivered", "failed"
TEST = "webhook.test"
WAITS_S = (5, 300, 1_800, 7_200, 18_000, 36_000, 50_400, 72_000, 86_400)
"""Waiting time before each retry. After the last retry a delivery has failed."""
CLAIM_S = 60
"""How long a claimed delivery is reserved for the server that claimed it."""
DISABLED = "switched off"


def insert(tx: sa.Connection, project: str, url: str, events: list[str], secret: bytes) -> sa.RowMapping:
    row = {
        "id": ids.new_id(ids.WEBHOOK),
        "project": project,
        "url": url,
        "events": events,
        "secret": secret,
        "version": 1,
        "created_us": now_us(),
    }
    tx.execute(sa.insert(webhooks).values(**row))
    made = find(tx, row["id"])
    assert made is not None
    return made


def find(connection: sa.Connection, id_: str) -> sa.RowMapping | None:
    return connection.execute(sa.select(webhooks).where(webhooks.c.id == id_)).mappings().first()


def change(tx: sa.Connection, id_: str, **changes: Any) -> None:
    tx.execute(sa.update(webhooks).where(webhooks.c.id == id_).values(**changes, version=webhooks.c.version + 1))


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
    row = {
        "id": ids.new_id(ids.DELIVERY),
        "webhook": webhook,
        "type": type_,
        "body": json.dumps({"type": type_, "timestamp": rfc3339(at_us), "data": data}),
        "state": WAITING,
        "attempts": 0,
        "not_before_us": 0,
        "answer": "",
        "created_us": at_us,
    }
    tx.execute(sa.insert(deliveries).values(**row))
    return tx.execute(sa.select(deliveries).where(deliveries.c.id == row["id"])).mappings().one()


def claim(tx: sa.Connection, limit: int) -> list[sa.RowMapping]:
    """Return due deliveries, each with its webhook's URL and secret, and reserve them for a while."""
    at_us = now_us()
    due = (
        sa.select(deliveries, webhooks.c.url, webhooks.c.secret)
        .join(webhooks, webhooks.c.id == deliveries.c.webhook)
        .where(deliveries.c.state == WAITING, deliveries.c.not_before_us <= at_us, webhooks.c.disabled.is_(None))
        .order_by(deliveries.c.not_before_us, deliveries.c.id)
        .limit(limit)
    )
    claimed: list[sa.RowMapping] = []
    for row in tx.execute(due).mappings().all():
        seen = (deliveries.c.id == row["id"]) & (deliveries.c.not_before_us == row["not_before_us"])
        until = sa.update(deliveries).where(seen).values(not_before_us=at_us + CLAIM_S * 1_000_000)
        if tx.execute(until).rowcount:
            claimed.append(row)
    return claimed


def any_due(connection: sa.Connection) -> bool:
    due = sa.select(deliveries.c.id).where(deliveries.c.state == WAITING, deliveries.c.not_before_us <= now_us())
    return connection.execute(due.limit(1)).first() is not None


def delivered(tx: sa.Connection, row: sa.RowMapping, answer: str) -> None:
    _settle(tx, row, DELIVERED, answer, 0)


def refused(tx: sa.Connection, row: sa.RowMapping, answer: str) -> None:
    """Record a failed attempt. Retries come at growing intervals until the delivery has failed."""
    tried = row["attempts"]
    if tried >= len(WAITS_S):
        _settle(tx, row, FAILED, answer, 0)
    else:
        _settle(tx, row, WAITING, answer, now_us() + WAITS_S[tried] * 1_000_000)


def gone(tx: sa.Connection, row: sa.RowMapping, answer: str) -> None:
    """Disable the webhook, because its receiver wants no more deliveries."""
    _settle(tx, row, FAILED, answer, 0)
    change(tx, row["webhook"], disabled="its receiver answered 410: gone")


def forget(tx: sa.Connection, before_us: int) -> None:
    """Drop finished deliveries from before `before_us`."""
    tx.execute(sa.delete(deliveries).where(deliveries.c.created_us < before_us, deliveries.c.state != WAITING))


def _settle(tx: sa.Connection, row: sa.RowMapping, state: str, answer: str, not_before_us: int) -> None:
    tx.execute(
        sa.update(deliveries)
        .where(deliveries.c.id == row["id"])
        .values(state=state, answer=answer, attempts=row["attempts"] + 1, not_before_us=not_before_us)
    )


def as_webhook(row: sa.RowMapping) -> Webhook:
    return Webhook(
        id=row["id"],
        project=row["project"],
        url=row["url"],
        events=row["events"],
        enabled=row["disabled"] is None,
        disabled_because=row["disabled"] or "",
        created_at=rfc3339(row["created_us"]) or "",
    )


def as_delivery(row: sa.RowMapping) -> WebhookDelivery:
    waits = row["state"] == WAITING and row["not_before_us"]
    return WebhookDelivery(
        id=row["id"],
        webhook=row["webhook"],
        type=row["type"],
        state=row["state"],
        attempts=row["attempts"],
        answer=row["answer"],
        next_at=rfc3339(row["not_before_us"]) if waits else None,
        created_at=rfc3339(row["created_us"]) or "",
    )
