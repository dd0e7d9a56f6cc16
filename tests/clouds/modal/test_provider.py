"""What is Modal's own among providers: containers that start again, calls that outlive their run, bills, bad input."""

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from pydantic import ValidationError

from elastic.core.events import LeaseEnded, LeaseGranted, LeaseRefused, OfferChanged, StraysBilled
from elastic.core.types import NS_PER_S, EndCause
from elastic.system.modal import VERSION_TAG, version
from elastic.testing.providers import (
    ProviderRecorder,
    eventually,
    lease_request,
    make_context,
    processes_with,
    recorder,
)
from providers.base import KnownLease, ProviderContext, ProviderUnavailable
from providers.modal import ModalProvider, ModalSettings
from tests.clouds.modal.conftest import APP
from tests.clouds.modal.test_provider_conformance import modal_provider
from tests.clouds.modal_server import Bench

__all__ = ["make_context", "recorder"]

pytestmark = [pytest.mark.clouds]

ONE_TICKET_EACH = """
import os, pathlib, sys, time
spent = pathlib.Path({directory!r}) / os.environ["ELASTIC_JOIN_TOKEN"]
try:
    spent.touch(exist_ok=False)
except FileExistsError:
    sys.exit(1)
time.sleep(600)
"""
"""A worker whose ticket is good once, as an orchestrator has it."""


class House:
    def __init__(self, platform: Bench, context: ProviderContext, recorder: ProviderRecorder) -> None:
        self.platform, self.context, self.recorder = platform, context, recorder
        self.providers: list[ModalProvider] = []
        self.run_name = f"{context.tag('modal provider')}/provider"

    def provider(self, **settings: Any) -> ModalProvider:
        self.providers.append(modal_provider(self.context, **settings))
        return self.providers[-1]

    async def started(self, **settings: Any) -> ModalProvider:
        provider = self.provider(**settings)
        await provider.adopt([], self.recorder.emit)
        await provider.start(self.recorder.emit)
        return provider

    async def grant(self, provider: ModalProvider, number: int) -> str:
        return (await self.recorder.leased(provider, number)).lease

    def spent(self, number: int) -> bool:
        """Whether the ticket of this lease's worker is."""
        return (self.context.run_dir / "spent" / f"secret-{number}").exists()

    def containers(self) -> list[dict[str, Any]]:
        return self.platform.running(self.run_name)

    def billed_s(self) -> float:
        return sum(
            one["finished_s"] - one["started_s"]
            for one in self.platform.record()["containers"]
            if one["run"] == self.run_name and one["started_s"]
        )

    def charged_s(self) -> float:
        """What the run was told that Modal charges, for leases and for what none had."""
        ends = [end.billed_ns for end in self.recorder.of(LeaseEnded)]
        assert not any(ns is msgspec.UNSET for ns in ends)
        strays_usd = sum(event.usd for event in self.recorder.of(StraysBilled))
        (usd_per_gpu_hour,) = {event.offer.usd_per_gpu_hour for event in self.recorder.of(OfferChanged)}
        return sum(ns for ns in ends if ns is not msgspec.UNSET) / NS_PER_S + strays_usd / usd_per_gpu_hour * 3600

    def die(self, provider: ModalProvider) -> None:
        """As if its process had died."""
        for task in provider.tasks:
            task.cancel()
        self.providers.remove(provider)

    async def aclose(self) -> None:
        for provider in self.providers:
            await provider.aclose()
        assert self.containers() == []
        assert processes_with(ELASTIC_RUN=self.context.run) == []


@pytest.fixture
async def house(
    platform: Bench, make_context: Callable[..., ProviderContext], recorder: ProviderRecorder, tmp_path: Path
) -> AsyncIterator[House]:
    spent = tmp_path / "spent"
    spent.mkdir()
    house = House(platform, make_context(worker=ONE_TICKET_EACH.format(directory=str(spent))), recorder)
    yield house
    await house.aclose()


