"""Live runs small enough for tests: a tiny random policy, an environment that rewards chance, real processes.

The gateway is tested on both event loops: their transports differ where it matters to it.
"""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import psutil
import pytest
import torch
import uvloop
from pydantic import BaseModel

from elastic.compose.execution import RunOutcome, execute
from elastic.compose.plan import ChosenEnvironment, resolve
from elastic.compose.runs import new_run_dir
from elastic.config import Config
from elastic.core.scheduler import Scheduler
from elastic.core.types import WorkerState
from elastic.engine.model.checkpoint import model_tensors, write_checkpoint
from elastic.engine.model.config import Qwen3Config
from elastic.engine.model.qwen3 import Qwen3
from elastic.environments.base import StepResult
from elastic.runtime.journal import JournalReader, RunDirectory
from elastic.runtime.orchestrator import Orchestrator

TINY = Qwen3Config(
    vocab_size=16,
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
)


@pytest.hookimpl
def pytest_asyncio_loop_factories(item: pytest.Item) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    asyncio_alone: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {"asyncio": asyncio.new_event_loop}
    return (
        asyncio_alone | {"uvloop": uvloop.new_event_loop}
        if item.path.name in ("test_gateway.py", "test_tls.py")
        else asyncio_alone
    )


class NoSettings(BaseModel):
    pass


class Parity:
    """Three turns; rewarded when the policy's tokens add up to an even number."""

    TURNS = 3
    Settings: ClassVar[type[BaseModel]] = NoSettings
    vocabulary: ClassVar[tuple[str, ...]] = tuple("abcdefghijklmnop")
    stop_token_ids: ClassVar[tuple[int, ...]] = (0,)

    def __init__(self, settings: BaseModel) -> None:
        self.turns = 0
        self.total = 0

    async def reset(self, seed: int) -> list[int]:
        return [1 + seed % 7, 1 + seed % 5, 2]

    async def step(self, token_ids: list[int]) -> StepResult:
        self.turns += 1
        self.total += sum(token_ids)
        done = self.turns == self.TURNS
        return StepResult([3, 4], done, float(done and self.total % 2 == 0))

    async def truncate(self) -> float:
        """A hundredth for each turn."""
        return self.turns / 100

    async def aclose(self) -> None:
        pass


def gated(base: type, gate: asyncio.Event) -> type:
    class Gated(base):
        async def reset(self, seed: int) -> list[int]:
            await gate.wait()
            return await super().reset(seed)

    return Gated


class LiveRun(msgspec.Struct):
    """A run that has ended: what it left, and its scheduler as it was at the end."""

    run_dir: Path
    outcome: RunOutcome
    scheduler: Scheduler
    kills: int

    def journal(self) -> JournalReader:
        return RunDirectory(self.run_dir).newest_journal()


class Killer:
    """Kills `count` spot workers while they have turns. The first turn waits until as many are there (`gate`)."""

    def __init__(self, run_dir: Path, count: int) -> None:
        self.killed: list[str] = []
        self.gate = asyncio.Event()
        self._run_dir, self._count = run_dir, count

    async def hunt(self, scheduler: Scheduler) -> None:
        while len(self.killed) < self._count:
            workers = scheduler.fleet.workers.values()
            ready = [w for w in workers if w.provider == "spot" and w.state is WorkerState.READY]
            if len(ready) >= self._count:
                self.gate.set()
            for worker in ready:
                if worker.turns and worker.id not in self.killed:
                    self.killed.append(worker.id)
                    os.kill(self._pid(worker.lease), signal.SIGKILL)
            await asyncio.sleep(0.01)

    def _pid(self, lease: str) -> int:
        record = msgspec.json.decode((self._run_dir / "leases" / f"{lease}.json").read_bytes())
        return next(iter(record["processes"].values()))["pid"]


