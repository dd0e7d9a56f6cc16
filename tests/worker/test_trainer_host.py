"""The trainer's host with the real trainer, engine and relay, on a tiny model, against a real gateway."""

import asyncio
import itertools
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch

from elastic.config import Config, TrainerConfig
from elastic.core.types import Account, FinishReason
from elastic.engine.model.checkpoint import model_tensors, write_checkpoint
from elastic.engine.model.config import Qwen3Config
from elastic.engine.model.qwen3 import Qwen3
from elastic.protocol import wire
from elastic.weights import directory
from elastic.weights.errors import RelayError, RelayUnavailable
from elastic.weights.publisher import publish_keyframe
from elastic.weights.puller import Puller
from elastic.weights.records import version_of
from elastic.weights.relay import Buffer, Relay, open_relay
from elastic.weights.shared_memory import SHARED_MEMORY, in_memory
from elastic.weights.signing import SigningKey, Trust
from elastic.weights.versions import published_versions
from elastic.worker.trainer_host import grpo_trainer, run_trainer_host
from tests.weights.signed import pull
from tests.worker.conftest import PATIENCE_S, Orchestra, generate

MODEL = Qwen3Config(num_hidden_layers=1, hidden_size=32, intermediate_size=48, initializer_range=0.2)
GROUPS = 2


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    directory = tmp_path_factory.mktemp("base") / "policy"
    write_checkpoint(directory, MODEL, model_tensors(Qwen3(MODEL)))
    return directory


@pytest.fixture
def config(base: Path) -> Config:
    return Config.model_validate(
        {
            "run": {"steps": 9},
            "model": {"checkpoint": str(base)},
            "rollout": {"groups": GROUPS, "group_size": 2},
            "trainer": {"updates_per_step": 1, "checkpoint_every_steps": 2, "warmup_updates": 0},
            "engine": {"max_context_tokens": 64, "kv_blocks": 16, "max_batch": 4},
            "weights": {"keep_versions": 3},
        }
    )


@pytest.fixture
async def house(config: Config, tmp_path: Path) -> AsyncIterator["TrainerHouse"]:
    async with TrainerHouse(config, tmp_path) as house:
        yield house


class TrainerHouse(Orchestra):
    def __init__(self, config: Config, run_dir: Path, **terms: float) -> None:
        relay = str(run_dir / "weights")
        told: dict[str, Any] = {
            "engine": config.engine.model_dump(mode="json"),
            "model": MODEL.to_dict(),
            "relay": relay,
            "silence_timeout_s": 10.0,
            "orchestrator_timeout_s": PATIENCE_S,
        }
        super().__init__(**told | terms)
        self.relay = open_relay(relay)
        self._config = config
        self.run_dir = run_dir
        self.parts: dict[str, Any] = {}
        """What its hosts are made of besides, by the parameter's name."""

    def host(self, worker: str = "w", resume: bool = False) -> asyncio.Task[object]:
        self.expect(worker, trains=True)
        work = run_trainer_host(self.ticket(worker), self._config, self.run_dir, resume, **self.parts)
        self.agents.append(asyncio.create_task(work))
        return self.agents[-1]

    def weights(self, version: int) -> dict[str, torch.Tensor]:
        return pull(self.relay, self.trust, version)

    @property
    def trust(self) -> Trust:
        """In the trainer that said last that it is ready."""
        return Trust(self.run_dir.name, self.of(wire.Ready)[-1].publisher)  # type: ignore[attr-defined]

    async def step(self, version: int) -> wire.Stepped:
        for index in range(GROUPS):
            self.send(train_group(version, index))
        self.send(wire.UpdateFrame(version, version))
        await self.until(lambda: any(s.version == version for s in self.of(wire.Stepped)))  # type: ignore[attr-defined]
        return self.of(wire.Stepped)[-1]  # type: ignore[return-value]


