"""Rollout nodes on other machines: real node agents that join the pool's real process by tickets, from directories of
their own. What is killed comes back; what is drained goes."""

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest

from elastic.pool.gateway import PoolTokens
from elastic.pool.journal import pool_secret
from elastic.pool.machines import NodeTicket
from elastic.protocol.run_control import CommandRefused
from tests.pool.test_pool_process import Pool, finished, leftovers, running
from tests.worker.test_notices import metadata

pytestmark = pytest.mark.slow


class OtherMachine:
    """A directory, and the node agents that people start there."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir()
        self.directory = directory
        self.node_agents: dict[str, subprocess.Popen[bytes]] = {}

    def join(self, ticket: NodeTicket, *options: str, at: str = "") -> "subprocess.Popen[bytes]":
        file = self.directory / f"{ticket.node}.ticket"
        file.write_bytes(msgspec.json.encode(ticket))
        words = ("pool", "join", *([at] if at else []), "--ticket-file", file.name, *options)
        command = [sys.executable, "-P", "-m", "elastic.cli", *words]
        with (self.directory / f"{ticket.node}.log").open("ab") as log:
            node_agent = subprocess.Popen(command, cwd=self.directory, stderr=log, start_new_session=True)
        self.node_agents[ticket.node] = node_agent
        return node_agent

    def said(self, ticket: NodeTicket) -> str:
        return (self.directory / f"{ticket.node}.log").read_text()

    def kill(self, node: str) -> None:
        self.node_agents[node].kill()
        self.node_agents[node].wait()

    async def ended(self, node_agent: "subprocess.Popen[bytes]") -> int:
        return await asyncio.to_thread(node_agent.wait, 40)


@pytest.fixture
def elsewhere(tmp_path: Path) -> Iterator[OtherMachine]:
    machine = OtherMachine(tmp_path / "elsewhere")
    yield machine
    for node_agent in machine.node_agents.values():
        node_agent.terminate()
    for node_agent in machine.node_agents.values():
        with contextlib.suppress(subprocess.TimeoutExpired):
            node_agent.wait(20)
        node_agent.kill()
    assert not leftovers(machine.directory)


def up(*nodes: str) -> Callable[[Mapping[str, Any]], bool]:
    """Whether these are the rollout nodes, with their node agents."""
    return lambda status: (
        {node["name"] for node in status["nodes"] if node["phase"] == "rollout"} == {*nodes}
        and all(node["node_agent"]["up"] for node in status["nodes"])
    )


async def test_a_job_runs_on_a_machine_that_joins_as_two_nodes_though_the_pool_s_process_is_killed(
    tmp_path: Path, elsewhere: OtherMachine
) -> None:
    """A pool, a machine that joins over TLS with a node for each device, and a job, all as processes."""
    async with running(tmp_path, host="0.0.0.0", kind="joined", silence_s=30.0) as pool:
        await pool.until(up(), "there are rollout nodes")
        await pool.begin("one", steps=10_000, rollout_s=0.5)
        assert (await pool.job("one"))["state"] == "queued"
        ticket = await pool.control.ticket("mine", 600, "mint", nodes=2)
        names = [one.node for one in ticket.nodes]
        assert ticket.fingerprint
        with pytest.raises(CommandRefused, match="not shown again"):
            await pool.control.ticket("mine", 600, "mint", nodes=2)
        node_agent = elsewhere.join(ticket)
        await pool.until(lambda status: any(one["phase"] == "rollout" for one in status["permits"]), "no turn", 120.0)
        await pool.until(up(*names), "not all of its nodes join")
        there = {node["name"]: node for node in (await pool.status())["nodes"] if node["phase"] == "rollout"}
        assert [there[name]["devices"] for name in names] == [[f"cpu:{at}@{name}"] for at, name in enumerate(names)]
        assert {there[name]["machine"]["label"] for name in names} == {"mine"}
        assert there[ticket.node]["machine"]["memory_bytes"] > 0
        said = (pool.directory / "logs" / "pool.log").read_text() + elsewhere.said(ticket)
        assert not any(one.token in said for one in ticket.nodes)

        kept = records(elsewhere)
        pool.kill()
        pool.start()
        await pool.until(up(*names), "its node agents are not back", 120.0)
        assert records(elsewhere) == kept, "it went on with what it has"
        await goes_on(pool)
        await pool.control.cancel("one")
        await pool.until_over("one")
        assert pool.replayed_digest() == (await pool.status())["digest"]
        await pool.control.stop()
        assert pool.process is not None
        assert await asyncio.to_thread(pool.process.wait, 40) == 0
        assert await elsewhere.ended(node_agent) == 0
        assert "the pool has been stopped" in elsewhere.said(ticket)


@pytest.mark.nightly
async def test_a_machine_comes_back_by_its_session_alone_and_its_node_is_drained_while_a_job_is_at_work(
    tmp_path: Path, elsewhere: OtherMachine
) -> None:
    async with running(tmp_path, kind="joined", silence_s=3.0) as pool:
        await pool.begin("one", steps=10_000, rollout_s=0.6)
        first, second = await pool.control.ticket("", 600), await pool.control.ticket("", 600)
        elsewhere.join(first)
        await pool.until(lambda status: any(one["phase"] == "rollout" for one in status["permits"]), "no turn", 120.0)
        elsewhere.kill(first.node)
        again = elsewhere.join(first)  # As its machine does when it starts anew.
        await pool.until(up(first.node), "the machine does not come back", 120.0)
        other = OtherMachine(tmp_path / "another")
        assert await other.ended(other.join(first)) == 1, "a ticket is good for one machine"
        assert "was used already" in other.said(first)
        assert await elsewhere.ended(elsewhere.join(second)) == 1
        assert f"cpu:0 of its machine is node {first.node}'s" in elsewhere.said(second)
        elsewhere.join(second, "--devices", "cpu:1")
        await pool.until(up(first.node, second.node), "the second does not join", 120.0)
        await pool.until(lambda status: len(relays(status)) == 2, "they use no relay of their site")
        (relay,) = set(relays(await pool.status()))
        assert relay == str(elsewhere.directory / "nodes" / f"lab-{first.node}" / "site" / "blobs")

        (node,) = (await pool.job("one"))["rollout"]
        (pool.jobs["one"] / "stop").touch()  # A stub's process looks for it at its step's end.
        await pool.control.drain(node)
        rest = {first.node: second.node, second.node: first.node}[node]
        await pool.until(up(rest), "the node does not go")
        for marker in ("stop", "stopped"):
            (pool.jobs["one"] / marker).unlink()
        assert await elsewhere.ended(again if node == first.node else elsewhere.node_agents[node]) == 1
        await goes_on(pool)
        job = await pool.job("one")
        assert (job["rollout"], job["restarts"]) == ([rest], 0)
        await pool.control.cancel("one")
        await pool.until_over("one")
        assert pool.replayed_digest() == (await pool.status())["digest"]


def relays(status: Mapping[str, Any]) -> list[str]:
    """The relays of their site that nodes of other machines use."""
    return [node["machine"]["relay"] for node in status["nodes"] if node["machine"] and node["machine"]["relay"]]


async def goes_on(pool: Pool) -> None:
    """Wait until the only job has done a further step."""
    done = (await pool.job("one"))["steps_done"]
    await pool.until(lambda status: status["jobs"][0]["steps_done"] > done, "it does not go on")


def records(elsewhere: OtherMachine) -> set[str]:
    return {path.read_text() for path in elsewhere.directory.glob("nodes/*/leases/*.json")}


@pytest.mark.nightly
async def test_a_machine_that_was_cut_off_comes_back_without_what_it_had_and_wrong_tickets_let_nobody_in(
    tmp_path: Path, elsewhere: OtherMachine
) -> None:
    async with running(tmp_path, kind="joined", silence_s=1.0, orphan_s=60.0) as pool:
        await pool.begin("one", steps=8, rollout_s=0.5)
        first, late = await pool.control.ticket("", 600), await pool.control.ticket("", 0.01)
        node_agent = elsewhere.join(first)
        await pool.until(lambda status: any(one["phase"] == "rollout" for one in status["permits"]), "no turn", 120.0)
        os.kill(node_agent.pid, 19)  # SIGSTOP: as if its link were cut.
        await pool.until(up(), "the node is not given up")
        assert (await pool.job("one"))["state"] == "queued"
        os.kill(node_agent.pid, 18)
        await pool.until(up(first.node), "the machine does not come back", 120.0)
        assert "comes again without its residents" in elsewhere.said(first)
        assert await elsewhere.ended(elsewhere.join(late)) == 1
        assert f"the ticket of node {late.node} has expired" in elsewhere.said(late)

        token = PoolTokens(b"of another pool").ticket(late.node, 1)
        assert PoolTokens(pool_secret(pool.directory)).ticket(late.node, 1) == late.token
        assert await elsewhere.ended(elsewhere.join(msgspec.structs.replace(late, token=token))) == 1
        assert "unknown node or wrong token: is it of this pool?" in elsewhere.said(late)
        assert await elsewhere.ended(elsewhere.join(late, at="nowhere")) == 2
        for node, kind in (("train-1", "conflict"), ("train-9", "unknown_node")):
            with pytest.raises(CommandRefused, match=r"no node of another machine; those are: rollout-1") as refused:
                await pool.control.drain(node)
            assert refused.value.kind == kind
        await finished(pool, "one")


@pytest.mark.nightly
async def test_what_a_pool_of_other_machines_cannot_take_is_refused(tmp_path: Path) -> None:
    async with running(tmp_path, kind="joined") as pool:
        with pytest.raises(CommandRefused, match="largest: 2"):
            await pool.begin("large", rollout_nodes=3)
    async with running(tmp_path / "local") as local:
        with pytest.raises(CommandRefused, match=r"pool.rollout.kind: found 'local'"):
            await local.control.ticket("", 60)


@pytest.mark.nightly
async def test_a_machine_that_is_taken_back_is_drained_at_its_notice_and_does_not_come_again(
    tmp_path: Path, elsewhere: OtherMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with metadata(monkeypatch) as service, running(tmp_path, kind="joined", silence_s=3.0) as pool:
        ticket = await pool.control.ticket("", 600)
        node_agent = elsewhere.join(ticket)
        await pool.until(up(ticket.node), "the machine does not join", 120.0)
        service.interrupt(100.0)
        await pool.until(up(), "the node does not go")
        assert await elsewhere.ended(node_agent) == 1
        assert "was drained" in elsewhere.said(ticket)
        assert (await pool.control.ticket("", 600)).node == ticket.node, "its name is free"
