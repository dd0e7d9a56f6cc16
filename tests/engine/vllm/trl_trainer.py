"""TRL's `AsyncGRPOTrainer`, unmodified, with its own rollout worker, whose weights go to a run by `ElasticWeights`.

    python trl_trainer.py MODEL URL WEIGHTS_ROOT DIRECTORY STEPS

The key is the environment's. `DIRECTORY` has a checkpoint of each step afterwards.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

import os
import sys
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoTokenizer
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer, async_grpo_trainer, packing

from elastic.integrations.trl import KEY_VARIABLE, ElasticWeights

PROMPTS = ["What is the sum of 2 and 3?", "Read the file.", "Is this the right answer?", "Add 4 and 4."]


def varlen(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    query_ends: torch.Tensor,
    key_ends: torch.Tensor,
    *_: Any,
    softmax_scale: float | None = None,
    causal: bool = True,
    **__: Any,
) -> torch.Tensor:
    """What the GPUs' kernel computes: causal attention of each piece, whose queries are the last of its keys."""
    pieces = []
    for (q0, q1), (k0, k1) in zip(pairwise(query_ends.tolist()), pairwise(key_ends.tolist()), strict=True):
        seen = torch.ones(q1 - q0, k1 - k0, dtype=torch.bool).tril(k1 - k0 - (q1 - q0))
        q, k, v = (one.transpose(0, 1) for one in (query[q0:q1], key[k0:k1], value[k0:k1]))
        out = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, seen if causal else None, scale=softmax_scale, enable_gqa=True
        )
        pieces.append(out.transpose(0, 1))
    return torch.cat(pieces)


def variety(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """The reward: how few tokens are said twice."""
    return [len(set(ids)) / len(ids) if ids else 0.0 for ids in completion_ids]


def main(model: str, url: str, root: str, directory: str, steps: str) -> None:
    packing._flash_attn = lambda: SimpleNamespace(flash_attn_varlen_func=varlen)
    async_grpo_trainer.get_peak_flops_per_device = lambda *_: None
    key = os.environ[KEY_VARIABLE]
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = (files("trl") / "chat_templates/qwen3.jinja").read_text()
    trainer = AsyncGRPOTrainer(
        model=model,
        reward_funcs=variety,
        args=AsyncGRPOConfig(
            output_dir=directory,
            max_steps=int(steps),
            per_device_train_batch_size=4,
            gradient_accumulation_steps=1,
            num_generations=4,
            max_completion_length=24,
            token_budget=512,
            learning_rate=1e-3,
            vllm_server_base_url=url.replace("://", f"://run:{key}@"),
            save_strategy="steps",
            save_steps=1,
            save_only_model=True,
            use_cpu=True,
            bf16=False,
            report_to="none",
        ),
        train_dataset=Dataset.from_dict({"prompt": [[{"role": "user", "content": prompt}] for prompt in PROMPTS]}),
        processing_class=tokenizer,
        weight_transfer=ElasticWeights(url, Path(root) / "trl"),
    )
    trainer.train()
    trainer.state.save_to_json(str(Path(directory) / "state.json"))


if __name__ == "__main__":
    main(*sys.argv[1:])
