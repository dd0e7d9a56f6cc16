"""RL-like weight updates to measure on: a Qwen3-shaped model under AdamW on float32 masters.

A few policy-gradient steps settle the optimiser's state; from there one more step is taken at each of several
learning rates, so that every snapshot is the same update seen through another rate. Cached under `.cache/`.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from benchmarks._shapes import SHAPES
from elastic.engine.model.config import Qwen3Config
from elastic.engine.model.qwen3 import Qwen3
from elastic.weights.codecs.base import Bits

CACHE = Path(__file__).resolve().parent.parent / ".cache" / "benchmarks"
CONFIG = Qwen3Config(**SHAPES["61m"])

LEARNING_RATES = {"0.01": 8e-7, "0.03": 2.6e-6, "0.05": 4.6e-6, "0.2": 2.4e-5}
"""Wanted share of changed elements → the rate that gives about that share."""

SETTLING_STEPS = 6
SETTLING_RATE = 1e-6


class Snapshot(NamedTuple):
    """bf16 patterns of the same tensors before and after one step."""

    name: str
    learning_rate: float
    old: dict[str, Bits]
    new: dict[str, Bits]


def snapshots(names: list[str], seed: int = 0) -> Iterator[Snapshot]:
    """The snapshots named by their wanted share, made first if the cache has none."""
    path = CACHE / f"updates-{CONFIG.hidden_size}x{CONFIG.num_hidden_layers}-{SETTLING_STEPS}-{seed}"
    if not (path / "complete").exists():
        _make(path, seed)
    old = _read(path / "old")
    for name in names:
        yield Snapshot(name, LEARNING_RATES[name], old, _read(path / name))


def _make(path: Path, seed: int) -> None:
    torch.manual_seed(seed)
    model = Qwen3(CONFIG)
    optimizer = torch.optim.AdamW(model.parameters(), lr=SETTLING_RATE, betas=(0.9, 0.95), weight_decay=0.0)
    for _ in range(SETTLING_STEPS):
        _step(model, optimizer)
    masters = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    _write(path / "old", masters)
    _step(model, optimizer)
    updates = {name: p.detach() - masters[name] for name, p in model.named_parameters()}
    for name, rate in LEARNING_RATES.items():
        scale = rate / SETTLING_RATE
        _write(path / name, {key: master + scale * updates[key] for key, master in masters.items()})
    (path / "complete").touch()


def _step(model: Qwen3, optimizer: torch.optim.Optimizer) -> None:
    """Policy gradient on sampled tokens: `-(advantage · log-probability)`, half of the samples above average."""
    tokens = torch.randint(0, CONFIG.vocab_size, (4, 32))
    logprobs = torch.log_softmax(model(tokens[:, :-1]).float(), dim=-1)
    taken = logprobs.gather(-1, tokens[:, 1:, None]).squeeze(-1)
    advantages = torch.randn(len(tokens), 1)
    loss = -(advantages * taken).mean()
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def _write(directory: Path, tensors: dict[str, torch.Tensor]) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for name, tensor in tensors.items():
        np.save(directory / f"{name}.npy", tensor.to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16))


def _read(directory: Path) -> dict[str, Bits]:
    return {path.stem: np.load(path) for path in sorted(directory.glob("*.npy"))}
