"""An engine: it computes each token from the whole context, with a module of PyTorch and no cache.

Elastic's embedded engine has the rest: a thread, a queue, batches, weights that are pulled and verified, and accounts
of time. It asks a `ModelRunner` for logits, and this is one. An engine that is a program of its own, as vLLM is,
implements `elastic.engine.base.RolloutEngine` instead.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from elastic.config import EngineConfig
from elastic.engine.base import DeviceShare, EngineKind, EngineSettings, RolloutEngine

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from elastic.engine.model.config import Qwen3Config
    from elastic.engine.model.qwen3 import Qwen3
    from elastic.engine.torch.scheduler import Work
    from elastic.weights.source import WeightChanges


class Plain(EngineKind):
    """Any process may import this module. What the engine itself needs is imported by `create` alone."""

    Settings: ClassVar = EngineSettings

    @staticmethod
    def unfit(model_config: Mapping[str, Any]) -> str:
        found = model_config.get("model_type")
        return "" if found == "qwen3" else f"model_type: only 'qwen3' is supported (found {found!r})"

    @staticmethod
    def create(
        model_config: Mapping[str, Any],
        config: EngineConfig,
        settings: EngineSettings,
        share: DeviceShare | None = None,
        devices: Sequence[int] = (),
    ) -> RolloutEngine:
        import msgspec

        from elastic.engine.model.config import Qwen3Config
        from elastic.engine.torch.engine import TorchEngine

        if devices:
            raise ValueError("engine.kind: 'plain' computes on one device; allowed: engine.device")
        engine = TorchEngine(Qwen3Config.from_dict(model_config), config, share, PlainRunner)
        # Turns that run while weights change forget the old ones: nothing is kept that was computed with them.
        engine.capabilities = msgspec.structs.replace(engine.capabilities, engine="plain", replayable_sampling=False)
        return engine


class PlainRunner:
    """A `ModelRunner`. One thread uses it, within `torch.inference_mode`."""

    def __init__(
        self, config: "Qwen3Config", device: "torch.device", max_context: int, kv_blocks: int, block_tokens: int
    ) -> None:
        self._config = config
        self._device = device
        self._model: Qwen3 | None = None

    def verify(self, tensors: Mapping[str, object]) -> "dict[str, Tensor]":
        from torch import Tensor

        from elastic.engine.base import WeightsMismatch
        from elastic.engine.model.stored import misfit, parameter_shapes

        found = {name: tensor for name, tensor in tensors.items() if isinstance(tensor, Tensor)}
        shapes = {name: tuple(tensor.shape) for name, tensor in found.items()}
        if (why := misfit(shapes, parameter_shapes(self._config))) is not None:
            raise WeightsMismatch(why)
        return found

    def patch_of(self, changes: "WeightChanges") -> None:
        """Whole tensors are loaded, even where little has changed."""
        return

    def apply(self, patch: Any) -> None:
        raise AssertionError("there are no patches")

    def load(self, tensors: "Mapping[str, Tensor]") -> None:
        from elastic.engine.model.qwen3 import Qwen3

        if self._model is None:
            self._model = Qwen3(self._config).to(self._device)
        self._model.load_state_dict(tensors, strict=False)  # The head may be the embedding, once more.

    def unload(self) -> None:
        self._model = None

    def forward(self, work: "Sequence[Work]") -> "Tensor":
        """The logits [S, V] of the next token of each sequence that is to get one now."""
        import torch

        assert self._model is not None, "weights are loaded before anything is computed"
        contexts = [item.sequence.tokens for item in work if item.samples]
        rows = [self._model(torch.tensor([tokens], device=self._device))[0, -1] for tokens in contexts]
        return torch.stack(rows).float() if rows else torch.empty(0, self._config.vocab_size)

    @property
    def weight_bytes(self) -> int:
        parameters = () if self._model is None else self._model.parameters()
        return sum(parameter.nbytes for parameter in parameters)

    @property
    def rest_bytes(self) -> int:
        return 0

    def scrub_cache(self, keep: bool) -> None:
        """There is no cache."""

    def free_cache(self) -> None:
        """There is no cache."""
