"""What a live run has for agents: the socket for its fronts, their processes, and the clock of what is waited for."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from elastic.config import FrontConfig
from elastic.protocol.endpoint import Address
from elastic.runtime.agents.hub import FrontHub
from elastic.runtime.agents.limits import AgentLimits
from elastic.runtime.agents.processes import FrontProcesses
from elastic.runtime.agents.rollouts import AgentRollouts
from elastic.runtime.gateway import GatewayError

LOOK_AFTER_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentsWiring:
    """What agents may ask for, and how the fronts are started that serve them; `former` is where they were served.

    `ready` is told where they are served.
    """

    limits: AgentLimits
    front: FrontConfig
    command: Sequence[str]
    environment: Mapping[str, str]
    former: str = ""
    ready: Callable[[str], None] = lambda _: None


class AgentService:
    def __init__(
        self,
        run_dir: Path,
        rollouts: AgentRollouts,
        durable: Callable[[Callable[[], None]], None],
        wiring: AgentsWiring,
    ) -> None:
        self._rollouts = rollouts
        self._wiring = wiring
        self.hub = FrontHub(run_dir, rollouts, durable)
        self._fronts = FrontProcesses(self.hub, run_dir, wiring.command, wiring.environment, wiring.front.processes)

    async def start(self) -> str:
        """Start the fronts; returns where they serve agents. Raises `GatewayError`, if that is not to be had."""
        front, former = self._wiring.front, self._wiring.former
        try:
            await self.hub.start()
            served = await self._fronts.start(front.host, front.port, Address.parse(former).port if former else 0)
        except OSError as error:
            raise GatewayError(
                f"front: cannot serve on {front.host}:{front.port}: {error.strerror or error}"
            ) from error

        self._wiring.ready(served)
        return served

    async def look_after(self) -> None:
        """End what has waited for too long, until cancelled."""
        while True:
            await asyncio.sleep(LOOK_AFTER_S)
            self._rollouts.look_after()

    async def aclose(self) -> None:
        await self._fronts.aclose()
        await self.hub.aclose()