def train_group(step: int, index: int) -> wire.TrainGroupFrame:
    """Two trajectories of which one was rewarded."""
    trajectories = [
        wire.TrajectoryData(
            f"s{step}g{index}m{m}", [1, 2, 3, 4 + m, 5], [0, 0, 1, 1, 1], [0, 0, -3, -3, -3], [0] * 5, m
        )
        for m in range(2)
    ]
    return wire.TrainGroupFrame(step, f"s{step}g{index}", index, trajectories)


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def account(name: Account) -> Callable[[object], int]:
    return lambda beat: beat.accounts_ns.get(name, 0)  # type: ignore[attr-defined]


async def test_the_base_policy_is_version_0_on_the_relay_and_in_the_engine_before_ready(house: TrainerHouse) -> None:
    house.host()
    ready = await house.first(wire.Ready)
    assert ready.weights_version == 0  # type: ignore[attr-defined]
    torch.manual_seed(0)
    assert equal(house.weights(0), model_tensors(Qwen3(MODEL)))
    house.send(generate("t", most=8))
    assert (await house.finished("t")).finish is FinishReason.LENGTH


async def test_a_step_is_trained_published_and_served(house: TrainerHouse) -> None:
    house.host()
    await house.first(wire.Ready)
    house.send(wire.Sleep())
    stepped = await house.step(1)
    assert [t.group for t in house.of(wire.Trained)] == ["s1g0", "s1g1"]  # type: ignore[attr-defined]
    assert stepped.metrics["updates"] == 1
    published = await house.first(wire.PublishedFrame)
    assert isinstance(published, wire.PublishedFrame)
    assert not equal(house.weights(1), house.weights(0))
    assert list(published.changed) == ["embedding", "0", "head"]
    assert all(0 <= share <= 1 for share in published.changed.values())
    assert published.changed["0"] > 0
    house.send(wire.Wake(), generate("t", most=8))
    await house.finished("t")
    assert {chunk.weights_version for chunk in house.chunks("t")} == {1}


class Gated:
    """A relay that holds everything back that is put under a version but its first, until it is opened or breaks."""

    def __init__(self, relay: Relay) -> None:
        self._relay = relay
        self.get, self.list_keys, self.delete, self.close = relay.get, relay.list_keys, relay.delete, relay.close
        self.opened = threading.Event()
        self.fault = ""

    def put(self, key: str, *parts: Buffer) -> None:
        if version_of(key):
            assert self.opened.wait(PATIENCE_S)
            if self.fault:
                raise RelayError(self.fault)
        self._relay.put(key, *parts)


@pytest.fixture
def gate(house: TrainerHouse) -> Gated:
    gate = Gated(house.relay)
    house.parts["open_relay"] = lambda *_: gate
    return gate


async def test_the_next_rollouts_begin_while_a_version_is_encoded(house: TrainerHouse, gate: Gated) -> None:
    house.host()
    await house.first(wire.Ready)
    house.send(wire.Sleep())
    await house.step(1)
    house.send(wire.Wake(), generate("t", most=8))
    await house.finished("t")
    assert {chunk.weights_version for chunk in house.chunks("t")} == {1}
    assert published_versions(house.relay) == [0]
    assert not house.of(wire.PublishedFrame)
    with ThreadPoolExecutor(1) as executor:
        followed = executor.submit(Puller(house.relay, house.trust).pull, 1, PATIENCE_S, follow=True)
        gate.opened.set()
        published = await house.first(wire.PublishedFrame)
        assert (published.version, list(published.changed)) == (1, ["embedding", "0", "head"])  # type: ignore[attr-defined]
        assert equal(followed.result(), house.weights(1))


async def test_a_version_waits_for_the_one_before(house: TrainerHouse, gate: Gated) -> None:
    house.host()
    await house.first(wire.Ready)
    await house.step(1)
    house.send(*(train_group(2, index) for index in range(GROUPS)), wire.UpdateFrame(2, 2))
    await house.until(lambda: len(house.of(wire.Trained)) == 2 * GROUPS)
    assert len(house.of(wire.Stepped)) == 1
    gate.opened.set()
    await house.until(lambda: len(house.of(wire.PublishedFrame)) == 2)
    told = [(type(m), m.version) for m in (*house.of(wire.Stepped), *house.of(wire.PublishedFrame))]  # type: ignore[attr-defined]
    assert told == [(wire.Stepped, 1), (wire.Stepped, 2), (wire.PublishedFrame, 1), (wire.PublishedFrame, 2)]


