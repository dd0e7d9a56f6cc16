"""One job of a pool: its run's orchestrator, residents and trainer, each a process that the pool has started."""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from elastic.compose.plan import TRAINER_PROVIDER
from elastic.compose.runs import save_run_config
from elastic.config import Config, validate
from elastic.core.types import WorkerId
from elastic.pool.client import PoolClient, PoolMembership
from elastic.protocol import wire
from elastic.protocol.endpoint import Endpoint
from elastic.testing.faults.shell.checker import require
from elastic.testing.faults.shell.loops import Machine
from elastic.testing.faults.shell.models import ModelDevice
from elastic.testing.faults.shell.oracle import ALL
from elastic.testing.faults.shell.pooled.devices import OnDevice, SharingEngine, SharingTrainer
from elastic.testing.faults.shell.pooled.plan import JobShape
from elastic.testing.faults.shell.pooled.processes import KILLED, PairedSocket
from elastic.testing.faults.shell.process import Process
from elastic.testing.faults.shell.stage import Stage
from elastic.testing.faults.shell.world import RELAY_PORT, World, config_of
from elastic.worker.accounts import DeviceAccounts
from elastic.worker.agent import AgentExit, on_termination, run_agent
from elastic.worker.connection import Ticket
from elastic.worker.device_permit import DevicePermit
from elastic.worker.rollout_resident import RolloutResident
from providers.base import ProviderContext
from providers.pool import PoolProvider, PoolSettings, PoolTrainerProvider

if TYPE_CHECKING:
    from elastic.testing.faults.shell.pooled.world import PooledWorld

POOL = "pool"
FOR_EVER_S = 1e6
BOOT_S = 0.1, 1.5
"""Time until a resident is warm, or a trainer dials."""
RESTARTS = 1000
SLO = 10.0
BY_POOL = "pool: "
"""How the reason begins for which a pool stops a run, to go on with it in another place."""
RELAYS_APART = 1000
"""Between the ports of two jobs' relays."""


class JobWorld(World):
    """The world of one job. The pool starts and ends its processes; what befalls its devices is the pool's doing too.

    Acts are not checked for being needless: turns move and workers leave because slices end.
    """

    def __init__(self, shape: JobShape, name: str, number: int, host: "PooledWorld", stage: Stage) -> None:
        self.shape, self.name, self._host = shape, name, host
        self.membership: PoolMembership | None = None
        self.residents: dict[Process, None] = {}
        self.engines: list[SharingEngine] = []
        """The engines of rollout residents."""
        super().__init__(shape.run, stage)
        self.clouds = {}
        self.providers = [POOL]
        self._relay_port = self.relays_from = RELAY_PORT + RELAYS_APART * number
        self.oracle.ails(ALL, FOR_EVER_S)
        save_run_config(self.run.path, self.config)

    def _configured(self) -> Config:
        config = config_of(self.plan).model_dump(mode="json")
        config["providers"] = {POOL: {}}
        config["job"] = {
            "slo": SLO,
            "rollout_nodes": self.shape.nodes,
            "max_restarts": RESTARTS,
            "plan": {"rollout_s": self.shape.rollout_s, "train_s": self.shape.train_s, "sync_s": 0.5},
        }
        return validate(Config, config, "chaos")

    # The orchestrator.

    def begin_as(self, membership: PoolMembership) -> Process:
        """Begin an orchestrator's process, which the pool has started."""
        self.membership = membership
        self.begin_orchestrator()
        assert self.orchestrator is not None
        self.orchestrator.name = f"{self.name} {self.orchestrator.name}"
        return self.orchestrator

    def _begin_again(self, down_s: float) -> None:
        self.gone()

    def gone(self) -> None:
        """Note that there is no orchestrator; the pool starts another one."""
        self.orchestrator = self.shell = None
        self.address = self.relay.url = ""

    @contextlib.asynccontextmanager
    async def _pool(self) -> AsyncIterator[PoolClient | None]:
        assert self.membership is not None
        client = PoolClient(self.membership)
        try:
            await client.open(self.config.run.orchestrator_timeout_s)
            yield client
        finally:
            await client.aclose()

    def _providers(self, context: ProviderContext) -> dict[str, Any]:
        settings = PoolTrainerProvider.Settings.model_validate({"max_workers": 1})
        return {
            TRAINER_PROVIDER: PoolTrainerProvider(TRAINER_PROVIDER, settings, context),
            POOL: PoolProvider(POOL, PoolSettings.model_validate({}), context),
        }

    # Residents.

    def workers(self) -> list[Process]:
        return [process for process in self.residents if process.alive]

    def kill(self, process: Process, *, noticed: bool) -> None:
        self._host.end(process, KILLED)

    def resident(self, node: str, environment: Mapping[str, str], end: Callable[[], PairedSocket]) -> Process:
        """Begin a resident, or the trainer if it is started as a worker."""
        worker = environment.get("ELASTIC_WORKER", "")
        machine, device = Machine(self.clock), ModelDevice(lambda: self.clock.now_ns)

        def place() -> OnDevice:
            return OnDevice(self._host.device(node), process, self.name)

        def engine(_: wire.Welcome) -> SharingEngine:
            made = self._engine(process, partial(SharingEngine, place=place()))
            self.engines += [] if worker else [made]
            return made

        async def work() -> AgentExit:
            await asyncio.sleep(random.uniform(*BOOT_S))
            node_agent = cast(Any, end())
            if not worker:
                leave = asyncio.Event()
                with on_termination(leave.set):
                    named = partial(self.named, process)
                    resident = RolloutResident(engine, intervals=self.intervals, works_as=named)
                    return await resident.run(node_agent, leave)
            make = lambda *known: SharingTrainer(*known, place=place())  # noqa: E731
            host = self._trainer_host(worker, engine, make, shares_device=True)
            return await run_agent(
                self._ticket(environment),
                host.build_engine,
                trainer=host,
                permit=DevicePermit(node_agent),
                accounts=DeviceAccounts(machine.monotonic_ns()),
                intervals=self.intervals,
            )

        process = self.begin_process(worker or f"{self.name} on {node}", machine, work, device)
        self.residents[process] = None
        if worker:
            self._workers[worker] = process
        return process

    def named(self, process: Process, worker: WorkerId) -> None:
        """Note as which worker a resident works now."""
        process.name = worker
        self._workers[worker] = process

    @staticmethod
    def _ticket(environment: Mapping[str, str]) -> Ticket:
        return Ticket(
            endpoint=Endpoint(environment["ELASTIC_JOIN"]),
            run=environment["ELASTIC_RUN"],
            worker=environment["ELASTIC_WORKER"],
            token=environment["ELASTIC_JOIN_TOKEN"],
            wait_s=float(environment["ELASTIC_ORCHESTRATOR_TIMEOUT_S"]),
        )

    # Ends.

    def process_over(self, process: Process, error: BaseException | None) -> None:
        """Note that a process of the job has ended by itself."""
        if process is self.orchestrator:
            result = "" if error is not None else process.main.result()
            self.gone()
            if error is None and not result.startswith(BY_POOL):
                self.result = result
                require(not result, f"the run of {self.name} failed: {result}")
        elif process in self.residents and error is None and process.name in self._workers:
            end: AgentExit = process.main.result()
            if not end.code and process.name in self._hosts:
                self._kept(process.name, self._hosts[process.name])
