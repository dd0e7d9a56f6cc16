"""Sends what webhooks are still to be told: at least once each, a slow receiver in nobody's way."""

import asyncio
import time

import httpx
import sqlalchemy as sa
import structlog

from elastic.server.settings import ServerSettings
from elastic.server.store import Store, StoreUnavailable, webhooks
from elastic.server.store.database import now_us
from elastic.server.store.vault import Vault, VaultError
from elastic.server.webhooks.addresses import UnsafeTarget, resolved
from elastic.server.webhooks.signing import signed_headers

log = structlog.get_logger(__name__)

SEND_TIMEOUT_S = 15.0
AT_ONCE = 32
KEPT_S = 30 * 86_400
FORGET_EVERY_S = 3_600.0
_GONE = 410


class DeliveryLoop:
    """Several servers on one database may each have one: a delivery is claimed before it is sent."""

    def __init__(self, store: Store, settings: ServerSettings) -> None:
        self._store = store
        self._settings = settings
        self._vault = Vault(settings.home)
        self._forgot_s = float("-inf")

    async def run(self) -> None:
        """Go on until cancelled. What was being sent then is sent again."""
        sending: set[asyncio.Task[None]] = set()
        async with asyncio.TaskGroup() as tasks:
            while True:
                try:
                    due = await asyncio.to_thread(self._claim, AT_ONCE - len(sending))
                except StoreUnavailable as error:
                    log.warning("the database does not answer; webhooks wait", error=str(error))
                    due = []
                for row in due:
                    task = tasks.create_task(self._deliver(row), name=f"webhook {row['id']}")
                    sending.add(task)
                    task.add_done_callback(sending.discard)
                await asyncio.sleep(self._settings.webhook_tick_s)

    async def tick(self) -> int:
        """Send all that is due now; returns how much that was. Raises `StoreUnavailable`."""
        due = await asyncio.to_thread(self._claim, AT_ONCE)
        await asyncio.gather(*(self._deliver(row) for row in due))
        return len(due)

    def _claim(self, limit: int) -> list[sa.RowMapping]:
        if limit <= 0:
            return []
        with self._store.reading() as connection:
            if not webhooks.any_due(connection):
                return []
        with self._store.writing() as tx:
            if time.monotonic() - self._forgot_s > FORGET_EVERY_S:
                webhooks.forget(tx, now_us() - KEPT_S * 1_000_000)
                self._forgot_s = time.monotonic()
            return webhooks.claim(tx, limit)

    async def _deliver(self, row: sa.RowMapping) -> None:
        status, answer = await self._send(row)
        log.info("webhook", delivery=row["id"], webhook=row["webhook"], type=row["type"], answer=answer)
        try:
            await asyncio.to_thread(self._settle, row, status, answer)
        except StoreUnavailable as error:
            log.warning("a webhook's answer could not be kept: it is sent again", error=str(error))

    def _settle(self, row: sa.RowMapping, status: int, answer: str) -> None:
        with self._store.writing() as tx:
            if 200 <= status < 300:
                webhooks.delivered(tx, row, answer)
            elif status == _GONE:
                webhooks.gone(tx, row, answer)
            else:
                webhooks.refused(tx, row, answer)

    async def _send(self, row: sa.RowMapping) -> tuple[int, str]:
        """The receiver's status, 0 if there was none, and what became of it in words. Redirects are not followed."""
        body = row["body"].encode()
        try:
            secret = await asyncio.to_thread(self._vault.opened, row["secret"])
            headers = {"content-type": "application/json", "user-agent": "elastic-webhooks/1"}
            headers |= signed_headers(secret, row["id"], int(time.time()), body)
            async with asyncio.timeout(SEND_TIMEOUT_S):
                target = await resolved(row["url"], self._settings.webhook_networks)
                client = httpx.AsyncClient(trust_env=False, follow_redirects=False, timeout=SEND_TIMEOUT_S)
                async with (
                    client,
                    client.stream(
                        "POST",
                        target.url,
                        content=body,
                        headers={**headers, "host": target.host_header},
                        extensions={"sni_hostname": target.name},
                    ) as response,
                ):
                    return response.status_code, f"status {response.status_code}"
        except TimeoutError:
            return 0, f"no answer within {SEND_TIMEOUT_S:.0f} s"
        except UnsafeTarget as error:
            return 0, f"not sent: the URL {error}"
        except VaultError:
            return 0, "not sent: its secret cannot be read, for the server's key file is another one"
        except (OSError, httpx.HTTPError) as error:
            return 0, f"not delivered ({type(error).__name__})"
