"""What the engines' conformance suite needs, as pytest fixtures: engines, weights on a relay, and requests.

A third party's engine, once its entry point is installed, passes the suite from one file of its own:

    from elastic.testing.conformance import *
    from elastic.testing.engines import *

    @pytest.fixture(params=[EngineUnderTest("warp")])
    def engine_under_test(request):
        return request.param
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from elastic.config import EngineConfig
from elastic.core.types import SamplingParameters
from elastic.engine import create_engine
from elastic.engine.base import GenerateRequest, RolloutEngine
from elastic.engine.model.checkpoint import model_tensors
from elastic.engine.model.config import Qwen3Config
from elastic.engine.model.qwen3 import Qwen3
from elastic.system.installed import installed
from elastic.testing.recorder import Recorder
from elastic.weights.directory import DirectoryRelay
from elastic.weights.publisher import publish_keyframe
from elastic.weights.signing import SigningKey
from elastic.weights.source import RelaySource

__all__ = [
    "EngineUnderTest",
    "installed_engines",
    "kept_engines",
    "make_engine",
    "model",
    "published",
    "turn",
    "weights",
]

CONFIG = Qwen3Config(num_hidden_layers=2, initializer_range=0.15)
KEPT_AT_MOST = 2


@dataclass(frozen=True)
class EngineUnderTest:
    """How the suite gets engines of a kind, and what their kind can do.

    `settings` are keys of `[engine]` that it needs everywhere. With `kept` an engine that one test has left goes on to
    the next that asks for the same settings: for kinds that take long to start.
    """

    kind: str
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])
    create: Callable[[Mapping[str, Any], EngineConfig], RolloutEngine] = create_engine
    kept: bool = False
    timeout_s: float = 30.0
    block_tokens: int = 8
    """A size of KV blocks that it can have."""
    spare_blocks: int = 0
    """KV blocks that the engine never gives to a turn."""
    tolerance: float = 2e-4
    """How far a log-probability may be from that of the same model in float32."""
    has_pacing: bool = True
    waits_for_sink: bool = True
    """It generates nothing before the sink has returned; else what it goes on with is given to the sink later."""

    def start(self, settings: Mapping[str, Any]) -> Recorder:
        """An engine without weights."""
        if not self.has_pacing:
            settings = {key: value for key, value in settings.items() if key != "pacing"}
        found = {"kind": self.kind, "device": "cpu", "max_context_tokens": 256, **self.settings, **settings}
        engine = self.create(CONFIG.to_dict(), EngineConfig.model_validate(found))
        return Recorder(engine, self.timeout_s)


def installed_engines() -> list[str]:
    """The kinds of all engines that this environment has, third parties' included."""
    return sorted(installed("elastic.engines"))


class KeptEngines:
    """Engines that rest between two tests: the few that were used last."""

    def __init__(self) -> None:
        self._resting: list[tuple[str, Recorder]] = []
        self._uses = 0

    @property
    def next_use(self) -> int:
        self._uses += 1
        return self._uses

    def take(self, key: str) -> Recorder | None:
        for index, (found, recorder) in enumerate(self._resting):
            if found == key:
                del self._resting[index]
                return recorder
        return None

    def keep(self, key: str, recorder: Recorder) -> None:
        if not recorder.rest():
            recorder.close()
            return
        self._resting.append((key, recorder))
        while len(self._resting) > KEPT_AT_MOST:
            self._resting.pop(0)[1].close()

    def close(self) -> None:
        for _, recorder in self._resting:
            recorder.close()


@pytest.fixture(scope="session")
def kept_engines() -> Iterator[KeptEngines]:
    kept = KeptEngines()
    yield kept
    kept.close()


@pytest.fixture
def make_engine(
    engine_under_test: EngineUnderTest, kept_engines: KeptEngines, published: Callable[..., RelaySource]
) -> Iterator[Callable[..., Recorder]]:
    """Makes an engine with the weights of seed 1 as version 1 (without any where `version` is None)."""
    made: list[tuple[str, Recorder]] = []

    def make(version: int | None = 1, **settings: Any) -> Recorder:
        key = f"{engine_under_test.kind} {sorted(settings.items())}"
        recorder = kept_engines.take(key) if version is not None else None
        if recorder is None:
            recorder = engine_under_test.start(settings)
        made.append((key, recorder))
        if version is not None:
            # A kept engine's come from a run of their own, so that nothing of the test before is of use.
            run = f"use {kept_engines.next_use}" if engine_under_test.kept else "run"
            recorder.load(published(version, run=run))
        return recorder

    yield make
    for key, recorder in made:
        if engine_under_test.kept:
            kept_engines.keep(key, recorder)
        else:
            recorder.close()


@pytest.fixture(scope="session")
def model() -> Callable[..., Qwen3]:
    """A small model by seed, the same for the same seed."""
    made: dict[int, Qwen3] = {}

    def of(seed: int = 0) -> Qwen3:
        if seed not in made:
            torch.manual_seed(seed)
            made[seed] = Qwen3(CONFIG)
            made[seed].load_state_dict({name: t.bfloat16() for name, t in made[seed].state_dict().items()})
        return made[seed]

    return of


@pytest.fixture(scope="session")
def weights(model: Callable[..., Qwen3]) -> Callable[..., dict[str, torch.Tensor]]:
    """The tensors of the model of a seed, in bfloat16, by the names of Hugging Face checkpoints."""
    return lambda seed=0: model_tensors(model(seed))


@pytest.fixture(scope="session")
def published(
    weights: Callable[..., dict[str, torch.Tensor]], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., RelaySource]:
    """Puts a version on a relay, as a keyframe of the weights of the seed of its number or of `tensors`; says where."""
    relay, key = tmp_path_factory.mktemp("relay"), SigningKey()
    there: set[tuple[str, int]] = set()

    def publish(version: int, tensors: dict[str, torch.Tensor] | None = None, run: str = "run") -> RelaySource:
        if (run, version) not in there:
            tensors = weights(version) if tensors is None else tensors
            publish_keyframe(DirectoryRelay(relay / run), run, version, tensors, CONFIG.to_dict(), key)
            there.add((run, version))
        return RelaySource(run=run, version=version, relay=str(relay / run), publisher=key.public)

    return publish


@pytest.fixture(scope="session")
def turn() -> Callable[..., GenerateRequest]:
    """A request with the test's own fields over defaults; its prompt is a function of its name."""

    def make(name: str, prompt: int | list[int] = 20, **fields: Any) -> GenerateRequest:
        if isinstance(prompt, int):
            prompt = [(7 * index + sum(name.encode())) % CONFIG.vocab_size for index in range(prompt)]
        drawn: dict[str, Any] = {"max_new_tokens": 12, "noise_seed": sum(name.encode()) << 50}
        drawn |= {key: fields.pop(key) for key in SamplingParameters.__struct_fields__ if key in fields}
        defaults: dict[str, Any] = {
            "request_id": name,
            "token_ids": prompt,
            "start": 0,
            "sampling": SamplingParameters(**drawn),
        }
        return GenerateRequest(**{**defaults, **fields})

    return make