class HostKiller(Killer):
    """Kills the first of two serving hosts, once the workers of both have turns."""

    async def hunt(self, scheduler: Scheduler) -> None:
        while not self.killed:
            workers = scheduler.fleet.workers.values()
            ready = [w for w in workers if w.provider == "serving" and w.state is WorkerState.READY]
            if len(ready) == 2:
                self.gate.set()
                if all(worker.turns for worker in ready):
                    self.killed.append("serving-host-0")
                    os.kill(self._pid("serving-host-0"), signal.SIGKILL)
            await asyncio.sleep(0.01)


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tiny") / "checkpoint"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        write_checkpoint(directory, TINY, model_tensors(Qwen3(TINY)))
    return directory


@pytest.fixture
def live_config(tiny_checkpoint: Path, tmp_path: Path) -> Callable[..., Config]:
    """A small run's configuration; sections are given as dictionaries and merged."""

    def make(**sections: Mapping[str, Any]) -> Config:
        raw: dict[str, dict[str, Any]] = {
            "run": {"steps": 2, "seed": 5, "directory": str(tmp_path / "runs"), "name": "live"},
            "model": {"checkpoint": str(tiny_checkpoint)},
            "environment": {"step_timeout_s": 120.0},
            "rollout": {"groups": 4, "group_size": 4, "max_turns": 4, "max_tokens_per_turn": 24},
            "trainer": {"checkpoint_every_steps": 1, "updates_per_step": 1},
            "seeding": {"window_s": 0.0, "reserved_engines": 8},
            "engine": {
                "max_batch": 4,
                "max_pending": 2,
                "max_context_tokens": 128,
                "pacing": {"prefill_tokens_per_s": 8000, "decode_step_s": {1: 0.03, 4: 0.03}},
            },
            "scheduler": {"retry_base_s": 0.2, "resume_timeout_s": 1.0},
            "providers": {
                "reserved": {"max_workers": 0},
                "spot": {"trace": str(_steady_market(tmp_path)), "max_workers": 2, "usd_per_gpu_hour": 2.0},
                "serving": {"hosts": 1, "max_workers": 1},
            },
        }
        for name, section in sections.items():
            raw[name] = raw.get(name, {}) | section
        return Config.model_validate(raw)

    return make


def _steady_market(directory: Path) -> Path:
    path = directory / "steady.csv"
    path.write_text("time_s,event,instance_id\n0,add,a\n0,add,b\n86400,remove,a\n")
    return path


@pytest.fixture
async def live(live_config: Callable[..., Config]) -> AsyncIterator[Callable[..., Any]]:
    """Carries out a run to its end; no process of it may be alive then."""
    names: list[str] = []

    async def run(
        config: Config,
        providers: tuple[str, ...],
        environment: type = Parity,
        kills: int = 0,
        hunter: type[Killer] = Killer,
        provider_types: Mapping[str, type] | None = None,
    ) -> LiveRun:
        plan = resolve(config, providers, "test")
        plan = msgspec.structs.replace(plan, provider_types={**plan.provider_types, **(provider_types or {})})
        run_dir = new_run_dir(config)
        names.append(run_dir.name)
        killer = hunter(run_dir, kills)
        if kills:
            environment = gated(environment, killer.gate)
        played = ChosenEnvironment(config=config.mixture[0], kind=environment, settings=NoSettings())
        plan = msgspec.structs.replace(plan, environments=(played,))
        ready: asyncio.Future[Orchestrator] = asyncio.get_running_loop().create_future()
        running = asyncio.create_task(execute(plan, run_dir, on_ready=ready.set_result))
        async with asyncio.timeout(240):
            scheduler = (await ready).scheduler
            hunting = asyncio.create_task(killer.hunt(scheduler))
            try:
                outcome = await running
            finally:
                running.cancel()
                hunting.cancel()
                await asyncio.wait([running, hunting])
        return LiveRun(run_dir, outcome, scheduler, len(killer.killed))

    yield run
    assert [process for name in names for process in processes_of(name)] == []


def processes_of(run: str) -> Iterator[psutil.Process]:
    """Living processes that are tagged as a run's."""
    for process in psutil.process_iter():
        try:
            if process.status() != psutil.STATUS_ZOMBIE and process.environ().get("ELASTIC_RUN") == run:
                yield process
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue


@pytest.fixture
def host_killer() -> type[Killer]:
    return HostKiller


@pytest.fixture
def parity() -> type[Parity]:
    return Parity
