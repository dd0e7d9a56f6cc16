"""A trainer on a shared device: a node agent at the other end of its socket, real trainer, engine and gateway."""

import asyncio
import gc
import itertools
import os
import random
import threading
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import pytest
from safetensors.torch import load_file

from elastic.config import ConfigError
from elastic.core.types import Account, FinishReason
from elastic.pool.messages import NODE_AGENT_VARIABLE, Warm
from elastic.protocol import wire
from elastic.worker.agent import AgentExit
from elastic.worker.device_permit import DevicePermit, node_agent_socket
from tests.worker.conftest import generate
from tests.worker.node_agent import NodeAgent
from tests.worker.trainer_house import TrainerHouse, config_of, step_of, train_group


class Shared(TrainerHouse):
    """Its trainer has the device by permit, or one of its own."""

    def __init__(self, run_dir: Path, base: Path, node_agent: NodeAgent | None) -> None:
        super().__init__(config_of(base, trainer={"updates_per_step": 2}), run_dir)
        self.node_agent = node_agent
        self.parts["permit"] = DevicePermit(node_agent.resident) if node_agent is not None else None

    async def state(self) -> bytes:
        """Of the newest checkpoint, once the worker has left."""
        self.send(wire.Drain("done"))
        assert (await self.agents[-1]).code == 0
        newest = sorted((self.run_dir / "checkpoints").glob("*.safetensors"))[-1]
        tensors = load_file(newest)
        return b"".join(tensors[name].numpy().tobytes() for name in sorted(tensors))

    def accounts(self) -> Mapping[Account, int]:
        return self.of(wire.Heartbeat)[-1].accounts_ns


@pytest.fixture
async def shared(tmp_path: Path, base: Path) -> AsyncIterator[Shared]:
    async with NodeAgent() as node_agent, Shared(tmp_path / "run", base, node_agent) as run:
        run.host()
        await node_agent.hear(Warm)
        yield run


@pytest.fixture
def node_agent(shared: Shared) -> NodeAgent:
    assert shared.node_agent is not None
    return shared.node_agent


async def test_nothing_is_built_without_the_device(shared: Shared, node_agent: NodeAgent) -> None:
    assert (await node_agent.take()).state_bytes == 0, "it may be said twice"
    assert not shared.of(wire.Ready)
    assert (await node_agent.give()).state_bytes == 0
    await shared.first(wire.Ready)


async def test_what_was_under_way_ends_before_the_device_is_left(shared: Shared, node_agent: NodeAgent) -> None:
    await node_agent.give()
    await shared.first(wire.Ready)
    shared.send(wire.Sleep(), train_group(1, 0))
    await shared.trained(1, 0)
    parked = await node_agent.take()
    assert parked.state_bytes > 0
    shared.send(train_group(1, 1))
    await shared.next(wire.Heartbeat)
    await shared.next(wire.Heartbeat)
    assert len(shared.of(wire.Trained)) == 1
    began = shared.accounts()
    await shared.next(wire.Heartbeat)
    gained = {account for account, ns in shared.accounts().items() if ns != began.get(account, 0)}
    assert gained == {Account.PARKED}
    await node_agent.give()
    await shared.trained(1, 1)
    assert shared.accounts().keys() >= {Account.PARKED, Account.SWITCHING}


async def test_seeding_stops_and_goes_on_with_the_device(shared: Shared, node_agent: NodeAgent) -> None:
    await node_agent.give()
    await shared.first(wire.Ready)
    shared.send(generate("long", most=55))
    await shared.until(lambda: shared.chunks("long"))
    await node_agent.take()
    cut = await shared.finished("long")
    assert cut.finish in (FinishReason.ABORTED, FinishReason.LENGTH, FinishReason.STOP)
    shared.send(generate("later", most=5))
    await shared.next(wire.Heartbeat)
    assert not shared.chunks("later")
    await node_agent.give()
    await shared.finished("later")


async def test_sleep_and_wake_are_answered_without_the_device(shared: Shared, node_agent: NodeAgent) -> None:
    await node_agent.give()
    await shared.first(wire.Ready)
    shared.send(wire.Sleep())
    await shared.first(wire.Slept)
    await node_agent.take()
    for _ in range(2):
        heard = len(shared.heard)
        shared.send(wire.Wake(), wire.Sleep())
        await shared.first(wire.Slept, after=heard)
        await shared.first(wire.Awoke, after=heard)
    shared.send(wire.Wake(), generate("t", most=5))
    await node_agent.give()
    await shared.finished("t")