async def test_the_last_version_is_there_when_its_step_is_over(config: Config, tmp_path: Path) -> None:
    one_step = config.model_copy(update={"run": config.run.model_copy(update={"steps": 1})})
    async with TrainerHouse(one_step, tmp_path) as house:
        house.host()
        await house.first(wire.Ready)
        await house.step(1)
        assert published_versions(house.relay) == [0, 1]


async def test_a_version_that_cannot_be_published_fails_the_trainer(house: TrainerHouse, gate: Gated) -> None:
    house.host()
    await house.first(wire.Ready)
    gate.fault = "the disk is full"
    await house.step(1)
    gate.opened.set()
    failed = await house.first(wire.TrainerFailedFrame)
    assert failed.error == "version 1 not published: RelayError: the disk is full"  # type: ignore[attr-defined]
    assert published_versions(house.relay) == [0]


async def test_a_skipped_group_is_no_obstacle(house: TrainerHouse) -> None:
    house.host()
    await house.first(wire.Ready)
    house.send(train_group(1, 0), wire.SkipGroup(1, "s1g1", 1, "no variance"), wire.UpdateFrame(1, 1))
    stepped = await house.first(wire.Stepped)
    assert stepped.metrics["groups"] == 1  # type: ignore[attr-defined]


async def test_a_group_of_no_use_is_named_and_the_step_goes_on(house: TrainerHouse) -> None:
    house.host()
    await house.first(wire.Ready)
    poisoned = train_group(1, 1)
    poisoned.trajectories[0].logprobs[2] = float("nan")
    house.send(train_group(1, 0), poisoned, wire.UpdateFrame(1, 1))
    stepped = await house.first(wire.Stepped)
    assert isinstance(stepped, wire.Stepped)
    assert (stepped.metrics["groups"], stepped.metrics["groups_unusable"]) == (1, 1)
    assert list(stepped.unusable) == ["s1g1"]
    assert "magnitude nan" in stepped.unusable["s1g1"]
    await house.step(2)
    assert house.of(wire.Stepped)[-1].unusable == {}  # type: ignore[attr-defined]


async def test_a_group_is_skipped_without_a_word_to_the_turns_that_run(house: TrainerHouse) -> None:
    house.host()
    await house.first(wire.Ready)
    house.send(generate("t", most=60), wire.SkipGroup(1, "s1g1", 1, "no variance"))
    assert (await house.finished("t")).finish is FinishReason.LENGTH


async def test_a_step_without_all_its_groups_fails_loudly(house: TrainerHouse) -> None:
    house.host()
    await house.first(wire.Ready)
    house.send(train_group(1, 0), wire.UpdateFrame(1, 1))
    failed = await house.first(wire.TrainerFailedFrame)
    assert "groups neither trained nor skipped: 1" in failed.error  # type: ignore[attr-defined]
    assert published_versions(house.relay) == [0]


async def test_training_and_generation_exclude_each_other_even_unasked(house: TrainerHouse) -> None:
    house.host()
    await house.first(wire.Ready)
    house.send(generate("t", most=60), train_group(1, 0))
    await house.first(wire.Trained)
    assert (await house.finished("t")).finish in (FinishReason.ABORTED, FinishReason.LENGTH)
    house.send(generate("t", attempt=2, most=8))
    assert (await house.finished("t", 2)).finish is FinishReason.LENGTH, "the engine is awake again"


