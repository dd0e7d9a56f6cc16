"""An executor with two models of different layers, key heads, head size and dtype, and what came out of it."""

import threading
from collections.abc import Callable, Sequence

import pytest
import torch

from elastic.config import EngineConfig
from elastic.core.device_sharing import AdmissionPolicy, ServingView
from elastic.core.types import FinishReason, WeightMode
from elastic.engine.base import GenerateRequest, TokenChunk
from elastic.engine.coserving.executor import CoServing
from elastic.engine.coserving.memory import SPARE_PAGES
from elastic.engine.coserving.rollout import SharedRolloutEngine
from elastic.engine.coserving.runner import PagedRunner
from elastic.engine.coserving.spec import ModelSpec
from elastic.engine.kv.backends import mappable_page_bytes, open_backend
from elastic.engine.kv.slab import SlabBackend
from elastic.engine.kv.vmm import VmmBackend
from elastic.engine.model.checkpoint import model_tensors
from elastic.engine.model.config import Qwen3Config
from elastic.engine.model.qwen3 import Qwen3
from elastic.weights.source import TensorSource
from policies.admission import NoAdmission
from policies.kvmemory import PreemptiveMemory

TIMEOUT_S = 30.0
PAGE_BYTES = 16 * 1024
SERVING = Qwen3Config(
    num_hidden_layers=3, num_key_value_heads=1, head_dim=16, hidden_size=64, intermediate_size=128, vocab_size=256
)
ROLLOUT = Qwen3Config(num_hidden_layers=2, initializer_range=0.15)