async def test_a_parked_trainer_leaves_with_a_checkpoint_and_without_what_it_was_not_given_time_for(
    shared: Shared, node_agent: NodeAgent
) -> None:
    await node_agent.give()
    await shared.first(wire.Ready)
    shared.send(wire.Sleep(), *step_of(1))
    await shared.stepped(1)
    await node_agent.take()
    shared.send(train_group(2, 0), wire.Drain("over"))
    end = await shared.agents[-1]
    assert end == AgentExit(0, "over")
    assert not any(trained.group == "s2g0" for trained in shared.of(wire.Trained))
    assert (shared.run_dir / "checkpoints" / "00000001.safetensors").exists()


@pytest.mark.parametrize("has_device", [False, True])
async def test_it_ends_with_its_node_agent(shared: Shared, node_agent: NodeAgent, has_device: bool) -> None:
    if has_device:
        await node_agent.give()
        await shared.first(wire.Ready)
    node_agent.link.abort()
    end = await shared.agents[-1]
    assert end.code == 1
    assert "node agent" in end.reason


@pytest.mark.parametrize("seed", range(3))
async def test_training_with_parks_anywhere_gives_the_same_weights(tmp_path: Path, base: Path, seed: int) -> None:
    """The device is taken at any time: within a group's training, between two, while versions are published."""
    rng = random.Random(seed)

    async def trained(name: str, node_agent: NodeAgent | None) -> bytes:
        async with Shared(tmp_path / name, base, node_agent) as run:
            run.host()
            taking = asyncio.create_task(take_turns(node_agent)) if node_agent is not None else None
            await run.first(wire.Ready)
            for version in (1, 2):
                orders = step_of(version)
                rng.shuffle(orders[:-1])
                for order in orders:
                    run.send(order)
                    await asyncio.sleep(rng.uniform(0, 0.02))
                await run.stepped(version)
            if taking is not None:
                taking.cancel()
                await asyncio.gather(taking, return_exceptions=True)
            return await run.state()

    async def take_turns(node_agent: NodeAgent) -> None:
        await node_agent.hear(Warm)
        while True:
            await asyncio.shield(node_agent.give())
            await asyncio.sleep(rng.uniform(0, 0.05))
            await asyncio.shield(node_agent.take())
            await asyncio.sleep(rng.uniform(0, 0.02))

    async with NodeAgent() as node_agent:
        assert await trained("shared", node_agent) == await trained("alone", None)


@pytest.mark.nightly
async def test_after_hundreds_of_turns_nothing_has_grown(shared: Shared, node_agent: NodeAgent) -> None:
    await node_agent.give()
    await shared.first(wire.Ready)
    shared.send(wire.Sleep(), train_group(1, 0))
    await shared.trained(1, 0)

    def held() -> tuple[int, ...]:
        gc.collect()
        return len(gc.get_objects()), threading.active_count(), len(os.listdir("/proc/self/fd"))

    sizes: list[tuple[int, ...]] = []
    for _ in range(5):
        for _ in range(150):
            await node_agent.take()
            await node_agent.give()
        shared.heard.clear()
        sizes.append(held())
    # The relay is looked at meanwhile, from threads of their own. What grew with each turn would show 150 times, in
    # every round.
    for column in zip(*sizes, strict=True):
        assert min(after - before for before, after in itertools.pairwise(column)) < 100, column
    shared.send(train_group(1, 1), wire.UpdateFrame(1, 1))
    await shared.stepped(1)


@pytest.mark.parametrize("found", ["x", "-1", "99999"])
def test_a_variable_that_names_no_socket_is_refused(found: str) -> None:
    with pytest.raises(ConfigError, match="ELASTIC_NODE_AGENT_FD: takes the descriptor of a socket"):
        node_agent_socket({NODE_AGENT_VARIABLE: found})


def test_without_a_node_agent_there_is_no_socket() -> None:
    assert node_agent_socket({}) is None
