"""Prepares a process for its work as a worker, before its lease costs anything: imports, compiles and runs everything
once.
"""

import threading
from collections.abc import Sequence
from importlib import import_module

import structlog

from elastic.config import EngineConfig
from elastic.core.types import SamplingParameters, WeightMode
from elastic.engine.base import GenerateRequest, TokenChunk
from elastic.weights.source import TensorSource

log = structlog.get_logger(__name__)

PULLING = ("elastic.weights.puller", "elastic.weights.peer_cache", "elastic.weights.directory", "elastic.weights.http")
TURN_TIMEOUT_S = 60.0


def warm_up(device: str = "auto") -> None:
    """Load what pulls weights, with its decoders, and let an embedded engine on this device say a token: torch loads
    much of itself only then. Takes seconds."""
    for part in PULLING:
        import_module(part)
    from elastic.weights.codecs import warm_up as compile_decoders

    compile_decoders()
    _say_a_token(device)


def _say_a_token(device: str) -> None:
    from elastic.engine.model.checkpoint import model_tensors
    from elastic.engine.model.config import Qwen3Config
    from elastic.engine.model.qwen3 import Qwen3
    from elastic.engine.torch.engine import TorchEngine

    config = Qwen3Config(vocab_size=8, num_hidden_layers=1)
    settings = {"device": device, "max_context_tokens": 16, "kv_blocks": 2}
    engine = TorchEngine(config, EngineConfig.model_validate(settings))
    said = threading.Event()

    def sink(chunks: Sequence[TokenChunk]) -> None:
        said.set()

    engine.start(sink)
    try:
        engine.load_version(TensorSource(0, model_tensors(Qwen3(config))), WeightMode.FINISH)
        request = GenerateRequest(
            request_id="",
            token_ids=[0],
            start=0,
            sampling=SamplingParameters(max_new_tokens=1, stop_token_ids=(), temperature=1.0, noise_seed=0),
        )
        engine.submit([request])
        if not said.wait(TURN_TIMEOUT_S):
            log.warning("not warm: the engine said nothing", timeout_s=TURN_TIMEOUT_S)
    finally:
        engine.close()