async def test_the_device_time_of_the_trainer_adds_up(house: TrainerHouse) -> None:
    agent = house.host()
    await house.first(wire.Ready)
    house.send(wire.Sleep())
    for version in (1, 2, 3):
        await house.step(version)
    house.send(wire.Wake(), generate("t", most=8))
    await house.finished("t")
    house.send(wire.Drain("done"))
    await agent
    reports = [*house.of(wire.Heartbeat), *house.of(wire.Goodbye)]
    sums = [sum(report.accounts_ns.values()) for report in reports]  # type: ignore[attr-defined]
    assert sums == sorted(sums)
    trained_s = sum(t.train_s for t in house.of(wire.Trained))  # type: ignore[attr-defined]
    assert account(Account.TRAINING)(reports[-1]) / 1e9 > trained_s
    assert account(Account.APPLYING)(reports[-1]) > 0
    for name in Account:
        shares = [account(name)(report) for report in reports]
        assert all(later - earlier >= -1_000_000 for earlier, later in itertools.pairwise(shares)), name


def step_orders(version: int) -> list[wire.FromOrchestrator]:
    groups = [train_group(version, index) for index in range(GROUPS - 1)]
    return [*groups, wire.SkipGroup(version, "none", GROUPS - 1, "no variance", 7), wire.UpdateFrame(version, version)]


def missing(orders: list[wire.FromOrchestrator], ready: wire.Ready) -> list[wire.FromOrchestrator]:
    """What a trainer that says this has not been given of a step's `orders`."""

    def has(order: wire.FromOrchestrator) -> bool:
        match order:
            case wire.TrainGroupFrame():
                return order.group in ready.groups
            case wire.SkipGroup():
                return order.index in ready.slots
            case wire.UpdateFrame():
                return False
        raise AssertionError(order)

    return [order for order in orders if not has(order)]


@pytest.mark.parametrize("position", range(len(step_orders(1))))
async def test_a_host_that_dials_again_in_the_middle_of_a_step_does_nothing_twice(
    config: Config, tmp_path: Path, position: int
) -> None:
    """Its connection breaks while it carries out the order at `position`, which it is then given again."""
    begun, go_on = threading.Event(), threading.Event()
    orders = step_orders(1)

    name = {wire.TrainGroupFrame: "train_group", wire.SkipGroup: "skip_group", wire.UpdateFrame: "update"}[
        type(orders[position])
    ]

    class Holding:
        """The trainer, but that it waits before this work."""

        def __init__(self, *given: Any) -> None:
            self._trainer = grpo_trainer(*given)

        def __getattr__(self, asked: str) -> Any:
            if asked == name:
                begun.set()
                assert go_on.wait(PATIENCE_S)
            return getattr(self._trainer, asked)

    undisturbed, disturbed = tmp_path / "undisturbed", tmp_path / "disturbed"
    for run_dir in (undisturbed, disturbed):
        run_dir.mkdir()
    async with TrainerHouse(config, undisturbed) as house:
        house.host()
        await house.first(wire.Ready)
        house.send(*orders)
        expected = await house.first(wire.Stepped)
        await house.first(wire.PublishedFrame)
        weights = house.weights(1)
    async with TrainerHouse(config, disturbed) as house:
        house.parts["make_trainer"] = Holding
        house.host()
        await house.first(wire.Ready)
        house.send(*orders[:position])
        trained = sum(isinstance(order, wire.TrainGroupFrame) for order in orders[:position])
        await house.until(lambda: len(house.of(wire.Trained)) == trained)
        house.send(orders[position])
        assert await asyncio.to_thread(begun.wait, PATIENCE_S)
        before = len(house.heard)
        house.cut()
        ready = await house.first(wire.Ready, epoch=2)
        assert isinstance(ready, wire.Ready)
        assert ready.weights_version == 0
        assert ready.slots == list(range(position + 1))[:GROUPS]
        house.send(orders[position], *missing(orders[position + 1 :], ready), epoch=2)
        go_on.set()
        stepped = await house.first(wire.Stepped)
        await house.first(wire.PublishedFrame)
        answered = [m.group for _, _, m in house.heard[before:] if isinstance(m, wire.Trained)]
        assert answered == [order.group for order in orders[position:] if isinstance(order, wire.TrainGroupFrame)]
        assert len(house.of(wire.Stepped)) == len(house.of(wire.PublishedFrame)) == 1
        assert equal(house.weights(1), weights)
        timeless = [{k: v for k, v in s.metrics.items() if not k.endswith("_s")} for s in (stepped, expected)]  # type: ignore[attr-defined]
        assert timeless[0] == timeless[1]


