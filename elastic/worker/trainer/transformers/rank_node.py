"""The resident of a trainer on another node than its first rank's: it starts the ranks of its node, and ends with them.

The node's agent gives it the devices and takes them back as any resident's. It tells the first rank, which has all
ranks resume and park together, and says when they have.
"""

import asyncio
import contextlib
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing import AuthenticationError

import structlog

from elastic.config import Config
from elastic.pool.connection import TO_RESIDENT, show_life
from elastic.pool.messages import RANKS_VARIABLE, DeviceResumed, Park, Parked, RankPlaces, Resume, Warm
from elastic.protocol.connection import ConnectionLost, over_socket
from elastic.protocol.endpoint import Address
from elastic.system.interfaces import reached_by
from elastic.system.plain_values import told
from elastic.system.processes import MARK_VARIABLE, RUN_VARIABLE, inherited
from elastic.system.supervision import how_ended
from elastic.worker.agent import AgentExit, on_termination
from elastic.worker.trainer.transformers import rank_messages as m
from elastic.worker.trainer.transformers.rank_stops import RankStops

log = structlog.get_logger(__name__)

DIAL_S = 30.0
LOOK_S = 0.1
RANK = "elastic.worker.trainer.transformers.rank"


class RankNode:
    """The ranks of this node, and its part in their permit."""

    def __init__(self, places: RankPlaces, config: Config) -> None:
        self._places, self._config = places, config
        self._line: m.RankLine | None = None
        self._permit = 0
        self._left = asyncio.Event()
        self._over: asyncio.Future[AgentExit] = asyncio.get_running_loop().create_future()

    async def run(self, node_agent: socket.socket) -> AgentExit:
        """Be them until one of them, the first rank or the node's agent is gone."""
        works = [self._over, *map(asyncio.create_task, (self._obey(node_agent), self._be_ranks()))]
        try:
            ended, _ = await asyncio.wait(works, return_when=asyncio.FIRST_COMPLETED)
            return ended.pop().result()
        finally:
            for work in works:
                work.cancel()
            await asyncio.gather(*works, return_exceptions=True)

    async def _be_ranks(self) -> AgentExit:
        """Start the ranks, and watch them until the end of one."""
        ranks: list[asyncio.subprocess.Process] = []
        try:
            for number in self._places.here:
                ranks.append(await self._start(number))  # noqa: PERF401  # Those that were started are ended.
            line = m.RankLine.of_node(await self._dial())
            threading.Thread(target=self._hear, args=(line,), name="first rank", daemon=True).start()
            stops = RankStops()
            while all(rank.returncode is None for rank in ranks):
                await asyncio.sleep(LOOK_S)
                if (stopped := stops.hang([rank.pid for rank in ranks], time.monotonic())) is not None:
                    return AgentExit(1, f"rank {self._places.here[stopped]} hangs: it was stopped")
            status = next(rank.returncode for rank in ranks if rank.returncode is not None)
            if not status:  # It was cut off: whoever did that knows why.
                await asyncio.sleep(m.DEATH_SHOWS_S)
            return AgentExit(1 if status else 0, f"a rank {how_ended(status)}")
        except OSError as error:
            return AgentExit(1, f"no ranks here: {told(error)}")
        finally:
            for rank in ranks:
                with contextlib.suppress(ProcessLookupError):
                    rank.kill()

    async def _start(self, number: int) -> asyncio.subprocess.Process:
        """Start the rank of this number. Raises `OSError`."""
        environment = inherited(*self._config.run.pass_env, RUN_VARIABLE, MARK_VARIABLE, RANKS_VARIABLE)
        environment |= reached_by(self._places.interface)
        config = os.memfd_create("configuration")
        os.write(config, self._config.model_dump_json().encode())
        os.lseek(config, 0, os.SEEK_SET)
        given = [config]
        try:
            given += [await self._dial(), await self._dial()]
            command = [sys.executable, "-m", RANK, *map(str, (*given[1:], number, config))]
            return await asyncio.create_subprocess_exec(
                *command, env=environment, pass_fds=given, stdin=asyncio.subprocess.DEVNULL, stdout=2
            )
        finally:
            for descriptor in given:
                os.close(descriptor)

    async def _dial(self) -> int:
        """Raises `OSError`."""
        dialling = socket.socket()
        try:
            dialling.setblocking(False)
            async with asyncio.timeout(DIAL_S):
                await asyncio.get_running_loop().sock_connect(dialling, Address.to_dial(self._places.at))
            return m.kept(dialling)
        except OSError as error:
            at = self._places.at
            raise OSError(
                f"the trainer's first rank is not reached at {at} within {DIAL_S:g} s: {told(error)}"
            ) from error
        finally:
            dialling.close()  # Unless it was kept.

    async def _obey(self, node_agent: socket.socket) -> AgentExit:
        try:
            link = await over_socket(node_agent, TO_RESIDENT, "the node agent")
            show_life(link)
            link.send(Warm())
            while True:
                match await link.receive():
                    case Resume(permit=permit):
                        self._permit = permit
                        self._say(m.NodeGiven(permit))
                        link.send(DeviceResumed(permit, 0.0))
                    case Park(permit=permit):
                        began_s = time.monotonic()
                        self._permit = 0
                        self._left.clear()
                        if self._say(m.NodeTaken()):
                            await self._left.wait()
                        link.send(Parked(permit, time.monotonic() - began_s))
                    case message:
                        log.warning("a trainer takes no order of this kind", asked=type(message).__name__)
        except ConnectionLost as loss:
            return AgentExit(1, f"the node agent is gone: {loss}")

    def _say(self, message: m.NodeGiven | m.NodeTaken) -> bool:
        """Return whether the first rank may have been told: it knows of nothing before it has let this node in."""
        if self._line is None:
            return False
        with contextlib.suppress(OSError):  # Whoever hears that line ends this process.
            self._line.send(message)
        return True

    def end(self, how: AgentExit) -> None:
        if not self._over.done():
            self._over.set_result(how)

    def _hear(self, line: m.RankLine) -> None:
        """Hear the first rank, on a thread."""
        loop, why = self._over.get_loop(), "the trainer's first rank is gone"
        later: Callable[..., object] = loop.call_soon_threadsafe
        try:
            line.prove(self._places.token, dials=True)
            line.send(m.LineOpened(self._places.place))
            later(self._let_in, line)
            while True:
                line.receive()
                later(self._left.set)
        except AuthenticationError:
            why = "the trainer's first rank is another one"
        except (EOFError, OSError):
            pass
        time.sleep(m.DEATH_SHOWS_S)  # The node agent of that one says first what it died of.
        with contextlib.suppress(RuntimeError):  # The loop is over.
            later(self.end, AgentExit(0, why))

    def _let_in(self, line: m.RankLine) -> None:
        self._line = line
        if self._permit:
            self._say(m.NodeGiven(self._permit))


async def be_rank_node(places: RankPlaces, config: Config, node_agent: socket.socket) -> AgentExit:
    """Be a trainer's resident on another node than its first rank's, until it ends, or SIGTERM."""
    node = RankNode(places, config)
    with on_termination(lambda: node.end(AgentExit(0, "told to end"))):
        return await node.run(node_agent)
