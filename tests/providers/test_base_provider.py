"""What adapters share: nothing is called ended before it has been given back, and offers can be counted on."""

import pytest

from elastic.core.events import LeaseEnded, LeaseGranted, LeaseRefused, OfferChanged
from elastic.core.types import EndCause
from elastic.testing.providers import ProviderRecorder, lease_request
from providers.base import ProviderContext, ProviderSettings
from providers.base_provider import LeaseEnding
from providers.markets import Market
from tests.providers.conftest import MemoryHandle, MemoryProvider


@pytest.fixture
async def provider(context: ProviderContext, recorder: ProviderRecorder) -> MemoryProvider:
    provider = MemoryProvider("memory", ProviderSettings(max_workers=2), context)  # type: ignore[call-arg]
    await provider.start(recorder.emit)
    return provider


async def test_giving_back_is_tried_until_it_works(provider: MemoryProvider, recorder: ProviderRecorder) -> None:
    tries = 0

    class Reluctant(MemoryHandle):
        async def give_back(self) -> None:
            nonlocal tries
            tries += 1
            assert recorder.of(LeaseEnded) == []
            if tries < 3:
                raise TimeoutError

    provider.make_handle = Reluctant
    await provider.acquire(lease_request())
    await provider.release("lease-1")
    assert (await recorder.ended("lease-1")).cause is EndCause.RELEASED
    assert tries == 3
    await provider.aclose()


async def test_a_handle_that_breaks_is_a_lost_lease(provider: MemoryProvider, recorder: ProviderRecorder) -> None:
    class Broken(MemoryHandle):
        async def keep(self) -> LeaseEnding:
            raise RuntimeError("out of luck")

    provider.make_handle = Broken
    await provider.acquire(lease_request())
    end = await recorder.ended("lease-1")
    assert end.cause is EndCause.LOST
    assert "out of luck" in end.detail
    await provider.aclose()


class AlwaysOne(Market):
    """It offers one worker, whatever was taken."""

    def free(self) -> int:
        return 1


async def test_every_grant_is_followed_by_an_offer_even_if_it_is_the_same(
    context: ProviderContext, recorder: ProviderRecorder
) -> None:
    """Who asks subtracts what is asked for from what is offered, and would otherwise never ask for the rest."""
    provider = MemoryProvider("memory", ProviderSettings(max_workers=2), context, AlwaysOne)  # type: ignore[call-arg]
    await provider.start(recorder.emit)
    for number in (1, 2):
        await recorder.leased(provider, number)
        assert isinstance(recorder.events[-1], OfferChanged)
        assert isinstance(recorder.events[-2], LeaseGranted)
    await provider.aclose()


async def test_whoever_closes_grants_nothing_more(provider: MemoryProvider, recorder: ProviderRecorder) -> None:
    await recorder.leased(provider)
    await provider.acquire(lease_request(2))
    await provider.aclose()
    assert "closing" in recorder.of(LeaseRefused, "lease-2")[0].reason


@pytest.mark.parametrize(("reason", "cause"), [("boot_timeout", EndCause.BOOT_TIMEOUT), ("drained", EndCause.RELEASED)])
async def test_a_lease_whose_workers_never_joined_ends_as_such(
    provider: MemoryProvider, recorder: ProviderRecorder, reason: str, cause: EndCause
) -> None:
    await recorder.leased(provider)
    await provider.release("lease-1", reason)
    await provider.release("lease-1", "asked again")
    assert (await recorder.ended("lease-1")).cause is cause
    await provider.aclose()