async def test_a_restarted_container_asks_for_a_ticket_and_serves_the_next_lease(house: House) -> None:
    provider = await house.started()
    lease = await house.grant(provider, 1)
    await eventually(lambda: house.spent(1))
    (first,) = house.containers()
    house.platform.preempt(first["task"])
    assert (await house.recorder.ended(lease)).cause is EndCause.PREEMPTED
    (second,) = house.containers()
    assert second["calls"] == first["calls"]
    await house.grant(provider, 2)
    await eventually(lambda: house.spent(2))
    assert [one["task"] for one in house.containers()] == [second["task"]]
    await provider.release("lease-2")
    assert (await house.recorder.ended("lease-2")).cause is EndCause.RELEASED
    assert house.containers() == []
    assert house.charged_s() == pytest.approx(house.billed_s(), abs=1e-3)


async def test_a_lease_that_was_given_up_before_its_container_started_again_leaves_it_to_the_next(house: House) -> None:
    provider = await house.started()
    lease = await house.grant(provider, 1)
    await eventually(lambda: house.spent(1))
    (first,) = house.containers()
    house.platform.faults(slow_start_s=2.0)
    house.platform.preempt(first["task"])
    await provider.release(lease)
    await house.recorder.ended(lease)
    await house.grant(provider, 2)
    await eventually(lambda: house.spent(2))
    (second,) = house.containers()
    assert second["task"] != first["task"]
    assert second["calls"] == first["calls"]
    await provider.release("lease-2")
    await house.recorder.ended("lease-2")
    assert house.containers() == []
    assert house.charged_s() == pytest.approx(house.billed_s(), abs=1e-3)


async def test_what_starts_again_as_the_run_ends_is_cancelled(house: House) -> None:
    provider = await house.started()
    lease = await house.grant(provider, 1)
    await eventually(lambda: house.spent(1))
    house.platform.faults(slow_start_s=2.0)
    house.platform.preempt(house.containers()[0]["task"])
    await provider.release(lease)
    await house.recorder.ended(lease)
    await provider.aclose()
    assert house.containers() == []


async def test_a_call_whose_order_had_no_answer_is_cancelled_though_it_is_listed_late(house: House) -> None:
    provider = await house.started(answer_timeout_s=2.0)
    house.platform.faults(rpcs=["FunctionMap"], late_s=5.0)
    await provider.acquire(lease_request(1))
    assert isinstance(await house.recorder.answered("lease-1"), LeaseRefused)
    house.platform.faults(unlisted_s=3.0)
    await provider.aclose()
    assert house.containers() == []


async def test_a_restarted_container_that_nobody_wants_ends(house: House) -> None:
    provider = await house.started(ask_s=1.0)
    lease = await house.grant(provider, 1)
    await eventually(lambda: house.spent(1))
    house.platform.preempt(house.containers()[0]["task"])
    assert (await house.recorder.ended(lease)).cause is EndCause.PREEMPTED
    await eventually(lambda: house.containers() == [])


async def test_a_lease_ends_by_its_time_and_modals_limit_stands_behind_it(house: House) -> None:
    provider = await house.started(lease_s=1.5, ask_s=0.5)
    lease = await house.grant(provider, 1)
    assert (await house.recorder.ended(lease)).cause is EndCause.EXPIRED
    await house.grant(provider, 2)
    house.die(provider)
    await eventually(lambda: house.containers() == [])


async def test_a_new_process_finds_its_calls_and_cancels_the_others(house: House) -> None:
    before = await house.started()
    leases = [await house.grant(before, number) for number in range(2)]
    house.die(before)
    after = house.provider()
    known = [KnownLease(request=lease_request(0), granted=True), KnownLease(request=lease_request(7), granted=False)]
    assert await after.adopt(known, house.recorder.emit) == ["lease-7"]
    await after.start(house.recorder.emit)
    await eventually(lambda: len(house.containers()) == 1)
    await after.release(leases[0])
    end = await house.recorder.ended(leases[0])
    assert end.cause is EndCause.RELEASED
    assert end.billed_ns is not msgspec.UNSET


