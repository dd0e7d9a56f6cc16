"""The spot market: it follows the trace, hands out instances in order, and takes them back with or without notice."""

import asyncio
import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
from pydantic import ValidationError

from elastic.core.events import LeaseEnded, LeaseNotice, OfferChanged
from elastic.core.types import NS_PER_S, EndCause
from elastic.testing.providers import ProviderRecorder, eventually, lease_request, processes_with
from providers.base import Provider, ProviderContext, ProviderUnavailable
from providers.markets import SpotSettings
from providers.spot import SpotProvider

SEGMENT_A = [0, 1, 2, 11, 12, 10, 9, 8, 9, 7, 6, 5, 0, 1, 2]
"""How many instances the shipped trace has, from its start into its second cycle."""


@pytest.fixture
def market(tmp_path: Path, context: ProviderContext, opened: list[Provider]) -> Callable[..., SpotProvider]:
    """A provider that replays these lines (milliseconds, as in Bamboo's format)."""

    def make(*lines: str, **settings: object) -> SpotProvider:
        trace = tmp_path / "market.csv"
        trace.write_text("\n".join(lines) + "\n")
        provider = SpotProvider(
            "spot", SpotSettings.model_validate({"trace": str(trace), "max_workers": 4, **settings}), context
        )
        opened.append(provider)  # type: ignore[arg-type]
        return provider

    return make


async def test_a_trace_that_cannot_be_used_is_named_before_anything_starts(
    tmp_path: Path, market: Callable[..., SpotProvider], context: ProviderContext
) -> None:
    with pytest.raises(ValidationError, match=r"market\.csv:2: found event 'gone'; allowed: add, remove"):
        market("0,add,a", "5,gone,a")
    with pytest.raises(ValidationError, match=r"no trace 'absent'.*rlboost-a"):
        SpotSettings.model_validate({"trace": "absent"})
    with pytest.raises(ValidationError, match="start < end"):
        market("0,add,a", start_s=3, end_s=2)
    (tmp_path / "gone.csv").write_text("0,add,a\n1000,remove,a\n")
    stale = SpotSettings.model_validate({"trace": str(tmp_path / "gone.csv")})
    (tmp_path / "gone.csv").unlink()
    with pytest.raises(ProviderUnavailable, match=r"gone\.csv"):
        SpotProvider("spot", stale, context)


async def test_a_removal_kills_at_once_and_ends_the_lease_when_the_process_is_gone(
    market: Callable[..., SpotProvider], context: ProviderContext, recorder: ProviderRecorder
) -> None:
    provider = market("0,add,a", "3000,remove,a", "600000,add,b")
    alive_at_end: list[int] = []

    def emit(event: object) -> None:
        if isinstance(event, LeaseEnded):
            alive_at_end.extend(processes_with(ELASTIC_RUN=context.run, ELASTIC_WORKER="worker-1"))
        recorder.emit(event)  # type: ignore[arg-type]

    await provider.start(emit)
    await recorder.until(lambda r: r.available == 1)
    await provider.acquire(lease_request())
    await eventually(lambda: processes_with(ELASTIC_RUN=context.run, ELASTIC_WORKER="worker-1"))
    end = await recorder.ended("lease-1")
    assert end.cause is EndCause.PREEMPTED
    assert "instance a" in end.detail
    assert alive_at_end == []
    assert recorder.of(LeaseNotice) == []
    assert recorder.available == 0


async def test_notice_comes_first_and_names_its_deadline(
    market: Callable[..., SpotProvider], context: ProviderContext, recorder: ProviderRecorder
) -> None:
    provider = market("0,add,a", "200,remove,a", "600000,add,b", notice_s=0.3)
    await recorder.offered(provider, 1)
    await provider.acquire(lease_request())
    await recorder.until(lambda r: r.of(LeaseNotice))
    (notice,) = recorder.of(LeaseNotice)
    assert notice.deadline_ns == 0.5 * NS_PER_S
    assert recorder.of(LeaseEnded) == []
    assert (await recorder.ended("lease-1")).cause is EndCause.PREEMPTED
    assert context.now_ns() >= notice.deadline_ns  # type: ignore[operator]


