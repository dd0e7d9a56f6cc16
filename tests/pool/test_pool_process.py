"""The pool's real process with its real node agents, driving small residents and jobs: turns, deaths, returns."""

import asyncio
import contextlib
import hashlib
import json
import os
import re
import signal
import sqlite3
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest

from elastic.cli.pool_report import live_report
from elastic.compose.pool_config import PoolConfig, save_pool
from elastic.core.cluster.events import NodeDrained, NodeJoined, NodeLost, ResidentLost
from elastic.core.cluster.history import cluster_digest, decoded, replay
from elastic.core.cluster.types import JobRequest, PhaseKind, PhasePlan
from elastic.pool.client import PoolClient, PoolMembership, PoolUnavailable
from elastic.pool.control_messages import PoolControl, PoolStatusReply, SubmitJob
from elastic.pool.gateway import PoolTokens
from elastic.pool.journal import JOURNAL, pool_secret, read_deaths, read_records
from elastic.pool.node_agent import NodeAgent, NodeAgentTicket
from elastic.pool.ports import JobEntry
from elastic.protocol.endpoint import Endpoint
from elastic.protocol.run_control import CommandRefused, ControlError
from elastic.protocol.tls import run_certificate
from elastic.report.jobs import as_text
from policies.clusters import CLUSTER_POLICIES
from tests.pool.stub_programs import STUB_POOL
from traces.spot import read_spot_trace

S = 10**9
pytestmark = pytest.mark.slow


