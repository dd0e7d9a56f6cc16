"""A job's resident on a rollout node: a node agent at the other end of its socket, real engine, gateway and relay."""

import asyncio
import random
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from elastic.core.types import Account, WeightMode
from elastic.pool.messages import Left, Warm
from elastic.protocol import wire
from elastic.protocol.sampled import pack_ids
from elastic.weights.directory import DirectoryRelay
from elastic.weights.publisher import Publisher
from elastic.weights.signing import SigningKey
from elastic.weights.versions import discard_all
from elastic.worker.agent import AgentExit
from elastic.worker.rollout_resident import RolloutResident
from tests.worker.conftest import MODEL, PATIENCE_S, MessageT, Orchestra, generate, policy
from tests.worker.node_agent import NodeAgent

ENGINE = {"kind": "torch", "device": "cpu", "max_context_tokens": 64, "kv_blocks": 16, "max_batch": 4}
FOLLOW_S = 0.01


class Job:
    """A run with its relay and a trainer that publishes, and a resident of its own."""

    def __init__(self, directory: Path, resident: RolloutResident | None = None) -> None:
        self.relay = DirectoryRelay(directory)
        self.place = str(directory)
        self.new_trainer()
        self.engine = dict(ENGINE)
        self.node_agent = NodeAgent()
        self.orchestra = self._orchestra()
        self.leave = asyncio.Event()
        self.slices = 0
        self.resident = resident or RolloutResident(follow_s=FOLLOW_S)

    def _orchestra(self) -> Orchestra:
        return Orchestra(engine=self.engine, model=MODEL.to_dict(), relay=self.place, run="run")  # type: ignore[arg-type]

    def new_trainer(self) -> None:
        """Another process, with another key."""
        self.key = SigningKey()
        discard_all(self.relay)
        self._publisher = Publisher(self.relay, "run", MODEL.to_dict(), key=self.key)

    def publish(self, version: int, seed: int | None = None) -> None:
        self._publisher.publish(version, policy(version if seed is None else seed))
        self._publisher.wait()

    async def begin(self, version: int | None = None) -> str:
        """Resume, lend a worker, wait until it is ready, with weights of the version; returns its name."""
        await self.node_agent.give()
        worker = await self.lend()
        if version is not None:
            await self.load(worker, version)
        return worker

    async def lend(self) -> str:
        self.slices += 1
        worker = f"w{self.slices}"
        self.orchestra.expect(worker)
        self.node_agent.lend(worker, self.orchestra.address, f"token of {worker}")
        await self.orchestra.until(lambda: self.of(worker, wire.Ready))
        return worker

    def of(self, worker: str, kind: type[MessageT]) -> list[MessageT]:
        return [m for w, _, m in self.orchestra.heard if w == worker and isinstance(m, kind)]

    async def load(self, worker: str, version: int) -> wire.WeightsReport:
        order = wire.PullWeights(version, WeightMode.FINISH, self.key.public)
        self.orchestra.send(order, worker=worker)
        await self.orchestra.until(lambda: any(r.version == version for r in self.of(worker, wire.WeightsReport)))
        report = self.of(worker, wire.WeightsReport)[-1]
        assert not report.error
        return report

    async def park(self, worker: str) -> None:
        self.node_agent.call_back(worker)
        await self.node_agent.hear(Left)
        await self.node_agent.take()

    async def say(self, worker: str, turn: str, seed: int = 7) -> list[int]:
        self.orchestra.send(generate(turn, seed=seed, most=12), worker=worker)
        await self.orchestra.finished(turn)
        return [token for chunk in self.orchestra.chunks(turn) for token in chunk.token_ids]

    async def has(self, version: int) -> None:
        """The parked resident follows."""
        async with asyncio.timeout(PATIENCE_S):
            while self.resident.kept.version != version:  # noqa: ASYNC110 (it tells nobody)
                await asyncio.sleep(FOLLOW_S)


