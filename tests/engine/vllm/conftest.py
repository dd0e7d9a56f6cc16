"""Engines on the real vLLM: few, since each takes most of a minute to start. Without vLLM nothing here is run."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import patch

import pytest
from torch import Tensor

from elastic.config import EngineConfig
from elastic.engine import create_engine
from elastic.testing.recorder import Recorder
from elastic.weights.directory import DirectoryRelay
from elastic.weights.placements import tensor_parallel
from elastic.weights.publisher import Publisher, PublishSettings, TrainerRank
from elastic.weights.sharding import whole
from elastic.weights.signing import SigningKey
from elastic.weights.source import RelaySource
from tests.tiny_models import TINY_MODELS

ROOM = {"max_context_tokens": 256, "kv_block_tokens": 32, "kv_blocks": 128}
START_TIMEOUT_S = 1200.0


@pytest.fixture(scope="module")
def start() -> Iterator[Callable[..., Recorder]]:
    """Starts an engine for a tiny model; all that were started end with the module."""
    started: list[Recorder] = []

    def starting(architecture: str = "qwen3", kernels: str = "", **settings: object) -> Recorder:
        raw = {"kind": "vllm", "vllm": {"start_timeout_s": START_TIMEOUT_S}, **ROOM, **settings}
        config = EngineConfig.model_validate(raw)
        os.environ["KERNELS"] = kernels  # A process that is started anew has them, too.
        engine = create_engine(TINY_MODELS[architecture].config, config)
        started.append(Recorder(engine, timeout_s=START_TIMEOUT_S))
        return started[-1]

    path = os.pathsep.join([str(Path(__file__).parent / "kernels"), os.environ.get("PYTHONPATH", "")])
    with patch.dict(os.environ, PYTHONPATH=path.rstrip(os.pathsep)):
        yield starting
        for recorder in started:
            recorder.close()


class Trainer:
    """Publishes versions of a tiny model in a directory, for engines of so many ranks."""

    def __init__(self, directory: Path, architecture: str, ranks: int = 1) -> None:
        self.model = TINY_MODELS[architecture]
        self.directory = directory
        self._key = SigningKey()
        settings = PublishSettings(keyframe_every=100, merge_every=1)
        shapes = {name: tuple(shape) for name, shape in self.model.shapes.items()}
        (share,) = TrainerRank.of_all([whole(shapes)], tensor_parallel(shapes, ranks))
        relay, share = DirectoryRelay(directory), share if ranks > 1 else None
        self._publisher = Publisher(relay, "run", self.model.config, settings, share, self._key)

    def publish(self, version: int, tensors: dict[str, Tensor]) -> RelaySource:
        self._publisher.publish(version, tensors, [version - 1] if version else [])
        return RelaySource(run="run", version=version, relay=str(self.directory), publisher=self._key.public)


@pytest.fixture
def trainer(tmp_path: Path) -> Callable[..., Trainer]:
    return lambda architecture="qwen3", ranks=1: Trainer(tmp_path / "relay", architecture, ranks)
