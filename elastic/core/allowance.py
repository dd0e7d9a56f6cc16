"""What a run may still acquire, and how long it may go on: caps by provider, and the promise of a budget.

The promise: cost so far, plus the billing increments that what is held is committed to, plus the time that stopping
takes of all that is held, never exceed the budget. Pure functions of the run's state; `ControlManager` acts on them.

A provider bills a lease from when it grants it to when it has the GPUs back, rounded up to its increment, and for its
least time; where it has said what a lease costs by its own account, that counts. Requests that are out count as if they
were granted now, for they may be at any moment, at the highest price that they may come to.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from elastic.core.ledger import NANO_USD_PER_USD, Price
from elastic.core.run_state import RunState
from elastic.core.types import NS_PER_S, BudgetForecast, LeaseState, Nanoseconds, Offer, WorkerRole

SLACK_NS = NS_PER_S
"""Time between a decision and its effect: durable writes, messages, a late wake-up."""
WARNED_SHARE = 0.8
"""Share of a budget at which the run warns, counting what is committed."""
FOREVER_NS = 100 * 365 * 24 * 3600 * NS_PER_S


@dataclass(frozen=True, slots=True)
class _AskedFor:
    """Devices of one request, which may be billed since then."""

    price: Price
    workers: int
    since_ns: Nanoseconds

    def nano_usd(self, end_ns: Nanoseconds) -> int:
        return self.workers * self.price.most_nano_usd(max(0, end_ns - self.since_ns))


def gpus_of(offer: Offer) -> int:
    """GPUs of one lease."""
    return offer.gpus_per_worker * offer.workers_per_lease


def stopping_ns(run: RunState) -> Nanoseconds:
    """The longest time from the decision to stop until everything is given back: a drain, in which the trainer writes
    its checkpoint, and the release."""
    return run.limits.drain_timeout_ns + run.limits.release_timeout_ns + SLACK_NS


def capped_gpus(run: RunState, provider: str) -> int:
    """GPUs of the provider that count against its cap: all that is asked for or held, unless it is on its way back."""
    kept = (lease for lease in run.leases.leases.values() if lease.provider == provider)
    return sum(gpus_of(lease.offer) for lease in kept if not lease.goes)


def room(run: RunState, offer: Offer) -> int | None:
    """How many more leases of this offer caps and budget allow now; None for any number."""
    rooms = [n for n in (_cap_room(run, offer), _budget_room(run, offer)) if n is not None]
    return min(rooms, default=None)


def _cap_room(run: RunState, offer: Offer) -> int | None:
    cap = run.controls.caps.get(offer.provider)
    if cap is None or offer.role is WorkerRole.TRAINER:
        return None
    held = sum(gpus_of(lease.offer) for lease in run.leases.leases.values() if lease.provider == offer.provider)
    return max(0, cap - held) // gpus_of(offer)


def _budget_room(run: RunState, offer: Offer) -> int | None:
    """A lease is worth asking for only if the run can go on until it has booted, and what is billed at the least is
    over."""
    budget = budget_nano_usd(run)
    if budget is None:
        return None
    price = Price.most_of(offer)
    end_ns = run.now_ns + stopping_ns(run) + max(offer.boot_ns, price.increment_ns, price.least_ns)
    one = _AskedFor(price, offer.workers_per_lease, run.now_ns).nano_usd(end_ns)
    left = budget - committed_nano_usd(run, end_ns)
    return None if not one and left >= 0 else max(0, left) // max(1, one)


def budget_nano_usd(run: RunState) -> int | None:
    usd = run.controls.budget_usd
    return None if usd is None else int(usd * NANO_USD_PER_USD)


def committed_nano_usd(run: RunState, end_ns: Nanoseconds) -> int:
    """The run's cost if everything is given back at `end_ns`, at the most."""
    return _fixed_nano_usd(run) + sum(cost(end_ns) for cost in _held(run))


def spent_nano_usd(run: RunState, provider: str) -> int:
    """The most that the provider's resources have cost which are over, in all incarnations of the run."""
    return run.ledger.closed_nano_usd(provider) + run.controls.carried_of.get(provider, 0)


def last_end_ns(run: RunState) -> Nanoseconds | None:
    """The latest time by which everything must be given back for the budget to suffice, before now where it does not
    suffice as it is; None for a run that can go on for ever."""
    budget = budget_nano_usd(run)
    if budget is None:
        return None
    left, held = budget - _fixed_nano_usd(run), list(_held(run))
    first_ns, last_ns = run.now_ns - 1, run.now_ns + FOREVER_NS
    if sum(cost(last_ns) for cost in held) <= left:
        return None
    while last_ns - first_ns > 1:
        middle_ns = (first_ns + last_ns) // 2
        if sum(cost(middle_ns) for cost in held) <= left:
            first_ns = middle_ns
        else:
            last_ns = middle_ns
    return first_ns


def budget_forecast(run: RunState, now_ns: Nanoseconds) -> BudgetForecast | None:
    """None for a run without a budget. `now_ns` may be later than the core's last event."""
    usd = run.controls.budget_usd
    if usd is None:
        return None
    stopped_ns = now_ns + stopping_ns(run)
    committed_usd = committed_nano_usd(run, stopped_ns) / NANO_USD_PER_USD
    end_ns = last_end_ns(run)
    return BudgetForecast(
        budget_usd=usd,
        committed_usd=committed_usd,
        used_share=committed_usd / usd if usd else 1.0,
        warned=committed_usd >= WARNED_SHARE * usd,
        ends_in_s=None if end_ns is None else max(0, end_ns - stopped_ns) / NS_PER_S,
    )


def _fixed_nano_usd(run: RunState) -> int:
    """Return what is owed whenever the run ends: for past leases, and for functions with calls that may be under
    way."""
    told = run.controls
    calls = run.limits.scorings_max * told.call_nano_usd
    return run.ledger.closed_nano_usd_max + told.carried_nano_usd + told.functions_nano_usd + calls


def _held(run: RunState) -> Iterable[Callable[[Nanoseconds], int]]:
    """What each that is held or asked for has cost by a time, at the most."""
    books = run.ledger.books
    for lease in run.leases.leases.values():
        if lease.state is LeaseState.REQUESTED:
            since_ns = run.controls.unheard_since_ns.get(lease.id, run.now_ns)
            yield _AskedFor(Price.most_of(lease.offer), lease.offer.workers_per_lease, since_ns).nano_usd
        else:
            yield from (books[worker].most_nano_usd for worker in lease.workers)