@pytest.fixture
async def job(tmp_path: Path) -> AsyncIterator[Job]:
    job = Job(tmp_path / "relay")
    async with job.node_agent, job.orchestra:
        work = job.resident.run(job.node_agent.resident, job.leave)
        job.orchestra.agents.append(asyncio.create_task(work))
        await job.node_agent.hear(Warm)
        yield job


async def fresh(tmp_path: Path, version: int, seed: int = 7) -> list[int]:
    """What a resident says that has just begun."""
    job = Job(tmp_path / "fresh")
    job.publish(version)
    async with job.node_agent, job.orchestra:
        resident = asyncio.create_task(job.resident.run(job.node_agent.resident))
        await job.node_agent.hear(Warm)
        worker = await job.begin(version)
        said = await job.say(worker, "t", seed)
        job.node_agent.link.abort()
        await resident
        return said


async def test_slice_after_slice_it_works_with_the_engine_that_it_keeps(job: Job, tmp_path: Path) -> None:
    job.publish(1)
    said: list[list[int]] = []
    for number in range(4):
        worker = await job.begin()
        ready = job.of(worker, wire.Ready)[0]
        assert ready.weights_version is None, "whose the weights have to be is not known before they are ordered"
        report = await job.load(worker, 1)
        assert (report.pulled_bytes > 0) == (number == 0)
        said.append(await job.say(worker, f"t{number}"))
        beat = job.of(worker, wire.Heartbeat)[-1]
        assert beat.decoded_tokens <= 12 + 1, "it counts from nothing"
        job.node_agent.call_back(worker)
        assert (await job.node_agent.hear(Left)) == Left(worker)
        assert job.of(worker, wire.Goodbye)
        parked = await job.node_agent.take()
        assert parked.state_bytes > 0
        assert (parked.cold_s > 0) == (number == 0), "only its first slice starts an engine"
        assert parked.rest_bytes < parked.state_bytes
    assert said == [await fresh(tmp_path, 1)] * 4


async def test_parked_it_follows_the_versions_and_the_slice_begins_with_the_newest(job: Job, tmp_path: Path) -> None:
    job.publish(1)
    worker = await job.begin(1)
    await job.node_agent.take(working=worker)
    for version in (2, 3):
        job.publish(version)
        await job.has(version)
    worker = await job.begin()
    assert (await job.load(worker, 3)).pulled_bytes == 0
    assert await job.say(worker, "t") == await fresh(tmp_path, 3)


async def test_versions_of_another_trainer_are_not_followed_until_it_is_named(job: Job, tmp_path: Path) -> None:
    job.publish(1)
    worker = await job.begin(1)
    await job.park(worker)
    job.new_trainer()
    job.publish(1, seed=2)
    job.publish(2)
    await asyncio.sleep(10 * FOLLOW_S)
    assert job.resident.kept.version == 1
    worker = await job.begin()
    assert (await job.load(worker, 2)).pulled_bytes > 0
    assert await job.say(worker, "t") == await fresh(tmp_path, 2)
    await job.park(worker)
    job.publish(3)
    await job.has(3)


async def test_a_device_that_is_taken_in_a_turn_keeps_every_token(job: Job) -> None:
    """The turn is cut where the slice ends, and goes on in the next one."""
    job.publish(1)
    worker = await job.begin(1)
    whole = await job.say(worker, "whole")
    job.orchestra.send(generate("cut", seed=7, most=12), worker=worker)
    await job.orchestra.until(lambda: job.orchestra.chunks("cut"))
    await job.node_agent.take(working=worker)
    had = [token for chunk in job.orchestra.chunks("cut") for token in chunk.token_ids]
    assert job.orchestra.chunks("cut")[-1].finish is not None
    worker = await job.begin(1)
    if len(had) < len(whole):
        prompt = generate("cut", seed=7).token_ids
        rest = msgspec.structs.replace(
            generate("cut", seed=7, attempt=2, most=12), token_ids=prompt + pack_ids(had), start=len(had)
        )
        job.orchestra.send(rest, worker=worker)
        await job.orchestra.finished("cut", 2)
        had += [token for chunk in job.orchestra.chunks("cut", 2) for token in chunk.token_ids]
    assert had == whole


