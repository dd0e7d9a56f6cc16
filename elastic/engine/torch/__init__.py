"""The embedded engine: continuous batching over a paged KV cache in plain torch, replayable on the CPU."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from elastic.config import EngineConfig
from elastic.engine.base import DeviceShare, EngineKind, EngineSettings
from elastic.system.imports import importing

if TYPE_CHECKING:
    from elastic.engine.torch.engine import TorchEngine

__all__ = ["Torch"]


class Torch(EngineKind):
    """The entry point (`elastic.engine.base.EngineKind`). It has no settings beside those of every engine."""

    Settings: ClassVar = EngineSettings

    @staticmethod
    def unfit(model_config: Mapping[str, Any]) -> str:
        from elastic.engine.model.config import ModelConfigError, Qwen3Config

        try:
            Qwen3Config.from_dict(model_config)
        except ModelConfigError as error:
            return str(error)
        return ""

    @staticmethod
    def create(
        model_config: Mapping[str, Any],
        config: EngineConfig,
        settings: EngineSettings,
        share: DeviceShare | None = None,
        devices: Sequence[int] = (),
    ) -> "TorchEngine":
        """Raises `ModelConfigError` for a `config.json` that is not a supported Qwen3 model."""
        if devices:
            raise ValueError("engine.kind: 'torch' is where engine.device says; on several devices: 'vllm'")
        with importing():
            from elastic.engine.model.config import Qwen3Config
            from elastic.engine.torch.engine import TorchEngine

        return TorchEngine(Qwen3Config.from_dict(model_config), config, share)
