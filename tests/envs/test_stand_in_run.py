"""The run that stands in for one in the conformance suite of environments does not let what is wrong pass."""

import asyncio
import socket
from pathlib import Path

import pytest

from elastic.core.ids import agent_id
from elastic.front.tiny import write_tokenizer
from elastic.protocol import front_messages as m
from elastic.protocol.connection import over_socket
from elastic.protocol.run_control import socket_address
from elastic.testing.environments import DRIVER_KEY, StandInRun


async def test_an_env_worker_that_ends_a_trajectory_twice_fails_the_suite(tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "policy")
    run = StandInRun(tmp_path / "run", tmp_path / "policy", {"name": "outside"})
    heard = run.play("good")

    async def play() -> None:
        async with run.serving(), asyncio.timeout(10):
            end = socket.socket(socket.AF_UNIX)
            with socket_address(run.directory, m.SOCKET) as address:
                end.connect(address)
            end.send(b"\0")
            link = await over_socket(end, m.FRONT_SIDE, "the run")
            link.send(m.DriverHello(m.FRONT_VERSION, DRIVER_KEY))
            caller = m.AgentCaller(driver="d", named=agent_id(run.named(heard)))
            for request in range(2):
                link.send(m.EndTrajectory(request, caller))
            await link.lost

    with pytest.raises(AssertionError, match="it was ended before"):
        await play()
    assert heard.over.is_set()
