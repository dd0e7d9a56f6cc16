"""Serverless leases: cold at first, over by time whatever happens, and replacements before that."""

import asyncio
from collections.abc import Callable

import pytest

from elastic.core.events import LeaseEnded, LeaseRefused, OfferChanged
from elastic.core.types import NS_PER_S, EndCause
from elastic.testing.providers import ProviderRecorder, eventually, lease_request, processes_with
from providers.base import Provider, ProviderContext
from providers.markets import ServerlessSettings
from providers.serverless import ServerlessProvider

STUBBORN_WORKER = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
time.sleep(600)
"""

Open = Callable[..., ServerlessProvider]


@pytest.fixture
def open_provider(make_context: Callable[..., ProviderContext], opened: list[Provider]) -> Open:
    def make(**settings: float) -> ServerlessProvider:
        context = make_context(worker=STUBBORN_WORKER)
        provider = ServerlessProvider("serverless", ServerlessSettings.model_validate(settings), context)
        opened.append(provider)  # type: ignore[arg-type]
        return provider

    return make


async def test_a_lease_ends_by_time_whatever_its_worker_does(open_provider: Open, recorder: ProviderRecorder) -> None:
    provider = open_provider(lease_s=1.0)
    await provider.start(recorder.emit)
    before_ns = provider.context.now_ns()
    granted = await recorder.leased(provider)
    assert granted.expires_at_ns is not None
    assert before_ns + NS_PER_S <= granted.expires_at_ns <= provider.context.now_ns() + NS_PER_S
    await eventually(lambda: processes_with(ELASTIC_RUN=provider.context.run))
    ended = await recorder.ended("lease-1")
    assert (ended.cause, ended.detail) == (EndCause.EXPIRED, "its 1 s are over")
    assert provider.context.now_ns() >= granted.expires_at_ns - 2_000_000
    assert processes_with(ELASTIC_RUN=provider.context.run) == []


async def test_one_that_is_given_back_too_late_has_expired(open_provider: Open, recorder: ProviderRecorder) -> None:
    """Whoever keeps the time better: the platform's own limit is what ends the call."""
    provider = open_provider(lease_s=0.2)
    await provider.start(recorder.emit)
    granted = await recorder.leased(provider)
    assert granted.expires_at_ns is not None
    # The loop must not come to the provider's own timer first.
    while provider.context.now_ns() <= granted.expires_at_ns:
        pass
    await provider.release("lease-1")
    assert (await recorder.ended("lease-1")).cause is EndCause.EXPIRED


async def test_a_cold_start_comes_before_the_worker_and_within_the_lease(
    open_provider: Open, recorder: ProviderRecorder
) -> None:
    provider = open_provider(lease_s=0.5, cold_start_s=30.0)
    await provider.start(recorder.emit)
    assert recorder.of(OfferChanged)[-1].offer.boot_s == 30.0
    await recorder.leased(provider)
    assert processes_with(ELASTIC_RUN=provider.context.run) == []
    assert (await recorder.ended("lease-1")).cause is EndCause.EXPIRED


async def test_replacements_are_to_be_had_besides_all_others(open_provider: Open, recorder: ProviderRecorder) -> None:
    provider = open_provider(max_workers=2, overlap=1, lease_s=600.0)
    await provider.start(recorder.emit)

    def offered() -> tuple[int, int]:
        offer = recorder.of(OfferChanged)[-1].offer
        return offer.available, offer.replacements

    assert offered() == (2, 1)
    for number in (1, 2):
        await recorder.leased(provider, number)
    assert offered() == (0, 1)
    await recorder.leased(provider, 3)
    await recorder.until(lambda _: offered() == (0, 0))
    await provider.acquire(lease_request(4))
    refused = await recorder.answered("lease-4")
    assert isinstance(refused, LeaseRefused)
    assert "max_workers = 2 workers and 1 besides" in refused.reason
    await provider.release("lease-1")
    await recorder.until(lambda r: r.of(LeaseEnded, "lease-1") and offered() == (0, 1))
    await provider.release("lease-2")
    await recorder.until(lambda _: offered() == (1, 1))


async def test_closing_before_the_end_releases(open_provider: Open, recorder: ProviderRecorder) -> None:
    provider = open_provider(lease_s=0.3)
    await provider.start(recorder.emit)
    granted = await recorder.leased(provider)
    assert granted.expires_at_ns is not None
    await provider.aclose()
    while provider.context.now_ns() <= granted.expires_at_ns:  # noqa: ASYNC110 - a moment is waited for, not an event
        await asyncio.sleep(0.01)
    assert len(recorder.of(LeaseEnded, "lease-1")) == 1
