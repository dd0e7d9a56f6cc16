"""A trainer on a shared device: a keeper at the other end of its socket, real trainer, engine and gateway."""

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
from elastic.pool.messages import KEEPER_VARIABLE, Warm
from elastic.protocol import wire
from elastic.worker.agent import AgentExit
from elastic.worker.device_permit import DevicePermit, keeper_socket
from tests.worker.conftest import generate
from tests.worker.keeper import Keeper
from tests.worker.trainer_house import TrainerHouse, config_of, step_of, train_group


class Shared(TrainerHouse):
    """Its trainer has the device by permit, or one of its own."""

    def __init__(self, run_dir: Path, base: Path, keeper: Keeper | None) -> None:
        super().__init__(config_of(base, trainer={"updates_per_step": 2}), run_dir)
        self.keeper = keeper
        self.parts["permit"] = DevicePermit(keeper.resident) if keeper is not None else None

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
    async with Keeper() as keeper, Shared(tmp_path / "run", base, keeper) as run:
        run.host()
        await keeper.hear(Warm)
        yield run


@pytest.fixture
def keeper(shared: Shared) -> Keeper:
    assert shared.keeper is not None
    return shared.keeper


async def test_nothing_is_built_without_the_device(shared: Shared, keeper: Keeper) -> None:
    assert (await keeper.take()).state_bytes == 0, "it may be said twice"
    assert not shared.of(wire.Ready)
    assert (await keeper.give()).state_bytes == 0
    await shared.first(wire.Ready)


async def test_what_was_under_way_ends_before_the_device_is_left(shared: Shared, keeper: Keeper) -> None:
    await keeper.give()
    await shared.first(wire.Ready)
    shared.send(wire.Sleep(), train_group(1, 0))
    await shared.trained(1, 0)
    parked = await keeper.take()
    assert parked.state_bytes > 0
    shared.send(train_group(1, 1))
    await shared.next(wire.Heartbeat)
    await shared.next(wire.Heartbeat)
    assert len(shared.of(wire.Trained)) == 1
    began = shared.accounts()
    await shared.next(wire.Heartbeat)
    gained = {account for account, ns in shared.accounts().items() if ns != began.get(account, 0)}
    assert gained == {Account.PARKED}
    await keeper.give()
    await shared.trained(1, 1)
    assert shared.accounts().keys() >= {Account.PARKED, Account.SWITCHING}


async def test_seeding_stops_and_goes_on_with_the_device(shared: Shared, keeper: Keeper) -> None:
    await keeper.give()
    await shared.first(wire.Ready)
    shared.send(generate("long", most=55))
    await shared.until(lambda: shared.chunks("long"))
    await keeper.take()
    cut = await shared.finished("long")
    assert cut.finish in (FinishReason.ABORTED, FinishReason.LENGTH, FinishReason.STOP)
    shared.send(generate("later", most=5))
    await shared.next(wire.Heartbeat)
    assert not shared.chunks("later")
    await keeper.give()
    await shared.finished("later")


async def test_sleep_and_wake_are_answered_without_the_device(shared: Shared, keeper: Keeper) -> None:
    await keeper.give()
    await shared.first(wire.Ready)
    shared.send(wire.Sleep())
    await shared.first(wire.Slept)
    await keeper.take()
    for _ in range(2):
        heard = len(shared.heard)
        shared.send(wire.Wake(), wire.Sleep())
        await shared.first(wire.Slept, after=heard)
        await shared.first(wire.Awoke, after=heard)
    shared.send(wire.Wake(), generate("t", most=5))
    await keeper.give()
    await shared.finished("t")


async def test_a_parked_trainer_leaves_with_a_checkpoint_and_without_what_it_was_not_given_time_for(
    shared: Shared, keeper: Keeper
) -> None:
    await keeper.give()
    await shared.first(wire.Ready)
    shared.send(wire.Sleep(), *step_of(1))
    await shared.stepped(1)
    await keeper.take()
    shared.send(train_group(2, 0), wire.Drain("over"))
    end = await shared.agents[-1]
    assert end == AgentExit(0, "over")
    assert not any(trained.group == "s2g0" for trained in shared.of(wire.Trained))
    assert (shared.run_dir / "checkpoints" / "00000001.safetensors").exists()


@pytest.mark.parametrize("has_device", [False, True])
async def test_it_ends_with_its_keeper(shared: Shared, keeper: Keeper, has_device: bool) -> None:
    if has_device:
        await keeper.give()
        await shared.first(wire.Ready)
    keeper.link.abort()
    end = await shared.agents[-1]
    assert end.code == 1
    assert "keeper" in end.reason


@pytest.mark.parametrize("seed", range(3))
async def test_training_with_parks_anywhere_gives_the_same_weights(tmp_path: Path, base: Path, seed: int) -> None:
    """The device is taken at any time: within a group's training, between two, while versions are published."""
    rng = random.Random(seed)

    async def trained(name: str, keeper: Keeper | None) -> bytes:
        async with Shared(tmp_path / name, base, keeper) as run:
            run.host()
            taking = asyncio.create_task(take_turns(keeper)) if keeper is not None else None
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

    async def take_turns(keeper: Keeper) -> None:
        await keeper.hear(Warm)
        while True:
            await asyncio.shield(keeper.give())
            await asyncio.sleep(rng.uniform(0, 0.05))
            await asyncio.shield(keeper.take())
            await asyncio.sleep(rng.uniform(0, 0.02))

    async with Keeper() as keeper:
        assert await trained("shared", keeper) == await trained("alone", None)


@pytest.mark.nightly
async def test_after_hundreds_of_turns_nothing_has_grown(shared: Shared, keeper: Keeper) -> None:
    await keeper.give()
    await shared.first(wire.Ready)
    shared.send(wire.Sleep(), train_group(1, 0))
    await shared.trained(1, 0)

    def held() -> tuple[int, ...]:
        gc.collect()
        return len(gc.get_objects()), threading.active_count(), len(os.listdir("/proc/self/fd"))

    sizes: list[tuple[int, ...]] = []
    for _ in range(5):
        for _ in range(150):
            await keeper.take()
            await keeper.give()
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
    with pytest.raises(ConfigError, match="ELASTIC_KEEPER_FD: takes the descriptor of a socket"):
        keeper_socket({KEEPER_VARIABLE: found})


def test_without_a_keeper_there_is_no_socket() -> None:
    assert keeper_socket({}) is None
