"""Bounds on what a cloud may cost and leave, judged by the books of the stand-in for EC2 (`tests/clouds/aws_server`).

Three runs use it at once, through the provider and boto3. It lists instances 5 s late, knows them no earlier, and
answers in pages of one item.

- Two runs hold four leases near the end of their first hour, whose price is half of the second one's, and take whatever
  is offered, until `providers.ec2.usd_max` ends them. One of them gives half back, and its process dies, once 90 % are
  spent; the next one takes over.
- One loses the answer to an order, and ends right after another grant. It has secrets of a former process.

All figures are 0: `usd_over_max` and `usd_over_max_after_restart` are what the first two have cost beyond their cap by
the books, `counted_below_bill_usd` by how much the runs' ledgers were below the books at worst, `left_after_end` what
lives of the first two once they are closed, `left_after_late_listing` of the third, `secrets_left` the secrets there.

Where boto3 or moto is missing: `skipped_because`; `make test-clouds` makes an environment that has them.
"""

import asyncio
import logging
import math
import os
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import structlog

from benchmarks._clouds import skipped_without_aws
from benchmarks._common import Arguments, Figures, benchmark
from elastic.core import events as e
from elastic.core.ledger import NANO_USD_PER_USD, Ledger
from elastic.core.types import NS_PER_S, LeaseId, Offer
from elastic.protocol.endpoint import Endpoint
from providers.base import KnownLease, LeaseRequest, ProviderContext, ProviderEvent, WorkerTicket
from providers.ec2 import Ec2Provider
from providers.ec2_market import HOUR_S, Ec2Settings
from providers.vendor_calls import CALL_NAME

LEASES = 4
UNSEEN_S = 5.0
POLL_S = 0.2
FIRST_HOUR_S = HOUR_S - 8
QUICK_SECRETS, FULL_SECRETS = 15, 250
PATIENCE_S = 120.0
POOLS = {("g5.xlarge", "us-east-1a"): 24}
CAP = 1.025
"""What four leases may cost, as a share of their first hour's price."""
AGE_S = 30.0
"""How far a run is brought towards its cap at once. Before, it is farther from the cap than twice what notice needs."""
SHARE = 0.5
"""The price, of that on demand."""
DOUBLED_AGO_S = 20.0
"""Since when the price is twice as high, as it is doubled: before the runs' second hours begin."""


