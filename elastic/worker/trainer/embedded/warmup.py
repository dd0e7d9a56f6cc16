"""The base policy: a short supervised warm-up on demonstrations, so that rewards are not all zero at first."""

import hashlib
import json
import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor
from torch.nn import functional as F

from elastic.engine.model.checkpoint import model_tensors, write_checkpoint
from elastic.engine.model.config import Qwen3Config
from elastic.engine.model.qwen3 import Qwen3
from elastic.environments.frozenlake import FrozenLakeSettings
from elastic.environments.frozenlake_demonstrations import Demonstration, DemonstrationSettings, demonstrate
from elastic.worker.trainer.adamw import AdamW

RECIPE_VERSION = 1
"""To be raised when the same settings would give other weights, so that no cache keeps the old ones."""

_IGNORED = -100

Progress = Callable[[int, int, float], None]
"""Called after each step with (steps done, steps in all, loss)."""


class WarmupSettings(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    seed: int = Field(default=0, ge=0, lt=2**32)
    steps: int = Field(default=350, ge=1)
    batch_size: int = Field(default=32, ge=1, description="demonstrations a step")
    learning_rate: float = Field(default=4e-3, gt=0)
    learning_rate_rise_steps: int = Field(default=10, ge=0)
    learning_rate_final_share: float = Field(default=0.1, ge=0, le=1, description="of the peak, by a half cosine")
    gradient_clip: float = Field(default=1.0, gt=0)
    threads: int = Field(default=1, ge=1, description="two wait for each other where cores are shared")
    lake: FrozenLakeSettings = FrozenLakeSettings()
    demonstrations: DemonstrationSettings = DemonstrationSettings()


def cache_key(settings: WarmupSettings, model: Qwen3Config) -> str:
    """A name for the policy that these settings give; equal for equal settings."""
    recipe = [RECIPE_VERSION, settings.model_dump(mode="json", exclude={"threads"}), model.to_dict()]
    return hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()[:16]


def warm_up(settings: WarmupSettings, model_config: Qwen3Config, directory: Path, progress: Progress) -> None:
    """Train a fresh model to imitate demonstrations and write it as a Hugging Face checkpoint to `directory`.

    Deterministic by `settings.seed` on one machine. Raises `CheckpointError` where it cannot be written.
    """
    imitate(settings, model_config, _batches(settings), directory, progress)


def sampled_batches(settings: WarmupSettings, demonstrations: Sequence[Demonstration]) -> Iterator[list[Demonstration]]:
    """Batches of demonstrations that there are, drawn with replacement."""
    rng = random.Random(settings.seed)
    for _ in range(settings.steps):
        yield rng.choices(demonstrations, k=settings.batch_size)


def imitate(
    settings: WarmupSettings,
    model_config: Qwen3Config,
    batches: Iterable[Sequence[Demonstration]],
    directory: Path,
    progress: Progress,
) -> None:
    """As `warm_up`, on these batches, one a step."""
    with _seeded(settings.seed, settings.threads):
        model = Qwen3(model_config)
        optimizer = AdamW(model.parameters())
        for step, batch in enumerate(batches):
            loss = imitation_loss(model, batch)
            model.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(optimizer.parameters, settings.gradient_clip)
            gradients = [parameter.grad for parameter in optimizer.parameters if parameter.grad is not None]
            optimizer.step(gradients, _learning_rate(settings, step))
            progress(step + 1, settings.steps, loss.item())
    write_checkpoint(directory, model_config, model_tensors(model))


def imitation_loss(model: Qwen3, demonstrations: Sequence[Demonstration]) -> Tensor:
    """Mean cross-entropy over the policy's own tokens."""
    lengths = torch.tensor([len(demonstration.token_ids) for demonstration in demonstrations])
    token_ids = torch.zeros(len(demonstrations), int(lengths.max()), dtype=torch.int64)
    targets = torch.full_like(token_ids, _IGNORED)
    for row, demonstration in enumerate(demonstrations):
        ids, trained = torch.tensor(demonstration.token_ids), torch.tensor(demonstration.trained, dtype=torch.bool)
        token_ids[row, : len(ids)] = ids
        targets[row, : len(ids)] = ids.where(trained, _IGNORED)
    logits = model(token_ids, lengths)
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), targets[:, 1:].flatten(), ignore_index=_IGNORED)


def _batches(settings: WarmupSettings) -> Iterator[list[Demonstration]]:
    """Every demonstration on a map of its own."""
    rng = random.Random(settings.seed)
    for _ in range(settings.steps):
        yield [
            demonstrate(settings.lake, settings.demonstrations, rng.getrandbits(63), rng)
            for _ in range(settings.batch_size)
        ]


def _learning_rate(settings: WarmupSettings, step: int) -> float:
    rise = min(1.0, (step + 1) / max(1, settings.learning_rate_rise_steps))
    cosine = (1 + math.cos(math.pi * step / settings.steps)) / 2
    final = settings.learning_rate_final_share
    return settings.learning_rate * rise * (final + (1 - final) * cosine)


@contextmanager
def _seeded(seed: int, threads: int) -> Iterator[None]:
    """torch's generator and thread count for a while; the caller's own come back after."""
    threads_before = torch.get_num_threads()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        torch.set_num_threads(threads)
        try:
            yield
        finally:
            torch.set_num_threads(threads_before)
