"""Sends what webhooks are still to be told: at least once each, a slow receiver in nobody's way."""

import asyncio
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import httpx
import sqlalchemy as sa
import structlog

from elastic.protocol.http_clients import async_client
from elastic.server.settings import ServerSettings
from elastic.server.store import Store, StoreUnavailable, webhooks
from elastic.server.store.database import now_us
from elastic.server.store.vault import Vault, VaultError
from elastic.server.store.webhooks import DueWebhook
from elastic.server.webhooks.addresses import UnsafeTarget, resolved
from elastic.server.webhooks.signing import signed_headers
from elastic.system.isolation import IsolatedLoop, LoopFaults

log = structlog.get_logger(__name__)

SEND_TIMEOUT_S = 15.0
AT_ONCE, PROJECT_AT_ONCE = 128, 4
"""Deliveries that are on the way at once: of all projects, and of one."""
NAMES_AT_ONCE = 64
"""Threads that resolve names of receivers, apart from all others, for a name server may take its time."""
KEPT_S = 30 * 86_400
FORGET_EVERY_S = 3_600.0
_GONE = 410


class DeliveryLoop:
    """Several servers on one database may each have one: a delivery is claimed before it is sent.

    A webhook is sent one delivery at a time, and a project has `PROJECT_AT_ONCE` on the way at most, so that receivers
    that do not answer delay their own project only.
    """

    def __init__(self, store: Store, settings: ServerSettings, faults: LoopFaults | None = None) -> None:
        self._store = store
        self._settings = settings
        self._vault = Vault(settings.home)
        self._forgot_s = float("-inf")
        self._isolated = IsolatedLoop("webhooks", faults or LoopFaults(), outages=(StoreUnavailable,))
        self._on_the_way: Counter[str] = Counter()
        """Deliveries that are being sent, by project."""
        self.wake = self._isolated.wake
        """Have it look for messages now, because a request may have made one. Any thread may call this."""
        self._names = ThreadPoolExecutor(NAMES_AT_ONCE, "names")

    async def run(self) -> None:
        """Go on until cancelled. What was being sent then is sent again."""
        async with asyncio.TaskGroup() as tasks:

            async def begin() -> None:
                for row in await self._claimed():
                    tasks.create_task(self._deliver(row), name=f"webhook {row['id']}")

            await self._isolated.repeat(begin, self._settings.webhook_tick_s)

    async def tick(self) -> int:
        """Send what is due now, one delivery for each webhook; returns how many. Raises `StoreUnavailable`."""
        due = await self._claimed()
        await asyncio.gather(*(self._deliver(row) for row in due))
        return len(due)

    async def _claimed(self) -> list[sa.RowMapping]:
        """Claim what may be sent now, and count it as on the way."""
        due = await asyncio.to_thread(self._claim, Counter(self._on_the_way))
        self._on_the_way.update(row["project"] for row in due)
        return due

    def _claim(self, on_the_way: Mapping[str, int]) -> list[sa.RowMapping]:
        if time.monotonic() - self._forgot_s > FORGET_EVERY_S:
            with self._store.writing() as tx:
                webhooks.forget(tx, now_us() - KEPT_S * 1_000_000)
            self._forgot_s = time.monotonic()
        with self._store.reading() as connection:
            chosen = shared_out(webhooks.due(connection), on_the_way)
        if not chosen:
            return []
        with self._store.writing() as tx:
            claimed = [webhooks.claim(tx, one.id) for one in chosen]
        return [row for row in claimed if row is not None]

    async def _deliver(self, row: sa.RowMapping) -> None:
        try:
            with self._isolated.attempt(row["webhook"]) as attempt:
                status, answer = await self._send(row)
            if attempt.fault:
                status, answer = 0, f"not sent: an unexpected {attempt.fault.partition(':')[0]}"
            log.info("webhook", delivery=row["id"], webhook=row["webhook"], type=row["type"], answer=answer)
            with self._isolated.attempt(f"{row['webhook']}: settled"):
                await asyncio.to_thread(self._settle, row, status, answer)
        except StoreUnavailable as error:
            log.warning("a webhook's answer could not be kept: it is sent again", error=str(error))
        finally:
            self._on_the_way[row["project"]] -= 1
            self._on_the_way += Counter()  # Without projects that have nothing on the way.
            self.wake()

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
                target = await resolved(row["url"], self._settings.webhook_networks, self._names)
                client = async_client(follow_redirects=False, timeout=SEND_TIMEOUT_S)
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


def shared_out(due: Sequence[DueWebhook], on_the_way: Mapping[str, int]) -> list[DueWebhook]:
    """Return the webhooks to send to now: within each project's share and the server's room, and of projects with
    little on the way before those with much. Pure."""
    room = AT_ONCE - sum(on_the_way.values())
    held = Counter(on_the_way)
    ranked: list[tuple[int, int, DueWebhook]] = []
    for number, one in enumerate(due):
        if held[one.project] < PROJECT_AT_ONCE:
            ranked.append((held[one.project], number, one))
            held[one.project] += 1
    return [one for *_, one in sorted(ranked)[: max(0, room)]]
