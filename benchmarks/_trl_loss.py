"""TRL's side of `trainer.py`, by its environment's interpreter: `compute_loss` of its `GRPOTrainer`, and backward."""

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
# A script's own directory comes first on the path, where `vllm.py` would pass for the package of that name.
sys.path[:] = [path for path in sys.path if Path(path).resolve() != HERE]
os.environ["HF_HUB_OFFLINE"] = "1"

import torch  # noqa: E402
from datasets import Dataset  # noqa: E402  # pyright: ignore[reportMissingImports]
from tokenizers import Tokenizer  # noqa: E402
from tokenizers.models import WordLevel  # noqa: E402
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast  # noqa: E402
from trl import GRPOConfig, GRPOTrainer  # noqa: E402  # pyright: ignore[reportMissingImports]


def trainer_of(model: Path, directory: str) -> Any:
    words = Tokenizer(WordLevel({"<pad>": 0, "<end>": 1, "a": 2}, unk_token="<pad>"))
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
        processing_class=PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<end>"),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        train_dataset=Dataset.from_dict({"prompt": ["a", "a"]}),
        args=GRPOConfig(
            output_dir=directory,
            per_device_train_batch_size=8,
            num_generations=8,
            steps_per_generation=1,
            epsilon=0.2,
            epsilon_high=0.28,
            delta=3.0,
            beta=0.0,
            loss_type="dapo",
            gradient_checkpointing=False,
            report_to=[],
            use_cpu=True,
            bf16=False,
            disable_tqdm=True,
        ),
    )
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    return trainer


def inputs_of(
    batch: list[dict[str, Any]], advantages: list[float], total: int, prompt_tokens: int
) -> dict[str, torch.Tensor]:
    longest = max(len(one["logprobs"]) for one in batch)

    def padded(rows: list[list[float]], dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows], dtype=dtype)

    prompts = torch.tensor([one["ids"][:prompt_tokens] for one in batch])
    return {
        "prompt_ids": prompts,
        "prompt_mask": torch.ones_like(prompts),
        "completion_ids": padded([one["ids"][prompt_tokens:] for one in batch], torch.int64),
        "completion_mask": padded([[1] * len(one["logprobs"]) for one in batch], torch.int64),
        "old_per_token_logps": padded([one["logprobs"] for one in batch], torch.float32),
        "advantages": torch.tensor(advantages),
        "num_items_in_batch": torch.tensor(float(total)),
    }


def main() -> None:
    given = json.loads(Path(sys.argv[1], "batch.json").read_text())
    torch.set_num_threads(given["threads"])
    batch = given["batch"]
    rewards = torch.tensor([one["reward"] for one in batch])
    advantages = ((rewards - rewards.mean()) / (rewards.std() + 1e-6)).tolist()
    total = sum(len(one["logprobs"]) for one in batch)
    with tempfile.TemporaryDirectory() as directory:
        trainer = trainer_of(Path(sys.argv[1]), directory)
        for order in sys.stdin:
            size, loss = int(order), 0.0
            begun_s, cpu_s = time.perf_counter(), time.process_time()
            for begin in range(0, len(batch), size):
                inputs = inputs_of(
                    batch[begin : begin + size], advantages[begin : begin + size], total, given["prompt_tokens"]
                )
                found = trainer.compute_loss(trainer.model, inputs)
                found.backward()
                loss += found.item()
            took = {"seconds": time.perf_counter() - begun_s, "cpu_s": time.process_time() - cpu_s}
            trainer.model.zero_grad(set_to_none=True)
            print(json.dumps({**took, "loss": loss}), flush=True)


if __name__ == "__main__":
    main()