async def test_a_lease_given_back_under_notice_still_counts_as_preempted(
    market: Callable[..., SpotProvider], recorder: ProviderRecorder
) -> None:
    provider = market("0,add,a", "100,remove,a", "600000,add,b", notice_s=600)
    await recorder.offered(provider, 1)
    await provider.acquire(lease_request())
    await recorder.until(lambda r: r.of(LeaseNotice))
    await provider.release("lease-1")
    assert (await recorder.ended("lease-1")).cause is EndCause.PREEMPTED
    assert recorder.available == 0


async def test_the_longest_available_instance_is_leased_first(
    market: Callable[..., SpotProvider], recorder: ProviderRecorder
) -> None:
    provider = market("0,add,a", "0,add,b", "0,add,c", "600,remove,a", "700,remove,b", "600000,add,d")
    await recorder.offered(provider, 3)
    for number in (1, 2, 3):
        await provider.acquire(lease_request(number))
    await recorder.until(lambda r: len(r.of(LeaseEnded)) == 2)
    assert [(e.lease, e.cause) for e in recorder.of(LeaseEnded)] == [
        ("lease-1", EndCause.PREEMPTED),
        ("lease-2", EndCause.PREEMPTED),
    ]


async def test_an_instance_whose_worker_lied_goes_unnoticed(
    market: Callable[..., SpotProvider], recorder: ProviderRecorder
) -> None:
    provider = market("0,add,a", "0,add,b", "1000,remove,a", "600000,remove,b")
    await recorder.offered(provider, 2)
    await recorder.leased(provider)
    provider.bar("lease-1")
    await provider.release("lease-1")
    await recorder.ended("lease-1")
    await recorder.until(lambda r: r.available == 1)
    await eventually(lambda: "a" not in provider.market._instances)  # type: ignore[attr-defined]
    assert recorder.available == 1
    assert len(recorder.of(LeaseEnded)) == 1


async def test_a_free_instance_that_goes_is_no_longer_offered(
    market: Callable[..., SpotProvider], recorder: ProviderRecorder
) -> None:
    provider = market("0,add,a", "0,add,b", "200,remove,a", "600000,add,c")
    await recorder.offered(provider, 2)
    await recorder.until(lambda r: r.available == 1)
    await recorder.leased(provider)


async def test_billing_starts_with_the_grant_and_the_worker_after_its_boot(
    market: Callable[..., SpotProvider], context: ProviderContext, recorder: ProviderRecorder
) -> None:
    provider = market("0,add,a", "600000,remove,a", boot_delay_s=1.0)
    await recorder.offered(provider, 1)
    assert recorder.of(OfferChanged)[-1].offer.boot_s == 1.0
    granted_s = asyncio.get_running_loop().time()
    await recorder.leased(provider)
    assert processes_with(ELASTIC_RUN=context.run) == []
    await eventually(lambda: processes_with(ELASTIC_RUN=context.run, ELASTIC_WORKER="worker-1"))
    assert asyncio.get_running_loop().time() - granted_s >= 1.0


async def test_a_lease_that_ends_while_it_boots_starts_nothing(
    market: Callable[..., SpotProvider], context: ProviderContext, recorder: ProviderRecorder
) -> None:
    provider = market("0,add,a", "600000,remove,a", boot_delay_s=600)
    await recorder.offered(provider, 1)
    await provider.acquire(lease_request())
    await provider.release("lease-1")
    assert (await recorder.ended("lease-1")).cause is EndCause.RELEASED
    assert not (context.run_dir / "logs").exists()


async def test_replays_the_shipped_trace_at_speed(context: ProviderContext, recorder: ProviderRecorder) -> None:
    settings = SpotSettings.model_validate(
        {"speed": 10_000, "start_s": 420, "end_s": 7200, "repeat": True, "max_workers": 100}
    )
    provider = SpotProvider("spot", settings, context)
    await provider.start(recorder.emit)
    await recorder.until(lambda r: [e.offer.available for e in r.of(OfferChanged)].count(12) == 2)
    await provider.aclose()
    offers = [e.offer for e in recorder.of(OfferChanged)]
    counts = [count for count, _ in itertools.groupby(offer.available for offer in offers)]
    assert counts[: len(SEGMENT_A)] == SEGMENT_A
    unknown = sum(offer.expected_life_s is None for offer in offers)
    assert [offer.expected_life_s for offer in offers[:unknown]] == [None] * unknown
    assert offers[unknown].available == 10
    lived_s = 960 + 900 + 9 * 840 + 540
    assert offers[unknown].expected_life_s == pytest.approx(lived_s / 2 / 10_000)
