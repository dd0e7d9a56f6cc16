"""What is lost of a real cluster while it is asked: its head, the link to it, and the deputy of a pool."""

import asyncio
import contextlib
import os
import signal
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks._ray_nodes import RayNodes, ray_nodes
from benchmarks._waiting import awaited
from elastic.core.cluster.types import NodeKind
from elastic.pool.machines import NodeTicket
from elastic.pool.node_requests import NodeRequest
from elastic.weights.errors import RelayUnavailable
from providers import ray_nodes as pools
from providers.ray_connection import RayConnection, ray
from providers.ray_relay import RayRelay
from providers.vendor_calls import call
from tests.bad_link import BadLink
from tests.ray.conftest import CPUS
from tests.ray.test_ray import House

pytestmark = [pytest.mark.ray, pytest.mark.timeout(900)]

PATIENCE_S = 240.0
SECONDS_S = 60.0
"""Seconds on a machine that has much else to do: a quarter of what a call may take here."""


@pytest.fixture
def mortal(tmp_path: Path) -> Iterator[RayNodes]:
    """A cluster whose head may be killed: the next one knows what it knew."""
    with ray_nodes(1, tmp_path / "gcs", CPUS, end_together=True) as nodes:
        yield nodes


class Nobody:
    def answer(self) -> None:
        """Called in vain: no node has what this actor asks for."""


def _ask_in_vain(begun: threading.Event) -> None:
    answer = ray().remote(Nobody).options(resources={"unobtainium": 1}).remote().answer.remote()
    assert not ray().wait([answer], timeout=0.1)[0]
    begun.set()
    ray().get(answer)


async def test_a_provider_is_silent_as_long_as_there_is_no_head(mortal: RayNodes, tmp_path: Path) -> None:
    house = House(mortal, tmp_path)
    provider = await house.started(poll_s=0.5)
    await house.until("an offer", lambda: house.recorder.available == 1)
    asking = asyncio.create_task(provider.ask(_ask_in_vain, begun := threading.Event()))
    await house.until("a call", begun.is_set)
    await asyncio.to_thread(mortal.kill_head)
    with pytest.raises(ConnectionError):
        await asyncio.wait_for(asking, SECONDS_S)
    await awaited("nothing is offered", lambda: house.recorder.available == 0, SECONDS_S)
    await asyncio.to_thread(mortal.start_head)
    await house.until("an offer again", lambda: house.recorder.available == 1)
    assert await provider.ask(lambda: ray().is_initialized())
    await house.aclose()


@pytest.fixture
async def link(nodes: RayNodes) -> AsyncIterator[tuple[BadLink, RayConnection]]:
    """A link to a cluster, and an open connection by it."""
    link = BadLink(nodes.address.removeprefix("ray://"))
    connection = RayConnection(f"ray://{await link.start()}")
    await asyncio.to_thread(connection.open, PATIENCE_S)
    try:
        yield link, connection
    finally:
        link.mend()
        await call(PATIENCE_S, connection.close)
        await link.aclose()


async def test_a_call_ends_soon_after_its_link_is_cut_and_closed(link: tuple[BadLink, RayConnection]) -> None:
    by, connection = link
    asking = asyncio.create_task(connection.ask(PATIENCE_S, _ask_in_vain, begun := threading.Event()))
    await awaited("a call", begun.is_set, PATIENCE_S)
    by.cut()
    with pytest.raises(TimeoutError):
        await connection.ask(1.0, ray().nodes)
    assert not asking.done()
    by.reset()
    with pytest.raises(ConnectionError):
        await asyncio.wait_for(asking, SECONDS_S)
    by.mend()
    await call(SECONDS_S, connection.reset)
    await asyncio.to_thread(connection.open, PATIENCE_S)
    assert await connection.ask(PATIENCE_S, ray().nodes)


async def test_a_connection_whose_link_is_silent_is_ended_in_seconds(link: tuple[BadLink, RayConnection]) -> None:
    by, connection = link
    by.cut()
    with pytest.raises(TimeoutError):
        await connection.ask(1.0, ray().nodes)
    await call(SECONDS_S, connection.reset)
    by.reset()
    by.mend()
    await asyncio.to_thread(connection.open, PATIENCE_S)
    assert await connection.ask(PATIENCE_S, ray().nodes)


async def test_a_relay_whose_link_is_silent_makes_a_new_connection(nodes: RayNodes) -> None:
    by = BadLink(nodes.address.removeprefix("ray://"))
    url = f"ray://{await by.start()}/lost-{os.getpid()}?answer_timeout_s="
    patient, hasty = RayRelay(f"{url}{PATIENCE_S:g}"), RayRelay(f"{url}10")
    await asyncio.to_thread(patient.put, "k", b"content")
    by.cut()
    with pytest.raises(RelayUnavailable):
        await asyncio.to_thread(hasty.get, "k")
    assert not ray().is_initialized(), "what is silent is not asked again"
    by.mend()
    assert await asyncio.to_thread(patient.get, "k") == b"content"
    await asyncio.to_thread(patient.delete, "k")
    await asyncio.to_thread(patient.close)
    await by.aclose()


async def test_a_deputy_is_killed_while_a_pool_looks(nodes: RayNodes, tmp_path: Path) -> None:
    """A pool does not notice, and starts nothing a second time."""
    given = {"address": nodes.address, "directory": str(tmp_path / "nodes"), "resources": {"place": 1.0}}
    given |= {"poll_s": 0.5, "answer_timeout_s": PATIENCE_S}
    kind = NodeKind(gpus=1, memory_bytes=0, nano_usd_per_hour=1)
    cluster = pools.RayNodes(pools.RayNodesSettings.model_validate(given), f"t-{os.getpid()}", kind, "cpu")
    await cluster.open()
    ticket: dict[str, Any] = {"pool": "t", "node": "rollout-1", "join": "127.0.0.1:1", "fingerprint": "", "token": "t"}
    await cluster.ask(NodeTicket(**ticket, gpus=1, devices="cpu"), 1)

    async def agent() -> psutil.Process:
        """The process of the node's agent, while there is one."""
        while True:
            assert [one.ended for one in await cluster.look()] == [""]
            if found := _processes(str(tmp_path / "nodes")):
                (one,) = found
                return one

    async with asyncio.timeout(PATIENCE_S):
        before = await agent()
        for _ in range(2):
            deputies = _processes("ray::Deputy")
            looking = asyncio.create_task(cluster.look())
            for deputy in deputies:
                with contextlib.suppress(psutil.NoSuchProcess):
                    deputy.send_signal(signal.SIGKILL)
            assert deputies
            assert await looking == [NodeRequest("rollout-1", 1)]
        assert await agent() == before, "nothing was started again"
        await cluster.give_back(NodeRequest("rollout-1", 1))
        assert await cluster.look() == []
    await cluster.aclose()
    assert await asyncio.to_thread(nodes.actors_left, PATIENCE_S) == []
    await awaited("no such process", lambda: not _processes("ray::Deputy"), PATIENCE_S)


def _processes(words: str) -> list[psutil.Process]:
    """Those with these words in their commands."""
    found = list[psutil.Process]()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
            if any(words in word for word in process.cmdline()):
                found.append(process)
    return found