class BoundedRun:
    """A run's ledger, and the provider of its process that is there now."""

    def __init__(self, aws: Any, directory: Path, name: str, **settings: Any) -> None:
        self.aws, self.name = aws, name
        self.below_usd = 0.0
        self.known: dict[LeaseId, bool] = {}
        """Leases that are requested or held, and whether they are granted."""
        self._ledger = Ledger()
        self._directory = directory / name
        self._directory.mkdir()
        self._began_ns = time.monotonic_ns()
        self.restarts = self.aged = False
        self._offer: Offer | None = None
        self._number = 0
        self._settings = Ec2Settings.model_validate(
            aws.settings(max_workers=8, queue="", poll_s=POLL_S, price_s=0.5, boot_s=0.0, **settings)
        )
        self.provider = self._provider()

    def _provider(self) -> Ec2Provider:
        context = ProviderContext(
            run=self.name,
            run_dir=self._directory,
            endpoint=Endpoint("127.0.0.1:1"),
            worker_command=(),
            now_ns=lambda: time.monotonic_ns() - self._began_ns,
            secret=lambda host: f"{self.name}: {host}",
            spent_usd=lambda provider: self._ledger.closed_nano_usd(provider) / NANO_USD_PER_USD,
            acquire_timeout_s=PATIENCE_S,
            release_timeout_s=10.0,
        )
        return Ec2Provider("ec2", self._settings, context)

    async def start(self) -> None:
        known = [
            KnownLease(request=_request(lease), granted=granted, granted_at_ns=self.provider.context.now_ns())
            for lease, granted in self.known.items()
        ]
        for lease in await self.provider.adopt(known, self._hear):
            del self.known[lease]
        await self.provider.start(self._hear)

    async def restart(self) -> None:
        """The process dies, and the next one takes over."""
        for task in (*self.provider._background, *self.provider._lease_tasks):
            task.cancel()
        self.provider = self._provider()
        await self.start()

    async def acquire(self) -> None:
        self._number += 1
        lease = f"ec2-{self._number}"
        self.known[lease] = False
        await self.provider.acquire(_request(lease))

    @property
    def offered(self) -> int:
        return 0 if self._offer is None else self._offer.available

    @property
    def granted(self) -> list[LeaseId]:
        return [lease for lease, granted in self.known.items() if granted]

    def age(self, seconds: float) -> None:
        """Let so much time pass for all that is rented."""
        self.aged = True
        for one in self.rented():
            if one.lives:
                self.aws.age(one.id, seconds)

    def seen(self) -> bool:
        """Whether the provider has heard of all instances since when they are."""
        running = self.provider._ec2.running
        living = {one.tags["elastic:lease"]: one for one in self.rented() if one.lives}
        return all(name in running and running[name].began_s <= living[name].began_s + 1 for name in living)

    def knows_price(self) -> bool:
        """Whether the provider has heard of the price of now."""
        market = self.provider._ec2
        return all(market.usd_now(pool) >= self.aws.books.prices.at(*pool, time.time()) for pool in market.pools())

    def rented(self) -> list[Any]:
        return [one for one in self.aws.books.rented.values() if one.tags.get("elastic:run") == self.provider.api.run]

    def living(self) -> int:
        return sum(one.lives for one in self.rented())

    def bill_usd(self) -> float:
        from tests.clouds.aws_server.record import Books

        return Books(self.aws.books.prices, {}, rented={one.id: one for one in self.rented()}).usd()

    def count(self) -> None:
        """Compare the run's own account with the books. Requests count as the run's budget counts them."""
        if not self.seen():
            return
        now_ns, ledger = self.provider.context.now_ns(), self._ledger
        live = [book.most_nano_usd(now_ns) for book in ledger.books.values() if book.closed_ns is None]
        counted = ledger.closed_nano_usd("ec2") + sum(live)
        counted_usd = counted / NANO_USD_PER_USD + self._asked_usd * sum(not granted for granted in self.known.values())
        self.below_usd = max(self.below_usd, self.bill_usd() - counted_usd)

    @property
    def _asked_usd(self) -> float:
        """What a request may have cost: the offer's least, at the most."""
        if self._offer is None:
            return 0.0
        return (self._offer.usd_per_gpu_hour_most or 0.0) * (self._offer.least_billed_ns or 0) / NS_PER_S / HOUR_S

    def _hear(self, event: ProviderEvent) -> None:
        now_ns, ledger = self.provider.context.now_ns(), self._ledger
        match event:
            case e.OfferChanged():
                self._offer = event.offer
            case e.LeaseGranted():
                offer = self._offer
                assert offer is not None
                self.known[event.lease] = True
                usd = offer.usd_per_gpu_hour
                ledger.open(event.lease, event.lease, "ec2", 1, usd, now_ns, least_ns=offer.least_billed_ns)
            case e.LeaseRepriced():
                ledger.reprice(event.lease, math.ceil(event.usd * NANO_USD_PER_USD), event.usd_per_gpu_hour, now_ns)
            case e.StraysBilled():
                ledger.bill_strays(event.provider, math.ceil(event.usd * NANO_USD_PER_USD))
            case e.LeaseEnded():
                del self.known[event.lease]
                ledger.close(event.lease, now_ns, clean=True, charged_ns=event.billed_ns)
            case e.LeaseRefused():
                self.known.pop(event.lease, None)
            case e.LeaseNotice():
                pass


def _request(lease: LeaseId) -> LeaseRequest:
    return LeaseRequest(lease=lease, tickets=(WorkerTicket(lease, f"token of {lease}"),))


async def until(condition: Callable[[], object], beside: Callable[[], Awaitable[None] | None] = lambda: None) -> None:
    """Do what is `beside` again and again until the condition holds. Raises `TimeoutError`."""
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            if (work := beside()) is not None:
                await work
            await asyncio.sleep(POLL_S / 2)


