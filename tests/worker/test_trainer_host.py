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

import msgspec
import pytest
import torch
from structlog.testing import capture_logs

from elastic.config import Config, EvaluationConfig, StopWhenConfig
from elastic.core.types import Account, FinishReason
from elastic.protocol import wire
from elastic.protocol.best_checkpoint import keep_best
from elastic.protocol.sampled import pack_logprobs
from elastic.weights import directory
from elastic.weights.errors import RelayError, RelayUnavailable
from elastic.weights.placements import tensor_parallel
from elastic.weights.publisher import publish_keyframe
from elastic.weights.puller import Puller
from elastic.weights.records import version_of
from elastic.weights.relay import Buffer, Relay
from elastic.weights.sharding import LocalTensor
from elastic.weights.shared_memory import SHARED_MEMORY, in_memory
from elastic.weights.signing import SigningKey
from elastic.weights.versions import published_versions
from elastic.worker.trainer import create_trainer
from elastic.worker.trainer.base import saved
from tests.worker.conftest import PATIENCE_S, generate, policy
from tests.worker.trainer_house import GROUPS, TrainerHouse, config_of, step_of, train_group


@pytest.fixture
def config(base: Path) -> Config:
    return config_of(base)


@pytest.fixture
async def empty_house(config: Config, tmp_path: Path) -> AsyncIterator[TrainerHouse]:
    async with TrainerHouse(config, tmp_path) as house:
        yield house


@pytest.fixture
async def house(empty_house: TrainerHouse) -> TrainerHouse:
    """One whose trainer is ready."""
    await empty_house.ready()
    return empty_house


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def account(name: Account) -> Callable[[wire.Heartbeat | wire.Goodbye], int]:
    return lambda beat: beat.accounts_ns.get(name, 0)


async def test_the_base_policy_is_version_0_everywhere_before_ready(
    empty_house: TrainerHouse,
) -> None:
    ready = await empty_house.ready()
    assert ready.weights_version == 0
    assert equal(empty_house.weights(0), policy())
    empty_house.send(generate("t", most=8))
    assert (await empty_house.finished("t")).finish is FinishReason.LENGTH


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
def gate(empty_house: TrainerHouse) -> Gated:
    gate = Gated(empty_house.relay)
    empty_house.parts["open_relay"] = lambda *_: gate
    return gate


async def test_the_next_rollouts_begin_while_a_version_is_encoded(gate: Gated, house: TrainerHouse) -> None:
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
        assert (published.version, list(published.changed)) == (1, ["embedding", "0", "head"])
        assert all(0 <= share <= 1 for share in published.changed.values())
        assert published.changed["0"] > 0
        assert equal(followed.result(), house.weights(1))
        assert not equal(house.weights(1), house.weights(0))


async def test_a_version_waits_for_the_one_before(gate: Gated, house: TrainerHouse) -> None:
    await house.step(1)
    house.send(*step_of(2))
    await house.until(lambda: len(house.of(wire.Trained)) == 2 * GROUPS)
    assert len(house.of(wire.Stepped)) == 1
    gate.opened.set()
    await house.until(lambda: len(house.of(wire.PublishedFrame)) == 2)
    told = [(type(m), m.version) for m in (*house.of(wire.Stepped), *house.of(wire.PublishedFrame))]
    assert told == [(wire.Stepped, 1), (wire.Stepped, 2), (wire.PublishedFrame, 1), (wire.PublishedFrame, 2)]


async def test_the_last_version_is_there_when_its_step_is_over(base: Path, tmp_path: Path) -> None:
    async with TrainerHouse(config_of(base, run={"steps": 1}), tmp_path) as house:
        await house.ready()
        await house.step(1)
        assert published_versions(house.relay) == [0, 1]


async def test_a_version_that_cannot_be_published_fails_the_trainer(gate: Gated, house: TrainerHouse) -> None:
    gate.fault = "the disk is full"
    await house.step(1)
    gate.opened.set()
    failed = await house.first(wire.TrainerFailedFrame)
    assert failed.error == "version 1 not published: RelayError: the disk is full"
    assert published_versions(house.relay) == [0]


async def test_a_group_in_several_frames_is_trained_as_in_one(house: TrainerHouse, tmp_path: Path, config: Config):
    await house.step(1)
    async with TrainerHouse(config, tmp_path / "other") as other:
        await other.ready()
        for index in range(GROUPS):
            whole = train_group(1, index)
            first, *rest = whole.trajectories
            part = wire.TrajectoriesFrame([first])
            other.send(part, part, msgspec.structs.replace(whole, trajectories=rest))
        other.send(wire.UpdateFrame(1, 1))
        for each in (house, other):
            await each.first(wire.PublishedFrame)
        assert equal(other.weights(1), house.weights(1))


