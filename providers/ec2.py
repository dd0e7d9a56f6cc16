"""Spot instances of EC2, one for each lease: ordered by fleets, found again by their tags, ended by their own script.

- An order carries the lease's client token: however often it is sent, by whichever process of the run, there is one
  instance.
- Instances bear the run's tags. A search for those of no lease is made as the run starts, goes on and ends; what it
  finds is ended. An instance whose run is gone ends by itself (`providers.ec2_user_data`).
- Notices come two ways: the worker reads its instance's metadata, and this provider a queue that EventBridge fills.
  What comes of a notice is seen by looking at the instance.
- A lease is billed what EC2 bills for its instance (`providers.ec2_market`), by EC2's own times and prices.

Sources: RLBoost §3 and §5; EC2 User Guide, "EC2 Fleet", "Spot Instance interruption notices".
"""

import asyncio
import contextlib
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, TypeVar
from urllib.parse import urlsplit

import structlog

from elastic.core.events import LeaseNotice, LeaseRepriced, StraysBilled
from elastic.core.types import NS_PER_S, EndCause, LeaseId, Nanoseconds, Offer
from elastic.protocol.endpoint import is_loopback
from providers.base import (
    REMARK,
    Emit,
    Examination,
    KnownLease,
    LeaseRequest,
    ProviderContext,
    ProviderSettings,
    ProviderSilent,
    ProviderUnavailable,
    worker_environment,
)
from providers.base_provider import Found, LeaseHandle
from providers.ec2_api import Ec2Api, Ec2Error, Instance, Launch, NoAccess, QueueNotice, installed, of_leases
from providers.ec2_examination import examine
from providers.ec2_history import Ec2History
from providers.ec2_market import (
    ENDING_S,
    HOUR_S,
    NEVER_JOINED,
    NOTICE_S,
    UNSEEN_S,
    Ec2Market,
    Ec2Settings,
    Running,
    SpotPool,
    bill_usd,
)
from providers.ec2_user_data import UserDataTooLarge, user_data
from providers.markets import CapacityUnavailable, LeaseEnding
from providers.vendor_calls import call
from providers.vendor_provider import LOOK_AGAIN_S, SETTLING_S, VendorProvider

log = structlog.get_logger(__name__)
T = TypeVar("T")

QUEUE_WAIT_S = 10
"""How long one poll of the queue waits for notices."""
PUT_BACK_S = 2
"""When another reader of the queue sees a notice that this run has put back."""
CALLS_AT_ONCE = 16
"""How many secrets are deleted at once."""
SLACK_S = 2.0
"""How inexactly AWS's clock is known."""

INTERRUPTION = "EC2 Spot Instance Interruption Warning"
REBALANCE = "EC2 Instance Rebalance Recommendation"


class _Leased:
    """The `LeaseHandle` of a lease, which has one instance."""

    def __init__(
        self, provider: "Ec2Provider", lease: LeaseId, instance: str, pool: SpotPool, usd_per_gpu_hour: float
    ) -> None:
        self.lease, self.instance, self.pool, self.usd_per_gpu_hour = lease, instance, pool, usd_per_gpu_hour
        self.over: asyncio.Future[LeaseEnding] = asyncio.get_running_loop().create_future()
        self.since_s = time.monotonic()
        self.advised = False
        self.granted = False
        self.told_usd: float | None = None
        """What the run was told last that a GPU's hour costs at the most …"""
        self.told_since_s = 0.0
        """… of an instance that began then (Unix time)."""
        self.silent = False
        """Whether no worker has come from the instance in time."""
        self._provider = provider

    @property
    def settled(self) -> bool:
        """Whether EC2 knows the instance by now if there is one: only then its absence says anything."""
        return time.monotonic() - self.since_s > UNSEEN_S

    async def keep(self) -> LeaseEnding:
        return await asyncio.shield(self.over)

    async def give_back(self) -> Nanoseconds | None:
        return await self._provider.end_instance(self)

    def ended(self, ending: LeaseEnding) -> None:
        if not self.over.done():
            self.over.set_result(ending)


