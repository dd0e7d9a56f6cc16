"""A simulated provider of GPUs. It keeps the provider's contract, late and unwillingly where the plan wants it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from msgspec import UNSET

from elastic.core import events as e
from elastic.core.ids import worker_id
from elastic.core.types import NS_PER_S, EndCause, LeaseId, Nanoseconds, Offer, WorkerId, WorkerRole
from elastic.testing.faults.core.commands import Interval, LeaseTime
from elastic.testing.faults.core.settings import MS, SimulatedProviderSettings

if TYPE_CHECKING:
    from elastic.testing.faults.core.world import SimulatedWorld

ANSWER_NS = (1 * MS, 300 * MS)
LATE_END_NS = (1 * MS, 2000 * MS)
"""How long after an expiry the provider gets round to saying so."""

LATE_TURNS = 1.1
"""Most time of a turn's grant on a shared pool, as a share of the promised time."""
LONGEST_SILENCE_NS = 3000 * MS
SILENCE_APART_NS = 6000 * MS


@dataclass(slots=True)
class SimulatedLease:
    """A lease as its provider knows it. `ignored` counts releases that the provider did not react to.

    `grant` and `notice` are the events told when it was granted and when it was going to be taken.
    """

    id: LeaseId
    grant: e.LeaseGranted | None = None
    notice: e.LeaseNotice | None = None
    answered: bool = False
    ignored: int = 0
    workers: list[WorkerId] = field(default_factory=list[WorkerId])
    granted_ns: Nanoseconds = 0


