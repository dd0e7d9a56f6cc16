"""What unauthenticated peers say to a pool whose nodes join by tickets, frame by frame, and a second process as the
same node."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import msgspec
import pytest

from elastic.compose.pool import PoolPrograms, PoolWiring, serve_pool
from elastic.compose.pool_config import PoolConfig, save_pool
from elastic.core.cluster.types import NodeId, PhaseKind
from elastic.pool import messages as w
from elastic.pool.connection import POOL, TO_NODE_AGENT, PoolLink
from elastic.pool.control_messages import PoolControl
from elastic.pool.job_processes import ProcessLaunch
from elastic.pool.machines import NodeTicket
from elastic.pool.node_agent import NodeAgent, NodeAgentTicket
from elastic.pool.status import NodeStatus
from elastic.protocol.connection import ConnectionLost, Greeting, SessionRefused, dial
from elastic.protocol.endpoint import Endpoint
from elastic.protocol.frames import framed
from elastic.protocol.run_control import ControlError
from elastic.system.devices import DeviceName

MACHINE = w.NodeMachine("one", "boot-1", "CPU", 4, 10**12)
OTHER = w.NodeMachine("other", "boot-2", "CPU", 4, 10**12)


class NoNodeAgents(PoolPrograms):
    """The training node's agent is a process that never dials."""

    def node_agent(self, node: NodeId, ticket: int, devices: Sequence[DeviceName]) -> ProcessLaunch:
        return ProcessLaunch(command=("sleep", "600"), environment={}, log=self._directory / "node_agent.log")


@contextlib.asynccontextmanager
async def serving(tmp_path: Path) -> AsyncIterator[PoolControl]:
    """A pool's process within this one."""
    nodes = {"nodes": 1, "usd_per_gpu_hour": 1.0, "memory_gb": 1}
    pool = {"directory": str(tmp_path), "devices": "cpu", "train": nodes, "rollout": {**nodes, "kind": "joined"}}
    config = PoolConfig.model_validate({"pool": pool})
    directory = save_pool(config)
    serving = asyncio.create_task(serve_pool(config, directory, PoolWiring(programs=NoNodeAgents)))
    control = PoolControl(directory, 10.0)
    try:
        async with asyncio.timeout(40):
            while not serving.done():
                with contextlib.suppress(ControlError):
                    await control.status()
                    break
                await asyncio.sleep(0.01)
            yield control
    finally:
        await control.stop(now=True)
        await serving


def hello(ticket: NodeTicket, machine: w.NodeMachine | None = MACHINE, **changes: object) -> w.NodeAgentHello:
    version = w.POOL_PROTOCOL_VERSION
    said = w.NodeAgentHello(version, ticket.node, ticket.token, 1, devices=("cpu:0",), machine=machine)
    return msgspec.structs.replace(said, **changes)


async def say(
    ticket: NodeTicket, said: msgspec.Struct, within_s: float = 5.0
) -> tuple[PoolLink[w.ToNodeAgent], w.NodeAgentWelcome]:
    return await dial(Endpoint(ticket.join), POOL, TO_NODE_AGENT, Greeting(lambda: said, w.NodeAgentWelcome), within_s)


async def rollout_nodes(control: PoolControl) -> list[NodeStatus]:
    return [node for node in (await control.status()).status.nodes if node.phase is PhaseKind.ROLLOUT]


async def test_a_second_process_as_the_same_node_waits_until_the_first_is_gone(tmp_path: Path) -> None:
    async with serving(tmp_path / "pool") as control:
        ticket, sessions = await control.ticket("", 600), asyncio.Queue[str]()
        known = NodeAgentTicket(
            endpoint=Endpoint(ticket.join),
            pool=ticket.pool,
            node=ticket.node,
            token=ticket.token,
            records=tmp_path,
            devices=("cpu:0",),
            machine=MACHINE,
        )
        first = asyncio.create_task(NodeAgent(known, let_in=sessions.put_nowait).run())
        session = await sessions.get()
        again = hello(ticket, token=session, machine=OTHER)
        for second in (again, msgspec.structs.replace(again, machine=MACHINE)):
            with pytest.raises(SessionRefused, match=r"rollout-1 is there already, as process \d+ on one") as refused:
                await say(ticket, second, within_s=0.3)
            assert refused.value.retry
        (node,) = await rollout_nodes(control)
        assert node.machine is not None
        assert (node.node_agent.up, node.machine.host) == (True, "one")

        waiting = asyncio.create_task(say(ticket, again, within_s=20.0))
        first.cancel()
        link, welcome = await waiting
        assert welcome.session == session
        (node,) = await rollout_nodes(control)
        assert node.machine is not None
        assert (node.name, node.node_agent.up, node.machine.host) == ("rollout-1", True, "other")
        await link.aclose()


async def test_frames_that_are_wrong_let_nobody_in_and_leave_the_ticket_good(tmp_path: Path) -> None:
    async with serving(tmp_path) as control:
        ticket = await control.ticket("", 600)
        resident = w.ResidentState("a", 1, "", 1, True)
        for said, refused in (
            (hello(ticket, token=""), "wrong token"),
            (hello(ticket, token=ticket.token.upper()), "wrong token"),
            (hello(ticket, node="train-1"), "wrong token"),
            (hello(ticket, node="rollout-2"), "wrong token"),
            (hello(ticket, node="../" * 20), "wrong token"),
            (hello(ticket, protocol_version=99), "speaks version 99"),
            (hello(ticket, machine=None), "does not say which machine"),
            (hello(ticket, devices=()), "it has 0 devices"),
            (hello(ticket, devices=("cpu:0", "cpu:1")), "it has 2 devices"),
            (hello(ticket, devices=("cuda:0",)), "allowed: cpu"),
            (hello(ticket, machine=msgspec.structs.replace(MACHINE, count=0)), "its machine has 0 devices"),
            (hello(ticket, residents=(resident,)), "without its residents it may come again"),
            (hello(ticket, given=7, given_to="a"), "without its residents it may come again"),
            (w.JobHello(w.POOL_PROTOCOL_VERSION, "rollout-1", ticket.token, 1), "unknown job or wrong token"),
            (w.HostMemory("a", 1), "first message is a hello"),
        ):
            with pytest.raises(SessionRefused, match=refused):
                await say(ticket, said)
        host, _, port = ticket.join.rpartition(":")
        for raw in (
            framed(b"\xc1"),
            framed(b"\x91\xabNodeAgentHello"),
            (2**31).to_bytes(4, "big"),
            b"GET / HTTP/1.1\r\n",
        ):
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(raw)
            assert await reader.read(), "it is told why"
            writer.close()
        assert await rollout_nodes(control) == []

        link, _ = await say(ticket, hello(ticket))
        with pytest.raises(SessionRefused, match="was used already"):
            await say(ticket, hello(ticket))
        for lie in (
            hello(ticket, node="train-1"),
            w.ResidentUp("nobody", 7),
            w.ResidentGone("nobody", 7, "x", 7),
            w.DeviceFreed(7, "nobody"),
            w.WorkerLeft("nobody", "nothing"),
            w.HostMemory("nobody", 2**53 - 1),
        ):
            link.send(lie)
        link.send(w.AskPhase(PhaseKind.TRAIN))  # As a job would.
        (node,) = await rollout_nodes(control)
        assert node.node_agent.up
        link.abort()
        with pytest.raises(ConnectionLost):
            await link.receive()
