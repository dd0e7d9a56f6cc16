"""What every provider promises, whatever stands behind it. Source: `providers.base.Provider`."""

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from elastic.core.events import LeaseEnded, LeaseGranted, LeaseRefused, OfferChanged
from elastic.core.types import EndCause, LeaseId
from providers.base import Provider, ProviderContext
from tests.providers.conftest import CAPACITY, Recorder, lease_request, processes_with, provider_of

MACHINES = ["reserved", "trainer", "spot", "serving"]
"""Whose leases are of machines that can be told apart."""

MakeContext = Callable[..., ProviderContext]
MakeProvider = Callable[[ProviderContext], Any]


pytestmark = pytest.mark.usefixtures("stub_pool")


KINDS = ["memory", "reserved", "trainer", "serverless", "spot", "serving", "pool"]
single = pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=[pytest.mark.nightly] if kind == "serving" else []) for kind in KINDS],
    indirect=True,
)
"""One promise alone. Hosts, which take seconds to start, show it with every change by any interleaving."""


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def make_provider(kind: str) -> MakeProvider:
    return lambda context: provider_of(kind, context)


@pytest.fixture
async def provider(
    make_provider: MakeProvider, context: ProviderContext, recorder: Recorder, opened: list[Provider]
) -> Provider:
    """A provider that has begun to offer all it has."""
    provider = make_provider(context)
    opened.append(provider)
    await recorder.offered(provider, CAPACITY)
    return provider


async def grant(provider: Provider, recorder: Recorder, number: int = 1) -> LeaseId:
    granted = await recorder.leased(provider, number)
    assert granted.workers == (f"worker-{number}",)
    return granted.lease


def recorded(context: ProviderContext) -> list[Path]:
    return list((context.run_dir / "leases").glob("*.json"))


@single
async def test_offers_what_is_left(provider: Provider, recorder: Recorder) -> None:
    lease = await grant(provider, recorder)
    await recorder.until(lambda r: r.available == CAPACITY - 1)
    await provider.release(lease)
    await recorder.until(lambda r: r.available == CAPACITY)
    offer = recorder.of(OfferChanged)[-1].offer
    assert (offer.provider, offer.workers_per_lease) == ("provider", 1)


@single
async def test_refuses_what_it_does_not_have(provider: Provider, recorder: Recorder) -> None:
    for number in range(CAPACITY):
        await grant(provider, recorder, number)
    await provider.acquire(lease_request(CAPACITY))
    answer = await recorder.answered(f"lease-{CAPACITY}")
    assert isinstance(answer, LeaseRefused)
    assert answer.reason
    assert recorder.available == 0


@single
async def test_a_released_lease_ends_once_however_often_it_is_released(provider: Provider, recorder: Recorder) -> None:
    lease = await grant(provider, recorder)
    for _ in range(3):
        await provider.release(lease)
    assert (await recorder.ended(lease)).cause is EndCause.RELEASED
    await provider.release(lease)
    await provider.release("a lease nobody knows")
    await provider.aclose()
    assert len(recorder.of(LeaseEnded, lease)) == 1


@single
async def test_a_release_before_the_grant_is_not_forgotten(provider: Provider, recorder: Recorder) -> None:
    await provider.acquire(lease_request())
    await provider.release("lease-1")
    if isinstance(await recorder.answered("lease-1"), LeaseGranted):
        assert (await recorder.ended("lease-1")).cause is EndCause.RELEASED
    await recorder.until(lambda r: r.available == CAPACITY)


async def test_what_a_liar_stood_on_is_not_leased_again_and_the_rest_is(
    kind: str, provider: Provider, recorder: Recorder
) -> None:
    """A machine that is there stays out; where each lease is another machine, there is nothing to leave out."""
    liar, honest = [await grant(provider, recorder, number) for number in range(2)]
    provider.bar(liar)
    provider.bar("a lease nobody knows")
    for lease in (liar, honest):
        await provider.release(lease)
        await recorder.ended(lease)
    left = CAPACITY - 1 if kind in MACHINES else CAPACITY
    await recorder.until(lambda r: r.available == left)
    for number in range(2, 2 + left):
        await grant(provider, recorder, number)
    await provider.acquire(lease_request(9))
    assert isinstance(await recorder.answered("lease-9"), LeaseRefused)
    assert recorder.available == 0


async def test_closing_ends_everything(provider: Provider, context: ProviderContext, recorder: Recorder) -> None:
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
    make_provider: MakeProvider, context: ProviderContext, recorder: Recorder
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
    provider: Provider, recorder: Recorder
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
