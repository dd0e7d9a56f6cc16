"""The provider `ray` on a real cluster of this machine: a head and two nodes, of which some are killed.

`make test-ray`, in an environment of its own that has Ray.
"""

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks._ray_nodes import RayNodes, raylet
from elastic.core.cluster.types import NodeKind
from elastic.core.events import LeaseEnded, LeaseGranted, OfferChanged
from elastic.core.types import EndCause
from elastic.protocol.endpoint import Endpoint
from elastic.testing.providers import ProviderRecorder, processes_with
from providers import ray_nodes
from providers.base import KnownLease, LeaseRequest, ProviderContext, ProviderUnavailable, WorkerTicket
from providers.ray import RayProvider, RaySettings
from providers.ray_connection import RayUnusable

pytestmark = [pytest.mark.ray, pytest.mark.timeout(900)]

PATIENCE_S = 240.0
STUB = "import time; time.sleep(3600)"


class House:
    def __init__(self, nodes: RayNodes, run_dir: Path) -> None:
        self.recorder = ProviderRecorder()
        self.run = f"run-{time.time_ns()}"
        self._address, self._run_dir = nodes.address, run_dir
        self.providers: list[RayProvider] = []

    def provider(self, worker: str = STUB, **settings: Any) -> RayProvider:
        context = ProviderContext(
            run=self.run,
            run_dir=self._run_dir,
            endpoint=Endpoint("127.0.0.1:1"),
            worker_command=(sys.executable, "-c", worker),
            now_ns=time.monotonic_ns,
            secret=lambda host: f"{self.run}: {host}",
            acquire_timeout_s=PATIENCE_S,
            release_timeout_s=PATIENCE_S,
        )
        given = {"address": self._address, "max_workers": 2, "num_gpus": 0, "resources": {"place": 1.0}}
        given |= {"answer_timeout_s": PATIENCE_S, **settings}
        provider = RayProvider("ray", RaySettings.model_validate(given), context)
        self.providers.append(provider)
        return provider

    async def started(self, **settings: Any) -> RayProvider:
        provider = self.provider(**settings)
        await provider.adopt([], self.recorder.emit)
        await provider.start(self.recorder.emit)
        return provider

    def workers(self) -> list[int]:
        return processes_with(ELASTIC_RUN=self.run)

    async def until(self, what: str, holds: Any) -> None:
        deadline_s = time.monotonic() + PATIENCE_S
        while not holds():
            assert time.monotonic() < deadline_s, (what, self.recorder.events)
            await asyncio.sleep(0.1)

    async def grant(self, provider: RayProvider, number: int) -> str:
        lease = f"ray-{number}"
        tickets = (WorkerTicket(f"{lease}/w", f"secret-{number}"),)
        await provider.acquire(LeaseRequest(lease=lease, tickets=tickets))
        await self.until("an answer", lambda: lease in str(self.recorder.events[-3:]))
        await self.until("a grant", lambda: self.recorder.of(LeaseGranted, lease))
        return lease

    async def ended(self, lease: str) -> LeaseEnded:
        await self.until("the lease's end", lambda: self.recorder.of(LeaseEnded, lease))
        return self.recorder.of(LeaseEnded, lease)[0]

    async def aclose(self) -> None:
        for provider in self.providers:
            await provider.aclose()
        assert self.workers() == []


@pytest.fixture
async def house(nodes: RayNodes, tmp_path: Path) -> AsyncIterator[House]:
    house = House(nodes, tmp_path)
    yield house
    await house.aclose()


async def test_workers_start_where_there_is_room_and_end_with_their_leases(house: House) -> None:
    provider = await house.started()
    leases = [await house.grant(provider, number) for number in range(2)]
    await house.until("two workers", lambda: len(house.workers()) == 2)
    await house.until("nothing is left to offer", lambda: house.recorder.available == 0)
    await provider.release(leases[0])
    assert (await house.ended(leases[0])).cause is EndCause.RELEASED
    await house.until("one worker", lambda: len(house.workers()) == 1)
    os.kill(house.workers()[0], signal.SIGKILL)
    end = await house.ended(leases[1])
    assert end.cause is EndCause.LOST
    assert "-9" in end.detail
    await house.until("room again", lambda: house.recorder.available == 2)
    offers = house.recorder.of(OfferChanged)
    assert offers[-1].offer.provider == "ray"


