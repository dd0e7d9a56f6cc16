"""A node's agent with real residents: what their environment holds, and what becomes of them."""

import asyncio
import contextlib
import hashlib
import json
import os
import re
import sys
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import msgspec
import psutil
import pytest

from elastic.core.cluster.types import PhaseKind
from elastic.pool import messages as w
from elastic.pool.connection import FromDialler, PoolLink
from elastic.pool.node_agent import NodeAgent, NodeAgentTicket
from elastic.pool.node_files import NodeFiles
from tests.pool.test_link import served

TELL = "import json, os, sys; json.dump(dict(os.environ), open(sys.argv[1], 'w')); sys.exit(int(sys.argv[2]))"

LIVES = """
import asyncio, os, socket, sys
from elastic.pool.connection import TO_RESIDENT, show_life
from elastic.pool.messages import Warm
from elastic.protocol.connection import over_socket

async def live():
    own = socket.socket(fileno=int(os.environ["ELASTIC_NODE_AGENT_FD"]))
    link = await over_socket(own, TO_RESIDENT, "the node agent")
    show_life(link)
    open(sys.argv[1], "w").write(str(os.getpid()))
    link.send(Warm())
    await link.receive()

asyncio.run(live())
"""


class KeptNode:
    """The pool's side of one node agent, and the node agent's next connections."""

    def __init__(
        self, path: Path, link: PoolLink[FromDialler], connected: asyncio.Queue[PoolLink[FromDialler]]
    ) -> None:
        self.path, self.link, self.connected = path, link, connected
        self._number = 0

    async def resident(
        self, phase: PhaseKind, *, script: bool = False, status: int = 0, **given: str
    ) -> tuple[Mapping[str, str], w.ResidentGone]:
        """Start a resident that ends with this status; returns its environment, and how it was said to have ended."""
        self._number += 1
        job, told = f"job-{self._number}", self.path / f"environment-{self._number}"
        command = (sys.executable, "-S", "-c", TELL, str(told), str(status))
        log = str(self.path / "log")
        self.link.send(w.StartResidentFrame(job, 1, phase, command, dict(given), str(self.path), log, script=script))
        while not isinstance(message := await self.link.receive(), w.ResidentGone):
            pass
        assert message.job == job
        return json.loads(told.read_text()), message


@contextlib.asynccontextmanager
async def kept(
    path: Path,
    devices: tuple[str, ...] = (),
    silence: tuple[float, float] = (60.0, 0.0),
    files: NodeFiles | None = None,
) -> AsyncIterator[KeptNode]:
    async with asyncio.timeout(60), served() as (endpoint, connected):
        of_node = NodeAgentTicket(endpoint=endpoint, pool="lab", node="rollout-1", token="t", records=path / "records")
        ticket = msgspec.structs.replace(of_node, devices=devices, directory=path)
        (path / "records").mkdir()
        keeping = asyncio.create_task(NodeAgent(ticket, files=files).run())
        try:
            link = await connected.get()
            hello = await link.receive()
            assert isinstance(hello, w.NodeAgentHello)
            assert hello.devices == devices
            link.send(w.NodeAgentWelcome("session", 60.0, 60.0, 60.0, *silence))
            node = KeptNode(path, link, connected)
            yield node
            connected.put_nowait(node.link)
        finally:
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)


async def test_a_worker_is_told_of_its_node_s_site_and_residents_of_what_their_job_passes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = {"ELASTIC_SITE": "/near", "ELASTIC_SITE_TOKEN": "of the site"}
    for name, value in {**site, "AWS_SECRET_ACCESS_KEY": "hidden"}.items():
        monkeypatch.setenv(name, value)
    async with kept(tmp_path) as node:
        worker, _ = await node.resident(PhaseKind.ROLLOUT, JUDGE_KEY="passed on")
        assert site.items() <= worker.items()
        assert worker["JUDGE_KEY"] == "passed on"
        assert "AWS_SECRET_ACCESS_KEY" not in worker
        for phase, script in ((PhaseKind.TRAIN, False), (PhaseKind.TRAIN, True)):
            other, _ = await node.resident(phase, script=script)
            assert not site.keys() & other.keys()


