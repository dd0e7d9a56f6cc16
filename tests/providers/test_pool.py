"""What a pool's provider does beyond the contract of all: recalls become notices, and a permit ends with its leases."""

import time
from pathlib import Path

from elastic.core.events import LeaseGranted, LeaseNotice
from elastic.core.types import NS_PER_S, EndCause
from elastic.pool import messages as w
from elastic.testing.providers import ProviderRecorder, eventually, lease_request
from providers.pool import PoolProvider
from tests.pool.model import ROLLOUT, JobsPool
from tests.pool.test_permits import House
from tests.providers.conftest import context_of, provider_of
from tests.providers.stub_pool import CLIENTS


async def test_a_recall_is_noticed_and_what_waits_meanwhile_gets_the_next_turn(
    tmp_path: Path, recorder: ProviderRecorder
):
    (tmp_path / "pool.address").write_text("127.0.0.1:1")
    provider = provider_of("pool", context_of("run", tmp_path, time.monotonic_ns()))
    assert isinstance(provider, PoolProvider)
    CLIENTS.clear()
    house = House(JobsPool(lambda message: None))
    provider._client = house.client
    house.welcome()
    house.client.welcome = house.pool.welcome()

    async def opened(within_s: float) -> w.JobWelcome:
        return house.client.welcome

    house.client.open = opened
    await provider.start(recorder.emit)
    await provider.acquire(lease_request(1))
    await eventually(lambda: ROLLOUT in house.pool.asked)
    permit = house.pool.grant(ROLLOUT)
    assert isinstance(await recorder.answered("lease-1"), LeaseGranted)
    house.client.part.report_progress(2, 4)
    house.pool.recall(permit, 4.0)
    (notice,) = recorder.of(LeaseNotice)
    assert notice.deadline_ns is not None
    assert 0 < notice.deadline_ns - provider.context.now_ns() <= 3 * NS_PER_S
    await provider.release("lease-1")
    assert (await recorder.ended("lease-1")).cause is EndCause.PREEMPTED
    assert w.YieldPhase(permit, False) in house.pool.heard
    await provider.aclose()
