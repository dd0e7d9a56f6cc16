"""What a model's own library says of an engine's tokens: `transformers`, in float32, with the same weights."""

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.tiny_models import TinyModel


class Reference:
    """One version of a model in `transformers`."""

    def __init__(self, directory: Path, model: TinyModel, tensors: Mapping[str, Tensor]) -> None:
        from transformers import AutoModelForCausalLM

        directory.mkdir()
        save_file(dict(tensors), directory / "model.safetensors", metadata={"format": "pt"})
        (directory / "config.json").write_text(json.dumps(model.config))
        self._model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()

    @torch.no_grad()
    def logprobs(self, prompt: list[int], tokens: list[int]) -> list[float]:
        """Log-probabilities of the tokens behind the prompt, at temperature 1."""
        logits = self._model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
        of_all = torch.log_softmax(logits.float(), -1)
        return of_all.gather(1, torch.tensor(tokens)[:, None])[:, 0].tolist()