async def test_time_before_the_engine_is_lent_has_a_name(job: Job) -> None:
    job.publish(1)
    worker = await job.begin(1)
    await job.park(worker)
    worker = await job.begin()
    await job.orchestra.until(lambda: job.of(worker, wire.Heartbeat))
    beat = job.of(worker, wire.Heartbeat)[0]
    assert beat.accounts_ns[Account.SWITCHING] > 0
    assert beat.accounts_ns.keys() <= {Account.SWITCHING, Account.BOOTING, Account.LOADING}


async def test_two_workers_in_one_slice(job: Job) -> None:
    job.publish(1)
    first = await job.begin()
    await job.load(first, 1)
    job.node_agent.call_back(first)
    assert (await job.node_agent.hear(Left)).worker == first
    second = await job.lend()
    await job.load(second, 1)
    assert await job.say(second, "t")


async def test_a_worker_that_is_not_let_in_is_told_of_and_the_resident_stays(job: Job) -> None:
    await job.node_agent.give()
    job.node_agent.lend("unknown", job.orchestra.address, "wrong token")
    left = await job.node_agent.hear(Left)
    assert left.worker == "unknown"
    assert left.cause
    job.node_agent.lend("nowhere", "no address", "token")
    assert (await job.node_agent.hear(Left)).cause
    job.publish(1)
    worker = await job.lend()
    await job.load(worker, 1)


async def test_another_engine_is_built_where_another_is_asked_for(job: Job, tmp_path: Path) -> None:
    job.publish(1)
    worker = await job.begin(1)
    await job.park(worker)
    first = job.resident.kept.engine
    job.orchestra.door._welcome = msgspec.structs.replace(  # the run goes on with other settings
        job.orchestra.door._welcome, engine={**ENGINE, "max_batch": 2}
    )
    worker = await job.begin()
    assert job.resident.kept.engine is not first
    assert (await job.load(worker, 1)).pulled_bytes > 0
    assert await job.say(worker, "t") == await fresh(tmp_path, 1)


async def test_it_ends_with_its_node_agent(job: Job) -> None:
    job.publish(1)
    await job.begin()
    job.node_agent.link.abort()
    end = await job.orchestra.agents[-1]
    assert isinstance(end, AgentExit)
    assert end.code == 1
    assert "node agent" in end.reason


async def test_at_random_times(job: Job, tmp_path: Path) -> None:
    """Slices of any length, versions at any time: it says what a fresh one says."""
    rng, version = random.Random(1), 1
    job.publish(version)
    expected: dict[int, list[int]] = {}
    for number in range(12):
        worker = await job.begin(version)
        if rng.random() < 0.8:
            said = await job.say(worker, f"t{number}")
            assert said == expected.setdefault(version, said)
        await job.node_agent.take(working=worker)
        if rng.random() < 0.7:
            version += 1
            job.publish(version)
            await asyncio.sleep(rng.uniform(0, 5 * FOLLOW_S))
    for found, said in expected.items():
        assert said == await fresh(tmp_path / str(found), found)


async def test_told_to_leave_it_drains_its_worker(job: Job) -> None:
    job.publish(1)
    worker = await job.begin(1)
    job.leave.set()
    assert await job.orchestra.agents[-1] == AgentExit(0, "terminated")
    assert job.of(worker, wire.Goodbye)


async def test_without_a_node_agent_there_is_no_resident() -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "elastic.cli", "pool-resident"), stderr=asyncio.subprocess.PIPE
    )
    _, said = await process.communicate()
    assert process.returncode == 2
    assert b"ELASTIC_NODE_AGENT_FD not set" in said
