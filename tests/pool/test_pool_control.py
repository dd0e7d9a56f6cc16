"""The client of a pool's control socket, against a server that answers as it is told."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from elastic.core.cluster import JobRequest, PhasePlan
from elastic.pool.control_messages import (
    POOL_CONTROL_VERSION,
    AskJobs,
    AskPoolStatus,
    AskVersion,
    CancelJob,
    OtherPoolVersion,
    PlanJob,
    PoolAcknowledged,
    PoolAnswer,
    PoolControl,
    PoolPlan,
    PoolRefusal,
    PoolRequest,
    PoolVersion,
    StopPool,
    SubmitJob,
)
from elastic.pool.ports import JobEntry
from elastic.pool.status import PlacementPlan
from elastic.protocol.run_control import SOCKET, CommandRefused, RunNotFound, RunSilent, socket_address

REQUEST = JobRequest(id="one", slo=1.5, plan=PhasePlan(rollout_ns=10, train_ns=5))


@asynccontextmanager
async def served(
    directory: Path, answer: Callable[[PoolRequest], PoolAnswer | None], version: str = POOL_CONTROL_VERSION
) -> AsyncIterator[list[PoolRequest]]:
    """A socket whose requests are answered by `answer`, but for those for its version; what it was asked."""
    asked: list[PoolRequest] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = msgspec.json.decode(await reader.readline(), type=PoolRequest)
        asked.append(request)
        said = PoolVersion(pid=7, version=version) if isinstance(request, AskVersion) else answer(request)
        if said is not None:
            writer.write(msgspec.json.encode(said) + b"\n")
        writer.close()

    with socket_address(directory) as address:
        server = await asyncio.start_unix_server(serve, address)
    try:
        yield asked
    finally:
        server.close()
        (directory / SOCKET).unlink()


async def test_a_command_goes_out_as_it_was_meant_once_the_version_is_known(tmp_path: Path) -> None:
    def answer(request: PoolRequest) -> PoolAnswer:
        if isinstance(request, PlanJob):
            return PoolPlan(plan=PlacementPlan(job=request.request.id, slo=1.5))
        assert not isinstance(request, AskVersion | AskPoolStatus | AskJobs)
        return PoolAcknowledged(id=request.id, placement=PlacementPlan(job="one", slo=1.5, why="full"))

    async with served(tmp_path, answer) as asked:
        pool = PoolControl(tmp_path)
        submission = SubmitJob(
            id="a", request=REQUEST, entry=JobEntry(job="one", directory="/runs/one", providers=("spot",))
        )
        assert (await pool.submit(submission)).placement == PlacementPlan(job="one", slo=1.5, why="full")
        assert await pool.plan(REQUEST) == PlacementPlan(job="one", slo=1.5)
        assert (await pool.cancel("one", "b")).id == "b"
        await pool.resubmit("one", "c")
        await pool.stop(now=True, command="d")
    assert asked[:3] == [AskVersion(), submission, PlanJob(request=REQUEST)]
    assert asked[3] == CancelJob(id="b", job="one")
    assert asked[-1] == StopPool(id="d", now=True)
    assert sum(isinstance(request, AskVersion) for request in asked) == 1


async def test_a_pool_of_another_version_is_told_nothing(tmp_path: Path) -> None:
    async with served(tmp_path, lambda _: None, version="0") as asked:
        with pytest.raises(OtherPoolVersion, match="process 7 is of another version: found 0; allowed: "):
            await PoolControl(tmp_path).cancel("one")
    assert asked == [AskVersion()]


async def test_what_the_pool_refuses_is_said_with_its_kind(tmp_path: Path) -> None:
    said = PoolRefusal(kind="unknown_job", message="no job 'one'; there are: two")
    async with served(tmp_path, lambda _: said):
        with pytest.raises(CommandRefused, match="no job 'one'; there are: two") as found:
            await PoolControl(tmp_path).cancel("one")
    assert found.value.kind == "unknown_job"


async def test_no_pool_and_one_that_dies_while_it_is_asked(tmp_path: Path) -> None:
    with pytest.raises(RunNotFound, match=f"pool {tmp_path}: no process is at it now"):
        await PoolControl(tmp_path).status()
    with pytest.raises(RunNotFound, match="there is no such pool"):
        await PoolControl(tmp_path / "nowhere").status()
    async with served(tmp_path, lambda _: None):
        with pytest.raises(RunSilent, match="its process ended before it had answered"):
            await PoolControl(tmp_path).cancel("one")