async def test_what_was_done_is_answered_again_and_not_done_again(house: TrainerHouse) -> None:
    house.host()
    await house.first(wire.Ready)
    group, skipped, update = step_orders(1)
    house.send(group, group, skipped, skipped, update)
    stepped = await house.first(wire.Stepped)
    published = await house.first(wire.PublishedFrame)
    assert [trained.group for trained in house.of(wire.Trained)] == ["s1g0", "s1g0"]  # type: ignore[attr-defined]
    weights = house.weights(1)
    house.cut()
    ready = await house.first(wire.Ready, epoch=2)
    assert (ready.weights_version, ready.groups, ready.slots) == (1, [], [])  # type: ignore[attr-defined]
    before = len(house.heard)
    house.send(update, epoch=2)
    assert await house.first(wire.Stepped, epoch=2) == stepped
    assert await house.first(wire.PublishedFrame, epoch=2, after=before) == published
    assert equal(house.weights(1), weights)
    assert published_versions(house.relay) == [0, 1]


async def test_a_failure_that_nobody_heard_is_told_whoever_asks_next(house: TrainerHouse) -> None:
    house.host()
    await house.first(wire.Ready)
    house.send(wire.UpdateFrame(1, 1))
    failed = await house.first(wire.TrainerFailedFrame)
    house.cut()
    await house.first(wire.Ready, epoch=2)
    house.send(train_group(1, 0), epoch=2)
    assert await house.first(wire.TrainerFailedFrame, epoch=2) == failed
    assert not house.of(wire.Trained)


async def test_a_relay_that_is_away_for_a_while_fails_no_trainer(house: TrainerHouse) -> None:
    refused = threading.Semaphore(0)

    class Away(Gated):
        def put(self, key: str, *parts: Buffer) -> None:
            if not self.opened.is_set() and version_of(key):
                refused.release()
                raise RelayUnavailable("nobody is there")
            super().put(key, *parts)

    gate = Away(house.relay)
    house.parts["open_relay"] = lambda *_: gate
    house.host()
    await house.first(wire.Ready)
    await house.step(1)
    for _ in range(3):
        assert await asyncio.to_thread(refused.acquire, timeout=PATIENCE_S)
    gate.opened.set()
    await house.first(wire.PublishedFrame)
    assert published_versions(house.relay) == [0, 1]
    assert not house.of(wire.TrainerFailedFrame)


@pytest.fixture
def memory() -> Iterator[Path]:
    """A place of this test's own in shared memory, most of which has to be free."""
    with TemporaryDirectory(dir=SHARED_MEMORY) as place:
        yield Path(place)


def nothing_in(place: Path) -> bool:
    return not any(place.iterdir())


async def test_weights_stay_in_memory_while_the_trainer_waits_for_its_orchestrator(
    config: Config, tmp_path: Path, memory: Path
) -> None:
    """The place in memory is that of a process that was killed: nobody but the trainer holds it."""
    weights = tmp_path / "weights"
    (weights / ".incoming").mkdir(parents=True)
    place = memory / "elastic-relay-killed"
    place.mkdir(parents=True)
    (weights / directory.MEMORY_LINK).symlink_to(place)
    other = tmp_path / "other"
    other.mkdir()
    async with TrainerHouse(config, tmp_path, orchestrator_timeout_s=1.0) as house:
        agent = house.host()
        await house.first(wire.Ready)
        await house.gateway.aclose()
        with in_memory(other, memory):
            assert published_versions(house.relay) == [0]
            assert any(path.is_file() for path in place.iterdir())
        end = await agent
        assert end.code == 1  # type: ignore[attr-defined]
        assert "could not be resumed" in end.reason  # type: ignore[attr-defined]
        assert nothing_in(memory)
        assert published_versions(house.relay) == []


