"""Leases: asked for while they are offered, given back when they are of no use, and repeated until confirmed.

Source: docs/design.md, "A lease".
"""

import math
from functools import partial

from elastic.core import commands as c
from elastic.core import events as e
from elastic.core.allowance import capped_gpus, gpus_of, room
from elastic.core.departures import Departures
from elastic.core.ids import lease_of
from elastic.core.leases import Lease
from elastic.core.ledger import NANO_USD_PER_USD, Price
from elastic.core.market import LeaseMarket
from elastic.core.run_state import Deadlines, Handlers, RunState
from elastic.core.types import EndCause, LeaseId, LeaseState, Nanoseconds, Offer, WorkerRole, WorkerState
from elastic.core.worker_manager import WorkerManager

NO_ROLLOUTS = "no rollouts are left to do for now"
_FAILURES = (
    EndCause.BOOT_TIMEOUT,
    EndCause.EXPIRED,
    EndCause.FENCED,
    EndCause.LOST,
    EndCause.BARRED,
    EndCause.STRUCK_OUT,
)


class LeaseManager:
    def __init__(self, run: RunState, workers: WorkerManager, departures: Departures) -> None:
        self._run = run
        self._workers = workers
        self._departures = departures
        self._worker_bound: int | None = None
        self.handlers: Handlers = {
            e.OfferChanged: self._on_offer,
            e.LeaseGranted: self._on_granted,
            e.LeaseRefused: self._on_refused,
            e.LeaseNotice: self._on_notice,
            e.LeaseEnded: self._on_ended,
            e.LeaseRepriced: self._on_repriced,
            e.StraysBilled: self._on_strays,
        }
        self.due: Deadlines = {
            "grant": lambda lease: self._withdraw(self._run.leases.leases[lease], "not granted in time"),
            "slice": lambda lease: self._withdraw(self._run.leases.leases[lease], "its turn did not come in time"),
            "lull": self._lull_nearly_over,
            "release": self._ask_back,
            "expiry": self._expiry_due,
            "early replacement": self._replacement_due,
            "back-off": lambda _: self.provision(),
            "provision": lambda _: self.provision(),
        }

    # Asking

    def _on_offer(self, event: e.OfferChanged) -> None:
        table = self._run.leases
        if table.lull_since_ns is not None and event.offer.provider not in table.offers:
            table.paused[event.offer.provider] = None
        self._run.leases.offers[event.offer.provider] = event.offer
        self.provision()

    def follow_bound(self) -> None:
        """Ask every provider again whenever the number of workers worth having changes."""
        if self._worker_bound != self._run.leases.worker_bound:
            self._worker_bound = self._run.leases.worker_bound
            self.provision()

    def provision(self) -> None:
        """Ask every provider for as many leases as are worth having, for one may have what another has run out of."""
        for offer in self._run.leases.offers.values():
            self._take_of(offer)

    def _take_of(self, offer: Offer) -> None:
        run = self._run
        if not run.active:
            return
        if offer.role is WorkerRole.TRAINER:
            wanted = 0 if run.timers.waiting("back-off", offer.provider) else 1 - run.leases.held(offer.provider)
            if wanted and room(run, offer) == 0:
                wanted = 0
                run.count_budget()
        else:
            market = LeaseMarket(run.leases, run.timers, room=partial(room, run))
            wanted = run.policies.provisioning.leases_wanted(offer, market)
        for _ in range(wanted):
            self._ask_for(offer.provider)

    def _replace(self, lease: Lease) -> None:
        """Ask for capacity in place of a lease that has ended: its own provider first, the others after its next
        offer."""
        run = self._run
        self._take_of(run.leases.offers[lease.provider])
        if run.active and not run.timers.waiting("provision", "market"):
            run.wait("provision", "market", run.limits.retry_base_ns)

    def _ask_for(self, provider: str, replaces: LeaseId | None = None) -> None:
        run = self._run
        lease = run.leases.request(provider, replaces)
        run.count_budget()
        within_ns = lease.offer.grant_within_ns
        if lease.offer.role is WorkerRole.TRAINER and run.version is None and (within_ns or run.permit_ns):
            run.wait_for_start()
        if within_ns:
            run.leases.slices[lease.id] = None
        run.wait("slice" if within_ns else "grant", lease.id, within_ns or run.limits.acquire_timeout_ns)
        run.out.append(c.AcquireLease(lease=lease.id, provider=provider))

    def _on_granted(self, event: e.LeaseGranted) -> None:
        run, lease = self._run, self._run.leases.leases.get(event.lease)
        if lease is None:
            self._give_back_unknown(event.lease)
            return
        if lease.state is not LeaseState.REQUESTED:
            return
        self._answered(lease)
        run.leases.move(lease, LeaseState.GRANTED, run.now_ns, "granted")
        self._open(lease, event)
        if lease.release_reason:
            self._release(lease, lease.release_reason)
        elif not run.active:
            self._release(lease, "the run is over")
        elif not lease.workers:
            self._release(lease, "it came without a worker")

    def _answered(self, lease: Lease) -> None:
        for what in ("grant", "slice"):
            self._run.timers.clear(what, lease.id)

    def _open(self, lease: Lease, event: e.LeaseGranted) -> None:
        """Billing starts, and the workers are awaited. A worker's id is never used twice."""
        run, offer = self._run, lease.offer
        lease.workers = tuple(worker for worker in event.workers if not run.ledger.knows(worker))
        run.count_budget()
        unheard_since_ns = run.controls.unheard_since_ns.pop(lease.id, run.now_ns)
        if unheard_since_ns < run.now_ns:
            cost = Price.most_of(offer).most_nano_usd(run.now_ns - unheard_since_ns)
            run.controls.carried_nano_usd += len(lease.workers) * cost
        catches_up = offer.role is WorkerRole.TRAINER and run.version is not None
        boot_ns = offer.boot_ns + catches_up * run.limits.catch_up_timeout_ns
        if offer.role is WorkerRole.TRAINER:
            boot_ns += run.permit_ns
        for worker in lease.workers:
            run.fleet.add(worker, lease.id, lease.provider, offer.role)
            run.ledger.open(
                lease.id,
                worker,
                lease.provider,
                offer.gpus_per_worker,
                offer.usd_per_gpu_hour,
                run.now_ns,
                offer.billing_ns,
                parks=offer.by_permit,
                least_ns=offer.least_billed_ns,
            )
            run.wait("boot", worker, boot_ns + run.patience.limit_ns("boot", run.now_ns))
            self._workers.let_in(worker)
        if event.expires_at_ns is not None:
            lease.expires_at_ns = event.expires_at_ns
            self._wait_expiry(lease, event.expires_at_ns - run.patience.leaving_most_ns)

    def _on_repriced(self, event: e.LeaseRepriced) -> None:
        run, lease = self._run, self._run.leases.leases.get(event.lease)
        for worker in () if lease is None else lease.workers:
            run.ledger.reprice(worker, math.ceil(event.usd * NANO_USD_PER_USD), event.usd_per_gpu_hour, run.now_ns)
        run.count_budget()

    def _on_strays(self, event: e.StraysBilled) -> None:
        self._run.ledger.bill_strays(event.provider, math.ceil(event.usd * NANO_USD_PER_USD))
        self._run.count_budget()

    def _give_back_unknown(self, lease: LeaseId) -> None:
        """A lease that counted as refused or ended is granted after all: release it, so that nothing is left behind."""
        provider = self._run.leases.issuer(lease)
        if provider is not None:
            self._run.out.append(c.ReleaseLease(lease=lease, provider=provider, reason="no longer expected"))

    def _on_refused(self, event: e.LeaseRefused) -> None:
        lease = self._run.leases.leases.get(event.lease)
        if lease is not None and lease.state is LeaseState.REQUESTED:
            self._refused(lease, event.reason, event.withdrawn)

    def _refused(self, lease: Lease, reason: str, withdrawn: bool = False) -> None:
        run = self._run
        self._answered(lease)
        for worker in [worker for worker in run.leases.early if lease_of(worker) == lease.id]:
            del run.leases.early[worker]
            run.out.append(c.FenceWorker(worker=worker, reason="its lease is refused"))
        run.controls.unheard_since_ns.pop(lease.id, None)
        run.count_budget()
        run.leases.move(lease, LeaseState.REFUSED, run.now_ns, reason)
        if lease.offer.role is WorkerRole.TRAINER:
            most = run.limits.trainer_restarts_max if run.version is not None or withdrawn else 0
            self._lose_trainer(f"is not to be had: {reason}", most)
        if lease.release_reason != NO_ROLLOUTS:
            self._back_off(lease.provider)
        self._retry_replacement(lease.replaces)
        self.provision()

    def _back_off(self, provider: str) -> None:
        """Leave the provider alone for a while, twice as long with every failure in a row.

        What fails during a back-off was asked for before it, and tells nothing new.
        """
        run = self._run
        if not run.active or run.timers.waiting("back-off", provider):
            return
        failures = run.leases.failures[provider] = run.leases.failures.get(provider, 0) + 1
        run.wait("back-off", provider, run.back_off_ns(failures))

    def _note_failure(self, lease: Lease, cause: EndCause) -> None:
        """Back off from the provider if the lease failed before any of its workers served: the next one would likely
        fail, too."""
        if cause in _FAILURES and not any(worker.served for worker in self._run.fleet.of_lease(lease.id)):
            self._back_off(lease.provider)

    def plan_replacements(self) -> None:
        """Schedule requests for replacements of leases that have become useful, early enough that turns move to
        ready workers."""
        run, policy = self._run, self._run.policies.replacement
        ready, run.leases.newly_ready = run.leases.newly_ready, {}
        for lease in (run.leases.leases[lease_id] for lease_id in ready if lease_id in run.leases.leases):
            if policy is not None and lease.expires_at_ns is not None and not lease.leaving:
                lead_ns = policy.lead_ns(lease.offer, run.leases.ready_ns(lease.provider))
                asked_at_ns = lease.expires_at_ns - run.patience.leaving_ns(run.now_ns) - lead_ns
                run.wait("early replacement", lease.id, max(0, asked_at_ns - run.now_ns))

    def _replacement_due(self, lease_id: str) -> None:
        run, lease = self._run, self._run.leases.leases[lease_id]
        if not run.active or lease_id in run.leases.replaced():
            return
        offer = run.leases.offers[lease.provider]
        market = LeaseMarket(run.leases, run.timers, ending=lease, room=partial(room, run))
        if run.policies.provisioning.leases_wanted(offer, market) > 0:
            self._ask_for(lease.provider, replaces=lease_id)
        else:
            self._retry_replacement(lease_id)

    def _retry_replacement(self, lease_id: LeaseId | None) -> None:
        """Try again later, unless the lease is leaving: a replacement may become available, or worth its price."""
        lease = self._run.leases.leases.get(lease_id or "")
        if lease is not None and not lease.leaving:
            self._run.wait("early replacement", lease.id, self._run.limits.retry_base_ns)

    # Only while there are rollouts to do

    def follow_rollouts(self, *, to_do: bool) -> bool:
        """Give leases back once no rollouts are left to do, and ask for some when there are, or shortly before.

        Returns whether either has begun.
        """
        run, table = self._run, self._run.leases
        if not run.active or run.policies.holding is None:
            return False
        if to_do:
            return self.end_lull()
        if table.lull_since_ns is not None:
            return False
        evaluated = bool(run.plan.evaluation) and run.plan.evaluation.at_end
        last = run.step is not None and run.step.number + 1 == run.plan.steps and not evaluated
        self.begin_lull(table.last_lull_ns, comes_to_an_end=not last)
        return True

    def begin_lull(self, foreseen_ns: Nanoseconds | None, *, comes_to_an_end: bool = True) -> None:
        """Give leases back as the holding policy says, since there are no rollouts to do for `foreseen_ns` (None: for
        an unknown time). If the lull does not come to an end, all leases go back. A later call replaces an earlier one.
        """
        run, table, holding = self._run, self._run.leases, self._run.policies.holding
        if table.lull_since_ns is None:
            table.lull_since_ns = run.now_ns
        self._forget_pauses()
        for provider, offer in table.offers.items():
            if offer.role is WorkerRole.TRAINER:
                continue
            pause_ns = None
            if comes_to_an_end and holding is not None:
                pause_ns = holding.pause_ns(offer, foreseen_ns, table.ready_ns(provider))
            if pause_ns == 0:
                continue
            table.paused[provider] = None
            if pause_ns is not None:
                run.wait("lull", provider, pause_ns)
        for lease in [lease for lease in table.leases.values() if lease.provider in table.paused and not lease.goes]:
            self._hand_in(lease, NO_ROLLOUTS)

    def end_lull(self) -> bool:
        """Note that there are rollouts to do again. Returns whether a lull has ended."""
        table = self._run.leases
        if table.lull_since_ns is None:
            return False
        table.lull_since_ns, table.last_lull_ns = None, self._run.now_ns - table.lull_since_ns
        self._forget_pauses()
        self.provision()
        return True

    def _lull_nearly_over(self, provider: str) -> None:
        del self._run.leases.paused[provider]
        self.provision()

    def _forget_pauses(self) -> None:
        paused, self._run.leases.paused = self._run.leases.paused, {}
        for provider in paused:
            self._run.timers.clear("lull", provider)

    # Giving back

    def release_vacated(self) -> None:
        """Give back the leases whose last worker has gone."""
        run = self._run
        vacated, run.vacated = run.vacated, {}
        for lease_id, cause in vacated.items():
            lease = run.leases.leases.get(lease_id)
            if lease is not None and lease.state is LeaseState.GRANTED:
                self._note_failure(lease, cause)
                self._release(lease, cause)

    def give_back_all(self, reason: str) -> None:
        """The run is over: workers say goodbye where they can, the rest is released or withdrawn at once."""
        run = self._run
        run.timers.clear("provision", "market")
        for provider in run.leases.offers:
            run.timers.clear("back-off", provider)
        self._forget_pauses()
        for lease in list(run.leases.leases.values()):
            self._hand_in(lease, reason)

    def _hand_in(self, lease: Lease, reason: str) -> None:
        if lease.state is LeaseState.REQUESTED:
            self._withdraw(lease, reason)
        elif any(worker.connected for worker in self._run.fleet.of_lease(lease.id)):
            self._empty(lease, reason)
        else:
            self._release(lease, reason)

    def follow_cap(self, provider: str) -> None:
        """Give back what is held beyond the provider's cap: what serves least first, with time for its turns to end or
        move."""
        run, cap = self._run, self._run.controls.caps.get(provider)
        if cap is None or not run.active:
            return
        excess, reason = capped_gpus(run, provider) - cap, f"{provider} is capped at {cap} GPUs"
        held = [x for x in run.leases.leases.values() if x.provider == provider and not x.goes]
        for lease in sorted(held, key=self._usefulness):
            if excess <= 0:
                return
            excess -= gpus_of(lease.offer)
            if lease.state is LeaseState.REQUESTED:
                self._withdraw(lease, reason)
            else:
                self._leave(lease, run.now_ns + run.patience.leaving_ns(run.now_ns), reason)

    def _usefulness(self, lease: Lease) -> tuple[bool, bool, int]:
        """Return a lease's sort key: whether it is granted, whether a worker of it serves, and its number of turns."""
        workers = self._run.fleet.of_lease(lease.id)
        ready = any(worker.state is WorkerState.READY for worker in workers)
        return lease.live, ready, sum(worker.outstanding for worker in workers)

    def _withdraw(self, lease: Lease, reason: str) -> None:
        """Take a request back, again and again until the provider has answered it."""
        run = self._run
        lease.release_reason = lease.release_reason or reason
        self._answered(lease)
        run.leases.slices.pop(lease.id, None)
        run.wait("grant", lease.id, run.limits.release_timeout_ns)
        run.out.append(c.ReleaseLease(lease=lease.id, provider=lease.provider, reason=lease.release_reason))

    def _release(self, lease: Lease, reason: str) -> None:
        run = self._run
        if lease.state is not LeaseState.GRANTED:
            return
        lease.release_reason = reason
        run.leases.move(lease, LeaseState.RELEASING, run.now_ns, reason)
        run.timers.clear("expiry", lease.id)
        self._empty(lease, reason)
        self._ask_back(lease.id)

    def _empty(self, lease: Lease, reason: str) -> None:
        lease.leaving = True
        self._run.timers.clear("early replacement", lease.id)
        for worker in self._run.fleet.of_lease(lease.id):
            self._workers.drain(worker, reason)

    def _leave(self, lease: Lease, end_ns: Nanoseconds, reason: str) -> None:
        """Have the workers leave by `end_ns`. Until then they keep the turns that end, or can move, in time."""
        lease.leaving = True
        self._run.timers.clear("early replacement", lease.id)
        for worker in self._run.fleet.of_lease(lease.id):
            self._departures.begin(worker, end_ns, reason)

    def _ask_back(self, lease_id: str) -> None:
        """Ask for the lease's end, again and again until the provider confirms it: nothing is left behind."""
        run = self._run
        lease = run.leases.leases[lease_id]
        run.wait("release", lease_id, run.limits.release_timeout_ns)
        run.out.append(c.ReleaseLease(lease=lease_id, provider=lease.provider, reason=lease.release_reason))

    # Losing

    def _on_notice(self, event: e.LeaseNotice) -> None:
        lease = self._run.leases.leases.get(event.lease)
        if lease is None or lease.state is not LeaseState.GRANTED or event.deadline_ns is None:
            return
        deadline_ns = event.deadline_ns
        if lease.expires_at_ns is not None:
            deadline_ns = min(deadline_ns, lease.expires_at_ns)
        lease.expires_at_ns = deadline_ns
        self._wait_expiry(lease, deadline_ns)
        self._leave(lease, deadline_ns, event.reason)

    def _wait_expiry(self, lease: Lease, at_ns: int) -> None:
        self._run.wait("expiry", lease.id, max(0, at_ns - self._run.now_ns))

    def _expiry_due(self, lease_id: str) -> None:
        """Called twice: first the workers leave, in time for the expiry; at the expiry they are fenced."""
        run, lease = self._run, self._run.leases.leases[lease_id]
        assert lease.expires_at_ns is not None
        leaves_ns = lease.expires_at_ns - run.patience.leaving_ns(run.now_ns)
        if run.now_ns < leaves_ns:
            self._wait_expiry(lease, leaves_ns)
        elif run.now_ns < lease.expires_at_ns:
            self._wait_expiry(lease, lease.expires_at_ns)
            self._note_failure(lease, EndCause.EXPIRED)
            self._leave(lease, lease.expires_at_ns, "the lease expires")
        else:
            for worker in run.fleet.of_lease(lease_id):
                self._workers.give_up(worker.id, EndCause.EXPIRED)

    def _on_ended(self, event: e.LeaseEnded) -> None:
        run, lease = self._run, self._run.leases.leases.get(event.lease)
        if lease is None:
            return
        if lease.state is LeaseState.REQUESTED:
            withdrawn = event.cause is EndCause.RELEASED
            self._refused(lease, f"it ended before it was granted ({event.cause})", withdrawn)
            return
        for worker in run.fleet.of_lease(lease.id):
            if worker.state is not WorkerState.GONE:
                self._workers.lose(worker, event.cause)
            run.ledger.close(worker.id, run.now_ns, clean=worker.said_goodbye, charged_ns=event.billed_ns)
            run.out.append(c.FenceWorker(worker=worker.id, reason=f"its lease ended ({event.cause})"))
        joined = any(worker.epoch for worker in run.fleet.of_lease(lease.id))
        hopeless = event.fault and not joined and run.active and run.leases.failed_to_start(lease, event.fault)
        if event.cause != lease.release_reason:  # Else it was noted as the lease was given back for it.
            self._note_failure(lease, event.cause)
        run.fleet.forget(lease.id)
        for what in ("release", "expiry", "early replacement"):
            run.timers.clear(what, lease.id)
        run.count_budget()
        run.leases.move(lease, LeaseState.ENDED, run.now_ns, f"{event.cause} {event.detail}".rstrip())
        if lease.offer.role is WorkerRole.TRAINER:
            why = event.detail or lease.release_reason or event.cause
            if hopeless:
                run.fail(f"the trainer's device cannot start: {event.fault}")
            self._lose_trainer(f"was lost: {why}", run.limits.trainer_restarts_max)
            self._back_off(lease.provider)
        elif hopeless:
            self._stop_asking(lease.provider, event.fault)
        self._retry_replacement(lease.replaces)
        self._replace(lease)

    def _stop_asking(self, provider: str, fault: str) -> None:
        """Ask for nothing more of a provider whose workers cannot start, until it is told to be offered again."""
        run = self._run
        run.leases.stopped[provider] = fault
        for lease in run.leases.leases.values():
            if lease.provider == provider and lease.state is LeaseState.REQUESTED and not lease.release_reason:
                self._withdraw(lease, "its provider's workers cannot start")

    def _lose_trainer(self, what: str, most: int) -> None:
        """Another lease is asked for after a back-off, unless that has been of no use too often."""
        run = self._run
        if not run.active:
            return
        run.trainers_lost += 1
        if run.trainers_lost > most and (run.serving is None or run.version is None):
            times = f" (after {run.trainers_lost - 1} before)" if run.trainers_lost > 1 else ""
            run.fail(f"the trainer's device {what}{times}")
        elif run.version is None:
            run.wait_for_start()
        else:
            run.timers.clear("replacement", "trainer")  # It counts from the last attempt.
