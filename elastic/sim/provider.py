"""A simulated provider of GPUs. It keeps the provider's contract, late and unwillingly where the plan wants it."""

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Protocol

from elastic.core import events as e
from elastic.core.types import EndCause, LeaseId, Nanoseconds, Offer, WorkerId, WorkerRole
from elastic.sim.faults import Mishaps, Tally
from elastic.sim.loop import EventLoop
from elastic.sim.settings import MS, ProviderSettings

ANSWER_NS = (1 * MS, 300 * MS)
LATE_END_NS = (1 * MS, 2000 * MS)
"""How long after an expiry the provider gets round to saying so."""

LONGEST_SILENCE_NS = 3000 * MS
SILENCE_APART_NS = 6000 * MS


@dataclass(slots=True)
class Held:
    """A lease as its provider knows it. `ignored` counts the releases that fell on deaf ears."""

    id: LeaseId
    granted: bool = False
    answered: bool = False
    ignored: int = 0
    workers: list[WorkerId] = field(default_factory=list[WorkerId])


class Market(Protocol):
    """What a provider sees of its world."""

    loop: EventLoop
    rng: Random
    tally: Tally

    @property
    def mishaps(self) -> Mishaps: ...

    def feed(self, event: e.Event) -> None: ...

    def run_ns(self, at_ns: Nanoseconds) -> Nanoseconds:
        """A time of the world on the run's own clock."""
        ...

    def boot_worker(self, worker: WorkerId, lease: LeaseId, role: WorkerRole, after_ns: Nanoseconds) -> None: ...

    def end_worker(self, worker: WorkerId, *, noticed: bool) -> None: ...


class SimulatedProvider:
    def __init__(self, market: Market, settings: ProviderSettings) -> None:
        self.settings = settings
        self.held: dict[LeaseId, Held] = {}
        self._market = market
        self._closed_until_ns: Nanoseconds = 0
        self._silent_until_ns: Nanoseconds = -SILENCE_APART_NS

    @property
    def reliable(self) -> bool:
        return self.settings.role is WorkerRole.TRAINER

    def offer(self) -> None:
        """Say what can be had now."""
        open_ = self._market.loop.now_ns >= self._closed_until_ns
        self._tell(
            e.OfferChanged(
                offer=Offer(
                    provider=self.settings.name,
                    role=self.settings.role,
                    available=max(0, self.settings.leases - len(self.held)) if open_ else 0,
                    usd_per_gpu_hour=self.settings.usd_per_gpu_hour,
                    successors=self.settings.overlap - max(0, len(self.held) - self.settings.leases) if open_ else 0,
                    gpus_per_worker=self.settings.gpus_per_worker,
                    workers_per_lease=self.settings.workers_per_lease,
                )
            )
        )

    def acquire(self, lease: LeaseId) -> None:
        held = self.held[lease] = Held(lease)
        full = (
            len(self.held) > self.settings.leases + self.settings.overlap
            or self._market.loop.now_ns < self._closed_until_ns
        )
        mishaps, rng, tally = self._market.mishaps, self._market.rng, self._market.tally
        if self._silent:
            return
        if full or (not self.reliable and tally.befalls(rng, mishaps.request_refused)):
            self._soon(lambda: self._refuse(held))
        elif self.reliable or not tally.befalls(rng, mishaps.request_ignored):
            self._soon(lambda: self._grant(held))

    def release(self, lease: LeaseId) -> None:
        """Of an unknown lease a no-op; of one not granted yet a refusal; deaf at most once to any."""
        held = self.held.get(lease)
        if held is None or self._silent:
            return
        market = self._market
        if held.ignored == 0 and market.tally.befalls(market.rng, market.mishaps.release_ignored):
            held.ignored += 1
        elif held.granted:
            self._soon(lambda: self.end(lease, EndCause.RELEASED))
        else:
            self._soon(lambda: self._refuse(held))

    def notice(self, lease: LeaseId) -> None:
        deadline_ns = self._market.loop.now_ns + self.settings.notice_ns
        told_ns = self._market.run_ns(deadline_ns)
        self._tell(e.LeaseNotice(lease=lease, deadline_ns=told_ns, reason="preemption"))
        self._market.loop.at(deadline_ns, lambda: self.end(lease, EndCause.PREEMPTED))

    def end(self, lease: LeaseId, cause: EndCause, *, noticed: bool = True) -> None:
        """Take the GPUs back: its processes die, billing stops."""
        held = self.held.get(lease)
        if held is None or not held.granted:
            return
        del self.held[lease]
        for worker in held.workers:
            self._market.end_worker(worker, noticed=noticed)
        self._tell(e.LeaseEnded(lease=lease, cause=cause))
        self.offer()

    def close(self, duration_ns: Nanoseconds) -> None:
        """Take everything back, and have nothing for a while."""
        self._closed_until_ns = self._market.loop.now_ns + duration_ns
        for lease in list(self.held):
            self.end(lease, EndCause.PREEMPTED)
        self.offer()
        self._market.loop.at(self._closed_until_ns, self.offer)

    def fall_silent(self, duration_ns: Nanoseconds) -> None:
        """Hear and say nothing for a while, and not again soon: a run's end does not wait for its leases for ever."""
        now_ns = self._market.loop.now_ns
        if now_ns >= self._silent_until_ns + SILENCE_APART_NS:
            self._silent_until_ns = now_ns + min(duration_ns, LONGEST_SILENCE_NS)

    def end_all(self) -> None:
        """End whatever is held or asked for, and tell nobody."""
        for held in self.held.values():
            for worker in held.workers:
                self._market.end_worker(worker, noticed=False)
        self.held.clear()

    @property
    def _silent(self) -> bool:
        return self._market.loop.now_ns < self._silent_until_ns

    def _tell(self, event: e.Event) -> None:
        if self._silent:
            self._market.loop.at(self._silent_until_ns, lambda: self._tell(event))
        else:
            self._market.feed(event)

    def _soon(self, action: Callable[[], None]) -> None:
        self._market.loop.after(self._market.rng.randint(*ANSWER_NS), action)

    def _refuse(self, held: Held) -> None:
        if held.id in self.held and not held.answered:
            held.answered = True
            del self.held[held.id]
            self._tell(e.LeaseRefused(lease=held.id, reason="no capacity"))

    def _grant(self, held: Held) -> None:
        if held.answered or held.id not in self.held:
            return
        held.answered = held.granted = True
        loop, rng, settings = self._market.loop, self._market.rng, self.settings
        held.workers = [f"{held.id}/{n}" for n in range(settings.workers_per_lease)]
        expires_at_ns = None if settings.life_ns is None else loop.now_ns + settings.life_ns
        for worker in held.workers:
            if self.reliable or not self._market.tally.befalls(rng, self._market.mishaps.boot_failed):
                after_ns = rng.randint(settings.boot_ns // 2, settings.boot_ns * 2)
                self._market.boot_worker(worker, held.id, settings.role, after_ns)
        told_ns = None if expires_at_ns is None else self._market.run_ns(expires_at_ns)
        self._tell(e.LeaseGranted(lease=held.id, workers=tuple(held.workers), expires_at_ns=told_ns))
        self.offer()
        if expires_at_ns is not None:
            late_ns = expires_at_ns + rng.randint(*LATE_END_NS)
            loop.at(late_ns, lambda: self.end(held.id, EndCause.EXPIRED))