class Ec2Provider(VendorProvider[Ec2Settings]):
    """A provider whose leases have one instance each. An instance is one worker."""

    Settings: ClassVar[type[Ec2Settings]] = Ec2Settings

    @classmethod
    def elsewhere(cls, settings: ProviderSettings) -> bool:
        """A stand-in for EC2 on this machine has its instances here."""
        assert isinstance(settings, Ec2Settings)
        return not is_loopback(urlsplit(settings.endpoint_url).hostname or "")

    def __init__(self, name: str, settings: Ec2Settings, context: ProviderContext) -> None:
        self._ec2 = Ec2Market(name, settings)
        super().__init__(self._ec2, context)
        self._ec2.spent_usd = lambda: context.spent_usd(name)
        self._ec2.now_s = self._now_s
        self.api = Ec2Api(settings, context.tag(f"ec2 {name}"), name)
        self.vendor, self.answer_s = self.api.where, settings.answer_timeout_s
        self._held: dict[LeaseId, _Leased] = {}
        self._ordering: set[LeaseId] = set()
        self._unsettled: dict[LeaseId, float] = {}
        """Orders whose answers were lost. The time (monotonic) is when an instance of theirs must have appeared."""
        self._offers: dict[LeaseId, Offer] = {}
        """The offer at which each lease was requested."""
        self._secrets: dict[LeaseId, float] = {}
        """When (monotonic) each secret was made that is there, or may be."""
        self._template_since_s = 0.0
        self._strays: dict[str, float] = {}
        """Instances of no lease, until their bill is known, and since when (monotonic) each is being ended."""
        self._passed_over: Counter[tuple[SpotPool, str]] = Counter()
        """How often a pool was passed over, by pool and reason."""
        self._missing, self._times_missing = False, 0
        self._reconciled_s = 0.0
        self._past = Ec2History(context.run_dir.parent, settings.endpoint_url)

    @classmethod
    def examine(cls, name: str, settings: Ec2Settings) -> Examination:
        """Check credentials, quotas and network access, and list the capacity of now. Blocks."""
        return examine(name, settings)

    # The contract

    async def start(self, emit: Emit) -> None:
        installed()
        self._ec2.history = await asyncio.to_thread(self._past.pools)
        try:
            await self.ask(self.api.check)
            self.used = True
            self._template_since_s = time.monotonic()
            await self.ask(self.api.make_template)
            self._ec2.priced(await self.ask(self.api.prices))
        except Ec2Error as error:
            raise (ProviderSilent if error.passing else ProviderUnavailable)(str(error)) from error
        self._ec2.scores = await self.ask(self.api.scores)
        if not self._ec2.pools():
            raise ProviderUnavailable(f"{self.name}: {self._ec2.why_nothing()}; see providers.{self.name}.zones")
        self._advance()
        await super().start(emit)
        self._say_what_is_missing()
        self.run_in_background(self.watch(self.settings.poll_s), "watch")
        self.run_in_background(self._follow_prices(), "prices")
        if self.settings.queue:
            self.run_in_background(self._hear(), "notices")

    async def acquire(self, request: LeaseRequest) -> None:
        # The core has read the last offer, and books the lease at its price.
        self._offers[request.lease] = self._ec2.last_offer
        await super().acquire(request)

    async def launch(self, request: LeaseRequest, place: str) -> LeaseHandle:
        (ticket,) = request.tickets
        lease, s, offer = request.lease, self.settings, self._offers[request.lease]
        environment = worker_environment(self.context, ticket)
        secret = self.api.secret_name(lease) if s.secret_prefix else ""
        try:
            script = user_data(
                environment, s.install, s.max_life_s, install_s=s.install_s, secret=secret, region=s.region
            )
        except UserDataTooLarge as error:
            raise CapacityUnavailable(f"{self.name}: {error}") from error
        self._advance()
        pools = [pool for pool in self._ec2.usable() if self._ec2.is_within(pool, offer)]
        if not pools:
            raise CapacityUnavailable(f"{self.name}: {self._ec2.why_nothing()}")
        self._ordering.add(lease)
        self._ec2.running[lease] = Running(max(pools, key=self._ec2.usd_now), self._now_s())
        try:
            if secret:
                self._secrets[lease] = time.monotonic()
                await self.ask(self.api.put_secret, lease, ticket.token)
            launch = await self._order(lease, pools, script)
        except NoAccess as error:
            self._ec2.closed = str(error)
            raise CapacityUnavailable(str(error)) from error
        except CapacityUnavailable:
            raise
        except BaseException:  # Cut short: what came of the order shows where EC2 lists instances.
            self._unsettled[lease] = time.monotonic() + SETTLING_S
            self._ec2.running[f"an order of {lease}"] = self._ec2.running[lease]
            raise
        finally:
            self._ordering.discard(lease)
        for refusal in launch.refusals:
            self._ec2.failed(refusal.pool, refusal.code, refusal.message)
        if launch.instance is None or launch.pool is None:
            await self._delete_secret(lease)
            told = {f"{r.pool}: {r.code} ({r.message})" for r in launch.refusals}
            tried = "; ".join(sorted({*told, *self._ec2.waits()})) or "EC2 gave no reason"
            raise CapacityUnavailable(f"{self.name}: {self.api.where} launched nothing: {tried}")
        self._ec2.launched(launch.pool)
        for refusal in launch.refusals:
            self._passed_over[refusal.pool, refusal.code] += 1
            times = self._passed_over[refusal.pool, refusal.code]
            self._remark(
                f"{refusal.pool} {refusal.code}",
                f"{refusal.pool} was passed over {times} times: {refusal.code} ({refusal.message})",
            )
        return self._hold(lease, launch.instance, launch.pool, offer.usd_per_gpu_hour)

    async def find(self, known: Mapping[LeaseId, KnownLease]) -> Mapping[LeaseId, Found]:
        installed()
        try:
            there = await self._listed(known)
        except Ec2Error as error:
            raise (ProviderSilent if error.passing else ProviderUnavailable)(str(error)) from error
        self.used = True
        found: dict[LeaseId, Found] = {}
        for lease, instances in there.items():
            wanted = known.get(lease)
            living = [instance for instance in instances if instance.lives]
            if wanted is not None and (living or wanted.granted):
                kept = (living or instances)[0]
                living = [instance for instance in living if instance is not kept]
                handle = self._hold(lease, kept.id, kept.pool, kept.usd_per_gpu_hour)
                handle.granted = wanted.granted
                self._ec2.running[lease] = Running(kept.pool, kept.began_s)
                if not kept.lives:
                    handle.ended(self._ending(kept))
                found[lease] = Found(handle)
            with contextlib.suppress(Ec2Error):  # The next search finds them again.
                await self._end_strays(living)
        return found

    async def _listed(self, known: Mapping[LeaseId, KnownLease]) -> dict[str, list[Instance]]:
        """Return the run's instances by lease, once EC2 lists each of a lease that was granted so lately that it may be
        missing."""
        while True:
            there = of_leases(await self.ask(self.api.instances))
            since_ns = self.context.now_ns() - round(UNSEEN_S * NS_PER_S)
            new = [name for name, lease in known.items() if (lease.granted_at_ns or since_ns) > since_ns]
            if there.keys() >= set(new):
                return there
            await asyncio.sleep(LOOK_AGAIN_S)

    @property
    def closing_s(self) -> float:
        return super().closing_s + max(self.context.release_timeout_s, UNSEEN_S) + self.answer_s

    @property
    def remains(self) -> str:
        return f"`{self._look_command()}` shows its instances"

    @property
    def waits_for(self) -> str:
        now_s = time.monotonic()
        orders = sorted(lease for lease, until_s in self._unsettled.items() if until_s > now_s)
        waits = [*self._leases, *self._strays, *(f"what came of the order of {lease}" for lease in orders)]
        return ", ".join(waits) or super().waits_for

    async def aclose(self) -> str:
        self.api.closed = True
        return await super().aclose()

    async def clear_up(self) -> None:
        await self._delete_template()
        if self.settings.secret_prefix:
            await self._delete_secrets()

    # An instance

    async def end_instance(self, leased: _Leased) -> Nanoseconds | None:
        """Terminate the instance and return the charged time. Raises EC2's errors, unless the run cannot wait."""
        began_s, patience_s = time.monotonic(), max(self.context.release_timeout_s, UNSEEN_S)
        while True:
            try:
                seen = await self._ended(leased)
                break
            except (Ec2Error, TimeoutError) as error:
                if not self._closing:
                    raise
                if time.monotonic() - began_s > patience_s:
                    log.error(
                        "an instance could not be ended: it ends by itself, as its worker hears nobody",
                        instance=leased.instance,
                        within_s=self.context.orchestrator_timeout_s,
                        look=self._look_command(),
                        error=str(error),
                    )
                    seen = None
                    break
            await asyncio.sleep(LOOK_AGAIN_S)
        self._held.pop(leased.lease, None)
        self._offers.pop(leased.lease, None)
        await self._delete_secret(leased.lease)
        if seen is None or seen.ended_s is None:
            return None
        if seen.taken and (held := self._leases.get(leased.lease)) is not None:
            held.noticed = self._ending(seen)
        held_s = seen.ended_s - seen.began_s
        self._ec2.held(seen.pool, held_s, interrupted=seen.taken)
        if not leased.silent:
            self._ec2.joined(seen.pool)
        await asyncio.to_thread(self._past.add, seen.pool, held_s, taken=seen.taken)
        usd = await self._bill(seen)
        self._ec2.running[leased.lease] = Running(seen.pool, seen.began_s, usd)
        per_hour = (leased.usd_per_gpu_hour or seen.usd_per_gpu_hour) * self.settings.gpus_per_worker
        return round(usd / per_hour * HOUR_S * NS_PER_S) if per_hour else None

    async def _ended(self, leased: _Leased) -> Instance | None:
        """Terminate the instance, and return EC2's description of it; None if EC2 has forgotten the instance.

        A new instance that EC2 does not know lives.
        """
        async with asyncio.timeout(self.context.release_timeout_s):
            unknown = True
            while True:
                unknown = unknown and bool(await self.ask(self.api.terminate, [leased.instance]))
                found = [i for i in await self.ask(self.api.instances, leased.lease) if i.id == leased.instance]
                if found and not found[0].lives:
                    return found[0]
                if not found and leased.settled:
                    return None
                await asyncio.sleep(LOOK_AGAIN_S)

    async def _bill(self, instance: Instance) -> float:
        """Return the instance's cost in USD, by the prices over its whole life."""
        if not instance.taken:
            with contextlib.suppress(Ec2Error):
                self._ec2.priced(await self.ask(self.api.prices, instance.began_s))
        ended_s = self._now_s() if instance.ended_s is None else instance.ended_s
        points = self._ec2.prices.get(instance.pool, ())
        return bill_usd(instance.began_s, ended_s, points, interrupted=instance.taken)

    async def _order(self, lease: LeaseId, pools: Sequence[SpotPool], script: str) -> Launch:
        """Order one instance, and repeat the order until EC2 answers. The lease's time limit cancels the order."""
        while True:
            try:
                return await self.ask(self.api.launch, lease, pools, script, self._offers[lease].usd_per_gpu_hour)
            except NoAccess:
                raise
            except Ec2Error as error:
                if error.code == "IdempotentParameterMismatch":
                    # An earlier process of the run has ordered it otherwise: its order stands.
                    there = [i for i in await self.ask(self.api.instances, lease) if i.lives]
                    if there:
                        return Launch(there[0].id, there[0].pool)
                if not error.passing:
                    raise CapacityUnavailable(str(error)) from error
                if self._closing:
                    raise
                log.warning("an order of an instance is repeated", lease=lease, error=str(error))
            await asyncio.sleep(LOOK_AGAIN_S)

    def _hold(self, lease: LeaseId, instance: str, pool: SpotPool, usd_per_gpu_hour: float) -> _Leased:
        leased = self._held[lease] = _Leased(self, lease, instance, pool, usd_per_gpu_hour)
        if (ordered := self._ec2.running.get(lease)) is not None:
            self._ec2.running[lease] = ordered._replace(pool=pool)
        return leased

    def granted(self, lease: LeaseId) -> None:
        if (leased := self._held.get(lease)) is not None:
            leased.granted = True
            self._tell_price(leased)

    def _tell_price(self, leased: _Leased) -> None:
        """Tell the run what a granted lease has cost and costs, once that is another than it was told."""
        running = self._ec2.running.get(leased.lease)
        if running is None or not leased.granted:
            return
        usd_per_gpu_hour = self._ec2.usd_per_hour_most(running) / self.settings.gpus_per_worker
        if usd_per_gpu_hour != leased.told_usd or running.began_s < leased.told_since_s - SLACK_S:
            leased.told_usd, leased.told_since_s = usd_per_gpu_hour, running.began_s
            usd = self._ec2.bill_usd(running, SLACK_S, least_s=0.0)
            self._emit(LeaseRepriced(lease=leased.lease, usd=usd, usd_per_gpu_hour=usd_per_gpu_hour))

    def never_joined(self, lease: LeaseId) -> str:
        leased = self._held.get(lease)
        if leased is None:
            return ""
        leased.silent = True
        self._advance()
        self._ec2.failed(leased.pool, NEVER_JOINED, f"no worker came of {leased.instance}, which booted there")
        return (
            f"no worker of instance {leased.instance} ({leased.pool}) has joined; "
            f"{self._console_command(leased.instance)} has what it said; "
            "can it reach the run (run.advertise, security groups)?"
        )

    def _console_command(self, instance: str) -> str:
        return f"`aws ec2 get-console-output --region {self.settings.region} --instance-id {instance}`"

    def _ending(self, instance: Instance) -> LeaseEnding:
        if instance.taken:
            return LeaseEnding(EndCause.PREEMPTED, f"EC2 took {instance.id} back ({instance.pool}): {instance.reason}")
        why = instance.said or instance.reason or instance.state
        return LeaseEnding(
            EndCause.LOST,
            f"instance {instance.id} ended ({why}); {self._console_command(instance.id)} has what its worker said",
        )

    # What goes on beside

    async def look(self) -> None:
        """Look at the instances, and end those that belong to no lease."""
        seen = await self.ask(self.api.instances)
        self._ec2.closed = ""
        self._look_at(seen)
        await self._settle_strays(seen)
        if self._unsettled or time.monotonic() - self._reconciled_s >= self.settings.reconcile_s:
            self._reconciled_s = time.monotonic()
            with contextlib.suppress(Ec2Error):  # The next search finds it again.
                await self._end_strays(self._of_no_lease(seen))
        self._mind_the_cap()
        self._say_what_is_missing()

    async def unanswered(self, error: Exception) -> None:
        """Offer nothing until EC2 answers again."""
        self._ec2.closed = str(error)

    def _advance(self) -> None:
        tuple(self._ec2.advance(self.context.now_ns()))

    def _say_what_is_missing(self) -> None:
        """Log why no pool is left, once each time. No lease is requested then, so no refusal would tell."""
        self._advance()
        missing = not self._ec2.closed and not self._ec2.usable()
        if missing and not self._missing:
            why = self._ec2.why_nothing()
            self._times_missing += 1
            log.warning("nothing is to be had for now", provider=self.name, why=why)
            self._remark(
                "nothing", f"no pool was left to ask {self._times_missing} times, the last time because of {why}"
            )
        self._missing = missing

    def _look_at(self, seen: Sequence[Instance]) -> None:
        by_id = {instance.id: instance for instance in seen}
        for leased in tuple(self._held.values()):
            instance = by_id.get(leased.instance)
            if instance is not None and not instance.lives:
                leased.ended(self._ending(instance))
            elif instance is None and leased.settled:
                leased.ended(LeaseEnding(EndCause.LOST, f"EC2 knows no instance {leased.instance}"))
            elif instance is not None:
                self._ec2.running[leased.lease] = Running(instance.pool, instance.began_s)
                self._tell_price(leased)
        self._settle_orders()

    def _settle_orders(self) -> None:
        """Forget lost orders whose instances must have appeared by now."""
        now_s = time.monotonic()
        for lease in [lease for lease, until_s in self._unsettled.items() if until_s <= now_s]:
            del self._unsettled[lease]
            self._ec2.running.pop(f"an order of {lease}", None)

    def _mind_the_cap(self) -> None:
        """Give notice to all leases in time, so that the run does not exceed `usd_max`, and lease nothing more then."""
        left_s = self._ec2.cap_left_s()
        if left_s is None or left_s > self._ec2.notice_s:
            return
        if not self._ec2.capped:
            self._ec2.capped = True
            log.warning("the spending cap ends this provider's leases", provider=self.name, cap=self.settings.usd_max)
        reason = f"usd_max = ${self.settings.usd_max:g} is about to be spent"
        end_s = max(0.0, left_s - self.settings.poll_s - ENDING_S)
        for lease in tuple(self._held):
            self._expect_end(lease, end_s, LeaseEnding(EndCause.RELEASED, reason))

    def _expect_end(self, lease: LeaseId, left_s: float, ending: LeaseEnding) -> None:
        held = self._leases.get(lease)
        if held is None or held.noticed is not None or held.ending.done():
            return
        deadline_ns = self.context.now_ns() + round(left_s * NS_PER_S)
        if ending.cause is not EndCause.PREEMPTED:
            self._end_at(held, deadline_ns, ending)
        held.noticed = ending
        self._emit(LeaseNotice(lease=lease, deadline_ns=deadline_ns, reason=ending.detail))

    async def _follow_prices(self) -> None:
        while True:
            await asyncio.sleep(min(self.settings.price_s, self._until_repriced_s()))
            with contextlib.suppress(Ec2Error):  # The prices known stand until the next look.
                self._ec2.priced(await self.ask(self.api.prices))
                for leased in tuple(self._held.values()):
                    self._tell_price(leased)
                self._ec2.scores = await self.ask(self.api.scores)
            self.announce()

    def _until_repriced_s(self) -> float:
        """Return the time until the next hour of an instance has begun, which has a price of its own."""
        now_s = self._now_s()
        hours = (HOUR_S - (now_s - one.began_s) % HOUR_S for one in self._ec2.running.values())
        return min(hours, default=HOUR_S) + SLACK_S

    async def _hear(self) -> None:
        """Read notices from the queue. Put notices of other runs' instances back until they are too old."""
        told, wait_s = False, min(QUEUE_WAIT_S, int(self.settings.answer_timeout_s / 2))
        while True:
            try:
                notices = await call(wait_s + self.answer_s, self.api.notices, wait_s)
                ours = [notice for notice in notices if self._on_notice(notice) or self._is_old(notice)]
                await self.ask(self.api.discard, ours)
                await self.ask(self.api.put_back, [one for one in notices if one not in ours], PUT_BACK_S)
                told = False
            except (Ec2Error, TimeoutError) as error:
                if not told:
                    log.warning("no notices can be read: workers read their instances' own", error=str(error))
                told = True
                await asyncio.sleep(self.settings.poll_s)

    def _is_old(self, notice: QueueNotice) -> bool:
        return not notice.kind or self._now_s() - notice.at_s > NOTICE_S

    def _on_notice(self, notice: QueueNotice) -> bool:
        """Handle a notice, and return whether it concerns an instance of this run."""
        leased = next((one for one in self._held.values() if one.instance == notice.instance), None)
        if leased is None:
            return False
        if notice.kind == INTERRUPTION:
            left_s = min(NOTICE_S, max(0.0, notice.at_s + NOTICE_S - self._now_s()))
            why = f"EC2 takes {notice.instance} back"
            self._expect_end(leased.lease, left_s, LeaseEnding(EndCause.PREEMPTED, why))
        elif notice.kind == REBALANCE and not leased.advised:
            leased.advised = True
            self._ec2.advised_against(leased.pool)
            reason = f"EC2 recommends to rebalance {notice.instance}: it is likelier to be taken back"
            self._emit(LeaseNotice(lease=leased.lease, deadline_ns=None, reason=reason))
        return True

    # Instances of no lease

    def _of_no_lease(self, seen: Sequence[Instance]) -> list[Instance]:
        """Return the living instances that belong to no held or ordered lease, and a lease's second instances."""
        ours = {leased.instance for leased in self._held.values()}
        return [i for i in seen if i.lives and i.id not in ours and i.lease not in self._ordering]

    async def _end_strays(self, strays: Sequence[Instance]) -> None:
        """End them. The run is told before what each has cost by then: its next process looks for living ones only."""
        if not strays:
            return
        for stray in strays:
            if stray.id not in self._strays:
                self._strays[stray.id] = time.monotonic()
                usd = await self._bill(stray)
                self._ec2.running[stray.id] = Running(stray.pool, stray.began_s, told_usd=usd)
                self._tell_strays(usd)
                log.warning("an instance of no lease is ended", instance=stray.id, lease=stray.lease)
                self._remark(stray.id, f"{stray.id}, ordered for {stray.lease}, was of no lease and has been ended")
        await self.ask(self.api.terminate, [stray.id for stray in strays])

    async def _settle_strays(self, seen: Sequence[Instance]) -> None:
        """Tell the run what else instances of no lease have cost, once they are over."""
        by_id = {instance.id: instance for instance in seen}
        for stray, since_s in tuple(self._strays.items()):
            described = by_id.get(stray)
            if described is not None and not described.lives:
                usd = await self._bill(described)
            elif described is None and time.monotonic() - since_s > UNSEEN_S:
                usd = self._ec2.bill_usd(self._ec2.running[stray], 0.0)
            else:
                continue
            del self._strays[stray]
            self._tell_strays(usd - self._ec2.running.pop(stray).told_usd)

    def _tell_strays(self, usd: float) -> None:
        if usd:
            self._emit(StraysBilled(provider=self.name, usd=usd))

    async def sweep(self) -> bool:
        try:
            seen = await self.ask(self.api.instances)
            left = self._of_no_lease(seen)
            await self._end_strays(left)
            await self._settle_strays(seen)
        except Ec2Error as error:
            if not error.passing:
                raise
            log.warning("the search for what is left is repeated", provider=self.name, error=str(error))
            return False
        self._settle_orders()
        return not left and not self._unsettled and not self._strays

    async def _delete_template(self) -> None:
        while not await self.ask(self.api.delete_template):
            if time.monotonic() - self._template_since_s > SETTLING_S:
                return
            await asyncio.sleep(LOOK_AGAIN_S)

    async def _delete_secret(self, lease: LeaseId) -> None:
        """Delete the lease's secret. One that cannot be deleted now, or is not known yet, is at the end."""
        if self.settings.secret_prefix:
            with contextlib.suppress(Ec2Error):
                await self._forget_secret(lease)

    async def _forget_secret(self, lease: LeaseId) -> None:
        known = await self.ask(self.api.delete_secret, lease)
        if known or time.monotonic() - self._secrets.get(lease, -math.inf) > SETTLING_S:
            self._secrets.pop(lease, None)

    async def _delete_secrets(self) -> None:
        """Delete all secrets of this run and provider."""
        while left := {*await self.ask(self.api.secrets), *self._secrets}:
            names = sorted(left)
            for first in range(0, len(names), CALLS_AT_ONCE):
                await asyncio.gather(*map(self._forget_secret, names[first : first + CALLS_AT_ONCE]))
            if self._secrets:
                await asyncio.sleep(LOOK_AGAIN_S)

    def _remark(self, key: str, text: str) -> None:
        self.context.note(f"{REMARK}{self.name}: {key}", text)

    # How it is asked

    def _now_s(self) -> float:
        """AWS's clock, in Unix time."""
        return time.time() + self.api.skew_s

    def _look_command(self) -> str:
        return (
            f"aws ec2 describe-instances --region {self.settings.region} --filters "
            f"'Name=tag:elastic:run,Values={self.api.run}' 'Name=instance-state-name,Values=pending,running'"
        )

    async def ask(self, function: Callable[..., T], *arguments: Any) -> T:
        """Call a function of the API. Raises `Ec2Error`, also if EC2 does not answer in time."""
        try:
            return await super().ask(function, *arguments)
        except TimeoutError as error:
            raise Ec2Error(f"{self.name}: {function.__name__} of {self.vendor}", "Timeout", str(error)) from error