async def test_a_group_of_no_use_is_named_and_the_step_goes_on(house: TrainerHouse) -> None:
    poisoned = train_group(1, 1)
    poisoned.trajectories[0].sampled.logprobs[:4] = pack_logprobs([float("nan")])
    house.send(train_group(1, 0), poisoned, wire.UpdateFrame(1, 1))
    stepped = await house.first(wire.Stepped)
    assert (stepped.metrics["groups"], stepped.metrics["groups_unusable"]) == (1, 1)
    assert list(stepped.unusable) == ["s1g1"]
    assert "magnitude nan" in stepped.unusable["s1g1"]
    await house.step(2)
    assert house.of(wire.Stepped)[-1].unusable == {}


async def test_a_group_is_skipped_without_a_word_to_the_turns_that_run(house: TrainerHouse) -> None:
    house.send(generate("t", most=60), wire.SkipGroup(1, "s1g1", 1, "no variance"))
    assert (await house.finished("t")).finish is FinishReason.LENGTH


async def test_a_step_without_all_its_groups_fails_loudly(house: TrainerHouse) -> None:
    house.send(train_group(1, 0), wire.UpdateFrame(1, 1))
    failed = await house.first(wire.TrainerFailedFrame)
    assert "groups neither trained nor skipped: 1" in failed.error
    assert published_versions(house.relay) == [0]


async def test_training_and_generation_exclude_each_other_even_unasked(house: TrainerHouse) -> None:
    house.send(generate("t", most=60), train_group(1, 0))
    await house.first(wire.Trained)
    assert (await house.finished("t")).finish in (FinishReason.ABORTED, FinishReason.LENGTH)
    house.send(generate("t", attempt=2, most=8))
    assert (await house.finished("t", 2)).finish is FinishReason.LENGTH, "the engine is awake again"


async def test_the_device_time_of_the_trainer_adds_up(empty_house: TrainerHouse) -> None:
    agent = empty_house.host()
    await empty_house.first(wire.Ready)
    empty_house.send(wire.Sleep())
    for version in (1, 2, 3):
        await empty_house.step(version)
    empty_house.send(wire.Wake(), generate("t", most=8))
    await empty_house.finished("t")
    empty_house.send(wire.Drain("done"))
    await agent
    reports = [*empty_house.of(wire.Heartbeat), *empty_house.of(wire.Goodbye)]
    sums = [sum(report.accounts_ns.values()) for report in reports]
    assert sums == sorted(sums)
    trained_s = sum(t.train_s for t in empty_house.of(wire.Trained))
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
            self._trainer = create_trainer(*given)

        def __getattr__(self, asked: str) -> Any:
            if asked == name:
                begun.set()
                assert go_on.wait(PATIENCE_S)
            return getattr(self._trainer, asked)

    undisturbed, disturbed = tmp_path / "undisturbed", tmp_path / "disturbed"
    for run_dir in (undisturbed, disturbed):
        run_dir.mkdir()
    async with TrainerHouse(config, undisturbed) as house:
        await house.ready()
        house.send(*orders)
        expected = await house.first(wire.Stepped)
        await house.first(wire.PublishedFrame)
        weights = house.weights(1)
    async with TrainerHouse(config, disturbed) as house:
        house.parts["make_trainer"] = Holding
        await house.ready()
        house.send(*orders[:position])
        trained = sum(isinstance(order, wire.TrainGroupFrame) for order in orders[:position])
        await house.until(lambda: len(house.of(wire.Trained)) == trained)
        house.send(orders[position])
        assert await asyncio.to_thread(begun.wait, PATIENCE_S)
        before = len(house.heard)
        house.cut()
        ready = await house.first(wire.Ready, epoch=2)
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
        timeless = [{k: v for k, v in s.metrics.items() if not k.endswith("_s")} for s in (stepped, expected)]
        assert timeless[0] == timeless[1]


