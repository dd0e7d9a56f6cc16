"""What a run has for agents: the streams of its fronts, the fronts themselves, and the clock of what is waited for."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from elastic.config import FrontConfig
from elastic.protocol.endpoint import Address
from elastic.protocol.run_secrets import RunSecrets
from elastic.runtime.agents.chats import ChatLimits, Chats
from elastic.runtime.agents.env_workers import EnvWorkers, EnvWorkersOrder
from elastic.runtime.agents.hub import Doorkeeper, FrontHub
from elastic.runtime.agents.limits import AgentLimits
from elastic.runtime.agents.metrics import RunMetrics
from elastic.runtime.agents.processes import FrontProcesses
from elastic.runtime.agents.rollouts import AgentRollouts
from elastic.runtime.agents.streams import FrontStreams
from elastic.runtime.gateway import GatewayError
from elastic.runtime.hosted import EpisodeHosts, FailRun

LOOK_AFTER_S = 0.5


class Fronts(Protocol):
    """The fronts that serve agents, and the way in which they reach the run."""

    async def start(self) -> str:
        """Returns where they serve agents. Raises `GatewayError`, if that is not to be had."""
        ...

    async def aclose(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentsWiring:
    """What agents may ask for, and who serves them. `base_url` makes agents' URL of where that is, and `ready` is told
    it. Chats, if there are any, wait for spare credit for `chat_wait_s`. `env_workers` play the trajectories, where
    nobody elsewhere does."""

    limits: AgentLimits
    make_fronts: Callable[[Doorkeeper], Fronts]
    chats: ChatLimits | None = None
    chat_wait_s: float = 60.0
    base_url: Callable[[str], str] = lambda served: served
    ready: Callable[[str], None] = lambda _: None
    env_workers: EnvWorkersOrder | None = None


class AgentService:
    def __init__(
        self,
        doorkeeper: Doorkeeper,
        rollouts: AgentRollouts,
        durable: Callable[[Callable[[], None]], None],
        stopped: Callable[[], bool],
        wiring: AgentsWiring,
        metrics: RunMetrics | None = None,
        chats: Chats | None = None,
        secrets: RunSecrets | None = None,
        fail: FailRun | None = None,
    ) -> None:
        self._rollouts = rollouts
        self._chats = chats
        self._wiring = wiring
        self._streams = FrontStreams(rollouts, durable, stopped, metrics, chats, secrets)
        doorkeeper.counterparts.append(self._streams)
        self._fronts = wiring.make_fronts(doorkeeper)
        order = wiring.env_workers
        self._env_workers = None if order is None or fail is None else EnvWorkers(order, self._streams, fail)

    async def start(self) -> str:
        """Start the fronts, and env workers; returns where agents are served. Raises `GatewayError`, if that is not to
        be had."""
        served = await self._fronts.start()
        base_url = self._wiring.base_url(served)
        self._streams.served_at(base_url)
        self._wiring.ready(base_url)
        if self._env_workers is not None:
            await self._env_workers.start()
        return served

    async def look_after(self) -> None:
        """End what has waited for too long, and place what can be, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            if self._chats is not None:
                tasks.create_task(self._chats.look_after(), name="chats")
            while True:
                await asyncio.sleep(LOOK_AFTER_S)
                self._rollouts.look_after()

    async def aclose(self) -> None:
        if self._env_workers is not None:
            await self._env_workers.aclose()
        await self._fronts.aclose()


class HostProcesses(Protocol):
    """The env workers of token-level environments, and the way in which they reach the run."""

    async def start(self) -> None:
        """Raises `GatewayError`, if that way is not to be had."""
        ...

    async def aclose(self) -> None: ...


class ServingHosts:
    """Those env workers as processes. Where the run has no fronts, whose socket they dial, they have one of theirs."""

    def __init__(
        self, order: EnvWorkersOrder, has_fronts: bool, hosts: EpisodeHosts, doorkeeper: Doorkeeper, fail: FailRun
    ) -> None:
        self._hub = None if has_fronts else FrontHub(order.run_dir, doorkeeper)
        self._workers = EnvWorkers(order, hosts, fail)

    async def start(self) -> None:
        try:
            if self._hub is not None:
                await self._hub.start()
            await self._workers.start()
        except OSError as error:
            raise GatewayError(f"the socket of env workers is not to be had: {error.strerror or error}") from error

    async def aclose(self) -> None:
        await self._workers.aclose()
        if self._hub is not None:
            await self._hub.aclose()


class ServingFronts:
    """Fronts as processes, which reach the run by the socket in its directory.

    `command` starts one; `former` is where agents were served by the run's last process.
    """

    def __init__(
        self,
        run_dir: Path,
        config: FrontConfig,
        command: Sequence[str],
        environment: Mapping[str, str],
        former: str,
        doorkeeper: Doorkeeper,
    ) -> None:
        self._config = config
        self._former = former
        self._hub = FrontHub(run_dir, doorkeeper)
        self._processes = FrontProcesses(self._hub, run_dir, command, environment, config.processes)

    async def start(self) -> str:
        config, former = self._config, self._former
        try:
            await self._hub.start()
            former_port = Address.parse(former).port if former else 0
            return await self._processes.start(config.host, config.port, former_port)
        except OSError as error:
            raise GatewayError(
                f"front: cannot serve on {config.host}:{config.port}: {error.strerror or error}"
            ) from error

    async def aclose(self) -> None:
        await self._processes.aclose()
        await self._hub.aclose()
