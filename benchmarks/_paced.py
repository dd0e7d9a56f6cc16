"""Runs on modelled devices whose steps are measured: real processes, real tokens, speeds as a device would have them.

What a turn says depends on its position in the run alone, so that two runs of the same seed have the same turns of the
same lengths in every step, wherever those are generated; only time differs.
"""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict

from benchmarks._configurations import configuration
from benchmarks._live import LiveRun, live_run
from benchmarks._shapes import write_policy
from elastic.core.policy import StepRecord
from elastic.core.types import NS_PER_S, EndCause, WorkerRole
from elastic.environments.base import StepResult
from elastic.runtime.journal import RunDirectory, TrajectoryRow
from providers import markets
from providers.base import Provider, ProviderContext, ProviderSettings
from providers.markets import LeaseEnding
from providers.processes import LocalProvider

VOCABULARY = 32
READY_TIMEOUT_S = 240.0
STEP_TIMEOUT_S = 120.0


class TaskSettings(BaseModel):
    """`turns` of a task, after a prompt of one of these lengths (each its own kind of task)."""

    prompts: dict[str, int]
    turns: int = 1
    observations: dict[str, int]


class FixedTask:
    """Turns of exactly `max_tokens_per_turn` tokens."""

    Settings: ClassVar[type[BaseModel]] = TaskSettings
    vocabulary: ClassVar[tuple[str, ...]] = ()
    stop_token_ids: ClassVar[tuple[int, ...]] = ()

    def __init__(self, settings: BaseModel) -> None:
        assert isinstance(settings, TaskSettings)
        self._settings = settings
        self._random = random.Random()
        self._turns = 0
        self.tag = ""

    async def reset(self, seed: int) -> list[int]:
        self._random.seed(seed)
        self.tag = self._random.choice(sorted(self._settings.prompts))
        return self._say(self._settings.prompts[self.tag])

    async def step(self, token_ids: list[int]) -> StepResult:
        self._turns += 1
        done = self._turns == self._settings.turns
        return StepResult(self._say(self._settings.observations[self.tag]), done, reward=float(sum(token_ids) % 2))

    async def truncate(self) -> float:
        return 0.0

    async def aclose(self) -> None:
        pass

    def _say(self, count: int) -> list[int]:
        return self._random.choices(range(VOCABULARY), k=count)


class LongTailedTask(FixedTask):
    """Turns that end at random: an untrained policy says one of two stop tokens every sixteen."""

    stop_token_ids: ClassVar[tuple[int, ...]] = (0, 1)


class LimitedSettings(TaskSettings):
    model_config = ConfigDict(arbitrary_types_allowed=True)

    places: asyncio.Semaphore
    """How many episodes run at once; the others wait in `reset`."""


class LimitedTask(FixedTask):
    """No more turns at once than there are places."""

    Settings: ClassVar[type[BaseModel]] = LimitedSettings
    _place: asyncio.Semaphore | None = None

    async def reset(self, seed: int) -> list[int]:
        assert isinstance(self._settings, LimitedSettings)
        await self._settings.places.acquire()
        self._place = self._settings.places
        return await super().reset(seed)

    async def aclose(self) -> None:
        if self._place is not None:
            self._place.release()


@dataclass
class Stock:
    """How many workers a market has; what is taken away from it is killed without notice."""

    size: int
    market: "StockProvider | None" = field(default=None, repr=False)

    def shrink(self, size: int) -> None:
        self.size = size
        assert self.market is not None
        self.market.reclaim()

    def grow(self, size: int) -> None:
        self.size = size
        assert self.market is not None
        self.market.announce()


class StockSettings(ProviderSettings):
    model_config = ConfigDict(arbitrary_types_allowed=True)

    stock: Stock


class StockMarket(markets.Market[StockSettings]):
    def free(self) -> int:
        return max(0, self.settings.stock.size - len(self._held))


class StockProvider(LocalProvider):
    """Workers on this machine that the benchmark takes away and brings back."""

    Settings: ClassVar[type[ProviderSettings]] = StockSettings
    market_type = StockMarket

    def __init__(self, name: str, settings: ProviderSettings, context: ProviderContext) -> None:
        assert isinstance(settings, StockSettings)
        super().__init__(name, settings, context)
        self._stock = settings.stock
        self._stock.market = self

    def reclaim(self) -> None:
        for lease in list(self._leases)[self._stock.size :]:
            self.end(lease, LeaseEnding(EndCause.PREEMPTED, "the market shrinks"))
        self.announce()


@dataclass(frozen=True)
class Devices:
    """Workers of one kind. `engine` has their settings that differ from the run's."""

    workers: int
    engine: Mapping[str, Any] = field(default_factory=dict)


class PacedRun:
    def __init__(self, live: LiveRun, run_dir: Path, stocks: Mapping[str, Stock]) -> None:
        self.live = live
        self.stocks = stocks
        self._run_dir = run_dir

    @property
    def history(self) -> list[StepRecord]:
        return self.live.orchestrator.scheduler.history

    async def workers(self, count: int) -> None:
        """Waits until `count` workers are ready beside the trainer's device."""
        await self.live.until(f"{count} workers ready", lambda: len(self._helpers()) >= count, READY_TIMEOUT_S)

    def now_s(self) -> float:
        return self.live.orchestrator.now_ns() / NS_PER_S

    def loaded(self, count: int) -> bool:
        """Whether so many workers are at work on turns."""
        return sum(bool(worker.turns) for worker in self._helpers()) >= count

    async def steps(self, count: int) -> list[StepRecord]:
        """The next `count` steps that begin after now."""
        first = len(self.history) + 1
        await self.live.until(
            f"{count} steps", lambda: len(self.history) >= first + count, STEP_TIMEOUT_S * (count + 1)
        )
        return self.history[first : first + count]

    def _helpers(self) -> list[Any]:
        return [worker for worker in self.live.ready() if worker.role is not WorkerRole.TRAINER]

    def tokens(self, steps: set[int]) -> int:
        """Tokens that the policy said in these steps. For after the run."""
        with RunDirectory(self._run_dir).newest_journal() as journal:
            return sum(row.policy_tokens for row in journal.rows(TrajectoryRow) if row.step in steps)


@contextlib.asynccontextmanager
async def paced_run(
    directory: Path,
    name: str,
    devices: Mapping[str, Devices],
    task: type[FixedTask],
    task_settings: TaskSettings,
    kind: str,
    *,
    seed: int,
    **sections: Any,
) -> AsyncIterator[PacedRun]:
    """A run of steps without end on such devices, of this kind of configuration with these sections."""
    policy = directory / "policy"
    if not policy.exists():
        write_policy(policy)
    kinds, run = ("all-capacity", "patient", "many-steps", kind), {"name": name, "seed": seed}
    config = configuration(*kinds, policy=policy, run=run, **sections)
    stocks = {kind: Stock(some.workers) for kind, some in devices.items()}
    providers: dict[str, tuple[type[Provider], ProviderSettings]] = {
        kind: (StockProvider, _settings(some, stocks[kind])) for kind, some in devices.items()
    }
    run_dir = directory / name
    async with live_run(config, run_dir, providers, task, task_settings) as live:
        yield PacedRun(live, run_dir, stocks)


def _settings(devices: Devices, stock: Stock) -> StockSettings:
    return StockSettings(
        max_workers=devices.workers,
        usd_per_gpu_hour=1.0,
        gpus_per_worker=1,
        engine=dict(devices.engine),
        stock=stock,
    )