async def capped(run: BoundedRun, doubled: asyncio.Event, *, hold: bool) -> None:
    """Four leases come to the cap in their second hour. They are held to their deadline, or given back at notice."""
    await run.start()
    for _ in range(LEASES):
        await run.acquire()
    await until(lambda: len(run.granted) == LEASES and run.seen(), run.count)
    if run.restarts:
        run.age(0.9 * CAP * HOUR_S)
        await until(lambda: run.seen() and doubled.is_set(), run.count)
        for lease in run.granted[: LEASES // 2]:
            await run.provider.release(lease)
        await until(lambda: len(run.granted) == LEASES // 2, run.count)
        await run.restart()
    else:
        run.age(FIRST_HOUR_S)
        await until(lambda: doubled.is_set() and run.knows_price() and run.seen(), run.count)

    async def take() -> None:
        run.count()
        if run.offered > 0 and len(run.known) < 2 * LEASES:
            await run.acquire()
        if run.restarts and run.seen() and run.provider._ec2.cap_left_s() is None:
            run.age(AGE_S)

    await until(lambda: run.provider._ec2.capped, take)

    async def take_more() -> None:
        """Ask on, whatever is offered."""
        await run.acquire()
        for lease in () if hold else run.granted:
            await run.provider.release(lease)
        run.count()

    await until(lambda: not run.granted, take_more)
    await run.provider.aclose()
    run.count()


async def ending(run: BoundedRun, aws: Any, secrets: int) -> None:
    """The answer to an order is lost, and the run ends right after the next grant."""
    ordered, answered = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    async def lose(action: str) -> None:
        if action == "CreateFleet":
            aws.proxy.hold = None
            loop.call_soon_threadsafe(ordered.set)
            await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(answered.wait(), loop))
            raise ConnectionResetError

    await run.start()
    await asyncio.gather(
        *(asyncio.to_thread(run.provider.api.put_secret, f"former-{number}", "token") for number in range(secrets))
    )
    await until(lambda: run.offered)
    aws.proxy.hold = lose
    await run.acquire()
    await until(ordered.is_set)
    await run.acquire()
    await until(lambda: run.granted)
    closing = asyncio.create_task(run.provider.aclose())
    await asyncio.sleep(1.0)
    answered.set()
    await closing


async def measure(quick: bool) -> Figures:
    from tests.clouds.aws_server.cloud import cloud
    from tests.clouds.aws_server.record import Prices

    prices = Prices(floor=SHARE, ceiling=SHARE)
    with tempfile.TemporaryDirectory() as name, cloud(Path(name) / "aws", dict(POOLS), prices=prices) as aws:
        directory, (pool,) = Path(name), POOLS
        aws.machines.deaf.add(pool)
        aws.proxy.page, aws.proxy.unseen_s = 1, UNSEEN_S
        usd_max = CAP * LEASES * aws.books.prices.at(*pool, time.time())
        secrets = BoundedRun(aws, directory, "ending", secret_prefix="elastic/", instance_profile="worker")
        runs = [BoundedRun(aws, directory, name, usd_max=usd_max) for name in ("capped", "restarted")]
        runs[1].restarts = True
        doubled = asyncio.Event()

        async def double() -> None:
            await until(lambda: all(run.aged for run in runs))
            aws.books.prices.change(2.0, since_s=DOUBLED_AGO_S)
            doubled.set()

        lost = asyncio.create_task(ending(secrets, aws, QUICK_SECRETS if quick else FULL_SECRETS))
        await asyncio.gather(lost, double(), *(capped(run, doubled, hold=not quick) for run in runs))
        await until(lambda: not any(thread.name.startswith(CALL_NAME) for thread in threading.enumerate()))
        listed = await asyncio.to_thread(secrets.provider.api.secrets)
        return {
            "usd_over_max": max(0.0, runs[0].bill_usd() - usd_max),
            "usd_over_max_after_restart": max(0.0, runs[1].bill_usd() - usd_max),
            "counted_below_bill_usd": max(run.below_usd for run in runs),
            "left_after_end": sum(run.living() for run in runs),
            "left_after_late_listing": secrets.living(),
            "secrets_left": len(listed),
        }


def main(arguments: Arguments) -> Figures:
    quick = arguments.quick
    if why := skipped_without_aws():
        return {"skipped_because": why}
    logging.disable()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    os.environ["AWS_EC2_METADATA_DISABLED"] = "true"
    return asyncio.run(measure(quick))


if __name__ == "__main__":
    benchmark(__doc__, main)
