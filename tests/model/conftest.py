import pytest
import torch

from elastic.engine.model.config import Qwen3Config
from elastic.engine.model.qwen3 import Qwen3


@pytest.fixture
def make_model():
    """A model whose weights are exact in bfloat16 and large enough for logits to differ."""

    def make(seed: int = 0, **fields) -> Qwen3:
        torch.manual_seed(seed)
        model = Qwen3(Qwen3Config(initializer_range=0.1, **fields))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "norm" in name:
                    parameter.copy_(1 + 0.2 * torch.randn_like(parameter))
                parameter.copy_(parameter.bfloat16())
        return model

    return make
