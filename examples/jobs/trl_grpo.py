"""TRL's `GRPOTrainer` as its users write it, on a tiny model that is made here. It knows nothing of a pool.

    python examples/jobs/trl_grpo.py
    elastic jobs submit examples/jobs/script.toml --phases examples/jobs/trl_phases.toml -- \
        .cache/trl/bin/python examples/jobs/trl_grpo.py
"""

import argparse
import hashlib
import json
from pathlib import Path

import torch
from datasets import Dataset  # pyright: ignore[reportMissingImports]
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportMissingImports]

WORDS = ("<pad>", "<end>", *"abcdefgh")


def tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<pad>"))
    words.pre_tokenizer = WhitespaceSplit()  # type: ignore[assignment]
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<end>", padding_side="left", model_max_length=64
    )


def model() -> Qwen3ForCausalLM:
    config = Qwen3Config(
        vocab_size=len(WORDS),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=64,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    return Qwen3ForCausalLM(config)


def says_a(completions: list[str], **_: object) -> list[float]:
    """The share of words that are `a`."""
    return [completion.split().count("a") / max(1, len(completion.split())) for completion in completions]


def main() -> None:
    parser = argparse.ArgumentParser(description="TRL's GRPOTrainer on a tiny model")
    parser.add_argument("--directory", type=Path, default=Path("runs/trl-grpo"))
    parser.add_argument("--steps", type=int, default=4)
    arguments = parser.parse_args()
    torch.manual_seed(7)
    torch.set_num_threads(1)
    trainer = GRPOTrainer(
        model=model(),
        processing_class=tokenizer(),
        reward_funcs=says_a,
        train_dataset=Dataset.from_dict({"prompt": [" ".join("abcdefgh"[i:]) for i in range(4)]}),
        args=GRPOConfig(
            output_dir=str(arguments.directory),
            max_steps=arguments.steps,
            per_device_train_batch_size=8,
            gradient_accumulation_steps=2,
            num_generations=8,
            max_completion_length=8,
            learning_rate=3e-3,
            save_steps=2,
            logging_steps=1,
            report_to=[],
            use_cpu=True,
            bf16=False,
            disable_tqdm=True,
            seed=7,
        ),
    )
    trainer.train()
    trainer.save_model(str(arguments.directory / "last"))
    rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
    digest = hashlib.sha256()
    for _, weight in sorted(trainer.model.state_dict().items()):
        digest.update(weight.numpy().tobytes())
    print(json.dumps({"rewards": rewards, "policy": digest.hexdigest()[:16]}), flush=True)


if __name__ == "__main__":
    main()
