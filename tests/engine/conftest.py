"""What a `RolloutEngine` needs to be tested: a factory to parametrise by, weights, and a recording sink."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from elastic.config import EngineConfig
from elastic.core.types import WeightMode
from elastic.engine import create_engine
from elastic.engine.base import GenerateRequest, RolloutEngine, TokenChunk
from elastic.engine.coserving.executor import CoServing
from elastic.engine.coserving.memory import SPARE_PAGES
from elastic.engine.coserving.rollout import RolloutHalf
from elastic.engine.coserving.spec import ModelSpec
from elastic.engine.kv.slab import SlabBackend
from elastic.model.checkpoint import model_tensors
from elastic.model.config import Qwen3Config
from elastic.model.qwen3 import Qwen3
from policies.coexecution import NoAdmission
from policies.kvmemory import PreemptiveMemory

TIMEOUT_S = 30.0
CONFIG = Qwen3Config(num_hidden_layers=2, initializer_range=0.15)


class Recorder:
    """An engine under test with everything that came out of it. While held, the sink does not return."""

    def __init__(self, engine: RolloutEngine) -> None:
        self.engine = engine
        self.chunks: list[TokenChunk] = []
        self._changed = threading.Condition()
        self._open = threading.Event()
        self._open.set()
        self._threads = ThreadPoolExecutor()
        self._failing: str | None = None
        self.on_chunks: Callable[[], None] = lambda: None
        engine.start(self._sink)

    def _sink(self, chunks: Sequence[TokenChunk]) -> None:
        self.on_chunks()
        with self._changed:
            self.chunks.extend(chunks)
            self._changed.notify_all()
        self._open.wait(TIMEOUT_S)
        if any(chunk.request_id == self._failing for chunk in chunks):
            raise ConnectionError("nobody takes this")

    def hold(self) -> None:
        self._open.clear()

    def release(self) -> None:
        self._open.set()

    def fail_on(self, request_id: str) -> None:
        """The sink raises whenever a chunk of this request is in what it was given."""
        self._failing = request_id

    def until(self, condition: Callable[[], bool]) -> None:
        with self._changed:
            assert self._changed.wait_for(condition, TIMEOUT_S), f"waited in vain; last chunks: {self.chunks[-3:]}"

    def until_tokens(self, request_id: str, count: int) -> None:
        self.until(lambda: len(self.tokens(request_id)) >= count)

    def finish(self, *request_ids: str) -> None:
        self.until(lambda: all(self.end(request_id) for request_id in request_ids))

    def run(self, *requests: GenerateRequest) -> list[list[int]]:
        self.engine.submit(requests)
        self.finish(*(request.request_id for request in requests))
        return [self.tokens(request.request_id) for request in requests]

    def aside(self, call: Callable, *args):
        """Run a blocking call of the engine on another thread; its result is awaited with a time limit."""
        future = self._threads.submit(call, *args)
        return lambda: future.result(TIMEOUT_S)

    def of(self, request_id: str) -> list[TokenChunk]:
        return [chunk for chunk in self.chunks if chunk.request_id == request_id]

    def end(self, request_id: str) -> TokenChunk | None:
        return next((chunk for chunk in self.of(request_id) if chunk.finish is not None), None)

    def tokens(self, request_id: str) -> list[int]:
        return [token for chunk in self.of(request_id) for token in chunk.token_ids]

    def logprobs(self, request_id: str) -> list[float]:
        return [logprob for chunk in self.of(request_id) for logprob in chunk.logprobs]

    def versions(self, request_id: str) -> list[int]:
        return [chunk.weights_version for chunk in self.of(request_id) for _ in chunk.token_ids]

    def check(self, request: GenerateRequest) -> None:
        """The stream's own invariants: gapless from `start`, a log-probability a token, one end, at the end."""
        chunks = self.of(request.request_id)
        position = request.start
        for chunk in chunks:
            assert chunk.start == position
            assert len(chunk.token_ids) == len(chunk.logprobs)
            assert all(logprob <= 0 for logprob in chunk.logprobs)
            position += len(chunk.token_ids)
        assert [chunk.finish is not None for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
        assert not any(chunk.cached_tokens or chunk.prefilled_tokens for chunk in chunks[1:])

    def close(self) -> None:
        self.release()
        self.engine.close()
        self._threads.shutdown()


@pytest.fixture(scope="session")
def model():
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
def weights(model):
    return lambda seed=0: model_tensors(model(seed))


class _Sole:
    """A rollout half with which its executor ends."""

    def __init__(self, executor: CoServing, half: RolloutHalf) -> None:
        self._executor = executor
        self._half = half

    def __getattr__(self, name: str):
        return getattr(self._half, name)

    def close(self) -> None:
        self._half.close()
        self._executor.close()


@pytest.fixture(scope="session")
def cost_profiles(tmp_path_factory):
    return tmp_path_factory.mktemp("profiles")


@pytest.fixture
def lend_device(weights, cost_profiles):
    """Makes the rollout half of a device whose serving model has nothing to do."""
    executors: list[CoServing] = []

    def lend(model_config, settings: EngineConfig):
        rollout = ModelSpec(Qwen3Config.from_dict(model_config), settings, torch.float32)
        layout = rollout.layout(page_bytes=1 << 20)
        # A page holds a block, so that there is as much memory as the settings say.
        backend = SlabBackend(settings.kv_blocks + SPARE_PAGES, layout.block_bytes)
        serving = ModelSpec(CONFIG, settings.model_copy(update={"max_context_tokens": 16}), torch.float32)
        executor = CoServing(
            serving, backend, NoAdmission(), PreemptiveMemory(headroom_share=0), profiles=cost_profiles
        )
        executors.append(executor)
        executor.start(lambda chunks: None, weights())
        return _Sole(executor, executor.attach(rollout))

    yield lend
    for executor in executors:
        executor.close()


@pytest.fixture(params=["torch", "coserving"])
def make_engine(request, weights, lend_device):
    """Makes an engine of each kind with the weights of seed 1 as version 1 (unless `version` is None)."""
    made: list[Recorder] = []

    def make(version: int | None = 1, **settings) -> Recorder:
        settings = {"kind": request.param, "device": "cpu", "max_context_tokens": 256, **settings}
        engine_settings = EngineConfig.model_validate(settings)
        create = lend_device if request.param == "coserving" else create_engine
        recorder = Recorder(create(CONFIG.to_dict(), engine_settings))
        made.append(recorder)
        if version is not None:
            recorder.engine.load_weights(version, weights(version), WeightMode.FINISH)
        return recorder

    yield make
    for recorder in made:
        recorder.close()


@pytest.fixture(scope="session")
def turn():
    """A request with the test's own fields over defaults; its prompt is a function of its name."""

    def make(name: str, prompt: int | list[int] = 20, **fields) -> GenerateRequest:
        if isinstance(prompt, int):
            prompt = [(7 * index + sum(name.encode())) % CONFIG.vocab_size for index in range(prompt)]
        defaults = {
            "request_id": name,
            "token_ids": prompt,
            "start": 0,
            "max_new_tokens": 12,
            "stop_token_ids": (),
            "temperature": 1.0,
            "noise_seed": sum(name.encode()) << 50,
        }
        return GenerateRequest(**{**defaults, **fields})

    return make
