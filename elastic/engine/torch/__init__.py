"""The embedded engine: continuous batching over a paged KV cache in plain torch, replayable on the CPU."""

from collections.abc import Mapping
from typing import Any

from elastic.config import EngineConfig
from elastic.engine.base import DeviceShare
from elastic.engine.torch.engine import TorchEngine
from elastic.model.config import Qwen3Config

__all__ = ["TorchEngine", "create"]


def create(model_config: Mapping[str, Any], settings: EngineConfig, share: DeviceShare | None = None) -> TorchEngine:
    """The entry point. Raises `ModelConfigError` for a `config.json` that is not a supported Qwen3 model."""
    return TorchEngine(Qwen3Config.from_dict(model_config), settings, share)
