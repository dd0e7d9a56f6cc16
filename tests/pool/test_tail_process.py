"""A long tail moves, on real processes of a pool: the provider's leases on the other nodes end by notice, and the next
job begins there while the tail goes on."""

import sqlite3
import time
from pathlib import Path

import msgspec
import pytest

from elastic.core.cluster.history import replay
from elastic.core.events import LeaseGranted, LeaseNotice
from elastic.core.types import EndCause
from elastic.pool.client import PoolClient, PoolMembership
from elastic.pool.control_messages import SubmitJob
from elastic.pool.gateway import PoolTokens
from elastic.pool.journal import JOURNAL, pool_secret, read_records
from elastic.protocol.endpoint import Endpoint
from elastic.testing.providers import ProviderRecorder, eventually, lease_request
from policies.clusters import CLUSTER_POLICIES
from providers.pool import JobContext, PoolProvider, PoolSettings
from tests.pool.test_pool_process import Pool, S, finished, running
from tests.providers.conftest import context_of

pytestmark = pytest.mark.slow

NODES = {"rollout-1", "rollout-2"}


def heavy(submission: SubmitJob) -> SubmitJob:
    """With rollouts that are worth more to the next job than a tail loses."""
    request = submission.request
    assert request.plan is not None
    plan = msgspec.structs.replace(request.plan, train_ns=S)
    return msgspec.structs.replace(submission, request=msgspec.structs.replace(request, plan=plan))


def member(pool: Pool, job: str) -> PoolClient:
    """The job's connection, made by this test."""
    placed = replay(read_records(pool.directory), CLUSTER_POLICIES["ours"]).jobs[job].placement
    with sqlite3.connect(pool.directory / JOURNAL) as notes:
        ((address,),) = notes.execute("select value from notes where key = 'address'")
    token = PoolTokens(pool_secret(pool.directory)).job(job, placed)
    return PoolClient(PoolMembership(endpoint=Endpoint(address), job=job, placement=placed, token=token))


@pytest.mark.nightly
async def test_a_tail_moves_by_the_provider_s_notice_and_the_next_job_begins_on_the_rest(tmp_path: Path):
    async with running(tmp_path) as pool:
        await pool.control.submit(heavy(pool.submit("tail", rollout_nodes=2, led=True)))
        client = member(pool, "tail")
        recorder = ProviderRecorder()
        context = JobContext(**msgspec.structs.asdict(context_of("run", tmp_path, time.monotonic_ns())), pool=client)
        provider = PoolProvider("pool", PoolSettings.model_validate({"max_workers": 2}), context)
        await provider.start(recorder.emit)
        await provider.acquire(lease_request(1))
        await provider.acquire(lease_request(2))
        for lease in ("lease-1", "lease-2"):
            assert isinstance(await recorder.answered(lease), LeaseGranted)
        (permit,) = client.part.permits
        on = {one.node: one.worker.replace("worker", "lease") for one in client.part.working(permit)}
        assert set(on) == NODES

        await pool.control.submit(heavy(pool.submit("next", rollout_nodes=2, steps=1)))
        await pool.until(
            lambda status: any(job["name"] == "next" and job["asked"] for job in status["jobs"]), "nobody waits"
        )
        client.part.report_progress(4, 20)
        client.part.report_progress(19, 20)
        await eventually(lambda: recorder.of(LeaseNotice))
        (notice,) = recorder.of(LeaseNotice)
        (left,) = [node for node, lease in on.items() if lease == notice.lease]
        (kept,) = NODES - {left}
        held = (await pool.status())["permits"]
        assert [(one["job"], set(one["nodes"])) for one in held] == [("tail", NODES)], "its turns are still there"

        await provider.release(notice.lease)  # As a run does once the worker has handed over its turns.
        assert (await recorder.ended(notice.lease)).cause is EndCause.PREEMPTED
        await pool.until(
            lambda status: (
                [(one["job"], one["nodes"]) for one in status["permits"]] == [("tail", [kept]), ("next", [left])]
            ),
            "the next job does not begin on the node that was left",
        )
        assert [one.node for one in client.part.working(permit)] == [kept]

        client.part.report_progress(20, 20)
        await provider.release(on[kept])
        assert (await recorder.ended(on[kept])).cause is EndCause.RELEASED
        await pool.until(
            lambda status: permit not in [one["number"] for one in status["permits"]], "its permit is not yielded"
        )
        await finished(pool, "next")
        assert f"{kept} next resumed" in pool.history(), "it gets the tail's node once that is free"
        await provider.aclose()
        await client.aclose()
        await pool.control.cancel("tail")
        await pool.until_over("tail")