async def test_a_worker_that_leaves_has_given_its_lease_back(house: House) -> None:
    provider = await house.started(worker="pass")
    assert (await house.ended(await house.grant(provider, 1))).cause is EndCause.RELEASED


async def test_a_new_process_finds_its_actors_and_ends_the_others(house: House) -> None:
    before = await house.started()
    leases = [await house.grant(before, number) for number in range(2)]
    await house.until("two workers", lambda: len(house.workers()) == 2)
    for task in before.tasks:  # as if its process had died
        task.cancel()
    before._connection.close()
    after, request = house.provider(), LeaseRequest(lease=leases[0], tickets=(WorkerTicket(f"{leases[0]}/w", "s"),))
    assert await after.adopt([KnownLease(request=request, granted=True)], house.recorder.emit) == []
    await house.until("one worker", lambda: len(house.workers()) == 1)
    await after.start(house.recorder.emit)
    await after.release(leases[0])
    await house.ended(leases[0])
    house.providers.remove(before)


async def test_a_node_that_is_killed_takes_its_own_workers_alone(house: House, nodes: RayNodes) -> None:
    provider = await house.started()
    leases = [await house.grant(provider, number) for number in range(2)]
    await house.until("two workers", lambda: len(house.workers()) == 2)
    node = next(iter(nodes.cluster.worker_nodes))
    ours = [pid for pid in house.workers() if raylet(node) in psutil.Process(pid).parents()]
    assert len(ours) == 1
    nodes.kill(node)
    await house.until("the end of one lease", lambda: house.recorder.of(LeaseEnded))
    (end,) = house.recorder.of(LeaseEnded)
    assert end.cause is EndCause.LOST
    await house.until("one worker", lambda: len(house.workers()) == 1)
    assert house.workers() != ours
    nodes.add()
    await house.until("room again", lambda: house.recorder.available == 1)
    assert {end.lease} < set(leases)


async def test_what_the_cluster_has_not_is_said_at_once(house: House) -> None:
    with pytest.raises(
        ProviderUnavailable, match=r"no node .* asks for \(CPU 1, unobtainium 3\).*its nodes have .*place 1"
    ):
        await house.started(resources={"unobtainium": 3.0})


async def test_a_cluster_that_is_not_there_is_named(house: House) -> None:
    with pytest.raises(ProviderUnavailable, match=r"ray://127.0.0.1:9 does not answer .*is its head up"):
        await house.started(address="ray://127.0.0.1:9")


@pytest.mark.parametrize(("part", "versions"), [("Ray: 1.0.0", ("1.0.0", None)), ("Python: 3.1.4", (None, "3.1.4"))])
async def test_another_version_is_named(
    house: House, nodes: RayNodes, monkeypatch: pytest.MonkeyPatch, part: str, versions: tuple[str | None, str | None]
) -> None:
    utils = pytest.importorskip("ray._private.utils")
    ours = utils.compute_version_info()
    told = tuple(other or own for other, own in zip(versions, ours, strict=True))
    monkeypatch.setattr(utils, "compute_version_info", lambda: told)
    with pytest.raises(ProviderUnavailable) as caught:
        await house.started()
    words = str(caught.value)
    assert "does not take this client" in words
    assert part in words
    assert f"The cluster was started with: Ray: {ours[0]} Python: {ours[1]}" in words
    assert "install its versions of Ray and Python here" in words
    kind = NodeKind(gpus=1, memory_bytes=0, nano_usd_per_hour=1)
    of_pool = ray_nodes.RayNodes(
        ray_nodes.RayNodesSettings.model_validate({"address": nodes.address}), "lab", kind, "cpu"
    )
    with pytest.raises(RayUnusable) as refused:
        await of_pool.open()
    assert words == f"ray: {refused.value}", "a pool is told the same"