async def test_a_call_whose_answer_nobody_heard_is_the_leases_where_it_is_known_and_else_nobodys(house: House) -> None:
    before = await house.started()
    await before.acquire(lease_request(1))
    await eventually(house.containers)
    house.die(before)
    after = house.provider()
    await after.adopt([KnownLease(request=lease_request(1), granted=False)], house.recorder.emit)
    await after.start(house.recorder.emit)
    if house.recorder.of(LeaseGranted, "lease-1"):
        await after.release("lease-1")
        await house.recorder.ended("lease-1")
    await eventually(lambda: house.containers() == [])


async def test_unavailable_and_torn_answers_cost_nothing_twice_and_leave_nothing(house: House) -> None:
    provider = await house.started(max_workers=3)
    house.platform.faults(seed=7, unavailable=0.15, torn=0.15)
    for number in range(12):
        await provider.acquire(lease_request(number))
        if number % 3 == 2:
            for one in range(number - 2, number + 1):
                if isinstance(await house.recorder.answered(f"lease-{one}"), LeaseGranted):
                    await provider.release(f"lease-{one}")
                    await house.recorder.ended(f"lease-{one}")
    met = house.platform.record()["faults"]
    assert min(met["unavailable"], met["torn"]) > 0
    house.platform.faults()
    granted = house.recorder.of(LeaseGranted)
    assert granted
    await eventually(lambda: house.containers() == [])
    if not house.recorder.of(LeaseRefused):
        assert house.charged_s() == pytest.approx(house.billed_s(), rel=1e-3)


async def test_a_slow_start_is_not_billed_and_one_beyond_all_patience_is_refused(house: House) -> None:
    house.platform.faults(slow_start_s=2.0)
    provider = await house.started()
    await house.grant(provider, 1)
    await provider.release("lease-1")
    await house.recorder.ended("lease-1")
    assert house.charged_s() == pytest.approx(house.billed_s(), abs=1e-3)
    house.platform.faults(slow_start_s=600.0)
    await provider.acquire(lease_request(2))
    await asyncio.sleep(0)
    await provider.release("lease-2")
    await provider.aclose()
    assert house.recorder.of(LeaseRefused, "lease-2") or house.recorder.of(LeaseEnded, "lease-2")


async def test_an_app_that_is_not_there_is_named(house: House) -> None:
    with pytest.raises(ProviderUnavailable, match=r"there is no app 'another'.*elastic modal deploy --app another"):
        await house.started(app="another")


def test_what_has_no_price_is_named_and_what_has_one_costs_it() -> None:
    with pytest.raises(ValidationError, match=r"GPU 'V3'; known: .*H100.*usd_per_gpu_hour"):
        ModalSettings.model_validate({"gpu": "V3"})
    assert ModalSettings.model_validate({"gpu": "V3", "usd_per_gpu_hour": 9.0}).usd_per_gpu_hour == 9.0
    hour_usd = ModalSettings.model_validate({"gpu": "H100", "cores": 2.0, "memory_mb": 8192}).usd_per_gpu_hour
    assert hour_usd == pytest.approx(3600 * (0.001097 + 2 * 0.0000131 + 8 * 0.00000222))


async def test_another_versions_deployment_and_bad_credentials_are_refused_with_what_to_do(house: House) -> None:
    house.platform.retag(APP, **{VERSION_TAG: "0.0.1-of-old"})
    try:
        with pytest.raises(ProviderUnavailable, match=r"another version of Elastic \(found 0\.0\.1-of-old.*deploy"):
            await house.started()
    finally:
        house.platform.retag(APP, **{VERSION_TAG: version()})
    house.platform.refuse_token(True)
    with pytest.raises(ProviderUnavailable, match=r"does not let us in.*modal token new"):
        await house.started()
    house.platform.refuse_token(False)
    house.providers.clear()


async def test_credentials_that_modal_refuses_while_a_run_goes_on_take_no_worker_along(house: House) -> None:
    provider = await house.started()
    lease = await house.grant(provider, 1)
    await eventually(lambda: house.spent(1))
    house.platform.refuse_token(True)
    await provider.acquire(lease_request(2))
    answer = await house.recorder.answered("lease-2")
    assert isinstance(answer, LeaseRefused)
    assert "Token validation failed" in answer.reason
    assert not house.recorder.of(LeaseEnded, lease)
    house.platform.refuse_token(False)
    await house.grant(provider, 3)
    assert len(house.containers()) == 2
