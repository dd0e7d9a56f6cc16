"""The embedded engine, with a runner that tests watch."""

from collections.abc import Callable

import pytest

from elastic.config import EngineConfig
from elastic.engine.model.config import Qwen3Config
from elastic.engine.torch.engine import TorchEngine
from elastic.engine.torch.runner import Runner
from elastic.testing.engines import EngineUnderTest


class WatchedRunner(Runner):
    """Calls `before` with the step that comes: a forward pass, or a table that is put on the device."""

    def __init__(self, *arguments) -> None:
        super().__init__(*arguments)
        self.before: Callable[[str], object] = lambda step: None

    def forward(self, work):
        self.before("forward")
        return super().forward(work)

    def _put(self, name, *parts):
        self.before("put")
        return super()._put(name, *parts)


class WatchedEngine(TorchEngine):
    runner: WatchedRunner

    def __init__(self, model_config, config: EngineConfig) -> None:
        super().__init__(Qwen3Config.from_dict(model_config), config, make_runner=self._watched)

    def _watched(self, *arguments) -> WatchedRunner:
        self.runner = WatchedRunner(*arguments)
        return self.runner


@pytest.fixture
def engine_under_test() -> EngineUnderTest:
    return EngineUnderTest("torch", create=WatchedEngine)


@pytest.fixture
def make_torch_engine(make_engine):
    return make_engine