def weights_of(config: Qwen3Config, seed: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    return {name: tensor.bfloat16() for name, tensor in model_tensors(Qwen3(config)).items()}


def load(
    rollout: SharedRolloutEngine, version: int, mode: WeightMode = WeightMode.FINISH, seed: int | None = None
) -> None:
    """Put a version of the rollout model in force, by default with weights of its number."""
    tensors = weights_of(ROLLOUT, version if seed is None else seed)
    rollout.load_version(TensorSource(version, tensors), mode)


def raising(error: Exception) -> Callable[..., None]:
    def fail(*_: object) -> None:
        raise error

    return fail


class Chunks:
    """A sink that can be waited on."""

    def __init__(self) -> None:
        self.all: list[TokenChunk] = []
        self._changed = threading.Condition()

    def __call__(self, chunks: Sequence[TokenChunk]) -> None:
        with self._changed:
            self.all.extend(chunks)
            self._changed.notify_all()

    def until(self, condition: Callable[[], bool]) -> None:
        with self._changed:
            assert self._changed.wait_for(condition, TIMEOUT_S), f"waited in vain; last: {self.all[-3:]}"

    def begun(self, request_id: str | None = None) -> None:
        """Wait for the first tokens, of this request or of any."""
        self.until(lambda: any(request_id in (None, c.request_id) and c.token_ids for c in self.all))

    def end(self, request_id: str) -> TokenChunk | None:
        return next((c for c in self.all if c.request_id == request_id and c.finish is not None), None)

    def finish(self, *request_ids: str) -> list[TokenChunk]:
        self.until(lambda: all(self.end(request_id) for request_id in request_ids))
        return [end for request_id in request_ids if (end := self.end(request_id))]

    def tokens(self, request_id: str) -> list[int]:
        return [token for c in self.all if c.request_id == request_id for token in c.token_ids]


class WatchedRunner(PagedRunner):
    """One whose steps a test looks at, or lets fail: `before[step]` is called first, `piece` being one of weights."""

    patch_piece = 64

    def __init__(self, *arguments) -> None:
        self.before: dict[str, Callable[[], object]] = {}
        super().__init__(*arguments)

    def _step(self, name: str) -> None:
        self.before.get(name, lambda: None)()

    def forward(self, work):
        self._step("forward")
        return super().forward(work)

    def scrub_cache(self, keep: bool) -> None:
        self._step("scrub_cache")
        super().scrub_cache(keep)

    def loading(self, tensors):
        self._step("loading")
        return self._pieces(super().loading(tensors))

    def applying(self, patch):
        return self._pieces(super().applying(patch))

    def _pieces(self, pieces):
        while True:
            self._step("piece")
            try:
                next(pieces)
            except StopIteration:
                return
            yield


class SwitchedAdmission:
    """Admits as `policy` does, which a test changes."""

    def __init__(self, policy: AdmissionPolicy) -> None:
        self.policy = policy

    def allowance_ns(self, view: ServingView) -> int:
        return self.policy.allowance_ns(view)


class Device:
    """A shared device under test. `runner` is what computes for rollouts."""

    def __init__(self, executor: CoServing, admission: SwitchedAdmission) -> None:
        self.executor = executor
        self.admission = admission
        self.runner: WatchedRunner
        self.served = Chunks()
        self.rolled = Chunks()
        self.executor.start(self.served, weights_of(SERVING, 0))

    @property
    def serving(self):
        return self.executor.serving

    def attach(self, **settings) -> SharedRolloutEngine:
        """Lends the device to a run that has brought no weights yet."""
        rollout = self.executor.attach(rollout_spec(**settings)._replace(runner=self._watched))
        rollout.start(self.rolled)
        return rollout

    def _watched(self, *arguments) -> WatchedRunner:
        self.runner = WatchedRunner(*arguments)
        return self.runner

    def lend(self, version: int = 1, **settings) -> SharedRolloutEngine:
        rollout = self.attach(**settings)
        load(rollout, version)
        return rollout

    def serve(self, *requests: GenerateRequest) -> list[TokenChunk]:
        """The ends of requests that are served now."""
        self.serving.submit(requests)
        return self.served.finish(*(request.request_id for request in requests))

    def roll(self, *requests: GenerateRequest) -> list[TokenChunk]:
        """The ends of turns that are rolled out now."""
        assert self.executor.rollout is not None
        self.executor.rollout.submit(requests)
        return self.rolled.finish(*(request.request_id for request in requests))

    def check_serves(self, *requests: GenerateRequest) -> None:
        """Serving answers these in full."""
        assert {end.finish for end in self.serve(*requests)} == {FinishReason.LENGTH}

    def check_pages(self) -> None:
        """No page or block is lost or in two places, and the engines stay within their budget."""
        executor = self.executor
        with executor.changed:
            executor.memory.pages.check()
            for engine in (executor.serving, executor.rollout):
                if engine is not None:
                    engine.pool.check()
            statistics = executor.statistics()
        mapped = statistics.serving_pages + statistics.rollout_pages
        assert mapped + executor.memory.pages.free >= executor.memory.usable
        assert statistics.rollout_pages <= statistics.budget.pages


def serving_spec(**settings) -> ModelSpec:
    settings = {"device": "cpu", "max_context_tokens": 256, "prefill_chunk_tokens": 256, **settings}
    return ModelSpec(SERVING, EngineConfig.model_validate(settings), torch.float32)


def rollout_spec(**settings) -> ModelSpec:
    settings = {"device": "cpu", "max_context_tokens": 256, "prefill_chunk_tokens": 64, **settings}
    return ModelSpec(ROLLOUT, EngineConfig.model_validate(settings), torch.bfloat16)


@pytest.fixture(scope="session")
def profiles(tmp_path_factory):
    return tmp_path_factory.mktemp("profiles")


@pytest.fixture
def make_device(profiles, host_driver):
    devices: list[Device] = []

    def make(
        pages: int = 62,
        admission=NoAdmission(),  # noqa: B008
        memory=PreemptiveMemory(),  # noqa: B008
        serving=None,
        vmm: bool = False,
        on: str = "cpu",
        **settings,
    ) -> Device:
        total = pages + SPARE_PAGES
        if on == "cpu":
            backend = VmmBackend(total, PAGE_BYTES, on, host_driver()) if vmm else SlabBackend(total, PAGE_BYTES)
        else:
            backend = open_backend(total, mappable_page_bytes(PAGE_BYTES, on), on)
        # On a loaded host nothing may take so long that it counts as a stall, unless that is the test.
        settings = {"profiles": profiles, "stall_timeout_ns": 60_000_000_000, **settings}
        switched = SwitchedAdmission(admission)
        executor = CoServing(serving or serving_spec(), backend, switched, memory, **settings)
        devices.append(Device(executor, switched))
        return devices[-1]

    yield make
    for device in devices:
        device.executor.close()


@pytest.fixture(scope="session")
def spec_of_rollouts():
    return rollout_spec


@pytest.fixture(scope="session")
def spec_of_serving():
    return serving_spec


@pytest.fixture(scope="session")
def rollout_weights():
    return lambda version: weights_of(ROLLOUT, version)


@pytest.fixture(scope="session")
def serving_weights():
    return weights_of(SERVING, 0)
