"""A keeper outlives its residents, whatever they are and however they end."""

import asyncio
import signal
import sys
from pathlib import Path

from elastic.core.cluster.types import PhaseKind
from elastic.pool import messages as w
from elastic.pool.connection import FromDialler, PoolLink
from elastic.pool.keeper import Keeper, KeeperTicket
from elastic.system.isolation import LoopFaults
from tests.pool.test_link import served

DIES = f"import os; os.kill(os.getpid(), {int(signal.SIGRTMIN + 5)})"


async def test_residents_that_cannot_be_started_or_die_of_any_signal_are_told_and_end_no_keeper(tmp_path: Path):
    faults = LoopFaults()

    def order(job: str, *command: str) -> w.StartResidentFrame:
        log = str(tmp_path / f"{job}.log")
        return w.StartResidentFrame(job, 1, PhaseKind.ROLLOUT, command, {}, str(tmp_path), log, script=True)

    async def gone(link: PoolLink[FromDialler]) -> w.ResidentGone:
        while True:
            if isinstance(message := await link.receive(), w.ResidentGone):
                return message

    async with served() as (endpoint, connected), asyncio.timeout(20):
        ticket = KeeperTicket(endpoint=endpoint, pool="lab", node="node", token="t", records=tmp_path / "records")
        keeping = asyncio.create_task(Keeper(ticket, faults=faults).run())
        link = await connected.get()
        assert isinstance(await link.receive(), w.KeeperHello)
        link.send(w.KeeperWelcome("session", 10.0, 10.0, 10.0))
        link.send(order("poisoned"))  # No command at all.
        first = await gone(link)
        link.send(order("other", sys.executable, "-S", "-c", DIES))
        second = await gone(link)
        assert (first.job, second.job) == ("poisoned", "other")
        assert "TypeError" in first.cause
        assert second.cause == "it was killed by SIGRTMIN+5"
        assert faults.counts() == {"keeper": 1}
        assert not keeping.done()
        link.send(w.PoolRefused("over", retry=False))
        assert await keeping == "over"
        connected.put_nowait(link)