@pytest.mark.parametrize(
    ("silence", "cause"),
    [
        ((1.5, 0.0), r"it hangs: for [12]\.\d s it has said nothing$"),
        ((60.0, 0.6), r"it hangs: for 0\..* done nothing$"),
    ],
    ids=["silent", "still"],
)
async def test_a_resident_that_says_nothing_is_ended_and_one_that_lives_is_not(
    tmp_path: Path, silence: tuple[float, float], cause: str
) -> None:
    async with kept(tmp_path, silence=silence) as node:

        async def begin(job: str) -> psutil.Process:
            told = tmp_path / job
            command, log = (sys.executable, "-c", LIVES, str(told)), str(tmp_path / "log")
            node.link.send(w.StartResidentFrame(job, 1, PhaseKind.ROLLOUT, command, {}, os.getcwd(), log))
            assert await node.link.receive() == w.ResidentUp(job, 1)
            return psutil.Process(int(told.read_text()))

        lives, hangs = await begin("lives"), await begin("hangs")
        hangs.suspend()
        gone = await node.link.receive()
        assert isinstance(gone, w.ResidentGone)
        assert gone.job == "hangs"
        assert re.search(cause, gone.cause)
        with contextlib.suppress(psutil.NoSuchProcess):
            assert hangs.status() == psutil.STATUS_ZOMBIE, "it is dead, if not collected yet"
        assert lives.is_running()
        node.link.send(w.EndResident("lives", "it has lived"))
        assert await node.link.receive() == w.ResidentGone("lives", 1, "it has lived", code=-9)


async def test_what_happens_between_a_hello_and_its_welcome_is_said_after_that(tmp_path: Path) -> None:
    async with kept(tmp_path) as node:
        command, log = (sys.executable, "-c", LIVES, str(tmp_path / "told")), str(tmp_path / "log")
        node.link.send(w.StartResidentFrame("one", 1, PhaseKind.ROLLOUT, command, {}, os.getcwd(), log))
        assert await node.link.receive() == w.ResidentUp("one", 1)
        node.link.abort()
        node.link = await node.connected.get()
        hello = await node.link.receive()
        assert isinstance(hello, w.NodeAgentHello)
        assert [resident.job for resident in hello.residents] == ["one"]
        psutil.Process(int((tmp_path / "told").read_text())).kill()
        while any((tmp_path / "records").iterdir()):  # noqa: ASYNC110 - a process and the disk are waited for
            await asyncio.sleep(0.01)
        node.link.send(w.NodeAgentWelcome("session", 60.0, 60.0, 60.0, 60.0, 0.0))
        gone = await node.link.receive()
        assert isinstance(gone, w.ResidentGone)
        assert (gone.job, gone.code) == ("one", -9)


async def test_a_script_begins_with_its_files_and_one_that_is_to_end_waits_for_none(tmp_path: Path) -> None:
    data = b"open('said', 'w').write('here')"
    file = w.JobFile("script/say.py", hashlib.sha256(data).hexdigest(), len(data))
    order = w.StartResidentFrame(
        "one", 1, PhaseKind.TRAIN, (w.OWN_PYTHON, "-S", "script/say.py"), {}, "jobs/one/script/run", "log", script=True
    )
    order = msgspec.structs.replace(order, files_token="of this start")
    async with kept(tmp_path, files=NodeFiles(tmp_path, 10**6)) as node:
        for begins in (False, True):
            node.link.send(order)
            assert await node.link.receive() == w.AskFiles("one", 1, "of this start")
            if begins:
                node.link.send(w.FilesNeeded("one", 1, (file,)))
                assert await node.link.receive() == w.AskChunk(file.digest, 0)
                node.link.send(w.FileChunk(file.digest, 0, data))
                while isinstance(up := await node.link.receive(), w.FilesThere):
                    """What there is to go back may be told before."""
                assert up == w.ResidentUp("one", 1)
            else:
                node.link.send(w.EndResident("one", "nobody wants it any more"))
            while isinstance(gone := await node.link.receive(), w.FilesThere):
                """What there is to go back is told whenever that changes."""
            assert isinstance(gone, w.ResidentGone)
            assert (gone.cause.partition(";")[0], gone.code) == (
                ("it exited with status 0", 0) if begins else ("nobody wants it any more", None)
            )
    assert (tmp_path / "jobs/one/script/run/said").read_text() == "here"
