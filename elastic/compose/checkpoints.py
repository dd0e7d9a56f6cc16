"""A run's checkpoints, and the policies in them."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from elastic.config import Config
from elastic.runtime.states import CHECKPOINTS
from elastic.worker.trainer import resolve_trainer
from elastic.worker.trainer.base import remove_saved, saved

if TYPE_CHECKING:
    from torch import Tensor


def checkpoints(run_dir: Path) -> list[Path]:
    """The trainer's, oldest first; the names are their steps."""
    return saved(run_dir / CHECKPOINTS)


def discard_checkpoint(run_dir: Path, version: int) -> None:
    """Have no checkpoint of this version. Raises `OSError`."""
    for path in checkpoints(run_dir):
        if int(path.stem) == version:
            remove_saved(path)


def policy_of(config: Config, checkpoint: Path) -> "Iterator[tuple[str, Tensor]]":
    """Yield a checkpoint's policy, under the names and in the shapes of the base policy's files.

    Raises `ConfigError` for a trainer that is not installed, and `elastic.engine.model.stored.CheckpointError`.
    """
    kind, settings = resolve_trainer(config.trainer, "the run's configuration")
    yield from kind.exported(config, settings, checkpoint)


def adapter_of(config: Config, checkpoint: Path) -> "dict[str, Tensor]":
    """A checkpoint's adapter to the base policy, under the names of peft's files and for a scale of 1; empty where
    whole models are trained. Raises as `policy_of` does."""
    kind, settings = resolve_trainer(config.trainer, "the run's configuration")
    return kind.exported_adapter(config, settings, checkpoint)