async def test_a_resumed_host_goes_on_from_its_checkpoint(house: TrainerHouse) -> None:
    first = house.host("w")
    await house.first(wire.Ready)
    house.send(wire.Sleep())
    for version in (1, 2, 3):
        await house.step(version)
    await house.until(lambda: len(house.of(wire.PublishedFrame)) == 3)
    second = house.weights(2)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    assert published_versions(house.relay) == [0, 1, 2, 3]
    publish_keyframe(house.relay, "left over", 4, second, {}, SigningKey())
    checkpoints = house.run_dir / "checkpoints"
    begin = len(house.heard)
    (checkpoints / ".checkpoint-killed").mkdir()
    house.host("again", resume=True)
    ready = await house.first(wire.Ready, after=begin)
    assert [path.name for path in checkpoints.iterdir()] == ["00000002.safetensors"], "a killed save left nothing"
    assert ready.weights_version == 2, "checkpoints are made every second step"  # type: ignore[attr-defined]
    assert published_versions(house.relay) == [2], "nobody believes any more what the first has signed"
    assert equal(house.weights(2), second)
    keys = {ready.publisher for ready in house.of(wire.Ready)}  # type: ignore[attr-defined]
    assert len(keys) == 2
    house.send(wire.UpdateFrame(2, 2), worker="again")
    stepped = await house.first(wire.Stepped, after=begin)
    assert stepped.metrics.items() <= house.of(wire.Stepped)[1].metrics.items(), "of the process before"  # type: ignore[attr-defined]
    assert stepped.metrics["groups"] == GROUPS  # type: ignore[attr-defined]
    published = await house.first(wire.PublishedFrame, after=begin)
    assert published.version == 2  # type: ignore[attr-defined]


async def test_a_resumed_host_without_a_checkpoint_begins_anew(house: TrainerHouse) -> None:
    house.host(resume=True)
    ready = await house.first(wire.Ready)
    assert ready.weights_version == 0  # type: ignore[attr-defined]


async def test_a_base_policy_that_cannot_be_read_ends_the_host(
    house: TrainerHouse, config: Config, tmp_path: Path
) -> None:
    house.expect("w", trains=True)
    missing = config.model_copy(update={"model": config.model.model_copy(update={"checkpoint": tmp_path / "none"})})
    end = await run_trainer_host(house.ticket("w"), missing, tmp_path, resume=False)
    assert end.code == 1
    assert str(tmp_path / "none") in end.reason


async def test_a_drained_host_finishes_what_is_on_the_device(house: TrainerHouse) -> None:
    agent = house.host()
    await house.first(wire.Ready)
    house.send(*(train_group(1, index) for index in range(GROUPS)), wire.UpdateFrame(1, 1), wire.Drain("interrupted"))
    await agent
    kinds = [type(message) for _, _, message in house.heard]
    assert kinds.index(wire.Stepped) < kinds.index(wire.PublishedFrame) < kinds.index(wire.Goodbye)


async def test_training_is_paced_to_a_modelled_device(config: Config, tmp_path: Path) -> None:
    pacing = {"train_tokens_per_s": 100.0, "update_s": 0.2}
    paced = config.model_copy(
        update={"trainer": TrainerConfig.model_validate({**config.trainer.model_dump(), "pacing": pacing})}
    )
    async with TrainerHouse(paced, tmp_path) as house:
        house.host()
        await house.first(wire.Ready)
        began_s = time.monotonic()
        await house.step(1)
        assert time.monotonic() - began_s >= GROUPS * 10 / 100.0 + 0.2
        assert all(trained.train_s >= 0.1 for trained in house.of(wire.Trained))  # type: ignore[attr-defined]