class SimulatedProvider:
    def __init__(self, world: "SimulatedWorld", settings: SimulatedProviderSettings) -> None:
        self.settings = settings
        self.held: dict[LeaseId, SimulatedLease] = {}
        self.billed: list[LeaseTime] = []
        """The billed times of leases that are over."""
        self.asked_back_ns: dict[LeaseId, Nanoseconds] = {}
        """When each lease was asked back first, whether that was heard or not."""
        self.silences: list[Interval] = []
        self._world = world
        self._ended: dict[LeaseId, EndCause] = {}
        self._closed_until_ns: Nanoseconds = 0
        self.silent_until_ns: Nanoseconds = -SILENCE_APART_NS

    @property
    def reliable(self) -> bool:
        return self.settings.role is WorkerRole.TRAINER

    def granted(self) -> list[LeaseId]:
        return [lease for lease, held in self.held.items() if held.grant is not None]

    def take_stock(self, known: Mapping[LeaseId, bool]) -> list[e.Event]:
        """The events that a new orchestrator process has missed. `known` maps its leases to whether they were granted.

        Leases that it does not know end here.
        """
        for lease in [lease for lease in self.held if lease not in known]:
            self._take_back(self.held[lease], noticed=False)
        return [event for lease, granted in known.items() for event in self._missed(lease, granted=granted)]

    def _missed(self, lease: LeaseId, *, granted: bool) -> list[e.Event]:
        held = self.held.get(lease)
        if held is not None:
            grant = held.grant if not granted else None
            return [event for event in (grant, held.notice) if event is not None]
        if not granted:
            return []
        cause = self._ended.get(lease, EndCause.LOST)
        return [e.LeaseEnded(lease=lease, cause=cause, detail="while nobody listened")]

    def offer(self) -> None:
        """Announces the provider's free capacity."""
        open_ = self._world.loop.now_ns >= self._closed_until_ns
        self._tell(
            e.OfferChanged(
                offer=Offer(
                    provider=self.settings.name,
                    role=self.settings.role,
                    available=max(0, self.settings.leases - len(self.held)) if open_ else 0,
                    usd_per_gpu_hour=self.settings.usd_per_gpu_hour,
                    replacements=self.settings.overlap - max(0, len(self.held) - self.settings.leases) if open_ else 0,
                    gpus_per_worker=self.settings.gpus_per_worker,
                    workers_per_lease=self.settings.workers_per_lease,
                    grant_within_s=self.settings.grant_within_ns / NS_PER_S or UNSET,
                    by_permit=self.settings.by_permit or UNSET,
                )
            )
        )

    def acquire(self, lease: LeaseId) -> None:
        assert lease not in self.held, f"{lease} is asked for while there is one"
        held = self.held[lease] = SimulatedLease(lease)
        self._ended.pop(lease, None)
        full = (
            len(self.held) > self.settings.leases + self.settings.overlap
            or self._world.loop.now_ns < self._closed_until_ns
        )
        fault_rates, rng, injector = self._world.fault_rates, self._world.rng, self._world.injector
        if self._silent:
            return
        if full or (not self.reliable and injector.injects(rng, fault_rates.request_refused)):
            self._soon(lambda: self._refuse(held))
        elif self.reliable or not injector.injects(rng, fault_rates.request_ignored):
            self._in_turn(lambda: self._grant(held))

    def release(self, lease: LeaseId) -> None:
        """End a lease. Does nothing for an unknown one, refuses one that is not granted, and ignores at most one
        call."""
        held = self.held.get(lease)
        self.asked_back_ns.setdefault(lease, self._world.loop.now_ns)
        if held is None or self._silent:
            return
        world = self._world
        if held.ignored == 0 and world.injector.injects(world.rng, world.fault_rates.release_ignored):
            held.ignored += 1
        elif held.grant is not None:
            self._soon(lambda: self._end(held, EndCause.RELEASED))
        else:
            self._soon(lambda: self._refuse(held))

    def notice(self, lease: LeaseId) -> bool:
        """Say that the lease will be taken, and take it; False if there is none."""
        held, deadline_ns = self.held.get(lease), self._world.loop.now_ns + self.settings.notice_ns
        if held is None or held.grant is None:
            return False
        held.notice = e.LeaseNotice(lease=lease, deadline_ns=deadline_ns, reason="preemption")
        self._tell(held.notice)
        self._world.loop.at(deadline_ns, lambda: self._end(held, EndCause.PREEMPTED))
        return True

    def end(self, lease: LeaseId, cause: EndCause, *, noticed: bool = True) -> bool:
        """Take the GPUs back: its processes die, billing stops. False if there is nothing to take."""
        held = self.held.get(lease)
        return held is not None and self._end(held, cause, noticed=noticed)

    def _end(self, held: SimulatedLease, cause: EndCause, *, noticed: bool = True) -> bool:
        if held.grant is None or self.held.get(held.id) is not held:
            return False
        self._take_back(held, noticed=noticed)
        self._ended[held.id] = cause
        self._tell(e.LeaseEnded(lease=held.id, cause=cause))
        self.offer()
        return True

    def _take_back(self, held: SimulatedLease, *, noticed: bool) -> None:
        del self.held[held.id]
        if held.grant is not None:
            self.billed.append(LeaseTime(held.id, len(held.workers), held.granted_ns, self._world.loop.now_ns))
        for worker in held.workers:
            self._world.end_worker(worker, noticed=noticed)

    def close(self, duration_ns: Nanoseconds) -> None:
        """Take everything back, and have nothing for a while."""
        self._closed_until_ns = self._world.loop.now_ns + duration_ns
        for lease in list(self.held):
            self.end(lease, EndCause.PREEMPTED)
        self.offer()
        self._world.loop.at(self._closed_until_ns, self.offer)

    def fall_silent(self, duration_ns: Nanoseconds) -> bool:
        """Hear and say nothing for a while, and not again soon: a run's end does not wait for its leases for ever."""
        now_ns = self._world.loop.now_ns
        if now_ns < self.silent_until_ns + SILENCE_APART_NS:
            return False
        self.silent_until_ns = now_ns + min(duration_ns, LONGEST_SILENCE_NS)
        self.silences.append((now_ns, self.silent_until_ns))
        return True

    @property
    def _silent(self) -> bool:
        return self._world.loop.now_ns < self.silent_until_ns

    def _tell(self, event: e.Event) -> None:
        hear = self._world.listener()
        if self._silent:
            self._world.loop.at(self.silent_until_ns, lambda: hear(event))
        else:
            hear(event)

    def _in_turn(self, action: Callable[[], object]) -> None:
        within_ns = self.settings.grant_within_ns
        if within_ns and not self.reliable:
            self._world.loop.after(self._world.rng.randint(MS, round(LATE_TURNS * within_ns)), action)
        else:
            self._soon(action)

    def _soon(self, action: Callable[[], object]) -> None:
        self._world.loop.after(self._world.rng.randint(*ANSWER_NS), action)

    def _refuse(self, held: SimulatedLease) -> None:
        if self.held.get(held.id) is held and not held.answered:
            held.answered = True
            del self.held[held.id]
            self._tell(e.LeaseRefused(lease=held.id, reason="no capacity"))

    def _grant(self, held: SimulatedLease) -> None:
        if held.answered or self.held.get(held.id) is not held:
            return
        held.answered = True
        held.granted_ns = self._world.loop.now_ns
        loop, rng, settings = self._world.loop, self._world.rng, self.settings
        held.workers = [worker_id(held.id, n) for n in range(settings.workers_per_lease)]
        expires_at_ns = None if settings.life_ns is None else loop.now_ns + settings.life_ns
        for worker in held.workers:
            if self.reliable or not self._world.injector.injects(rng, self._world.fault_rates.boot_failed):
                after_ns = rng.randint(settings.boot_ns // 2, settings.boot_ns * 2)
                self._world.boot_worker(worker, held.id, settings.role, after_ns)
        held.grant = e.LeaseGranted(lease=held.id, workers=tuple(held.workers), expires_at_ns=expires_at_ns)
        self._tell(held.grant)
        self.offer()
        if expires_at_ns is not None:
            late_ns = expires_at_ns + rng.randint(*LATE_END_NS)
            loop.at(late_ns, lambda: self._end(held, EndCause.EXPIRED))