async def test_what_was_done_is_answered_again_and_not_done_again(house: TrainerHouse) -> None:
    group, skipped, update = step_orders(1)
    house.send(group, group, skipped, skipped, update)
    stepped = await house.first(wire.Stepped)
    published = await house.first(wire.PublishedFrame)
    assert [trained.group for trained in house.of(wire.Trained)] == ["s1g0", "s1g0"]
    weights = house.weights(1)
    house.cut()
    ready = await house.first(wire.Ready, epoch=2)
    assert (ready.weights_version, ready.groups, ready.slots) == (1, [], [])
    before = len(house.heard)
    house.send(update, epoch=2)
    assert await house.first(wire.Stepped, epoch=2) == stepped
    assert await house.first(wire.PublishedFrame, epoch=2, after=before) == published
    assert equal(house.weights(1), weights)
    assert published_versions(house.relay) == [0, 1]


async def test_a_failure_that_nobody_heard_is_told_whoever_asks_next(house: TrainerHouse) -> None:
    house.send(wire.UpdateFrame(1, 1))
    failed = await house.first(wire.TrainerFailedFrame)
    house.cut()
    await house.first(wire.Ready, epoch=2)
    house.send(train_group(1, 0), epoch=2)
    assert await house.first(wire.TrainerFailedFrame, epoch=2) == failed
    assert not house.of(wire.Trained)


async def test_a_relay_that_is_away_for_a_while_fails_no_trainer(empty_house: TrainerHouse) -> None:
    refused = threading.Semaphore(0)

    class Away(Gated):
        def put(self, key: str, *parts: Buffer) -> None:
            if not self.opened.is_set() and version_of(key):
                refused.release()
                raise RelayUnavailable("nobody is there")
            super().put(key, *parts)

    gate = Away(empty_house.relay)
    empty_house.parts["open_relay"] = lambda *_: gate
    await empty_house.ready()
    await empty_house.step(1)
    for _ in range(3):
        assert await asyncio.to_thread(refused.acquire, timeout=PATIENCE_S)
    gate.opened.set()
    await empty_house.first(wire.PublishedFrame)
    assert published_versions(empty_house.relay) == [0, 1]
    assert not empty_house.of(wire.TrainerFailedFrame)


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
        assert end.code == 1
        assert "could not be resumed" in end.reason
        assert nothing_in(memory)
        assert published_versions(house.relay) == []


async def test_a_resumed_host_goes_on_from_its_checkpoint(empty_house: TrainerHouse) -> None:
    first = empty_house.host("w")
    await empty_house.first(wire.Ready)
    empty_house.send(wire.Sleep())
    for version in (1, 2, 3):
        await empty_house.step(version)
    await empty_house.until(lambda: len(empty_house.of(wire.PublishedFrame)) == 3)
    second = empty_house.weights(2)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    assert published_versions(empty_house.relay) == [0, 1, 2, 3]
    publish_keyframe(empty_house.relay, "left over", 4, second, {}, SigningKey())
    checkpoints = empty_house.run_dir / "checkpoints"
    begin = len(empty_house.heard)
    (checkpoints / ".checkpoint-killed").mkdir()
    empty_house.host("again", resume=True)
    ready = await empty_house.first(wire.Ready, after=begin)
    assert [path.name for path in checkpoints.iterdir()] == ["00000002.safetensors"], "a killed save left nothing"
    assert ready.weights_version == 2, "checkpoints are made every second step"
    assert published_versions(empty_house.relay) == [2], "nobody believes any more what the first has signed"
    assert equal(empty_house.weights(2), second)
    keys = {ready.publisher for ready in empty_house.of(wire.Ready)}
    assert len(keys) == 2
    empty_house.send(wire.UpdateFrame(2, 2), worker="again")
    stepped = await empty_house.first(wire.Stepped, after=begin)
    assert stepped.metrics.items() <= empty_house.of(wire.Stepped)[1].metrics.items(), "of the process before"
    assert stepped.metrics["groups"] == GROUPS
    published = await empty_house.first(wire.PublishedFrame, after=begin)
    assert published.version == 2


async def test_a_damaged_checkpoint_makes_way_for_the_one_before_and_is_named(empty_house: TrainerHouse) -> None:
    first = empty_house.host("w")
    await empty_house.first(wire.Ready)
    empty_house.send(wire.Sleep())
    for version in (1, 2, 3, 4):
        await empty_house.step(version)
    await empty_house.until(lambda: len(empty_house.of(wire.PublishedFrame)) == 4)
    second = empty_house.weights(2)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    older, newer = saved(empty_house.run_dir / "checkpoints")
    _flip_a_bit(newer)
    begin = len(empty_house.heard)
    with capture_logs() as logs:
        again = empty_house.host("again", resume=True)
        ready = await empty_house.first(wire.Ready, after=begin)
    assert ready.weights_version == 2
    assert equal(empty_house.weights(2), second)
    assert [str(newer) in one["damage"] for one in logs if "the one before it is taken" in one["event"]] == [True]
    again.cancel()
    await asyncio.gather(again, return_exceptions=True)
    _flip_a_bit(older)
    ended = await empty_house.host("and again", resume=True)
    for path in (older, newer):
        assert f"{path}: damaged: " in ended.reason


