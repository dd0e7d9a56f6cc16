"""A trainer on a shared device: a keeper at the other end of its socket, real trainer, engine and gateway."""

import asyncio
import gc
import itertools
import os
import random
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from elastic.config import Config, ConfigError
from elastic.core.types import Account, FinishReason
from elastic.engine.model.checkpoint import model_tensors, write_checkpoint
from elastic.engine.model.config import Qwen3Config
from elastic.engine.model.qwen3 import Qwen3
from elastic.pool.messages import KEEPER_VARIABLE, Warm
from elastic.protocol import wire
from elastic.worker.agent import AgentExit
from elastic.worker.device_permit import DevicePermit, keeper_socket
from elastic.worker.trainer_host import run_trainer_host
from tests.worker.conftest import Orchestra, generate
from tests.worker.keeper import Keeper

MODEL = Qwen3Config(num_hidden_layers=1, hidden_size=32, intermediate_size=48, initializer_range=0.2)
GROUPS = 2


class Shared(Orchestra):
    """A run whose trainer has its device by permit, or one of its own."""

    def __init__(self, run_dir: Path, base: Path, keeper: Keeper | None) -> None:
        config = {
            "run": {"steps": 9},
            "model": {"checkpoint": str(base)},
            "rollout": {"groups": GROUPS, "group_size": 2},
            "trainer": {"updates_per_step": 2, "warmup_updates": 0},
            "engine": {"max_context_tokens": 64, "kv_blocks": 16, "max_batch": 4},
        }
        self.config = Config.model_validate(config)
        self.run_dir, self.keeper = run_dir, keeper
        super().__init__(
            engine=self.config.engine.model_dump(mode="json"),  # type: ignore[arg-type]
            model=MODEL.to_dict(),  # type: ignore[arg-type]
            relay=str(run_dir / "weights"),  # type: ignore[arg-type]
            silence_timeout_s=10.0,
        )

    def host(self) -> asyncio.Task[AgentExit]:
        self.expect("w", trains=True)
        permit = DevicePermit(self.keeper.resident) if self.keeper is not None else None
        work = run_trainer_host(self.ticket("w"), self.config, self.run_dir, False, permit)
        self.agents.append(asyncio.create_task(work))
        return self.agents[-1]

    def order(self, version: int) -> list[wire.FromOrchestrator]:
        groups = [train_group(version, index) for index in range(GROUPS)]
        return [*groups, wire.UpdateFrame(version, version)]

    async def trained(self, version: int, index: int) -> object:
        return await self.until(lambda: any(t.group == f"s{version}g{index}" for t in self.of(wire.Trained)))  # type: ignore[attr-defined]

    async def stepped(self, version: int) -> None:
        await self.until(lambda: any(s.version == version for s in self.of(wire.Stepped)))  # type: ignore[attr-defined]

    async def state(self) -> bytes:
        """Of the newest checkpoint, once the worker has left."""
        self.send(wire.Drain("done"))
        assert (await self.agents[-1]).code == 0
        newest = sorted((self.run_dir / "checkpoints").glob("*.safetensors"))[-1]
        tensors = load_file(newest)
        return b"".join(tensors[name].numpy().tobytes() for name in sorted(tensors))

    def accounts(self) -> dict[Account, int]:
        return self.of(wire.Heartbeat)[-1].accounts_ns  # type: ignore[attr-defined]


def train_group(step: int, index: int) -> wire.TrainGroupFrame:
    """Two trajectories of which one was rewarded."""
    trajectories = [
        wire.TrajectoryData(
            f"s{step}g{index}m{m}", [1, 2, 3, 4 + m, 5], [0, 0, 1, 1, 1], [0, 0, -3, -3, -3], [0] * 5, m
        )
        for m in range(2)
    ]
    return wire.TrainGroupFrame(step, f"s{step}g{index}", index, trajectories)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    directory = tmp_path_factory.mktemp("base") / "policy"
    write_checkpoint(directory, MODEL, model_tensors(Qwen3(MODEL)))
    return directory


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
    await shared.first(wire.Heartbeat, after=len(shared.heard))
    await shared.first(wire.Heartbeat, after=len(shared.heard))
    assert len(shared.of(wire.Trained)) == 1
    began = shared.accounts()
    await shared.first(wire.Heartbeat, after=len(shared.heard))
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
    await shared.first(wire.Heartbeat, after=len(shared.heard))
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
    shared.send(wire.Sleep(), *shared.order(1))
    await shared.stepped(1)
    await keeper.take()
    shared.send(train_group(2, 0), wire.Drain("over"))
    end = await shared.agents[-1]
    assert end == AgentExit(0, "over")
    assert not any(trained.group == "s2g0" for trained in shared.of(wire.Trained))  # type: ignore[attr-defined]
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
                orders = run.order(version)
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
