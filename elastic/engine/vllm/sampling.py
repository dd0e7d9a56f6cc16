"""The noise of each turn in vLLM's sampler: a pure function of (noise seed, position, token id), as everywhere.

A logits processor, which changes no logits, keeps what vLLM tells of its batch; the sampler's last stage adds that
noise to the logits that temperature, top-k and top-p have left, and takes the largest. A token's log-probability
remains that of the distribution before the noise.
"""

# pyright: reportMissingImports=false

from typing import Any, NamedTuple

import torch
from torch import Tensor
from vllm.sampling_params import SamplingParams
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

from elastic.engine.torch.sampling import gumbel_noise, signed_seed

ARGUMENT = "elastic"
"""The key in vLLM's `extra_args` under which a request brings its seed and the position of its first token."""


class _Row(NamedTuple):
    signed_seed: int
    start: int
    output: list[int]
    """vLLM's own list of generated tokens, which grows."""


class NoiseRows(LogitsProcessor):
    """Which seed and which position each row of the batch has. One in each of vLLM's workers."""

    current: "NoiseRows"

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self._device = device
        self._rows: dict[int, _Row] = {}
        NoiseRows.current = self

    def is_argmax_invariant(self) -> bool:
        return True

    def apply(self, logits: Tensor) -> Tensor:
        return logits

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        process_dict_updates(self._rows, batch_update, _row)

    def noise(self, rows: int, vocab_size: int) -> Tensor:
        """[rows, vocab_size] in float64; a row without a turn, as in vLLM's own dry runs, has that of seed 0."""
        absent = _Row(0, 0, [])
        known = [self._rows.get(row, absent) for row in range(rows)]
        seeds = torch.tensor([row.signed_seed for row in known], device=self._device)
        positions = torch.tensor([row.start + len(row.output) for row in known], device=self._device)
        return gumbel_noise(seeds, positions, vocab_size)


def _row(params: SamplingParams, prompt: list[int] | None, output: list[int]) -> _Row | None:
    brought = (params.extra_args or {}).get(ARGUMENT)
    return None if brought is None else _Row(signed_seed(brought[0]), brought[1], output)


class NoisySampler(torch.nn.Module):
    """In the place of vLLM's `TopKTopPSampler`."""

    def forward(
        self, logits: Tensor, generators: Any, k: Tensor | None, p: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        logits = apply_top_k_top_p(logits, k, p)
        logprobs = logits.log_softmax(-1, dtype=torch.float32)
        noise = NoiseRows.current.noise(*logits.shape)
        return torch.add(logits, noise).argmax(-1), logprobs


def sampled_alone(logprobs: Tensor, num_logprobs: int, token_ids: Tensor) -> LogprobsTensors:
    """In the place of vLLM's `gather_logprobs`, which also ranks tokens, by code that it compiles for seconds."""
    rows = token_ids.unsqueeze(-1)
    return LogprobsTensors(rows.to(torch.int32), logprobs.gather(-1, rows), torch.zeros_like(token_ids))


def install(sampler: Any) -> None:
    """Makes vLLM's `Sampler` draw with our noise, and report the log-probability of the token drawn."""
    sampler.topk_topp_sampler = NoisySampler()
    sampler.gather_logprobs = sampled_alone
