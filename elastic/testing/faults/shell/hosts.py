"""Env workers among simulated processes, which play episodes of the model of an environment.

Both ends of their connections, and who keeps them, are production code. They are on the orchestrator's machine.
"""

import asyncio
import contextlib
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from elastic.core.ids import env_worker_id
from elastic.environments.hosting import EpisodeHost, facts
from elastic.environments.run_link import EnvRunLink, RunGone
from elastic.protocol import front_messages as m
from elastic.protocol.connection import Connection
from elastic.protocol.run_secrets import RunSecrets
from elastic.runtime.agents import EPISODE_HOSTS, Doorkeeper, EnvWorkerOrder, EnvWorkers, EnvWorkersOrder
from elastic.runtime.hosted import EpisodeHosts, FailRun
from elastic.testing.faults.shell.agents.fronts import WorldDoor
from elastic.testing.faults.shell.models import ModelEnvironment
from elastic.testing.faults.shell.process import Process

if TYPE_CHECKING:
    from elastic.testing.faults.shell.world import World

ADDRESS, PORT = "127.0.0.1", 39_998
LOOK_S = 0.1
START_S = 0.1, 1.0
DEATHS_MAX = 1_000_000
"""More deaths than any world has: their number ends no run, since faults may come at any rate."""


class WorldHosts:
    """`elastic.runtime.agents.HostProcesses` in a world."""

    def __init__(
        self, world: "World", environment: str, hosts: EpisodeHosts, doorkeeper: Doorkeeper, fail: FailRun
    ) -> None:
        self._door = WorldDoor(doorkeeper, "an env worker")
        kept = EnvWorkerOrder(
            command=(),
            variables={},
            start_timeout_s=world.config.mixture[0].start_timeout_s,
            step_timeout_s=world.config.mixture[0].step_timeout_s,
            max_restarts=DEATHS_MAX,
        )
        names = [env_worker_id(environment, number) for number in range(world.plan.hosts)]
        order = EnvWorkersOrder(
            run_dir=world.run.path, workers=dict.fromkeys(names, kept), secrets=(), owner=EPISODE_HOSTS
        )
        self._workers = EnvWorkers(order, hosts, fail, WorldProcesses(world))

    async def start(self) -> None:
        await self._door.open(ADDRESS, PORT)
        await self._workers.start()

    async def aclose(self) -> None:
        await self._workers.aclose()
        await self._door.aclose()


class WorldProcesses:
    """Those of the world, for who keeps env workers (`elastic.runtime.agents.env_workers.Processes`)."""

    def __init__(self, world: "World") -> None:
        self._world = world

    async def take_over(self, names: Collection[str]) -> None:
        """Whatever lives goes on under its name."""

    def get(self, name: str) -> "HostProcess | None":
        return self._world.hosts.get(name)

    def start(self, name: str, command: Sequence[str], environment: Mapping[str, str]) -> "HostProcess":
        started = self._world.hosts[name] = HostProcess(self._world, name)
        return started

    async def forget(self, name: str) -> None:
        self._world.hosts.pop(name, None)

    def log(self, name: str) -> Path:
        return self._world.run.path / "logs" / f"{name}.log"

    async def aclose(self, drain_s: float) -> None:
        for process in self._world.hosts.values():
            process.kill()
        for process in list(self._world.hosts.values()):
            await process.wait()
        self._world.hosts.clear()


class HostProcess:
    """An env worker's process, which begins a moment after its start."""

    def __init__(self, world: "World", name: str) -> None:
        self.name = name
        self.process: Process | None = None
        self._world = world
        self._killed = False
        world.after(world.chance.uniform(*START_S), self._begin)

    def _begin(self) -> None:
        if not self._killed:
            self.process = self._world.begin_process(self.name, self._world.machine, self._play)

    @property
    def over(self) -> bool:
        return self._killed if self.process is None else not self.process.alive

    @property
    def status(self) -> int | None:
        return None

    async def wait(self) -> int | None:
        while not self.over:  # noqa: ASYNC110 - another loop's process is waited for
            await asyncio.sleep(LOOK_S)
        return None

    def kill(self) -> None:
        """What is connected to it notices."""
        self._killed = True
        if self.process is not None:
            self._world.after(0.0, partial(self._world.kill, self.process, noticed=True))

    async def _play(self) -> None:
        world = self._world
        host = EpisodeHost(world.make_environment, world.config.mixture[0].step_timeout_s, lambda said: link.send(said))

        def welcomed() -> None:
            host.begin_anew()
            link.send(facts(ModelEnvironment))

        key = RunSecrets(b"%32d" % world.plan.seed).driver_key(self.name)
        away_s = world.config.run.orchestrator_timeout_s
        link = EnvRunLink(world.run.path, key, away_s, host.hear, welcomed, self._connect)
        with contextlib.suppress(RunGone):
            await link.run()

    async def _connect(self) -> Connection[m.FromFront, m.FromRun]:
        _, connection = await asyncio.get_running_loop().create_connection(
            lambda: Connection(m.FRONT_SIDE, "the run"), ADDRESS, PORT
        )
        return connection
