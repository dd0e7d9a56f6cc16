"""A run whose trainer is the real one, on a tiny model, with a device of its own or by a node agent's permit."""

import asyncio
from pathlib import Path
from typing import Any, Self

import torch

from elastic.config import Config
from elastic.protocol import wire
from elastic.testing.trajectories import PlainTrajectory
from elastic.weights.codecs import warm_up
from elastic.weights.relay import open_relay
from elastic.weights.signing import Trust
from elastic.worker.agent import AgentExit
from elastic.worker.trainer_host import run_trainer_host
from tests.weights.signed import pull
from tests.worker.conftest import MODEL, PATIENCE_S, Orchestra

GROUPS = 2


def config_of(base: Path, **changes: dict[str, Any]) -> Config:
    """Of a run of this base policy, with changed sections."""
    sections: dict[str, dict[str, Any]] = {
        "run": {"steps": 9},
        "model": {"checkpoint": str(base)},
        "rollout": {"groups": GROUPS, "group_size": 2},
        "trainer": {"updates_per_step": 1, "checkpoint_every_steps": 2, "warmup_updates": 0},
        "engine": {"max_context_tokens": 64, "kv_blocks": 16, "max_batch": 4},
        "weights": {"keep_versions": 3},
    }
    return Config.model_validate({name: section | changes.get(name, {}) for name, section in sections.items()})


class TrainerHouse(Orchestra):
    def __init__(self, config: Config, run_dir: Path, **terms: float) -> None:
        relay = str(run_dir / "weights")
        told: dict[str, Any] = {
            "engine": config.engine.model_dump(mode="json"),
            "model": MODEL.to_dict(),
            "relay": relay,
            "silence_timeout_s": 10.0,
            "orchestrator_timeout_s": PATIENCE_S,
        }
        super().__init__(**told | terms)
        self.relay = open_relay(relay)
        self._config = config
        self.run_dir = run_dir
        self.parts: dict[str, Any] = {}
        """What its hosts are made of besides, by the parameter's name."""

    async def __aenter__(self) -> Self:
        """What a publisher encodes with is compiled before anybody waits for a version of it."""
        warm_up()
        return await super().__aenter__()

    def host(self, worker: str = "w", resume: bool = False) -> asyncio.Task[AgentExit]:
        self.expect(worker, trains=True)
        work = run_trainer_host(self.ticket(worker), self._config, self.run_dir, resume, **self.parts)
        self.agents.append(asyncio.create_task(work))
        return self.agents[-1]

    async def ready(self, resume: bool = False) -> wire.Ready:
        """Start a host, and wait until it is ready."""
        self.host(resume=resume)
        return await self.first(wire.Ready)

    def weights(self, version: int) -> dict[str, torch.Tensor]:
        return pull(self.relay, self.trust, version)

    @property
    def trust(self) -> Trust:
        """In the trainer that said last that it is ready."""
        return Trust(self.run_dir.name, self.of(wire.Ready)[-1].publisher)

    async def step(self, version: int) -> wire.Stepped:
        self.send(*step_of(version))
        return await self.stepped(version)

    async def stepped(self, version: int) -> wire.Stepped:
        await self.until(lambda: any(s.version == version for s in self.of(wire.Stepped)))
        return self.of(wire.Stepped)[-1]

    async def trained(self, version: int, index: int) -> None:
        await self.until(lambda: any(t.group == f"s{version}g{index}" for t in self.of(wire.Trained)))


def step_of(version: int) -> list[wire.FromOrchestrator]:
    """A whole step's orders."""
    return [*(train_group(version, index) for index in range(GROUPS)), wire.UpdateFrame(version, version)]


def train_group(step: int, index: int) -> wire.TrainGroupFrame:
    """Two trajectories of which one was rewarded."""
    trajectories = [
        PlainTrajectory(
            f"s{step}g{index}m{m}", [1, 2, 3, 4 + m, 5], [0, 0, 1, 1, 1], [0, 0, -3, -3, -3], [0] * 5, m
        ).packed()
        for m in range(2)
    ]
    return wire.TrainGroupFrame(step, f"s{step}g{index}", index, trajectories)