class Pool:
    def __init__(
        self,
        tmp_path: Path,
        host: str = "127.0.0.1",
        spot: Mapping[str, Any] | None = None,
        kind: str = "local",
        ray: Mapping[str, Any] | None = None,
        devices: str = "cpu",
        **limits: float,
    ) -> None:
        nodes = {"usd_per_gpu_hour": 1.0, "memory_gb": 8}
        market = {"kind": kind, "ray": ray} if spot is None else {"spot": spot}
        self.config = PoolConfig.model_validate(
            {
                "pool": {
                    "name": "lab",
                    "directory": str(tmp_path),
                    "host": host,
                    "advertise": "127.0.0.1",
                    "devices": devices,
                    "rollout": {**nodes, "nodes": 2, **market},
                    "train": {**nodes, "nodes": 1},
                },
                "limits": {"silence_s": 5.0, "notice_s": 2.0, "park_s": 2.0, "measure_s": 0.5, **limits},
            }
        )
        self.directory = save_pool(self.config)
        self.control = PoolControl(self.directory, 20.0)
        self.process: subprocess.Popen[bytes] | None = None
        self.jobs: dict[str, Path] = {}

    def start(self) -> None:
        with (self.directory / "stderr").open("ab") as output:
            self.process = subprocess.Popen([*STUB_POOL, str(self.directory)], stderr=output)

    def submit(
        self, job: str, *, steps: int = 3, slo: float = 4.0, rollout_nodes: int = 1, plan_s: int = 10, **script: Any
    ) -> SubmitJob:
        where = self.directory.parent / job
        where.mkdir()
        self.jobs[job] = where
        (where / "script.json").write_text(json.dumps({"steps": steps, "rollout_s": 0.3, "train_s": 0.2, **script}))
        plan = PhasePlan(rollout_ns=plan_s * S, train_ns=plan_s * S, rollout_switch_ns=S // 10, train_switch_ns=S // 10)
        request = JobRequest(
            id=job, slo=slo, plan=plan, steps=steps, rollout_nodes=rollout_nodes, rollout_bytes=2 * S, train_bytes=2 * S
        )
        command = ("stub",) if script.get("script") else ()
        entry = JobEntry(job=job, directory=str(where), script=command)
        return SubmitJob(id=f"submit {job}", request=request, entry=entry)

    async def begin(self, job: str, **more: Any) -> None:
        await self.control.submit(self.submit(job, **more))

    async def reply(self) -> PoolStatusReply:
        while True:
            with contextlib.suppress(ControlError):
                return await self.control.status()
            assert self.process is not None
            assert self.process.poll() is None, (self.directory / "stderr").read_text()
            await asyncio.sleep(0.05)

    async def status(self) -> dict[str, Any]:
        return msgspec.to_builtins((await self.reply()).status)

    async def job(self, name: str) -> dict[str, Any]:
        return next(job for job in (await self.status())["jobs"] if job["name"] == name)

    async def until(self, condition: Callable[[dict[str, Any]], bool], what: str, timeout_s: float = 40.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition(status := await self.status()):
            if time.monotonic() > deadline:
                log = (self.directory / "logs" / "pool.log").read_text()[-3000:]
                raise AssertionError(f"{what}: {json.dumps(status, indent=1)[-6000:]}\n{log}\n{self.history()}")
            await asyncio.sleep(0.02)

    async def until_over(self, *jobs: str, timeout_s: float = 60.0) -> None:
        await self.until(
            lambda status: all(job["over"] for job in status["jobs"] if job["name"] in jobs), "not over", timeout_s
        )

    def history(self) -> str:
        with contextlib.suppress(FileNotFoundError):
            return (self.directory / "devices" / "history").read_text()
        return ""

    def residents(self, node: str, job: str) -> list[int]:
        found = []
        for path in (self.directory / "leases").glob(f"{node}-{job}-*.json"):
            found += [one["pid"] for one in json.loads(path.read_text())["processes"].values()]
        return found

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def replayed_digest(self) -> str:
        return cluster_digest(replay(read_records(self.directory), CLUSTER_POLICIES["ours"]))


@contextlib.asynccontextmanager
async def running(
    tmp_path: Path,
    host: str = "127.0.0.1",
    spot: Mapping[str, Any] | None = None,
    kind: str = "local",
    ray: Mapping[str, Any] | None = None,
    devices: str = "cpu",
    up_within_s: float = 40.0,
    **limits: float,
) -> AsyncIterator[Pool]:
    pool = Pool(tmp_path, host, spot, kind, ray, devices, **limits)
    pool.start()
    try:
        all_up: Callable[[dict[str, Any]], bool] = lambda now: all(node["node_agent"]["up"] for node in now["nodes"])  # noqa: E731
        await pool.until(all_up, "node agents are not up", up_within_s)
        yield pool
        assert "VIOLATION" not in pool.history()
        marks = live_report(pool.directory)[0].marks
        assert not [mark for mark in marks if "counts no more" in mark.what]
    finally:
        if pool.process is not None and pool.process.poll() is None:
            with contextlib.suppress(ControlError):
                await pool.control.stop(now=True)
            with contextlib.suppress(subprocess.TimeoutExpired):
                await asyncio.to_thread(pool.process.wait, 20)
        pool.kill()
        left = leftovers(pool.directory)
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    assert not left, f"left over: {left}"


def leftovers(directory: Path) -> list[int]:
    """Processes that name the pool's directory or one of its jobs'."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (path / "environ").read_bytes() + (path / "cmdline").read_bytes()
            if str(directory).encode() in words and int(path.name) != os.getpid():
                found.append(int(path.name))
    return found


async def finished(pool: Pool, *jobs: str) -> None:
    await pool.until_over(*jobs)
    for name in jobs:
        job = await pool.job(name)
        assert job["state"] == "finished", job
        assert (pool.jobs[name] / "steps").read_text() == str(job["steps"])


async def test_beyond_loopback_all_of_it_goes_by_tls_and_a_script_that_cannot_be_run_has_failed(tmp_path: Path):
    """A pool of processes, with strangers before it; a job's script in it has the last word by its exit status."""
    async with running(tmp_path, host="0.0.0.0") as pool:
        await pool.begin("bad", script=True, exits=2)
        with sqlite3.connect(pool.directory / JOURNAL) as notes:
            ((listens,),) = notes.execute("select value from notes where key = 'address'")
        address = f"127.0.0.1:{listens.rpartition(':')[2]}"
        right = run_certificate(pool.directory, []).fingerprint
        token = PoolTokens(pool_secret(pool.directory)).job("bad", 1)
        wrong = hashlib.sha256(b"another certificate").hexdigest()
        nothing = "closed the connection|did not answer|broke|was silent"
        for fingerprint, refused, wait_s in ((wrong, "not to be believed", 60.0), ("", nothing, 1.0)):
            endpoint = Endpoint(address, fingerprint=fingerprint)
            member = PoolMembership(endpoint=endpoint, job="bad", placement=1, token=token)
            with pytest.raises(PoolUnavailable, match=refused):
                await PoolClient(member).open(wait_s)
            ticket = NodeAgentTicket(endpoint=endpoint, pool="lab", node="rollout-1", token="none", wait_s=wait_s)
            assert re.search(refused, (await NodeAgent(ticket).run()).reason)
        foreign = NodeAgentTicket(
            endpoint=Endpoint(address, fingerprint=right), pool="lab", node="rollout-1", token="guessed", wait_s=5.0
        )
        assert "wrong token" in (await NodeAgent(foreign).run()).reason
        await pool.until_over("bad")
        bad = await pool.job("bad")
        assert (bad["state"], bad["restarts"]) == ("failed", 0)
        assert "status 2" in bad["reason"]


async def test_jobs_go_on_whoever_is_killed(tmp_path: Path):
    """A pool, its node agents and jobs as processes: each kind is killed, and two jobs come to their end."""
    async with running(tmp_path) as pool:
        one, two = (pool.submit(name, steps=6, rollout_s=0.6) for name in ("one", "two"))
        assert not (await pool.control.submit(one)).repeated
        assert (await pool.control.submit(one)).repeated
        placed = await pool.control.submit(two)
        assert placed.placement is not None
        assert placed.placement.placement is not None
        assert placed.placement.placement.how == "packed"

        slices: list[tuple[str, str]] = []

        def both(node: str) -> list[int]:
            return [*pool.residents(node, "one"), *pool.residents(node, "two")]

        def beside_another(status: dict[str, Any]) -> bool:
            held = [(one["job"], one["nodes"][0]) for one in status["permits"] if one["phase"] == "rollout"]
            slices[:] = [(job, node) for job, node in held if len(both(node)) == 2]
            return bool(slices)

        await pool.until(beside_another, "nobody has a slice beside another")
        inside, node = slices[0]
        outside = "two" if inside == "one" else "one"
        killed = both(node)
        for pid in killed:  # The one in its slice, and the one that is parked beside it.
            os.kill(pid, signal.SIGKILL)
        await pool.until(
            lambda status: (
                next(one for one in status["nodes"] if one["name"] == node)["node_agent"]["residents"] == ["one", "two"]
                and not {*killed} & {*both(node)}
            ),
            "residents are not started again",
        )
        assert f"{node} one started quietly" in pool.history() or f"{node} two started quietly" in pool.history()

        before = await pool.status()
        pool.kill()
        events = before["events"]
        pool.start()
        after = await pool.status()
        assert after["events"] >= events
        records = list(read_records(pool.directory))
        assert cluster_digest(replay(records[:events], CLUSTER_POLICIES["ours"])) == before["digest"]
        assert [job["pid"] for job in after["jobs"]] == [job["pid"] for job in before["jobs"]]
        assert [one["node_agent"]["pid"] for one in before["nodes"]] != []

        os.kill((await pool.job("one"))["pid"], signal.SIGKILL)
        await pool.until(
            lambda status: any(job["restarts"] and job["pid"] for job in status["jobs"]), "the job is not started again"
        )
        await pool.until(
            lambda status: all(one["node_agent"]["up"] for one in status["nodes"]), "node agents are not back"
        )
        lost = next(one for one in (await pool.status())["nodes"] if one["name"] == node)
        os.kill(lost["node_agent"]["pid"], signal.SIGKILL)
        await pool.until(lambda status: node not in [one["name"] for one in status["nodes"]], "the node is not lost")
        await finished(pool, "one", "two")
        status = await pool.status()
        assert len(status["nodes"]) == 3
        assert pool.replayed_digest() == status["digest"]

        report, _ = live_report(pool.directory)
        wrong = as_text(report).partition("what went wrong")[2]
        for told in (
            f"{outside} on {node}: its resident died: it was killed by SIGKILL",
            "the pool: the pool's process died; another one went on",
            "one: its process died; it starts again after 1 s, 1 of at most 3 times",
            f"{node}: its node agent died",
        ):
            assert told in wrong
        assert [mark.at_s for mark in report.marks] == sorted(mark.at_s for mark in report.marks)


@pytest.mark.nightly
async def test_rollout_nodes_come_and_go_with_the_instances_of_a_spot_market(tmp_path: Path):
    path = tmp_path / "spot.csv"
    events = [(0, "add", "a"), (0, "add", "b"), (5, "remove", "a"), (10, "remove", "b"), (13, "add", "c")]
    path.write_text("time_s,event,instance_id\n" + "".join(f"{time},{what},{name}\n" for time, what, name in events))
    trace = read_spot_trace(path)
    async with running(tmp_path, spot={"trace": str(path)}) as pool:
        for name in ("one", "two"):
            await pool.begin(name, steps=12, rollout_s=0.6)
        await pool.until(
            lambda status: "rollout-1" not in [node["name"] for node in status["nodes"]],
            "no node goes with its instance",
        )
        pool.kill()
        pool.start()
        await finished(pool, "one", "two")
        assert pool.replayed_digest() == (await pool.status())["digest"]

        there, lost = set[str](), 0
        for entry in decoded(read_records(pool.directory))[1]:
            match entry.event:
                case NodeJoined(node=node, kind=PhaseKind.ROLLOUT):
                    there.add(node)
                case NodeLost(node=node):
                    there.discard(node)
                    lost += 1
                case _:
                    # The pool's process sees within 2 s that an instance has gone: events are further apart.
                    since_s, now_s = max(0.0, entry.now_ns / S - 2.0), entry.now_ns / S
                    assert len(there) <= max(len(trace.available(since_s)), len(trace.available(now_s)))
        assert lost >= 1
        assert there.isdisjoint({"rollout-1", "rollout-2"}), "the last instance has a node of its own"


@pytest.mark.nightly
async def test_with_notice_a_job_has_left_an_instance_before_it_is_taken(tmp_path: Path):
    path = tmp_path / "spot.csv"
    path.write_text("time_s,event,instance_id\n0,add,a\n0,add,b\n6,remove,a\n")
    async with running(tmp_path, spot={"trace": str(path), "notice_s": 600.0}) as pool:
        await pool.begin("one", steps=12, rollout_s=0.6)
        await pool.until(
            lambda status: [n["name"] for n in status["nodes"] if n["phase"] == "rollout"] == ["rollout-2"],
            "the node is not let go",
        )
        await finished(pool, "one")
        events = [entry.event for entry in decoded(read_records(pool.directory))[1]]
        assert NodeDrained(node="rollout-1") in events
        assert not any(isinstance(event, NodeLost | ResidentLost) for event in events)


@pytest.mark.nightly
async def test_a_device_whose_residents_die_as_they_start_is_set_aside_until_it_is_put_back(tmp_path: Path):
    async with running(tmp_path) as pool:
        await pool.begin("a", rollout_nodes=2, dies_on=["cpu:0"])
        await pool.until(lambda status: status["set_aside"], "no device is set aside")
        status = await pool.status()
        assert "and not elsewhere: it exited with status 9" in status["set_aside"]["cpu:0"]
        await pool.until(lambda status: status["jobs"][0]["state"] == "queued", "a node goes on")
        devices = {device for node in (await pool.status())["nodes"] for device in node["devices"]}
        assert devices == {"cpu:1", "cpu:2"}
        assert pool.process is not None
        pool.process.kill()
        pool.process.wait()
        pool.start()
        await pool.status()
        with pytest.raises(CommandRefused, match="device 'cpu:1' is not set aside; those that are: cpu:0"):
            await pool.control.put_back("cpu:1")
        (pool.jobs["a"] / "mended").touch()
        await pool.control.put_back("cpu:0", "once")
        assert (await pool.control.put_back("cpu:0", "once")).repeated
        await pool.until_over("a")
        assert (await pool.job("a"))["state"] == "finished"
        assert not (await pool.status())["set_aside"]


@pytest.mark.nightly
async def test_who_does_not_give_way_or_park_is_killed_and_the_cycle_goes_on(tmp_path: Path):
    async with running(tmp_path) as pool:
        await pool.begin("hangs", steps=2, plan_s=5, hangs_at=0)
        await pool.begin("stays", steps=2, plan_s=5, never_parks=True)
        await finished(pool, "hangs", "stays")
        assert (pool.jobs["hangs"] / "hung").exists()


@pytest.mark.nightly
async def test_a_job_whose_process_dies_too_often_has_failed_and_may_come_again(tmp_path: Path):
    async with running(tmp_path) as pool:
        await pool.begin("frail", steps=50, max_restarts=0)
        await pool.until(lambda status: bool(status["permits"]), "it has no turn")
        os.kill((await pool.job("frail"))["pid"], signal.SIGKILL)
        await pool.until_over("frail")
        job = await pool.job("frail")
        assert (job["state"], job["pid"]) == ("failed", None)
        assert "killed" in job["reason"] or "died" in job["reason"] or "status" in job["reason"]
        (pool.jobs["frail"] / "script.json").write_text(json.dumps({"steps": 1, "rollout_s": 0.1, "train_s": 0.1}))
        await pool.control.resubmit("frail")
        await pool.until_over("frail")
        assert (await pool.job("frail"))["state"] == "finished"


@pytest.mark.nightly
async def test_a_stopped_pool_goes_on_with_its_job(tmp_path: Path):
    async with running(tmp_path) as pool:
        await pool.begin("long", steps=500)
        await pool.until(
            lambda status: any(job["steps_done"] for job in status["jobs"] if job["name"] == "long"),
            "it does not come on",
        )
        await pool.control.stop(now=True)
        assert pool.process is not None
        assert await asyncio.to_thread(pool.process.wait, 20) == 0
        assert not leftovers(pool.directory)
        (pool.jobs["long"] / "script.json").write_text(json.dumps({"steps": 3, "rollout_s": 0.1, "train_s": 0.1}))
        pool.start()
        await pool.until_over("long")
        assert (await pool.job("long"))["state"] == "finished"


@pytest.mark.nightly
async def test_a_script_takes_turns_with_a_run_and_comes_again_after_its_death(tmp_path: Path):
    async with running(tmp_path) as pool:
        await pool.begin("run", steps=3)
        await pool.begin("script", steps=3, script=True)
        await pool.until(lambda status: any(one["job"] == "script" for one in status["permits"]), "it has no turn")
        os.kill(pool.residents("train-1", "script")[0], signal.SIGKILL)
        await finished(pool, "run", "script")
        job = await pool.job("script")
        assert job["restarts"] == 0, "since its last step"
        (death,) = (death for death in read_deaths(pool.directory) if death.job == "script")
        assert "1 of at most" in death.what
        assert (Path(job["logs"]) / "script.log").is_file()
        assert not pool.residents("train-1", "script")


@pytest.mark.nightly
async def test_a_phase_that_needs_both_pools_has_both_at_once_beside_a_run(tmp_path: Path):
    async with running(tmp_path) as pool:
        phases = ("rollout", "both", "train")
        await pool.begin("run", steps=4, rollout_nodes=2)
        await pool.begin("script", steps=3, rollout_nodes=2, script=True, phases=phases, both_s=0.4)
        await pool.until(lambda status: any(one["phase"] == "both" for one in status["permits"]), "it has no such turn")
        pool.kill()
        pool.start()
        await finished(pool, "run", "script")
        turns: dict[str, set[str]] = {}
        for line in pool.history().splitlines():
            _, node, job, what, permit = line.split()
            if (job, what) == ("script", "resumed"):
                turns.setdefault(permit, set()).add(node)
        rollout, train = {"rollout-1", "rollout-2"}, {"train-1"}
        seen = list(turns.values())
        assert [each for each in seen if each not in (rollout, train, rollout | train)] == []
        assert seen.count(rollout | train) >= 3
        status = await pool.status()
        assert pool.replayed_digest() == status["digest"]


@pytest.mark.nightly
async def test_a_script_outlives_the_pool_s_process_and_how_it_ended_meanwhile_is_known(tmp_path: Path):
    async with running(tmp_path) as pool:
        await pool.begin("stays", steps=3, script=True, rollout_s=0.6)
        await pool.begin("ends", steps=1, script=True, rollout_nodes=2)
        await pool.until(
            lambda status: (
                any(one["job"] == "stays" for one in status["permits"])
                and any(job["steps_done"] for job in status["jobs"] if job["name"] == "ends")
            ),
            "they do not come on",
        )
        pids = pool.residents("train-1", "stays")
        pool.kill()
        deadline = time.monotonic() + 20
        while not (pool.jobs["ends"] / "finished").exists() or pool.residents("train-1", "ends"):
            assert time.monotonic() < deadline
            await asyncio.sleep(0.05)
        pool.start()
        await pool.until(
            lambda status: all(node["node_agent"]["up"] for node in status["nodes"]), "node agents are not back"
        )
        assert pool.residents("train-1", "stays") == pids
        await finished(pool, "stays", "ends")
        assert [(await pool.job(name))["restarts"] for name in ("stays", "ends")] == [0, 0]


@pytest.mark.nightly
async def test_a_script_that_hangs_is_killed_at_its_deadline_and_a_cancelled_one_leaves_nothing(tmp_path: Path):
    async with running(tmp_path) as pool:
        await pool.begin("script", steps=2, plan_s=2, script=True, hangs_at=0)
        await finished(pool, "script")
        assert (pool.jobs["script"] / "hung").exists()
        await pool.begin("other", steps=1000, script=True)
        await pool.until(lambda status: any(one["job"] == "other" for one in status["permits"]), "it has no turn")
        await pool.control.cancel("other")
        await pool.until(lambda _: not pool.residents("train-1", "other"), "it lives on")
        assert (await pool.job("other"))["state"] == "cancelled"
