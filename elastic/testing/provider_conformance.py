"""What every provider promises, whatever stands behind it (`providers.base.Provider`), as tests of pytest;
`elastic.testing.providers` has their fixtures."""

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from elastic.core.events import LeaseEnded, LeaseGranted, LeaseRefused, OfferChanged
from elastic.core.types import EndCause, LeaseId
from elastic.testing.providers import CAPACITY, ProviderRecorder, lease_request, processes_with
from providers.base import Provider, ProviderContext

MakeProvider = Callable[[ProviderContext], Any]


async def grant(provider: Provider, recorder: ProviderRecorder, number: int = 1) -> LeaseId:
    granted = await recorder.leased(provider, number)
    assert granted.workers == (f"worker-{number}",)
    return granted.lease


def recorded(context: ProviderContext) -> list[Path]:
    return list((context.run_dir / "leases").glob("*.json"))


async def test_offers_what_is_left(provider: Provider, recorder: ProviderRecorder) -> None:
    lease = await grant(provider, recorder)
    await recorder.until(lambda r: r.available == CAPACITY - 1)
    await provider.release(lease)
    await recorder.until(lambda r: r.available == CAPACITY)
    offer = recorder.of(OfferChanged)[-1].offer
    assert (offer.provider, offer.workers_per_lease) == ("provider", 1)


async def test_refuses_what_it_does_not_have(provider: Provider, recorder: ProviderRecorder) -> None:
    for number in range(CAPACITY):
        await grant(provider, recorder, number)
    await provider.acquire(lease_request(CAPACITY))
    answer = await recorder.answered(f"lease-{CAPACITY}")
    assert isinstance(answer, LeaseRefused)
    assert answer.reason
    assert recorder.available == 0


async def test_a_released_lease_ends_once_however_often_it_is_released(
    provider: Provider, recorder: ProviderRecorder
) -> None:
    lease = await grant(provider, recorder)
    for _ in range(3):
        await provider.release(lease)
    assert (await recorder.ended(lease)).cause is EndCause.RELEASED
    await provider.release(lease)
    await provider.release("a lease nobody knows")
    await provider.aclose()
    assert len(recorder.of(LeaseEnded, lease)) == 1


async def test_a_release_before_the_grant_is_not_forgotten(provider: Provider, recorder: ProviderRecorder) -> None:
    await provider.acquire(lease_request())
    await provider.release("lease-1")
    if isinstance(await recorder.answered("lease-1"), LeaseGranted):
        assert (await recorder.ended("lease-1")).cause is EndCause.RELEASED
    await recorder.until(lambda r: r.available == CAPACITY)


async def test_what_a_byzantine_worker_stood_on_is_not_leased_again_and_the_rest_is(
    leases_machines: bool, provider: Provider, recorder: ProviderRecorder
) -> None:
    """A machine that is there stays out; where each lease is another machine, there is nothing to leave out."""
    byzantine, honest = [await grant(provider, recorder, number) for number in range(2)]
    provider.bar(byzantine)
    provider.bar("a lease nobody knows")
    for lease in (byzantine, honest):
        await provider.release(lease)
        await recorder.ended(lease)
    left = CAPACITY - 1 if leases_machines else CAPACITY
    await recorder.until(lambda r: r.available == left)
    for number in range(2, 2 + left):
        await grant(provider, recorder, number)
    await provider.acquire(lease_request(9))
    assert isinstance(await recorder.answered("lease-9"), LeaseRefused)
    assert recorder.available == 0


async def test_closing_ends_everything(
    provider: Provider, context: ProviderContext, recorder: ProviderRecorder
) -> None:
    leases = [await grant(provider, recorder, number) for number in range(CAPACITY)]
    await provider.aclose()
    assert Counter(e.lease for e in recorder.of(LeaseEnded)) == Counter(leases)
    assert processes_with(ELASTIC_RUN=context.run) == []
    assert recorded(context) == []
    seen = len(recorder.events)
    await provider.aclose()
    await provider.release(leases[0])
    assert len(recorder.events) == seen


async def test_closing_at_once_leaves_nothing(
    make_provider: MakeProvider, context: ProviderContext, recorder: ProviderRecorder
) -> None:
    provider = make_provider(context)
    await provider.start(recorder.emit)
    await provider.acquire(lease_request())
    await provider.aclose()
    granted, refused = recorder.of(LeaseGranted), recorder.of(LeaseRefused)
    assert len(granted) + len(refused) == 1
    assert len(recorder.of(LeaseEnded)) == len(granted)
    assert processes_with(ELASTIC_RUN=context.run) == []


async def test_closing_one_that_never_started_is_harmless(
    make_provider: MakeProvider, context: ProviderContext
) -> None:
    provider = make_provider(context)
    await provider.aclose()
    await provider.aclose()


async def test_any_interleaving_answers_each_request_once_and_ends_each_grant_once(
    provider: Provider, recorder: ProviderRecorder
) -> None:
    chance = random.Random(7)
    requested: list[LeaseId] = []
    for number in range(25):
        await provider.acquire(lease_request(number))
        requested.append(f"lease-{number}")
        for lease in chance.sample(requested, k=min(2, len(requested))):
            await provider.release(lease)
        await asyncio.sleep(chance.choice([0, 0, 0.01, 0.05]))
    await provider.aclose()
    answers = Counter(e.lease for e in [*recorder.of(LeaseGranted), *recorder.of(LeaseRefused)])
    assert answers == Counter(requested)
    assert Counter(e.lease for e in recorder.of(LeaseEnded)) == Counter(e.lease for e in recorder.of(LeaseGranted))
    held = 0
    for event in recorder.events:
        held += isinstance(event, LeaseGranted) - isinstance(event, LeaseEnded)
        assert 0 <= held <= CAPACITY
        if isinstance(event, OfferChanged):
            assert event.offer.available <= CAPACITY - held
        if isinstance(event, LeaseEnded):
            granted = next(i for i, e in enumerate(recorder.events) if e == recorder.of(LeaseGranted, event.lease)[0])
            assert granted < recorder.events.index(event)