def _flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


async def test_the_best_checkpoint_stays_and_each_that_is_evaluated_has_one(base: Path, tmp_path: Path) -> None:
    evaluation = EvaluationConfig(every=1, keep_best="avg@4")  # type: ignore[call-arg]
    house = TrainerHouse(config_of(base).model_copy(update={"evaluation": evaluation}), tmp_path / "run")
    async with house:
        await house.ready()
        house.send(wire.Sleep())
        checkpoints = house.run_dir / "checkpoints"
        await house.step(1)
        keep_best(checkpoints, 1)
        for version in (2, 3, 4):
            await house.step(version)
        assert [path.stem for path in saved(checkpoints)] == ["00000001", "00000003", "00000004"]
        keep_best(checkpoints, 4)
        for version in (5, 6):
            await house.step(version)
        assert [path.stem for path in saved(checkpoints)] == ["00000004", "00000005", "00000006"]


async def test_a_version_at_which_the_run_may_end_has_a_checkpoint(base: Path, tmp_path: Path) -> None:
    ends = StopWhenConfig(metric="avg@4", at_least=0.9)  # type: ignore[call-arg]
    evaluation = EvaluationConfig(every=1, stop_when=ends)  # type: ignore[call-arg]
    config = config_of(base).model_copy(update={"evaluation": evaluation})
    assert config.trainer.checkpoint_every_steps == 2
    async with TrainerHouse(config, tmp_path / "run") as house:
        await house.ready()
        house.send(wire.Sleep())
        await house.step(1)
        assert [path.stem for path in saved(house.run_dir / "checkpoints")] == ["00000001"]


async def test_for_an_engine_of_two_ranks_versions_are_cut_so_that_each_pulls_its_part(
    base: Path, tmp_path: Path
) -> None:
    split = config_of(base, engine={"vllm": {"tensor_parallel": 2}, "kind": "vllm"})
    own = config_of(base).engine.model_dump(mode="json")
    async with TrainerHouse(split, tmp_path, engine=own) as house:  # type: ignore[arg-type]
        await house.ready()
        everything = house.weights(0)
        shapes = {name: tuple(tensor.shape) for name, tensor in everything.items()}
        total_bytes = sum(tensor.nbytes for tensor in everything.values())
        for shard in tensor_parallel(shapes, 2):
            puller = Puller(house.relay, house.trust, shard=shard)
            staged = puller.stage(0)
            assert staged.report.full_bytes < 0.6 * total_bytes
            assert equal(puller.apply(staged), {n: everything[n][_part(local)] for n, local in shard.items()})


def _part(local: LocalTensor) -> tuple[slice, ...]:
    (box,) = local.boxes
    return tuple(slice(begin, end) for begin, end in zip(box.begin, box.end, strict=True))


async def test_a_resumed_host_without_a_checkpoint_begins_anew(empty_house: TrainerHouse) -> None:
    ready = await empty_house.ready(resume=True)
    assert ready.weights_version == 0


async def test_a_base_policy_that_cannot_be_read_ends_the_host(tmp_path: Path) -> None:
    async with TrainerHouse(config_of(tmp_path / "none"), tmp_path) as house:
        end = await house.host()
    assert end.code == 1
    assert str(tmp_path / "none") in end.reason


async def test_a_drained_host_finishes_what_is_on_the_device(empty_house: TrainerHouse) -> None:
    agent = empty_house.host()
    await empty_house.first(wire.Ready)
    empty_house.send(*step_of(1), wire.Drain("interrupted"))
    await agent
    kinds = [type(message) for _, _, message in empty_house.heard]
    assert kinds.index(wire.Stepped) < kinds.index(wire.PublishedFrame) < kinds.index(wire.Goodbye)


async def test_training_is_paced_to_a_modelled_device(base: Path, tmp_path: Path) -> None:
    pacing = {"train_tokens_per_s": 100.0, "update_s": 0.2}
    async with TrainerHouse(config_of(base, trainer={"pacing": pacing}), tmp_path) as house:
        await house.ready()
        began_s = time.monotonic()
        await house.step(1)
        assert time.monotonic() - began_s >= GROUPS * 10 / 100.0 + 0.2
        assert all(trained.train_s >= 0.1 for trained in house.of(wire.Trained))
